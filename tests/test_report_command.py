"""`legroom report`: what it prints, draws and writes, and what it makes of bad input."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.cli import run
from legroom.commands import reporting, scatter
from legroom.report import Report
from tests.pure.test_report import EMPTY, FOLLOWED, FULL, MIB
from tests.test_commands import FUZZ, Printed, complaint, legroom, mutate


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with reports."""
    monkeypatch.chdir(tmp_path)
    for name, report in (("empty", EMPTY), ("full", FULL), ("followed", FOLLOWED)):
        Path(f"{name}.json").write_text(report.to_json())
    return tmp_path


def plot(report: Report) -> tuple[list[str], str]:
    """The lines inside the frame, from the top, and what stands below it."""
    lines = reporting.as_text(report)
    return [line.partition("│")[2].ljust(scatter.COLUMNS) for line in lines if "│" in line], "\n".join(lines)


def test_the_text_and_the_plot_are_printed(reports: Path, capsys: Printed) -> None:
    assert legroom("report followed.json --html out.html") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{FOLLOWED}\npeak, by input size: a of (8, a, 8)\n")
    assert printed.out.rstrip().endswith("--- budget, 600.0 MiB")
    assert printed.err == ""
    FOLLOWED.to_html("same.html")
    assert Path("out.html").read_text() == Path("same.html").read_text()


def test_a_gzipped_report_is_read_too(reports: Path, capsys: Printed) -> None:
    Path("r.gz").write_bytes(gzip.compress(FULL.to_json().encode()))
    assert legroom("report r.gz") == 0
    assert capsys.readouterr().out.startswith(str(FULL))


def test_peaks_stand_at_their_size_below_the_budget() -> None:
    lines, text = plot(FOLLOWED)
    assert len(lines) == scatter.LINES
    assert lines[0].count("-") == scatter.COLUMNS - 2  # two plans take nearly all of the budget
    found = {(letter, x) for line in lines for x, letter in enumerate(line) if letter in "PS"}
    across = {size: round((size - 35) / (90 - 35) * (scatter.COLUMNS - 1)) for size in (40, 50, 60, 70)}
    assert found == {("P", across[50]), ("P", across[70]), ("S", across[40]), ("S", across[60])}
    heights = {x: 600 * (scatter.LINES - 1 - y) / (scatter.LINES - 1) for y, line in enumerate(lines)
               for x, letter in enumerate(line) if letter in "PS"}  # fmt: skip
    for size, peak in ((40, 111), (50, 400), (60, 150), (70, 500)):
        assert heights[across[size]] == pytest.approx(peak, abs=600 / scatter.LINES)
    assert "· the plan's peak  x predicted  P measured, planned  S measured, sheltered" in text


def test_without_inputs_that_vary_it_is_the_memory_of_the_step() -> None:
    lines, text = plot(replace(FULL, measured_curve=(10 * MIB, 587 * MIB, 20 * MIB)))
    assert "by program order" in text and "first tick" in text
    assert lines[0][scatter.COLUMNS // 2] == "m" and lines[0].count("-") == scatter.COLUMNS - 1
    # The peak is measured as predicted, the end is not.
    ends = "".join(line[-1] for line in lines)
    assert ends.replace(" ", "") == "-xm"


def test_a_budget_far_above_is_no_line() -> None:
    near, far = (plot(replace(FOLLOWED, budget_bytes=budget))[1] for budget in (600 * MIB, 2**50))
    assert "---" in near
    assert "---" not in far and "P measured" in far


def test_json_has_what_is_drawn(reports: Path, capsys: Printed) -> None:
    assert legroom("report followed.json --json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["courses"] == {"planned": 3, "sheltered": 2, "reactive": 1, "left alone": 1}
    assert shown["prediction_error"] == pytest.approx(0.02)
    assert [step["input_size"] for step in shown["steps"]] == [40, 60, 50, 70, 58, 90, 35]
    assert shown["steps"][3]["planner"] == "auto"
    assert legroom("report full.json --json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["steps"], shown["predicted_curve"]) == ([], list(FULL.predicted_curve))


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is an extra")
def test_the_plot_as_a_picture(reports: Path, capsys: Printed) -> None:
    heights = []
    for name in ("full", "followed"):
        assert legroom(f"report {name}.json --png {name}.png") == 0
        data = Path(f"{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG")
        heights.append(int.from_bytes(data[20:24], "big"))
    assert heights[0] < heights[1]
    # The second plot is of the seconds: with others it is another picture.
    assert FOLLOWED.followed is not None
    slower = tuple(replace(step, seconds=step.seconds**2) for step in FOLLOWED.followed.steps)
    reporting.write_png(replace(FOLLOWED, followed=replace(FOLLOWED.followed, steps=slower)), Path("slower.png"))
    assert Path("slower.png").read_bytes() != data
    capsys.readouterr()
    assert "there is nothing to draw" in complaint(capsys, "report empty.json --html out.html --png out.png")


def test_a_room_that_has_not_trained_is_a_text(reports: Path, capsys: Printed) -> None:
    assert legroom("report empty.json --html out.html") == 0
    assert capsys.readouterr().out == f"{EMPTY}\n"


def test_without_matplotlib_a_picture_is_refused_before_anything_is_written(
    reports: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what Python has for a module that cannot be imported
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    said = complaint(capsys, "report followed.json --html out.html --png out.png")
    assert "--png needs matplotlib" in said and "pip install 'legroom[plot]'" in said


def test_bad_files_are_one_line_with_the_field(reports: Path, capsys: Printed) -> None:
    document = json.loads(FOLLOWED.to_json())
    document["followed"]["steps"][4]["seconds"] = "soon"
    Path("bad.json").write_text(json.dumps(document))
    assert "report.followed.steps[4].seconds: expected a number" in complaint(capsys, "report bad.json --html out.html")
    Path("bad.json").write_text("{")
    assert "report: not readable as JSON" in complaint(capsys, "report bad.json")
    assert "none.json: cannot be read" in complaint(capsys, "report none.json")
    assert "something else" in complaint(capsys, "report full.json --html full.json")
    assert "something else" in complaint(capsys, "report full.json --html out --png out")


@FUZZ
@given(st.data())
def test_a_report_that_was_tampered_with_never_crashes(reports: Path, capsys: Printed, data: st.DataObject) -> None:
    document = json.loads((FOLLOWED if data.draw(st.booleans()) else FULL).to_json())
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(document, data)
    Path("bad.json").write_text(json.dumps(document))
    status = run(["report", "bad.json", "--html", "out.html", *data.draw(st.sampled_from(((), ("--json",))))])
    out, err = capsys.readouterr()
    assert "bug" not in err, err
    assert (status, bool(out), err.count("\n"), Path("out.html").exists()) in ((0, True, 0, True), (2, False, 1, False))
    Path("out.html").unlink(missing_ok=True)
