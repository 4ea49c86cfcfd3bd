"""Finding out how much of a capped allocator a plan may fill, against allocators that lose this or that much."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.brim import Brim

BUDGET = 20_000_000_000


def trained(brim: Brim, lost_bytes: int, *, fills: float = 1.0, steps: int = 60) -> tuple[int, int]:
    """(plans made, steps in which memory was rearranged) with an allocator that loses `lost_bytes` to pieces."""
    plans = rearrangements = 0
    for _ in range(steps):
        peak = int(brim.usable_bytes * fills)
        rearranged = peak + lost_bytes > BUDGET
        rearrangements += rearranged
        plans += brim.after_step(rearranged=rearranged, reserved_bytes=min(BUDGET, peak + lost_bytes), peak_bytes=peak)
    return plans, rearrangements


@given(st.integers(0, BUDGET // 4))
@settings(max_examples=100, deadline=None)
def test_it_ends_below_what_the_allocator_can_give_and_not_far_below(lost_bytes: int) -> None:
    brim = Brim(BUDGET)
    plans, rearrangements = trained(brim, lost_bytes)
    assert brim.settled
    assert brim.usable_bytes + lost_bytes <= BUDGET
    assert BUDGET - lost_bytes - brim.usable_bytes <= 0.045 * BUDGET
    assert plans <= 6
    assert rearrangements <= 3 * plans + 2  # it is noticed at the third step of a plan


def test_an_allocator_that_loses_nothing_is_filled() -> None:
    brim = Brim(BUDGET)
    assert trained(brim, 0) == (2, 0)
    assert brim.usable_bytes == pytest.approx(0.984 * BUDGET, rel=1e-3)


@pytest.mark.parametrize(("mebibytes", "share"), [(100, 0.8), (720, 0.822), (2000, 0.9)])
def test_small_budgets_begin_lower(mebibytes: int, share: float) -> None:
    assert Brim(mebibytes * 2**20).usable_bytes == pytest.approx(share * mebibytes * 2**20, rel=1e-3)


def test_a_plan_that_does_not_fill_its_room_is_left_alone() -> None:
    brim = Brim(BUDGET)
    assert trained(brim, 0, fills=0.5) == (0, 0)
    assert brim.settled


def test_pieces_that_grow_with_the_plan_take_it_back() -> None:
    """What was lost under a small plan says little about a larger one: the larger one is undone."""
    brim = Brim(BUDGET)
    for _ in range(3):
        again = brim.after_step(rearranged=False, reserved_bytes=brim.usable_bytes, peak_bytes=brim.usable_bytes)
    assert again and brim.usable_bytes > 0.94 * BUDGET
    for _ in range(3):
        again = brim.after_step(rearranged=True, reserved_bytes=BUDGET, peak_bytes=brim.usable_bytes)
    assert again and brim.usable_bytes == int(0.9 * BUDGET) and brim.settled


def test_another_plan_is_looked_at_again() -> None:
    brim = Brim(BUDGET)
    trained(brim, 0)
    usable = brim.usable_bytes
    brim.new_plan()
    assert not brim.settled and brim.usable_bytes == usable
    for _ in range(3):
        again = brim.after_step(rearranged=True, reserved_bytes=BUDGET, peak_bytes=usable)
    assert again and brim.usable_bytes < usable


def test_running_out_of_memory_lowers_it_and_keeps_it_low() -> None:
    brim = Brim(BUDGET)
    brim.after_failure()
    assert brim.usable_bytes == pytest.approx(0.86 * BUDGET)
    trained(brim, 0)
    assert brim.usable_bytes < 0.9 * BUDGET
