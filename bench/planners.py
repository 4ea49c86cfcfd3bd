"""All planners on all recorded traces, in the simulator: the same judge for everyone.

    python bench/planners.py [--only vgg16,gpt] [--planners auto,home] [--machines h200] [--seconds 120]
    python bench/planners.py --render bench/results/planners.json

Every planner is asked for a plan at each share of the range from the smallest peak to the plain peak, on each machine.
A machine is a preset, `h200`, or a preset and a factor, `rtx2080ti-pcie3*7.8`: the trace's ops then take that much
longer. A preset alone has another machine's link but the times of the GPU that the trace was recorded on; 7.8 is how
much slower than the H200 a 2080 Ti reads and writes its memory (616 against 4800 GB/s).

The last table is the order that HOME's paper reports: home at least as fast as capuchin, capuchin as superneurons,
superneurons as vdnn. A planner whose rule does not reach a budget counts as slower than any that does.

Results are written after each trace; what an earlier file holds of others stays, and is marked with its run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# The folder of a script is on the path, not the one above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import budget, tables
from bench.record import SUFFIX
from legroom import traceio
from legroom.compare import Row, compare
from legroom.errors import LegroomError
from legroom.evaluate import floor_bytes
from legroom.hardware import PRESETS, Hardware
from legroom.ir import Trace
from legroom.jsonio import Node, parse, read_text, write_text
from legroom.planners import PLANNERS, Planner

ROOT = Path(__file__).resolve().parents[1]
KIND, VERSION = "planner benchmark", 1
MACHINES = "h200,rtx2080ti-pcie3,rtx2080ti-pcie3*7.8"
SHARES = (0.75, 0.5, 0.25)
ORDER = ("home", "capuchin", "superneurons", "vdnn")
ORDER_TRACES = ("vgg16", "resnet152")
ORDER_MACHINE = "rtx2080ti"
GIB = 2**30
_HEAD = ("planner", "share", "budget GiB", "ms", "overhead", "steps/s", "peak GiB", "solved in s", "gap", "notes")
_WORDS = (0, 9)
_VERDICT_HEAD = ("trace", "machine", "share", "claim", "", "figures")
_VERDICT_WORDS = (0, 1, 3, 4, 5)


class PlannersError(LegroomError):
    """A file of results cannot be read."""


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    hardware: Hardware
    factor: float  # on the times of the trace's ops


@dataclass(frozen=True, slots=True)
class Line:
    """One planner at one budget."""

    trace: str
    machine: str
    share: float
    planner: str
    budget_bytes: int
    outcome: str
    plain_seconds: float
    seconds: float  # 0: no plan
    peak_bytes: int
    solve_seconds: float
    lower_bound_seconds: float  # 0: none stated
    floor_bytes: int  # the planner's own, where its rule does not reach the budget
    message: str
    run: int

    @property
    def planned(self) -> bool:
        return self.outcome == "plan"

    @property
    def overhead(self) -> float:
        return self.seconds / self.plain_seconds - 1

    @property
    def key(self) -> tuple[str, str, float, str]:
        return self.trace, self.machine, self.share, self.planner


@dataclass(frozen=True, slots=True)
class Results:
    runs: tuple[Mapping[str, str], ...]
    lines: tuple[Line, ...]

    def with_lines(self, lines: Sequence[Line]) -> Results:
        merged = {line.key: line for line in self.lines}
        merged.update({line.key: line for line in lines})
        return replace(self, lines=tuple(merged.values()))


@dataclass(frozen=True, slots=True)
class Verdict:
    trace: str
    machine: str
    share: float
    claim: str
    met: bool | None  # None: one of the two was not asked, or not answered in time
    figures: str

    @property
    def word(self) -> str:
        return "not measured" if self.met is None else "met" if self.met else "missed"


def measured(
    name: str, trace: Trace, machine: Machine, planners: Mapping[str, Planner], time_limit_seconds: float, run: int
) -> list[Line]:
    slowed = slower(trace, machine.factor)
    floor, peak = floor_bytes(slowed), slowed.peak_bytes
    budgets = {int(floor + share * (peak - floor)): share for share in SHARES}

    def watch(planner: str, budget_bytes: int, row: Row | None) -> None:
        if row is not None:
            said = f"{row.judged.seconds * 1e3:.1f} ms" if row.judged is not None else row.message
            where = f"{name} {machine.name} {budgets[budget_bytes]:.0%} {planner}"
            print(f"{where}: {said} ({row.solve_seconds:.1f} s)"[:160], flush=True)

    found = compare(
        slowed, machine.hardware, list(budgets), planners, time_limit_seconds=time_limit_seconds, watch=watch
    )
    return [_line(name, machine.name, budgets[row.budget_bytes], found.plain_seconds, row, run) for row in found.rows]


def slower(trace: Trace, factor: float) -> Trace:
    """The trace on a GPU that takes `factor` times as long for everything; issuing ops is the host's and stays."""
    return replace(trace, ops=tuple(replace(op, seconds=op.seconds * factor) for op in trace.ops))


def _line(name: str, machine: str, share: float, plain_seconds: float, row: Row, run: int) -> Line:
    judged = row.judged
    return Line(
        trace=name,
        machine=machine,
        share=share,
        planner=row.planner,
        budget_bytes=row.budget_bytes,
        outcome=row.outcome,
        plain_seconds=plain_seconds,
        seconds=judged.seconds if judged is not None else 0.0,
        peak_bytes=judged.peak_bytes if judged is not None else 0,
        solve_seconds=row.solve_seconds,
        lower_bound_seconds=(judged.lower_bound_seconds or 0.0) if judged is not None else 0.0,
        floor_bytes=row.floor_bytes,
        message=row.message,
        run=run,
    )


# what must hold


def verdicts(lines: Sequence[Line]) -> Iterator[Verdict]:
    """The paper's order, where both were asked; and that nothing is faster than `auto`, which is this project's own."""
    by_key = {line.key: line for line in lines}
    for trace, machine, share in dict.fromkeys((line.trace, line.machine, line.share) for line in lines):
        here = {planner: by_key.get((trace, machine, share, planner)) for planner in ORDER}
        if trace in ORDER_TRACES and machine.startswith(ORDER_MACHINE):
            for better, worse in itertools.pairwise(ORDER):
                yield _ordered(trace, machine, share, better, here[better], worse, here[worse])
        auto = by_key.get((trace, machine, share, "auto"))
        rest = [line for line in lines if line.key[:3] == (trace, machine, share)]
        rest = [line for line in rest if line.planned and line.planner not in ("auto", "optimal")]
        if auto is not None and rest:
            fastest = min(rest, key=lambda line: line.seconds)
            figures = f"{_speed(auto)} against {_speed(fastest)} ({fastest.planner})"
            met = auto.planned and auto.seconds <= fastest.seconds
            yield Verdict(trace, machine, share, "auto ≥ every other", met, figures)


def _ordered(
    trace: str, machine: str, share: float, better: str, one: Line | None, worse: str, other: Line | None
) -> Verdict:
    claim = f"{better} ≥ {worse}"
    answered = ("plan", "infeasible")
    if one is None or other is None or one.outcome not in answered or other.outcome not in answered:
        return Verdict(trace, machine, share, claim, None, "not asked, or no answer in time")
    if not one.planned and not other.planned:
        return Verdict(trace, machine, share, claim, None, "neither reaches the budget")
    met = one.planned and (not other.planned or one.seconds <= other.seconds)
    return Verdict(trace, machine, share, claim, met, f"{_speed(one)} against {_speed(other)} steps/s")


def _speed(line: Line) -> str:
    return f"{1 / line.seconds:.3f}" if line.planned and line.seconds else "no plan"


# as text and as files


def _cells(line: Line) -> tuple[str, ...]:
    head = (line.planner, f"{line.share:.0%}", f"{line.budget_bytes / GIB:.2f}")
    if not line.planned:
        why = f"stops at {line.floor_bytes / GIB:.2f} GiB" if line.outcome == "infeasible" else line.outcome
        return (*head, "", "", "", "", f"{line.solve_seconds:.2f}", "", why)
    bound = line.lower_bound_seconds
    return (
        *head,
        f"{line.seconds * 1e3:.2f}",
        f"{line.overhead:+.1%}",
        f"{1 / line.seconds:.3f}" if line.seconds else "",
        f"{line.peak_bytes / GIB:.2f}",
        f"{line.solve_seconds:.2f}",
        f"{line.seconds / bound - 1:.1%}" if bound else "",
        "",
    )


def _groups(lines: Sequence[Line]) -> Iterator[tuple[str, list[Line]]]:
    for trace, machine in dict.fromkeys((line.trace, line.machine) for line in lines):
        group = [line for line in lines if (line.trace, line.machine) == (trace, machine)]
        group.sort(key=lambda line: (-line.share, line.seconds if line.planned else math.inf))
        yield f"{trace} on {machine}, plain {group[0].plain_seconds * 1e3:.2f} ms", group


def _verdict_cells(verdict: Verdict) -> tuple[str, ...]:
    where = (verdict.trace, verdict.machine, f"{verdict.share:.0%}")
    return (*where, verdict.claim, verdict.word, verdict.figures)


def table(results: Results) -> str:
    blocks = []
    for head, group in _groups(results.lines):
        blocks.append(f"{head}\n{tables.text(_HEAD, [_cells(line) for line in group], words=_WORDS)}")
    found = [_verdict_cells(verdict) for verdict in verdicts(results.lines)]
    return "\n\n".join([*blocks, tables.text(_VERDICT_HEAD, found, words=_VERDICT_WORDS)])


def page(results: Results) -> str:
    out = ["# Planners side by side", "Written by `python bench/planners.py`, in the simulator."]
    for number, run in enumerate(results.runs):
        out.append(f"Run {number}: " + ", ".join(f"{key} {value}" for key, value in run.items() if key != "command"))
        out.append(f"```console\n$ {run.get('command', '')}\n```")
    found = [_verdict_cells(verdict) for verdict in verdicts(results.lines)]
    out += ["## What must hold", tables.markdown(_VERDICT_HEAD, found, words=_VERDICT_WORDS)]
    for head, group in _groups(results.lines):
        out += [f"## {head}", tables.markdown(_HEAD, [_cells(line) for line in group], words=_WORDS)]
    return "\n\n".join(out) + "\n"


def to_json(results: Results) -> str:
    document: dict[str, Any] = {"kind": KIND, "version": VERSION, "runs": [dict(run) for run in results.runs]}
    return json.dumps({**document, "lines": [asdict(line) for line in results.lines]}, indent=1, allow_nan=False) + "\n"


def from_json(text: str) -> Results:
    fields = parse(text, kind=KIND, version=VERSION, error=PlannersError).fields("runs", "lines")
    runs = []
    for node in fields["runs"].items(longest=1000):
        if not isinstance(node.value, dict):
            node.fail("expected an object")
        runs.append({name: entry.text() for name, entry in node.fields(*node.value).items()})
    lines = tuple(_line_from(node) for node in fields["lines"].items(longest=100_000))
    for line in lines:
        if line.run >= len(runs):
            raise PlannersError(f"a line names run {line.run}, the file has {len(runs)}")
    return Results(tuple(runs), lines)


def _line_from(node: Node) -> Line:
    texts = ("trace", "machine", "planner", "outcome", "message")
    integers = ("budget_bytes", "peak_bytes", "floor_bytes", "run")
    numbers = ("share", "plain_seconds", "seconds", "solve_seconds", "lower_bound_seconds")
    fields = node.fields(*texts, *integers, *numbers)
    values: dict[str, Any] = {name: fields[name].text() for name in texts}
    values |= {name: fields[name].integer() for name in integers}
    values |= {name: fields[name].number() for name in numbers}
    return Line(**values)


def read(path: Path) -> Results:
    return from_json(read_text(path, error=PlannersError))


def render(path: Path) -> None:
    results = read(path)
    path.with_suffix(".md").write_text(page(results), encoding="utf-8")
    print(table(results))


# the command


def limited(names: Sequence[str], seconds: float) -> dict[str, Planner]:
    """The planners; solvers get half of the time for one answer, as they search on after the solver has ended.

    The swarm of `home` has no limit but that of an answer: a smaller one would not be the paper's.
    """
    out: dict[str, Planner] = {}
    for name in names:
        planner: Any = PLANNERS[name]
        if hasattr(planner, "time_limit_seconds"):
            planner = replace(planner, time_limit_seconds=min(planner.time_limit_seconds, 0.5 * seconds))
        out[name] = planner
    return out


def machine(text: str) -> Machine:
    preset, _, factor = text.partition("*")
    if preset not in PRESETS:
        raise argparse.ArgumentTypeError(f"no preset {preset!r}; there are {', '.join(PRESETS)}")
    try:
        value = float(factor or 1)
    except ValueError:
        value = math.nan
    if not 1e-3 <= value <= 1e3:
        raise argparse.ArgumentTypeError(f"expected PRESET*FACTOR with a factor of 0.001 to 1000, got {text!r}")
    return Machine(text, PRESETS[preset], value)


def _machines(text: str) -> list[Machine]:
    return [machine(part.strip()) for part in text.split(",")]


def _planners(text: str) -> list[str]:
    out = [name.strip() for name in text.split(",")]
    for name in out:
        if name not in PLANNERS:
            raise argparse.ArgumentTypeError(f"no planner {name!r}; there are {', '.join(PLANNERS)}")
    return out


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=ROOT / "tests" / "traces", help="default: tests/traces")
    parser.add_argument("--only", help="names of traces; default: all in the folder")
    parser.add_argument("--planners", type=_planners, default=list(PLANNERS), help="default: all")
    parser.add_argument("--machines", type=_machines, default=_machines(MACHINES), help=f"default: {MACHINES}")
    parser.add_argument("--seconds", type=float, default=120.0, help="for one answer (default 120)")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds for the whole run")
    parser.add_argument("--commit", help="the commit that is measured, where there is no repository to ask")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "planners.json")
    parser.add_argument("--render", type=Path, help="only write the page beside this results file")
    return parser


def paths(folder: Path, only: str | None) -> list[Path]:
    if only is None:
        found = sorted(folder.glob(f"*{SUFFIX}"))
        if not found:
            raise PlannersError(f"{folder} holds no traces; `python bench/record.py {folder}` records them")
        return found
    return [folder / f"{name.strip()}{SUFFIX}" for name in only.split(",")]


def main(arguments: Sequence[str]) -> int:
    parsed = _parser().parse_args(arguments)
    if parsed.render:
        render(parsed.render)
        return 0
    until = time.monotonic() + parsed.limit
    earlier = read(parsed.json) if parsed.json.exists() else Results((), ())
    conditions = budget.conditions(arguments, parsed.commit, script="bench/planners.py")
    results = replace(earlier, runs=(*earlier.runs, conditions))
    parsed.json.parent.mkdir(parents=True, exist_ok=True)
    planners = limited(parsed.planners, parsed.seconds)
    for path in paths(parsed.traces, parsed.only):
        trace = traceio.load(path)
        for on in parsed.machines:
            if time.monotonic() > until:
                print(f"{path.name} {on.name}: skipped, the time for the whole run was over")
                continue
            name = path.name.removesuffix(SUFFIX)
            lines = measured(name, trace, on, planners, parsed.seconds, len(results.runs) - 1)
            results = results.with_lines(lines)
            write_text(parsed.json, to_json(results), error=PlannersError)
    render(parsed.json)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main(sys.argv[1:]))
    except LegroomError as error:
        sys.exit(f"planners.py: {error}")
