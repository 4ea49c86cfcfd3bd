"""How low a rule comes. Asked for less, some rules choose in another order and come lower than with all that they may
do, so it takes asking to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def descended(find: Callable[[int], tuple[T, int]], start: tuple[T, int], budget_bytes: int) -> tuple[T, int]:
    """What a rule finds, and its peak: the first within the budget on the way down from `start`, each time asked for a
    byte less than the last one takes. Where the way ends above the budget, its end: the same whatever the budget is."""
    found = start
    while found[1] > budget_bytes:
        lower = find(found[1] - 1)
        if lower[1] >= found[1]:
            break
        found = lower
    return found
