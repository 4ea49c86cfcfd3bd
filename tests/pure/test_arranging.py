"""The search for a plan whose memory can be arranged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from legroom import arranging, traceio
from legroom.arrange import UNBOUNDED, Piece, Spacer, find_spacers, suffices
from legroom.arranging import Found, Space, find_arranged, rearranged, with_arena
from legroom.brim import SHARES, Brim
from legroom.evaluate import floor_bytes
from legroom.hardware import PRESETS, Hardware
from legroom.ir import Trace
from legroom.plan import Plan
from legroom.planners import Planner
from legroom.planners.auto import Auto
from legroom.requested import requests
from legroom.schedule import Schedule, check_schedule

TRACES = Path(__file__).parents[1] / "traces"
H200 = PRESETS["h200"]
MIB = 2**20


class Asked(Auto):
    """Auto, and what it was asked for: the bytes, and from what it started."""

    asked: list[tuple[int, Plan | None]] = []  # noqa: RUF012 (the class is frozen)

    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        self.asked.append((budget_bytes, self.start))
        return super().__call__(trace, hardware, budget_bytes)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return traceio.load(TRACES / "bert.json.gz")


def space(trace: Trace, free_share: float) -> Space:
    """Half of the range as the budget, and of what is not alive before the step so much in one piece, a little in
    pieces that are too small for most."""
    floor = floor_bytes(trace)
    budget = floor + (trace.peak_bytes - floor) // 2
    base = sum(s.nbytes for s in trace.storages if s.persistent)
    free = int((budget - base) * free_share)
    return Space(budget, floor, base, free, (Piece(2 * MIB),) * 16)


def found(planner: Planner, trace: Trace, free_share: float) -> Found:
    given = space(trace, free_share)
    return find_arranged(planner, trace, H200, Brim(given.budget_bytes), given)


def test_less_and_less_is_asked_for_each_time_from_the_plan_before(trace: Trace) -> None:
    planner = Asked(evaluations=2000, thorough=False)
    planner.asked.clear()
    answer = found(planner, trace, 0.97)
    sizes = [nbytes for nbytes, _ in planner.asked]
    starts = [start for _, start in planner.asked]
    assert len(sizes) > 1
    assert sizes == sorted(sizes, reverse=True)
    assert starts[0] is None
    assert [start.budget_bytes for start in starts[1:] if start is not None] == sizes[:-1]
    assert answer.spacers is not None
    assert check_schedule(trace, answer.schedule) <= sizes[-1]
    assert answer.brim is not None
    assert answer.brim.usable_bytes == sizes[-1]


def test_with_all_in_one_piece_the_first_plan_is_taken(trace: Trace) -> None:
    planner = Asked(evaluations=2000, thorough=False)
    planner.asked.clear()
    answer = found(planner, trace, 1.0)
    assert len(planner.asked) == 1
    assert answer.spacers is not None
    assert answer.plan.budget_bytes == int(space(trace, 1.0).budget_bytes * SHARES[0])


def test_where_nothing_can_be_arranged_a_plan_is_taken_that_needs_no_arrangement(trace: Trace) -> None:
    answer = found(Auto(evaluations=1000, thorough=False), trace, 0.2)
    assert answer.spacers is None
    assert answer.arena_bytes == 0
    assert answer.brim is not None
    assert not answer.brim.arranged


PAGE = 20 * MIB


@pytest.mark.parametrize(
    ("pieces", "arena_bytes", "after"),
    [
        pytest.param([], 3 * PAGE, [(3 * PAGE, UNBOUNDED)], id="nothing there"),
        pytest.param([(MIB, 0), (2 * MIB, UNBOUNDED)], PAGE, [(MIB, 0), (PAGE + 2 * MIB, UNBOUNDED)], id="at the end"),
        pytest.param(
            [(MIB, 2 * PAGE), (2 * MIB, 5 * PAGE), (3 * MIB, UNBOUNDED)],
            3 * PAGE,
            [(MIB, 2 * PAGE), (3 * PAGE + 2 * MIB, 2 * PAGE), (3 * MIB, UNBOUNDED)],
            id="in the first stretch that has room",
        ),
        pytest.param([(0, 3 * PAGE), (0, UNBOUNDED)], 3 * PAGE, [(3 * PAGE, 0), (0, UNBOUNDED)], id="no piece before"),
        pytest.param([(4 * PAGE, 0), (0, UNBOUNDED)], 3 * PAGE, [(4 * PAGE, 0), (0, UNBOUNDED)], id="there already"),
        pytest.param(
            [(PAGE + MIB, 0), (PAGE + MIB, UNBOUNDED)],
            3 * PAGE,
            [(PAGE + MIB, 0), (3 * PAGE + MIB, UNBOUNDED)],
            id="some of it there",
        ),
    ],
)
def test_where_an_arena_is_mapped(
    pieces: list[tuple[int, int]], arena_bytes: int, after: list[tuple[int, int]]
) -> None:
    assert with_arena([Piece(*piece) for piece in pieces], arena_bytes) == [Piece(*piece) for piece in after]


def with_requests(trace: Trace) -> Trace:
    """As if those that are estimated for a trace from a file had been recorded."""
    segments: list[list[tuple[int, int]]] = [[]]
    for key, nbytes in requests(trace, Schedule((), "")):
        if nbytes < 0:
            segments.append([])
        else:
            segments[-1].append((key, nbytes))
    return replace(trace, requests=tuple(map(tuple, segments)))


def test_spacers_are_those_for_where_the_arena_lies(trace: Trace) -> None:
    trace = with_requests(trace)
    # Which plan is found depends on how a processor rounds, and with it how much room needs no arrangement.
    answers = (
        (share, found(Auto(evaluations=2000, thorough=False), trace, share)) for share in (0.97, 0.98, 0.99, 1.0)
    )
    share, answer = next((share, answer) for share, answer in answers if answer.spacers == ())
    assert rearranged(answer, trace, with_arena(space(trace, share).pieces, answer.arena_bytes)) is answer
    # Less in one piece than was thought.
    sizes = (answer.arena_bytes - less * MIB for less in range(0, 2000, 10))
    nbytes = next(n for n in sizes if not suffices(trace, answer.schedule, [Piece(n), Piece(300 * MIB)], ()))
    pieces = [Piece(nbytes), Piece(300 * MIB)]
    there = replace(answer, arena_bytes=nbytes)
    other = rearranged(there, trace, pieces)
    assert other.spacers and suffices(trace, answer.schedule, pieces, other.spacers)
    assert replace(other, spacers=()) == there
    # What was not mapped, or is not known, is no reason to give up what was found.
    assert rearranged(answer, trace, [Piece(MIB)]) is answer
    assert rearranged(there, replace(trace, requests=()), pieces) is there
    assert rearranged(replace(there, arena_bytes=MIB), trace, [Piece(2 * MIB)]).spacers is None


def test_what_is_the_same_in_pages_is_searched_once(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    given = space(trace, 0.2)
    searched: list[list[Piece]] = []

    def counted(trace: Trace, schedule: Schedule, pieces: list[Piece]) -> tuple[Spacer, ...] | None:
        searched.append(pieces)
        return find_spacers(trace, schedule, pieces)

    monkeypatch.setattr(arranging, "find_spacers", counted)
    plan = Auto(evaluations=1000, thorough=False)(trace, H200, given.budget_bytes * 9 // 10)
    assert arranging.arranged(plan, trace, H200, Brim(given.budget_bytes), given).spacers is None
    assert len(searched) == 1
