from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.errors import BudgetError
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.plan import Keep, Plan, Recompute, Swap, signature
from legroom.planners.tensile import Tensile, _Lane
from legroom.schedule import Schedule
from legroom.simulate import simulate
from tests.pure.honest import honest_plan
from tests.pure.strategies import hardwares, traces
from tests.pure.test_schedule import KB, LINK, chain, op, storage, trace_of

NO_SWAPS = Tensile(max_swapping_ratio=0.0)


@given(trace=traces(), hardware=hardwares(), part=st.sampled_from((0, 10, 30, 60, 90, 100)))
@settings(max_examples=30)
def test_a_plan_within_its_budget_or_a_floor_that_is_reached(trace: Trace, hardware: Hardware, part: int) -> None:
    plan = honest_plan(Tensile(), trace, hardware, part)
    assert set(plan.decisions) <= {Keep(), Swap(), Recompute(share=True)}
    if Recompute(share=True) not in plan.decisions and hardware.copy_compute_share == 0.0:
        assert plan.predicted_seconds == plain_seconds(trace, hardware)  # nothing waits


def plain_seconds(trace: Trace, hardware: Hardware) -> float:
    return simulate(trace, Schedule((), signature(trace)), hardware).seconds


def test_a_copy_out_takes_the_earliest_place_and_a_copy_in_the_latest() -> None:
    lane = _Lane().reserved(10, 5).reserved(20, 5)
    assert lane.busy == ((10, 15), (20, 25))
    assert lane.earliest(5, 0, 100) == 0
    assert lane.earliest(5, 6, 100) == 15
    assert lane.earliest(6, 6, 100) == 25
    assert lane.earliest(6, 6, 30) is None
    assert lane.latest(5, 0, 100) == 95
    assert lane.latest(5, 0, 24) == 15
    assert lane.latest(6, 0, 24) == 4
    assert lane.latest(6, 5, 24) is None


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 60), st.integers(0, 60), st.booleans()), max_size=12))
def test_the_lane_carries_one_copy_at_a_time(copies: list[tuple[int, int, int, bool]]) -> None:
    lane = _Lane()
    for length, after, before, is_out in copies:
        start = (lane.earliest if is_out else lane.latest)(length, after, before)
        free = [s for s in range(after, before - length + 1) if all(b >= s + length or e <= s for b, e in lane.busy)]
        assert start == ((free[0] if is_out else free[-1]) if free else None)
        if start is not None:
            lane = lane.reserved(start, length)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(lane.busy))


def raised(trace: Trace, tick: int) -> Trace:
    """With a peak at this tick that is above all others."""
    high = dataclasses.replace(trace.ticks[tick], peak_bytes=trace.ticks[tick].level_bytes + 9 * KB)
    return dataclasses.replace(trace, ticks=(*trace.ticks[:tick], high, *trace.ticks[tick + 1 :]))


def test_what_stands_at_the_peak_is_swapped_as_long_as_nothing_waits() -> None:
    """Also below the budget. The last two of the chain are back before a copy out and one in could be over."""
    trace = chain(8)
    plan = Tensile()(trace, LINK, trace.peak_bytes)
    assert plan.decisions == (*[Swap()] * 5, Keep(), Keep())
    assert plan.predicted_peak_bytes == 4 * KB
    assert plan.predicted_seconds == plain_seconds(trace, LINK)


def test_the_largest_at_the_peak_goes_first() -> None:
    """Room on the lane for one: a copy takes as long as all ops before the peak."""
    storages = [storage(0, persistent=True)]
    storages += [storage(i, (2 * KB if i == 2 else KB), gaps=((3, 9),)) for i in (1, 2, 3)]
    ops = [op(i, ((0, 0),), ((i + 1, 0),)) for i in range(3)] + [op(i, (), ()) for i in range(3, 10)]
    trace = raised(trace_of(storages, ops, list(range(10))), 5)
    plan = Tensile()(trace, LINK, trace.peak_bytes)
    assert plan.decisions == (Keep(), Swap(), Keep())


def swapped(plan: Plan) -> int:
    return sum(isinstance(decision, Swap) for decision in plan.decisions)


@pytest.mark.parametrize(("ratio", "most"), [(0.0, 0), (0.3, 2), (0.5, 3), (1.0, 5)])
def test_the_ratio_caps_the_swaps(ratio: float, most: int) -> None:
    trace = chain(8)
    assert swapped(Tensile(max_swapping_ratio=ratio)(trace, LINK, trace.peak_bytes)) == most


def test_a_ratio_must_be_a_share() -> None:
    with pytest.raises(ValueError, match="max_swapping_ratio: expected 0 to 1, got 2"):
        Tensile(max_swapping_ratio=2)


def one_tensor(*gaps: tuple[int, int]) -> Trace:
    """Copied in 2 µs; a tick each µs, the peak at the fifth."""
    storages = [storage(0, persistent=True), storage(1, 2 * KB, gaps=gaps)]
    ops = [op(0, ((0, 0),), ((1, 0),))] + [op(i, (), ()) for i in range(1, 16)]
    return raised(trace_of(storages, ops, list(range(1, 16))), 4)


def test_a_second_gap_needs_a_copy_back_only() -> None:
    trace = one_tensor((1, 9), (10, 14))
    plan = Tensile()(trace, LINK, trace.peak_bytes)
    assert plan.decisions == (Swap(), Swap())
    assert plan.predicted_seconds == plain_seconds(trace, LINK)


def test_a_swap_that_does_not_lower_the_peak_is_left_out() -> None:
    """The lane has room for both copies, but the fetch starts an eighth of its time early: at the peak."""
    trace = one_tensor((1, 7))
    assert Tensile()(trace, LINK, trace.peak_bytes).decisions == (Keep(),)


def test_recomputation_comes_by_bytes_saved_per_second_and_only_where_needed() -> None:
    storages = [storage(0, persistent=True)]
    storages += [storage(i, nbytes, gaps=((3, 4),)) for i, nbytes in ((1, KB), (2, 3 * KB), (3, 2 * KB))]
    ops = [op(i, ((0, 0),), ((i + 1, 0),)) for i in range(3)]
    ops = [dataclasses.replace(op, seconds=1e-6 if op.id != 1 else 4e-6) for op in ops]  # 1, 0.75 and 2 bytes a ns
    trace = raised(trace_of(storages, [*ops, op(3, (), ())], [0, 1, 2, 3, 4]), 3)
    keep, again = Keep(), Recompute(share=True)
    assert NO_SWAPS(trace, LINK, trace.peak_bytes).decisions == (keep, keep, keep)
    assert NO_SWAPS(trace, LINK, trace.peak_bytes - 1).decisions == (keep, keep, again)
    assert NO_SWAPS(trace, LINK, trace.peak_bytes - 3 * KB).decisions == (again, keep, again)


@pytest.mark.parametrize("dearest", ["first", "last"])
def test_a_replay_reads_nothing_that_was_released(dearest: str) -> None:
    """Nor is anything released that a replay reads. So of a chain every other one can be recomputed."""
    trace = chain(9)
    costs = range(1, 10) if dearest == "last" else range(9, 0, -1)
    forward = [dataclasses.replace(op, seconds=cost * 1e-6) for op, cost in zip(trace.ops, costs, strict=False)]
    trace = dataclasses.replace(trace, ops=(*forward, *trace.ops[9:]))
    with pytest.raises(BudgetError) as caught:
        NO_SWAPS(trace, LINK, 1)
    plan = NO_SWAPS(trace, LINK, caught.value.floor_bytes)
    away = [i for i, decision in enumerate(plan.decisions) if decision != Keep()]
    assert away == ([0, 2, 4, 6] if dearest == "last" else [1, 3, 5, 7])
    again = sum(forward[i].seconds for i in away)
    assert plan.predicted_seconds == pytest.approx(plain_seconds(trace, LINK) + again)


def test_where_copies_cost_computation_swapping_stops_at_the_budget() -> None:
    trace = chain(8)
    shared = dataclasses.replace(LINK, copy_compute_share=0.1)
    assert swapped(Tensile()(trace, shared, trace.peak_bytes)) == 0
    assert swapped(Tensile()(trace, shared, trace.peak_bytes - 2 * KB)) == 2
