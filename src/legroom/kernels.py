"""The compiled half of planning: lower decisions to a program, and run a program.

`lower_codes` is the only lowering there is; `schedule.lower` wraps its program into instructions, and the evaluator
runs it with `run_program`, which must agree to the nanosecond and the byte with `simulate()` and `check_schedule()`.

All compiled functions are in this one file: a cached function is not rebuilt when a file it calls into changes. They
allocate nothing: every kind of allocation costs numba a third of a second of compilation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

# isort: off
from legroom.tables import (
    G_BYTES, G_END, G_FIRST, G_IN, G_OUT, G_START, G_VALUE, NEVER, O_ALONE, O_ISSUE_NS, O_NS, O_READS, O_REPLAYABLE,
    O_WORKSPACE, O_WRITES, R_DUPLEX_IN, R_DUPLEX_OUT, R_IN, R_LATENCY, R_OUT, R_SHARE, R_SYNCHRONOUS, T_LEVEL, T_PEAK,
    V_BYTES, V_FIRST, V_FROM, V_STOP, V_UNTIL, V_WRITER, X_COMPUTE, X_HOST, X_ISSUE, Floats, Ints, Tables,
)  # fmt: skip
# isort: on

Codes = npt.NDArray[np.int8]

# Decision codes.
KEEP, OVERLAP, SYNC, RECOMPUTE, AHEAD = 0, 1, 2, 3, 4
# Instruction codes.
SWAP_OUT, RELEASE, DROP, PREFETCH, AWAIT, REPLAY = 0, 1, 2, 3, 4, 5
# Why a recomputation is impossible.
OK, NO_WRITER, NOT_REPLAYABLE = 0, 1, 2
# Columns of instructions and of replays.
I_KIND, I_GAP, I_COLUMNS = 0, 1, 2
P_COMPUTE, P_HOST, P_ISSUE, P_PEAK, P_FIRST, P_COUNT, P_COLUMNS = 0, 1, 2, 3, 4, 5, 6
# Columns of scratch memory.
WG_BACK, WG_RELEASE, WG_REUSE, WG_FETCH, WG_QUEUE, WG_DONE, WG_COPIED, WG_NEXT, WG_COLUMNS = 0, 1, 2, 3, 4, 5, 6, 7, 8
WO_FOUND, WO_SEEN, WV_MADE, WV_LAST_USE, WT_TIME, WT_FETCHING, WT_LATEST, WT_PEAK = 0, 1, 0, 1, 0, 1, 2, 3


class Program(NamedTuple):
    """A lowered plan. `failure` is (code, gap, op, value) where a replay is impossible; the rest is void then."""

    offsets: Ints  # instructions of tick t are rows offsets[t] .. offsets[t + 1] - 1
    instructions: Ints
    replays: Ints  # a row for each gap: lane effect, peak above the level at its start, its ops in `replay_ops`
    replay_ops: Ints  # as many as there is room for; lower_codes() returns how many there are
    failure: Ints


class Scratch(NamedTuple):
    gaps: Ints
    ops: Ints
    values: Ints
    ticks: Ints
    unsorted: Ints


def empty_program(tables: Tables, *, replay_room: int = 0) -> Program:
    ticks, gaps = len(tables.ticks), len(tables.gaps)
    return Program(
        offsets=np.zeros(ticks + 2, np.int64),
        instructions=np.zeros((5 * gaps, I_COLUMNS), np.int64),
        replays=np.zeros((gaps, P_COLUMNS), np.int64),
        replay_ops=np.zeros(replay_room, np.int64),
        failure=np.zeros(4, np.int64),
    )


def scratch(tables: Tables) -> Scratch:
    return Scratch(
        gaps=np.zeros((len(tables.gaps), WG_COLUMNS), np.int64),
        ops=np.zeros((len(tables.ops), 2), np.int64),
        values=np.zeros((len(tables.values), 2), np.int64),
        ticks=np.zeros((len(tables.ticks), 4), np.int64),
        unsorted=np.zeros((5 * len(tables.gaps), 3), np.int64),
    )


F = TypeVar("F", bound=Callable[..., Any])


def _compiled(function: F) -> F:
    try:
        return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy")(function))
    except RuntimeError:  # no place to write a cache: compile in each process instead
        return cast(F, numba.njit(nogil=True, error_model="numpy")(function))


# Scratch memory of replays is stamped with (epoch, gap), a number that only grows, so that nothing has to be cleared.


@_compiled
def _advance(compute: int, host: int, after_compute: int, after_host: int, issue: int) -> tuple[int, int]:
    """A run of ops on the lanes; see tables.lane_effect."""
    compute = max(compute + after_compute, host + after_host)
    return compute, compute if issue < 0 else host + issue


@_compiled
def _copy_ns(
    nbytes: int, start: int, other_free: int, undisturbed: int, alone: float, together: float, latency: int
) -> int:
    """How long a copy takes that begins at `start` while the other lane is known to be busy until `other_free`."""
    busy = other_free - start - latency
    if busy <= 0:
        return undisturbed
    shared = int(nbytes * together)
    if shared <= busy:
        return latency + shared
    return latency + busy + int((nbytes - int(busy / together)) * alone)


@_compiled
def _available(value: int, tick: int, codes: Codes, wg: Ints, gaps: Ints, values: Ints) -> bool:
    """Whether a replay at this tick finds the value in memory. A swapped one is called back for it by then."""
    if not values[value, V_FROM] <= tick <= values[value, V_UNTIL]:
        return False
    for gap in range(values[value, V_FIRST], values[value, V_STOP]):
        if gaps[gap, G_START] <= tick <= gaps[gap, G_END]:
            if codes[gap] == RECOMPUTE:
                return False
            wg[gap, WG_BACK] = min(wg[gap, WG_BACK], tick)
    return True


@_compiled
def _close(
    gap: int, stamp: int, wo: Ints, wg: Ints, codes: Codes, failure: Ints,
    gaps: Ints, values: Ints, ops: Ints, reads: Ints,
) -> int:  # fmt: skip
    """Collect into WO_FOUND, in program order, the ops that bring the gap's storage back. Their number, or -1."""
    count, cursor, reader = 0, -1, -1
    position, stop = 0, 1
    value = gaps[gap, G_VALUE]
    while cursor < count:
        if cursor < 0 or not _available(value, gaps[gap, G_END], codes, wg, gaps, values):
            writer = values[value, V_WRITER] if value >= 0 else -1
            if writer < 0 or not ops[writer, O_REPLAYABLE]:
                failure[0] = NO_WRITER if writer < 0 else NOT_REPLAYABLE
                failure[1], failure[2], failure[3] = gap, writer if writer >= 0 else reader, value
                return -1
            if wo[writer, WO_SEEN] != stamp:
                wo[writer, WO_SEEN] = stamp
                wo[count, WO_FOUND] = writer
                count += 1
        position += 1
        while position >= stop:  # this op is done: on to the reads of the next one found
            cursor += 1
            if cursor == count:
                break
            reader = wo[cursor, WO_FOUND]
            position, stop = ops[reader, O_READS], ops[reader + 1, O_READS]
        if cursor < count:
            value = reads[position]
    # Found from the last op backwards, so reversed it is almost in order and insertion takes linear time.
    for i in range(count >> 1):
        other = wo[i, WO_FOUND]
        wo[i, WO_FOUND] = wo[count - 1 - i, WO_FOUND]
        wo[count - 1 - i, WO_FOUND] = other
    for i in range(1, count):
        op, j = wo[i, WO_FOUND], i - 1
        while j >= 0 and wo[j, WO_FOUND] > op:
            wo[j + 1, WO_FOUND] = wo[j, WO_FOUND]
            j -= 1
        wo[j + 1, WO_FOUND] = op
    return count


@_compiled
def _replay_peak(
    target: int, stamp: int, count: int, wo: Ints, wv: Ints, values: Ints, ops: Ints, reads: Ints, writes: Ints
) -> int:
    """How far above its start a replay takes memory: the walk of schedule.Replay."""
    extra = peak = 0
    use = stamp * len(ops)  # uses by an earlier replay lie below
    for i in range(count):
        op = wo[i, WO_FOUND]
        for r in range(ops[op, O_READS], ops[op + 1, O_READS]):
            wv[reads[r], WV_LAST_USE] = use + op
    for i in range(count):
        op = wo[i, WO_FOUND]
        for w in range(ops[op, O_WRITES], ops[op + 1, O_WRITES]):
            before = writes[w, 1]
            if before >= 0 and wv[before, WV_MADE] == stamp and wv[before, WV_LAST_USE] == use + op:
                wv[before, WV_MADE] = 0  # the same bytes go on as the next version
            else:
                extra += values[writes[w, 0], V_BYTES]
        peak = max(peak, extra + ops[op, O_WORKSPACE])
        for r in range(ops[op, O_READS], ops[op + 1, O_READS]):
            value = reads[r]
            if wv[value, WV_MADE] == stamp and wv[value, WV_LAST_USE] == use + op:
                wv[value, WV_MADE] = 0
                extra -= values[value, V_BYTES]
        for w in range(ops[op, O_WRITES], ops[op + 1, O_WRITES]):
            value = writes[w, 0]
            if value == target or wv[value, WV_LAST_USE] > use + op:
                wv[value, WV_MADE] = stamp
            else:
                extra -= values[value, V_BYTES]
    return peak


@_compiled
def _replays(
    codes: Codes, epoch: int, wg: Ints, wo: Ints, wv: Ints, replays: Ints, replay_ops: Ints, failure: Ints, gaps: Ints,
    values: Ints, ops: Ints, reads: Ints, writes: Ints, synchronous: bool,
) -> int:  # fmt: skip
    """All replays; how many ops they have. WG_BACK becomes the tick by which each swapped gap is over."""
    used = 0
    for gap in range(len(codes)):
        if codes[gap] != RECOMPUTE:
            continue
        stamp = epoch * len(codes) + gap
        count = _close(gap, stamp, wo, wg, codes, failure, gaps, values, ops, reads)
        if count < 0:
            break
        compute, host, issued = 0, -NEVER, 0
        for i in range(count):
            op = wo[i, WO_FOUND]
            if used + i < len(replay_ops):
                replay_ops[used + i] = op
            if synchronous and i > 0:
                compute += ops[op, O_ISSUE_NS] + ops[op, O_NS]
                host += ops[op, O_ISSUE_NS] + ops[op, O_NS]
            else:
                issued += ops[op, O_ISSUE_NS]
                compute, host = compute + ops[op, O_NS], max(host, issued) + ops[op, O_NS]
        replays[gap, P_COMPUTE], replays[gap, P_HOST] = compute, host
        replays[gap, P_ISSUE] = -1 if synchronous else issued
        if count == 1:  # most of them: nothing is made on the way
            replays[gap, P_PEAK] = ops[wo[0, WO_FOUND], O_ALONE]
        else:
            replays[gap, P_PEAK] = _replay_peak(gaps[gap, G_VALUE], stamp, count, wo, wv, values, ops, reads, writes)
        replays[gap, P_FIRST], replays[gap, P_COUNT] = used, count
        used += count
    return used


@_compiled
def _releases(
    codes: Codes, wg: Ints, wt: Ints, replays: Ints, gaps: Ints, order: Ints, segments: Ints, rates: Floats
) -> None:
    """Model the step up to the fetches: when each tick is reached, and the first tick that finds each copy out done.

    Copies wait for each other on the one lane out, so they end in the order in which they start. A copy that is not
    done when its storage must be back is not worth starting: WG_RELEASE stays -1.
    """
    synchronous, share = rates[R_SYNCHRONOUS] > 0.0, rates[R_SHARE]
    head = tail = starting = ending = out_free = compute = host = 0
    for tick in range(len(wt)):
        a, b, issue = segments[tick, X_COMPUTE], segments[tick, X_HOST], segments[tick, X_ISSUE]
        compute, host = _advance(compute, host, a, b, issue)
        wt[tick, WT_TIME] = compute  # never behind the host, as an op ends after it is issued
        while head < tail and wg[head, WG_DONE] <= compute:
            gap = wg[head, WG_QUEUE]
            head += 1
            if tick < wg[gap, WG_BACK]:
                wg[gap, WG_RELEASE] = tick
                wg[gaps[gap, G_FIRST], WG_COPIED] = 1
        while starting < len(codes) and gaps[order[0, starting], G_START] == tick:
            gap = order[0, starting]
            starting += 1
            if codes[gap] == KEEP or codes[gap] == RECOMPUTE or wg[gap, WG_BACK] <= tick:
                continue
            if codes[gap] == SYNC:
                wt[wg[gap, WG_BACK], WT_FETCHING] += gaps[gap, G_IN]
            if wg[gaps[gap, G_FIRST], WG_COPIED]:
                wg[gap, WG_RELEASE], wg[gap, WG_REUSE] = tick, 1
                continue
            out_free = max(out_free, compute) + gaps[gap, G_OUT]
            compute += int(gaps[gap, G_OUT] * share)
            if codes[gap] == SYNC:
                compute = max(compute, out_free)
                wg[gap, WG_RELEASE] = tick
                wg[gaps[gap, G_FIRST], WG_COPIED] = 1
            else:
                wg[tail, WG_QUEUE], wg[tail, WG_DONE] = gap, out_free
                tail += 1
        compute += wt[tick, WT_FETCHING]
        if synchronous:
            host = max(host, compute)
        while ending < len(codes) and gaps[order[1, ending], G_END] == tick:
            gap = order[1, ending]
            ending += 1
            if codes[gap] == RECOMPUTE:
                a, b, issue = replays[gap, P_COMPUTE], replays[gap, P_HOST], replays[gap, P_ISSUE]
                compute, host = _advance(compute, host, a, b, issue)


@_compiled
def _fetches(codes: Codes, ahead: Ints, wg: Ints, wt: Ints, gaps: Ints) -> None:
    """When each copy back starts, reserving the lane in from the end of the step towards its beginning."""
    for gap in range(len(codes)):
        if wg[gap, WG_RELEASE] >= 0:
            wg[gap, WG_NEXT] = wt[wg[gap, WG_BACK], WT_LATEST]
            wt[wg[gap, WG_BACK], WT_LATEST] = gap
    lane = NEVER
    near = len(wt) - 1  # where the last search ended: the next one is seldom far
    for tick in range(len(wt) - 1, -1, -1):
        gap = wt[tick, WT_LATEST]
        while gap >= 0:
            earliest, at = wg[gap, WG_RELEASE] + 1, tick
            if codes[gap] == AHEAD:
                at = max(tick - ahead[gap], earliest)
            elif codes[gap] == OVERLAP:
                # The lead of an eighth covers a lane slowed by copies out; a fetch that is late stalls the whole step.
                start = min(wt[tick, WT_TIME], lane) - gaps[gap, G_IN] - (gaps[gap, G_IN] >> 3)
                near = min(near, tick)
                while near > 0 and wt[near, WT_TIME] > start:
                    near -= 1
                while near < tick and wt[near + 1, WT_TIME] <= start:
                    near += 1
                at = max(near, earliest)
                lane = min(lane, max(start, wt[at, WT_TIME]))
            wg[gap, WG_FETCH] = at
            gap = wg[gap, WG_NEXT]


@_compiled
def _emit(codes: Codes, wg: Ints, unsorted: Ints, gaps: Ints, offsets: Ints, instructions: Ints) -> None:
    """The instructions by tick. Within a tick: free, copy out, free what waits, what is needed now, fetch ahead."""
    count = active = 0
    for gap in range(len(codes)):
        if codes[gap] == RECOMPUTE or wg[gap, WG_RELEASE] >= 0:
            wg[active, WG_QUEUE] = gap
            active += 1
    for stage in range(6):
        for i in range(active):
            gap = wg[i, WG_QUEUE]
            kind, at = -1, gaps[gap, G_START]
            if codes[gap] == RECOMPUTE:
                if stage == 0:
                    kind = DROP
                elif stage == 4:
                    kind, at = REPLAY, gaps[gap, G_END]
            elif stage == 0:
                if wg[gap, WG_REUSE]:
                    kind = DROP
                elif codes[gap] != SYNC:
                    kind, at = RELEASE, wg[gap, WG_RELEASE]
            elif stage == 1:
                kind = -1 if wg[gap, WG_REUSE] else SWAP_OUT
            elif stage == 2:
                kind = RELEASE if codes[gap] == SYNC and not wg[gap, WG_REUSE] else -1
            elif stage == 3:
                kind, at = AWAIT, wg[gap, WG_BACK]
                if wg[gap, WG_FETCH] == at:
                    unsorted[count, 0], unsorted[count, 1], unsorted[count, 2] = at, PREFETCH, gap
                    offsets[at + 2] += 1
                    count += 1
            elif stage == 5 and wg[gap, WG_FETCH] < wg[gap, WG_BACK]:
                kind, at = PREFETCH, wg[gap, WG_FETCH]
            if kind >= 0:
                unsorted[count, 0], unsorted[count, 1], unsorted[count, 2] = at, kind, gap
                offsets[at + 2] += 1
                count += 1
    for tick in range(2, len(offsets)):
        offsets[tick] += offsets[tick - 1]
    for i in range(count):
        place = offsets[unsorted[i, 0] + 1]
        offsets[unsorted[i, 0] + 1] = place + 1
        instructions[place, I_KIND], instructions[place, I_GAP] = unsorted[i, 1], unsorted[i, 2]


@_compiled
def lower_codes(
    codes: Codes, ahead: Ints, epoch: int,
    gaps: Ints, values: Ints, ops: Ints, reads: Ints, writes: Ints, ticks: Ints, segments: Ints, order: Ints,
    rates: Floats,
    wg: Ints, wo: Ints, wv: Ints, wt: Ints, unsorted: Ints,
    offsets: Ints, instructions: Ints, replays: Ints, replay_ops: Ints, failure: Ints,
) -> int:  # fmt: skip
    """Lower one decision code for each gap into a program, and return how many ops its replays have.

    `ahead` is read for AHEAD only. `codes` may be changed: where a gap has no whole segment, it becomes KEEP. `epoch`
    is above zero and above that of any call before with the same scratch memory.
    """
    for gap in range(len(codes)):
        wg[gap, WG_BACK] = gaps[gap, G_END]
        wg[gap, WG_RELEASE] = -1
        wg[gap, WG_REUSE] = wg[gap, WG_COPIED] = 0
        if gaps[gap, G_START] >= gaps[gap, G_END]:
            codes[gap] = KEEP
    for tick in range(len(wt)):
        wt[tick, WT_FETCHING], wt[tick, WT_LATEST] = 0, -1
    for i in range(len(offsets)):
        offsets[i] = 0
    failure[0] = OK
    synchronous = rates[R_SYNCHRONOUS] > 0.0
    used = _replays(
        codes, epoch, wg, wo, wv, replays, replay_ops, failure, gaps, values, ops, reads, writes, synchronous
    )
    if failure[0] == OK:
        _releases(codes, wg, wt, replays, gaps, order, segments, rates)
        _fetches(codes, ahead, wg, wt, gaps)
        _emit(codes, wg, unsorted, gaps, offsets, instructions)
    return used


@_compiled
def run_program(
    offsets: Ints, instructions: Ints, replays: Ints, limit: int,
    gaps: Ints, ticks: Ints, segments: Ints, rates: Floats, wg: Ints, wt: Ints,
) -> tuple[int, int, int]:  # fmt: skip
    """(nanoseconds, peak bytes, bytes above the limit summed over ticks) of a program; WT_PEAK has each tick's peak.

    This is `simulate()` and `check_schedule()` without their records.
    """
    synchronous, latency, share = rates[R_SYNCHRONOUS] > 0.0, int(rates[R_LATENCY]), rates[R_SHARE]
    out_free = in_free = absent = compute = host = 0
    highest = excess = 0
    for gap in range(len(gaps)):
        wg[gap, WG_DONE] = 0
    for tick in range(len(ticks)):
        a, b, issue = segments[tick, X_COMPUTE], segments[tick, X_HOST], segments[tick, X_ISSUE]
        compute, host = _advance(compute, host, a, b, issue)
        level, peak = ticks[tick, T_LEVEL], 0
        for i in range(offsets[tick], offsets[tick + 1]):
            kind, gap = instructions[i, I_KIND], instructions[i, I_GAP]
            nbytes, storage = gaps[gap, G_BYTES], gaps[gap, G_FIRST]
            if kind == SWAP_OUT:
                start = max(out_free, compute)
                ns = _copy_ns(nbytes, start, in_free, gaps[gap, G_OUT], rates[R_OUT], rates[R_DUPLEX_OUT], latency)
                out_free = start + ns
                wg[storage, WG_DONE] = out_free
                compute += int(ns * share)
            elif kind == RELEASE:
                compute = max(compute, wg[storage, WG_DONE])
                absent += nbytes
            elif kind == DROP:
                absent += nbytes
            elif kind == PREFETCH:
                start = max(in_free, compute)  # the copy out is over: compute waited for it at the release
                ns = _copy_ns(nbytes, start, out_free, gaps[gap, G_IN], rates[R_IN], rates[R_DUPLEX_IN], latency)
                in_free = start + ns
                wg[storage, WG_DONE] = in_free
                compute += int(ns * share)
                absent -= nbytes
                peak = max(peak, level - absent)
            elif kind == AWAIT:
                compute = max(compute, wg[storage, WG_DONE])
            else:
                peak = max(peak, level - absent + replays[gap, P_PEAK])
                a, b, issue = replays[gap, P_COMPUTE], replays[gap, P_HOST], replays[gap, P_ISSUE]
                compute, host = _advance(compute, host, a, b, issue)
                absent -= nbytes
                peak = max(peak, level - absent)
            if synchronous:
                host = max(host, compute)
        peak = max(peak, ticks[tick, T_PEAK] - absent)
        wt[tick, WT_PEAK] = peak
        highest = max(highest, peak)
        excess += max(0, peak - limit)
    last = len(ticks)
    a, b, issue = segments[last, X_COMPUTE], segments[last, X_HOST], segments[last, X_ISSUE]
    compute, host = _advance(compute, host, a, b, issue)
    return compute, highest, excess
