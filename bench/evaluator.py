"""Is the evaluator true? Predicted step time and peak of legroom's plans against the steps as they then run.

    python bench/evaluator.py [--only gpt,vgg16] [--shares 75,50,25] [--limit 500] [--from bench/results/evaluator.json]
    python bench/evaluator.py --tiny
    python bench/evaluator.py --render bench/results/evaluator.json

Every model has a process of its own. In it the plain step is timed, then `legroom.fit` at each share of the range from
the smallest peak to the plain peak, as a hard cap: steps until the plan has settled, then 20 that are timed by events
on the device; the median counts. The plain peak and the smallest one are read from the recorded trace where there is
one (`--traces`), which saves a process and a capture; otherwise they are measured first.

Results are written after each process. `--from` takes an earlier file along, so that a long run can be made in parts.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

# The folder of a script is on the path, not the one above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import budget, tables
from bench.children import run_child
from bench.measure import LEGROOM, Job
from bench.record import SUFFIX
from bench.rows import Results, Row, Status, read, write
from bench.verdicts import Verdict
from bench.workloads import RECORDED, TINY, names_of
from legroom import traceio
from legroom.errors import LegroomError
from legroom.evaluate import floor_bytes

ROOT = Path(__file__).resolve().parents[1]
SHARES = ("75%", "50%", "25%")
STEPS, WARMUP_STEPS = 20, 8
MEAN_TIME_ERROR, WORST_TIME_ERROR, WORST_PEAK_ERROR = 0.01, 0.03, 0.01
GIB = 2**30
_HEAD = (
    "model", "budget", "GiB", "measured ms", "predicted ms", "error", "measured GiB", "predicted GiB", "error",
    "steps", "notes",
)  # fmt: skip
_WORDS = (0, 10)
_CURVES = ("predicted_curve", "measured_curve")  # thousands of figures that say nothing here
_PREFACE = (
    "Written by `python bench/evaluator.py`. Predicted is what the simulator says about the plan that ran; measured is "
    "the median of single steps by events on the device, and the most that was allocated in any of them. Budgets are "
    "shares of the range from the smallest peak to the plain peak, and hard caps on reserved memory. `plain` is the "
    "step without legroom against the simulated step without any action."
)


@dataclass(frozen=True, slots=True)
class Options:
    device: str
    shares: tuple[str, ...]
    steps: int
    seconds: float
    timeout_seconds: float
    until: float  # by time.monotonic(): nothing is started or goes on after it
    traces: Path


class Session:
    """Starts the processes, keeps the results and writes them after each."""

    def __init__(self, options: Options, results: Results, path: Path, folder: Path) -> None:
        self.options = options
        self.results = results
        self.path = path
        self.folder = folder
        self.run = len(results.runs) - 1

    def model(self, name: str) -> None:
        plain_bytes, floor = self._range(name)
        contenders = ["plain", *(LEGROOM + share for share in self.options.shares)]
        if not plain_bytes:
            (plain,) = self._child(self._job(name, contenders[:1], 0, 0))
            plain_bytes, contenders = plain.allocated_bytes, contenders[1:]
            if not plain.ok:
                self._keep([Row(name, c, "skipped", f"plain did not run: {plain.detail}"[:200]) for c in contenders])
                return
        while contenders:
            contenders = contenders[len(self._child(self._job(name, contenders, plain_bytes, floor))) :]

    def _range(self, name: str) -> tuple[int, int]:
        path = self.options.traces / f"{name}{SUFFIX}"
        if not path.exists():
            return 0, 0
        trace = traceio.load(path)
        return trace.peak_bytes, floor_bytes(trace)

    def _job(self, name: str, contenders: Sequence[str], plain_bytes: int, floor: int) -> Job:
        options = self.options
        return Job(
            name,
            options.device,
            tuple(contenders),
            steps=options.steps,
            warmup=WARMUP_STEPS,
            seconds=options.seconds,
            uncapped_only=True,
            plain_bytes=plain_bytes,
            floor_bytes=floor,
        )

    def _child(self, job: Job) -> list[Row]:
        """One process; a row for each contender it got to, at least one."""
        if time.monotonic() > self.options.until:
            rows = [Row(job.workload, c, "skipped", "the time for the whole run was over") for c in job.contenders]
            self._keep(rows)
            return rows
        ended = run_child(
            [sys.executable, str(Path(budget.__file__).resolve()), "--one", job.to_json()],
            self.folder,
            timeout_seconds=self.options.timeout_seconds,
            until=self.options.until,
            environment=budget.environment(),
        )
        rows = list(ended.rows)
        if ended.status != "ok" or not rows:
            status: Status = ended.status if ended.status != "ok" else "error"
            late = job.contenders[len(rows) : len(rows) + 1]
            rows += [Row(job.workload, c, status, ended.detail or "ended without a result") for c in late]
        self._keep(rows)
        return rows

    def _keep(self, rows: Sequence[Row]) -> None:
        for row in rows:
            said = " ".join(filter(None, _cells(row, error_of(row)))) if row.ok else f"{row.status}: {row.detail}"
            print(f"{row.workload} {row.contender}: {said} ({row.wall_seconds:.0f} s)", flush=True)
        kept = [replace(r, run=self.run, report={k: v for k, v in r.report.items() if k not in _CURVES}) for r in rows]
        self.results = self.results.with_rows(kept)
        write(self.path, self.results)


@dataclass(frozen=True, slots=True)
class Error:
    """How far a prediction lies above what was measured, as shares; negative below."""

    time: float
    peak: float


def error_of(row: Row, *, baseline_seconds: float = 0.0) -> Error | None:
    """None where nothing was predicted. The plain step's prediction is another row's: what it says of no action."""
    seconds = baseline_seconds or row.reported("predicted_step_seconds")
    nbytes = row.reported("predicted_peak_bytes")
    if not row.ok or not seconds or not row.median_ms or (row.report and not row.reported("planned_steps")):
        return None
    peak = nbytes / row.allocated_bytes - 1 if nbytes and row.allocated_bytes else 0.0
    return Error(seconds * 1e3 / row.median_ms - 1, peak)


def errors(results: Results) -> dict[tuple[str, str], Error]:
    """Of all planned steps. Plain ones are shown, but are no plans."""
    found = {(row.workload, row.contender): error_of(row) for row in results.rows if row.contender != "plain"}
    return {key: error for key, error in found.items() if error is not None}


def verdicts(results: Results) -> list[Verdict]:
    """Whatever was to run and has no prediction keeps every claim from being met."""
    found = errors(results)
    without = [row for row in results.rows if row.contender != "plain" and (row.workload, row.contender) not in found]
    times = {key: abs(error.time) for key, error in found.items()}
    peaks = {key: abs(error.peak) for key, error in found.items()}
    missing = f"; without a figure: {', '.join(f'{r.workload} {r.contender}' for r in without)}" if without else ""

    def verdict(claim: str, value: float, limit: float, figures: str) -> Verdict:
        if not found:
            return Verdict("", claim, None, f"nothing measured{missing}")
        return Verdict("", claim, value <= limit and not without, f"{value:.2%} {figures}{missing}")

    mean = sum(times.values()) / len(times) if times else 0.0
    slowest = max(times, key=lambda key: times[key], default=("", ""))
    highest = max(peaks, key=lambda key: peaks[key], default=("", ""))
    count = f"over {len(found)} plans of {len({name for name, _ in found})} models"
    return [
        verdict(f"predicted step time: mean error ≤ {MEAN_TIME_ERROR:.0%}", mean, MEAN_TIME_ERROR, count),
        verdict(
            f"predicted step time: worst error ≤ {WORST_TIME_ERROR:.0%}",
            times.get(slowest, 0.0),
            WORST_TIME_ERROR,
            f"({' '.join(slowest)})",
        ),
        verdict(
            f"predicted peak: worst error ≤ {WORST_PEAK_ERROR:.0%}",
            peaks.get(highest, 0.0),
            WORST_PEAK_ERROR,
            f"({' '.join(highest)})",
        ),
    ]


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    for workload in results.workloads():
        rows = results.of(workload)
        planned = [row for row in rows.values() if row.ok and row.reported("baseline_seconds")]
        for row in rows.values():
            plain = row.contender == "plain" and planned
            seconds = planned[0].reported("baseline_seconds") if plain else 0.0
            yield _cells(row, error_of(row, baseline_seconds=seconds), predicted_seconds=seconds)


def _cells(row: Row, error: Error | None, *, predicted_seconds: float = 0.0) -> tuple[str, ...]:
    seconds = predicted_seconds or row.reported("predicted_step_seconds")
    peak = row.reported("predicted_peak_bytes")
    return (
        row.workload,
        row.contender.removeprefix(LEGROOM),
        f"{row.cap_bytes / GIB:.2f}" if row.cap_bytes else "",
        f"{row.median_ms:.1f}" if row.ok else "",
        f"{seconds * 1e3:.1f}" if row.ok and seconds else "",
        f"{error.time:+.2%}" if error is not None else "",
        f"{row.allocated_bytes / GIB:.2f}" if row.ok else "",
        f"{peak / GIB:.2f}" if row.ok and peak else "",
        f"{error.peak:+.2%}" if error is not None and peak else "",
        f"{row.steps}" if row.ok else "",
        _notes(row),
    )


def _notes(row: Row) -> str:
    if not row.ok:
        return f"{row.status}: {row.detail}"[:100]
    fallbacks = row.report.get("fallbacks", {})
    said = [f"{name} ({count}×)" for name, count in fallbacks.items()] if isinstance(fallbacks, dict) else []
    if row.retries:
        said.insert(0, f"{row.retries} retries")
    if row.report and not row.reported("planned_steps"):
        said.insert(0, "never planned")
    return "; ".join(said)[:100]


def page(results: Results) -> str:
    out = ["# Predicted and measured", _PREFACE]
    for number, run in enumerate(results.runs):
        out.append(f"Run {number}: " + ", ".join(f"{key} {value}" for key, value in run.items() if key != "command"))
        out.append(f"```console\n$ {run.get('command', '')}\n```")
    out.append(tables.markdown(_HEAD, list(lines(results)), words=_WORDS))
    out.append("## What must hold")
    found = [(verdict.claim, verdict.word, verdict.figures) for verdict in verdicts(results)]
    out.append(tables.markdown(("claim", "", "figures"), found, words=(0, 1, 2)))
    return "\n\n".join(out) + "\n"


def render(path: Path) -> Results:
    results = read(path)
    path.with_suffix(".md").write_text(page(results), encoding="utf-8")
    print(f"\n{tables.text(_HEAD, list(lines(results)), words=_WORDS)}\n")
    for verdict in verdicts(results):
        print(f"{verdict.word:12} {verdict.claim}: {verdict.figures}")
    return results


def _shares(text: str) -> tuple[str, ...]:
    out = tuple(f"{part.strip().removesuffix('%')}%" for part in text.split(","))
    for share in out:
        try:
            known = 0 <= float(share[:-1]) <= 100
        except ValueError:
            known = False
        if not known:
            raise argparse.ArgumentTypeError(f"expected percentages from 0 to 100, got {share!r}")
    return out


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=names_of, help=f"default: {','.join(RECORDED)}")
    parser.add_argument("--tiny", action="store_true", help=f"on the CPU, as a trial: {','.join(TINY)}")
    parser.add_argument("--shares", type=_shares, default=SHARES, help="of the range (default 75,50,25)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"timed steps (default {STEPS})")
    parser.add_argument("--seconds", type=float, default=30.0, help="fewer steps where they take longer (default 30)")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for one budget (default 90)")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds for the whole run")
    parser.add_argument("--traces", type=Path, default=ROOT / "tests" / "traces", help="default: tests/traces")
    parser.add_argument("--from", dest="earlier", type=Path, help="an earlier results file to go on from")
    parser.add_argument("--commit", help="the commit that is measured, where there is no repository to ask")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda, with --tiny cpu")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "evaluator.json")
    parser.add_argument("--render", type=Path, help="only write the page beside this results file")
    return parser


def main(arguments: Sequence[str]) -> int:
    parsed = _parser().parse_args(arguments)
    if parsed.render:
        render(parsed.render)
        return 0
    earlier = read(parsed.earlier) if parsed.earlier else Results((), ())
    options = Options(
        device=parsed.device or ("cpu" if parsed.tiny else "cuda"),
        shares=parsed.shares,
        steps=parsed.steps,
        seconds=parsed.seconds,
        timeout_seconds=parsed.timeout,
        until=time.monotonic() + parsed.limit,
        traces=parsed.traces,
    )
    conditions = budget.conditions(arguments, parsed.commit)
    conditions["command"] = conditions["command"].replace("bench/budget.py", "bench/evaluator.py")
    results = replace(earlier, runs=(*earlier.runs, conditions))
    with tempfile.TemporaryDirectory() as folder:
        session = Session(options, results, parsed.json, Path(folder))
        for name in parsed.only or (TINY if parsed.tiny else RECORDED):
            session.model(name)
    render(parsed.json)
    return 1 if any(row.status in budget.FAILURES for row in session.results.rows if row.run == session.run) else 0


if __name__ == "__main__":
    # Ended from outside, it leaves by way of `finally`, and a child that measures ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main(sys.argv[1:]))
    except LegroomError as error:
        sys.exit(f"evaluator.py: {error}")
