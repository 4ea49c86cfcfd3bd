"""Step time against memory: legroom and what others offer, under the same hard caps on one GPU.

    python bench/budget.py [--workloads gpt,resnet152] [--contenders plain,checkpoint,legroom@50%] [--quick]
    python bench/budget.py --render bench/results/budget.json

Every contender runs in a process of its own, with one exception: legroom's budgets of one workload follow one another
in one process (the room closed, the cache emptied, nothing left alive), which saves a process start each; `--apart`
gives each its own. A peer first runs without a cap, to see what it allocates and reserves, and then capped at 1.03
times its peak, or at what it reserved where that is less or the former fails. The capped time counts, and legroom is
given exactly that cap as its budget. Plain runs without a cap. The caps are
`torch.cuda.set_per_process_memory_fraction`, which counts reserved memory, for everyone, legroom included.

Contenders: plain, checkpoint, every-other, selective, torchtune, stream-offload, save-on-cpu; and legroom@WHAT, where
WHAT is `above` (a tenth more than plain reserves), the name of a peer (its cap), `50%` (of the range from legroom's
smallest peak to the plain peak), `smallest` (the first of a few budgets from the smallest peak upwards whose steps can
be planned) or a size such as `12GiB`. `legroom` alone stands for above, the peers measured, 75, 50, 35, 25 % and
smallest.

Results are written after each process, so that a run cut short loses little. `--from` takes an earlier file along: its
plain peaks, caps and smallest peaks serve for this run, and what is not measured again keeps its row, marked with the
run it came from.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

# The folder of a script is on the path, not the one above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.arguments import positive
from bench.children import OVER, append_row, out_of_time, run_child
from bench.measure import LEGROOM, Job, measure, needed_bytes
from bench.meters import rounded_up
from bench.peers import PEERS
from bench.render import draw, page, table
from bench.rows import Results, Row, Status, read, write
from bench.workloads import names_of
from legroom.errors import LegroomError
from legroom.units import format_bytes, parse_bytes

ROOT = Path(__file__).resolve().parents[1]
SHARES = ("75%", "50%", "35%", "25%")
DEFAULT_WORKLOADS = "gpt,gpt_batch4,resnet152,bert_lengths,vit,llama"
QUICK_CONTENDERS = "plain,checkpoint,legroom@above,legroom@checkpoint,legroom@50%"
ABOVE_PLAIN = 1.1
# Of the environment: whether a profiler, once it has run, goes on slowing every launch.
SETTINGS = ("TEARDOWN_CUPTI",)
FAILURES: tuple[Status, ...] = ("error", "timeout", "killed")


@dataclass(frozen=True, slots=True)
class Options:
    device: str
    steps: int
    warmup: int
    seconds: float
    timeout_seconds: float
    until: float  # by time.monotonic(): nothing is started or goes on after it
    apart: bool


class Session:
    """One run: starts the processes, keeps the results and writes them after each."""

    def __init__(self, options: Options, results: Results, path: Path, folder: Path) -> None:
        self.options = options
        self.results = results
        self.path = path
        self.folder = folder
        self.run = len(results.runs) - 1

    def workload(self, name: str, contenders: Sequence[str]) -> None:
        peers = [c for c in contenders if c in PEERS]
        ours = [c for c in contenders if c.startswith("legroom")]
        if ours and "plain" not in peers and not self._row(name, "plain"):
            peers.insert(0, "plain")  # the range and "above" are relative to it
        for peer in sorted(peers, key=lambda c: c != "plain"):
            self._peer(name, peer)
        specs = list(dict.fromkeys(spec for c in ours for spec in self._expanded(name, c)))
        if specs:
            self._legroom(name, specs)

    def _peer(self, workload: str, peer: str) -> None:
        plain = self._row(workload, "plain")
        if plain is not None and not plain.ok and peer != "plain":
            self._keep([Row(workload, peer, "skipped", f"plain did not run: {plain.detail}"[:200])])
            return
        job = self._job(workload, (peer,))
        if peer == "plain" or self.options.apart:
            job = replace(job, uncapped_only=True)
        (row,) = self._run(job)
        if row.ok and job.uncapped_only and peer != "plain":
            free = row
            capped = replace(
                job, uncapped_only=False, cap_bytes=needed_bytes(free.allocated_bytes, free.reserved_bytes)
            )
            (row,) = self._run(capped)
            row = _with_uncapped(row, free)
        if row.status == "oom" and row.cap_bytes and row.cap_bytes < row.uncapped_reserved_bytes:
            again = replace(job, uncapped_only=False, cap_bytes=row.uncapped_reserved_bytes)
            note = f"out of memory at {format_bytes(row.cap_bytes)}, so capped at what it reserved"
            (second,) = self._run(again)
            row = replace(_with_uncapped(second, row), detail=f"{note}; {second.detail}".rstrip("; "))
        self._keep([row])

    def _expanded(self, workload: str, contender: str) -> Iterator[str]:
        if contender != "legroom":
            yield contender
            return
        yield f"{LEGROOM}above"
        rows = self.results.of(workload)
        yield from (LEGROOM + name for name in PEERS if name != "plain" and name in rows and rows[name].ok)
        yield from (LEGROOM + share for share in SHARES)
        yield f"{LEGROOM}smallest"

    def _legroom(self, workload: str, specs: list[str]) -> None:
        plain = self._row(workload, "plain")
        if plain is None or not plain.ok:
            why = plain.detail if plain is not None else "not measured"
            self._keep([Row(workload, spec, "skipped", f"plain did not run: {why}"[:200]) for spec in specs])
            return
        while specs:
            together = specs[:1] if self.options.apart else specs
            rows = self._run(self._legroom_job(workload, together, plain))
            self._keep(rows)
            specs = specs[len(rows) :]

    def _legroom_job(self, workload: str, specs: list[str], plain: Row) -> Job:
        return with_known(self._job(workload, tuple(specs)), self.results.of(workload), plain)

    def _job(self, workload: str, contenders: tuple[str, ...]) -> Job:
        o = self.options
        return Job(workload, o.device, contenders, steps=o.steps, warmup=o.warmup, seconds=o.seconds)

    def _run(self, job: Job) -> list[Row]:
        """One process; a row for each contender it got to, at least one."""
        if time.monotonic() > self.options.until:
            return [Row(job.workload, c, "skipped", OVER) for c in job.contenders]
        ended = run_child(
            [sys.executable, str(Path(__file__).resolve()), "--one", job.to_json()],
            self.folder,
            timeout_seconds=self.options.timeout_seconds,
            until=self.options.until,
            environment=environment(),
        )
        rows = list(ended.rows)
        for row in rows:
            print(f"  {_line(row)}", flush=True)
        if ended.status != "ok" or not rows:
            rest = job.contenders[len(rows) : len(rows) + 1]
            status: Status = ended.status if ended.status != "ok" else "error"
            failed = [Row(job.workload, c, status, ended.detail or "ended without a result") for c in rest]
            for row in failed:
                print(f"  {_line(row)}", flush=True)
            rows += failed
        return rows

    def _row(self, workload: str, contender: str) -> Row | None:
        return self.results.of(workload).get(contender)

    def _keep(self, rows: Sequence[Row]) -> None:
        """A row that there was no time for replaces none that was measured before."""
        known = {(row.workload, row.contender) for row in self.results.rows if row.ok}
        new = [r for r in rows if not (out_of_time(r) and (r.workload, r.contender) in known)]
        self.results = self.results.with_rows(replace(row, run=self.run) for row in new)
        write(self.path, self.results)


def with_known(job: Job, rows: Mapping[str, Row], plain: Row) -> Job:
    """A job of legroom's, with what its budgets are relative to."""
    floors = [int(row.reported("floor_bytes")) for row in rows.values() if row.ok and row.report]
    return replace(
        job,
        plain_bytes=plain.allocated_bytes,
        above_bytes=rounded_up(ABOVE_PLAIN * max(plain.reserved_bytes, plain.allocated_bytes)),
        floor_bytes=next((floor for floor in floors if floor), 0),
        caps={name: row.cap_bytes for name, row in rows.items() if name in PEERS and row.ok and row.cap_bytes},
    )


def _with_uncapped(row: Row, free: Row) -> Row:
    return replace(
        row,
        uncapped_ms=free.uncapped_ms,
        uncapped_allocated_bytes=free.uncapped_allocated_bytes,
        uncapped_reserved_bytes=free.uncapped_reserved_bytes,
    )


def _line(row: Row) -> str:
    if row.ok:
        peak, cap = format_bytes(row.allocated_bytes), format_bytes(row.cap_bytes) if row.cap_bytes else "none"
        return (
            f"{row.workload} {row.contender}: {row.mean_ms:.1f} ms, peak {peak}, cap {cap} ({row.wall_seconds:.0f} s)"
        )
    return f"{row.workload} {row.contender}: {row.status}: {row.detail[:300]}"


def environment() -> dict[str, str]:
    setting = "expandable_segments:True"
    # The first is the name up to torch 2.8, the second the one since.
    return {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting}


def conditions(arguments: Sequence[str], commit: str | None, script: str = "bench/budget.py") -> dict[str, str]:
    import torch

    gpu = _said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    git = ["git", "-C", str(ROOT)]
    changed = "+changes" if _said(*git, "status", "--porcelain", "src", "bench") else ""
    return {
        # Folders of the machine it ran on say nothing to others.
        "command": shlex.join(["python", script, *(Path(a).name if "/" in a else a for a in arguments)]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or (_said(*git, "rev-parse", "HEAD") or "unknown") + changed,
        "gpu and driver": gpu[0] if gpu else "none",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torchvision", "transformers", "torchtune")},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        **{name: os.environ[name] for name in SETTINGS if name in os.environ},
    }


def _said(*command: str) -> str:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def default_contenders() -> str:
    offload = "torchtune" if importlib.util.find_spec("torchtune") is not None else "stream-offload"
    left_out = {"torchtune", "stream-offload"} - {offload}
    return ",".join([*(name for name in PEERS if name not in left_out), "legroom"])


def _contenders(text: str) -> list[str]:
    out = [name.strip() for name in text.split(",")]
    for name in out:
        what = name.removeprefix(LEGROOM)
        known = name in PEERS or name == "legroom"
        if name.startswith(LEGROOM) and not (what in ("above", "smallest") or (what in PEERS and what != "plain")):
            try:
                known = 0 <= float(what[:-1]) <= 100 if what.endswith("%") else parse_bytes(what) > 0
            except (ValueError, LegroomError) as error:
                raise argparse.ArgumentTypeError(f"{name!r}: {error}") from None
        elif name.startswith(LEGROOM):
            known = True
        if not known:
            raise argparse.ArgumentTypeError(f"no contender {name!r}; there are {', '.join(PEERS)}, legroom, legroom@…")
    return out


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=names_of, default=names_of(DEFAULT_WORKLOADS))
    parser.add_argument("--contenders", type=_contenders, help=f"default: {default_contenders()}")
    parser.add_argument("--quick", action="store_true", help=f"8 steps and {QUICK_CONTENDERS.replace('%', '%%')}")
    parser.add_argument("--steps", type=positive, help="timed steps, fewer for slow contenders (default 20)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before timing (default 3)")
    parser.add_argument("--seconds", type=float, default=15.0, help="about as long as one is timed (default 15)")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for one contender (default 180)")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for the whole run")
    parser.add_argument("--apart", action="store_true", help="a process for each budget and for each cap")
    parser.add_argument("--from", dest="earlier", type=Path, help="an earlier results file to go on from")
    parser.add_argument("--commit", help="the commit that is measured, where there is no repository to ask")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the benchmark itself")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "budget.json")
    parser.add_argument(
        "--render",
        type=Path,
        help="only write the page and the picture beside this results file; with --from, take along what it lacks",
    )
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    return parser


def render(path: Path) -> Results:
    """Write the page and the picture beside the results."""
    results = read(path)
    picture = path.with_suffix(".png")
    drawn = draw(results, picture)
    if not drawn:
        print("no picture: matplotlib is not installed", file=sys.stderr)
    path.with_suffix(".md").write_text(page(results, picture.name if drawn else None), encoding="utf-8")
    return results


def main(arguments: Sequence[str]) -> int:
    parsed = _parser().parse_args(arguments)
    if parsed.one:
        target = Path(parsed.one[1])
        measure(Job.from_json(parsed.one[0]), lambda row: append_row(target, asdict(row)))
        return 0
    if parsed.render:
        if parsed.earlier:
            write(parsed.render, read(parsed.render).after(read(parsed.earlier)))
        print(table(render(parsed.render)))
        return 0
    earlier = read(parsed.earlier) if parsed.earlier else Results((), ())
    contenders = parsed.contenders or _contenders(QUICK_CONTENDERS if parsed.quick else default_contenders())
    options = Options(
        device=parsed.device,
        steps=parsed.steps or (8 if parsed.quick else 20),
        warmup=parsed.warmup,
        seconds=parsed.seconds,
        timeout_seconds=parsed.timeout,
        until=time.monotonic() + parsed.limit,
        apart=parsed.apart,
    )
    results = replace(earlier, runs=(*earlier.runs, conditions(arguments, parsed.commit)))
    with tempfile.TemporaryDirectory() as folder:
        session = Session(options, results, parsed.json, Path(folder))
        for workload in parsed.workloads:
            print(workload, flush=True)
            session.workload(workload, contenders)
    print(f"\n{table(render(parsed.json))}")
    return 1 if any(row.status in FAILURES for row in session.results.rows if row.run == session.run) else 0


if __name__ == "__main__":
    # Ended from outside, it leaves by way of `finally`, and a child that measures ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main(sys.argv[1:]))
    except LegroomError as error:
        sys.exit(f"budget.py: {error}")
