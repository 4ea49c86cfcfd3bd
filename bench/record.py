"""Record one training step of each model as a trace: what planners are compared on, and tests read.

    python bench/record.py [--only gpt,vgg16] [--limit 230] tests/traces
    python bench/record.py --tiny /tmp/traces

Takes the GPU whose times the traces are to hold. Models follow one another in one process, which saves a process start
each; one that fails, hangs or leaves memory behind ends that process, and the rest gets another. The plain step is
timed before it is captured, so that the table shows what the simulator makes of the trace beside what was measured.
`--tiny` takes small models on the CPU, to try the script itself.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

# The folder of a script is on the path, not the one above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import tables
from bench.budget import environment
from bench.children import OVER, append_row, run_child
from bench.measure import MOST_LEFT_BYTES
from bench.meters import Meter, meter_for
from bench.rows import Row, Status
from bench.workloads import RECORDED, TINY, WORKLOADS, Workload, names_of, train_step

GIB = 2**30
SUFFIX = ".json.gz"
WARMUP_STEPS, TIMED_STEPS = 3, 10
_HEAD = (
    "model", "ops", "storages", "gaps", "plain GiB", "measured GiB", "floor GiB", "plain ms", "predicted ms", "error",
    "capture s", "all s", "KiB",
)  # fmt: skip


# in the child


def record_all(names: Sequence[str], device: str, folder: Path, emit: Callable[[Row], None]) -> None:
    """A row for each. Ends early after a failure, or where a model leaves memory behind: the rest starts afresh."""
    import torch

    meter = meter_for(device)
    start_bytes: int | None = None
    for name in names:
        torch.manual_seed(0)
        start = time.perf_counter()
        row = _guarded(name, device, folder, meter)
        emit(replace(row, wall_seconds=time.perf_counter() - start))
        meter.empty()
        alive = meter.alive_bytes()
        # What stays after the first model are workspaces of libraries.
        start_bytes = alive if start_bytes is None else start_bytes
        if not row.ok or alive > start_bytes + MOST_LEFT_BYTES:
            return


def _guarded(name: str, device: str, folder: Path, meter: Meter) -> Row:
    try:
        return _recorded(name, WORKLOADS[name](device=device), device, folder, meter)
    except Exception as error:
        status: Status = "unavailable" if isinstance(error, ModuleNotFoundError) else "error"
        return Row(name, "capture", status, f"{type(error).__name__}: {' '.join(str(error).split())}"[:600])


def _recorded(name: str, workload: Workload, device: str, folder: Path, meter: Meter) -> Row:
    import legroom
    from legroom import traceio
    from legroom.compare import plain_seconds
    from legroom.probing import probe

    for number in range(WARMUP_STEPS):
        train_step(workload, number)
    meter.synchronize()
    meter.reset()
    marks = [meter.mark()]
    for number in range(TIMED_STEPS):
        train_step(workload, number)
        marks.append(meter.mark())
    meter.synchronize()
    plain_ms = median(meter.milliseconds(marks))
    allocated, reserved = meter.peaks(lambda number: train_step(workload, number))
    meter.empty()

    start = time.perf_counter()
    trace = legroom.capture(lambda: train_step(workload, 0), model=workload.model, optimizer=workload.optimizer)
    capture_seconds = time.perf_counter() - start
    path = folder / f"{name}{SUFFIX}"
    traceio.save(trace, path)
    figures = {
        "ops": len(trace.ops),
        "storages": len(trace.storages),
        "gaps": len(trace.gaps),
        "plain_peak_bytes": trace.peak_bytes,
        "floor_bytes": legroom.floor_bytes(trace),
        "predicted_ms": plain_seconds(trace, probe(device)) * 1e3,
        "capture_seconds": capture_seconds,
        "file_bytes": path.stat().st_size,
    }
    return Row(
        name,
        "capture",
        "ok",
        median_ms=plain_ms,
        steps=TIMED_STEPS,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        report=figures,
    )


# in the parent


def run(names: Sequence[str], device: str, folder: Path, *, timeout_seconds: float, until: float) -> list[Row]:
    rows: list[Row] = []
    command = [sys.executable, str(Path(__file__).resolve()), "--device", device, "--one"]
    with tempfile.TemporaryDirectory() as scratch:
        while rest := names[len(rows) :]:
            if time.monotonic() > until:
                rows += [Row(name, "capture", "skipped", OVER) for name in rest]
                break
            ended = run_child(
                [*command, json.dumps([list(rest), str(folder)])],
                Path(scratch),
                timeout_seconds=timeout_seconds,
                until=until,
                environment=environment(),
            )
            new = list(ended.rows)
            if ended.status != "ok" and len(new) < len(rest):
                new.append(Row(rest[len(new)], "capture", ended.status, ended.detail))
            elif not new:
                new.append(Row(rest[0], "capture", "error", "ended without a result"))
            for row in new:
                print(f"{row.workload}: {row.status} {row.detail} ({row.wall_seconds:.0f} s)", file=sys.stderr)
            rows += new
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = [_cells(row) for row in rows if row.ok]
    failures = [f"{row.workload}: {row.status}: {row.detail}" for row in rows if not row.ok]
    return "\n".join([tables.text(_HEAD, lines), *failures])


def _cells(row: Row) -> tuple[str, ...]:
    figure = row.reported
    return (
        row.workload,
        *(f"{figure(name):.0f}" for name in ("ops", "storages", "gaps")),
        *(f"{n / GIB:.2f}" for n in (figure("plain_peak_bytes"), row.allocated_bytes, figure("floor_bytes"))),
        f"{row.median_ms:.1f}",
        f"{figure('predicted_ms'):.1f}",
        f"{figure('predicted_ms') / row.median_ms - 1:+.1%}",
        f"{figure('capture_seconds'):.1f}",
        f"{row.wall_seconds:.1f}",
        f"{figure('file_bytes') / 1024:.1f}",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="where the traces go")
    parser.add_argument("--only", type=names_of, help=f"default: {','.join(RECORDED)}")
    parser.add_argument("--tiny", action="store_true", help=f"on the CPU: {','.join(TINY)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda, with --tiny cpu")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one model (default 60)")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for all of them")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str]) -> int:
    parser = _parser()
    parsed = parser.parse_args(arguments)
    device = parsed.device or ("cpu" if parsed.tiny else "cuda")
    if parsed.one:
        names, folder = json.loads(parsed.one[0])
        record_all(names, device, Path(folder), lambda row: append_row(Path(parsed.one[1]), asdict(row)))
        return 0
    if parsed.folder is None:
        parser.error("name the folder where the traces go")
    parsed.folder.mkdir(parents=True, exist_ok=True)
    names = parsed.only or (TINY if parsed.tiny else RECORDED)
    until = time.monotonic() + parsed.limit
    rows = run(names, device, parsed.folder.resolve(), timeout_seconds=parsed.timeout, until=until)
    print(table(rows))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    # Ended from outside, it leaves by way of `finally`, and a child that measures ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
