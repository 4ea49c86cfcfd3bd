"""What a planned step does on the GPU by the profiler's account: how fast copies run, and what compute waits for.

    python bench/lanes.py [--only gpt=21.6,vit=3.17] [--json bench/results/lanes.json] [--commit HASH]
    python bench/lanes.py --render bench/results/lanes.json

For each workload and budget (GiB, a hard cap on reserved memory) steps run until the plan has settled; some are then
profiled (CUPTI, by `torch.profiler`). Copies of at least 4 MiB that ran while a kernel did are held against the rates
that were probed beforehand. Each moment in which the compute stream has nothing to do is put down to

    host     the next kernel had not been launched yet
    stall    it had been launched and waited for another stream, that is for a copy
    launch   the rest: a few microseconds between two kernels that wait for nothing

and the stalls are held against the seconds in the report, which are simulated.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# The folder of a script is on the path, not the one above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.profiler import ProfilerActivity, profile

import legroom
from bench import budget, tables
from bench.meters import CudaMeter
from bench.workloads import WORKLOADS
from legroom.errors import DeviceError, LegroomError
from legroom.hardware import Hardware
from legroom.jsonio import Node, parse, read_text, write_text
from legroom.probing import probe
from legroom.units import format_bytes

ROOT = Path(__file__).resolve().parents[1]
KIND, VERSION = "lanes benchmark", 1
MOST_ROWS = 10_000
GIB, MIB = 2**30, 2**20
DEFAULT = "gpt=23.9,gpt=16.1,vit=3.17,bert=4.11"
PROFILED_STEPS, MOST_STEPS = 3, 90
LEAST_COPY_BYTES = 4 * MIB
# Between two kernels of one stream that wait for nothing lie 1 to 5 us; an event that was recorded long ago adds 2.
LAUNCH_US = 8.0
SHARE_OF_PROBED, STALL_ERROR = 0.85, 0.10
LEAST_STALL_MS = 0.5  # a tenth of less than that is the profiler's own noise
_HEAD = (
    "model", "GiB", "ms a step", "kernels ms", "host ms", "stall ms", "launch ms", "stall in report ms",
    "copied out GiB", "GB/s", "probed", "copied in GiB", "GB/s", "probed",
)  # fmt: skip


class LanesError(LegroomError):
    """A step cannot be profiled, or a file of results cannot be read."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """One profiled plan; times in milliseconds a step, rates in bytes per second."""

    workload: str
    budget_bytes: int
    step_ms: float  # from the first kernel to the last, profiled
    kernel_ms: float
    host_ms: float
    stall_ms: float
    launch_ms: float
    report_stall_ms: float
    out_bytes: int
    in_bytes: int
    out_rate: float  # of copies that ran while a kernel did
    in_rate: float
    probed_out_rate: float
    probed_in_rate: float
    predicted_ms: float


@dataclass(frozen=True, slots=True)
class Results:
    run: Mapping[str, str]
    rows: tuple[Lanes, ...]


@dataclass(frozen=True, slots=True)
class _Span:
    start: float  # us
    end: float
    launched: float  # when the call that launched it was over; 0: before the profile began
    nbytes: int = 0
    into: bool = False  # host to device


def read_trace(events: Iterable[dict[str, Any]]) -> tuple[list[_Span], list[_Span]]:
    """The work of the stream that computes, and the large copies of the others, in order of time."""
    launched: dict[int, float] = {}
    work: list[dict[str, Any]] = []
    for event in events:
        kind = event.get("cat")
        if kind in ("cuda_runtime", "cuda_driver"):
            launched[event.get("args", {}).get("correlation", -1)] = event["ts"] + event["dur"]
        elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            work.append(event)
    work.sort(key=lambda event: event["ts"])
    kernels = Counter(event["args"]["stream"] for event in work if event["cat"] == "kernel")
    if not kernels:
        raise LanesError(
            f"no kernel among {len(work)} events of the device: the profiler saw no step. Another profiler may hold "
            "CUPTI; run this by itself"
        )
    ((compute, _),) = kernels.most_common(1)

    def span(event: dict[str, Any]) -> _Span:
        begin, args = event["ts"], event["args"]
        return _Span(
            begin, begin + event["dur"], launched.get(args.get("correlation"), 0.0),
            args.get("bytes", 0), "HtoD" in event["name"],
        )  # fmt: skip

    on_compute = [span(event) for event in work if event["args"]["stream"] == compute]
    copies = [
        span(event)
        for event in work
        if event["cat"] == "gpu_memcpy"
        and event["args"]["stream"] != compute
        and ("HtoD" in event["name"] or "DtoH" in event["name"])
        and event["args"].get("bytes", 0) >= LEAST_COPY_BYTES
    ]
    return on_compute, copies


def idle(spans: Sequence[_Span]) -> tuple[float, float, float]:
    """Microseconds without work: for want of a launch, for want of a copy, between kernels."""
    host = stall = launch = 0.0
    end = spans[0].end
    for span in spans[1:]:
        gap = span.start - end
        if gap > 0:
            late = min(max(span.launched - end, 0.0), gap)
            rest = gap - late
            host += late
            if rest > LAUNCH_US:
                stall += rest - LAUNCH_US
                rest = LAUNCH_US
            launch += rest
        end = max(end, span.end)
    return host, stall, launch


def rate_of(copies: Sequence[_Span], spans: Sequence[_Span], into: bool) -> tuple[int, float]:
    """Bytes in all, and bytes per second of the copies that ran beside a kernel for most of their time."""
    every = [copy for copy in copies if copy.into is into]
    beside = [copy for copy in every if _covered(copy, spans) > 0.5 * (copy.end - copy.start)]
    micros = sum(copy.end - copy.start for copy in beside)
    return sum(copy.nbytes for copy in every), sum(copy.nbytes for copy in beside) / micros * 1e6 if micros else 0.0


def _covered(copy: _Span, spans: Sequence[_Span]) -> float:
    return sum(max(0.0, min(copy.end, span.end) - max(copy.start, span.start)) for span in spans)


def profile_room(workload: str, budget_bytes: int, hardware: Hardware) -> Lanes:
    made = WORKLOADS[workload](device="cuda")
    room = legroom.fit(made.model, made.optimizer, budget=budget_bytes)

    def step(number: int) -> None:
        with room.step():
            made.loss(number).backward()
            made.optimizer.step()
            made.optimizer.zero_grad()

    for number in range(MOST_STEPS):
        step(number)
        if room.settled:
            break
    else:
        print(f"{workload}: the plan had not settled after {MOST_STEPS} steps", file=sys.stderr)
    for number in range(4):
        step(number)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for number in range(PROFILED_STEPS):
            step(number)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    spans, copies = read_trace(events)
    host, stall, launch = idle(spans)
    out_bytes, out_rate = rate_of(copies, spans, into=False)
    in_bytes, in_rate = rate_of(copies, spans, into=True)
    report, timeline = room.report(), room.timeline
    if timeline is None:
        raise LanesError(
            f"{workload} has no plan in {format_bytes(budget_bytes)} ({'; '.join(report.fallbacks)}); name a larger "
            "budget with --only"
        )
    per_step_ms = 1e-3 / PROFILED_STEPS
    lanes = Lanes(
        workload=workload,
        budget_bytes=budget_bytes,
        step_ms=(max(span.end for span in spans) - spans[0].start) * per_step_ms,
        kernel_ms=sum(span.end - span.start for span in spans) * per_step_ms,
        host_ms=host * per_step_ms,
        stall_ms=stall * per_step_ms,
        launch_ms=launch * per_step_ms,
        report_stall_ms=timeline.breakdown.stalled_copy_seconds * 1e3,
        out_bytes=out_bytes // PROFILED_STEPS,
        in_bytes=in_bytes // PROFILED_STEPS,
        out_rate=out_rate,
        in_rate=in_rate,
        probed_out_rate=hardware.out_bytes_per_second,
        probed_in_rate=hardware.in_bytes_per_second,
        predicted_ms=(report.predicted_step_seconds or 0.0) * 1e3,
    )
    room.close()
    return lanes


def lines_of(rows: Sequence[Lanes]) -> list[list[str]]:
    return [
        [
            row.workload, f"{row.budget_bytes / GIB:.2f}", f"{row.step_ms:.1f}", f"{row.kernel_ms:.1f}",
            f"{row.host_ms:.1f}", f"{row.stall_ms:.2f}", f"{row.launch_ms:.1f}", f"{row.report_stall_ms:.2f}",
            f"{row.out_bytes / GIB:.2f}", f"{row.out_rate / 1e9:.1f}", f"{row.probed_out_rate / 1e9:.1f}",
            f"{row.in_bytes / GIB:.2f}", f"{row.in_rate / 1e9:.1f}", f"{row.probed_in_rate / 1e9:.1f}",
        ]
        for row in rows
    ]  # fmt: skip


def said(rows: Sequence[Lanes]) -> list[str]:
    out = []
    for row in rows:
        name = f"{row.workload} at {row.budget_bytes / GIB:.2f} GiB"
        for way, nbytes, rate, probed in (
            ("out", row.out_bytes, row.out_rate, row.probed_out_rate),
            ("in", row.in_bytes, row.in_rate, row.probed_in_rate),
        ):
            if nbytes:
                word = "met" if rate >= SHARE_OF_PROBED * probed else "missed"
                figures = f"{word} ({rate / probed:.1%})" if rate else "not measured (none ran beside a kernel)"
                out.append(f"{name}: copies {way} at {SHARE_OF_PROBED:.0%} of the probed rate: {figures}")
        apart = abs(row.report_stall_ms - row.stall_ms)
        word = "met" if apart <= max(STALL_ERROR * row.stall_ms, LEAST_STALL_MS) else "missed"
        out.append(
            f"{name}: stalls in the report within {STALL_ERROR:.0%} of the profiler's, or {LEAST_STALL_MS} ms: {word} "
            f"({row.report_stall_ms:.2f} against {row.stall_ms:.2f} ms a step)"
        )
    return out


def page(results: Results) -> str:
    parts = [
        "# What copies and compute do, by the profiler",
        "Written by `python bench/lanes.py`. What the columns mean is said there.",
        ", ".join(f"{name} {value}" for name, value in results.run.items() if name != "command"),
        f"```console\n$ {results.run.get('command', '')}\n```",
        tables.markdown(_HEAD, lines_of(results.rows)),
        "\n".join(f"- {line}" for line in said(results.rows)),
    ]
    return "\n\n".join(parts) + "\n"


def to_json(results: Results) -> str:
    rows = [asdict(row) for row in results.rows]
    document = {"kind": KIND, "version": VERSION, "run": dict(results.run), "rows": rows}
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def from_json(text: str) -> Results:
    fields = parse(text, kind=KIND, version=VERSION, error=LanesError).fields("run", "rows")
    run = fields["run"]
    if not isinstance(run.value, dict):
        run.fail("expected an object")
    conditions = {name: node.text() for name, node in run.fields(*run.value).items()}
    return Results(conditions, tuple(_row_from(node) for node in fields["rows"].items(longest=MOST_ROWS)))


def _row_from(node: Node) -> Lanes:
    integers = ("budget_bytes", "out_bytes", "in_bytes")
    numbers = ("step_ms", "kernel_ms", "host_ms", "stall_ms", "launch_ms", "report_stall_ms", "out_rate", "in_rate",
               "predicted_ms")  # fmt: skip
    probed = ("probed_out_rate", "probed_in_rate")
    fields = node.fields("workload", *integers, *numbers, *probed)
    values: dict[str, Any] = {name: fields[name].integer() for name in integers}
    values |= {name: fields[name].number() for name in numbers}
    values |= {name: fields[name].number(least=1.0) for name in probed}  # others are divided by them
    return Lanes(workload=fields["workload"].text(), **values)


def render(path: Path) -> None:
    """Write the page beside the results."""
    results = from_json(read_text(path, error=LanesError))
    path.with_suffix(".md").write_text(page(results), encoding="utf-8")
    print("\n".join(said(results.rows)))


def _parsed(text: str) -> list[tuple[str, int]]:
    out = []
    for part in text.split(","):
        name, _, gib = part.strip().partition("=")
        try:
            size = float(gib)
        except ValueError:
            size = 0.0
        if name not in WORKLOADS or not 0.0 < size < 1e6:
            raise argparse.ArgumentTypeError(f"expected workload=GiB such as gpt=21.6, got {part!r}")
        out.append((name, int(size * GIB)))
    return out


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=_parsed, default=_parsed(DEFAULT), help=f"workload=GiB, ... (default {DEFAULT})")
    parser.add_argument("--commit", help="the commit that is measured, where there is no repository to ask")
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "lanes.json")
    parser.add_argument("--render", type=Path, help="only write the page beside this results file")
    return parser


def main(arguments: Sequence[str]) -> int:
    parsed = _parser().parse_args(arguments)
    if parsed.render:
        render(parsed.render)
        return 0
    if not torch.cuda.is_available():
        raise DeviceError("steps are profiled on a GPU, and this torch sees none; an earlier run can be read: --render")
    results = Results(budget.conditions(arguments, parsed.commit, script="bench/lanes.py"), ())
    hardware = probe("cuda")
    parsed.json.parent.mkdir(parents=True, exist_ok=True)
    for workload, budget_bytes in parsed.only:
        row = profile_room(workload, budget_bytes, hardware)
        CudaMeter().empty()  # nothing of this plan counts against the next one's budget
        print(tables.text(_HEAD, lines_of([row])), flush=True)
        results = replace(results, rows=(*results.rows, row))
        write_text(parsed.json, to_json(results), error=LanesError)
    render(parsed.json)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main(sys.argv[1:]))
    except LegroomError as error:
        sys.exit(f"lanes.py: {error}")
