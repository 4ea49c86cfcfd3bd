"""Recording, planning and evaluating: the three benches, from a step on the CPU to their pages."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bench import evaluator, planners, record, rows
from bench.planners import Line, Results, from_json, machine, slower, to_json, verdicts
from bench.rows import Row
from bench.workloads import RECORDED, TINY, WORKLOADS
from legroom import traceio
from legroom.planners import PLANNERS
from legroom.planners.optimal import Optimal

GIB = 2**30
RUN = {"command": "python bench/planners.py", "torch": "2.13.0"}


def line(planner: str, seconds: float, **fields: Any) -> Line:
    known = Line(
        "vgg16", "rtx2080ti-pcie3", 0.5, planner, 4 * GIB, "plan", 1.0, seconds, 4 * GIB, 0.1, 0.0, 0, "", 0
    )  # fmt: skip
    return replace(known, **fields)


ORDERED = (line("home", 1.1), line("capuchin", 1.2), line("superneurons", 1.3), line("vdnn", 1.4))


def words(lines: tuple[Line, ...]) -> dict[str, str]:
    return {verdict.claim: verdict.word for verdict in verdicts(lines)}


def test_the_papers_order_is_met_missed_or_not_measured() -> None:
    claims = ("home ≥ capuchin", "capuchin ≥ superneurons", "superneurons ≥ vdnn")
    assert words(ORDERED) == dict.fromkeys(claims, "met")
    equal = (line("home", 1.2), *ORDERED[1:])
    assert words(equal)[claims[0]] == "met"
    slower_by_a_hair = (line("home", 1.2000001), *ORDERED[1:])
    assert words(slower_by_a_hair)[claims[0]] == "missed"
    assert words(ORDERED[1:])[claims[0]] == "not measured"
    late = (replace(ORDERED[0], outcome="late", seconds=0.0), *ORDERED[1:])
    assert words(late)[claims[0]] == "not measured"


def test_a_rule_that_stops_earlier_is_slower_than_any_plan() -> None:
    stopped: dict[str, Any] = {"outcome": "infeasible", "seconds": 0.0, "floor_bytes": 5 * GIB}
    found = words((*ORDERED[:3], replace(ORDERED[3], **stopped)))
    assert found["superneurons ≥ vdnn"] == "met"
    found = words((replace(ORDERED[0], **stopped), *ORDERED[1:]))
    assert found["home ≥ capuchin"] == "missed"
    found = words((replace(ORDERED[0], **stopped), replace(ORDERED[1], **stopped), *ORDERED[2:]))
    assert found["home ≥ capuchin"] == "not measured"


def test_nothing_may_be_faster_than_auto() -> None:
    claim = "auto ≥ every other"
    assert words((*ORDERED, line("auto", 1.1)))[claim] == "met"
    assert words((*ORDERED, line("auto", 1.1000001)))[claim] == "missed"
    assert words((*ORDERED, line("auto", 1.1), line("optimal", 1.0)))[claim] == "met"
    assert words((*ORDERED, line("auto", 0.0, outcome="infeasible")))[claim] == "missed"


def test_the_order_is_asked_on_the_papers_models_and_link_alone() -> None:
    assert words(tuple(replace(x, trace="gpt") for x in ORDERED)) == {}
    assert words(tuple(replace(x, machine="h200") for x in ORDERED)) == {}
    assert len(words(tuple(replace(x, machine="rtx2080ti-pcie3*7.8", trace="resnet152") for x in ORDERED))) == 3


def test_planner_results_come_back_from_their_text() -> None:
    results = Results((RUN,), ORDERED)
    assert from_json(to_json(results)) == results


@pytest.mark.parametrize(
    ("change", "message"),
    [({"seconds": -1}, "seconds"), ({"trace": 3}, "trace"), ({"run": 1}, "run 1"), ({"more": 1}, "more")],
)
def test_damaged_planner_results_are_refused(change: dict[str, Any], message: str) -> None:
    document = json.loads(to_json(Results((RUN,), ORDERED)))
    document["lines"][0] |= change
    with pytest.raises(planners.PlannersError, match=message):
        from_json(json.dumps(document))


@pytest.mark.parametrize("wrong", ["nothing", "h200*", "h200*x", "h200*0", "h200*nan", "*2"])
def test_unknown_machines_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    if wrong == "h200*":
        assert machine(wrong).factor == 1.0
        return
    with pytest.raises(SystemExit):
        planners.main(["--machines", wrong])
    assert "preset" in capsys.readouterr().err.lower()


def test_solvers_get_half_of_the_time_and_the_others_stay_as_they_are() -> None:
    found = planners.limited(list(PLANNERS), 10.0)
    assert list(found) == list(PLANNERS)
    for name, planner in found.items():
        if hasattr(PLANNERS[name], "time_limit_seconds"):
            assert planner.time_limit_seconds == 5.0  # type: ignore[attr-defined]
        else:
            assert planner == PLANNERS[name]
    assert replace(Optimal(), time_limit_seconds=5.0) != Optimal()


def ran(share: str, *, median_ms: float, predicted_ms: float, predicted_bytes: int = 4 * GIB) -> Row:
    report = {
        "planned_steps": 9,
        "predicted_step_seconds": predicted_ms / 1e3,
        "predicted_peak_bytes": predicted_bytes,
        "baseline_seconds": 0.09,
    }
    return Row("gpt", f"legroom@{share}", "ok", median_ms=median_ms, allocated_bytes=4 * GIB, report=report)


def test_errors_are_shares_of_what_was_measured() -> None:
    found = rows.Results(
        (RUN,),
        (
            Row("gpt", "plain", "ok", median_ms=50.0, allocated_bytes=8 * GIB),
            ran("75%", median_ms=100.0, predicted_ms=101.0),
            ran("50%", median_ms=100.0, predicted_ms=99.5),
        ),
    )
    assert [round(e.time, 6) for e in evaluator.errors(found).values()] == [0.01, -0.005]
    assert [v.met for v in evaluator.verdicts(found)] == [True, True, True]
    assert "0.75%" in evaluator.verdicts(found)[0].figures
    assert "+80.00%" in evaluator.page(found)  # the plain step against what was modelled of it


@pytest.mark.parametrize(
    ("row", "met"),
    [
        (ran("25%", median_ms=100.0, predicted_ms=102.9), [False, True, True]),
        (ran("25%", median_ms=100.0, predicted_ms=96.0), [False, False, True]),
        (ran("25%", median_ms=100.0, predicted_ms=100.0, predicted_bytes=int(4.05 * GIB)), [True, True, False]),
        (Row("gpt", "legroom@25%", "oom", "no memory"), [False, False, False]),
    ],
)
def test_each_claim_of_the_evaluator_can_be_missed(row: Row, met: list[bool]) -> None:
    found = rows.Results((RUN,), (ran("50%", median_ms=100.0, predicted_ms=100.0), row))
    assert [v.met for v in evaluator.verdicts(found)] == met


def test_every_recorded_model_can_be_built_by_name() -> None:
    assert set(RECORDED) | set(TINY) <= set(WORKLOADS)
    assert len(RECORDED) == 10


def test_from_a_step_to_the_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    # A model that cannot be built ends its process and not the next one's.
    made = record.run(["no such model", "tiny_lstm"], "cpu", folder, timeout_seconds=120, until=time.monotonic() + 300)
    assert [(row.workload, row.status) for row in made] == [("no such model", "error"), ("tiny_lstm", "ok")]
    assert "KeyError" in record.table(made)
    trace = traceio.load(folder / "tiny_lstm.json.gz")
    assert made[1].report["gaps"] == len(trace.gaps) > 0
    assert [op.seconds for op in slower(trace, 2.0).ops] == [2 * op.seconds for op in trace.ops]

    common = ["--traces", str(folder), "--commit", "abc"]
    target = tmp_path / "out" / "planners.json"
    target.parent.mkdir()
    target.write_text(to_json(Results((RUN,), ORDERED)))
    options = ["--planners", "none,capuchin", "--machines", "h200*2", "--json", str(target)]
    assert planners.main([*common, *options]) == 0
    results = planners.read(target)
    assert results.lines[:4] == ORDERED  # what an earlier run measured stays
    new = results.lines[4:]
    assert {(x.planner, x.share, x.run) for x in new} == {
        (name, share, 1) for name in ("none", "capuchin") for share in planners.SHARES
    }
    assert all(x.outcome in ("plan", "infeasible") for x in new)
    assert all(x.peak_bytes <= x.budget_bytes for x in new if x.planned)
    assert "Run 1" in target.with_suffix(".md").read_text()

    target = tmp_path / "out" / "evaluator.json"
    options = ["--tiny", "--only", "tiny_lstm", "--shares", "75", "--steps", "3", "--json", str(target)]
    assert evaluator.main([*common, *options]) == 0
    measured = rows.read(target).of("tiny_lstm")
    assert {name: row.status for name, row in measured.items()} == {"plain": "ok", "legroom@75%": "ok"}
    assert evaluator.error_of(measured["legroom@75%"]) is not None
    assert "predicted_curve" not in asdict(measured["legroom@75%"])["report"]
    assert "tiny_lstm" in target.with_suffix(".md").read_text()
    assert "predicted step time" in capsys.readouterr().out
