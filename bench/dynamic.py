"""Inputs of random length under hard caps on one GPU: plans that follow them, plans for the longest, and checkpointing.

    python bench/dynamic.py [--only bert,t5] [--contenders plain,legroom] [--shares 50%,25%] [--settle]
    python bench/dynamic.py --tiny
    python bench/dynamic.py --render bench/results/dynamic.json

All contenders train on the same lengths: BERT-base with batches of 64 and 32 to 512 tokens, T5-base with batches of 16,
sources of 32 to 512 and targets of 16 to 128 tokens, drawn evenly. Budgets are shares of the range from the smallest
peak to the plain peak, both at the longest input, and one above what plain reserves. A budget is a cap on reserved
memory (`torch.cuda.set_per_process_memory_fraction`) for everyone but plain.

    plain       without a cap
    checkpoint  every layer; timed under the smallest cap in which it runs: larger ones change nothing for it
    sublinear   legroom with the planner of that name, the plan for the longest input used for all
    static      the same with `auto`
    legroom     plans follow the input
    needed      what even a plan of its own for each length costs, as modelled: `auto`'s price at some lengths

Each contender has a process, in which its budgets follow one another. There every length has been met once before, in
plain steps without a cap, and checkpointing's own: libraries build kernels for every shape that is new to them, which
took longer than the step (BERT-base on an H200: 130 ms a step in place of 42), and would be paid for by whoever comes
first. So rooms take the timed lengths several times, twice unless `--passes` says otherwise: the first time, when what
is replayed at a new length is held against the real bytes, is told apart, and the last one counts. Time is that of all
timed steps together, from one synchronisation to another, after a warm-up whose recorded steps and seconds are told
apart, too. `--settle` waits before each pass for the plans that are made in the background: one that came in during a
pass is new to the lengths that it is for. A file may hold several runs: what must hold is told of each by itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

# The folder of a script is on the path, not the one above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.nn import functional as F

import legroom
from bench import budget, tables
from bench.arguments import positive
from bench.children import OVER, append_row, out_of_time, run_child
from bench.meters import Meter, at_share, meter_for, rounded_up
from bench.peers import PEERS
from bench.rows import Results, Row, read, write
from bench.verdicts import Verdict
from bench.workloads import Gpt, Workload, bert_at, t5_at, train_step
from legroom.errors import BudgetError, LegroomError
from legroom.evaluate import floor_bytes
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.plan import Plan
from legroom.planners import Planner, named, quick
from legroom.schedule import Schedule
from legroom.simulate import simulate
from legroom.units import format_bytes

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
Sizes = tuple[int, ...]
SHARES = ("75%", "50%", "35%", "25%")
ABOVE, ABOVE_PLAIN = "above", 1.1
CONTENDERS = ("plain", "checkpoint", "sublinear", "static", "legroom")
PLANNED = {"sublinear": "sublinear", "static": "auto"}  # the planners of those that hold one plan
STEPS, WARMUP = 100, 40
LEAST_PASSES = 2
PEER_WARMUP = 4
HELD_SIZES = 5  # drawn ones in the warm-up of a plan that is held, beside the corners
NEEDED_SIZES = 8
# The planner is given a size a little off by its own rounding; any other size is further away.
AS_LONG = 0.995
# What must hold.
FASTER = 1.2
AVOIDED = 0.8
ABOVE_FACTOR = 1.02
LEAST_AVOIDABLE = 0.01  # of a plain step; below that there is nothing to be measured


# streams of inputs


@dataclass(frozen=True, slots=True)
class Stream:
    """A model and the ends of its lengths."""

    label: str
    low: Sizes
    high: Sizes
    make: Callable[[list[Sizes], str], Workload]

    def sizes(self, count: int) -> list[Sizes]:
        """The longest input in front, then the drawn ones, the same for everyone; the other corners at the end."""
        chance = random.Random(0)
        drawn = [tuple(map(chance.randint, self.low, self.high)) for _ in range(count)]
        corners = itertools.product(*zip(self.low, self.high, strict=True))
        return [self.high, *drawn, *(corner for corner in corners if corner != self.high)]


def _bert(sizes: list[Sizes], device: str) -> Workload:
    return bert_at([length for (length,) in sizes], device=device)


def _t5(sizes: list[Sizes], device: str) -> Workload:
    return t5_at([(source, target) for source, target in sizes], device=device)


def _tiny_gpt(sizes: list[Sizes], device: str) -> Workload:
    """Needs no other library, so that it starts at once."""
    longest = max(length for (length,) in sizes)
    model = Gpt(2, 32, 2, 128, longest).to(device)
    ids = torch.randint(128, (4 * longest,), device=device)

    def loss(step: int) -> Tensor:
        (length,) = sizes[step]
        given = ids[: 4 * length]
        return F.cross_entropy(model(given.view(4, length)).flatten(0, 1), given)

    return Workload(model, torch.optim.AdamW(model.parameters(), lr=1e-4), loss, list(model.blocks), varies=True)


def _tiny_t5(sizes: list[Sizes], device: str) -> Workload:
    lengths = [(source, target) for source, target in sizes]
    return t5_at(lengths, batch=4, layers=1, width=32, vocabulary=128, device=device)


STREAMS: dict[str, Stream] = {
    "bert": Stream("BERT-base, batch 64, length 32 to 512", (32,), (512,), _bert),
    "t5": Stream("T5-base, batch 16, source 32 to 512, target 16 to 128", (32, 16), (512, 128), _t5),
    "tiny_gpt": Stream("a tiny GPT", (48,), (160,), _tiny_gpt),
    "tiny_t5": Stream("a tiny T5", (32, 16), (128, 64), _tiny_t5),
}
DEFAULT, TINY = ("bert", "t5"), ("tiny_gpt", "tiny_t5")


class Held:
    """A planner that answers for the longest input alone: what it plans for that serves all."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._longest_bytes = 0

    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        self._longest_bytes = max(self._longest_bytes, trace.peak_bytes)
        if trace.peak_bytes < AS_LONG * self._longest_bytes:
            raise BudgetError(
                f"a step of {format_bytes(trace.peak_bytes)} is not the longest, which takes "
                f"{format_bytes(self._longest_bytes)}: the plan for that one serves it",
                budget_bytes=budget_bytes,
                floor_bytes=0,
            )
        return self._planner(trace, hardware, budget_bytes)


# what a child process does


@dataclass(frozen=True, slots=True)
class Job:
    """One contender on one stream, at all of its budgets."""

    stream: str
    contender: str
    device: str
    steps: int
    warmup: int
    settle: bool
    shares: tuple[str, ...]
    passes: int = LEAST_PASSES
    budgets: Mapping[str, int] = field(default_factory=dict)  # by share; empty for plain, which finds the range
    prices: bool = True  # for plain: what plans for each length cost, which `static` is held against

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        fields = json.loads(text)
        return Job(**{**fields, "shares": tuple(fields["shares"])})


class Run:
    """What contenders have in common: the stream, the model and the clock."""

    def __init__(self, job: Job) -> None:
        torch.manual_seed(0)
        self.job = job
        self.meter: Meter = meter_for(job.device)
        self.sizes = STREAMS[job.stream].sizes(job.warmup + job.steps)
        self.workload = STREAMS[job.stream].make(self.sizes, job.device)
        self.timed = range(1 + job.warmup, 1 + job.warmup + job.steps)

    def meet_all(self, step: Callable[[int], Any]) -> None:
        """Every length once, for the libraries' sake."""
        for number in {sizes: number for number, sizes in enumerate(self.sizes)}.values():
            step(number)
        self.workload.optimizer.zero_grad()
        self.meter.synchronize()
        self.meter.empty()

    def clock(self, step: Callable[[int], Any], row: Row) -> Row:
        meter = self.meter
        meter.reset()
        meter.synchronize()
        began = time.perf_counter()
        marks = [meter.mark()]
        for number in self.timed:
            step(number)
            marks.append(meter.mark())
        meter.synchronize()
        seconds = time.perf_counter() - began
        single = meter.milliseconds(marks)
        allocated, reserved = meter.peaks(None)
        return replace(
            row,
            mean_ms=seconds / len(self.timed) * 1e3,
            median_ms=statistics.median(single),
            steps=len(self.timed),
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            retries=meter.retries(),
            report={**row.report, "steps_ms": [round(ms, 3) for ms in single]},
        )

    def plain(self, emit: Callable[[Row], None]) -> None:
        job = self.job

        def step(number: int) -> Any:
            return train_step(self.workload, number)

        for number in (0, *range(1, PEER_WARMUP)):
            step(number)
        row = self.clock(step, Row(job.stream, "plain", "ok"))
        self.workload.optimizer.zero_grad()
        self.meter.empty()
        trace = self._captured(0)
        floor, peak = floor_bytes(trace), trace.peak_bytes
        limits = {"floor_bytes": floor, "peak_bytes": peak, "gaps": len(trace.gaps)}
        row = replace(row, report={**row.report, **limits})
        emit(row)
        between_them = [share for share in job.shares if share != ABOVE]
        if job.prices:
            emit(self._needed(trace, budgets_of(row, between_them), row.report["steps_ms"]))

    def _captured(self, number: int) -> Trace:
        workload = self.workload
        trace = legroom.capture(
            lambda: train_step(workload, number), model=workload.model, optimizer=workload.optimizer
        )
        self.meter.empty()
        return trace

    def _needed(self, longest: Trace, budgets: Mapping[str, int], plain_ms: list[float]) -> Row:
        """For each budget, how much of a step a plan for its own size costs, over all timed steps."""
        began = time.perf_counter()
        hardware = legroom.probe(self.job.device)
        by_volume = sorted(self.timed, key=lambda number: volume(self.sizes[number]))
        picked = [by_volume[(2 * i + 1) * len(by_volume) // (2 * NEEDED_SIZES)] for i in range(NEEDED_SIZES - 1)]
        traces = {volume(self.sizes[number]): self._captured(number) for number in dict.fromkeys(picked)}
        traces[volume(self.sizes[0])] = longest
        found: dict[str, Any] = {}
        for share, budget_bytes in budgets.items():
            prices = sorted((at, price(trace, hardware, budget_bytes)) for at, trace in traces.items())
            volumes = [volume(self.sizes[number]) for number in self.timed]
            milliseconds = [ms * between(at, prices) for at, ms in zip(volumes, plain_ms, strict=True)]
            found[share] = {"mean_ms": statistics.mean(milliseconds), "prices": [list(p) for p in prices]}
        return Row(self.job.stream, "needed", "ok", report={"needed": found}, wall_seconds=time.perf_counter() - began)

    def checkpoint(self, emit: Callable[[Row], None]) -> None:
        step = PEERS["checkpoint"].make(self.workload)
        self.meet_all(step)  # its first pass, without gradients, takes other kernels
        running: Row | None = None
        for share in sorted(self.job.budgets, key=lambda share: self.job.budgets[share]):
            cap = self.job.budgets[share]
            row = Row(self.job.stream, f"checkpoint@{share}", "ok", cap_bytes=cap)
            if running is None:
                self.meter.empty()
                self.meter.cap(cap)
                try:
                    for number in (0, *range(1, PEER_WARMUP)):
                        step(number)
                    running = row = self.clock(step, row)
                except torch.OutOfMemoryError as error:
                    row = replace(row, status="oom", detail=" ".join(str(error).split())[:300])
                    self.workload.optimizer.zero_grad()
            else:
                row = replace(
                    running, contender=row.contender, cap_bytes=cap, detail=f"as at {format_bytes(running.cap_bytes)}"
                )
            emit(row)

    def room(self, share: str) -> Row:
        """A contender in a room of its own: one that follows, or one that holds a plan."""
        job, meter = self.job, self.meter
        budget_bytes = job.budgets[share]
        held = PLANNED.get(job.contender)
        row = Row(job.stream, f"{job.contender}@{share}", "ok", cap_bytes=budget_bytes)
        meter.empty()
        meter.cap(budget_bytes)
        planner = Held(named(held)) if held else "auto"
        with legroom.fit(self.workload.model, self.workload.optimizer, budget=budget_bytes, planner=planner) as room:
            meter.check_cap(budget_bytes)

            def step(number: int) -> Any:
                with room.step():
                    return train_step(self.workload, number)

            began = time.perf_counter()
            warm: list[tuple[Sizes, float]] = []
            drawn = job.warmup + job.steps
            numbers = held_warmup(drawn, len(self.sizes) - 1 - drawn) if held else range(1, 1 + job.warmup)
            for number in numbers:
                start = time.perf_counter()
                step(number)
                meter.synchronize()
                warm.append((self.sizes[number], time.perf_counter() - start))

            def settle() -> None:
                if (job.settle or held) and room._following is not None:
                    room._following.settle()
                    for number in (0, 0):  # what was planned meanwhile is taken up between steps
                        step(number)

            settle()
            setup_seconds = time.perf_counter() - began
            before = room.report()
            if held and before.planner != held:
                detail = f"{held} has no plan for the longest input at this budget"
                return replace(row, status="budget", detail=detail, setup_seconds=setup_seconds)
            first = self.clock(step, replace(row, setup_seconds=setup_seconds))
            passes = [first]
            if held and room._following is not None:
                # What is learned from a recorded step replaces all plans, and the next one is for another size; and one
                # that was seen to take more than foretold is made again.
                room._following.forget_plans()
                step(0)
            settle()
            recorded = room.report().sheltered_steps
            passes.append(self.clock(step, first))
            while len(passes) < job.passes:
                settle()
                passes.append(self.clock(step, first))
            row = replace(
                passes[-1],
                allocated_bytes=max(each.allocated_bytes for each in passes),
                reserved_bytes=max(each.reserved_bytes for each in passes),
                retries=sum(each.retries for each in passes),
                report={
                    **passes[-1].report,
                    "first_ms": first.mean_ms,
                    "first_steps_ms": first.report["steps_ms"],
                    "passes_ms": [each.mean_ms for each in passes],
                },
            )
            after = room.report()
        row = replace(row, report={**row.report, **self._figures(before, after, warm, row)})
        plans, recorded = row.reported("plans"), after.sheltered_steps - recorded
        if held and (plans != 1 or recorded or after.planner != held):
            planner = f"{plans:.0f} at the end, of {after.planner!r}"
            detail = f"not one plan for all: {planner}, {recorded} timed steps were recorded"
            return replace(row, status="error", detail=detail)
        return row

    def _figures(
        self, before: legroom.Report, after: legroom.Report, warm: list[tuple[Sizes, float]], row: Row
    ) -> dict[str, Any]:
        followed = after.followed
        steps = followed.steps[-len(self.timed) :] if followed is not None else ()
        single = row.report["steps_ms"]
        usual = list(zip(self.timed, single, strict=True))
        if len(steps) == len(usual):
            kinds = [step.course in ("planned", "left alone") and not step.measured_bytes for step in steps]
            usual = [each for each, kind in zip(usual, kinds, strict=True) if kind] or usual
        points = sorted((volume(self.sizes[number]), ms / 1e3) for number, ms in usual)
        return {
            "warmup_steps": len(warm),
            "warmup_seconds": sum(seconds for _, seconds in warm),
            "warmup_extra_seconds": sum(seconds - between(volume(sizes), points) for sizes, seconds in warm),
            "warmup_sheltered": before.sheltered_steps,
            "usual_steps": len(usual),
            "usual_ms": statistics.mean(ms for _, ms in usual),
            "sheltered": after.sheltered_steps - before.sheltered_steps,
            "courses": {name: sum(s.course == name for s in steps) for name in sorted({s.course for s in steps})},
            "structures": followed.structures if followed is not None else 0,
            "plans": followed.plans if followed is not None else 0,
            "hits": followed.hits if followed is not None else 0,
            "misses": followed.misses if followed is not None else 0,
            "evicted": followed.evicted if followed is not None else 0,
            "planning_ms": followed.planning_seconds * 1e3 if followed is not None else 0.0,
            "slow_planning_ms": followed.slow_planning_seconds * 1e3 if followed is not None else 0.0,
            "fallbacks": dict(after.fallbacks),
        }


def budgets_of(plain: Row, shares: Sequence[str]) -> dict[str, int]:
    """In bytes, from the range that plain found."""
    floor, peak = plain.reported("floor_bytes"), plain.reported("peak_bytes")
    return {
        share: rounded_up(ABOVE_PLAIN * max(peak, plain.reserved_bytes))
        if share == ABOVE
        else at_share(share, floor, peak)
        for share in shares
    }


def held_warmup(count: int, corners: int) -> Iterator[int]:
    """Numbers of steps: the corners and some drawn sizes, so that none is met later on of which nothing is known.

    The longest comes again after each: whatever is learned from another size, the first plan is for the longest.
    """
    yield from (0, 0)
    for number in (*range(1 + count, 1 + count + corners), *range(1, 1 + HELD_SIZES)):
        yield from (number, 0)


def volume(sizes: Sizes) -> int:
    """What the time of a step goes by, about."""
    return sum(sizes)


def price(trace: Trace, hardware: Hardware, budget_bytes: int) -> float:
    """Of a plain step, what the best plan known adds to it."""
    if trace.peak_bytes <= budget_bytes:
        return 0.0
    plan = quick(named("auto"))(trace, hardware, budget_bytes)
    return max(0.0, plan.predicted_seconds / simulate(trace, Schedule((), plan.trace_signature), hardware).seconds - 1)


def between(at: float, points: Sequence[tuple[float, float]]) -> float:
    """Between the two points beside it in a straight line, beyond the ends as at the ends. Points are sorted."""
    before = [point for point in points if point[0] <= at]
    after = [point for point in points if point[0] >= at]
    if not before or not after:
        return (before[-1:] or after[:1])[0][1]
    (x0, y0), (x1, y1) = before[-1], after[0]
    return y0 if x0 == x1 else y0 + (at - x0) / (x1 - x0) * (y1 - y0)


def measure(job: Job, emit: Callable[[Row], None]) -> None:
    if job.device == "cpu":
        torch.set_num_threads(1)  # the other cores are for planning in the background
    run = Run(job)
    run.meet_all(lambda number: train_step(run.workload, number))

    def told(row: Row) -> None:
        nonlocal began
        emit(replace(row, wall_seconds=time.perf_counter() - began))
        began = time.perf_counter()

    began = time.perf_counter()
    if job.contender == "plain":
        run.plain(told)
        return
    if job.contender == "checkpoint":
        run.checkpoint(told)
        return
    for share, budget_bytes in job.budgets.items():
        try:
            told(run.room(share))
        except (LegroomError, torch.OutOfMemoryError) as error:
            status = {BudgetError: "budget", torch.OutOfMemoryError: "oom"}.get(type(error), "error")
            detail = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            told(Row(job.stream, f"{job.contender}@{share}", status, detail, cap_bytes=budget_bytes))  # type: ignore[arg-type]
        run.workload.optimizer.zero_grad()


# what must hold


def verdicts(results: Results) -> list[Verdict]:
    """Of each run by itself: hosts of the same kind differ by a third, and so do steps for which they decide."""
    several = len(results.runs) > 1
    return [
        verdict
        for name in results.workloads()
        for run in results.runs_of(name)
        for verdict in _verdicts(f"{name}, run {run}" if several else name, _rows_of(results, name, run))
    ]


def _rows_of(results: Results, name: str, run: int) -> dict[str, Row]:
    """Those of a run; plain is that of an earlier one where it was not asked for again."""
    until = [row for row in results.rows if row.workload == name and row.run <= run]
    return {row.contender: row for row in until if row.run == run or row.contender == "plain"}


def _verdicts(name: str, rows: Mapping[str, Row]) -> Iterator[Verdict]:
    plain = rows.get("plain")
    if plain is None or not plain.ok:
        yield Verdict(name, "plain", None, "plain was not measured")
        return
    ours = {row.contender.partition("@")[2]: row for row in rows.values() if row.contender.startswith("legroom@")}
    for share, row in ours.items():
        if share == ABOVE:
            yield _above(name, row, plain)
            continue
        for peer in ("checkpoint", "sublinear"):
            yield _faster(name, share, row, peer, rows.get(f"{peer}@{share}"))
        yield _avoided(name, share, row, rows.get(f"static@{share}"), plain, rows.get("needed"))
    bad = [row.contender for row in ours.values() if row.status == "oom" or row.reserved_bytes > row.cap_bytes]
    counted = [row for row in ours.values() if row.reserved_bytes or row.status == "oom"]
    if ours:
        met = not bad if counted else None  # a CPU has no cap
        yield Verdict(name, "never above the cap", met, ", ".join(bad) or f"{len(counted)} budgets")


def _did_not_run(name: str, claim: str, row: Row) -> Verdict:
    if out_of_time(row):
        return Verdict(name, claim, None, OVER)
    return Verdict(name, claim, False, f"{row.status}: {row.detail[:80]}")


def _above(name: str, row: Row, plain: Row) -> Verdict:
    claim = f"above the plain peak at most {ABOVE_FACTOR} × plain"
    if not row.ok:
        return _did_not_run(name, claim, row)
    factor = row.mean_ms / plain.mean_ms
    return Verdict(name, claim, factor <= ABOVE_FACTOR, f"{row.mean_ms:.1f} / {plain.mean_ms:.1f} ms = {factor:.3f}")


def _faster(name: str, share: str, row: Row, peer: str, other: Row | None) -> Verdict:
    claim = f"at {share} {FASTER - 1:.0%} faster than {peer}"
    if other is None or other.status not in ("ok", "oom", "budget"):
        return Verdict(name, claim, None, "not measured" if other is None else other.status)
    if not row.ok:
        return _did_not_run(name, claim, row)
    if not other.ok:
        return Verdict(name, claim, True, f"{row.mean_ms:.1f} ms, {peer} does not run there ({other.status})")
    factor = other.mean_ms / row.mean_ms
    return Verdict(name, claim, factor >= FASTER, f"{other.mean_ms:.1f} / {row.mean_ms:.1f} ms = {factor:.2f}")


def _avoided(name: str, share: str, row: Row, static: Row | None, plain: Row, needed: Row | None) -> Verdict:
    claim = f"at {share} {AVOIDED:.0%} of static's avoidable overhead gone"
    if static is None or not static.ok or needed is None or share not in _prices(needed):
        return Verdict(name, claim, None, "not measured")
    if not row.ok:
        return _did_not_run(name, claim, row)
    least_ms = plain.mean_ms + _prices(needed)[share]
    avoidable_ms = static.mean_ms - least_ms
    figures = (
        f"static {static.mean_ms:.1f}, legroom {row.mean_ms:.1f}, plain {plain.mean_ms:.1f} ms, needed {least_ms:.1f}"
    )
    if avoidable_ms < LEAST_AVOIDABLE * plain.mean_ms:
        return Verdict(name, claim, None, f"nothing to avoid: {figures}")
    gone = (static.mean_ms - row.mean_ms) / avoidable_ms
    whole = (static.mean_ms - row.mean_ms) / (static.mean_ms - plain.mean_ms)
    return Verdict(name, claim, gone >= AVOIDED, f"{gone:.0%} (of all overhead {whole:.0%}): {figures}")


def _prices(needed: Row) -> dict[str, float]:
    """Milliseconds by share, of those that are: a report is whatever a file says."""
    found = needed.report.get("needed")
    priced = found.items() if isinstance(found, dict) else ()
    means = {share: price.get("mean_ms") for share, price in priced if isinstance(price, dict)}
    return {share: float(mean) for share, mean in means.items() if isinstance(mean, (int, float))}


# as text and as files

_HEAD = (
    "contender",
    "ms",
    "overhead",
    "first time",
    "cap GiB",
    "peak",
    "reserved",
    "warm-up s",
    "sheltered",
    "extra steps",
    "planning ms",
    "notes",
)
_WORDS = (0, 11)
_VERDICT_HEAD = ("stream", "claim", "", "figures")


def _lines(results: Results, name: str) -> list[tuple[str, ...]]:
    several = len(results.runs) > 1
    return [
        _cells(row, _rows_of(results, name, row.run).get("plain"), several=several)
        for row in results.rows
        if row.workload == name and row.contender != "needed"
    ]


def _cells(row: Row, plain: Row | None, *, several: bool) -> tuple[str, ...]:
    """several: runs that rows are of."""
    cap = _gib(row.cap_bytes)
    notes = [f"run {row.run}"] if several else []
    if not row.ok:
        notes.append(" ".join(row.detail.split())[:120])
        return (row.contender, row.status, "", "", cap, *[""] * 6, "; ".join(notes))
    based = plain is not None and plain.ok
    figure = row.reported
    notes += [row.detail] if row.detail else []
    passes = row.report.get("passes_ms")
    if isinstance(passes, list) and all(isinstance(ms, float) for ms in passes[1:-1]) and passes[1:-1]:
        notes.append(f"passes between: {', '.join(f'{ms:.1f}' for ms in passes[1:-1])} ms")
    courses = row.report.get("courses")
    if isinstance(courses, dict):
        notes.append(", ".join(f"{count} {course}" for course, count in courses.items()))
        notes.append(f"{figure('hits'):.0f} hits, {figure('misses'):.0f} misses, {figure('plans'):.0f} plans")
    if figure("usual_steps") and figure("usual_steps") < row.steps:
        notes.append(f"{figure('usual_ms'):.1f} ms in the {figure('usual_steps'):.0f} neither recorded nor measured")
    fallbacks = row.report.get("fallbacks")
    if isinstance(fallbacks, dict):
        notes += [f"fallback: {what}: {count}" for what, count in fallbacks.items()]
    warm = "warmup_seconds" in row.report
    extra = figure("warmup_extra_seconds") / plain.mean_ms * 1e3 if based and plain is not None else 0.0
    return (
        row.contender,
        f"{row.mean_ms:.1f}",
        f"{row.mean_ms / plain.mean_ms - 1:+.1%}" if based and plain is not None else "",
        f"{figure('first_ms'):.1f}" if "first_ms" in row.report else "",
        cap,
        _gib(row.allocated_bytes),
        _gib(row.reserved_bytes),
        f"{figure('warmup_seconds'):.1f}" if warm else "",
        f"{figure('warmup_sheltered'):.0f} + {figure('sheltered'):.0f}" if warm else "",
        f"{extra:.1f}" if warm else "",
        f"{figure('planning_ms'):.2f} / {figure('slow_planning_ms'):.2f}" if warm else "",
        "; ".join(notes),
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f}" if nbytes >= GIB / 10 else format_bytes(nbytes) if nbytes else ""


def _verdict_lines(results: Results) -> list[tuple[str, ...]]:
    return [(v.workload, v.claim, v.word, v.figures) for v in verdicts(results)]


def _label(name: str) -> str:
    return STREAMS[name].label if name in STREAMS else name


def table(results: Results) -> str:
    blocks = [f"{_label(n)}\n{tables.text(_HEAD, _lines(results, n), words=_WORDS)}" for n in results.workloads()]
    return "\n\n".join([*blocks, tables.text(_VERDICT_HEAD, _verdict_lines(results), words=(0, 1, 2, 3))])


def page(results: Results) -> str:
    out = ["# Random lengths under hard caps", "Written by `python bench/dynamic.py`, whose head tells the contenders."]
    for number, conditions in enumerate(results.runs):
        told = ", ".join(f"{key} {value}" for key, value in conditions.items() if key != "command")
        out += [f"Run {number}: {told}", f"```console\n$ {conditions.get('command', '')}\n```"]
    out += ["## What must hold", tables.markdown(_VERDICT_HEAD, _verdict_lines(results), words=(0, 1, 2, 3))]
    for name in results.workloads():
        out += [f"## {_label(name)}", tables.markdown(_HEAD, _lines(results, name), words=_WORDS)]
        for run in results.runs_of(name):
            needed = results.of(name, run).get("needed")
            if needed is not None and _prices(needed):
                costs = ", ".join(f"{share} {ms:.1f} ms" for share, ms in _prices(needed).items())
                out.append(f"Needed beyond plain, as modelled in run {run}: {costs}.")
    out.append(
        "First time: the mean step when a room meets the timed lengths for the first time; ms is that of the last "
        "pass. Extra steps: what the warm-up took beyond steps of those lengths later on, in mean plain steps. "
        "Planning: median and 99th percentile over all planned steps."
    )
    return "\n\n".join(out) + "\n"


def render(path: Path) -> Results:
    results = read(path)
    path.with_suffix(".md").write_text(page(results), encoding="utf-8")
    return results


# the command


def _among(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        out = [name.strip() for name in text.split(",")]
        for name in out:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return out

    return parse


def _shares(text: str) -> list[str]:
    out = [share.strip() for share in text.split(",")]
    for share in out:
        if share != ABOVE and not (share.endswith("%") and share[:-1].isdigit() and 0 <= int(share[:-1]) <= 100):
            raise argparse.ArgumentTypeError(f"expected a share such as 50%, or {ABOVE}, got {share!r}")
    return out


def _passes(text: str) -> int:
    count = positive(text)
    if count < LEAST_PASSES:
        raise argparse.ArgumentTypeError(f"the first pass does not count, so there are at least {LEAST_PASSES}")
    return count


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=_among(tuple(STREAMS)), help="bert, t5 (default: both)")
    parser.add_argument("--contenders", type=_among(CONTENDERS), default=list(CONTENDERS), help="default: all")
    parser.add_argument(
        "--shares", type=_shares, default=[*SHARES, ABOVE], help="budgets (default 75%%,50%%,35%%,25%%,above)"
    )
    parser.add_argument("--steps", type=positive, help=f"that are timed (default {STEPS})")
    parser.add_argument("--warmup", type=int, help=f"steps before (default {WARMUP})")
    parser.add_argument("--settle", action="store_true", help="wait before each pass for plans in the background")
    parser.add_argument("--passes", type=_passes, default=LEAST_PASSES, help="over the timed lengths (default 2)")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU, to try the benchmark itself")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for one result (default 180)")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for the whole run")
    parser.add_argument("--commit", help="the commit that is measured, where there is no repository to ask")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "dynamic.json")
    parser.add_argument("--render", type=Path, help="only write the page beside this results file")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    return parser


class Session:
    """One run: starts the processes, keeps the results and writes them after each."""

    def __init__(self, results: Results, path: Path, folder: Path, *, timeout_seconds: float, until: float) -> None:
        self.results = results
        self.failed = False
        self._path = path
        self._folder = folder
        self._timeout_seconds = timeout_seconds
        self._until = until

    def stream(self, job: Job, contenders: Sequence[str]) -> None:
        plain = self.results.of(job.stream).get("plain")
        if "plain" in contenders or plain is None or not plain.ok:
            self._run(job)
            plain = self.results.of(job.stream).get("plain")
        if plain is None or not plain.ok:
            return
        for contender in contenders:
            # Above the peak there is nothing to do for those that others are compared with.
            mine = [share for share in job.shares if share != ABOVE or contender == "legroom"]
            if contender != "plain" and mine:
                self._run(replace(job, contender=contender, budgets=budgets_of(plain, mine)))

    def _run(self, job: Job) -> None:
        """One process; another for the budgets after one in which it died."""
        if time.monotonic() > self._until:
            print(f"  {job.stream} {job.contender}: skipped, {OVER}", flush=True)
            return
        ended = run_child(
            [sys.executable, str(Path(__file__).resolve()), "--one", job.to_json()],
            self._folder,
            timeout_seconds=self._timeout_seconds,
            until=self._until,
            environment=budget.environment(),
        )
        rows = list(ended.rows)
        done = {row.contender.partition("@")[2] for row in rows}
        left = {share: cap for share, cap in job.budgets.items() if share not in done}
        if ended.status != "ok":
            share, cap = next(iter(left.items()), ("", 0))
            what = f"{job.contender}@{share}" if share else "needed" if rows else job.contender
            rows.append(Row(job.stream, what, ended.status, ended.detail, cap_bytes=cap))
            left.pop(share, None)
        for row in rows:
            self.failed |= row.status in budget.FAILURES
            said = f"{row.mean_ms:.1f} ms" if row.ok else f"{row.status}: {row.detail[-300:]}"
            print(f"  {row.workload} {row.contender}: {said} ({row.wall_seconds:.0f} s)", flush=True)
        new = [replace(row, run=len(self.results.runs) - 1) for row in rows]
        self.results = replace(self.results, rows=(*self.results.rows, *new))  # earlier runs stay whole beside it
        write(self._path, self.results)
        if ended.status != "ok" and left and job.contender != "checkpoint":
            self._run(replace(job, budgets=left))


def main(arguments: Sequence[str]) -> int:
    parsed = _parser().parse_args(arguments)
    if parsed.one:
        target = Path(parsed.one[1])
        measure(Job.from_json(parsed.one[0]), lambda row: append_row(target, asdict(row)))
        return 0
    if parsed.render:
        print(table(render(parsed.render)))
        return 0
    earlier = read(parsed.json) if parsed.json.exists() else Results((), ())
    conditions = budget.conditions(arguments, parsed.commit, script="bench/dynamic.py")
    with tempfile.TemporaryDirectory() as folder:
        session = Session(
            replace(earlier, runs=(*earlier.runs, conditions)),
            parsed.json,
            Path(folder),
            timeout_seconds=parsed.timeout,
            until=time.monotonic() + parsed.limit,
        )
        for name in parsed.only or (TINY if parsed.tiny else DEFAULT):
            print(name, flush=True)
            job = Job(
                name,
                "plain",
                "cpu" if parsed.tiny else "cuda",
                steps=parsed.steps or STEPS,
                warmup=parsed.warmup or WARMUP,
                settle=parsed.settle,
                passes=parsed.passes,
                shares=tuple(parsed.shares),
                prices="static" in parsed.contenders,
            )
            session.stream(job, parsed.contenders)
    if session.results.rows:
        print(f"\n{table(render(parsed.json))}")
    return 1 if session.failed else 0


if __name__ == "__main__":
    # Ended from outside, it leaves by way of `finally`, and a child that measures ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main(sys.argv[1:]))
    except LegroomError as error:
        sys.exit(f"dynamic.py: {error}")
