"""Where a planned step's memory falls, and how to keep the free memory in one piece.

PyTorch's allocator puts a request into the smallest free block that it fits into. A step in which small tensors come
and go leaves holes, and the largest request of the step, such as the gradient of the logits, may fit into none of them
though all holes together are larger. The allocator then stops the device to map its pages anew, in every step
(22 ms of 150 on an H200), or ends the step with an error.

A step makes the same requests every time, so what happens can be worked out: a trace has those of the program one by
one, and the plan adds its own. (A trace from a file has those of backward only by how the level moves between two
ticks.) Where a request finds no hole, a *spacer* helps: a block that nobody uses, taken at one tick and given back at a
later one, so that what is allocated meanwhile falls elsewhere, and the hole that is missing stays whole. Spacers are
found by trial: one after another is added, mostly to those that let the step come furthest.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from legroom.bestfit import how_far
from legroom.ir import Trace
from legroom.requested import Event, requests
from legroom.schedule import Schedule, memory_curve
from legroom.tables import Ints

LARGE_BYTES = 2**20  # smaller requests have pages of their own
_MOST_EVENTS = 60_000_000  # that all trials go through together: four seconds
_WINDOWS = 60  # stretches of memory that a request might have had, those in which least stands
_MOST_SPACERS = 14
_MOST_STARTS = 20  # with other luck, where no branch is left before the time is over
_MOST_BRANCHES = 400
_AT_ONCE = 50  # spacers that are tried before another branch may be looked at
_MOST_POSSIBLE = 1500  # spacers that are thought of for a branch
# What else takes time, in events of a trial: to begin one; a spacer to think of; an event where all has to be known.
_TRIAL, _THOUGHT, _KNOWN = 300, 70, 60
_MOST_STATES, _LEAST_APART = 128, 64  # of a trial that others go on from; events
_LOOKED, _CHANCE = 0.002, 0.02  # of the way
_FROM_THE_BEGINNING = (1.0, 0.97, 0.93, 0.85, 0.7, 0.5)


class Spacer(NamedTuple):
    """A block that is taken at a tick and given back at a later one, before the instructions of either."""

    tick: int
    until: int
    nbytes: int


class Piece(NamedTuple):
    """Free memory in one piece."""

    nbytes: int
    beyond_bytes: int = 0  # addresses right behind it for which no memory is mapped: it could grow by so much


UNBOUNDED = 1 << 60  # as beyond_bytes: up to the end of the addresses


class _Stop(NamedTuple):
    """Where a trial ended: a request that found no hole."""

    place: int  # in the events
    tick: int
    nbytes: int
    largest_bytes: int  # of the holes
    blocks: dict[int, tuple[int, int]]  # key -> address, bytes
    born: dict[int, tuple[int, int]]  # key -> tick, bytes of the hole that it was put into
    holes: list[tuple[int, int]]  # address, bytes


class Arena:
    """Free memory, and best fit as PyTorch's allocator does it.

    It takes the smallest hole that a request fits into, but counts one that could grow for as large as it could become:
    where the next larger one counts for less, it takes that, and so on.
    """

    def __init__(self, pieces: Iterable[Piece]) -> None:
        """pieces: what is free at the beginning; they do not touch."""
        self._size_at: dict[int, int] = {}
        self._start_of: dict[int, int] = {}  # by where it ends
        self._by_size: list[tuple[int, int]] = []
        self.edges: dict[int, int] = {}  # where pieces end that could grow, and by how much
        start = 0
        for nbytes, beyond_bytes in pieces:
            if nbytes > 0:
                self._add(start, nbytes)
                if beyond_bytes:
                    self.edges[start + nbytes] = beyond_bytes
                start += nbytes + 1

    def _add(self, start: int, nbytes: int) -> None:
        self._size_at[start] = nbytes
        self._start_of[start + nbytes] = start
        insort(self._by_size, (nbytes, start))

    def _remove(self, start: int) -> int:
        nbytes = self._size_at.pop(start)
        del self._start_of[start + nbytes]
        del self._by_size[bisect_left(self._by_size, (nbytes, start))]
        return nbytes

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """The address, and how large the hole was; None where no hole is large enough."""
        place = bisect_left(self._by_size, (nbytes, -1))
        if place == len(self._by_size):
            return None
        while place + 1 < len(self._by_size) and self._counts(place + 1) < self._counts(place):
            place += 1
        hole_bytes, start = self._by_size[place]
        self._remove(start)
        if hole_bytes > nbytes:
            self._add(start + nbytes, hole_bytes - nbytes)
        return start, hole_bytes

    def _counts(self, place: int) -> int:
        nbytes, start = self._by_size[place]
        return nbytes + self.edges.get(start + nbytes, 0)

    def give_back(self, start: int, nbytes: int) -> None:
        if start + nbytes in self._size_at:
            nbytes += self._remove(start + nbytes)
        before = self._start_of.get(start)
        if before is not None:
            nbytes += self._remove(before)
            start = before
        self._add(start, nbytes)

    def holes(self) -> list[tuple[int, int]]:
        return sorted(self._size_at.items())

    def largest_bytes(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0


def find_spacers(trace: Trace, schedule: Schedule, pieces: Sequence[Piece]) -> tuple[Spacer, ...] | None:
    """Spacers with which the step finds room for all its requests; None where none were found.

    pieces: the free memory at the beginning of a step. The step's peak is no higher with spacers.
    """
    events = _large(requests(trace, schedule))
    if _fits(events, pieces, ()):
        return ()
    if _most_at_once(events) > sum(piece.nbytes for piece in pieces):
        return None  # however it lies
    peaks = [peak_bytes for _, _, peak_bytes in memory_curve(trace, schedule)]
    return _Search(events, pieces, peaks, max((trace.head_peak_bytes, *peaks))).found()


@dataclass(slots=True)
class _Branch:
    """Spacers that let the step come so far, and those that might be added."""

    came: tuple[int, int]  # as _QuickTrial.how_far() has it
    spacers: tuple[Spacer, ...]
    looks: int = 0
    untried: list[Spacer] | None = None  # None: not looked at yet


class _Search:
    """Best first, with a little chance, and back to an earlier branch where one leads nowhere: there are thousands of
    spacers to choose from, and the one that lets the step come furthest is often not the one that is needed. Of what
    U-Net and Inception ask for at 25% of their range it arranges plans for 0.935 and 0.86 of the budget; the best ten
    at each turn, and no way back, arranged 0.92 and none from 0.82 on."""

    def __init__(self, events: list[Event], pieces: Sequence[Piece], peaks: list[int], most_bytes: int) -> None:
        self._events = events
        self._pieces = pieces
        self._peaks = peaks  # by tick
        self._most_bytes = most_bytes
        self._quick = _QuickTrial(events, pieces)
        self._random = random.Random()  # seeded: the same arrangement every time

    def found(self) -> tuple[Spacer, ...] | None:
        for seed in range(_MOST_STARTS):
            self._random.seed(seed)
            found = self._found()
            if found is not None or self._quick.events >= _MOST_EVENTS:
                return found
        return None

    def _found(self) -> tuple[Spacer, ...] | None:
        """As luck has it: None where no branch is left."""
        branches = [_Branch(self._quick.start_from(()), ())]
        known: set[tuple[int, int]] = set()
        while self._quick.events < _MOST_EVENTS and branches:
            branch = max(branches, key=self._promises)
            branch.looks += 1
            if branch.untried is None:
                branch.untried = self._possible(branch.spacers)
            self._quick.start_from(branch.spacers)
            for _ in range(min(_AT_ONCE, len(branch.untried))):
                spacer = branch.untried.pop()
                came = self._quick.how_far(spacer)
                if came[0] == len(self._events):
                    return (*branch.spacers, spacer)
                if came > branch.came and came not in known and len(branch.spacers) + 1 < _MOST_SPACERS:
                    known.add(came)  # of those that come to the same, one is enough
                    branches.append(_Branch(came, (*branch.spacers, spacer)))
            if not branch.untried:
                branches.remove(branch)
            if len(branches) > _MOST_BRANCHES:
                branches.sort(key=lambda each: each.came, reverse=True)
                del branches[_MOST_BRANCHES // 2 :]
        return None

    def _promises(self, branch: _Branch) -> float:
        """How far it came, as a share; less for each time that it was looked at."""
        return branch.came[0] / len(self._events) - _LOOKED * branch.looks + _CHANCE * self._random.random()

    def _possible(self, spacers: tuple[Spacer, ...]) -> list[Spacer]:
        """What might be added to these, in any order."""
        stop = _trial(self._events, self._pieces, spacers)
        assert stop is not None
        spaced = [peak + _spaced(spacers, tick) for tick, peak in enumerate(self._peaks)]
        free_bytes = [self._most_bytes - nbytes for nbytes in itertools.accumulate(spaced, max)]
        thought_of = list(itertools.islice(_candidates(stop, free_bytes), _MOST_POSSIBLE))
        self._quick.events += _KNOWN * stop.place + _THOUGHT * len(thought_of)
        found = [
            spacer
            for spacer in thought_of
            if spacer not in spacers and max(spaced[spacer.tick : spacer.until]) + spacer.nbytes <= self._most_bytes
        ]
        self._random.shuffle(found)
        return found


def suffices(trace: Trace, schedule: Schedule, pieces: Sequence[Piece], spacers: Sequence[Spacer]) -> bool:
    """Whether the step finds room for all its requests with these."""
    return _fits(_large(requests(trace, schedule)), pieces, spacers)


def _fits(events: list[Event], pieces: Sequence[Piece], spacers: Sequence[Spacer]) -> bool:
    return _QuickTrial(events, pieces, states=1).start_from(spacers)[0] == len(events)


def _large(events: Iterable[Event]) -> list[Event]:
    """Without the requests that have pages of their own, which are most of them."""
    chosen: list[Event] = []
    small: set[int] = set()
    for event in events:
        if 0 < event.nbytes <= LARGE_BYTES:
            small.add(event.key)
        elif event.nbytes == 0 and event.key in small:
            small.remove(event.key)
        else:
            chosen.append(event)
    return chosen


def _most_at_once(events: Iterable[Event]) -> int:
    level = most = 0
    live: dict[int, int] = {}
    for key, nbytes in events:
        if nbytes > 0:
            live[key] = nbytes
            level += nbytes
            most = max(most, level)
        elif nbytes == 0:
            level -= live.pop(key, 0)
    return most


class _State(NamedTuple):
    """Of a trial, before an event."""

    place: int
    spacers: Ints
    starts: Ints
    sizes: Ints
    blocks: Ints


class _QuickTrial:
    """As `_trial`, for those who want to know only how far the step comes: some 30 times as fast. One spacer more
    changes nothing before it is taken: so a trial goes on from a state of the one without it."""

    def __init__(self, events: Sequence[Event], pieces: Sequence[Piece], *, states: int = _MOST_STATES) -> None:
        numbers: dict[int, int] = {}
        self._keys = np.array(
            [e.key if e.nbytes < 0 else numbers.setdefault(e.key, len(numbers)) for e in events], np.int64
        )
        self._requests = np.array([e.nbytes for e in events], np.int64)
        self._place_of = {e.key: place for place, e in enumerate(events) if e.nbytes < 0}  # by tick
        arena = Arena(pieces)
        holes = np.array(arena.holes(), np.int64).reshape(-1, 2)
        self._edges = np.array(list(arena.edges.items()), np.int64).ravel()
        self._starts, self._sizes = np.zeros((2, len(events) + len(holes) + 1), np.int64)
        self._blocks = np.zeros(2 * len(numbers) + 2, np.int64)
        self.events = 0  # gone through so far
        self._apart = max(_LEAST_APART, -(-len(events) // states))  # events from a state to the next
        nothing = np.zeros(0, np.int64)
        self._states = [_State(0, nothing, holes[:, 0].copy(), holes[:, 1].copy(), self._blocks.copy())]

    def start_from(self, spacers: Sequence[Spacer]) -> tuple[int, int]:
        """How far the step comes with these. From then on, trials are of these and more."""
        state = self._states[0]._replace(spacers=_rows(spacers))
        self._states = []
        while True:
            self._states.append(state)
            upto, rows = min(state.place + self._apart, len(self._keys)), state.spacers.copy()
            end, largest, count = self._run(state, rows, upto)
            if end < upto or upto == len(self._keys):
                return end, largest
            holes = self._starts[:count].copy(), self._sizes[:count].copy()
            state = _State(upto, rows, *holes, self._blocks.copy())

    def how_far(self, spacer: Spacer) -> tuple[int, int]:
        """The place of the first event that does not go well with this one more, or the number of all; and the largest
        hole there."""
        states = min(self._place_of[spacer.tick] // self._apart + 1, len(self._states))
        state = self._states[states - 1]
        end, largest, _ = self._run(state, np.concatenate([state.spacers, _rows([spacer])]), len(self._keys))
        return end, largest

    def _run(self, state: _State, spacers: Ints, upto: int) -> tuple[int, int, int]:
        count = len(state.starts)
        self._starts[:count], self._sizes[:count], self._blocks[:] = state.starts, state.sizes, state.blocks
        end, largest, count = how_far(
            self._keys,
            self._requests,
            state.place,
            upto,
            spacers,
            self._starts,
            self._sizes,
            count,
            self._blocks,
            LARGE_BYTES,
            self._edges,
        )
        self.events += _TRIAL + int(end) - state.place
        return int(end), int(largest), int(count)


def _rows(spacers: Sequence[Spacer]) -> Ints:
    return np.array([(s.tick, s.until, s.nbytes, 0) for s in spacers], np.int64).ravel()


def small_bytes(trace: Trace) -> int:
    """The most that requests too small for the arena take at once; at a guess where those of backward are unknown."""
    gradients = sum(s.nbytes for s in trace.storages if s.kind == "parameter" and s.nbytes <= LARGE_BYTES)
    level = most = 0 if trace.requests else gradients
    live: dict[int, int] = {}
    for key, nbytes in requests(trace, Schedule((), "")):
        if 0 < nbytes <= LARGE_BYTES:
            level += nbytes
            most = max(most, level)
            live[key] = nbytes
        elif nbytes == 0:
            level -= live.pop(key, 0)
    return most


def _spaced(spacers: Sequence[Spacer], tick: int) -> int:
    return sum(spacer.nbytes for spacer in spacers if spacer.tick <= tick < spacer.until)


def _trial(events: Sequence[Event], pieces: Sequence[Piece], spacers: Sequence[Spacer]) -> _Stop | None:
    """Where the step's requests end for want of a hole; None where they all find one."""
    arena = Arena(pieces)
    taken: dict[int, list[Spacer]] = defaultdict(list)
    ended: dict[int, list[Spacer]] = defaultdict(list)
    for spacer in spacers:
        taken[spacer.tick].append(spacer)
        ended[spacer.until].append(spacer)
    spaced: dict[Spacer, int] = {}
    blocks: dict[int, tuple[int, int]] = {}
    born: dict[int, tuple[int, int]] = {}
    tick = -1
    for place, (key, nbytes) in enumerate(events):
        if nbytes < 0:
            tick = key
            for spacer in ended.get(tick, ()):
                if spacer in spaced:
                    arena.give_back(spaced.pop(spacer), spacer.nbytes)
            for spacer in taken.get(tick, ()):
                got = arena.take(spacer.nbytes)
                if got is None:
                    return _stopped(place, tick, spacer.nbytes, arena, blocks, born)
                spaced[spacer] = got[0]
        elif nbytes > LARGE_BYTES:
            got = arena.take(nbytes)
            if got is None:
                return _stopped(place, tick, nbytes, arena, blocks, born)
            blocks[key] = got[0], nbytes
            born[key] = tick, got[1]
        elif nbytes == 0 and key in blocks:
            arena.give_back(*blocks.pop(key))
            del born[key]
    return None


def _stopped(
    place: int,
    tick: int,
    nbytes: int,
    arena: Arena,
    blocks: dict[int, tuple[int, int]],
    born: dict[int, tuple[int, int]],
) -> _Stop:
    return _Stop(place, tick, nbytes, arena.largest_bytes(), blocks, born, arena.holes())


def _candidates(stop: _Stop, free_bytes: Sequence[int]) -> Iterator[Spacer]:
    """Spacers that might have kept a stretch of memory free for the request that found none.

    free_bytes: what the steps have left, up to and with each tick.
    """
    windows = _windows(stop)[:_WINDOWS]
    seen: set[Spacer] = set()
    # One that stands from the beginning leaves so little that everything up to its end falls close together.
    for until in sorted({stop.tick, *(stop.born[key][0] for keys in windows for key in keys)}, reverse=True):
        for share in _FROM_THE_BEGINNING:
            nbytes = int(free_bytes[until - 1] * share) // 512 * 512 if until > 0 else 0
            if nbytes > LARGE_BYTES:
                seen.add(Spacer(0, until, nbytes))
                yield Spacer(0, until, nbytes)
    for key in dict.fromkeys(itertools.chain(*windows)):  # a block may stand in several
        tick, hole_bytes = stop.born[key]
        own_bytes = stop.blocks[key][1]
        wanted = stop.nbytes
        for nbytes in (own_bytes, wanted - own_bytes, wanted, wanted // 2, hole_bytes, hole_bytes - own_bytes):
            for until in (tick + 1, tick + 2, stop.tick):
                spacer = Spacer(max(0, tick), until, nbytes // 512 * 512)
                inside = spacer.tick < until < len(free_bytes)
                if nbytes > LARGE_BYTES and inside and spacer not in seen:
                    seen.add(spacer)
                    yield spacer


def _windows(stop: _Stop) -> list[list[int]]:
    """The blocks that stand in a stretch of memory large enough for the request, those with the fewest bytes first."""
    pieces: list[tuple[int, int, int | None]] = [(start, nbytes, None) for start, nbytes in stop.holes]
    pieces += [(start, nbytes, key) for key, (start, nbytes) in stop.blocks.items()]
    pieces.sort(key=lambda piece: piece[0])
    found: list[tuple[int, list[int]]] = []
    for first in range(len(pieces)):
        total = standing = 0
        keys: list[int] = []
        for start, nbytes, key in pieces[first:]:
            if start != pieces[first][0] + total:
                break  # the edge of a piece, or a spacer
            total += nbytes
            if key is not None:
                keys.append(key)
                standing += nbytes
            if total >= stop.nbytes:
                break
        if total >= stop.nbytes and keys:
            found.append((standing, keys))
    return [keys for _, keys in sorted(found, key=lambda window: window[0])]
