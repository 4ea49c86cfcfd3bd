from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.errors import BudgetError
from legroom.evaluate import Evaluator
from legroom.hardware import Hardware
from legroom.ir import Op, Trace, Value
from legroom.plan import Keep, Recompute
from legroom.planners.dtr import Dtr
from legroom.planners.recipes import recipe
from tests.pure.honest import honest_plan
from tests.pure.strategies import hardwares, traces
from tests.pure.test_schedule import KB, LINK, chain, op, storage, trace_of


@given(trace=traces(), hardware=hardwares(), part=st.sampled_from((0, 10, 30, 60, 90, 100)))
@settings(max_examples=30)
def test_a_plan_within_its_budget_or_a_floor_that_is_reached(trace: Trace, hardware: Hardware, part: int) -> None:
    plan = honest_plan(Dtr(), trace, hardware, part)
    assert {type(decision) for decision in plan.decisions} <= {Keep, Recompute}


def pressed(made: list[tuple[int, float, Value]], *, read_again: tuple[int, ...] = (1, 2, 3)) -> Trace:
    """Three storages of (bytes, seconds, what it is made from), 10 µs apart from their use; the first tick is too high.

    They are read once more after they were made, unless left out of `read_again`.
    """
    ops: list[Op] = []
    for index, (_, seconds, source) in enumerate(made):
        ops.append(dataclasses.replace(op(index, (source,), ((index + 1, 0),)), seconds=seconds))
    ops.append(dataclasses.replace(op(3, tuple((s, 0) for s in read_again), ()), seconds=10e-6))
    ops.append(dataclasses.replace(op(4, (), ()), seconds=10e-6))
    storages = [storage(0, persistent=True)]
    storages += [storage(i, made[i - 1][0], gaps=((0, 4 - i),)) for i in (1, 2, 3)]
    trace = trace_of(storages, ops, [5, 5, 5, 5])
    first = trace.ticks[0]
    high = dataclasses.replace(first, peak_bytes=first.level_bytes + 5 * KB)
    return dataclasses.replace(trace, ticks=(high, *trace.ticks[1:]))


def evicted(trace: Trace, *, by: int) -> list[int]:
    plan = Dtr()(trace, LINK, trace.peak_bytes - by)
    assert set(plan.decisions) <= {Keep(), Recompute(share=True)}
    return [index for index, decision in enumerate(plan.decisions) if decision != Keep()]


@pytest.mark.parametrize("best", [0, 1, 2])
def test_the_cheapest_goes_first(best: int) -> None:
    made = [(KB, 1e-6 if i == best else 2e-6, (0, 0)) for i in range(3)]
    assert evicted(pressed(made), by=KB) == [best]


@pytest.mark.parametrize("best", [0, 1, 2])
def test_the_largest_goes_first(best: int) -> None:
    made = [(2 * KB if i == best else KB, 1e-6, (0, 0)) for i in range(3)]
    assert evicted(pressed(made), by=KB) == [best]


@pytest.mark.parametrize("best", [0, 1, 2])
def test_the_one_longest_unused_goes_first(best: int) -> None:
    made = [(KB, 1e-6, (0, 0))] * 3
    others = tuple(i + 1 for i in range(3) if i != best)
    assert evicted(pressed(made, read_again=others), by=KB) == [best]


def test_evicted_neighbours_count() -> None:
    """Of a chain the first goes first. The second then costs two ops, so the third, which costs one, is next."""
    linked = [(KB, 1e-6, (i, 0)) for i in range(3)]
    assert evicted(pressed(linked), by=2 * KB) == [0, 2]
    apart = [(KB, 1e-6, (0, 0))] * 3
    assert evicted(pressed(apart), by=2 * KB) == [0, 1]


def test_evicted_descendants_count_too() -> None:
    """The last is cheapest. What it is made from would then take two ops, and the one apart from both takes less."""
    made = [(KB, 1.5e-6, (0, 0)), (KB, 1.9e-6, (0, 0)), (KB, 1e-6, (1, 0))]
    assert evicted(pressed(made), by=2 * KB) == [1, 2]


def test_what_cannot_be_replayed_stays() -> None:
    trace = pressed([(KB, 1e-6, (0, 0))] * 3)
    first = dataclasses.replace(trace.ops[0], why_not="draws numbers of its own")
    trace = dataclasses.replace(trace, ops=(first, *trace.ops[1:]))
    assert evicted(trace, by=2 * KB) == [1, 2]
    with pytest.raises(BudgetError, match="dtr's rule stops at") as caught:
        Dtr()(trace, LINK, trace.peak_bytes - 3 * KB)
    assert caught.value.floor_bytes == trace.peak_bytes - 2 * KB


def test_what_comes_back_stays_until_it_is_evicted_again() -> None:
    """With room, a segment comes back as a whole; without, its links are thrown away and made again."""
    trace = chain(8)
    roomy = Dtr()(trace, LINK, 4 * KB)
    assert set(roomy.decisions) == {Keep(), Recompute(share=True)}
    assert round(roomy.predicted_seconds * 1e6) == 17 + 4  # an op for each of the four that were evicted
    tight = Dtr()(trace, LINK, 3 * KB)
    assert Recompute(share=False) in tight.decisions
    assert tight.predicted_peak_bytes == 3 * KB
    assert round(tight.predicted_seconds * 1e6) == 17 + 11


def test_nothing_is_evicted_that_makes_a_replay_impossible() -> None:
    """3 is made from 2, and 2 from 1, which is sure to be in memory from tick 2 on and cannot be replayed.

    So either of 2 and 3 can be recomputed, but not both: at tick 1, 3 would need 2 and that would need 1.
    """
    ops = [op(0, ((0, 0),), ((1, 0),), why_not="two runs differ"), op(1, ((1, 0),), ((2, 0),))]
    ops += [op(2, ((2, 0),), ((3, 0),)), dataclasses.replace(op(3, ((0, 0),), ((4, 0),)), seconds=1e-3), op(4, (), ())]
    storages = [storage(0, persistent=True), storage(1, gaps=((2, 4),)), storage(2, gaps=((0, 3),))]
    storages += [storage(3, gaps=((0, 1),)), storage(4, gaps=((0, 1),))]
    trace = trace_of(storages, ops, [5] * 5)
    high = dataclasses.replace(trace.ticks[0], peak_bytes=trace.ticks[0].level_bytes + 5 * KB)
    trace = dataclasses.replace(trace, ticks=(high, *trace.ticks[1:]))
    gone = evicted(trace, by=2 * KB)
    assert len(gone) == 2
    assert 3 in gone  # dear as it is


def test_a_recipe_goes_back_to_what_is_in_memory() -> None:
    """x1 is saved, the temporary x2 is not, x3 is: so x3 takes the ops of both."""
    ops = [op(0, ((0, 0),), ((1, 0),)), op(1, ((1, 0),), ((2, 0),), workspace=64), op(2, ((2, 0),), ((3, 0), (4, 0)))]
    storages = [storage(0, persistent=True), storage(1, gaps=((0, 2),)), storage(2)]
    storages += [storage(3, gaps=((0, 1),)), storage(4, gaps=((0, 2),))]
    tables = Evaluator(trace_of(storages, ops, [3, 3, 3]), LINK).tables
    found = recipe(tables, 1)
    assert found is not None
    assert (found.ops, found.reads, found.makes) == ((1, 2), frozenset({0}), frozenset({1, 2}))
    assert (found.nanoseconds, found.workspace_bytes) == (2000, 64)
    ops[1] = dataclasses.replace(ops[1], why_not="two runs differ")
    assert recipe(Evaluator(trace_of(storages, ops, [3, 3, 3]), LINK).tables, 1) is None
