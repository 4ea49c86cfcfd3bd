"""The walk through the ticks: written from what was decided, and run."""

from __future__ import annotations

from typing import Any

import numpy as np

from legroom.kernels.codes import *
from legroom.kernels.compiling import inner
from legroom.kernels.lanes import advance, copy_ns, pass_tick
from legroom.tables import Floats, Ints


@inner
def emit_walk(
    codes: Codes, starts: Words, ends: Words, copies: Ints, back: Words, away: Words, release: Ints, fetch: Words,
    reused: Words, lists: Ints, offsets: Words, steps: Words, freed: Ints,
) -> None:  # fmt: skip
    """The steps of the walk by tick. Within a tick: copy out, what is needed now, replay, fetch ahead; then by gap."""
    many = len(codes)
    offsets[:] = 0
    # A list for each of these, in which an entry is tick << 32 | step. No branch, as above: a list always gets an
    # entry, and the next one takes its place unless it counts.
    out, need, replay, early = 0, many, 2 * many, 3 * many
    for gap in range(many):
        this, code, start, end, at = gap << KIND_BITS, codes[gap], starts[gap], back[gap], fetch[gap]
        swapped = release[gap] >= 0
        copied = swapped & (reused[gap] == 0)
        ahead = swapped & (at < end)
        again = away[gap] == REPLAYED
        lists[out & LOW] = start * TICKS | this | (OUT_NOW if code == SYNC else OUT)
        lists[need & LOW] = end * TICKS | this | (WAIT if ahead else IN_NOW)
        lists[replay & LOW] = ends[gap] * TICKS | this | AGAIN
        lists[early & LOW] = at * TICKS | this | IN
        out += copied
        need += swapped
        replay += again
        early += ahead
        # A product, as an alternative would be compiled to a branch.
        freed[start] += copies[gap * COPY + NBYTES] * ((code == RECOMPUTE) | (code == SHARED) & (end > start))
    for first, stop in (0, out), (many, need), (2 * many, replay), (3 * many, early):
        for i in range(first, stop):
            offsets[(lists[i & LOW] >> 32 & LOW) + 2] += 1
    total = 0
    for tick in range(len(offsets)):
        total += offsets[tick]
        offsets[tick] = total
    for first, stop in (0, out), (many, need), (2 * many, replay), (3 * many, early):
        for i in range(first, stop):
            entry = lists[i & LOW]
            after = (entry >> 32 & LOW) + 1
            place = offsets[after]
            offsets[after] = place + 1
            steps[place] = entry & LOW


@inner
def run_walk(
    limit: int, copies: Ints, lanes: Ints, heights: Ints, rates: Floats, done: Ints, peaks: Ints, offsets: Words,
    steps: Words, freed: Ints, charges: Charges, waits: Words, replays: Ints,
) -> tuple[int, int, int]:  # fmt: skip
    """(nanoseconds, peak bytes, bytes above the limit summed over ticks); `peaks` has each tick's peak.

    This is `simulate()` and `check_schedule()` without their records.
    """
    synchronous, latency, share = rates[RATE_SYNCHRONOUS] > 0.0, int(rates[RATE_LATENCY]), rates[RATE_SHARE]
    out_ns, release_ns = int(rates[HOST_OUT]), int(rates[HOST_RELEASE])
    fetch_ns, await_ns = int(rates[HOST_IN]), int(rates[HOST_AWAIT])
    zero: Any = np.int64(0)  # as above
    compute = host = out_free = in_free = out_now = zero
    absent = highest = excess = owed = 0
    done[len(done) - 1] = 0  # for ticks that wait for nothing
    for tick in range(len(peaks)):
        compute, host = pass_tick(compute, host, tick, lanes)
        if charges is not None:
            host += charges[tick]
            compute = max(compute, host)
        compute = max(compute, done[waits[tick]])
        absent += freed[tick]
        level, peak = heights[tick * HEIGHTS + LEVEL], 0
        for position in range(offsets[tick], offsets[tick + 1]):
            kind, gap = steps[position] & KIND_MASK, steps[position] >> KIND_BITS
            nbytes = copies[gap * COPY + NBYTES]
            if kind <= OUT_NOW:
                if charges is not None:
                    host += out_ns
                    owed += release_ns * (kind == OUT_NOW)
                    compute = max(compute, host)
                start = max(out_free, compute)
                alone, together = rates[RATE_OUT], rates[RATE_DUPLEX_OUT]
                ns = copy_ns(nbytes, start, in_free, copies[gap * COPY + OUT_NS], alone, together, latency)
                done[gap] = out_free = start + ns
                if share > 0.0:
                    compute += int(ns * share)
                # Waited for after all copies out of this tick are under way.
                out_now = out_free if kind == OUT_NOW else out_now
                absent += nbytes if kind == OUT_NOW else 0
                continue
            compute = max(compute, out_now)
            if charges is not None:
                host += owed
                owed = 0
            if kind <= WAIT:
                # Fetches and waits for them come in no order that could be foretold, so there is no branch: a wait
                # is a fetch that changes nothing.
                fetches, waits_now = kind <= IN, kind != IN
                if charges is not None:
                    host += fetch_ns * fetches
                    compute = max(compute, host)
                start = max(in_free, compute)  # the copy out is over: compute waited for it
                alone, together = rates[RATE_IN], rates[RATE_DUPLEX_IN]
                ns = copy_ns(nbytes, start, out_free, copies[gap * COPY + IN_NS], alone, together, latency)
                over = done[gap]
                over += (start + ns - over) * fetches
                done[gap] = over
                in_free = max(in_free, over)
                if share > 0.0:
                    compute += int(ns * share) * fetches
                absent -= nbytes * fetches
                peak = max(peak, (level - absent) * fetches)
                compute = max(compute, over * waits_now)
                if charges is not None:
                    host += await_ns * waits_now  # compute comes up to it where that matters next
            else:
                if synchronous:
                    host = max(host, compute)
                row = gap * ROW
                peak = max(peak, level - absent + replays[row + PEAK])
                compute, host = advance(
                    compute, host, replays[row + COMPUTE], replays[row + HOST], replays[row + ISSUE]
                )
                absent -= replays[row + BYTES]
                peak = max(peak, level - absent)
        compute = max(compute, out_now)
        if charges is not None:
            host += owed
            owed = 0
        if synchronous:
            host = max(host, compute)
        peak = max(peak, heights[tick * HEIGHTS + TOP] - absent)
        peaks[tick] = peak
        highest = max(highest, peak)
        excess += max(0, peak - limit)
    last = len(peaks)
    compute, host = pass_tick(compute, host, last, lanes)
    return max(compute, host), highest, excess
