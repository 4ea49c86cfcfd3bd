from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.errors import BudgetError
from legroom.evaluate import KEEP, SHARED, Evaluator, floor_bytes
from legroom.plan import Keep, Recompute
from legroom.planners.sublinear import Sublinear, recompute_all
from legroom.simulate import simulate
from legroom.tables import NEVER
from tests.pure.strategies import hardwares, traces
from tests.pure.test_planners import assert_honest, peak_of
from tests.pure.test_schedule import KB, LINK
from tests.pure.test_vdnn import CONV, RELU, actions, assert_rule_holds, budgets_of, net

SHARE = Recompute(share=True)


def test_borders_are_kept_and_segments_run_once() -> None:
    trace = net([CONV, RELU] * 8 + [RELU])
    plan = Sublinear(segments=4)(trace, LINK, peak_of(trace))
    kept = [gap.storage for gap, decision in zip(trace.gaps, plan.decisions, strict=True) if decision == Keep()]
    assert kept == [4, 8, 12]
    assert set(actions(trace, plan.decisions).values()) == {SHARE}
    # Ops 0 to 14 make what is saved; three of them make borders.
    assert simulate(trace, plan, LINK).breakdown.recomputation_seconds == pytest.approx(12e-6)


def test_memory_is_sublinear() -> None:
    """Twice the square root of n tensors, and the few that no plan can do without."""
    for root in (4, 6, 9):
        trace = net([RELU] * (root * root + 1))
        with pytest.raises(BudgetError) as caught:
            Sublinear()(trace, LINK, KB)
        assert caught.value.floor_bytes <= (2 * root + 2) * KB
        assert_rule_holds(Sublinear(), trace, LINK, KB)


def test_the_fastest_number_of_segments_that_fits_is_taken() -> None:
    trace = net([RELU] * 26, microseconds=[1 + i % 5 for i in range(26)])
    floor, peak = floor_bytes(trace), peak_of(trace)
    divided = [Sublinear(segments=count)(trace, LINK, peak) for count in range(1, 27)]
    for budget in range(floor, peak, KB):
        fitting = [plan.predicted_seconds for plan in divided if plan.predicted_peak_bytes <= budget]
        if fitting:
            assert Sublinear()(trace, LINK, budget).predicted_seconds == min(fitting)
        else:
            with pytest.raises(BudgetError, match="sublinear's rule stops at"):
                Sublinear()(trace, LINK, budget)


def test_with_room_for_everything_nothing_is_recomputed() -> None:
    trace = net([RELU] * 10)
    assert set(Sublinear()(trace, LINK, peak_of(trace)).decisions) == {Keep()}


def test_a_border_lies_where_one_value_crosses() -> None:
    """Residual blocks of two ops: inside a block two values cross, so no border is there."""
    trace = net([RELU] * 13)
    ops = [
        dataclasses.replace(op, reads=(*op.reads, (op.id - 1, 0))) if op.id < 13 and op.id % 2 and op.id > 1 else op
        for op in trace.ops
    ]
    trace = dataclasses.replace(trace, ops=tuple(ops))
    plan = Sublinear(segments=99)(trace, LINK, peak_of(trace))
    assert sorted(actions(trace, plan.decisions)) == [3, 5, 7, 9, 11]
    assert_honest(trace, LINK, peak_of(trace), plan)


def test_what_cannot_be_recomputed_is_kept() -> None:
    trace = net([RELU] * 10, why_not=frozenset({2}))
    plan = Sublinear(segments=2)(trace, LINK, peak_of(trace))
    assert sorted(actions(trace, plan.decisions)) == [1, 2, 5, 6, 7, 8]  # 4 is the border


def test_what_makes_a_recomputation_impossible_is_left_out_and_nothing_else() -> None:
    trace = net([RELU] * 10, why_not=frozenset({3, 6}))
    evaluator = Evaluator(trace, LINK)
    codes = recompute_all(evaluator, np.zeros(8, np.int8), list(range(8)), SHARED)
    assert [trace.gaps[gap].storage for gap in np.flatnonzero(codes == KEEP)] == [4, 7]
    assert evaluator.evaluate(codes)[0] != NEVER


def test_a_negative_number_of_segments_is_refused() -> None:
    with pytest.raises(ValueError, match="got -1"):
        Sublinear(segments=-1)


@given(data=st.data())
@settings(max_examples=30)
def test_every_plan_is_honest_or_names_its_floor(data: st.DataObject) -> None:
    trace, hardware = data.draw(traces()), data.draw(hardwares())
    assert_rule_holds(Sublinear(), trace, hardware, data.draw(budgets_of(trace)))
