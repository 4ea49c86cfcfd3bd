"""The bench of auto's gap: its verdicts, its file, and one run from a trace to the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import gaps
from bench.gaps import HOST, Line, Results, from_json, machine, to_json, verdict
from legroom import traceio
from tests.pure.strategies import make_trace

RUN = {"command": "python bench/gaps.py", "torch": "2.13.0"}
LINE = Line("vgg16", 40, "h200", 0.5, 2**30, 1.0, 1.0, 1.02, 0.5, 0.0, 0.0, 0.0, 0.0, "", 0)


def asked(**fields: Any) -> Line:
    """Auto is 6 % above the bound, and `optimal` had ten minutes."""
    known = replace(
        LINE,
        auto_seconds=1.06,
        milp_seconds=1.05,
        milp_limit_seconds=600.0,
        milp_said="integer program: out of time at 1.05 s",
    )
    return replace(known, **fields)


@pytest.mark.parametrize(
    ("line", "word", "how"),
    [
        (LINE, "met", "bound: 2.00%"),
        (replace(LINE, share=0.75), "met", "bound"),
        (replace(LINE, auto_seconds=1.0201), "not measured", "no integer program was asked"),
        (replace(LINE, auto_seconds=1.05, share=0.25), "met", "bound"),
        (replace(LINE, auto_seconds=1.0501, share=0.25), "not measured", "no integer program was asked"),
        (replace(LINE, auto_seconds=1.5, share=0.2), "not measured", "nothing"),
        (asked(), "met", "integer program: +0.95%"),
        (asked(milp_seconds=1.07), "met", "integer program: -0.93%"),
        (asked(milp_seconds=1.04), "missed", "by 0.92%"),
        (asked(milp_limit_seconds=60.0), "not measured", "+0.95% after 60 s"),
        (asked(milp_limit_seconds=60.0, milp_said="integer program: solved at 1.0 s"), "met", "integer program"),
        (asked(milp_limit_seconds=60.0, milp_seconds=1.04), "missed", "by 0.92%"),
    ],
)
def test_each_line_is_met_missed_or_not_measured(line: Line, word: str, how: str) -> None:
    found = verdict(line)
    assert found.word == word
    assert how in found.figures


def test_results_come_back_from_their_text() -> None:
    results = Results((RUN,), (LINE, asked(share=0.25)))
    assert from_json(to_json(results)) == results
    again = replace(LINE, auto_seconds=1.01)
    assert results.with_line(again).lines == (again, results.lines[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"auto_seconds": -1}, "auto_seconds"),
        ({"trace": 3}, "trace"),
        ({"run": 1}, "run 1"),
        ({"bound_seconds": 0}, "bound_seconds"),
        ({"more": 1}, "more"),
    ],
)
def test_damaged_results_are_refused(change: dict[str, Any], message: str) -> None:
    document = json.loads(to_json(Results((RUN,), (LINE,))))
    document["lines"][0] |= change
    with pytest.raises(gaps.GapsError, match=message):
        from_json(json.dumps(document))


def test_machines_with_a_host_have_its_costs() -> None:
    assert machine("rtx2080ti-pcie3*7.8+host").hardware.host == HOST
    assert machine("rtx2080ti-pcie3*7.8+host").factor == 7.8
    assert machine("h200").hardware.host != HOST


@pytest.mark.parametrize(
    ("option", "wrong"), [("--machines", "nothing+host"), ("--shares", "50,x"), ("--shares", "101")]
)
def test_unknown_machines_and_shares_are_refused(option: str, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gaps.main([option, wrong])
    assert option in capsys.readouterr().err


def test_from_a_trace_to_the_page(tmp_path: Path) -> None:
    """Auto is 3 % above the bound on this step with half of the range, and as fast as the integer program's best."""
    traceio.save(make_trace(79, forward=7), tmp_path / "small.json.gz")
    target = tmp_path / "gaps.json"
    target.write_text(to_json(Results((RUN,), (LINE,))))
    options = ["--traces", str(tmp_path), "--machines", "v100-16g", "--shares", "75,50", "--milp-seconds", "5"]
    assert gaps.main([*options, "--commit", "abc", "--json", str(target)]) == 0
    results = gaps.read(target)
    assert results.lines[0] == LINE  # what an earlier run measured stays
    assert [(line.trace, line.share, line.run) for line in results.lines[1:]] == [("small", 0.75, 1), ("small", 0.5, 1)]
    for line in results.lines[1:]:
        assert line.bound_seconds <= line.auto_seconds
        assert (line.milp_limit_seconds == 5.0) == (not line.near_bound)
        assert bool(line.milp_said) == (line.milp_seconds > 0.0)
    assert "Run 1" in target.with_suffix(".md").read_text()
