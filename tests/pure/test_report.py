from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.errors import LegroomError
from legroom.page import MOST_POINTS, printable, thinned
from legroom.reasons import Held
from legroom.report import COLUMNS, Report
from legroom.timeline import Breakdown

MIB = 2**20
EMPTY = Report(
    steps=0,
    sheltered_steps=0,
    planned_steps=0,
    measured_steps=0,
    calibrations=0,
    budget_bytes=600 * MIB,
    peak_bytes=0,
    planned_peak_bytes=0,
    predicted_peak_bytes=0,
    floor_bytes=0,
    predicted_curve=(),
    measured_curve=(),
    planner="",
    notes=(),
    step_seconds=0.0,
    predicted_step_seconds=0.0,
    baseline_seconds=0.0,
    pace=1.0,
    lower_bound_seconds=None,
    bytes_kept=0,
    bytes_swapped=0,
    bytes_recomputed=0,
    breakdown=Breakdown(0.0, 0.0, 0.0, 0.0),
    held=(),
    unreplayable=(),
    distrusted=(),
    fallbacks={},
)
FULL = replace(
    EMPTY,
    steps=104,
    sheltered_steps=3,
    planned_steps=101,
    measured_steps=7,
    calibrations=2,
    peak_bytes=590 * MIB,
    planned_peak_bytes=587 * MIB,
    predicted_peak_bytes=588 * MIB,
    floor_bytes=211 * MIB,
    predicted_curve=(10 * MIB, 588 * MIB, 300 * MIB),
    measured_curve=(10 * MIB, 587 * MIB, 301 * MIB),
    planner="auto",
    notes=("17 gaps kept", "4321 evaluations"),
    step_seconds=1.25,
    predicted_step_seconds=1.2,
    baseline_seconds=1.0,
    pace=1.0,
    bytes_kept=101 * MIB,
    bytes_swapped=202 * MIB,
    bytes_recomputed=303 * MIB,
    breakdown=Breakdown(1.01, 0.55, 0.13, 0.064),
    held=(Held(5 * MIB, "blocks.1", "train.py:12"), Held(7 * MIB, "blocks.0.attention", "model.py:40")),
    unreplayable=(("an out= op", 9 * MIB), ("not deterministic", 3 * MIB)),
    distrusted=("aten.weird.default",),
    fallbacks={"released later than planned": 41, "drift: backward went another way": 1},
)
VOID = {"meta"}


class Read(HTMLParser):
    """Reads a page, insists that tags match, and keeps all that is text or an attribute."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.said: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = " ".join(self.said)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.said.append(data)


def page(report: Report, folder: Path) -> Read:
    report.to_html(folder / "report.html")
    return Read((folder / "report.html").read_text(encoding="utf-8"))


def points(read: Read) -> list[list[tuple[float, float]]]:
    lines = [value.split() for name, value in read.attributes if name == "points"]
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in line)] for line in lines]


def test_the_page_has_all_the_numbers(tmp_path: Path) -> None:
    text = page(FULL, tmp_path).text
    counts = ("104", "101", "41", "4321 evaluations")
    memory = ("600.0 MiB", "590.0 MiB (98.3%)", "587.0 MiB", "588.0 MiB", "211.0 MiB", f"{587 * MIB} B")
    seconds = ("1.25 s", "1.20 s", "1.00 s", "1.01 s", "550 ms", "130 ms", "64.0 ms")
    saved = ("101.0 MiB", "202.0 MiB", "303.0 MiB")
    reasons = ("train.py:12", "blocks.0.attention", "an out= op", "aten.weird.default", "backward went another way")
    for shown in (*counts, *memory, *seconds, *saved, *reasons):
        assert shown in text, shown


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    read = page(FULL, tmp_path)
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(read.tags)
    assert {"src", "href", "style", "onload"}.isdisjoint(name for name, _ in read.attributes)
    assert not re.search(r"https?:|url\(|@import", (tmp_path / "report.html").read_text())


def test_a_room_that_has_not_trained_has_a_page_and_a_text(tmp_path: Path) -> None:
    read = page(EMPTY, tmp_path)
    assert "600.0 MiB" in read.text
    assert points(read) == []
    assert "budget 600.0 MiB" in str(EMPTY)


@pytest.mark.parametrize(
    "hostile",
    [
        "</td></style><script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "&lt;b&gt;",
        "\x00\x1b[2J\udc80\u202e",
    ],
    ids=["script", "attribute", "entity", "control"],
)
def test_names_are_text_wherever_they_stand(hostile: str, tmp_path: Path) -> None:
    report = replace(
        FULL,
        planner=hostile,
        notes=(hostile,),
        held=(Held(1, hostile, hostile),),
        unreplayable=((hostile, 1),),
        distrusted=(hostile,),
        fallbacks={hostile: 1},
    )
    read = page(report, tmp_path)
    assert "script" not in read.tags and "img" not in read.tags
    assert read.text.count(printable(hostile)) == 7
    assert all(character.isprintable() or character == "\n" for character in str(report))
    assert json.loads(report.to_json())["planner"] == hostile


def test_curves_are_thinned_and_keep_their_peak(tmp_path: Path) -> None:
    flat = [100 * MIB] * 12_345
    flat[7_777] = 588 * MIB
    report = replace(FULL, predicted_curve=tuple(flat), measured_curve=())
    (line,) = points(page(report, tmp_path))
    assert len(line) == 2 * MOST_POINTS
    peak = min(line, key=lambda point: point[1])
    assert peak[0] == pytest.approx(800 * 7_777 / 12_345, abs=1.0)
    assert sum(y == peak[1] for _, y in line) == 2


def test_the_budget_is_a_line_where_it_is_near(tmp_path: Path) -> None:
    near, far = page(FULL, tmp_path), page(replace(FULL, budget_bytes=2**61), tmp_path)
    # The line and its place in the legend.
    assert [value for name, value in near.attributes if name == "class"].count("limit") == 2
    assert "limit" not in [value for name, value in far.attributes if name == "class"]


def test_a_peak_above_the_budget_stands_out(tmp_path: Path) -> None:
    assert ("class", "over") not in page(FULL, tmp_path).attributes
    assert ("class", "over") in page(replace(FULL, peak_bytes=601 * MIB), tmp_path).attributes


@given(st.lists(st.integers(0, 2**60), max_size=50), st.integers(1, 20))
def test_thinned(values: list[int], most: int) -> None:
    out = thinned(values, most=most)
    assert len(out) == min(len(values), most)
    assert max(out, default=0) == max(values, default=0)
    assert len(values) > most or out == values


def test_the_bound_is_told_once_a_planner_states_it(tmp_path: Path) -> None:
    assert FULL.gap is None and "below" not in str(FULL)
    told = replace(FULL, lower_bound_seconds=1.0)
    assert told.gap == pytest.approx(0.2)
    assert "below 1.00 s, this one lies 20.0% above" in str(told)
    assert "20.0%" in page(told, tmp_path).text
    assert json.loads(told.to_json())["gap"] == told.gap


@pytest.mark.parametrize("report", [EMPTY, FULL], ids=["empty", "full"])
def test_json_holds_every_field(report: Report) -> None:
    assert json.loads(report.to_json()) == json.loads(json.dumps(asdict(report)))


def test_text_stays_within_its_columns() -> None:
    long = replace(
        FULL,
        held=(Held(1, "a.very.long.module.path." * 10, "/a/very/long/path" * 10 + ":12"),),
        fallbacks={"words " * 50: 1},
    )
    for report in (EMPTY, FULL, long):
        assert max(map(len, str(report).splitlines())) <= COLUMNS
    for word in ("an out= op", "aten.weird.default", "blocks.0.attention", "released later than planned: 41"):
        assert word in str(FULL)


@pytest.mark.parametrize("path", ["missing/report.html", ".", "", "nul\0.html"])
def test_a_page_that_cannot_be_written_names_its_path(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LegroomError, match="cannot be written") as caught:
        FULL.to_html(path)
    assert ascii(path) in str(caught.value)
    assert list(tmp_path.iterdir()) == []
