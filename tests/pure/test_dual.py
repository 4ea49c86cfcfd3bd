from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.bound import lower_bound
from legroom.errors import BudgetError
from legroom.evaluate import floor_bytes
from legroom.hardware import PRESETS, Hardware
from legroom.ir import Trace
from legroom.plan import Keep, Plan, Recompute, Swap, from_json, to_json
from legroom.planners import PLANNERS, Planner
from legroom.planners.auto import Auto
from legroom.planners.dual import RESOLUTION, least_peak
from legroom.planners.none import KeepAll
from legroom.schedule import check_schedule, lower
from legroom.simulate import simulate
from tests.pure.strategies import hardwares, make_plan, make_trace, traces
from tests.pure.test_planners import LIGHT
from tests.pure.test_schedule import LINK, chain

SMALL = chain(8)
QUICK = Auto(evaluations=300, thorough=False)  # what is asked is the same; these tests are about who asks
PLAIN_SECONDS = simulate(SMALL, make_plan(SMALL, (Keep(),) * 7), LINK).seconds
ALL_AWAY_SECONDS = simulate(SMALL, make_plan(SMALL, (Swap(when="sync"),) * 7), LINK).seconds


def seconds_of_keeping(trace: Trace, hardware: Hardware) -> float:
    return simulate(trace, make_plan(trace, (Keep(),) * len(trace.gaps)), hardware).seconds


@dataclasses.dataclass(frozen=True)
class AllOrNothing:
    """Keeps all, or recomputes all alone from `floor` bytes on; counts what it is asked for."""

    floor: int
    asked: list[int] = dataclasses.field(default_factory=list)
    says_floor: bool = True

    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        self.asked.append(budget_bytes)
        if budget_bytes < self.floor:
            raise BudgetError("cannot", floor_bytes=self.floor if self.says_floor else 0)
        decision = Keep() if budget_bytes >= trace.peak_bytes else Recompute()
        plan = make_plan(trace, (decision,) * len(trace.gaps))
        return dataclasses.replace(plan, budget_bytes=budget_bytes)


def assert_least_peak(planner: Planner, trace: Trace, hardware: Hardware, max_slowdown: float, *, most: int) -> None:
    plain = seconds_of_keeping(trace, hardware)
    try:
        plan = least_peak(planner, trace, hardware, max_slowdown, most_budgets=most)
    except BudgetError:
        # Only a planner that acts even with room for everything may have nothing to offer.
        with_room = planner(trace, hardware, trace.peak_bytes)
        assert simulate(trace, with_room, hardware).seconds > plain * (1 + max_slowdown)
        return
    schedule = lower(trace, plan, hardware)
    assert check_schedule(trace, schedule) == plan.predicted_peak_bytes == plan.budget_bytes
    assert simulate(trace, schedule, hardware).seconds == plan.predicted_seconds <= plain * (1 + max_slowdown)
    assert floor_bytes(trace) <= plan.predicted_peak_bytes <= trace.peak_bytes
    assert from_json(to_json(plan)) == plan


@given(traces(most_ops=8), hardwares(), st.sampled_from((0.0, 0.05, 0.5, 10.0)))
@settings(max_examples=8)
def test_the_plan_is_what_it_says_and_within_the_slowdown(
    trace: Trace, hardware: Hardware, max_slowdown: float
) -> None:
    assert_least_peak(QUICK, trace, hardware, max_slowdown, most=10)


@pytest.mark.parametrize("name", sorted(PLANNERS))
def test_every_planner_has_a_dual(name: str) -> None:
    assert_least_peak(LIGHT[name], make_trace(11, forward=6), PRESETS["v100-16g"], 0.3, most=5)


def test_a_generous_slowdown_ends_at_the_floor_at_once() -> None:
    plan = least_peak(QUICK, SMALL, LINK, 10 * ALL_AWAY_SECONDS / PLAIN_SECONDS)
    assert plan.predicted_peak_bytes == floor_bytes(SMALL)
    assert "3 budgets asked for" in plan.notes[-1]


def test_what_is_free_is_done_at_no_slowdown() -> None:
    plan = least_peak(QUICK, SMALL, LINK, 0.0)
    assert plan.predicted_seconds == PLAIN_SECONDS
    assert floor_bytes(SMALL) < plan.predicted_peak_bytes < SMALL.peak_bytes


def test_more_slowdown_never_takes_more_memory() -> None:
    peaks = [least_peak(QUICK, SMALL, LINK, slowdown).predicted_peak_bytes for slowdown in (0.0, 0.1, 0.5, 5.0)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > peaks[-1]


def test_it_is_the_least_budget_to_within_a_thousandth() -> None:
    trace, hardware = make_trace(5, forward=20), PRESETS["rtx2080ti-pcie3"]
    planner = dataclasses.replace(QUICK, bound=False)
    plan = least_peak(planner, trace, hardware, 0.2)
    floor = floor_bytes(trace)
    step = max(1, (trace.peak_bytes - floor) // RESOLUTION)
    assert floor < plan.predicted_peak_bytes < trace.peak_bytes
    limit = 1.2 * seconds_of_keeping(trace, hardware)
    assert planner(trace, hardware, plan.predicted_peak_bytes - 2 * step).predicted_seconds > limit


def test_plain_pytorch_only_has_the_plain_peak() -> None:
    assert least_peak(KeepAll(), SMALL, LINK, 1.0).predicted_peak_bytes == SMALL.peak_bytes


def test_the_bound_is_that_of_the_answer() -> None:
    plan = least_peak(QUICK, SMALL, LINK, 0.1)
    assert plan.lower_bound_seconds is not None
    assert plan.lower_bound_seconds <= plan.predicted_seconds
    assert plan.lower_bound_seconds == pytest.approx(lower_bound(SMALL, LINK, plan.budget_bytes).seconds, rel=1e-3)
    assert least_peak(dataclasses.replace(QUICK, bound=False), SMALL, LINK, 0.1).lower_bound_seconds is None


@pytest.mark.parametrize("says_floor", [True, False])
def test_a_rule_that_ends_above_the_floor_is_followed_to_its_own(says_floor: bool) -> None:
    everything = make_plan(SMALL, (Recompute(),) * 7)
    peak = check_schedule(SMALL, lower(SMALL, everything, LINK))
    rule = AllOrNothing(peak, says_floor=says_floor)
    assert least_peak(rule, SMALL, LINK, 100.0).predicted_peak_bytes == peak
    if says_floor:
        assert rule.asked == [SMALL.peak_bytes, floor_bytes(SMALL), peak]


def test_a_planner_that_breaks_its_budget_or_its_word_is_not_believed() -> None:
    def keeps_all(trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        plan = make_plan(trace, (Keep(),) * len(trace.gaps))
        return dataclasses.replace(plan, budget_bytes=budget_bytes, predicted_peak_bytes=1, predicted_seconds=99.0)

    plan = least_peak(keeps_all, SMALL, LINK, 1.0)
    assert (plan.predicted_peak_bytes, plan.predicted_seconds) == (SMALL.peak_bytes, PLAIN_SECONDS)


def test_a_plan_above_the_budget_asked_for_does_not_replace_a_better_one() -> None:
    frugal = make_plan(SMALL, (Recompute(),) * 7)

    def worse_below(trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        return frugal if budget_bytes == trace.peak_bytes else make_plan(trace, (Keep(),) * 7)

    assert least_peak(worse_below, SMALL, LINK, 9.0).predicted_peak_bytes == check_schedule(
        SMALL, lower(SMALL, frugal, LINK)
    )


def test_a_planner_that_is_too_slow_with_room_for_all_says_by_how_much() -> None:
    def always_waits(trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        return make_plan(trace, (Swap(when="sync"),) * len(trace.gaps))

    slowdown = ALL_AWAY_SECONDS / PLAIN_SECONDS - 1
    with pytest.raises(BudgetError, match=rf"at most 0\.05.*slowdown of {slowdown:.4g}"):
        least_peak(always_waits, SMALL, LINK, 0.05)


def test_the_search_ends_after_so_many_budgets() -> None:
    rule = AllOrNothing(0)
    least_peak(rule, SMALL, LINK, 0.0, most_budgets=5)
    assert len(rule.asked) == 5


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf"), True, "5%", None])
def test_a_slowdown_that_is_none_is_refused(bad: object) -> None:
    with pytest.raises((TypeError, ValueError), match="max_slowdown"):
        least_peak(KeepAll(), SMALL, LINK, bad)  # type: ignore[arg-type]
