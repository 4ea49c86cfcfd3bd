"""How much of a capped allocator a plan may fill, against allocators that lose this or that much."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.brim import SHARES, UNARRANGED, Brim

BUDGET = 20_000_000_000


def trained(brim: Brim, lost_bytes: int, *, steps: int = 60) -> tuple[int, int]:
    """(plans made, steps in which memory was rearranged) with an allocator that loses `lost_bytes` to pieces."""
    plans = rearrangements = 0
    for _ in range(steps):
        rearranged = brim.usable_bytes + lost_bytes > BUDGET
        rearrangements += rearranged
        plans += brim.after_step(rearranged=rearranged)
    return plans, rearrangements


@given(st.integers(0, int(BUDGET * (1 - SHARES[-1]))))
@settings(max_examples=100, deadline=None)
def test_it_ends_below_what_the_allocator_can_give_and_not_far_below(lost_bytes: int) -> None:
    brim = Brim(BUDGET)
    plans, rearrangements = trained(brim, lost_bytes)
    assert brim.settled
    assert brim.usable_bytes + lost_bytes <= BUDGET
    assert BUDGET - lost_bytes - brim.usable_bytes <= 0.045 * BUDGET
    assert rearrangements <= 3 * (plans + 1)


def test_where_nothing_helps_it_stays_at_the_least() -> None:
    brim = Brim(BUDGET)
    plans, _ = trained(brim, BUDGET)
    assert plans == len(SHARES) - 1
    assert brim.settled and brim.usable_bytes == pytest.approx(SHARES[-1] * BUDGET)
    assert not brim.lower()


def test_the_first_steps_of_a_plan_say_nothing_about_it() -> None:
    brim = Brim(BUDGET)
    assert not brim.after_step(rearranged=True) and not brim.after_step(rearranged=True)
    assert not brim.after_step(rearranged=False)
    assert brim.settled and brim.usable_bytes == int(SHARES[0] * BUDGET)


@pytest.mark.parametrize(("mebibytes", "share"), [(20_000, SHARES[0]), (1480, 0.90), (640, 0.80), (100, 0.80)])
def test_small_budgets_leave_more_free(mebibytes: int, share: float) -> None:
    assert Brim(mebibytes * 2**20).usable_bytes == pytest.approx(share * mebibytes * 2**20, rel=1e-3)


def test_less_is_less_in_small_budgets_too() -> None:
    brim = Brim(100 * 2**20)
    seen = [brim.usable_bytes]
    while brim.lower():
        seen.append(brim.usable_bytes)
    assert seen == sorted(seen, reverse=True) and seen[-1] < seen[0]


def test_without_an_arrangement_less_may_be_filled() -> None:
    brim = Brim(BUDGET)
    assert brim.arranged and brim.unarranged_bytes == int(UNARRANGED * BUDGET) < brim.usable_bytes
    while brim.arranged:
        brim.lower()
    assert brim.unarranged_bytes == brim.usable_bytes == int(UNARRANGED * BUDGET)


def test_another_plan_for_as_much_is_looked_at_anew() -> None:
    brim = Brim(BUDGET)
    trained(brim, 0)
    usable = brim.usable_bytes
    brim.new_plan()
    assert not brim.settled and brim.usable_bytes == usable
    assert trained(brim, BUDGET // 10)[0] > 0 and brim.usable_bytes < usable


@pytest.mark.parametrize("arranged", [True, False])
def test_a_failure_is_followed_by_less(arranged: bool) -> None:
    brim = Brim(BUDGET)
    trained(brim, 0)
    usable, unarranged = brim.usable_bytes, brim.unarranged_bytes
    brim.after_failure(arranged=arranged)
    assert not brim.settled and brim.usable_bytes < usable
    assert (brim.unarranged_bytes < unarranged) is not arranged


def test_a_plan_that_had_settled_makes_way_after_some_steps_without_room() -> None:
    brim = Brim(BUDGET)
    trained(brim, 0)
    before = brim.usable_bytes
    assert [brim.after_relief() for _ in range(4)] == [False, False, False, True]
    assert brim.usable_bytes < before and not brim.settled
    trained(brim, BUDGET)  # down to the least
    assert not any(brim.after_relief() for _ in range(9))
