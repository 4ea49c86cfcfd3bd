from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.errors import LegroomError
from legroom.page import MOST_POINTS, MOST_TICKS, Axis, printable, thinned
from legroom.reasons import Held
from legroom.report import COLUMNS, COURSES, Followed, FollowedStep, Report, input_sizes, peaks
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
STEPS = (
    FollowedStep((8, 40, 8), "sheltered", 0.9, 0.001, 111 * MIB, 0),
    FollowedStep((8, 60, 8), "sheltered", 1.1, 0.001, 150 * MIB, 0),
    FollowedStep((8, 50, 8), "planned", 0.2, 0.0005, 400 * MIB, 404 * MIB, "responsive", 480 * MIB),
    FollowedStep((8, 70, 8), "planned", 0.3, 0.0005, 500 * MIB, 485 * MIB, "auto", 590 * MIB),
    FollowedStep((8, 58, 8), "planned", 0.25, 0.0005, 0, 0, "auto", 580 * MIB),
    FollowedStep((8, 90, 8), "reactive", 0.8, 0.002, 0, 0),
    FollowedStep((8, 35, 8), "left alone", 0.1, 0.0004, 0, 0, "responsive", 300 * MIB),
)
FOLLOWED = replace(
    FULL,
    predicted_curve=(),
    measured_curve=(),
    predicted_step_seconds=0.0,
    baseline_seconds=0.0,
    lower_bound_seconds=0.7,
    breakdown=Breakdown(0.0, 0.0, 0.0, 0.0),
    followed=Followed(STEPS, 2, 9, 143, 17, 5, 0.0123, 3 * MIB, 0.0007, 0.045),
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


@pytest.mark.parametrize("report", [EMPTY, FULL, FOLLOWED], ids=["empty", "full", "followed"])
def test_json_holds_every_field_and_is_read_again(report: Report) -> None:
    text = report.to_json()
    assert json.loads(text) == {"kind": "report", "version": 1, **json.loads(json.dumps(asdict(report)))}
    assert Report.from_json(text) == report
    told = replace(report, predicted_step_seconds=1.2, lower_bound_seconds=1.0)
    assert Report.from_json(told.to_json()).gap == told.gap


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("version", 2, "report: this file is version 2, this legroom reads up to 1"),
        ("kind", "plan", "report: this file is of kind 'plan'"),
        ("steps", -1, "report.steps: expected an integer >= 0, got -1"),
        ("steps", True, "report.steps: expected an integer >= 0, got True"),
        ("steps", 10**400, "report.steps: expected an integer <= 4611686018427387903, got an integer of 1329 bits"),
        ("budget_bytes", 0, "report.budget_bytes: expected an integer >= 1, got 0"),
        ("peak_bytes", 2**62, "report.peak_bytes: expected an integer <="),
        ("step_seconds", 1e300, "report.step_seconds: expected a number from 0 to 1e+09"),
        ("pace", float("nan"), "report.pace: NaN is no number"),
        ("more", 1, "unknown field 'more'"),
        ("gap", 0.5, "report.gap: expected None, as the seconds say, got 0.5"),
        ("predicted_curve", [1, "2"], "report.predicted_curve[1]: expected an integer"),
        ("planner", None, "report.planner: expected a text"),
        ("breakdown", {}, "report.breakdown: the field 'computation_seconds' is missing"),
        ("unreplayable", [["why"]], "report.unreplayable[0]: expected a reason and its bytes, got 1 entries"),
        ("fallbacks", [], "report.fallbacks: expected an object of names and counts"),
        ("fallbacks", {"a": 1.5}, "report.fallbacks['a']: expected an integer"),
        ("fallbacks", {"\ud800": 1}, "report.fallbacks[0]: expected text that UTF-8 can hold"),
        ("followed", [], "report.followed: expected an object, got an array"),
        ("followed.hits", "1", "report.followed.hits: expected an integer"),
        ("followed.residual", 1.5, "report.followed.residual: expected a number from 0 to 1, got 1.5"),
        ("followed.steps.0.course", "lost", "report.followed.steps[0].course: expected one of planned"),
        ("followed.steps.1.features", [8, -2], "report.followed.steps[1].features[1]: expected an integer >= 0"),
        ("followed.steps.1.measured_bytes", None, "report.followed.steps[1].measured_bytes: expected an integer"),
    ],
)
def test_a_file_that_is_no_report_is_refused_by_the_field(path: str, value: object, said: str) -> None:
    document = json.loads(FOLLOWED.to_json())
    *folders, last = path.split(".")
    node = document
    for key in folders:
        node = node[int(key)] if isinstance(node, list) else node[key]
    node[last] = value
    with pytest.raises(LegroomError) as caught:
        Report.from_json(json.dumps(document))
    assert said in str(caught.value)


def test_a_room_that_follows_its_inputs_says_how() -> None:
    text = str(FOLLOWED)
    for shown in (
        "input size 35 to 90, a of (8, a, 8)",
        "the last 7 steps: planned 3, sheltered 2, reactive 1, left alone 1",
        "structures 2, plans 9, hits 143, misses 17, evicted 5",
        "700 µs (median), 45.0 ms (99th percentile)",
        "off by 2.00% on average, in 2 steps that were measured",  # 1 % above and 3 % below
        "off by 1.23% of the peak at worst, 3.0 MiB are held in reserve",
    ):
        assert shown in text, shown
    # There is a model for each size, and none of the step.
    assert "modelled" not in text and "predicted 0 s" not in text
    assert FOLLOWED.gap is None
    assert max(map(len, text.splitlines())) <= COLUMNS


@pytest.mark.parametrize(
    ("features", "label", "values"),
    [
        ([(8, 40, 8), (8, 60, 8)], "a of (8, a, 8)", (40, 60)),
        ([(8, 40, 8, 40), (8, 60, 8, 60), (8, 50, 8, 50)], "a of (8, a, 8, a)", (40, 60, 50)),
        ([(40, 39, 81), (60, 59, 121), (50, 49, 101)], "a of (a, a', a')", (40, 60, 50)),
        ([(2, 3, 30, 40), (2, 3, 50, 20), (2, 3, 30, 20)], "a × b of (2, 3, a, b)", (1200, 1000, 600)),
        ([(8, 40), (8, 40)], "sum of all dimensions", (48, 48)),
        ([(8, 40), (8, 40, 2)], "sum of all dimensions", (48, 50)),
        ([(1, 1, 1, 1), (2, 1, 3, 1), (1, 2, 1, 4), (5, 1, 1, 9)], "sum of all dimensions", (4, 7, 8, 16)),
        ([(1,) * 20, (1,) * 19 + (5,)], "dimension 20 of 20", (1, 5)),
        ([(), ()], "sum of all dimensions", (0, 0)),
        ([], "sum of all dimensions", ()),
    ],
)
def test_the_size_of_an_input_is_made_of_what_varies(
    features: list[tuple[int, ...]], label: str, values: tuple[int, ...]
) -> None:
    sizes = input_sizes([FollowedStep(each, "planned", 0.1, 0.0, 0, 0) for each in features])
    assert (sizes.label, sizes.values) == (label, values)


def places(read: Read, kind: str) -> list[tuple[float, float]]:
    """Where the marks of one kind stand, the last of them in the legend."""
    drawn = [after[1] for before, after in pairwise(read.attributes) if before == ("class", kind)]
    return [(float(x), float(y)) for d in drawn for x, y in re.findall(r"M([-\d.]+) ([-\d.]+)", d)]


def test_the_page_draws_peaks_against_input_sizes_and_the_budget(tmp_path: Path) -> None:
    read = page(FOLLOWED, tmp_path)
    for shown in (
        "input size: a of (8, a, 8)",
        "budget, 600.0 MiB",
        "measured, sheltered",
        "left alone, 1 step",
        "2.00%",
    ):
        assert shown in read.text, shown
    # Two figures with planned steps: the peaks of two that were measured, then the seconds of all three.
    (ax, ay), (bx, by), _, *seconds, _ = places(read, "dot colour-1")
    assert ax < bx and ay > by  # 400 MiB at 50, 500 MiB at 70
    assert len(seconds) == 3
    # A prediction below what was measured stands below it, at the same size.
    crosses = places(read, "cross ink")
    assert [x for x, _ in crosses[:2]] == [ax, bx]
    assert crosses[0][1] < ay and crosses[1][1] > by
    assert len(places(read, "dash soft")) == 4 + 1
    lines = [dict(read.attributes[i : i + 5]) for i, pair in enumerate(read.attributes) if pair == ("class", "limit")]
    assert float(lines[0]["y1"]) < min(y for _, y in places(read, "dash soft")[:-1])
    assert "Where the modelled step" not in read.text


@pytest.mark.parametrize(
    "steps",
    [
        (),
        (FollowedStep((), "reactive", 0.0, 0.0, 0, 0),),
        (FollowedStep((2**61, 2**61, 2**61), "planned", 1e9, 0.0, 1, 2**61),) * 2,
        (
            FollowedStep((2**61, 0, 1), "planned", 5e-324, 0.0, 2**61, 1),
            FollowedStep((2**61 - 1, 2**61, 5), "sheltered", 1e9, 0.0, 1, 1),
            FollowedStep((2**61 - 1, 2**61 - 1, 7), "reactive", 1.0, 0.0, 1, 1),
        ),
    ],
    ids=["none", "nothing", "equal", "extreme"],
)
def test_any_steps_can_be_shown(steps: tuple[FollowedStep, ...], tmp_path: Path) -> None:
    assert FOLLOWED.followed is not None
    report = replace(FOLLOWED, followed=replace(FOLLOWED.followed, steps=steps))
    read = page(report, tmp_path)
    assert "nan" not in str(report)
    drawn = [value for name, value in read.attributes if name == "d"]
    assert not any("nan" in path or "inf" in path for path in drawn)
    assert len(drawn) == 2 * (len(peaks(report.followed or FOLLOWED.followed)) + len({s.course for s in steps}))
    assert {step.course for step in steps} <= set(COURSES)


@given(st.floats(1e-9, 1e9), st.floats(1.5, 1e9), st.sampled_from(("decimal", "binary", "log")))
def test_ticks_are_few_and_between_the_ends(low: float, times: float, scale: Any) -> None:
    axis = Axis(low, low * times, str, scale)
    ticks = axis.ticks()
    assert len(ticks) <= MOST_TICKS
    assert len(ticks) >= (2 if times >= 10 else 0)
    shares = [axis.share(tick) for tick in ticks]
    assert shares == sorted(set(shares))
    assert all(0 <= share <= 1 for share in shares)


def test_ticks_are_round() -> None:
    assert Axis(32.0, 143.0, str).ticks() == [40, 60, 80, 100, 120, 140]
    assert Axis(0.0, 45.0 * MIB, str, "binary").ticks() == [8 * MIB * i for i in range(6)]
    assert Axis(0.08, 2.5, str, "log").ticks() == pytest.approx([0.1, 0.2, 0.5, 1, 2])
    assert Axis(0.0001, 2.5, str, "log").ticks() == pytest.approx([0.0001, 0.001, 0.01, 0.1, 1])


def test_text_stays_within_its_columns() -> None:
    long = replace(
        FULL,
        held=(Held(1, "a.very.long.module.path." * 10, "/a/very/long/path" * 10 + ":12"),),
        fallbacks={"words " * 50: 1},
    )
    for report in (EMPTY, FULL, FOLLOWED, long):
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
