from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.errors import PlanError
from legroom.plan import Keep, Plan, Recompute, Swap, _signatures, check_fits, from_json, signature, to_json
from tests.pure.strategies import make_plan, make_trace, plans_for, traces


def example() -> Plan:
    decisions = (Keep(), Swap(), Swap(when="sync"), Swap(when="ahead", ahead=3), Recompute(), Recompute(share=True))
    return Plan(decisions, "0123456789abcdef", "auto", 2**33, 2**32, 0.125, ("a note",))


def test_a_plan_survives_json() -> None:
    assert from_json(to_json(example())) == example()


def test_a_bound_survives_json_and_gives_the_gap() -> None:
    bounded = dataclasses.replace(example(), lower_bound_seconds=0.1)
    assert from_json(to_json(bounded)) == bounded
    assert bounded.gap == pytest.approx(0.25)
    assert example().gap is None
    assert "lower_bound_seconds" not in to_json(example())


def test_a_recomputation_is_alone_unless_its_file_says_otherwise() -> None:
    text = to_json(example())
    assert '{"do":"recompute"}' in text
    other = text.replace('{"do":"recompute"}', '{"do":"recompute","share":false}')
    assert from_json(other) == example()


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_random_plans_survive_json(data: st.DataObject) -> None:
    plan = data.draw(plans_for(data.draw(traces())))
    assert from_json(to_json(plan)) == plan


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"surprise": 1}, "surprise"),
        ({"budget_bytes": -1}, "plan.budget_bytes"),
        ({"budget_bytes": True}, "plan.budget_bytes"),
        ({"predicted_seconds": "1"}, "plan.predicted_seconds"),
        ({"predicted_seconds": -1.0}, "plan.predicted_seconds"),
        ({"lower_bound_seconds": -1.0}, "plan.lower_bound_seconds"),
        ({"lower_bound_seconds": None}, "plan.lower_bound_seconds"),
        ({"lower_bound_seconds": 0.126}, "plan.lower_bound_seconds"),  # above what the plan itself predicts
        ({"notes": "text"}, "plan.notes"),
        ({"planner": None}, "plan.planner"),
        ({"version": 2}, "version 2"),
        ({"kind": "trace"}, "kind"),
        ({"decisions": [{"do": "burn"}]}, "plan.decisions[0].do"),
        ({"decisions": [{"do": "swap"}]}, "when"),
        ({"decisions": [{"do": "swap", "when": "later"}]}, "plan.decisions[0].when"),
        ({"decisions": [{"do": "swap", "when": "sync", "ahead": 1}]}, "ahead"),
        ({"decisions": [{"do": "swap", "when": "ahead", "ahead": -1}]}, "plan.decisions[0].ahead"),
        ({"decisions": [{"do": "keep", "when": "sync"}]}, "when"),
        ({"decisions": [{"do": "keep", "share": True}]}, "share"),
        ({"decisions": [{"do": "swap", "when": "sync", "share": True}]}, "share"),
        ({"decisions": [{"do": "recompute", "share": 1}]}, "plan.decisions[0].share"),
    ],
)
def test_a_bad_file_is_refused_with_the_field(change: dict[str, object], field: str) -> None:
    text = json.dumps(json.loads(to_json(example())) | change)
    with pytest.raises(PlanError) as caught:
        from_json(text)
    assert field in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"kind": "plan", "version": NaN}', "null"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        from_json(text)


@pytest.mark.parametrize("arguments", [{"when": "sync", "ahead": 1}, {"when": "ahead", "ahead": -1}])
def test_a_contradictory_swap_is_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(PlanError):
        Swap(**arguments)  # type: ignore[arg-type]


def test_the_signature_ignores_what_a_second_measurement_changes() -> None:
    trace = make_trace(7, forward=8)
    slower = tuple(dataclasses.replace(op, seconds=op.seconds * 2 + 1e-6, line="x.py:1") for op in trace.ops)
    higher = tuple(
        dataclasses.replace(t, level_bytes=t.level_bytes + 1, peak_bytes=t.peak_bytes + 1) for t in trace.ticks
    )
    assert signature(dataclasses.replace(trace, ops=slower, ticks=higher)) == signature(trace)


@pytest.mark.parametrize("field", ["device", "storages", "ops", "ticks"])
def test_the_signature_covers_what_a_plan_depends_on(field: str) -> None:
    trace = make_trace(7, forward=8)
    changed = {
        "device": "cpu",
        "storages": (dataclasses.replace(trace.storages[0], nbytes=trace.storages[0].nbytes + 1), *trace.storages[1:]),
        "ops": (*trace.ops[:-1], dataclasses.replace(trace.ops[-1], name="another")),
        "ticks": (*trace.ticks[:-1], dataclasses.replace(trace.ticks[-1], storage=trace.ticks[-1].storage + 1)),
    }[field]
    assert signature(dataclasses.replace(trace, **{field: changed})) != signature(trace)  # type: ignore[arg-type]


def test_a_plan_for_another_trace_is_refused() -> None:
    trace, other = make_trace(7, forward=8), make_trace(8, forward=8)
    plan = make_plan(trace, (Keep(),) * len(trace.gaps))
    check_fits(trace, plan)
    with pytest.raises(PlanError, match="is for trace"):
        check_fits(other, plan)
    with pytest.raises(PlanError, match="decisions"):
        check_fits(trace, dataclasses.replace(plan, decisions=(*plan.decisions, Keep())))


def test_what_a_trace_is_known_by_is_worked_out_once_and_goes_with_it() -> None:
    trace = make_trace(0, forward=6)
    other = dataclasses.replace(trace, storages=(*trace.storages, trace.storages[-1]))
    known = signature(trace)
    assert signature(other) != known
    assert signature(dataclasses.replace(trace)) == known == signature(trace)
    key = id(other)
    assert signature(other) is signature(other)
    assert key in _signatures
    del other
    assert key not in _signatures
