"""The search for a plan whose memory can be arranged.

A plan may fill nearly all of a capped budget where the pieces of its memory find room (see `arrange`), and less where
not (see `brim`). So the planner is asked for less and less until an arrangement is found, or until none is needed.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from legroom.arrange import UNBOUNDED, Piece, Spacer, find_spacers, small_bytes, suffices
from legroom.brim import UNARRANGED, Brim
from legroom.errors import BudgetError
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.plan import Plan, checked, signature
from legroom.planners import Planner, tighter
from legroom.runtime.device import Device
from legroom.schedule import Schedule, check_schedule, lower

_PAGE_BYTES = 20 * 2**20  # memory is mapped by so much
_GUESSED = 0.985  # of the arena, where requests are not known one by one
_SLOW_SECONDS = 10.0  # for a planner: then it is not asked time and again
_SPARE_BYTES = 32 * 2**20  # for requests that are too small for the arena, beyond those that are known


@dataclass(frozen=True, slots=True)
class Space:
    """What there is to arrange a step's memory in."""

    budget_bytes: int
    floor_bytes: int  # the smallest budget for which there is a plan
    base_bytes: int  # alive before the step
    free_bytes: int  # that can be mapped in one piece
    pieces: tuple[Piece, ...]  # mapped already, and free


@dataclass(frozen=True, slots=True)
class Found:
    """A plan, and what goes with it."""

    plan: Plan
    schedule: Schedule
    hardware: Hardware
    brim: Brim | None  # with what it was planned for
    arena_bytes: int = 0  # to be mapped in one piece
    spacers: tuple[Spacer, ...] | None = ()  # None: no arrangement was found


def space_on(device: Device, trace: Trace, *, budget_bytes: int, floor_bytes: int, base_bytes: int) -> Space:
    """What the device has free for steps like this one, once its free memory is merged."""
    device.merge_free()
    free_bytes = budget_bytes - device.reserved_bytes() - small_bytes(trace) - _SPARE_BYTES
    return Space(budget_bytes, floor_bytes, base_bytes, free_bytes, tuple(device.free_pieces()))


def find_arranged(
    planner: Planner, trace: Trace, hardware: Hardware, brim: Brim, space: Space, before: Plan | None = None
) -> Found:
    """The plan that fills most of the budget without its memory falling into pieces.

    brim: from where on to try; it stays as it is, and what was tried last comes with the plan. before: a plan of the
    same step that filled more, if there was one.
    """
    brim = copy.copy(brim)
    found: Found | None = None
    ask: Callable[[Trace, Hardware, int], Plan] = planner
    if before is not None and before.trace_signature == signature(trace):
        ask = tighter(planner, before)
    while True:
        # Near the floor a plan that makes the allocator work for its room is better than none.
        usable = min(max(brim.usable_bytes, space.floor_bytes), space.budget_bytes)
        began = time.perf_counter()
        try:
            plan = checked(trace, ask(trace, hardware, usable))
        except BudgetError:
            if found is None:
                raise
            return found
        # The first time, most of it may be compilation.
        slow = ask is not planner and time.perf_counter() - began > _SLOW_SECONDS
        found = arranged(plan, trace, hardware, brim, space)
        if found.spacers is not None or not brim.arranged or usable <= space.floor_bytes:
            return found
        ask = tighter(planner, plan)
        brim.lower()
        while slow and brim.arranged:  # to the one that needs no arrangement
            brim.lower()


def arranged(plan: Plan, trace: Trace, hardware: Hardware, brim: Brim, space: Space) -> Found:
    """This plan, with an arrangement of its memory if there is one. brim: as for find_arranged()."""
    brim = copy.copy(brim)
    schedule = lower(trace, plan, hardware)
    peak_bytes = check_schedule(trace, schedule)
    if not schedule.instructions:
        return Found(plan, schedule, hardware, brim)
    # A plan that takes less than it may needs no more than that, if it can be arranged. And not all of it is counted on
    # where what backward asks for is known by its sum only: three plans for the GPT in 16.1 GiB that had fitted to the
    # last byte did not fit in the step.
    enough_bytes = int((peak_bytes - space.base_bytes) / UNARRANGED)
    tried: list[list[Piece]] = []
    for nbytes in (min(space.free_bytes, enough_bytes), space.free_bytes):
        arena_bytes = max(0, nbytes // _PAGE_BYTES * _PAGE_BYTES)
        pieces = with_arena(space.pieces, arena_bytes if trace.requests else int(arena_bytes * _GUESSED))
        if pieces in tried:
            break
        tried.append(pieces)
        spacers = find_spacers(trace, schedule, pieces)
        if spacers is not None:
            return Found(plan, schedule, hardware, brim, arena_bytes, spacers)
    return Found(plan, schedule, hardware, brim, 0, None)


def rearranged(found: Found, trace: Trace, pieces: Sequence[Piece]) -> Found:
    """The same now that its arena is mapped, with other spacers where those do not do: it may lie elsewhere."""
    mapped = any(piece.nbytes >= found.arena_bytes for piece in pieces)
    if not found.arena_bytes or found.spacers is None or not trace.requests or not mapped:
        return found  # nothing to arrange, or nothing known that would be better
    if suffices(trace, found.schedule, pieces, found.spacers):
        return found
    return replace(found, spacers=find_spacers(trace, found.schedule, pieces))


def with_arena(pieces: Sequence[Piece], arena_bytes: int) -> list[Piece]:
    """The free memory once there is so much in one piece, mapped as the allocator does it: behind the first piece, by
    addresses, that has room for it, with what is free there."""
    out = list(pieces)
    if any(piece.nbytes >= arena_bytes for piece in pieces):
        return out
    for place, (nbytes, beyond_bytes) in enumerate(pieces):
        if nbytes + beyond_bytes >= arena_bytes:
            mapped_bytes = min(-(-(arena_bytes - nbytes) // _PAGE_BYTES) * _PAGE_BYTES, beyond_bytes)
            rest_bytes = beyond_bytes if beyond_bytes == UNBOUNDED else beyond_bytes - mapped_bytes
            out[place] = Piece(nbytes + mapped_bytes, rest_bytes)
            return out
    return [*out, Piece(arena_bytes, UNBOUNDED)]
