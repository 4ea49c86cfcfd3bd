"""How far `auto` is from the best on all recorded traces: its gap to the linear program's bound, and to integer ones.

    python bench/gaps.py [--only vgg16,gpt] [--machines h200,h200+host] [--milp-seconds 600]
    python bench/gaps.py --render bench/results/gaps.json

Shares of the range and machines are those of bench/planners.py; `+host` after a machine's name gives it the host costs
that were measured beside an H200, where presets have none.

What must hold: auto is at most 2 % above the bound with half of the range or more, and 5 % with a quarter or more; or
at most 1 % above the best plan that `optimal` finds with ten minutes for its integer program. So `optimal` is asked
only where the bound does not tell. Its program grants more than a schedule can do, so three figures say what it found:
the best plan, as simulated; what the program's own solution takes in the program ("as solved"), of which nobody knows
whether a plan can do it; and what its solver proves that no plan is below ("proven").

Results are written after each row; what an earlier file holds of others stays, and is marked with its run.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# The folder of a script is on the path, not the one above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import budget, planners, tables
from bench.planners import MACHINES, SHARES, Machine, slower
from bench.record import SUFFIX
from bench.verdicts import Verdict
from legroom import traceio
from legroom.errors import LegroomError
from legroom.evaluate import floor_bytes
from legroom.hardware import HostCosts
from legroom.ir import Trace
from legroom.jsonio import Node, parse, read_text, write_text
from legroom.plan import Plan, signature
from legroom.planners.auto import Auto
from legroom.planners.optimal import Optimal
from legroom.schedule import Schedule, check_schedule, lower
from legroom.simulate import simulate

ROOT = Path(__file__).resolve().parents[1]
KIND, VERSION = "gap benchmark", 1
WITH_HOST = "+host"
# As legroom.probing has them for the host of an H200, which takes 9.5 µs to issue a small op.
HOST = HostCosts(
    tick=1e-6, swap_out=110e-6, release=50e-6, drop=220e-6, prefetch=90e-6, await_=30e-6, replay=60e-6, replay_op=50e-6
)
TARGETS = {0.5: 0.02, 0.25: 0.05}  # share of the range from which on: gap to the bound, at most
MILP_TARGET = 0.01  # above the best plan of the integer program
MILP_SECONDS = 600.0
CHAINED_GAPS = 200  # twice what `optimal` takes into its chains by default: MobileNet's program is solved in 90 s then
_HEAD = ("trace", "gaps", "machine", "share", "plain ms", "bound ms", "auto ms", "gap", "auto s", "MILP ms", "above it",
         "as solved", "proven", "it ran", "")  # fmt: skip
_WORDS = (0, 2, 14)
_ENDED = "integer program: solved"
_SOLVED = re.compile(r"(?:solved|out of time) at ([0-9.]+) s")
_PROVEN = re.compile(r"its own bound is ([0-9.]+) s")
_ABOUT = f"""Asked for: at most {TARGETS[0.5]:.0%} above the bound of the linear program with 50 % of the range or more,
{TARGETS[0.25]:.0%} with 25 % or more; or at most {MILP_TARGET:.0%} above the best plan that `optimal` finds with ten
minutes for its integer program, which is asked only where the bound does not tell. That program grants more than a
schedule can do: "as solved" is what its solution takes in the program, "proven" what its solver says no plan is below,
and "MILP ms" the best plan that came of it, by a search like auto's own. So where "proven" lies far below, the verdict
says that neither of the two found better, and not that nothing better exists. Seconds are those of one thread."""


class GapsError(LegroomError):
    """A file of results cannot be read."""


@dataclass(frozen=True, slots=True)
class Line:
    """Auto at one budget, with what is known about the best plan there."""

    trace: str
    gaps: int
    machine: str
    share: float
    budget_bytes: int
    plain_seconds: float
    bound_seconds: float
    auto_seconds: float
    solve_seconds: float
    milp_seconds: float  # of a step of the best plan found by the integer program; 0: not asked
    milp_solved_seconds: float  # what its solution takes in the program; 0: it has none
    milp_bound_seconds: float  # what its solver proves about that program; 0: nothing
    milp_limit_seconds: float  # what the solver was given
    milp_said: str
    run: int

    @property
    def key(self) -> tuple[str, str, float]:
        return self.trace, self.machine, self.share

    @property
    def gap(self) -> float:
        return self.auto_seconds / self.bound_seconds - 1

    @property
    def target(self) -> float:
        return next((limit for share, limit in TARGETS.items() if self.share >= share), math.inf)

    @property
    def near_bound(self) -> bool:
        return self.auto_seconds <= self.bound_seconds * (1 + self.target)


@dataclass(frozen=True, slots=True)
class Results:
    runs: tuple[Mapping[str, str], ...]
    lines: tuple[Line, ...]

    def with_line(self, line: Line) -> Results:
        return replace(self, lines=tuple({**{known.key: known for known in self.lines}, line.key: line}.values()))


def measured(name: str, trace: Trace, on: Machine, share: float, milp_seconds: float, run: int) -> Line:
    slowed = slower(trace, on.factor)
    floor, peak = floor_bytes(slowed), slowed.peak_bytes
    budget_bytes = int(floor + share * (peak - floor))
    started = time.process_time()
    plan = Auto()(slowed, on.hardware, budget_bytes)
    solve_seconds = time.process_time() - started
    line = Line(
        trace=name,
        gaps=len(trace.gaps),
        machine=on.name,
        share=share,
        budget_bytes=budget_bytes,
        plain_seconds=simulate(slowed, Schedule((), signature(slowed)), on.hardware).seconds,
        bound_seconds=plan.lower_bound_seconds or 0.0,
        auto_seconds=judged(slowed, plan, on),
        solve_seconds=round(solve_seconds, 3),
        milp_seconds=0.0,
        milp_solved_seconds=0.0,
        milp_bound_seconds=0.0,
        milp_limit_seconds=0.0,
        milp_said="",
        run=run,
    )
    if line.near_bound or not milp_seconds:
        return line
    best = Optimal(time_limit_seconds=milp_seconds, chained_gaps=CHAINED_GAPS)(slowed, on.hardware, budget_bytes)
    said = best.notes[0]
    solved, proven = _SOLVED.search(said), _PROVEN.search(said)
    return replace(
        line,
        milp_seconds=judged(slowed, best, on),
        milp_solved_seconds=float(solved[1]) if solved else 0.0,
        milp_bound_seconds=float(proven[1]) if proven else 0.0,
        milp_limit_seconds=milp_seconds,
        milp_said=said,
    )


def judged(trace: Trace, plan: Plan, on: Machine) -> float:
    """The seconds of a plan by simulate(), whatever its planner says."""
    schedule = lower(trace, plan, on.hardware)
    peak = check_schedule(trace, schedule)
    if peak > plan.budget_bytes:
        raise GapsError(f"{plan.planner} is at {peak} bytes, above the budget of {plan.budget_bytes}")
    return simulate(trace, schedule, on.hardware).seconds


def verdict(line: Line) -> Verdict:
    if line.target == math.inf:
        return Verdict(line.trace, "any gap", None, "nothing is asked for with less than a quarter of the range")
    claim = f"within {line.target:.0%} of the bound, or {MILP_TARGET:.0%} of the integer program's best"
    if line.near_bound:
        return Verdict(line.trace, claim, True, f"by the bound: {line.gap:.2%}")
    if not line.milp_seconds:
        return Verdict(line.trace, claim, None, f"{line.gap:.2%} above the bound, no integer program was asked")
    above = line.auto_seconds / line.milp_seconds - 1
    if line.auto_seconds > line.milp_seconds * (1 + MILP_TARGET):
        return Verdict(line.trace, claim, False, f"by {above - MILP_TARGET:.2%}: {above:+.2%}")
    # To its end is as good as ten minutes.
    if line.milp_limit_seconds < MILP_SECONDS and not line.milp_said.startswith(_ENDED):
        return Verdict(line.trace, claim, None, f"{above:+.2%} after {line.milp_limit_seconds:g} s, which is too soon")
    return Verdict(line.trace, claim, True, f"by the integer program: {above:+.2%}")


# as text and as files


def _cells(line: Line) -> tuple[str, ...]:
    found = verdict(line)
    asked = line.milp_seconds > 0.0
    return (
        line.trace,
        str(line.gaps),
        line.machine,
        f"{line.share:.0%}",
        f"{line.plain_seconds * 1e3:.2f}",
        f"{line.bound_seconds * 1e3:.2f}",
        f"{line.auto_seconds * 1e3:.2f}",
        f"{line.gap:.2%}",
        f"{line.solve_seconds:.2f}",
        f"{line.milp_seconds * 1e3:.2f}" if asked else "",
        f"{line.auto_seconds / line.milp_seconds - 1:+.2%}" if asked else "",
        f"{line.milp_solved_seconds * 1e3:.2f}" if line.milp_solved_seconds else "",
        f"{line.milp_bound_seconds * 1e3:.2f}" if line.milp_bound_seconds else "",
        ("to its end" if line.milp_said.startswith(_ENDED) else f"{line.milp_limit_seconds:g} s") if asked else "",
        f"{found.word} {found.figures}",
    )


def _summary(lines: Sequence[Line]) -> str:
    words = [verdict(line).word for line in lines]
    by_bound = sum(line.near_bound for line in lines)
    met, missed = words.count("met"), words.count("missed")
    rest = len(words) - met - missed
    return f"{met} of {len(words)} met, {by_bound} by the bound; {missed} missed, {rest} not measured."


def table(results: Results) -> str:
    cells = [_cells(line) for line in results.lines]
    return f"{tables.text(_HEAD, cells, words=_WORDS)}\n\n{_summary(results.lines)}"


def page(results: Results) -> str:
    out = ["# How far auto is from the best", "Written by `python bench/gaps.py`, in the simulator.", _ABOUT]
    for number, run in enumerate(results.runs):
        out.append(f"Run {number}: " + ", ".join(f"{key} {value}" for key, value in run.items() if key != "command"))
        out.append(f"```console\n$ {run.get('command', '')}\n```")
    out.append(_summary(results.lines))
    out.append(tables.markdown(_HEAD, [_cells(line) for line in results.lines], words=_WORDS))
    return "\n\n".join(out) + "\n"


def to_json(results: Results) -> str:
    document: dict[str, Any] = {"kind": KIND, "version": VERSION, "runs": [dict(run) for run in results.runs]}
    return json.dumps({**document, "lines": [asdict(line) for line in results.lines]}, indent=1, allow_nan=False) + "\n"


def from_json(text: str) -> Results:
    fields = parse(text, kind=KIND, version=VERSION, error=GapsError).fields("runs", "lines")
    runs = []
    for node in fields["runs"].items(longest=1000):
        if not isinstance(node.value, dict):
            node.fail("expected an object")
        runs.append({name: entry.text() for name, entry in node.fields(*node.value).items()})
    lines = tuple(_line_from(node) for node in fields["lines"].items(longest=100_000))
    for line in lines:
        if line.run >= len(runs):
            raise GapsError(f"a line names run {line.run}, the file has {len(runs)}")
        if not line.bound_seconds:
            raise GapsError(f"{line.trace} on {line.machine} at {line.share:.0%}: bound_seconds is 0")
    return Results(tuple(runs), lines)


def _line_from(node: Node) -> Line:
    texts = ("trace", "machine", "milp_said")
    integers = ("gaps", "budget_bytes", "run")
    numbers = ("share", "plain_seconds", "bound_seconds", "auto_seconds", "solve_seconds", "milp_seconds",
               "milp_solved_seconds", "milp_bound_seconds", "milp_limit_seconds")  # fmt: skip
    fields = node.fields(*texts, *integers, *numbers)
    values: dict[str, Any] = {name: fields[name].text() for name in texts}
    values |= {name: fields[name].integer() for name in integers}
    values |= {name: fields[name].number() for name in numbers}
    return Line(**values)


def read(path: Path) -> Results:
    return from_json(read_text(path, error=GapsError))


def render(path: Path) -> None:
    results = read(path)
    path.with_suffix(".md").write_text(page(results), encoding="utf-8")
    print(table(results))


# the command


def machine(text: str) -> Machine:
    """As bench/planners.py has it, with the host's costs if the name says so."""
    found = planners.machine(text.removesuffix(WITH_HOST))
    host = HOST if text.endswith(WITH_HOST) else found.hardware.host
    return Machine(text, replace(found.hardware, host=host), found.factor)


def _machines(text: str) -> list[Machine]:
    return [machine(part.strip()) for part in text.split(",")]


def _shares(text: str) -> list[float]:
    try:
        out = [float(part) / 100 for part in text.split(",")]
    except ValueError:
        out = [math.nan]
    if not all(0.0 <= share <= 1.0 for share in out):
        raise argparse.ArgumentTypeError(f"expected percentages such as 75,50,25, got {text!r}")
    return out


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=ROOT / "tests" / "traces", help="default: tests/traces")
    parser.add_argument("--only", help="names of traces; default: all in the folder")
    parser.add_argument("--machines", type=_machines, default=_machines(MACHINES), help=f"default: {MACHINES}")
    parser.add_argument(
        "--shares", type=_shares, default=list(SHARES), help="of the range, in percent; default: 75,50,25"
    )
    text = "for an integer program; 0: none (default 600)"
    parser.add_argument("--milp-seconds", type=float, default=MILP_SECONDS, help=text)
    parser.add_argument("--commit", help="the commit that is measured, where there is no repository to ask")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "gaps.json")
    parser.add_argument("--render", type=Path, help="only write the page beside this results file")
    return parser


def main(arguments: Sequence[str]) -> int:
    parsed = _parser().parse_args(arguments)
    if parsed.render:
        render(parsed.render)
        return 0
    earlier = read(parsed.json) if parsed.json.exists() else Results((), ())
    conditions = budget.conditions(arguments, parsed.commit, script="bench/gaps.py")
    results = replace(earlier, runs=(*earlier.runs, conditions))
    parsed.json.parent.mkdir(parents=True, exist_ok=True)
    for path in planners.paths(parsed.traces, parsed.only):
        trace, name = traceio.load(path), path.name.removesuffix(SUFFIX)
        for on in parsed.machines:
            for share in parsed.shares:
                line = measured(name, trace, on, share, parsed.milp_seconds, len(results.runs) - 1)
                print(" ".join(_cells(line)), line.milp_said, flush=True)
                results = results.with_line(line)
                write_text(parsed.json, to_json(results), error=GapsError)
    render(parsed.json)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main(sys.argv[1:]))
    except LegroomError as error:
        sys.exit(f"gaps.py: {error}")
