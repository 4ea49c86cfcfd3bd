"""The benchmarks of inputs that change size: their streams, their second opinion, their verdicts, and short runs."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import dynamic, lengths
from bench.children import OVER
from bench.meters import CpuMeter
from bench.rows import Results, Row, read, write
from legroom.errors import BudgetError
from legroom.hardware import PRESETS
from legroom.planners import named
from tests.pure.strategies import make_trace

RUN = {"command": "python bench/dynamic.py", "date": "2026-11-15T00:00:00+00:00", "torch": "2.13.0"}
GIB = 2**30

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """And what is there before a test is left out of collections: counting tensors makes one at each recorded step."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(before)


# streams


@pytest.mark.parametrize(
    ("case", "low", "high"),
    [
        ("swag", (35,), (141,)),
        ("squad", (153,), (512,)),
        ("qqp", (30,), (332,)),
        ("un_pc", (17, 17), (460, 460)),
        ("resize", (60, 60), (167, 167)),
    ],
)
def test_lengths_fill_the_ranges_of_the_paper(case: str, low: tuple[int, ...], high: tuple[int, ...]) -> None:
    chance = random.Random(1)
    drawn = [lengths.CASES[case].draw(chance) for _ in range(2000)]
    for values, least, most in zip(zip(*drawn, strict=True), low, high, strict=True):
        assert min(values) >= least and max(values) <= most
        assert max(values) - min(values) > 0.7 * (most - least)
        assert len(set(values)) > 0.3 * (most - least)


def test_no_resized_image_is_larger_than_the_one_that_sets_the_budget() -> None:
    chance = random.Random(2)
    longest = sorted(lengths.CASES["resize"].longest)
    drawn = [lengths.CASES["resize"].draw(chance) for _ in range(2000)]
    assert all(a <= b for sizes in drawn for a, b in zip(sorted(sizes), longest, strict=True))
    assert {height > width for height, width in drawn} == {True, False}


def test_every_contender_gets_the_same_lengths_and_the_longest_first() -> None:
    stream = dynamic.STREAMS["t5"]
    sizes = stream.sizes(140)
    assert sizes == stream.sizes(140) and sizes[0] == (512, 128) and len(set(sizes)) > 100
    assert len(sizes) == 144 and {*sizes[141:]} == {(32, 16), (32, 128), (512, 16)}
    assert all(32 <= source <= 512 and 16 <= target <= 128 for source, target in sizes)
    assert [*dynamic.held_warmup(140, 3)][:10] == [0, 0, 141, 0, 142, 0, 143, 0, 1, 0]


def test_a_held_plan_is_for_the_longest_alone() -> None:
    small, large = sorted((make_trace(seed, forward=6) for seed in range(2)), key=lambda trace: trace.peak_bytes)
    held = dynamic.Held(named("none"))
    machine = PRESETS["h200"]
    assert held(large, machine, GIB).planner == "none"
    with pytest.raises(BudgetError, match="not the longest"):
        held(small, machine, GIB)
    assert held(large, machine, GIB).planner == "none"


def test_a_price_is_that_of_a_plan_where_one_is_needed() -> None:
    trace = make_trace(3, forward=8)
    floor = dynamic.floor_bytes(trace)
    machine = PRESETS["rtx2080ti-pcie3"]
    assert dynamic.price(trace, machine, trace.peak_bytes) == 0.0
    assert dynamic.price(trace, machine, floor) > dynamic.price(trace, machine, trace.peak_bytes - 1) >= 0.0


def test_between_two_points() -> None:
    points = [(1.0, 10.0), (3.0, 20.0), (3.0, 22.0), (5.0, 0.0)]
    found = [dynamic.between(at, points) for at in (0, 1, 2, 4, 5, 9)]
    assert found == [10.0, 10.0, 15.0, 11.0, 0.0, 0.0]


# a second opinion


def test_a_peak_is_read_from_the_allocators_events() -> None:
    heard: list[lengths.Heard] = []
    kept = torch.zeros(1000)
    meter = CpuMeter()
    before = meter.alive_bytes()
    with lengths.overheard(heard), lengths._profile():
        a = torch.zeros(5000)
        b = torch.zeros(3000)
        del a
        c = torch.zeros(2500)
    assert len(heard) == 1
    assert lengths.peak_of(heard[0].events(), meter.alive_bytes()) == before + 4 * 8000
    assert kept.numel() + b.numel() + c.numel() == 6500
    with lengths._profile():
        pass
    assert len(heard) == 1  # it listens no longer


def test_growth_of_the_resident_set() -> None:
    assert lengths.growth([50, 60, 90, 100, 99, 101, 100, 100, 100, 99, 101, 100]) == pytest.approx(0.0, abs=0.02)
    assert lengths.growth([100 + i for i in range(100)]) > 0.3
    assert lengths.growth([1]) == 0.0


def test_a_step_is_expected_to_take_as_long_as_its_neighbours() -> None:
    samples = [((size,), size / 1000) for size in range(10, 200)]
    assert lengths.expected((100,), samples) == pytest.approx(0.1)
    assert lengths.expected((100,), [((90,), 0.5), ((110,), 0.1), ((100,), 0.2)]) == 0.2


# verdicts


FIGURES: dict[str, Any] = {
    "different": "", "compared_steps": 2000, "peaks": 110, "legroom_peak_bytes": 90, "sheltered": 10, "structures": 1,
    "reactive": 0, "predictions": 100, "prediction_error": 0.009, "planning_steps": 1900, "slow_planning_ms": 0.9,
    "extra_seconds": 0.29, "resident_growth": 0.01,
}  # fmt: skip
PLAIN = Row("swag", "plain", "ok", mean_ms=100.0, steps=2000, report={"floor_bytes": 50, "peak_bytes": 150})
OURS = Row("swag", "legroom", "ok", mean_ms=120.0, steps=2000, cap_bytes=100, allocated_bytes=99, report=FIGURES)


def test_everything_is_met_where_it_is() -> None:
    found = lengths.verdicts(Results((RUN,), (PLAIN, OURS)))
    assert len(found) == 7 and all(v.met for v in found), "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        ({"legroom_peak_bytes": 101}, "budget"),
        ({"different": "step 7"}, "bit-identical"),
        ({"compared_steps": 1999}, "bit-identical"),
        ({"resident_growth": 0.03}, "resident"),
        ({"sheltered": 11}, "sheltered"),
        ({"structures": 0}, "sheltered"),
        ({"prediction_error": 0.011}, "predicted"),
        ({"slow_planning_ms": 1.1}, "planning"),
        ({"extra_seconds": 0.31}, "iterations"),
    ],
)
def test_each_claim_about_lengths_can_be_missed(change: dict[str, Any], claim: str) -> None:
    found = lengths.verdicts(Results((RUN,), (PLAIN, replace(OURS, report={**FIGURES, **change}))))
    assert [claim in v.claim for v in found if v.met is False] == [True]


def test_a_measured_peak_over_the_budget_is_one() -> None:
    found = lengths.verdicts(Results((RUN,), (PLAIN, replace(OURS, allocated_bytes=101))))
    assert [v.claim for v in found if not v.met] == ["never over the budget"]
    short = lengths.verdicts(Results((RUN,), (replace(PLAIN, steps=60), replace(OURS, steps=60))))
    assert [v.met for v in short if "resident" in v.claim] == [None]


def timed(contender: str, mean_ms: float, **fields: Any) -> Row:
    return Row("bert", contender, "ok", mean_ms=mean_ms, steps=100, **{"cap_bytes": 9 * GIB, **fields})


RANDOM_LENGTHS = (
    timed("plain", 100.0, cap_bytes=0),
    Row("bert", "needed", "ok", report={"needed": {"50%": {"mean_ms": 5.0}}}),
    timed("checkpoint@50%", 130.0),
    timed("sublinear@50%", 140.0),
    timed("static@50%", 125.0),
    timed("legroom@50%", 108.0, reserved_bytes=9 * GIB),
    timed("legroom@above", 101.9),
)


def test_claims_about_random_lengths() -> None:
    found = dynamic.verdicts(Results((RUN,), RANDOM_LENGTHS))
    assert len(found) == 5 and all(v.met for v in found), "\n".join(map(str, found))
    assert any("85%" in v.figures for v in found)  # (125 - 108) of (125 - 105)


@pytest.mark.parametrize(
    ("contender", "fields", "claim"),
    [
        ("checkpoint@50%", {"mean_ms": 129.0}, "checkpoint"),
        ("sublinear@50%", {"mean_ms": 129.0}, "sublinear"),
        ("static@50%", {"mean_ms": 119.0}, "avoidable"),
        ("legroom@above", {"mean_ms": 102.1}, "above the plain"),
        ("legroom@50%", {"reserved_bytes": 9 * GIB + 1}, "cap"),
    ],
)
def test_each_claim_about_random_lengths_can_be_missed(contender: str, fields: dict[str, Any], claim: str) -> None:
    rows = tuple(replace(row, **fields) if row.contender == contender else row for row in RANDOM_LENGTHS)
    assert [claim in v.claim for v in dynamic.verdicts(Results((RUN,), rows)) if v.met is False] == [True]


def test_a_peer_that_does_not_run_is_slower_and_one_that_was_not_asked_is_not() -> None:
    def words(row: Row | None) -> list[str]:
        rows = [r for r in RANDOM_LENGTHS if r.contender != "sublinear@50%"]
        found = dynamic.verdicts(Results((RUN,), (*rows, row) if row is not None else tuple(rows)))
        return [v.word for v in found if "sublinear" in v.claim]

    assert words(Row("bert", "sublinear@50%", "budget")) == ["met"]
    assert words(Row("bert", "sublinear@50%", "error")) == ["not measured"]
    assert words(None) == ["not measured"]


@pytest.mark.parametrize(
    ("status", "detail", "word"),
    [("timeout", OVER, "not measured"), ("timeout", "took longer than 200 s", "missed"), ("oom", "at 50%", "missed")],
)
def test_what_there_was_no_time_to_measure_is_not_missed(status: str, detail: str, word: str) -> None:
    rows = [r for r in RANDOM_LENGTHS if r.contender != "legroom@50%"]
    found = dynamic.verdicts(Results((RUN,), (*rows, Row("bert", "legroom@50%", status, detail))))
    assert [v.word for v in found if "50%" in v.claim] == [word] * 3


def test_each_run_is_judged_by_itself(tmp_path: Path) -> None:
    again = [row for row in RANDOM_LENGTHS if row.contender.endswith(("plain", "50%"))]
    slower = [replace(row, run=1, mean_ms=row.mean_ms * 2) for row in again]
    alone = (timed("legroom@above", 101.0, run=2),)  # against the last plain there is
    results = Results((RUN, RUN, RUN), (*RANDOM_LENGTHS, *slower, *alone))
    found = [(v.workload, v.claim, v.figures) for v in dynamic.verdicts(results) if v.met is not None]
    assert ("bert, run 0", "at 50% 20% faster than checkpoint", "130.0 / 108.0 ms = 1.20") in found
    assert ("bert, run 1", "at 50% 20% faster than checkpoint", "260.0 / 216.0 ms = 1.20") in found
    assert ("bert, run 2", "above the plain peak at most 1.02 × plain", "101.0 / 200.0 ms = 0.505") in found
    write(tmp_path / "several.json", results)
    dynamic.render(tmp_path / "several.json")
    page = (tmp_path / "several.md").read_text()
    assert "| legroom@50% | 108.0 | +8.0% |" in page and "| legroom@50% | 216.0 | +8.0% |" in page


def test_what_the_device_does_not_count_or_nobody_modelled_is_not_measured() -> None:
    uncounted = [replace(row, reserved_bytes=0) for row in RANDOM_LENGTHS]
    assert [v.word for v in dynamic.verdicts(Results((RUN,), tuple(uncounted))) if "cap" in v.claim] == ["not measured"]
    elsewhere = [replace(r, report={"needed": {"25%": {}}}) if r.contender == "needed" else r for r in RANDOM_LENGTHS]
    found = dynamic.verdicts(Results((RUN,), tuple(elsewhere)))
    assert [v.word for v in found if "avoidable" in v.claim] == ["not measured"]


def test_pages_come_from_the_file(tmp_path: Path) -> None:
    first, second = tmp_path / "dynamic.json", tmp_path / "lengths.json"
    write(first, Results((RUN,), RANDOM_LENGTHS))
    write(second, Results((RUN,), (PLAIN, OURS)))
    assert dynamic.main(["--render", str(first)]) == 0
    assert lengths.main(["--render", str(second)]) == 0
    assert "| static@50% | 125.0 | +25.0% |" in first.with_suffix(".md").read_text()
    assert "| BERT, SWAG 35 to 141 | 2000 | 100.0 | 120.0 |" in second.with_suffix(".md").read_text()


@pytest.mark.parametrize("wrong", ["x", None, [1], {"50%": "x"}, {"50%": {"mean_ms": "x"}}])
def test_a_price_that_is_none_is_not_taken_for_one(wrong: Any, tmp_path: Path) -> None:
    rows = [replace(row, report={"needed": wrong}) if row.contender == "needed" else row for row in RANDOM_LENGTHS]
    path = tmp_path / "dynamic.json"
    write(path, Results((RUN,), tuple(rows)))
    assert dynamic.main(["--render", str(path)]) == 0
    assert [v.word for v in dynamic.verdicts(read(path)) if "static" in v.claim] == ["not measured"]


@pytest.mark.parametrize(
    ("passes", "told"), [([3.0, 2.5, 1.0], True), ([3.0, 1.0], False), ("x", False), ([1, "x", 2], False)]
)
def test_passes_between_the_first_and_the_last_are_told(passes: Any, told: bool, tmp_path: Path) -> None:
    rows = [replace(row, report={**row.report, "passes_ms": passes}) for row in RANDOM_LENGTHS]
    path = tmp_path / "dynamic.json"
    write(path, Results((RUN,), tuple(rows)))
    assert dynamic.main(["--render", str(path)]) == 0
    assert ("passes between: 2.5 ms" in path.with_suffix(".md").read_text()) is told


@pytest.mark.parametrize("wrong", ["1", "-3", "two"])
def test_less_than_two_passes_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dynamic.main(["--passes", wrong])
    assert "at least" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["120%", "half", "50%,"])
def test_unknown_budgets_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dynamic.main(["--shares", wrong])
    assert "expected a share" in capsys.readouterr().err


# short runs


def test_a_short_run_of_changing_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_side = replace(lengths.CASES["resize"], draw=lambda chance: (chance.randint(60, 100), 80), longest=(100, 80))
    monkeypatch.setitem(lengths.CASES, "resize", one_side)
    monkeypatch.setattr(lengths, "PROFILE_EVERY", 7)
    monkeypatch.setattr(lengths, "DIGEST_EVERY", 5)
    job = lengths.Job("resize", "plain", 9, str(tmp_path / "digests.json"))
    plain = lengths.run(job)
    floor, peak = (int(plain.reported(name)) for name in ("floor_bytes", "peak_bytes"))
    assert 0 < floor < peak
    job = replace(job, contender="legroom", budget_bytes=(floor + peak) // 2)
    ours = lengths.run(job)
    assert ours.report["different"] == "" and ours.reported("compared_steps") == 9
    assert 0 < ours.allocated_bytes <= job.budget_bytes
    assert ours.report["looked"][-1][0] >= 7 and ours.reported("peaks") >= 4  # one of our own, the rest overheard
    assert ours.reported("planning_steps") + ours.reported("predictions") >= 1
    # What legroom says of its worst step is what the events of that step say.
    assert ours.reported("legroom_peak_bytes") <= ours.allocated_bytes

    digests = tmp_path / "digests.json"
    digests.write_text(digests.read_text().replace("0x1.", "0x0.", 1))
    wrong = lengths.run(job)
    assert wrong.report["different"].startswith("step 0: the loss") and wrong.steps == 1


def test_a_short_run_of_random_lengths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dynamic, "NEEDED_SIZES", 2)
    monkeypatch.setattr(dynamic, "HELD_SIZES", 3)
    rows: list[Row] = []
    job = dynamic.Job("tiny_gpt", "plain", "cpu", steps=2, warmup=5, settle=False, shares=("50%",), passes=3)
    dynamic.measure(job, rows.append)
    budgets = dynamic.budgets_of(rows[0], ["50%", "above"])
    assert rows[0].reported("floor_bytes") < budgets["50%"] < rows[0].reported("peak_bytes") < budgets["above"]
    half = {"50%": budgets["50%"]}
    for contender in ("checkpoint", "static", "legroom"):
        dynamic.measure(replace(job, contender=contender, budgets=half), rows.append)
    names = ["plain", "needed", "checkpoint@50%", "static@50%", "legroom@50%"]
    assert [(row.contender, row.status) for row in rows] == [(name, "ok") for name in names]
    static, ours = rows[-2:]
    assert static.reported("plans") == 1 and static.report["courses"] == {"planned": 2}
    assert ours.reported("warmup_sheltered") >= 3 and ours.reported("warmup_seconds") > 0
    assert all(len(row.report["steps_ms"]) == 2 for row in (rows[0], static, ours))
    for row in (static, ours):
        assert len(row.report["passes_ms"]) == 3
        assert row.report["passes_ms"][0] == row.report["first_ms"] and row.report["passes_ms"][-1] == row.mean_ms
    write(tmp_path / "results.json", Results((RUN,), tuple(rows)))
    assert dynamic.render(tmp_path / "results.json") == read(tmp_path / "results.json")


def test_nothing_starts_after_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    assert dynamic.main(["--tiny", "--limit", "-1", "--json", str(path), "--commit", "abc"]) == 0
    assert lengths.main(["--limit", "-1", "--json", str(path), "--commit", "abc"]) == 0
    assert "skipped" in capsys.readouterr().out and not path.exists()


def test_a_child_that_dies_after_a_result_leaves_it(tmp_path: Path) -> None:
    job = dynamic.Job("tiny_gpt", "plain", "nowhere", steps=1, warmup=1, settle=False, shares=("50%",))
    before = Results((RUN,), RANDOM_LENGTHS)
    session = dynamic.Session(before, tmp_path / "results.json", tmp_path, timeout_seconds=60, until=float("inf"))
    session._run(job)
    row = session.results.of("tiny_gpt")["plain"]
    assert session.failed and row.status == "error" and "nowhere" in row.detail
    assert session.results.of("bert") == before.of("bert")
