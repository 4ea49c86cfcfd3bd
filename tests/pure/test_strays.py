"""Which inputs are like those whose steps were other ones."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from legroom.strays import FEWEST_USUAL, MULTIPLES, foretold

USUAL = [(64, length, 7) for length in (33, 36, 50, 75, 76, 81, 90, 99)]


def test_the_same_size_is_foretold_and_others_are_not_from_a_single_one() -> None:
    assert foretold((64, 48, 7), [(64, 48, 7)], USUAL)
    assert not foretold((64, 32, 7), [(64, 48, 7)], USUAL)
    assert not foretold((64, 48, 7), [], USUAL)


def test_two_tell_of_multiples() -> None:
    strayed = [(64, 48, 7), (64, 80, 7)]
    assert foretold((64, 32, 7), strayed, USUAL)
    assert foretold((64, 40, 7), strayed, USUAL)  # they are multiples of eight as well
    assert not foretold((64, 44, 7), strayed, USUAL)
    assert not foretold((64, 33, 7), strayed, USUAL)
    assert not foretold((64, 40, 7), [(64, 48, 7), (64, 35, 7)], USUAL)
    # What all are multiples of says nothing, and where a usual one is a multiple, too, nothing follows.
    assert not foretold((64, 33, 7), [(64, 49, 7), (64, 81, 7)], USUAL)
    assert not foretold((64, 32, 7), strayed, [*USUAL, (64, 96, 7)])
    assert not foretold((64, 32, 7), strayed, USUAL[: FEWEST_USUAL - 1])


@given(st.sampled_from(MULTIPLES), st.integers(0, 2**32))
def test_whatever_the_multiple_all_that_come_later_are_foretold(multiple: int, seed: int) -> None:
    draw = random.Random(seed)
    drawn = [(4, draw.randint(1, 60) * multiple + draw.choice((0, 1))) for _ in range(60)]
    strayed = [size for size in drawn if size[1] % multiple == 0]
    usual = [size for size in drawn if size[1] % multiple]
    assert all(foretold((4, times * multiple), strayed, usual) for times in (61, 64, 77)) or len(strayed) < 2
    assert not any(foretold(size, strayed, usual) for size in usual)
