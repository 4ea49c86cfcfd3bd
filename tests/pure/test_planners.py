from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.errors import BudgetError
from legroom.evaluate import floor_bytes
from legroom.hardware import PRESETS, Hardware
from legroom.ir import Trace
from legroom.plan import Keep, Plan, Recompute, Swap, from_json, to_json
from legroom.planners import PLANNERS
from legroom.planners.auto import Auto
from legroom.planners.checkmate import Checkmate
from legroom.planners.home import Home
from legroom.planners.optimal import Optimal
from legroom.schedule import check_schedule, lower
from legroom.simulate import simulate
from tests.pure.strategies import hardwares, make_plan, make_trace, traces
from tests.pure.test_schedule import LINK, chain

# At full size these take seconds on a trace that a test draws in milliseconds.
LIGHT = {
    **PLANNERS,
    "auto": Auto(evaluations=500),
    "home": Home(particles=6, iterations=4),
    "optimal": Optimal(time_limit_seconds=0.5, evaluations=300),
    "checkmate": Checkmate(time_limit_seconds=0.5, evaluations=300),
}
REACH_THE_FLOOR = ("auto", "capuchin", "home", "optimal")  # the rules of the others stop earlier
# Their own tests ask for the same and more: that they reach the floor they name.
ELSEWHERE = ("capuchin", "checkmate", "dtr", "mimose", "sublinear", "superneurons", "tensile", "vdnn")


def peak_of(trace: Trace) -> int:
    return max(trace.head_peak_bytes, trace.peak_bytes)


def assert_honest(trace: Trace, hardware: Hardware, budget: int, plan: Plan) -> None:
    """The plan is within its budget, and says about itself what proof and simulator say."""
    schedule = lower(trace, plan, hardware)
    assert check_schedule(trace, schedule) == plan.predicted_peak_bytes <= budget == plan.budget_bytes
    assert simulate(trace, schedule, hardware).seconds == plan.predicted_seconds
    assert plan.lower_bound_seconds is None or plan.lower_bound_seconds <= plan.predicted_seconds
    assert from_json(to_json(plan)) == plan


@pytest.mark.parametrize("name", sorted(set(PLANNERS) - set(ELSEWHERE)))
@given(data=st.data())
@settings(max_examples=12)
def test_every_plan_is_sound_and_within_its_budget(name: str, data: st.DataObject) -> None:
    trace, hardware = data.draw(traces(most_ops=10)), data.draw(hardwares())
    floor, peak = floor_bytes(trace), peak_of(trace)
    budget = data.draw(st.sampled_from((floor, peak, (floor + peak) // 2, (9 * floor + peak) // 10)))
    try:
        plan: Plan | BudgetError = LIGHT[name](trace, hardware, budget)
    except BudgetError as error:
        plan = error
    if isinstance(plan, Plan):
        assert_honest(trace, hardware, budget, plan)
        return
    assert name not in REACH_THE_FLOOR
    assert budget < plan.floor_bytes
    if name == "none":
        assert plan.floor_bytes == peak


@pytest.mark.parametrize("name", sorted(PLANNERS))
def test_a_budget_below_the_floor_is_refused_with_the_numbers(name: str) -> None:
    trace = make_trace(11, forward=12)
    floor = floor_bytes(trace)
    with pytest.raises(BudgetError) as caught:
        LIGHT[name](trace, PRESETS["h200"], floor - 1)
    named = caught.value.floor_bytes
    assert named == floor if name in REACH_THE_FLOOR else named >= floor
    assert caught.value.budget_bytes == floor - 1
    assert f"({named} bytes)" in str(caught.value)


def test_with_room_for_everything_nothing_is_done() -> None:
    trace = make_trace(11, forward=12)
    plan = PLANNERS["auto"](trace, PRESETS["h200"], peak_of(trace))
    assert set(plan.decisions) == {Keep()}


def test_a_free_swap_is_preferred_to_a_replay() -> None:
    plan = PLANNERS["auto"](chain(8), LINK, 7000)
    assert set(plan.decisions) == {Keep(), Swap()}
    assert round(plan.predicted_seconds * 1e6) == 17


def test_a_replay_is_preferred_to_a_slow_link() -> None:
    slow = dataclasses.replace(LINK, out_bytes_per_second=1e6, in_bytes_per_second=1e6)
    plan = PLANNERS["auto"](chain(8), slow, 7000)
    assert {type(decision) for decision in plan.decisions} == {Keep, Recompute}
    assert round(plan.predicted_seconds * 1e6) == 18


@pytest.mark.parametrize("every", [3, 5])
def test_auto_is_as_good_as_checkpoints(every: int) -> None:
    """Keeping every third and recomputing what lies between once is in its reach, and found."""
    trace = chain(16)
    slow = dataclasses.replace(LINK, out_bytes_per_second=1e6, in_bytes_per_second=1e6)
    decisions = tuple(Keep() if i % every == 0 else Recompute(share=True) for i in range(1, 16))
    schedule = lower(trace, make_plan(trace, decisions), slow)
    budget = check_schedule(trace, schedule)
    plan = Auto(evaluations=2000)(trace, slow, budget)
    assert_honest(trace, slow, budget, plan)
    assert plan.predicted_seconds <= simulate(trace, schedule, slow).seconds
    alone = make_plan(trace, tuple(Keep() if d == Keep() else Recompute() for d in decisions))
    assert plan.predicted_seconds < simulate(trace, alone, slow).seconds


def test_more_evaluations_do_not_lose_feasibility() -> None:
    trace = make_trace(5, forward=16)
    floor, peak = floor_bytes(trace), peak_of(trace)
    for evaluations in (0, 10, 500):
        for budget in (floor, (floor + peak) // 2):
            plan = Auto(evaluations=evaluations, bound=False)(trace, PRESETS["cpu"], budget)
            assert_honest(trace, PRESETS["cpu"], budget, plan)
