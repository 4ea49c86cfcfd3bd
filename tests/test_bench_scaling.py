"""The bench of planning time: its verdicts, its file, and one run from the command to the page."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import scaling
from bench.scaling import Results, Row, ScalingError, from_json, growth, page, to_json, verdicts
from legroom.errors import LegroomError

ROOT = Path(__file__).parents[1]
RUN = {"command": "python bench/scaling.py", "torch": "2.13.0"}
ROW = Row(100, 300, 200, "h200", 0.5, 0.2, 0.3, 0.1, 0.05, 0.001, -0.0001)


def results(*sizes: tuple[int, float]) -> Results:
    return Results(RUN, tuple(replace(ROW, gaps=gaps, seconds=seconds) for gaps, seconds in sizes))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (((100, 0.2), (700, 1.9), (700, 2.0), (5000, 19.0)), ["met", "met", "met", "met", "met"]),
        (((100, 0.2), (700, 1.9), (690, 2.1), (5000, 20.1)), ["missed", "met", "missed", "missed", "met"]),
        (((100, 0.2), (1500, 9.6)), ["met", "met", "not measured", "not measured", "missed"]),
        (((700, 1.0),), ["met", "met", "met", "not measured", "not measured"]),
    ],
)
def test_what_must_hold(sizes: tuple[tuple[int, float], ...], words: list[str]) -> None:
    """By storages, of which the largest have more than anything is promised for, and by gaps."""
    known = results(*sizes)
    rows = tuple(replace(row, storages=row.gaps if row.gaps <= 1500 else row.gaps + 1) for row in known.rows)
    found = [verdict.word for verdict in verdicts(replace(known, rows=rows))]
    assert found == words


@pytest.mark.parametrize(
    ("storages", "seconds", "words"),
    [
        (700, 2.0, ["met", "met"]),
        (700, 2.1, ["missed", "met"]),
        (701, 2.1, ["met", "met"]),
        (5000, 20.1, ["met", "missed"]),
        (5001, 20.1, ["met", "met"]),
    ],
)
def test_recorded_steps_are_judged_by_their_storages(storages: int, seconds: float, words: list[str]) -> None:
    """And nothing else is judged by them."""
    known = results((100, 0.2), (700, 1.9))
    more = replace(ROW, gaps=700, storages=storages, seconds=seconds, step="vgg16", processor_seconds=2.5)
    both = replace(known, rows=(*known.rows, more))
    assert [verdict.word for verdict in verdicts(both)] == [*words, "met", "not measured", "met"]
    assert both.sizes == known.sizes
    assert "| vgg16 | 700 |" in page(both) and "2.50" in page(both)
    assert from_json(to_json(both)) == both


def test_files_from_before_recorded_steps_were_planned_are_read() -> None:
    known = results((100, 0.2))
    document = json.loads(to_json(known))
    del document["rows"][0]["step"]
    assert from_json(json.dumps(document)) == known


def test_growth_is_relative_to_n_log_n() -> None:
    assert growth(results((100, 1.0), (10_000, 200.0)), 10_000) == pytest.approx(1.0)
    assert growth(results((100, 1.0), (10_000, 10_000.0)), 10_000) == pytest.approx(50.0)


def test_results_come_back_from_their_text() -> None:
    known = results((100, 0.2), (700, 1.9))
    assert from_json(to_json(known)) == known
    assert "0.100%" in page(known) and "-0.010%" in page(known) and RUN["command"] in page(known)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "plan"}, "kind"),
        ({"version": 9}, "version"),
        ({"rows": []}, "expected rows"),
        ({"rows": [{**json.loads(to_json(results((100, 1.0))))["rows"][0], "gaps": 1}]}, "expected rows"),
        ({"rows": [{"gaps": 3}]}, "missing"),
        ({"run": 7}, "expected an object"),
        ({"run": {"\ud800": "x"}}, "run"),
        ({"rows": [{**json.loads(to_json(results((100, 1.0))))["rows"][0], "seconds": 5e-324}]}, "seconds"),
        ({"rows": [{**json.loads(to_json(results((100, 1.0))))["rows"][0], "quick_seconds": -0.5}]}, "quick_seconds"),
    ],
)
def test_a_file_that_is_none_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ScalingError, match=said):
        from_json(json.dumps({**json.loads(to_json(results((100, 1.0)))), **change}))


def test_from_the_command_to_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "SHARES", scaling.SHARES[:1])
    found = tmp_path / "scaling.json"
    assert scaling.main(["--gaps", "20,40", "--recorded", "lstm", "--commit", "abc", "--json", str(found)]) == 0
    first = found.with_suffix(".md").read_text()
    assert "| lstm | 26 |" in first and "per n log n" in first and "commit abc" in first and "**not measured**" in first
    assert scaling.main(["--render", str(found)]) == 0
    assert found.with_suffix(".md").read_text() == first
    assert "slowest s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gaps", "many"), "got 'many'"),
        (("--gaps", "100,,300"), "got '100,,300'"),
        (("--gaps", "1"), "from 10 on"),
        (("--recorded", "lstm,x"), "no recorded step 'x'"),
        (("--render", "nowhere.json"), "cannot be read"),
        (("--render", "scaling.md"), "expected a JSON file"),
        (("--json", "nowhere/scaling.json"), "no such folder"),
    ],
)
def test_nonsense_is_refused(arguments: tuple[str, str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, LegroomError)) as refused:
        scaling.main(arguments)
    assert said in f"{refused.value}{capsys.readouterr().err}" and refused.value.args != (0,)


def test_an_error_is_one_line() -> None:
    command = [sys.executable, str(ROOT / "bench" / "scaling.py"), "--render", "nowhere.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "cannot be read" in done.stderr and done.stderr.count("\n") == 1
