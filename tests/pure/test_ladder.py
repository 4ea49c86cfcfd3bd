"""Plans by size, and what was learned of op sequences: what is found, and what goes when there is too much."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from legroom.ladder import Ladder, Shelf, covers, rounded_up

SIZES = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=12, unique=True)


@given(SIZES, st.tuples(st.integers(1, 50), st.integers(1, 50)))
def test_the_smallest_that_is_large_enough_is_found(edges: list[tuple[int, int]], features: tuple[int, int]) -> None:
    ladder = Ladder[int](most=20)
    for number, edge in enumerate(edges):
        assert ladder.add(edge, number) == []
    found = ladder.find(features)
    enough = [edge for edge in edges if edge[0] >= features[0] and edge[1] >= features[1]]
    assert (found is None) == (not enough)
    assert (ladder.hits, ladder.misses) == ((1, 0) if enough else (0, 1))
    if found is not None:
        assert found[0] in enough and math.prod(found[0]) == min(map(math.prod, enough))
        assert edges[found[1]] == found[0]


def test_a_plan_that_is_loose_in_one_dimension_is_not_taken_for_a_small_one() -> None:
    ladder = Ladder[str](most=2)
    ladder.add((320, 128), "eight times in the second")
    ladder.add((448, 16), "half as much more in the first")
    assert ladder.find((300, 16)) == ((448, 16), "half as much more in the first")
    assert ladder.find((0, 16)) == ((448, 16), "half as much more in the first")


def test_of_sizes_without_volume_the_one_that_is_covered_comes_first() -> None:
    ladder = Ladder[str](most=2)
    ladder.add((1, 5), "one row")
    ladder.add((0, 5), "no row")
    assert ladder.find((0, 5)) == ((0, 5), "no row")
    ladder.add((0, 4), "fewer")
    assert ladder.find((1, 5)) == ((1, 5), "one row")


def test_what_was_used_least_recently_goes_first_and_the_largest_never() -> None:
    ladder = Ladder[str](most=3)
    for edge, what in (((9,), "largest"), ((1,), "a"), ((3,), "b")):
        ladder.add(edge, what)
    assert ladder.find((1,)) == ((1,), "a")
    assert ladder.add((5,), "c") == [(3,)]
    assert ladder.add((7,), "d") == [(1,)]
    assert ladder.evicted == 2 and len(ladder) == 3
    assert ladder.find((8,)) == ((9,), "largest")


def test_the_same_size_again_takes_the_place_of_the_old_one() -> None:
    ladder = Ladder[str](most=2)
    ladder.add((4,), "old")
    ladder.add((4,), "new")
    assert list(ladder) == [((4,), "new")]
    ladder.remove((4,))
    ladder.remove((4,))
    assert ladder.find((1,)) is None


def test_other_dimensions_are_another_thing() -> None:
    assert not covers((4, 4), (4,))
    assert covers((4, 4), (4, 0))


@given(st.integers(0, 2**40), st.sampled_from([1, 2, 4, 8]))
def test_sizes_are_rounded_up_by_so_much_at_most(size: int, an_octave: int) -> None:
    up = rounded_up(size, an_octave)
    assert size <= up <= size * (1 + 1 / an_octave)
    assert rounded_up(up, an_octave) == up


def test_what_served_most_stays_among_many_that_come_once() -> None:
    shelf = Shelf[int, str](most=3)
    assert shelf.add(0, "often") is None
    for number in range(1, 40):
        for _ in range(2):
            shelf.served(0)
        gone = shelf.add(number, f"once, {number}")
        assert gone == (f"once, {number - 2}" if number > 2 else None)
    assert list(shelf) == ["often", "once, 38", "once, 39"]
    assert len(shelf) == 3 and shelf.get(0) == "often" and shelf.get(5) is None


def test_what_served_long_ago_goes_at_last() -> None:
    shelf = Shelf[str, str](most=2)
    shelf.add("old", "old")
    for _ in range(1000):
        shelf.served("old")
    gone = []
    for number in range(1, 30):
        gone.append(shelf.add(f"{number}", f"{number}"))
        shelf.served(f"{number}")
    assert gone.index("old") == 11  # 1000 is halved ten times, then it is below one
    shelf.clear()
    shelf.served("29")
    assert len(shelf) == 0 and shelf.add("x", "x") is None


def test_something_learned_anew_takes_its_own_place() -> None:
    shelf = Shelf[str, int](most=1)
    assert shelf.add("a", 1) is None
    assert shelf.add("a", 2) is None
    assert list(shelf) == [2]
