"""Where memory falls: best fit against a slow one, requests against the memory curve, spacers against a step."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom import arrange
from legroom.arrange import UNBOUNDED, Arena, Piece, Spacer, _QuickTrial, _trial, find_spacers, small_bytes
from legroom.evaluate import floor_bytes
from legroom.hardware import PRESETS
from legroom.ir import Trace
from legroom.planners import PLANNERS
from legroom.requested import Event, requests
from legroom.schedule import Schedule, check_schedule, lower, memory_curve
from legroom.traceio import load
from tests.pure.strategies import make_trace

TRACES = Path(__file__).parents[1] / "traces"
H200 = PRESETS["h200"]
MIB = 2**20


class SlowFit:
    """Best fit by looking at everything: blocks in a list, the hole that is smallest, the lowest among equals.

    From one that could grow on to the next larger, as long as that counts for less.
    """

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self.blocks: dict[object, tuple[int, int, int]] = {}  # key -> piece, start, bytes

    def holes(self) -> list[tuple[int, int, int]]:
        found = []
        for piece, (nbytes, _) in enumerate(self.pieces):
            at = 0
            for _, start, size in sorted(block for block in self.blocks.values() if block[0] == piece):
                if start > at:
                    found.append((start - at, piece, at))
                at = start + size
            if at < nbytes:
                found.append((nbytes - at, piece, at))
        return found

    def counts(self, hole: tuple[int, int, int]) -> int:
        nbytes, piece, start = hole
        whole = self.pieces[piece]
        return nbytes + (whole.beyond_bytes if start + nbytes == whole.nbytes else 0)

    def take(self, key: object, nbytes: int) -> bool:
        fitting = sorted(hole for hole in self.holes() if hole[0] >= nbytes)
        if fitting:
            while len(fitting) > 1 and self.counts(fitting[1]) < self.counts(fitting[0]):
                del fitting[0]
            _, piece, start = fitting[0]
            self.blocks[key] = piece, start, nbytes
        return bool(fitting)


PIECES = st.lists(
    st.builds(Piece, st.integers(1, 40), st.sampled_from([0, 0, 3, 10, 30, UNBOUNDED])), min_size=1, max_size=4
)


@given(
    PIECES,
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 25)), max_size=60),
)
@settings(max_examples=300, deadline=None)
def test_the_arena_is_best_fit(pieces: list[Piece], wishes: list[tuple[int, int]]) -> None:
    """Every wish frees the block of that number, if there is one, or else takes one."""
    arena, slow = Arena(pieces), SlowFit(pieces)
    taken: dict[int, tuple[int, int]] = {}
    for key, nbytes in wishes:
        if key in taken:
            arena.give_back(*taken.pop(key))
            del slow.blocks[key]
        else:
            got = arena.take(nbytes)
            assert (got is not None) == slow.take(key, nbytes)
            if got is not None:
                taken[key] = got[0], nbytes
                start = got[0] - sum(piece.nbytes + 1 for piece in pieces[: slow.blocks[key][0]])
                assert start == slow.blocks[key][1]
        assert sorted(size for _, size in arena.holes()) == sorted(size for size, _, _ in slow.holes())
        assert arena.largest_bytes() == max((size for size, _, _ in slow.holes()), default=0)


def planned(name: str, share: float, *, of: float = 1.0) -> tuple[Trace, Schedule, int]:
    """A trace, a plan that fills so much of the budget at a share of the range, and that budget less what stays."""
    trace = load(TRACES / f"{name}.json.gz")
    floor = floor_bytes(trace)
    budget = int(floor + (trace.peak_bytes - floor) * share)
    plan = PLANNERS["auto"](trace, H200, int(budget * of))
    stays = sum(storage.nbytes for storage in trace.storages if storage.persistent)
    return trace, lower(trace, plan, H200), budget - stays - small_bytes(trace)


@pytest.mark.parametrize("name", ["gpt", "bert", "unet", "inception"])
def test_requests_add_up_to_the_memory_curve(name: str) -> None:
    trace, schedule, _ = planned(name, 0.5)
    level = sum(storage.nbytes for storage in trace.storages if storage.persistent)
    peaks = [0] * (len(trace.ticks) + 1)  # the first: before any tick
    tick = -1
    live: dict[int, int] = {}
    for key, nbytes in requests(trace, schedule):
        if nbytes < 0:
            tick = key
        elif nbytes > 0:
            assert key not in live
            live[key] = nbytes
        else:
            level -= live.pop(key, 0)
        level += max(0, nbytes)
        peaks[tick + 1] = max(peaks[tick + 1], level)
    assert tick == len(trace.ticks) - 1
    most = check_schedule(trace, schedule)
    for number, _, peak in memory_curve(trace, schedule):
        assert peaks[number + 1] >= peak - 0.035 * most, f"at tick {number} something is missing"
    assert max(peaks) <= 1.06 * most  # where it is not known, rather too much than too little


def fits(events: list[Event], pieces: list[Piece], spacers: tuple[Spacer, ...]) -> bool:
    memory = SlowFit(pieces)
    for key, nbytes in events:
        if nbytes < 0:
            for spacer in spacers:
                if spacer.until == key:
                    del memory.blocks[spacer]
            for spacer in spacers:
                if spacer.tick == key and not memory.take(spacer, spacer.nbytes):
                    return False
        elif nbytes > MIB and not memory.take(key, nbytes):
            return False
        elif nbytes == 0:
            memory.blocks.pop(key, None)
    return True


@pytest.mark.parametrize(("name", "share", "of"), [("gpt", 0.5, 0.95), ("bert", 0.35, 0.97), ("vgg16", 0.25, 0.97)])
def test_spacers_make_a_step_fit_that_did_not(name: str, share: float, of: float) -> None:
    trace, schedule, arena_bytes = planned(name, share, of=of)
    spacers = find_spacers(trace, schedule, [Piece(arena_bytes, UNBOUNDED)])
    assert spacers
    events = list(requests(trace, schedule))
    assert not fits(events, [Piece(arena_bytes, UNBOUNDED)], ())
    assert fits(events, [Piece(arena_bytes, UNBOUNDED)], spacers)
    most = check_schedule(trace, schedule)
    for number, _, peak in memory_curve(trace, schedule):
        spaced = sum(spacer.nbytes for spacer in spacers if spacer.tick <= number < spacer.until)
        assert not spaced or peak + spaced <= most


def test_where_there_is_room_none_are_needed() -> None:
    trace, schedule, arena_bytes = planned("plain20", 0.5)
    assert find_spacers(trace, schedule, [Piece(2 * arena_bytes, UNBOUNDED)]) == ()


def test_where_there_is_none_it_says_so() -> None:
    trace, schedule, arena_bytes = planned("plain20", 0.5)
    assert find_spacers(trace, schedule, [Piece(arena_bytes // 3, UNBOUNDED)]) is None
    assert find_spacers(trace, schedule, []) is None


def test_small_requests_are_counted() -> None:
    trace = load(TRACES / "inception.json.gz")
    gradients = sum(s.nbytes for s in trace.storages if s.kind == "parameter" and s.nbytes <= MIB)
    assert gradients < small_bytes(trace) < gradients + 64 * MIB


def scaled(trace: Trace, factor: int) -> Trace:
    return replace(
        trace,
        storages=tuple(replace(s, nbytes=s.nbytes * factor) for s in trace.storages),
        ops=tuple(replace(op, workspace_bytes=op.workspace_bytes * factor) for op in trace.ops),
        ticks=tuple(
            replace(t, level_bytes=t.level_bytes * factor, peak_bytes=t.peak_bytes * factor) for t in trace.ticks
        ),
        head_peak_bytes=trace.head_peak_bytes * factor,
    )


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_arrangement_that_is_found_holds(data: st.DataObject) -> None:
    trace = scaled(make_trace(data.draw(st.integers(0, 10**6)), forward=data.draw(st.integers(3, 30))), MIB)
    floor = floor_bytes(trace)
    budget = data.draw(st.integers(floor, trace.peak_bytes))
    schedule = lower(trace, PLANNERS["capuchin"](trace, H200, budget), H200)
    stays = sum(storage.nbytes for storage in trace.storages if storage.persistent)
    pieces = [Piece(int((budget - stays) * data.draw(st.floats(0.9, 1.3))), UNBOUNDED)]
    pieces += data.draw(st.lists(st.builds(Piece, st.integers(1, 9 * MIB), st.sampled_from([0, 20 * MIB])), max_size=3))
    spacers = find_spacers(trace, schedule, pieces)
    if spacers is not None:
        assert len(set(spacers)) == len(spacers)
        assert all(0 <= s.tick < s.until < len(trace.ticks) for s in spacers)
        assert fits(list(requests(trace, schedule)), pieces, spacers)


@given(st.integers(0, 10_000), st.integers(10, 400), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_a_trial_that_goes_on_from_another_ends_where_one_from_the_beginning_does(
    seed: int, count: int, spacers: int
) -> None:
    rng = random.Random(seed)
    events: list[Event] = []
    live: list[int] = []
    tick = -1
    for key in range(count):
        what = rng.random()
        if what < 0.3 or tick < 0:
            tick += 1
            events.append(Event(tick, -1))
        elif what < 0.7 or not live:
            live.append(key)
            events.append(Event(key, rng.randrange(2, 40) * MIB))
        else:
            events.append(Event(live.pop(rng.randrange(len(live))), 0))
    pieces = [Piece(rng.randrange(1, 300) * MIB, rng.choice([0, 0, 100 * MIB])) for _ in range(rng.randrange(1, 5))]
    pieces.append(Piece(rng.randrange(0, 100) * MIB, UNBOUNDED))
    taken = []
    for _ in range(spacers + 1):
        first = rng.randrange(0, tick + 1)
        taken.append(Spacer(first, first + rng.randrange(1, 9), rng.randrange(2, 60) * MIB))
    quick = _QuickTrial(events, pieces)
    for spacer in taken:  # each once by itself: the states are those of what it was started from
        quick.start_from(())
        quick.how_far(spacer)
    quick.start_from(taken[:-1])
    for _ in range(2):
        before, slow = _trial(events, pieces, taken[:-1]), _trial(events, pieces, taken)
        reached = before is None or taken[-1].tick <= before.tick
        if reached:
            expected = (len(events), 0) if slow is None else (slow.place, slow.largest_bytes)
            assert quick.how_far(taken[-1]) == expected


def test_a_search_ends_and_finds_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, schedule, arena_bytes = planned("bert", 0.35, of=0.97)
    pieces = [Piece(arena_bytes, UNBOUNDED)]
    spacers = find_spacers(trace, schedule, pieces)
    assert spacers
    assert arrange.suffices(trace, schedule, pieces, spacers)
    assert not arrange.suffices(trace, schedule, pieces, spacers[1:])
    assert find_spacers(trace, schedule, pieces) == spacers
    monkeypatch.setattr(arrange, "_MOST_EVENTS", 0)
    assert find_spacers(trace, schedule, pieces) is None
