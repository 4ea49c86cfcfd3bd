"""When copies out end, so that memory is freed, and when fetches begin."""

from __future__ import annotations

from typing import Any

import numpy as np

from legroom.kernels.codes import *
from legroom.kernels.compiling import inner
from legroom.kernels.lanes import advance, pass_tick
from legroom.tables import Floats, Ints


@inner
def _call_back(
    gap: int, freed: int, codes: Codes, ahead: Ints, back: Words, fetch: Words, following: Words, latest: Words
) -> None:
    """See to it that a storage freed at tick `freed` is fetched."""
    if codes[gap] == OVERLAP:  # later, in the order of need; those needed at one tick by falling gap
        tick, before = back[gap], -1
        after = latest[tick] - 1
        while after > gap:
            before, after = after, following[after] - 1
        following[gap] = after + 1
        if before < 0:
            latest[tick] = gap + 1
        else:
            following[before] = gap + 1
    elif codes[gap] == AHEAD:
        fetch[gap] = max(back[gap] - ahead[gap], freed + 1)
    else:
        fetch[gap] = back[gap]


@inner
def make_releases(
    codes: Codes, ahead: Ints, starts: Words, copies: Ints, firsts: Words, lanes: Ints, events: Ints, rates: Floats,
    replays: Ints, back: Words, away: Words, release: Ints, fetch: Words, copied: Words, reused: Words, queue: Words,
    done: Ints, following: Words, lists: Ints, times: Ints, waiting: Ints, due: Ints, latest: Words, freed: Ints,
    charges: Charges, waits: Words,
) -> None:  # fmt: skip
    """Model the step up to the fetches: when each tick is reached, and the first tick that finds each copy out done.

    Copies wait for each other on the one lane out, so they end in the order in which they start. A copy that is not
    done when its storage must be back is not worth starting: `release` stays -1. What the host does for a copy back is
    taken to be done at the beginning of the tick at which that must be over.
    """
    synchronous, share = rates[RATE_SYNCHRONOUS] > 0.0, rates[RATE_SHARE]
    out_ns, release_ns, drop_ns = int(rates[HOST_OUT]), int(rates[HOST_RELEASE]), int(rates[HOST_DROP])
    back_ns = int(rates[HOST_IN]) + int(rates[HOST_AWAIT])
    # First the events that matter: where swaps start and replays end. No branch here: nothing could foretell it.
    count = 0
    for i in range(len(events)):
        event = events[i]
        lists[count] = event
        count += (MATTERS >> (codes[(event & LOW) >> 1] << 1 | event & 1)) & 1
    if charges is not None:
        charges[:] = int(rates[HOST_TICK]) * (count > 0)
        for gap in range(len(codes)):
            goes = (codes[gap] == RECOMPUTE) | (codes[gap] == SHARED) & (back[gap] > starts[gap])
            charges[starts[gap]] += drop_ns * goes
        for i in range(len(due)):
            due[i] = charges[i]
    zero: Any = np.int64(0)  # not a literal, for which _advance would be compiled once more
    compute = host = out_free = zero
    head = tail = reached = 0
    next_done = FAR
    for i in range(count + 1):
        event = lists[i] if i < count else len(times) - 1 << 32
        while reached <= event >> 32:  # `waiting` is for the tick before
            tick = reached & LOW
            compute += waiting[tick]
            waiting[tick] = 0
            if synchronous:
                host = max(host, compute)
            compute, host = pass_tick(compute, host, tick, lanes)
            if charges is not None:
                host += due[tick]
                compute = max(compute, host)
            freed[tick], waits[tick] = 0, len(codes)
            times[tick] = compute  # never behind the host: what that has not issued cannot begin
            while next_done <= compute:
                gap = queue[head & LOW] & LOW
                head += 1
                next_done = done[head & LOW] if head < tail else FAR
                if tick < back[gap]:
                    release[gap] = tick
                    copied[firsts[gap]] = 1
                    freed[tick] += copies[gap * COPY + NBYTES]
                    waits[tick] = gap  # the last of them is the last to be done
                    _call_back(gap, tick, codes, ahead, back, fetch, following, latest)
                    if charges is not None:
                        charges[tick] += release_ns
                        due[back[gap]] += back_ns
                        host += release_ns
            reached += 1
        if i == count:
            break
        gap, tick = (event & LOW) >> 1, (event >> 32) & LOW
        if event & 1:  # a replay, after what is waited for at this tick
            if away[gap] != REPLAYED:
                continue
            row = gap * ROW
            compute += waiting[tick + 1]
            waiting[tick + 1] = 0
            if synchronous:
                host = max(host, compute)
            compute, host = advance(compute, host, replays[row + COMPUTE], replays[row + HOST], replays[row + ISSUE])
        elif back[gap] > tick:
            sync = codes[gap] == SYNC
            waiting[back[gap] + 1] += copies[gap * COPY + IN_NS] * sync
            if copied[firsts[gap]]:
                release[gap], reused[gap] = tick, 1
                freed[tick] += copies[gap * COPY + NBYTES]
                _call_back(gap, tick, codes, ahead, back, fetch, following, latest)
                if charges is not None:
                    charges[tick] += drop_ns
                    due[back[gap]] += back_ns
                    host += drop_ns
                continue
            if charges is not None:
                host += out_ns + release_ns * sync
                due[back[gap]] += back_ns * sync
                compute = max(compute, host)
            out_free = max(out_free, compute) + copies[gap * COPY + OUT_NS]
            if share > 0.0:
                compute += int(copies[gap * COPY + OUT_NS] * share)
            # A synchronous one is released here and now, the others wait in the queue. No branch, as above.
            compute = max(compute, out_free if sync else 0)
            release[gap] = tick if sync else -1
            copied[firsts[gap]] = 1 if sync else 0
            fetch[gap] = back[gap]
            next_done = out_free if head == tail and not sync else next_done
            queue[tail & LOW], done[tail & LOW] = gap, out_free
            tail += 0 if sync else 1
    waiting[len(times)] = 0


@inner
def make_fetches(copies: Ints, release: Ints, fetch: Words, following: Words, times: Ints, latest: Words) -> None:
    """When each copy back starts, reserving the lane in from the end of the step towards its beginning."""
    lane = FAR
    near = len(times) - 1  # where the last search ended: the next one is seldom far
    for tick in range(len(times) - 1, -1, -1):
        gap = latest[tick] - 1
        latest[tick] = 0
        while gap >= 0:
            # The lead of an eighth covers a lane slowed by copies out; a fetch that is late stalls the whole step.
            start = min(times[tick], lane) - copies[gap * COPY + IN_NS] - (copies[gap * COPY + IN_NS] >> 3)
            near = min(near, tick)
            while near > 0 and times[near] > start:
                near -= 1
            while near < tick and times[(near & LOW) + 1] <= start:
                near += 1
            at = max(near, release[gap] + 1) & LOW
            lane = min(lane, max(start, times[at]))
            fetch[gap] = at
            gap = following[gap] - 1
