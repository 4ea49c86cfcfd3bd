"""What a planned step does on the GPU: how the profiler's events are read, the figures from them, and their file."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import lanes
from bench.lanes import GIB, LAUNCH_US, LEAST_COPY_BYTES, MIB, Lanes, Results, _Span, from_json, to_json

RUN = {"command": "python bench/lanes.py", "commit": "abc", "torch": "2.13.0"}
ROW = Lanes(
    workload="vit",
    budget_bytes=3 * GIB,
    step_ms=96.0,
    kernel_ms=68.5,
    host_ms=24.3,
    stall_ms=10.0,
    launch_ms=2.8,
    report_stall_ms=9.0,
    out_bytes=2 * GIB,
    in_bytes=GIB,
    out_rate=55e9,
    in_rate=46.75e9,
    probed_out_rate=55e9,
    probed_in_rate=55e9,
    predicted_ms=75.0,
)


def call(correlation: int, ts: float, dur: float, *, cat: str = "cuda_runtime") -> dict[str, Any]:
    args = {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": "cudaLaunchKernel", "ts": ts, "dur": dur, "args": args}


def kernel(correlation: int | None, ts: float, dur: float, *, stream: int = 7) -> dict[str, Any]:
    args = {"stream": stream} if correlation is None else {"stream": stream, "correlation": correlation}
    return {"ph": "X", "cat": "kernel", "name": "gemm", "ts": ts, "dur": dur, "args": args}


def moved(way: str, ts: float, dur: float, nbytes: int, *, stream: int) -> dict[str, Any]:
    args = {"stream": stream, "correlation": 0, "bytes": nbytes}
    return {"ph": "X", "cat": "gpu_memcpy", "name": f"Memcpy {way}", "ts": ts, "dur": dur, "args": args}


# the trace


def test_work_has_the_end_of_the_call_that_launched_it() -> None:
    events = [
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        {"ph": "s", "cat": "ac2g", "ts": 1.0, "id": 2},
        kernel(2, 30.0, 4.0),  # events come in any order
        kernel(1, 20.0, 5.0),
        call(1, 10.0, 3.0),
        call(2, 14.0, 2.0, cat="cuda_driver"),
        kernel(9, 40.0, 1.0),  # its call is not in the trace
        kernel(None, 50.0, 1.0),
    ]
    spans, copies = lanes.read_trace(events)
    assert spans == [_Span(20.0, 25.0, 13.0), _Span(30.0, 34.0, 16.0), _Span(40.0, 41.0, 0.0), _Span(50.0, 51.0, 0.0)]
    assert copies == []


def test_the_stream_with_most_kernels_computes_and_large_copies_of_the_others_are_copies() -> None:
    least = LEAST_COPY_BYTES
    events = [
        kernel(1, 0.0, 100.0, stream=20),  # longer, but only one
        kernel(2, 10.0, 1.0),
        kernel(3, 20.0, 1.0),
        moved("DtoH (Device -> Pinned)", 12.0, 5.0, least, stream=20),
        moved("HtoD (Pinned -> Device)", 11.0, 5.0, 2 * least, stream=21),
        moved("HtoD (Pinned -> Device)", 13.0, 5.0, least - 1, stream=21),
        moved("DtoD (Device -> Device)", 14.0, 5.0, least, stream=21),
        moved("HtoD (Pageable -> Device)", 30.0, 5.0, least, stream=7),
        {"ph": "X", "cat": "gpu_memset", "name": "Memset", "ts": 40.0, "dur": 1.0, "args": {"stream": 7, "bytes": 8}},
    ]
    spans, copies = lanes.read_trace(events)
    assert [span.start for span in spans] == [10.0, 20.0, 30.0, 40.0]  # whatever keeps it busy
    assert copies == [_Span(11.0, 16.0, 0.0, 2 * least, True), _Span(12.0, 17.0, 0.0, least, False)]


@pytest.mark.parametrize(("events", "seen"), [([], 0), ([moved("HtoD", 0.0, 1.0, GIB, stream=7)], 1)])
def test_a_trace_without_kernels_is_refused(events: list[dict[str, Any]], seen: int) -> None:
    with pytest.raises(lanes.LanesError, match=f"no kernel among {seen} events"):
        lanes.read_trace(events)


# what compute waits for

FIRST = _Span(0.0, 100.0, 0.0)


@pytest.mark.parametrize(
    ("start", "launched", "expected"),
    [
        (100.0, 50.0, (0.0, 0.0, 0.0)),
        (105.0, 50.0, (0.0, 0.0, 5.0)),
        (100.0 + LAUNCH_US, 50.0, (0.0, 0.0, LAUNCH_US)),
        (140.0, 50.0, (0.0, 40.0 - LAUNCH_US, LAUNCH_US)),
        (140.0, 138.0, (38.0, 0.0, 2.0)),
        (140.0, 110.0, (10.0, 30.0 - LAUNCH_US, LAUNCH_US)),
        (140.0, 145.0, (40.0, 0.0, 0.0)),  # it began before its call was over
    ],
)
def test_a_gap_is_the_hosts_a_copys_or_a_launch(
    start: float, launched: float, expected: tuple[float, float, float]
) -> None:
    assert lanes.idle([FIRST, _Span(start, start + 10.0, launched)]) == expected
    assert sum(expected) == start - FIRST.end


def test_gaps_add_up_and_end_with_the_last_that_runs() -> None:
    """The second lies inside the first: what follows has waited since the end of the first."""
    spans = [
        FIRST,
        _Span(20.0, 30.0, 0.0),
        _Span(160.0, 170.0, 120.0),
        _Span(165.0, 180.0, 0.0),
        _Span(200.0, 201.0, 0.0),
    ]
    host, stall, launch = lanes.idle(spans)
    assert (host, stall, launch) == (20.0, 40.0 - LAUNCH_US + 20.0 - LAUNCH_US, 2 * LAUNCH_US)
    assert host + stall + launch == 60.0 + 20.0
    assert lanes.idle([FIRST]) == (0.0, 0.0, 0.0)


# rates


def test_the_rate_is_that_of_copies_beside_kernels_and_the_bytes_are_those_of_all() -> None:
    spans = [_Span(0.0, 100.0, 0.0), _Span(150.0, 160.0, 0.0)]
    beside = _Span(40.0, 140.0, 0.0, 8 * MIB)  # for 60 of 100 us
    half = _Span(90.0, 110.0, 0.0, 4 * MIB)
    between = _Span(145.0, 165.0, 0.0, 16 * MIB, True)  # for 10 of 20
    assert lanes.rate_of([beside, half], spans, into=False) == (12 * MIB, 8 * MIB / 100 * 1e6)
    assert lanes.rate_of([beside, half, between], spans, into=True) == (16 * MIB, 0.0)
    two = replace(beside, start=0.0, end=50.0)
    assert lanes.rate_of([beside, two], spans, into=False) == (16 * MIB, pytest.approx(16 * MIB / 150 * 1e6))
    over_two = _Span(50.0, 170.0, 0.0, 8 * MIB)  # 50 and 10 of 120
    assert lanes.rate_of([over_two], spans, into=False)[1] == 0.0
    assert lanes.rate_of([replace(over_two, end=165.0)], spans, into=False)[1] > 0.0
    assert lanes.rate_of([], spans, into=False) == (0, 0.0)


# verdicts


def words(row: Lanes) -> list[str]:
    """Of copies out, copies in and stalls."""
    return [next(word for word in ("not measured", "missed", "met") if word in line) for line in lanes.said([row])]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ["met", "met", "met"]),
        ({"in_rate": 46.74e9}, ["met", "missed", "met"]),
        ({"out_rate": 40e9}, ["missed", "met", "met"]),
        ({"report_stall_ms": 11.0}, ["met", "met", "met"]),
        ({"report_stall_ms": 11.01}, ["met", "met", "missed"]),
        ({"report_stall_ms": 8.99}, ["met", "met", "missed"]),
        ({"stall_ms": 1.0, "report_stall_ms": 0.5}, ["met", "met", "met"]),  # less than half a millisecond apart
        ({"stall_ms": 1.0, "report_stall_ms": 0.49}, ["met", "met", "missed"]),
        ({"out_rate": 0.0}, ["not measured", "met", "met"]),
        ({"out_rate": 0.0, "out_bytes": 0}, ["met", "met"]),
    ],
)
def test_each_claim_is_met_missed_or_not_measured(change: dict[str, Any], expected: list[str]) -> None:
    assert words(replace(ROW, **change)) == expected


def test_figures_stand_beside_the_claims() -> None:
    out, into, stalls = lanes.said([replace(ROW, out_rate=44e9)])
    assert out == "vit at 3.00 GiB: copies out at 85% of the probed rate: missed (80.0%)"
    assert into == "vit at 3.00 GiB: copies in at 85% of the probed rate: met (85.0%)"
    assert stalls.startswith("vit at 3.00 GiB: stalls in the report within 10% of the profiler's, or 0.5 ms: met")
    assert stalls.endswith("(9.00 against 10.00 ms a step)")
    assert lanes.said([]) == []


# files


def test_results_come_back_from_their_text() -> None:
    results = Results(RUN, (ROW, replace(ROW, workload="gpt", out_rate=0.0)))
    assert from_json(to_json(results)) == results


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stall_ms": -1}, r"rows\[0\].stall_ms"),
        ({"stall_ms": "long"}, r"rows\[0\].stall_ms"),
        ({"workload": 3}, r"rows\[0\].workload"),
        ({"out_bytes": 1.5}, r"rows\[0\].out_bytes"),
        ({"probed_in_rate": 0}, r"rows\[0\].probed_in_rate"),
        ({"more": 1}, "more"),
    ],
)
def test_damaged_rows_are_refused(change: dict[str, Any], message: str) -> None:
    document = json.loads(to_json(Results(RUN, (ROW,))))
    document["rows"][0] |= change
    with pytest.raises(lanes.LanesError, match=message):
        from_json(json.dumps(document))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not readable as JSON"),
        ("[]", "expected an object"),
        ('{"run": {}, "rows": []}', "kind"),
        (json.dumps({"kind": "lanes benchmark", "version": 2, "run": {}, "rows": []}), "version 2"),
        (json.dumps({"kind": "lanes benchmark", "version": 1, "rows": []}), "'run' is missing"),
        (json.dumps({"kind": "lanes benchmark", "version": 1, "run": 3, "rows": []}), "run: expected an object"),
        (json.dumps({"kind": "lanes benchmark", "version": 1, "run": {"a": 1}, "rows": []}), "run.a: expected a text"),
        (json.dumps({"kind": "lanes benchmark", "version": 1, "run": {}, "rows": [1]}), r"rows\[0\]"),
        (to_json(Results(RUN, (ROW,)))[:-20], "not readable as JSON"),
    ],
)
def test_a_broken_file_is_refused_and_no_page_written(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "lanes.json"
    path.write_text(text)
    with pytest.raises(lanes.LanesError, match=message):
        lanes.main(["--render", str(path)])
    assert not path.with_suffix(".md").exists()


def test_a_page_is_written_beside_the_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lanes.json"
    path.write_text(to_json(Results(RUN, (ROW,))))
    assert lanes.main(["--render", str(path)]) == 0
    text = path.with_suffix(".md").read_text()
    assert "$ python bench/lanes.py\n" in text and "commit abc, torch 2.13.0" in text
    cells = "| vit | 3.00 | 96.0 | 68.5 | 24.3 | 10.00 | 2.8 | 9.00 | 2.00 | 55.0 | 55.0 | 1.00 | 46.8 | 55.0 |"
    assert cells in text
    for line in lanes.said([ROW]):
        assert f"- {line}\n" in text
    assert capsys.readouterr().out.splitlines() == lanes.said([ROW])


# the command


def test_workloads_are_named_with_their_budgets() -> None:
    assert lanes._parsed("gpt=21.5, vit=3") == [("gpt", 43 * GIB // 2), ("vit", 3 * GIB)]
    assert len(lanes._parsed(lanes.DEFAULT)) == 4


@pytest.mark.parametrize(
    "wrong", ["", "gpt", "gpt=", "gpt=x", "gpt=0", "gpt=-1", "gpt=nan", "gpt=inf", "no=1", "gpt=1,"]
)
def test_nonsense_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="workload=GiB such as"):
        lanes._parsed(wrong)
    with pytest.raises(SystemExit) as ended:
        lanes.main(["--only", wrong])
    assert ended.value.code == 2 and "--only" in capsys.readouterr().err


def test_without_a_gpu_it_ends_with_one_line(tmp_path: Path) -> None:
    target = tmp_path / "lanes.json"
    done = subprocess.run(
        [sys.executable, lanes.__file__, "--json", str(target)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 1 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("lanes.py: ") and "GPU" in line
    assert not target.exists()
