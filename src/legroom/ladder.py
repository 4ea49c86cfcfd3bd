"""Plans by the size of the input: each serves every input that is nowhere larger than the one it was made for.

A step in which no tensor is larger than planned for takes no more memory than planned for, so that a plan is found by
looking it up, and nothing has to be computed while the step waits. Ladders, one for each op sequence, lie on a shelf.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Features = tuple[int, ...]
MOST_RUNGS = 128  # plans for one structure: those of a T5-base take 1 MB of the host each
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Ladder(Generic[T]):
    """A bounded set of plans. What was used least recently goes first, the largest never."""

    def __init__(self, *, most: int) -> None:
        self.hits = self.misses = self.evicted = 0
        self._most = most
        self._rungs: dict[Features, T] = {}  # by use, the last one used at the end
        self._upwards: list[Features] = []  # the same, the smallest first

    def __len__(self) -> int:
        return len(self._rungs)

    def __iter__(self) -> Iterator[tuple[Features, T]]:
        return iter(list(self._rungs.items()))

    def find(self, features: Features) -> tuple[Features, T] | None:
        """The smallest that is large enough."""
        for edge in self._upwards:
            if covers(edge, features):
                self.hits += 1
                what = self._rungs.pop(edge)
                self._rungs[edge] = what
                return edge, what
        self.misses += 1
        return None

    def add(self, edge: Features, what: T) -> list[Features]:
        """In place of what was there for the same size; what has to go for it."""
        self._rungs.pop(edge, None)
        self._rungs[edge] = what
        gone = []
        while len(self._rungs) > self._most:
            largest = max(self._rungs, key=_volume)
            gone.append(next(other for other in self._rungs if other != largest))
            del self._rungs[gone[-1]]
        self.evicted += len(gone)
        self._upwards = sorted(self._rungs, key=_volume)
        return gone

    def remove(self, edge: Features) -> None:
        self._rungs.pop(edge, None)
        self._upwards = sorted(self._rungs, key=_volume)

    def clear(self) -> None:
        self._rungs.clear()
        self._upwards = []


class Shelf(Generic[K, T]):
    """A bounded set of what was learned. What served the fewest steps goes first, of those alike what was put there
    first: among many that come once the newest has a chance to come back, and what comes back stays. Each time that
    something goes, what the others have served counts half: what served much long ago goes at last."""

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._things: dict[K, T] = {}
        self._served: dict[K, float] = {}

    def __len__(self) -> int:
        return len(self._things)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._things.values()))

    def get(self, key: K) -> T | None:
        return self._things.get(key)

    def served(self, key: K) -> None:
        """It spared a step from being run as one that is not known."""
        if key in self._served:
            self._served[key] += 1

    def add(self, key: K, what: T) -> T | None:
        """What had to go for it."""
        gone = None
        if key not in self._things and len(self._things) >= self._most:
            least = min(self._served, key=self._served.__getitem__)
            gone = self._things.pop(least)
            del self._served[least]
            self._served = {other: served / 2 for other, served in self._served.items()}
        self._things[key] = what
        self._served.setdefault(key, 0.0)
        return gone

    def clear(self) -> None:
        self._things.clear()
        self._served.clear()


def _volume(features: Features) -> tuple[int, int]:
    """Not the sum: twice as large in a small dimension is as loose a fit as in a large one. By the sum only what has no
    volume, so that what covers another never comes before it."""
    return math.prod(max(1, size) for size in features), sum(features)


def covers(edge: Features, features: Features) -> bool:
    # Written out: it is asked of every plan on a ladder while a step waits.
    for e, f in zip(edge, features, strict=False):
        if e < f:
            return False
    return len(edge) == len(features)


def rounded_up(size: int, an_octave: int) -> int:
    """The next of so many sizes an octave, a power of two: of eight, at most an eighth more."""
    grain = max(1, (1 << size.bit_length()) // (2 * an_octave))
    return -(-size // grain) * grain
