"""Recomputation alone, and as cheap as it gets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.errors import BudgetError
from legroom.evaluate import KEEP, SHARED, Evaluator, floor_bytes
from legroom.hardware import PRESETS
from legroom.ir import Trace
from legroom.plan import Recompute, Swap
from legroom.planners.checkmate import Checkmate
from legroom.planners.optimal import REPLAYS
from tests.pure.honest import honest_plan
from tests.pure.strategies import hardwares, make_trace, traces
from tests.pure.test_optimal import all_costs, budgets
from tests.pure.test_planners import assert_honest
from tests.pure.test_schedule import LINK, chain

QUICK = Checkmate(time_limit_seconds=5.0, evaluations=2000)


@pytest.mark.parametrize(
    "trace",
    [chain(6), chain(7), *(make_trace(seed, forward=5) for seed in (355, 925))],
    ids=lambda t: len(t.gaps),
)
def test_it_is_the_best_of_all_plans_that_recompute(trace: Trace) -> None:
    costs = all_costs(trace, LINK, (KEEP, *REPLAYS))
    least = min(peak for _, peak in costs)
    assert least < trace.peak_bytes
    for budget in (least, (least + trace.peak_bytes) // 2, trace.peak_bytes - 1):
        best = min(nanoseconds for nanoseconds, peak in costs if peak <= budget)
        plan = QUICK(trace, LINK, budget)
        assert_honest(trace, LINK, budget, plan)
        assert plan.predicted_seconds <= 1.01 * best / 1e9


@given(st.data())
@settings(max_examples=5, deadline=None)
def test_every_plan_is_sound_or_the_floor_is_its_own(data: st.DataObject) -> None:
    trace, hardware = data.draw(traces(most_ops=10)), data.draw(hardwares())
    budget = data.draw(st.sampled_from(budgets(trace)))
    planner = Checkmate(time_limit_seconds=1.0, evaluations=1000)
    own_floor = budget
    try:
        plan = planner(trace, hardware, budget)
    except BudgetError as error:
        own_floor = error.floor_bytes
        plan = planner(trace, hardware, own_floor)
    assert own_floor >= budget
    budget = own_floor
    assert_honest(trace, hardware, budget, plan)
    assert not any(isinstance(decision, Swap) for decision in plan.decisions)


def test_a_free_swap_does_not_tempt_it() -> None:
    plan = QUICK(chain(8), LINK, 7000)
    assert {type(decision) for decision in plan.decisions} >= {Recompute}
    assert not any(isinstance(decision, Swap) for decision in plan.decisions)
    assert round(plan.predicted_seconds * 1e6) == 18


def test_what_cannot_be_recomputed_is_kept_and_the_floor_says_so() -> None:
    trace = chain(6, why_not="random")  # nothing makes x1 again, and all others can be made from it
    with pytest.raises(BudgetError, match="the least peak that checkmate reaches") as caught:
        QUICK(trace, LINK, floor_bytes(trace))
    assert floor_bytes(trace) < caught.value.floor_bytes < trace.peak_bytes
    plan = QUICK(trace, LINK, caught.value.floor_bytes)
    assert plan.predicted_peak_bytes == caught.value.floor_bytes


def test_checkpoints_of_a_chain_are_shared() -> None:
    """At the peak of every fourth kept, each op runs once more at most."""
    trace = chain(16)
    codes = np.array([KEEP if i % 4 == 0 else SHARED for i in range(1, 16)], np.int8)
    nanoseconds, budget = Evaluator(trace, LINK).evaluate(codes)
    assert QUICK(trace, LINK, budget).predicted_seconds <= nanoseconds / 1e9


def test_it_is_deterministic() -> None:
    trace = make_trace(925, forward=5)
    budget = (floor_bytes(trace) + 2 * trace.peak_bytes) // 3
    assert QUICK(trace, PRESETS["cpu"], budget) == QUICK(trace, PRESETS["cpu"], budget)


def test_the_floor_it_names_is_one() -> None:
    """Single changes alone led to 233,984 bytes, and the program below that."""
    honest_plan(Checkmate(), make_trace(815658, forward=15), LINK, 0)
