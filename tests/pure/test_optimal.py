"""The oracle: as good as the best of all plans, where all of them can be looked at."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pytest

from legroom.bound import lower_bound
from legroom.errors import BudgetError
from legroom.evaluate import KEEP, OVERLAP, SHARED, Evaluator, floor_bytes
from legroom.hardware import PRESETS, Hardware
from legroom.ir import Trace
from legroom.plan import Keep, Plan
from legroom.planners.auto import Auto
from legroom.planners.optimal import REPLAYS, SWAPS, Optimal, Search
from legroom.tables import NEVER
from tests.pure.strategies import make_trace
from tests.pure.test_bound import SLOW, WAITING, link
from tests.pure.test_planners import assert_honest
from tests.pure.test_schedule import LINK, chain

QUICK = Optimal(time_limit_seconds=5.0, evaluations=2000)


def all_costs(trace: Trace, hardware: Hardware, actions: tuple[int, ...]) -> list[tuple[int, int]]:
    """(nanoseconds, peak) of every plan with these actions that is possible."""
    evaluator = Evaluator(trace, hardware)
    every = itertools.product(actions, repeat=evaluator.gaps)
    costs = (evaluator.evaluate(np.array(codes, np.int8)) for codes in every)
    return [cost for cost in costs if cost[0] < NEVER]


def proven(plan: Plan) -> float:
    """What the solver of the integer program says that no plan is below; 0 where it says nothing."""
    found = re.search(r"its own bound is ([0-9.]+) s", plan.notes[0])
    return float(found[1]) if found else 0.0


def budgets(trace: Trace) -> list[int]:
    floor, peak = floor_bytes(trace), max(trace.head_peak_bytes, trace.peak_bytes)
    return [floor, (floor + peak) // 2]


SMALL = {
    "chain, waiting": (chain(6), WAITING),
    "chain, slow": (chain(6), SLOW),
    "h200": (make_trace(925, forward=5), PRESETS["h200"]),
    "cpu": (make_trace(240, forward=5), PRESETS["cpu"]),
}


@pytest.mark.parametrize("name", SMALL)
def test_it_is_the_best_of_all_plans(name: str) -> None:
    trace, hardware = SMALL[name]
    assert 4 <= len(trace.gaps) <= 6
    costs = all_costs(trace, hardware, (KEEP, *SWAPS, *REPLAYS))
    for budget in budgets(trace):
        best = min(nanoseconds for nanoseconds, peak in costs if peak <= budget)
        plan = QUICK(trace, hardware, budget)
        assert_honest(trace, hardware, budget, plan)
        assert plan.predicted_seconds <= 1.01 * best / 1e9
        assert lower_bound(trace, hardware, budget).seconds <= best / 1e9
        assert proven(plan) <= best / 1e9 * (1 + 1e-6)


@pytest.mark.parametrize(("rate", "budget"), [(0.25e9, 4500), (0.1e9, 4500), (0.1e9, 5500)])
def test_whole_copies_say_more_than_fluid_ones_and_nothing_false(rate: float, budget: int) -> None:
    """Nothing can be recomputed, and to be half a kilobyte below a level, a whole one must go: 4 or 10 µs each way."""
    trace = dataclasses.replace(chain(6), ops=tuple(dataclasses.replace(o, why_not="random") for o in chain(6).ops))
    best = min(ns for ns, peak in all_costs(trace, link(rate), (KEEP, *SWAPS)) if peak <= budget)
    whole, fluid = (
        proven(dataclasses.replace(QUICK, whole_copies=most)(trace, link(rate), budget)) for most in (5000, 0)
    )
    assert 1.1 * fluid < whole <= best / 1e9 * (1 + 1e-6)


def test_copies_of_many_steps_do_not_lead_the_solver_astray() -> None:
    """It once proved that no plan is below 13.8 s here."""
    trace = make_trace(53, forward=9)
    floor, peak = floor_bytes(trace), max(trace.head_peak_bytes, trace.peak_bytes)
    plan = QUICK(trace, SLOW, floor + int(0.75 * (peak - floor)))
    assert 0.0 < proven(plan) <= plan.predicted_seconds < 1e-3


def test_it_is_the_best_of_all_plans_that_recompute_a_longer_chain() -> None:
    """Copies are out of the question on this link."""
    trace = chain(8)
    costs = all_costs(trace, SLOW, (KEEP, *REPLAYS))
    for budget in (3000, 4000):
        best = min(nanoseconds for nanoseconds, peak in costs if peak <= budget)
        assert QUICK(trace, SLOW, budget).predicted_seconds <= 1.01 * best / 1e9


def test_a_budget_below_the_floor_is_refused_with_the_numbers() -> None:
    trace = make_trace(11, forward=12)
    floor = floor_bytes(trace)
    with pytest.raises(BudgetError, match="optimal") as caught:
        QUICK(trace, PRESETS["h200"], floor - 1)
    assert caught.value.floor_bytes == floor
    assert caught.value.budget_bytes == floor - 1


def test_with_room_for_everything_nothing_is_done() -> None:
    trace = make_trace(11, forward=12)
    plan = QUICK(trace, PRESETS["h200"], max(trace.head_peak_bytes, trace.peak_bytes))
    assert set(plan.decisions) == {Keep()}


def test_the_plan_carries_the_bound_and_the_notes_what_the_solver_says() -> None:
    plan = QUICK(chain(8), SLOW, 5000)
    assert plan.lower_bound_seconds == lower_bound(chain(8), SLOW, 5000).seconds
    assert plan.notes[0].startswith("integer program: solved at 0.0000")


def test_it_is_deterministic() -> None:
    trace = make_trace(5, forward=8)
    budget = budgets(trace)[1]
    assert QUICK(trace, PRESETS["cpu"], budget) == QUICK(trace, PRESETS["cpu"], budget)


def test_without_a_solution_in_time_there_is_a_plan() -> None:
    trace = make_trace(5, forward=12)
    budget = budgets(trace)[1]
    plan = dataclasses.replace(QUICK, time_limit_seconds=0.0)(trace, PRESETS["cpu"], budget)
    assert_honest(trace, PRESETS["cpu"], budget, plan)


@pytest.mark.parametrize("every", [3, 5])
def test_checkpoints_are_in_its_reach(every: int) -> None:
    """Keeping every third and recomputing what lies between once, as chains of replays share."""
    trace = chain(12)
    evaluator = Evaluator(trace, SLOW)
    codes = np.array([KEEP if i % every == 0 else SHARED for i in range(1, 12)], np.int8)
    nanoseconds, budget = evaluator.evaluate(codes)
    plan = Optimal(time_limit_seconds=5.0, evaluations=0)(trace, SLOW, budget)
    assert plan.predicted_seconds <= nanoseconds / 1e9


def test_it_is_no_worse_than_auto_on_a_step_of_some_size() -> None:
    trace = chain(24)
    best = Auto()(trace, LINK, 8000).predicted_seconds
    assert QUICK(trace, LINK, 8000).predicted_seconds <= 1.01 * best


def test_a_search_repairs_what_is_above_the_budget_at_the_least_price() -> None:
    evaluator = Evaluator(chain(8), LINK)
    search = Search(evaluator, 7000, (*SWAPS, *REPLAYS), 1000)
    codes = search.repaired(np.full(7, KEEP, np.int8))
    assert evaluator.judge(codes, 7000)[2] == 0
    assert (codes == OVERLAP).sum() == 1  # free on this link
    assert (codes == KEEP).sum() == 6
