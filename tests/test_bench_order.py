"""The papers' order for real: verdicts, bad input, and a run on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import order, record, rows
from bench.measure import STEADY, Job, measure
from bench.rows import Results, Row
from legroom.errors import LegroomError

RUN = {"command": "python bench/order.py", "torch": "2.13.0"}
CLAIMS = ("50%: home ≥ capuchin", "50%: capuchin ≥ superneurons", "50%: superneurons ≥ vdnn")


def ran(planner: str, median_ms: float) -> Row:
    return Row("vgg16", f"{planner}@50%", "ok", cap_bytes=2**30, median_ms=median_ms, report={"planned_steps": 9})


ORDERED = (ran("home", 100.0), ran("capuchin", 110.0), ran("superneurons", 120.0), ran("vdnn", 130.0))


def words(*measured: Row) -> dict[str, str]:
    return {verdict.claim: verdict.word for verdict in order.verdicts(Results((RUN,), measured))}


def test_the_order_is_met_missed_or_not_measured() -> None:
    assert words(*ORDERED) == dict.fromkeys(CLAIMS, "met")
    assert words(ran("home", 111.0), *ORDERED[1:])[CLAIMS[0]] == "met"  # that is noise
    assert words(ran("home", 111.2), *ORDERED[1:])[CLAIMS[0]] == "missed"
    assert words(*ORDERED[1:])[CLAIMS[0]] == "not measured"
    late = replace(ORDERED[0], status="timeout")
    assert words(late, *ORDERED[1:])[CLAIMS[0]] == "not measured"


def test_a_rule_that_does_not_reach_the_budget_is_slower_than_any_plan() -> None:
    none = [replace(row, status="budget", median_ms=0.0) for row in ORDERED]
    assert words(*ORDERED[:3], none[3])[CLAIMS[2]] == "met"
    assert words(none[0], *ORDERED[1:])[CLAIMS[0]] == "missed"
    assert words(*ORDERED[:2], *none[2:])[CLAIMS[2]] == "not measured"


def test_the_page_shows_every_row_whatever_became_of_it() -> None:
    plain = Row("vgg16", "plain", "ok", median_ms=80.0, steps=20)
    failed = replace(ORDERED[3], status="oom", detail="no memory | at all", run=1)
    page = order.page(Results((RUN, RUN), (plain, *ORDERED[:3], failed)))
    assert "+25.0%" in page  # home against plain
    assert "run 1; oom: no memory \\| at all" in page
    assert page.count("| vgg16 |") == 5 + len(CLAIMS)
    odd = replace(ORDERED[0], report={"planned_steps": 1, "breakdown": {"stalled_copy_seconds": None}})
    assert "| home |" in order.page(Results((RUN,), (replace(plain, median_ms=0.0), odd)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--planners", "home,nonsense"], "no planner 'nonsense'"),
        (["--shares", "50,many"], "expected percentages from 0 to 100, got 'many%'"),
        (["--only", "nothing"], "nothing"),
    ],
)
def test_bad_options_are_told(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        order.main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_steps_on_the_cpu_under_two_planners(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "order.json"
    options = ["--tiny", "--shares", "50", "--steps", "3", "--planners", "capuchin,vdnn", "--commit", "abc"]
    assert order.main([*options, "--json", str(target)]) == 0
    measured = rows.read(target).of("tiny")
    assert list(measured) == ["plain", "capuchin@50%", "vdnn@50%"]
    assert {name: row.report.get("planner", "") for name, row in measured.items() if row.ok} == {
        "plain": "", "capuchin@50%": "capuchin", "vdnn@50%": "vdnn",
    }  # fmt: skip
    assert all(row.host_ms > 0.0 for row in measured.values() if row.ok)
    assert "50%: home ≥ capuchin: not run" in capsys.readouterr().out
    assert "capuchin" in target.with_suffix(".md").read_text()


@pytest.mark.parametrize("most", [1, 3])
def test_steps_are_timed_anew_until_they_are_steady(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """The second round is the first steady one; of rounds that are not, the steadiest counts."""
    took = iter([[10.0, 20.0, 10.0, 20.0], [16.0, 16.0, 16.0 * (1 + STEADY / 2), 16.0], [1.0, 1.0, 1.0, 1.0]])
    monkeypatch.setattr("bench.meters.CpuMeter.milliseconds", lambda *_: next(took))
    found: list[Row] = []
    measure(
        Job("tiny", "cpu", ("plain",), steps=4, warmup=1, seconds=5.0, uncapped_only=True, rounds=most), found.append
    )
    assert found[0].median_ms == pytest.approx(16.0 if most > 1 else 15.0)
    assert found[0].detail == ("timed 2× for steady steps" if most > 1 else "")


def test_plans_made_before_are_the_ones_that_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces, plans, target = tmp_path / "traces", tmp_path / "plans", tmp_path / "order.json"
    traces.mkdir()
    assert record.main(["--tiny", "--only", "tiny", str(traces)]) == 0
    options = ["--tiny", "--shares", "50", "--planners", "capuchin,superneurons", "--traces", str(traces)]
    assert order.main([*options, "--make-plans", str(plans)]) == 0
    made = sorted(path.name for path in plans.iterdir())
    assert made == ["tiny_capuchin_50.json", "tiny_superneurons_50.json"]
    # Whatever a file says is what runs: here the plan of one planner under the name of the other.
    (plans / made[1]).write_text((plans / made[0]).read_text())
    assert order.main([*options, "--plans", str(plans), "--steps", "3", "--commit", "abc", "--json", str(target)]) == 0
    measured = rows.read(target).of("tiny")
    assert measured["superneurons@50%"].report["planner"] == "capuchin"
    assert "capuchin@50%" in capsys.readouterr().out


def test_folders_of_plans_that_are_none_are_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(LegroomError, match="no folder to write plans to"):
        order.main(["--tiny", "--make-plans", str(file)])
    with pytest.raises(LegroomError, match="make one with --make-plans"):
        order.main(["--tiny", "--plans", str(tmp_path / "nowhere")])
    (tmp_path / "vgg16_vdnn_50.json").mkdir()
    with pytest.raises(LegroomError, match=r"vgg16_vdnn_50\.json: cannot be replaced"):
        order.main(["--only", "vgg16", "--shares", "50", "--planners", "vdnn", "--make-plans", str(tmp_path)])
