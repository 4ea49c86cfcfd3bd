"""Thousands of steps whose inputs change size at each, on the CPU: memory, bits and time of plans that follow them.

    python bench/lengths.py [--only swag,resize] [--steps 2000] [--limit SECONDS] [--quick]
    python bench/lengths.py --render bench/results/lengths.json

Each case runs twice, in a process each: plain, which writes down the bits of every loss and, every 100 steps, of all
parameters; and in a room, which is held against that. The budget is half of the range from the smallest peak to the
plain peak, both at the longest input. Peaks are read here from the allocator's events: by a profiler of our own around
every 20th step, and from the events of those steps that legroom itself profiles.

The ranges of lengths are those of Mimose's figure 3. Of their shapes the paper says that they are normal or follow a
power law; drawn here are a normal distribution for SWAG and SQuAD and a lognormal one for QQP and UN_PC, cut off at the
ends of the range. A target of UN_PC is about as long as its source. `resize` is the paper's rule for detection (the
shorter side of 480 to 800 pixels, the longer of at most 1333) at an eighth of the size.

Overhead, as the paper counts it: what steps that are recorded or measured take beyond a planned step of that size, and
the time in which others wait for their plan, in mean plain steps.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# The folder of a script is on the path, not the one above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import legroom
from bench import budget, tables
from bench.arguments import positive
from bench.children import append_row, run_child
from bench.meters import CpuMeter
from bench.rows import Results, Row, read, write
from bench.verdicts import Verdict
from legroom.alloclog import MemoryLog
from legroom.doctor import ALLOCATOR_SETTINGS
from legroom.errors import LegroomError
from legroom.plan import signature
from legroom.schedule import memory_curve
from legroom.sizes import with_numbers

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
Sizes = tuple[int, ...]
Batch = tuple[Tensor, ...]
SHARE = 0.5
STEPS, QUICK_STEPS = 2000, 60
DIGEST_EVERY, PROFILE_EVERY, RESIDENT_EVERY = 100, 20, 10
WARMUP = 0.05  # of the steps; planning is judged after them
FEWEST_FOR_FLAT = 400  # steps; in fewer, the allocator has not met its largest sizes yet
NEIGHBOURS = 9
# What must hold.
MOST_SHELTERED = 10  # for one structure
PEAK_ERROR = 0.01
PLANNING_SECONDS = 1e-3  # 99 of 100 steps
MOST_ITERATIONS = 3.0
MOST_GROWTH = 0.02  # of the resident set, from the second quarter of the steps to the last


# programs


@dataclass(frozen=True, slots=True)
class Case:
    """A model and its stream of inputs."""

    label: str
    build: Callable[[], nn.Module]
    longest: Sizes
    draw: Callable[[random.Random], Sizes]
    batch: Callable[[Sizes, torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        attn_implementation="sdpa",
    )  # fmt: skip
    return BertForSequenceClassification(config)


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=256, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0,
        use_cache=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


class Detector(nn.Module):
    """A backbone, a pyramid over it, and one head for all levels: classes for each cell."""

    def __init__(self, width: int = 8, classes: int = 5) -> None:
        super().__init__()
        widths = [3, width, width, 2 * width, 4 * width]
        stages = [
            nn.Sequential(*_convolution(before, after), Pointwise(after), Pointwise(after), Pointwise(after))
            for before, after in itertools.pairwise(widths)
        ]
        self.stem, self.stages = stages[0], nn.ModuleList(stages[1:])
        self.laterals = nn.ModuleList(nn.Conv2d(after, width, 1) for after in widths[2:])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> list[Tensor]:
        x, maps = self.stem(images), []
        for stage, lateral in zip(self.stages, self.laterals, strict=True):
            x = stage(x)
            maps.append(lateral(x))
        for level in range(len(maps) - 1, 0, -1):
            maps[level - 1] = maps[level - 1] + F.interpolate(maps[level], size=maps[level - 1].shape[-2:])
        return [self.head(level) for level in maps]


class Pointwise(nn.Module):
    """Convolutions of larger kernels take many times their output as workspace on the CPU, which no plan can free."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def _convolution(before: int, after: int) -> list[nn.Module]:
    return [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]


def _bert_loss(model: nn.Module, batch: Batch) -> Tensor:
    ids, labels = batch
    return model(input_ids=ids, labels=labels).loss


def _t5_loss(model: nn.Module, batch: Batch) -> Tensor:
    source, target = batch
    return model(input_ids=source, labels=target).loss


def _detection_loss(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    maps = model(images)
    return sum(
        (F.cross_entropy(found, labels[:, :: 1 << level, :: 1 << level]) for level, found in enumerate(maps)),
        start=torch.zeros(()),
    )


def _text(rows: int) -> Callable[[Sizes, torch.Generator], Batch]:
    def batch(sizes: Sizes, generator: torch.Generator) -> Batch:
        (length,) = sizes
        return torch.randint(512, (rows, length), generator=generator), torch.randint(2, (rows,), generator=generator)

    return batch


def _pairs(sizes: Sizes, generator: torch.Generator) -> Batch:
    source, target = (torch.randint(2, 256, (4, length), generator=generator) for length in sizes)
    return source, target


def _images(sizes: Sizes, generator: torch.Generator) -> Batch:
    cells = (-(-side // 4) for side in sizes)  # of the finest level
    return torch.randn(4, 3, *sizes, generator=generator), torch.randint(5, (4, *cells), generator=generator)


def _between(low: int, high: int, value: Callable[[], float]) -> int:
    """A value inside the limits; what falls outside is drawn again, so that nothing gathers at the ends."""
    while True:
        drawn = round(value())
        if low <= drawn <= high:
            return drawn


def _normal(low: int, high: int) -> Callable[[random.Random], Sizes]:
    return lambda chance: (_between(low, high, lambda: chance.gauss((low + high) / 2, (high - low) / 6)),)


def _skewed(low: int, high: int) -> Callable[[random.Random], Sizes]:
    return lambda chance: (_skewed_length(chance, low, high),)


def _skewed_length(chance: random.Random, low: int, high: int) -> int:
    return _between(low, high, lambda: low + (high - low) / 5 * chance.lognormvariate(0, 0.7))


def _translation(chance: random.Random) -> Sizes:
    source = _skewed_length(chance, 17, 460)
    return source, _between(17, 460, lambda: source * chance.lognormvariate(0, 0.2))


def _resized(chance: random.Random) -> Sizes:
    shorter = chance.uniform(60, 100)
    longer = min(shorter * max(1.0, chance.gauss(1.4, 0.2)), 166.6)
    sides = round(shorter), round(longer)
    return sides if chance.random() < 0.3 else sides[::-1]


# The allocator gives back what is free, and oneDNN keeps the code of 64 shapes, not of 1,024, which random sizes fill
# for thousands of steps: so the resident set shows what training needs.
SETTINGS = {**ALLOCATOR_SETTINGS, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "KINETO_LOG_LEVEL": "6"}

CASES: dict[str, Case] = {
    "swag": Case("BERT, SWAG 35 to 141", _bert, (141,), _normal(35, 141), _text(8), _bert_loss),
    "squad": Case("BERT, SQuAD 153 to 512", _bert, (512,), _normal(153, 512), _text(2), _bert_loss),
    "qqp": Case("BERT, QQP 30 to 332", _bert, (332,), _skewed(30, 332), _text(4), _bert_loss),
    "un_pc": Case("T5, UN_PC 17 to 460", _t5, (460, 460), _translation, _pairs, _t5_loss),
    "resize": Case("detector, 60 to 167 pixels", Detector, (100, 167), _resized, _images, _detection_loss),
}


class Training:
    """One run of a case. Everything random in it follows from the number of the step."""

    def __init__(self, case: Case, *, seed: int = 0) -> None:
        self.case = case
        torch.manual_seed(seed)
        self.model = case.build().train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._chance = random.Random(seed)

    def next_sizes(self) -> Sizes:
        return self.case.draw(self._chance)

    def batch(self, number: int, sizes: Sizes) -> Batch:
        return self.case.batch(sizes, torch.Generator().manual_seed(number))

    def step(self, batch: Batch) -> Tensor:
        loss = self.case.loss(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def digest(self) -> str:
        found = hashlib.sha256()
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


# a second opinion on memory


@dataclass(frozen=True, slots=True)
class Heard:
    """What a profiler heard of one step. To read its events takes as long as a step: that is left for later."""

    results: Any
    mark_bytes: int = 0  # blocks of this size are marks in the log of legroom's, and none of the step's

    def events(self) -> list[Any]:
        events = self.results.events()
        return [event for event in events if not self.mark_bytes or abs(event.nbytes()) != self.mark_bytes]


def peak_of(events: Sequence[Any], alive_after_bytes: int) -> int:
    """The most bytes alive at once, from the allocator's events and what is left when they end."""
    changes = [event.nbytes() for event in sorted(events, key=_start) if event.name() == "[memory]"]
    level = peak = alive_after_bytes - sum(changes)
    for change in changes:
        level += change
        peak = max(peak, level)
    return peak


def _start(event: Any) -> int:
    return event.start_ns()


@contextlib.contextmanager
def overheard(heard: list[Heard]) -> Iterator[None]:
    """Every profile that ends meanwhile leaves what it heard here, legroom's own among them."""
    profile = torch.autograd.profiler.profile
    leave, end = profile.__exit__, MemoryLog._end

    def left(self: Any, *error: Any) -> Any:
        result = leave(self, *error)
        heard.append(Heard(self.kineto_results))
        return result

    def ended(self: MemoryLog) -> Any:
        results = end(self)
        heard.append(Heard(results, self._size))
        return results

    profile.__exit__, MemoryLog._end = left, ended  # type: ignore[method-assign]
    try:
        yield
    finally:
        profile.__exit__, MemoryLog._end = leave, end  # type: ignore[method-assign]


def resident_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS:"))


def foreseen_bytes(room: legroom.Room) -> int:
    """The peak that the room expects of a step like its last one; 0 where that one was not planned."""
    following = room._following
    if following is None or following._way is None or following._call is None or following.rung is None:
        return 0
    course = following._course
    if course is None or len(course.model.template.ticks) != len(following.rung.template.ticks):
        return 0
    trace = with_numbers(course.model.template, course.model.predict(following._call.features))
    curve = memory_curve(trace, replace(following.rung.schedule, trace_signature=signature(trace)))
    return max(trace.head_peak_bytes, *(peak for *_, peak in curve))


# what a child process does


@dataclass(frozen=True, slots=True)
class Job:
    case: str
    contender: str  # plain, legroom
    steps: int
    digests: str  # the file that plain writes and the other reads
    budget_bytes: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        return Job(**json.loads(text))


def run(job: Job) -> Row:
    torch.set_num_threads(1)  # the other core is for planning in the background
    began = time.perf_counter()
    row = _plain(job) if job.contender == "plain" else _followed(job)
    return replace(row, wall_seconds=time.perf_counter() - began)


def _plain(job: Job) -> Row:
    training = Training(CASES[job.case])
    losses, parameters, seconds, resident = [], {}, [], []
    for number in range(job.steps):
        batch = training.batch(number, training.next_sizes())
        began = time.perf_counter()
        loss = training.step(batch)
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item().hex())
        if _digested(number, job.steps):
            parameters[str(number)] = training.digest()
        if number % RESIDENT_EVERY == 0:
            resident.append(resident_bytes())
    document = {"losses": losses, "parameters": parameters}
    Path(job.digests).write_text(json.dumps(document), encoding="utf-8")
    del loss, batch
    longest = training.batch(job.steps, training.case.longest)
    trace = legroom.capture(lambda: training.step(longest), model=training.model, optimizer=training.optimizer)
    report = {
        "floor_bytes": legroom.floor_bytes(trace),
        "peak_bytes": trace.peak_bytes,
        "gaps": len(trace.gaps),
        "resident_growth": growth(resident),
        "resident_bytes": resident[-1],
    }
    mean, median = statistics.mean(seconds), statistics.median(seconds)
    return Row(job.case, "plain", "ok", mean_ms=mean * 1e3, median_ms=median * 1e3, steps=job.steps, report=report)


def _digested(number: int, steps: int) -> bool:
    return (number + 1) % DIGEST_EVERY == 0 or number + 1 == steps


def _followed(job: Job) -> Row:
    """Trains in a room; ends at the first bit that differs."""
    wanted = json.loads(Path(job.digests).read_text(encoding="utf-8"))
    training = Training(CASES[job.case])
    meter = CpuMeter()
    seconds: list[float] = []
    sizes: list[Sizes] = []
    resident: list[int] = []
    looked: list[tuple[int, int, int, bool]] = []  # step, measured, foreseen, whether by a profile of our own
    heard: list[Heard] = []
    different = ""
    room = legroom.fit(training.model, training.optimizer, budget=job.budget_bytes)
    with room, overheard(heard):
        for number in range(job.steps):
            sizes.append(training.next_sizes())
            batch = training.batch(number, sizes[-1])
            # Not among the first steps: legroom learns from its own profile of them, and there can be only one.
            ours = number >= PROFILE_EVERY and number % PROFILE_EVERY == 0
            began = time.perf_counter()
            with _profile() if ours else contextlib.nullcontext(), room.step():
                loss = training.step(batch)
            seconds.append(time.perf_counter() - began)
            if heard:
                alive = meter.alive_bytes()
                foreseen = foreseen_bytes(room)
                looked += [(number, peak_of(one.events(), alive), foreseen, ours) for one in heard]
                heard.clear()
            bits = loss.item().hex()
            if bits != wanted["losses"][number]:
                different = f"step {number}: the loss is {bits}, plain has {wanted['losses'][number]}"
            elif _digested(number, job.steps) and training.digest() != wanted["parameters"][str(number)]:
                different = f"step {number}: parameters differ from plain"
            if different:
                break
            if number % RESIDENT_EVERY == 0:
                resident.append(resident_bytes())
        report = room.report()
    return _row(job, report, seconds, sizes, resident, looked, different)


def _profile() -> Any:
    return torch.autograd.profiler.profile(use_cpu=True, profile_memory=True, use_kineto=True)


def _row(
    job: Job,
    report: legroom.Report,
    seconds: list[float],
    sizes: list[Sizes],
    resident: list[int],
    looked: list[tuple[int, int, int, bool]],
    different: str,
) -> Row:
    followed = report.followed
    rows = followed.steps if followed is not None else ()
    first = len(seconds) - len(rows)  # steps before it was seen that inputs vary: all of them recorded
    courses = ["sheltered"] * first + [row.course for row in rows]
    measured_by_legroom = {first + i for i, row in enumerate(rows) if row.measured_bytes}
    watched = {number for number, *_ in looked} | measured_by_legroom
    usual = [i for i in range(first, len(seconds)) if courses[i] == "planned" and i not in watched]
    planning = [0.0] * first + [row.planning_seconds for row in rows]
    later = sorted(planning[i] for i in usual if i >= WARMUP * job.steps)
    # Steps with a profile of our own are slow because of us; the others that were measured, because of legroom.
    own = {number for number, *_, ours in looked if ours}
    samples = [(sizes[i], seconds[i] - planning[i]) for i in usual]
    extra = [
        seconds[i] - expected(sizes[i], samples)
        for i in range(len(seconds))
        if i not in own and (courses[i] != "planned" or i in watched)
    ]
    # Of steps that legroom measures itself it takes over what it sees: these are no predictions any more.
    errors = [
        abs(foreseen / measured - 1)
        for n, measured, foreseen, ours in looked
        if ours and foreseen and courses[n] == "planned"
    ]
    peaks = [measured for _, measured, _, _ in looked]
    mean = statistics.mean(seconds[i] for i in usual) if usual else 0.0
    figures = {
        "different": different,
        "compared_steps": len(seconds) - bool(different),
        "peaks": len(peaks),
        "legroom_peak_bytes": report.peak_bytes,
        "sheltered": courses.count("sheltered"),
        "reactive": courses.count("reactive"),
        "structures": followed.structures if followed is not None else 0,
        "plans": followed.plans if followed is not None else 0,
        "hits": followed.hits if followed is not None else 0,
        "misses": followed.misses if followed is not None else 0,
        "evicted": followed.evicted if followed is not None else 0,
        "residual": followed.residual if followed is not None else 1.0,
        "predictions": len(errors),
        "prediction_error": statistics.mean(errors) if errors else 0.0,
        "worst_prediction_error": max(errors, default=0.0),
        "planning_steps": len(later),
        "planning_ms": later[len(later) // 2] * 1e3 if later else 0.0,
        "slow_planning_ms": later[int(len(later) * 0.99)] * 1e3 if later else 0.0,
        "slowest_planning_ms": later[-1] * 1e3 if later else 0.0,
        "extra_seconds": sum(extra) + sum(planning[i] for i in usual),
        "extra_steps": len(extra),
        "resident_growth": growth(resident),
        "resident_bytes": resident[-1] if resident else 0,
        "fallbacks": dict(report.fallbacks),
        "looked": [[n, *sizes[n], measured, foreseen] for n, measured, foreseen, _ in looked],
    }
    return Row(
        job.case,
        "legroom",
        "ok",
        cap_bytes=job.budget_bytes,
        mean_ms=mean * 1e3,
        median_ms=statistics.median(seconds[i] for i in usual) * 1e3 if usual else 0.0,
        steps=len(seconds),
        allocated_bytes=max(peaks, default=0),
        report=figures,
    )


def expected(sizes: Sizes, samples: Sequence[tuple[Sizes, float]]) -> float:
    """What a step of these sizes takes: the median of those of the nearest sizes."""
    if not samples:
        return 0.0

    def distance(sample: tuple[Sizes, float]) -> float:
        return sum(abs(a - b) for a, b in zip(sample[0], sizes, strict=True))

    return statistics.median(seconds for _, seconds in sorted(samples, key=distance)[:NEIGHBOURS])


def growth(resident: Sequence[int]) -> float:
    """Of the resident set, from the second quarter of the samples to the last: medians."""
    quarter = len(resident) // 4
    if not quarter:
        return 0.0
    return statistics.median(resident[-quarter:]) / statistics.median(resident[quarter : 2 * quarter]) - 1


# what must hold


def verdicts(results: Results) -> list[Verdict]:
    return [verdict for case in results.workloads() for verdict in _verdicts(case, results.of(case))]


def _verdicts(case: str, rows: dict[str, Row]) -> Iterator[Verdict]:
    plain, ours = rows.get("plain"), rows.get("legroom")
    if plain is None or ours is None or not plain.ok or not ours.ok:
        yield Verdict(case, "both run", None if ours is None else False, ours.detail[:120] if ours is not None else "")
        return
    figure = ours.reported
    peak = max(ours.allocated_bytes, int(figure("legroom_peak_bytes")))
    yield Verdict(
        case,
        "never over the budget",
        peak <= ours.cap_bytes if figure("peaks") else None,
        f"{peak:,} of {ours.cap_bytes:,} bytes at most, {figure('peaks'):.0f} steps looked at",
    )
    different = str(ours.report.get("different", ""))
    same = not different and figure("compared_steps") == plain.steps
    yield Verdict(case, "bit-identical", same, different or f"{figure('compared_steps'):.0f} steps")
    grown, plain_grown = figure("resident_growth"), plain.reported("resident_growth")
    yield Verdict(
        case,
        f"resident set grows by {MOST_GROWTH:.0%} at most",
        grown <= MOST_GROWTH if ours.steps >= FEWEST_FOR_FLAT else None,
        f"{grown:+.2%} to {figure('resident_bytes') / MIB:.0f} MiB, plain {plain_grown:+.2%}",
    )
    most = MOST_SHELTERED * max(1, int(figure("structures")))
    yield Verdict(
        case,
        f"at most {MOST_SHELTERED} sheltered steps for a structure",
        figure("sheltered") <= most and figure("structures") > 0,
        f"{figure('sheltered'):.0f} for {figure('structures'):.0f}, and {figure('reactive'):.0f} reactive",
    )
    error = figure("prediction_error")
    yield Verdict(
        case,
        f"memory predicted within {PEAK_ERROR:.0%} on average",
        error <= PEAK_ERROR if figure("predictions") else None,
        f"{error:.3%}, worst {figure('worst_prediction_error'):.3%}, {figure('predictions'):.0f} steps",
    )
    yield Verdict(
        case,
        f"planning within {PLANNING_SECONDS * 1e3:.0f} ms in 99 of 100 steps",
        figure("slow_planning_ms") <= PLANNING_SECONDS * 1e3 if figure("planning_steps") else None,
        f"{figure('slow_planning_ms'):.3f} ms, median {figure('planning_ms'):.3f}, "
        f"slowest {figure('slowest_planning_ms'):.1f}, {figure('planning_steps'):.0f} steps",
    )
    iterations = figure("extra_seconds") / plain.mean_ms * 1e3
    yield Verdict(
        case,
        f"overhead of at most {MOST_ITERATIONS:.0f} iterations",
        iterations <= MOST_ITERATIONS,
        f"{iterations:.1f}: {figure('extra_seconds'):.2f} s in {figure('extra_steps'):.0f} steps and in planning",
    )


# as text and as files

_HEAD = (
    "case",
    "steps",
    "plain ms",
    "room ms",
    "floor MiB",
    "budget",
    "plain peak",
    "peak",
    "sheltered",
    "plans",
    "hits",
    "misses",
)
_VERDICT_HEAD = ("case", "claim", "", "figures")


def _lines(results: Results) -> list[tuple[str, ...]]:
    lines = []
    for case in results.workloads():
        rows = results.of(case)
        plain, ours = rows.get("plain"), rows.get("legroom")
        label = CASES[case].label if case in CASES else case
        if plain is None or ours is None or not plain.ok or not ours.ok:
            bad = next((row for row in rows.values() if not row.ok), None)
            lines.append((label, bad.status if bad is not None else "", *[""] * (len(_HEAD) - 2)))
            continue
        lines.append(
            (
                label,
                f"{ours.steps}",
                f"{plain.mean_ms:.1f}",
                f"{ours.mean_ms:.1f}",
                *(
                    f"{nbytes / MIB:.2f}"
                    for nbytes in (
                        plain.reported("floor_bytes"),
                        ours.cap_bytes,
                        plain.reported("peak_bytes"),
                        ours.allocated_bytes,
                    )
                ),
                *(f"{ours.reported(name):.0f}" for name in ("sheltered", "plans", "hits", "misses")),
            )
        )
    return lines


def _verdict_lines(results: Results) -> list[tuple[str, ...]]:
    return [(v.workload, v.claim, v.word, v.figures) for v in verdicts(results)]


def table(results: Results) -> str:
    found = tables.text(_VERDICT_HEAD, _verdict_lines(results), words=(0, 1, 2, 3))
    return f"{tables.text(_HEAD, _lines(results))}\n\n{found}"


def page(results: Results) -> str:
    out = ["# Inputs that change size at every step", "Written by `python bench/lengths.py`, on the CPU."]
    for number, conditions in enumerate(results.runs):
        told = ", ".join(f"{key} {value}" for key, value in conditions.items() if key != "command")
        out += [f"Run {number}: {told}", f"```console\n$ {conditions.get('command', '')}\n```"]
    out += ["## What must hold", tables.markdown(_VERDICT_HEAD, _verdict_lines(results), words=(0, 1, 2, 3))]
    out += ["## Cases", tables.markdown(_HEAD, _lines(results))]
    for row in results.rows:
        fallbacks = row.report.get("fallbacks")
        if isinstance(fallbacks, dict) and fallbacks:
            out.append(f"{row.workload}: " + "; ".join(f"{name}: {count}" for name, count in fallbacks.items()))
        if row.detail:
            out.append(f"{row.workload} {row.contender}: {row.status}: {' '.join(row.detail.split())}")
    return "\n\n".join(out) + "\n"


def render(path: Path) -> Results:
    results = read(path)
    path.with_suffix(".md").write_text(page(results), encoding="utf-8")
    return results


# the command


def _cases(text: str) -> list[str]:
    out = [name.strip() for name in text.split(",")]
    for name in out:
        if name not in CASES:
            raise argparse.ArgumentTypeError(f"no case {name!r}; there are {', '.join(CASES)}")
    return out


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=_cases, default=list(CASES), help="cases, separated by commas")
    parser.add_argument("--steps", type=positive, help=f"of each case (default {STEPS})")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for the whole run")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one process (default 1800)")
    parser.add_argument("--commit", help="the commit that is measured, where there is no repository to ask")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "lengths.json")
    parser.add_argument("--render", type=Path, help="only write the page beside this results file")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    return parser


def _measured(name: str, steps: int, folder: Path, *, timeout_seconds: float, until: float) -> Iterator[Row]:
    def child(job: Job) -> Row:
        ended = run_child(
            [sys.executable, str(Path(__file__).resolve()), "--one", job.to_json()],
            folder,
            timeout_seconds=timeout_seconds,
            until=until,
            environment={**budget.environment(), **SETTINGS},
        )
        if ended.rows:
            return ended.rows[0]
        status = ended.status if ended.status != "ok" else "error"
        return Row(name, job.contender, status, ended.detail or "ended without a result")

    job = Job(name, "plain", steps, str(folder / f"{name}.json"))
    yield (plain := child(job))
    if plain.ok:
        floor, peak = plain.reported("floor_bytes"), plain.reported("peak_bytes")
        yield child(replace(job, contender="legroom", budget_bytes=int(floor + SHARE * (peak - floor))))


def main(arguments: Sequence[str]) -> int:
    parsed = _parser().parse_args(arguments)
    if parsed.one:
        append_row(Path(parsed.one[1]), asdict(run(Job.from_json(parsed.one[0]))))
        return 0
    if parsed.render:
        print(table(render(parsed.render)))
        return 0
    until = time.monotonic() + parsed.limit
    earlier = read(parsed.json) if parsed.json.exists() else Results((), ())
    conditions = budget.conditions(arguments, parsed.commit, script="bench/lengths.py")
    results = replace(earlier, runs=(*earlier.runs, conditions))
    steps = parsed.steps or (QUICK_STEPS if parsed.quick else STEPS)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for name in parsed.only:
            if time.monotonic() > until:
                print(f"{name}: skipped, the time for the whole run was over")
                continue
            for row in _measured(name, steps, Path(folder), timeout_seconds=parsed.timeout, until=until):
                said = f"{row.mean_ms:.1f} ms" if row.ok else f"{row.status}: {row.detail[-400:]}"
                print(f"{name} {row.contender}: {said} ({row.wall_seconds:.0f} s)", flush=True)
                failed |= not row.ok
                results = results.with_rows([replace(row, run=len(results.runs) - 1)])
                write(parsed.json, results)
    if results.rows:
        print(f"\n{table(render(parsed.json))}")
    return 1 if failed else 0


if __name__ == "__main__":
    # Ended from outside, it leaves by way of `finally`, and a child that measures ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main(sys.argv[1:]))
    except LegroomError as error:
        sys.exit(f"lengths.py: {error}")
