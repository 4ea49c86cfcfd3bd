"""Many steps at small budgets under hard caps: whether they get through. Several at once on one GPU, for time is not
what counts here.

    python bench/endurance.py [--only vit,bert] [--budgets smallest,25%] [--steps 1000] [--at-once 5]
    python bench/endurance.py --render bench/results/endurance.json

Every budget has a process of its own, as in `bench/budget.py`, and from its results file come the plain peaks, the
smallest peaks of the captured steps, and the peaks of the peers. `smallest` is the first of a few budgets from the
smallest peak upwards whose steps can be planned; `25%` is of the range from there to the plain peak. After the plan has
settled as many steps run as are asked for, or fewer where they would take longer than `--seconds`. Out of memory in any
of them ends the process, and is told.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

# The folder of a script is on the path, not the one above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import budget, tables
from bench.arguments import positive
from bench.children import OVER, TOLD, out_of_time, run_child
from bench.measure import LEGROOM, Job
from bench.rows import Results, Row, read, write
from bench.verdicts import SMALLEST, Verdict, lower_than, peaks_of_peers
from bench.workloads import names_of
from legroom.errors import LegroomError
from legroom.units import format_bytes

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_WORKLOADS, DEFAULT_BUDGETS = "vit,bert,gpt,resnet152,llama", "smallest"
STEPS, AT_ONCE = 1000, 5
_LOOK_SECONDS = 0.5  # a signal that comes just before a wait without end does not end it
GIB = 2**30
_HEAD = ("model", "budget", "cap GiB", "reserved", "allocated", "steps", "retries", "how it ended", "notes")
_WORDS = (0, 1, 7, 8)
_PREFACE = (
    "Written by `python bench/endurance.py`. Steps under hard caps on reserved memory, several processes on one GPU at "
    "once, so that nothing here tells how long a step takes; `bench/budget.py` does. Retries are times at which the "
    "allocator found nothing and emptied its cache."
)


def plain_of(known: Results, workload: str) -> Row:
    row = known.of(workload).get("plain")
    if row is None or not row.ok:
        raise LegroomError(
            f"there is no plain peak of {workload!r} in the results of bench/budget.py; measure it there"
        )
    return row


def job_for(known: Results, workload: str, spec: str, *, steps: int, seconds: float, device: str) -> Job:
    job = Job(workload, device, (LEGROOM + spec,), steps=steps, warmup=1, seconds=seconds)
    return budget.with_known(job, known.of(workload), plain_of(known, workload))


def measured(job: Job, folder: Path, timeout_seconds: float, until: float, stop: threading.Event) -> Row:
    """The row of a process that runs the job."""
    if time.monotonic() > until or stop.is_set():
        return Row(job.workload, job.contenders[0], "skipped", TOLD if stop.is_set() else OVER)
    folder.mkdir()
    ended = run_child(
        [sys.executable, str(ROOT / "bench" / "budget.py"), "--one", job.to_json()],
        folder,
        timeout_seconds=timeout_seconds,
        until=until,
        stop=stop,
        environment=budget.environment(),
    )
    if ended.rows:
        return ended.rows[0]
    status = ended.status if ended.status != "ok" else "error"
    return Row(job.workload, job.contenders[0], status, ended.detail or "ended without a result")


def verdicts(results: Results, peers: Results) -> list[Verdict]:
    out: list[Verdict] = []
    for workload in results.workloads():
        rows = results.of(workload)
        out += [_smallest(workload, rows.get(f"{LEGROOM}smallest"), peers), _caps(workload, rows)]
        out += [_through(workload, row) for row in rows.values()]
    return out


def _smallest(workload: str, row: Row | None, peers: Results) -> Verdict:
    peaks = peaks_of_peers(peers.of(workload))
    if row is None or not row.ok or not peaks:
        why = "no peer was measured" if row is not None and row.ok else "did not run"
        return Verdict(workload, SMALLEST, None, why)
    return replace(lower_than(peaks, row), workload=workload)


def _caps(workload: str, rows: dict[str, Row]) -> Verdict:
    ran = [row for row in rows.values() if row.ok]
    above = [row for row in ran if max(row.allocated_bytes, row.reserved_bytes) > row.cap_bytes]
    figures = ", ".join(
        f"{r.contender}: {format_bytes(r.reserved_bytes)} of {format_bytes(r.cap_bytes)}" for r in above
    )
    return Verdict(workload, "never above the cap", not above if ran else None, figures or f"{len(ran)} budgets")


def _through(workload: str, row: Row) -> Verdict:
    claim = f"{STEPS} steps at {row.contender.removeprefix(LEGROOM)} without running out of memory"
    if row.status in ("oom", "budget"):
        return Verdict(workload, claim, False, f"{row.status}: {row.detail[:200]}")
    enough = row.ok and row.steps >= STEPS
    return Verdict(workload, claim, True if enough else None, f"{row.steps} steps" if row.ok else row.status)


def _cells(row: Row) -> tuple[str, ...]:
    fallbacks = row.report.get("fallbacks")
    notes = [f"{name}: {count}" for name, count in fallbacks.items()] if isinstance(fallbacks, dict) else []
    return (
        row.workload,
        row.contender.removeprefix(LEGROOM),
        f"{row.cap_bytes / GIB:.2f}" if row.cap_bytes else "",
        f"{row.reserved_bytes / GIB:.2f}" if row.ok else "",
        f"{row.allocated_bytes / GIB:.2f}" if row.ok else "",
        str(row.steps) if row.ok else "",
        str(row.retries) if row.ok else "",
        "all steps ran" if row.ok else row.status,
        "; ".join([*notes, " ".join(row.detail[:300].split())]).strip("; "),
    )


def table(results: Results, peers: Results) -> str:
    return "\n".join([tables.text(_HEAD, _lines(results), words=_WORDS), "", *map(str, verdicts(results, peers))])


def _lines(results: Results) -> list[tuple[str, ...]]:
    lines = []
    for row in results.rows:
        *cells, notes = _cells(row)
        lines.append((*cells, f"run {row.run}; {notes}".rstrip("; ") if len(results.runs) > 1 else notes))
    return lines


def page(results: Results, peers: Results) -> str:
    out = ["# Small budgets, many steps", _PREFACE]
    for number, run in enumerate(results.runs):
        out.append(f"Run {number}: " + ", ".join(f"{key} {value}" for key, value in run.items() if key != "command"))
        out.append(f"```console\n$ {run.get('command', '')}\n```")
    out.append(tables.markdown(_HEAD, _lines(results), words=_WORDS))
    out.append("## What must hold")
    lines = [(v.workload, v.claim, v.word if v.met else f"**{v.word}**", v.figures) for v in verdicts(results, peers)]
    out.append(tables.markdown(("model", "claim", "", "figures"), lines, words=(0, 1, 2, 3)))
    return "\n\n".join(out) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=names_of, default=names_of(DEFAULT_WORKLOADS), help="workloads")
    parser.add_argument(
        "--budgets", type=_budgets, default=_budgets(DEFAULT_BUDGETS), help="smallest, or shares as 25%%"
    )
    parser.add_argument("--steps", type=positive, default=STEPS, help=f"default {STEPS}")
    parser.add_argument("--seconds", type=float, default=600.0, help="fewer steps where they take longer (default 600)")
    parser.add_argument("--at-once", type=positive, default=AT_ONCE, help=f"processes (default {AT_ONCE})")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one process (default 1800)")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for the whole run")
    parser.add_argument("--budget", type=Path, default=ROOT / "bench" / "results" / "budget.json", help="its results")
    parser.add_argument("--from", dest="earlier", type=Path, help="an earlier results file to go on from")
    parser.add_argument("--commit", help="the commit that is measured, where there is no repository to ask")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the benchmark itself")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "endurance.json")
    parser.add_argument("--render", type=Path, help="only write the page beside this results file")
    return parser


def _budgets(text: str) -> list[str]:
    out = [name.strip() for name in text.split(",")]
    for name in out:
        share = name[:-1]
        if name != "smallest" and not (name.endswith("%") and share.isdigit() and int(share) <= 100):
            raise argparse.ArgumentTypeError(f"expected smallest or a share such as 25%, got {name!r}")
    return out


def main(arguments: Sequence[str], stop: threading.Event | None = None) -> int:
    """stop: whoever sets it ends the run early; what runs is killed and what waits is skipped."""
    parsed = _parser().parse_args(arguments)
    peers = read(parsed.budget)
    if parsed.render:
        results = read(parsed.render)
        parsed.render.with_suffix(".md").write_text(page(results, peers), encoding="utf-8")
        print(table(results, peers))
        return 0
    earlier = read(parsed.earlier) if parsed.earlier else Results((), ())
    conditions = budget.conditions(arguments, parsed.commit, "bench/endurance.py")
    results = replace(earlier, runs=(*earlier.runs, conditions))
    until = time.monotonic() + parsed.limit
    jobs = [
        job_for(peers, workload, spec, steps=parsed.steps, seconds=parsed.seconds, device=parsed.device)
        for spec in parsed.budgets
        for workload in parsed.only
    ]
    lock, stop = threading.Lock(), stop or threading.Event()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(parsed.at_once) as pool:

        def work(number: int, job: Job) -> None:
            nonlocal results
            row = measured(job, Path(folder) / str(number), parsed.timeout, until, stop)
            with lock:
                if not (out_of_time(row) and row.contender in results.of(row.workload)):  # else the known one stays
                    results = results.with_rows([replace(row, run=len(results.runs) - 1)])
                write(parsed.json, results)
                print("  " + "  ".join(_cells(row)), flush=True)

        try:
            waits = {pool.submit(work, number, job) for number, job in enumerate(jobs)}
            while waits:
                done, waits = wait(waits, timeout=_LOOK_SECONDS, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
        except BaseException:
            stop.set()  # else those that run, and those that wait, would be waited for
            raise
    parsed.json.with_suffix(".md").write_text(page(results, peers), encoding="utf-8")
    print("\n" + table(results, peers))
    return 1 if any(row.status in budget.FAILURES for row in results.rows if row.run == len(results.runs) - 1) else 0


def _told_to_end() -> threading.Event:
    """Set by SIGTERM. An exception out of the handler would come anywhere, with a lock held that others wait for."""
    told = threading.Event()

    def handle(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would come in the middle of set()
        told.set()

    signal.signal(signal.SIGTERM, handle)
    if hasattr(signal, "pthread_sigmask"):  # whoever started it may have held signals back
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return told


if __name__ == "__main__":
    told = _told_to_end()
    try:
        status = main(sys.argv[1:], told)
        sys.exit(128 + signal.SIGTERM if told.is_set() else status)
    except LegroomError as error:
        sys.exit(f"endurance.py: {error}")
