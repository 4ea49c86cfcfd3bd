"""What was learned of a program's calls at single sizes of its input, over all plans of a room.

The arguments of a call have other forms at other sizes, so what is known of it (see `knowncalls`) holds for one size
under one plan. It is learned when the size is met, and used when it comes back. Where sizes hardly ever do, it is
learned when they have come back once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

from legroom.runtime.knowncalls import KnownCall

Sizes = tuple[int, ...]
MOST_SIZES = 256  # of all plans together; a BERT of 12 layers takes 170 KiB each
_ENOUGH = 32  # that were learned, to tell whether they come back
_SELDOM = 0.25


class _Held(NamedTuple):
    calls: dict[int, KnownCall]  # by place among the calls of a step
    used: bool


class KnownSizes:
    def __init__(self, most: int = MOST_SIZES) -> None:
        self._most = most
        self._held: OrderedDict[tuple[int, Sizes], _Held] = OrderedDict()  # by use, the last one used at the end
        self._learned = self._used = 0  # sizes, and those of them that came back

    def __len__(self) -> int:
        return len(self._held)

    def at(self, sizes: Sizes, *, met: bool) -> KnownAt:
        """met: there was a step of this size before."""
        return KnownAt(self, sizes, met)

    def find(self, lesson: int, sizes: Sizes) -> Mapping[int, KnownCall] | None:
        held = self._held.get((lesson, sizes))
        if held is None:
            return None
        self._used += not held.used
        self._held[lesson, sizes] = held._replace(used=True)
        self._held.move_to_end((lesson, sizes))
        return held.calls

    def add(self, lesson: int, sizes: Sizes, calls: Mapping[int, KnownCall]) -> None:
        held = self._held.pop((lesson, sizes), None)
        if held is None:
            self._learned += 1
            held = _Held({}, used=False)
        self._held[lesson, sizes] = held._replace(calls={**held.calls, **calls})
        if len(self._held) > self._most:
            self._held.popitem(last=False)

    def clear(self) -> None:
        self._held.clear()

    def come_back(self) -> bool:
        return self._learned < _ENOUGH or self._used >= _SELDOM * self._learned


class KnownAt(NamedTuple):
    """What concerns one step. A lesson is the number of what a plan has learned of its calls."""

    all_sizes: KnownSizes
    sizes: Sizes
    met: bool

    def calls(self, lesson: int) -> tuple[Mapping[int, KnownCall] | None, bool]:
        """Those that are known, None where nothing has been learned, and whether all are to be learned now."""
        known = self.all_sizes.find(lesson, self.sizes)
        return known, known is None and (self.met or self.all_sizes.come_back())

    def learned(self, lesson: int, calls: Mapping[int, KnownCall]) -> None:
        self.all_sizes.add(lesson, self.sizes, calls)
