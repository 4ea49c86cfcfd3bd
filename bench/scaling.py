"""How planning with `auto` grows with the step: seconds by the number of gaps, and how close plans come.

    python bench/scaling.py [--gaps 100,300,700,1500,3000,5000] [--recorded gpt,vgg16]
    python bench/scaling.py --render bench/results/scaling.json

The traces are the GPT steps of bench/evaluate.py, made for a number of gaps, and after them the recorded steps; a gap
belongs to a storage of its own in nearly all cases. Both presets are planned for, at 75, 50 and 25 % of the range from
floor to plain peak. Seconds are those that somebody waits; "processor" those of all threads; the gap is that to the
bound; "program" is what the linear program takes by itself, with more ticks than auto lets it look at;
"quick" what planning takes without it and without asking others (as in re-plans). "per n log n" is the slowest of a
size over n log n, relative to the first size.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# The folder of a script is on the path, not the one above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import budget, tables
from bench.evaluate import gpt
from bench.record import SUFFIX
from bench.verdicts import Verdict
from bench.workloads import RECORDED
from legroom import traceio
from legroom.bound import lower_bound
from legroom.errors import LegroomError
from legroom.evaluate import floor_bytes
from legroom.hardware import PRESETS
from legroom.ir import Trace
from legroom.jsonio import Node, parse, read_text, write_text
from legroom.planners.auto import Auto

ROOT = Path(__file__).resolve().parents[1]
KIND, VERSION = "scaling benchmark", 2
SIZES = "100,300,700,1500,3000,5000"
MACHINES = ("h200", "rtx2080ti-pcie3")
SHARES = (0.75, 0.5, 0.25)
LIMITS = {700: 2.0, 5000: 20.0}  # storages: seconds within which a plan is promised; gaps are fewer, and count too
NEAR = 0.1  # of a size that something is promised for
MOST_GROWTH = 2.0  # of the seconds over n log n, from the first size to any other
MADE = "made"  # for a number of gaps, not recorded
_HEAD = (
    "step",
    "gaps",
    "storages",
    "ticks",
    "machine",
    "share",
    "plan s",
    "processor s",
    "program s",
    "gap",
    "quick s",
    "quick gap",
)
_SIZE_HEAD = ("gaps", "slowest s", "promised", "per n log n", "worst gap")


class ScalingError(LegroomError):
    """A file of results cannot be read."""


@dataclass(frozen=True, slots=True)
class Row:
    gaps: int
    storages: int
    ticks: int
    machine: str
    share: float
    seconds: float
    processor_seconds: float
    program_seconds: float
    quick_seconds: float
    gap: float
    quick_gap: float
    step: str = MADE


@dataclass(frozen=True, slots=True)
class Results:
    run: Mapping[str, str]
    rows: tuple[Row, ...]

    def of(self, gaps: int) -> list[Row]:
        return [row for row in self.made if row.gaps == gaps]

    @property
    def made(self) -> list[Row]:
        return [row for row in self.rows if row.step == MADE]

    @property
    def recorded(self) -> list[Row]:
        return [row for row in self.rows if row.step != MADE]

    @property
    def sizes(self) -> list[int]:
        return list(dict.fromkeys(row.gaps for row in self.made))


def measured(trace: Trace, step: str = MADE) -> list[Row]:
    floor, peak = floor_bytes(trace), trace.peak_bytes
    rows = []
    for machine in MACHINES:
        for share in SHARES:
            budget_bytes = floor + round(share * (peak - floor))
            worked = time.process_time()
            clock = [time.perf_counter()]
            plan = Auto()(trace, PRESETS[machine], budget_bytes)
            clock.append(time.perf_counter())
            worked = round(time.process_time() - worked, 3)
            bound = lower_bound(trace, PRESETS[machine], budget_bytes).seconds
            clock.append(time.perf_counter())
            quick = Auto(bound=False, thorough=False)(trace, PRESETS[machine], budget_bytes)
            clock.append(time.perf_counter())
            whole, program, rest = (round(clock[i + 1] - clock[i], 3) for i in range(3))
            assert plan.gap is not None
            row = Row(
                gaps=len(trace.gaps),
                storages=len(trace.storages),
                ticks=len(trace.ticks),
                machine=machine,
                share=share,
                seconds=whole,
                program_seconds=program,
                quick_seconds=rest,
                gap=plan.gap,
                quick_gap=quick.predicted_seconds / bound - 1,
                step=step,
                processor_seconds=worked,
            )
            rows.append(row)
            print("  ".join(_cells(row)), flush=True)
    return rows


# what comes of it


def growth(results: Results, gaps: int) -> float:
    """Of the slowest plan's seconds over n log n, relative to the first size."""

    def relative(size: int) -> float:
        return max(row.seconds for row in results.of(size)) / (size * math.log(size))

    return relative(gaps) / relative(results.sizes[0])


def verdicts(results: Results) -> list[Verdict]:
    out = []
    for size, limit in LIMITS.items():
        rows = [row for row in results.rows if row.storages <= size]
        out.append(_within(f"auto plans steps of up to {size:,} storages within {limit:.0f} s", rows, limit))
    for size, limit in LIMITS.items():
        rows = [row for row in results.made if abs(row.gaps - size) <= NEAR * size]
        out.append(_within(f"auto plans {size:,} gaps within {limit:.0f} s", rows, limit))
    grown = {size: growth(results, size) for size in results.sizes[1:]}
    figures = ", ".join(f"{size}: {factor:.2f}" for size, factor in grown.items())
    claim = f"seconds over n log n grow by a factor of {MOST_GROWTH:.0f} at most from the first size on"
    out.append(Verdict("gpt", claim, max(grown.values()) <= MOST_GROWTH if grown else None, figures or "one size"))
    return out


def _within(claim: str, rows: Sequence[Row], limit_seconds: float) -> Verdict:
    slowest = max(rows, key=lambda row: row.seconds, default=None)
    if slowest is None:
        return Verdict("", claim, None, "not planned")
    late = sum(row.seconds > limit_seconds for row in rows)
    figures = f"{slowest.seconds:.2f} s at most ({slowest.step}), {late} of {len(rows)} plans took longer"
    return Verdict("", claim, late == 0, figures)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.step,
        str(row.gaps),
        str(row.storages),
        str(row.ticks),
        row.machine,
        f"{row.share:.0%}",
        f"{row.seconds:.2f}",
        f"{row.processor_seconds:.2f}",
        f"{row.program_seconds:.2f}",
        f"{row.gap:.3%}",
        f"{row.quick_seconds:.2f}",
        f"{row.quick_gap:.3%}",
    )


def _size_cells(results: Results, gaps: int) -> tuple[str, ...]:
    promised = next((f"{limit:.0f} s" for at, limit in LIMITS.items() if abs(gaps - at) <= NEAR * at), "")
    rows = results.of(gaps)
    slowest, worst = max(row.seconds for row in rows), max(row.gap for row in rows)
    return str(gaps), f"{slowest:.2f}", promised, f"{growth(results, gaps):.2f}", f"{worst:.3%}"


def table(results: Results) -> str:
    sizes = tables.text(_SIZE_HEAD, [_size_cells(results, size) for size in results.sizes], words=())
    return "\n".join([sizes, "", *map(str, verdicts(results))])


def page(results: Results) -> str:
    run = ", ".join(f"{key} {value}" for key, value in results.run.items() if key != "command")
    lines = [(v.claim, v.word if v.met else f"**{v.word}**", v.figures) for v in verdicts(results)]
    assert __doc__ is not None
    return "\n\n".join(
        [
            "# How long auto plans",
            "Written by `python bench/scaling.py`. " + " ".join(__doc__.strip().split("\n\n")[-1].split()),
            f"Run: {run}",
            f"```console\n$ {results.run.get('command', '')}\n```",
            "## What must hold",
            tables.markdown(("claim", "", "figures"), lines, words=(0, 1, 2)),
            "## By size",
            tables.markdown(_SIZE_HEAD, [_size_cells(results, size) for size in results.sizes], words=()),
            "## Plans",
            tables.markdown(_HEAD, [_cells(row) for row in results.rows], words=(0, 4)) + "\n",
        ]
    )


def to_json(results: Results) -> str:
    rows = [asdict(row) for row in results.rows]
    return json.dumps({"kind": KIND, "version": VERSION, "run": dict(results.run), "rows": rows}, indent=1) + "\n"


def from_json(text: str) -> Results:
    fields = parse(text, kind=KIND, version=VERSION, error=ScalingError).fields("run", "rows")
    run = fields["run"]
    if not isinstance(run.value, dict):
        run.fail("expected an object")
    rows = tuple(_row_from(node) for node in fields["rows"].items(longest=10_000))
    if not any(row.step == MADE for row in rows) or any(row.gaps < 2 for row in rows):
        raise ScalingError("expected rows of made steps, all of 2 gaps and more")
    named = run.fields(*(Node(name, "run", ScalingError).text() for name in run.value))
    return Results({name: entry.text() for name, entry in named.items()}, rows)


def _row_from(node: Node) -> Row:
    integers = ("gaps", "storages", "ticks")
    numbers = {
        "share": 0.0,
        "processor_seconds": 0.0,
        "program_seconds": 0.0,
        "quick_seconds": 0.0,
        "gap": -1.0,
        "quick_gap": -1.0,
    }
    fields = node.fields("machine", "seconds", *integers, *numbers, optional=("step",))  # older files have made ones
    return Row(
        step=fields["step"].text() if "step" in fields else MADE,
        machine=fields["machine"].text(),
        seconds=fields["seconds"].number(least=1e-6, most=1e9),
        **{name: fields[name].integer() for name in integers},
        **{name: fields[name].number(least=least, most=1e9) for name, least in numbers.items()},
    )


# the command


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 10 <= int(part) <= 100_000 for part in parts):
        raise argparse.ArgumentTypeError(f"expected numbers of gaps from 10 on, separated by commas, got {text!r}")
    return [int(part) for part in parts]


def _steps(text: str) -> tuple[str, ...]:
    names = () if text == "-" else tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in RECORDED:
            raise argparse.ArgumentTypeError(f"no recorded step {name!r}; there are {', '.join(RECORDED)}")
    return names


def _results(text: str) -> Path:
    if Path(text).suffix == ".md":
        raise argparse.ArgumentTypeError(f"expected a JSON file, got {text!r}, where the page would be written")
    return Path(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gaps", type=_sizes, default=_sizes(SIZES), help=f"sizes, separated by commas ({SIZES})")
    parser.add_argument("--recorded", type=_steps, default=RECORDED, help="recorded steps; - for none (default: all)")
    parser.add_argument("--commit", help="the commit that is measured, where there is no repository to ask")
    parser.add_argument("--json", type=_results, default=ROOT / "bench" / "results" / "scaling.json")
    parser.add_argument("--render", type=_results, help="only write the page beside this results file")
    return parser


def _recorded(name: str) -> Trace:
    return traceio.load(ROOT / "tests" / "traces" / f"{name}{SUFFIX}")


def main(arguments: Sequence[str]) -> int:
    parsed = _parser().parse_args(arguments)
    if parsed.render:
        results = from_json(read_text(parsed.render, error=ScalingError))
        write_text(parsed.render.with_suffix(".md"), page(results), error=ScalingError)
        print(table(results))
        return 0
    run = budget.conditions(arguments, parsed.commit, script="bench/scaling.py")
    if not parsed.json.parent.is_dir():
        raise ScalingError(f"{parsed.json.parent}: there is no such folder to write results to")
    for small in (gpt(100), _recorded("lstm")):  # loads the compiled kernels, those for few gaps too, and scipy
        Auto()(small, PRESETS["h200"], (floor_bytes(small) + small.peak_bytes) // 2)
    print("  ".join(_HEAD))
    rows = [row for gaps in parsed.gaps for row in measured(gpt(gaps))]
    for name in parsed.recorded:
        rows += measured(_recorded(name), name)
    results = Results(run, tuple(rows))
    write_text(parsed.json, to_json(results), error=ScalingError)
    write_text(parsed.json.with_suffix(".md"), page(results), error=ScalingError)
    print("\n" + table(results))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main(sys.argv[1:]))
    except LegroomError as error:
        sys.exit(f"scaling.py: {error}")
