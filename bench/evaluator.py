"""Is the evaluator true? Predicted step time and peak of legroom's plans against the steps as they then run.

    python bench/evaluator.py [--only gpt,vgg16] [--shares 75,50,25] [--limit 500] [--from bench/results/evaluator.json]
    python bench/evaluator.py --tiny
    python bench/evaluator.py --render bench/results/evaluator.json [--budget bench/results/budget.json]

Every model has a process of its own. In it the plain step is timed, then `legroom.fit` at each share of the range from
the smallest peak to the plain peak, as a hard cap: steps until the plan has settled, then 20 that are timed by events
on the device; the median counts. The plain peak and the smallest one are read from the recorded trace where there is
one (`--traces`), which saves a process and a capture; otherwise they are measured first.

Results are written after each process. `--from` takes an earlier file along, so that a long run can be made in parts.
`--budget` takes along what `bench/budget.py` measured of the same models: each of its plans below the plain peak is a
prediction that ran. Only rows of the newest commit in that file count, and of two rows the later one.
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
from bench.arguments import positive
from bench.children import OVER, out_of_time, run_child
from bench.measure import LEGROOM, STEADY, Job
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
ROUNDS = 5  # of so many steps each, where they are not steady
MEAN_TIME_ERROR, WORST_TIME_ERROR, WORST_PEAK_ERROR = 0.01, 0.03, 0.01
GIB = 2**30
_HEAD = (
    "model", "budget", "GiB", "measured ms", "simulated ms", "error", "predicted ms", "error", "measured GiB",
    "predicted GiB", "error", "steps", "notes",
)  # fmt: skip
_WORDS = (0, 12)
_PREFACE = (
    "Written by `python bench/evaluator.py`. Simulated is what the simulator says about the plan that ran, from "
    "op times and copies alone. Predicted is what the report says: the same, multiplied by how much longer the "
    "first eight steps of that very plan took than was simulated. Measured is the median of single later steps by "
    "events on the device, and the most that was allocated in any of them. Where others use the machine, its host is "
    "slower for some steps than for others, and a step that waits for it takes a third longer: so eight steps, or "
    f"twenty, of which a quarter took {STEADY:.0%} longer than another quarter are timed again, up to six times and "
    f"{ROUNDS}, and the steadiest count; rows of runs before d768a28 were timed once. Budgets are shares of "
    "the range from the smallest peak to the plain peak, or a peer's cap in `bench/budget.py`, and hard caps on "
    "reserved memory. `plain` is the step without legroom against the simulated step without any action."
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
    planners: tuple[str, ...]  # each at every share
    plans: Path | None = None  # a folder of plans that were made before, see plan_file()


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
        contenders = ["plain", *(f"{p}@{share}" for share in self.options.shares for p in self.options.planners)]
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
            rounds=ROUNDS,
            plain_bytes=plain_bytes,
            floor_bytes=floor,
            plans=self._plans(name, contenders),
        )

    def _plans(self, name: str, contenders: Sequence[str]) -> dict[str, str]:
        folder = self.options.plans
        files = {c: plan_file(folder, name, c) for c in contenders} if folder is not None else {}
        return {contender: str(path.resolve()) for contender, path in files.items() if path.exists()}

    def _child(self, job: Job) -> list[Row]:
        """One process; a row for each contender it got to, at least one."""
        if time.monotonic() > self.options.until:
            rows = [Row(job.workload, c, "skipped", OVER) for c in job.contenders]
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
            said = " ".join(filter(None, _cells(row))) if row.ok else f"{row.status}: {row.detail}"
            print(f"{row.workload} {row.contender}: {said} ({row.wall_seconds:.0f} s)", flush=True)
        known = {(row.workload, row.contender) for row in self.results.rows if row.ok}
        new = [row for row in rows if not (out_of_time(row) and (row.workload, row.contender) in known)]
        self.results = self.results.with_rows(replace(row, run=self.run) for row in new)
        write(self.path, self.results)


def plan_file(folder: Path, workload: str, contender: str) -> Path:
    return folder / f"{workload}_{contender.replace('@', '_').removesuffix('%')}.json"


def with_budgets(results: Results, budgets: Results) -> Results:
    """These results and the plans of recorded models that `bench/budget.py` ran below the plain peak."""
    commit = budgets.runs[-1].get("commit") if budgets.runs else None
    runs = (*results.runs, *budgets.runs)
    rows = [*results.rows]
    for row in budgets.rows:
        planned = row.contender.startswith(LEGROOM) and row.contender != f"{LEGROOM}above"
        newest = budgets.runs[row.run].get("commit") == commit
        if row.workload in RECORDED and newest and (planned or row.contender == "plain") and not out_of_time(row):
            rows.append(replace(row, run=row.run + len(results.runs)))
    rows.sort(key=lambda row: str(runs[row.run].get("date", "")))
    merged = Results(runs, ()).with_rows(rows).rows
    used = sorted({row.run for row in merged})
    return Results(tuple(runs[n] for n in used), tuple(replace(row, run=used.index(row.run)) for row in merged))


@dataclass(frozen=True, slots=True)
class Error:
    """How far a prediction lies above what was measured, as shares; negative below."""

    simulated: float  # of the time, before the plan's own first steps are heard
    time: float
    peak: float


def simulated_seconds(row: Row, of: str = "predicted_step_seconds") -> float:
    """A number of the report without the factor from measured steps."""
    return row.reported(of) / (row.reported("pace") or 1.0)


def error_of(row: Row) -> Error | None:
    """None where nothing was predicted."""
    seconds, nbytes = row.reported("predicted_step_seconds"), row.reported("predicted_peak_bytes")
    if not row.ok or not seconds or not row.median_ms or not row.reported("planned_steps"):
        return None
    measured = row.median_ms * 1e-3
    peak = nbytes / row.allocated_bytes - 1 if nbytes and row.allocated_bytes else 0.0
    return Error(simulated_seconds(row) / measured - 1, seconds / measured - 1, peak)


def errors(results: Results) -> dict[tuple[str, str], Error]:
    """Of all planned steps. Plain ones are shown, but are no plans."""
    found = {(row.workload, row.contender): error_of(row) for row in results.rows if row.contender != "plain"}
    return {key: error for key, error in found.items() if error is not None}


def verdicts(results: Results) -> list[Verdict]:
    """Whatever was to run and has no prediction keeps every claim from being met."""
    found = errors(results)
    times = {key: error.time for key, error in found.items()}
    return [
        _mean(results, "predicted step time", times, MEAN_TIME_ERROR),
        _worst(results, "predicted step time", times, WORST_TIME_ERROR),
        _worst(results, "predicted peak", {key: error.peak for key, error in found.items()}, WORST_PEAK_ERROR),
    ]


def beside(results: Results) -> list[Verdict]:
    """What the claims do not say: how far off the simulator is by itself, and whether all models are there."""
    found = errors(results)
    simulated = {key: error.simulated for key, error in found.items()}
    expected = TINY if set(results.workloads()) <= set(TINY) else RECORDED
    counts = {name: sum(workload == name for workload, _ in found) for name in expected}
    short = [f"{name} {count}" for name, count in counts.items() if count < len(SHARES)]
    figures = f"of {len(expected)} models; fewer: {', '.join(short)}" if short else f"{len(expected)} models"
    return [
        _mean(results, "simulated step time", simulated, MEAN_TIME_ERROR),
        _worst(results, "simulated step time", simulated, WORST_TIME_ERROR),
        Verdict("", f"every model at {len(SHARES)} budgets", not short, figures),
    ]


def _mean(results: Results, what: str, of: dict[tuple[str, str], float], limit: float) -> Verdict:
    value = sum(map(abs, of.values())) / max(1, len(of))
    figures = f"over {len(of)} plans of {len({name for name, _ in of})} models"
    return _verdict(results, f"{what}: mean error ≤ {limit:.0%}", value, limit, figures)


def _worst(results: Results, what: str, of: dict[tuple[str, str], float], limit: float) -> Verdict:
    key = max(of, key=lambda key: abs(of[key]), default=("", ""))
    return _verdict(results, f"{what}: worst error ≤ {limit:.0%}", abs(of.get(key, 0.0)), limit, f"({' '.join(key)})")


def _verdict(results: Results, claim: str, value: float, limit: float, figures: str) -> Verdict:
    found = errors(results)
    without = [row for row in results.rows if row.contender != "plain" and (row.workload, row.contender) not in found]
    missing = f"; without a figure: {', '.join(f'{r.workload} {r.contender}' for r in without)}" if without else ""
    if not found:
        return Verdict("", claim, None, f"nothing measured{missing}")
    return Verdict("", claim, value <= limit and not without, f"{value:.2%} {figures}{missing}")


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    for workload in results.workloads():
        rows = results.of(workload)
        planned = [row for row in rows.values() if row.ok and row.reported("baseline_seconds")]
        for row in rows.values():
            # What is simulated of the plain step stands in the rows beside it.
            plain = row.contender == "plain" and planned
            baseline = simulated_seconds(planned[0], "baseline_seconds") if plain else 0.0
            *cells, notes = _cells(row, baseline_seconds=baseline)
            yield (*cells, f"run {row.run}; {notes}".rstrip("; ") if len(results.runs) > 1 else notes)


def _cells(row: Row, *, baseline_seconds: float = 0.0) -> tuple[str, ...]:
    error = error_of(row)
    simulated, seconds = baseline_seconds or simulated_seconds(row), row.reported("predicted_step_seconds")
    peak = row.reported("predicted_peak_bytes")
    return (
        row.workload,
        row.contender.removeprefix(LEGROOM),
        f"{row.cap_bytes / GIB:.2f}" if row.cap_bytes else "",
        f"{row.median_ms:.1f}" if row.ok else "",
        f"{simulated * 1e3:.1f}" if row.ok and simulated else "",
        f"{simulated * 1e3 / row.median_ms - 1:+.2%}" if row.ok and simulated else "",
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
    if row.host_ms:
        said.insert(0, f"host {row.host_ms:.1f} ms")
    if row.detail:
        said.insert(0, row.detail)
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
    found = [(verdict.claim, verdict.word, verdict.figures) for verdict in (*verdicts(results), *beside(results))]
    out.append(tables.markdown(("claim", "", "figures"), found, words=(0, 1, 2)))
    return "\n\n".join(out) + "\n"


def render(path: Path, *, budgets: Path | None = None) -> Results:
    if budgets is not None:
        write(path, with_budgets(read(path) if path.exists() else Results((), ()), read(budgets)))
    results = read(path)
    path.with_suffix(".md").write_text(page(results), encoding="utf-8")
    print(f"\n{tables.text(_HEAD, list(lines(results)), words=_WORDS)}\n")
    for verdict in (*verdicts(results), *beside(results)):
        print(f"{verdict.word:12} {verdict.claim}: {verdict.figures}")
    return results


def shares(text: str) -> tuple[str, ...]:
    out = tuple(f"{part.strip().removesuffix('%')}%" for part in text.split(","))
    for share in out:
        try:
            known = 0 <= float(share[:-1]) <= 100
        except ValueError:
            known = False
        if not known:
            raise argparse.ArgumentTypeError(f"expected percentages from 0 to 100, got {share!r}")
    return out


def add_options(parser: argparse.ArgumentParser, *, timeout_seconds: float, results: str) -> None:
    """Those of every benchmark that runs models at shares of their range. results: the name of the file."""
    parser.add_argument("--shares", type=shares, default=SHARES, help="of the range (default 75,50,25)")
    parser.add_argument("--steps", type=positive, default=STEPS, help=f"timed steps (default {STEPS})")
    parser.add_argument("--seconds", type=float, default=30.0, help="fewer steps where they take longer (default 30)")
    parser.add_argument(
        "--timeout", type=float, default=timeout_seconds, help=f"seconds for one budget (default {timeout_seconds:.0f})"
    )
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds for the whole run")
    parser.add_argument("--traces", type=Path, default=ROOT / "tests" / "traces", help="default: tests/traces")
    parser.add_argument("--from", dest="earlier", type=Path, help="an earlier results file to go on from")
    parser.add_argument("--commit", help="the commit that is measured, where there is no repository to ask")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda, with --tiny cpu")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / results)
    parser.add_argument("--render", type=Path, help="only write the page beside this results file")


def run_models(
    parsed: argparse.Namespace,
    conditions: dict[str, str],
    names: Sequence[str],
    *planners: str,
    plans: Path | None = None,
) -> int:
    """Measure these models by the options of add_options(); 1 where something failed. planners: other than auto.
    plans: made before, taken where there is one."""
    earlier = read(parsed.earlier) if parsed.earlier else Results((), ())
    options = Options(
        device=parsed.device or ("cpu" if parsed.tiny else "cuda"),
        shares=parsed.shares,
        steps=parsed.steps,
        seconds=parsed.seconds,
        timeout_seconds=parsed.timeout,
        until=time.monotonic() + parsed.limit,
        traces=parsed.traces,
        planners=planners or (LEGROOM.removesuffix("@"),),
        plans=plans,
    )
    results = replace(earlier, runs=(*earlier.runs, conditions))
    with tempfile.TemporaryDirectory() as folder:
        session = Session(options, results, parsed.json, Path(folder))
        for name in names:
            session.model(name)
    return 1 if any(row.status in budget.FAILURES for row in session.results.rows if row.run == session.run) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=names_of, help=f"default: {','.join(RECORDED)}")
    parser.add_argument("--tiny", action="store_true", help=f"on the CPU, as a trial: {','.join(TINY)}")
    add_options(parser, timeout_seconds=90.0, results="evaluator.json")
    parser.add_argument("--budget", type=Path, help="results of bench/budget.py to take along")
    return parser


def main(arguments: Sequence[str]) -> int:
    parsed = _parser().parse_args(arguments)
    if parsed.render:
        render(parsed.render, budgets=parsed.budget)
        return 0
    conditions = budget.conditions(arguments, parsed.commit, script="bench/evaluator.py")
    failed = run_models(parsed, conditions, parsed.only or (TINY if parsed.tiny else RECORDED))
    render(parsed.json, budgets=parsed.budget)
    return failed


if __name__ == "__main__":
    # Ended from outside, it leaves by way of `finally`, and a child that measures ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main(sys.argv[1:]))
    except LegroomError as error:
        sys.exit(f"evaluator.py: {error}")
