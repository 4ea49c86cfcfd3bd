"""What is known of a program's calls at single sizes of its input.

The arguments of a call have other forms at other sizes, so what is known of it (see `knowncalls`) holds for one size. A
call is learned at the first few sizes; for others it is told from those (see `lifting`), and where that cannot be, it
is learned when a size comes back. All plans share what they need alike: those that have the same of its ops recorded
and the same of its saves hooked.
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from legroom.ladder import MOST_RUNGS
from legroom.runtime.knowncalls import KnownCall
from legroom.runtime.lifting import Finder, LiftedCall, Sizes, Tellers, Unsure

if TYPE_CHECKING:
    from legroom.runtime.calls import Lesson

FEWEST_SIZES = 3  # at which a call is learned before it is told for others
MOST_SIZES = 6  # at which it is learned where it cannot be told, or cannot be known
MOST_EXACT = 64  # sizes of one call at which it is known as it was
MOST_MISSES = 8  # calls that were not as they were told; from then on none is told
MOST_MET = 4096
MOST_LESSONS = 8
MOST_PLANS = 2 * MOST_RUNGS  # of one op sequence: what is known goes with the last plan that needs it
MOST_STEPS = 2 * MOST_PLANS  # of different sizes, or under different plans

_editions = itertools.count()
Fits = Callable[[int, KnownCall], bool]
Proof = tuple[int, tuple[int, ...]]  # a way to make a storage again by its number, and numbers for what told its calls


class Variant(NamedTuple):
    """A call as one plan needs it."""

    place: int  # among the calls of a step
    recorded: tuple[int, ...]  # ops
    hooked: tuple[int, ...]  # ticks
    statistics: tuple[tuple[int, int] | None, ...]  # of the ops, where replays have a use for them


class _Known:
    """One variant at all sizes."""

    def __init__(self) -> None:
        self.samples: dict[Sizes, KnownCall] = {}
        # By size as it was last: what was not as it was told is known from then on, but is no rule for others.
        self.exact: dict[Sizes, KnownCall] = {}
        self.edition = -1  # of what tells it
        self._failures = 0
        self._misses = 0
        self._lifted: LiftedCall | None = None
        self._untellable = False  # whatever the size, by these samples

    def add(self, sizes: Sizes, call: KnownCall | None, *, was_told: bool) -> bool:
        """Whether other sizes are concerned, too. call: None where it cannot be known. was_told: as another one."""
        self._misses += was_told
        self._failures += call is None
        concerned = (was_told and self._misses == MOST_MISSES) or (call is None and self._failures == MOST_SIZES)
        if call is None:
            return concerned
        if not was_told and len(self.samples) < MOST_SIZES and sizes not in self.exact:
            self.samples[sizes] = call
            self.edition = next(_editions)
            self._lifted, self._untellable = None, False
            concerned = True
        if sizes in self.exact or len(self.exact) < MOST_EXACT:
            self.exact[sizes] = call
        return concerned

    def may_learn(self, *, again: bool) -> bool:
        """again: the size was met before."""
        if self._failures >= MOST_SIZES:
            return False
        return len(self.samples) < MOST_SIZES or (again and len(self.exact) < MOST_EXACT)

    def may_tell(self) -> bool:
        return len(self.samples) >= FEWEST_SIZES and self._misses < MOST_MISSES and not self._untellable

    def told(self, finder: Finder, tellers: Tellers) -> KnownCall:
        if self._lifted is None:
            try:
                self._lifted = LiftedCall(self.samples, finder)
            except Unsure:
                self._untellable = True
                raise
        return self._lifted.at(tellers)


class _Lesson:
    """All calls of one op sequence."""

    def __init__(self) -> None:
        self.variants: WeakValueDictionary[Variant, _Known] = WeakValueDictionary()  # those of the plans
        self.plans: OrderedDict[int, dict[int, _Known]] = OrderedDict()  # by place; the last one used at the end
        self.steps: OrderedDict[tuple[int, Sizes], KnownAt] = OrderedDict()
        self.fresh: dict[int, KnownAt] = {}  # under a plan, at a size where no call had been seen: as at the next one
        self.met: set[Sizes] = set()

    def at(self, number: int, variants: Sequence[Variant], sizes: Sizes, fits: Fits) -> KnownAt:
        at = self.steps.get((number, sizes))
        again = sizes in self.met
        if at is None or (again and at.waits):
            at = self.steps[number, sizes] = self._made(number, variants, sizes, fits, again=again)
            if len(self.steps) > MOST_STEPS:
                self.steps.popitem(last=False)
            if len(self.met) >= MOST_MET:
                self.met.clear()
            self.met.add(sizes)
        self.steps.move_to_end((number, sizes))
        return at

    def _made(self, number: int, variants: Sequence[Variant], sizes: Sizes, fits: Fits, *, again: bool) -> KnownAt:
        plan = self._plan(number, variants)
        if again or any(sizes in known.exact for known in plan.values()):
            return KnownAt(self, plan, variants, sizes, fits, again)
        if number in self.fresh:
            return self.fresh[number].at_another(sizes)
        at = self.fresh[number] = KnownAt(self, plan, variants, sizes, fits, again)
        return at

    def _plan(self, number: int, variants: Iterable[Variant]) -> dict[int, _Known]:
        plan = self.plans.get(number)
        if plan is None:
            plan = self.plans[number] = {v.place: self.variants.setdefault(v, _Known()) for v in variants}
            if len(self.plans) > MOST_PLANS:
                self.fresh.pop(self.plans.popitem(last=False)[0], None)
        self.plans.move_to_end(number)
        return plan

    def learned(self, sizes: Sizes, *, all_sizes: bool) -> None:
        self.fresh.clear()
        for key in [key for key in self.steps if all_sizes or key[1] == sizes]:
            del self.steps[key]


class KnownSizes:
    """Of all op sequences, each known by what was learned of its calls."""

    def __init__(self) -> None:
        self._lessons: OrderedDict[Lesson, _Lesson] = OrderedDict()  # the last one used at the end
        # By identity, for to compare two takes long; plans that learn for themselves learn the same.
        self._found: dict[int, tuple[Lesson, _Lesson]] = {}

    def at(self, lesson: Lesson, number: int, variants: Sequence[Variant], sizes: Sizes, fits: Fits) -> KnownAt:
        """lesson: of which these are variants. number: of a plan. fits: whether a call at a place may be known under
        it, for it may not show all that the ops of one read."""
        found = self._found.get(id(lesson))
        if found is None:
            if len(self._found) >= MOST_PLANS:
                self._found.clear()
            found = self._found[id(lesson)] = lesson, self._find(lesson)
        return found[1].at(number, variants, sizes, fits)

    def _find(self, lesson: Lesson) -> _Lesson:
        try:
            known = self._lessons.setdefault(lesson, _Lesson())
        except TypeError:  # a function of the program's cannot be compared with others
            return _Lesson()
        self._lessons.move_to_end(lesson)
        if len(self._lessons) > MOST_LESSONS:
            self._lessons.popitem(last=False)
            self._found.clear()
        return known

    def clear(self) -> None:
        self._lessons.clear()
        self._found.clear()


class KnownAt:
    """What is known at one size, under one plan. Calls go by their place among those of a step."""

    def __init__(
        self,
        lesson: _Lesson,
        plan: Mapping[int, _Known],
        variants: Sequence[Variant],
        sizes: Sizes,
        fits: Fits,
        again: bool,
    ) -> None:
        """again: the size was met before."""
        self._lesson = lesson
        self._plan = plan
        self._variants = variants
        self._sizes = sizes
        self._again = again
        self.proofs: dict[int, Proof] | None = None  # by storage that is made again, as long as the same are told
        self.waits = False  # whether there are some that are to be learned when the size comes back
        self._calls: dict[int, KnownCall] = {}
        self.learns: set[int] = set()  # those that are to be learned
        self.told: dict[int, int] = {}  # those that were never seen at this size, and a number for what tells them
        self.casts_weights = False
        for place, known in plan.items():
            call = known.exact.get(sizes)
            if call is None and not known.may_tell():
                self._learn(place)
                continue
            like = call or next(iter(known.samples.values()))
            if fits(place, like):
                self.casts_weights |= like.casts_weights
                if call is not None:
                    self._calls[place] = call
                else:
                    self.told[place] = known.edition

    def at_another(self, sizes: Sizes) -> KnownAt:
        """At a size that is new as well, as long as nothing was learned since."""
        other = copy(self)
        vars(other).pop("_telling", None)
        other._sizes, other._calls = sizes, {}
        other.learns, other.told = set(self.learns), dict(self.told)
        return other

    def _learn(self, place: int) -> None:
        if self._plan[place].may_learn(again=self._again):
            self.learns.add(place)
        else:
            self.waits |= self._plan[place].may_learn(again=True)

    def call(self, place: int) -> KnownCall | None:
        call = self._calls.get(place)
        if call is None and place in self.told:
            try:
                call = self._calls[place] = self._plan[place].told(*self._telling)
            except Unsure:
                del self.told[place]
                vars(self).pop("told_ops", None)
                self.proofs = None
                self._learn(place)
                self._lesson.fresh.clear()
        return call

    @functools.cached_property
    def _telling(self) -> tuple[Finder, Tellers]:
        return Finder(), Tellers(self._sizes)

    def learned(self, calls: Mapping[int, KnownCall | None]) -> None:
        """Those that were to be learned, and those that were others than they were known as."""
        concerned = [
            self._plan[place].add(self._sizes, call, was_told=place in self.told)
            for place, call in calls.items()
            if place in self._plan
        ]
        self._lesson.learned(self._sizes, all_sizes=any(concerned))

    @functools.cached_property
    def told_ops(self) -> frozenset[int]:
        return frozenset(op for variant in self._variants if variant.place in self.told for op in variant.recorded)

    def told_by(self, places: Iterable[int]) -> tuple[int, ...]:
        """Numbers for what tells the calls at these places."""
        told = self.told
        return tuple([told[place] for place in places if place in told])
