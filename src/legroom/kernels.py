"""The compiled half of planning: lower decisions to a program, and run a program.

`lower_codes` is the only lowering there is; `schedule.lower` wraps its program into instructions, and the evaluator
runs it with `run_program`, which must agree to the nanosecond and the byte with `simulate()` and `check_schedule()`.

All compiled functions are in this one file, and so are the constants they freeze: a cached function is not rebuilt when
another file changes. They take flat arrays, packed from the tables: row r of a table has its columns at r * (length of
a row) + column, which costs half the compilation of two-dimensional access. They allocate nothing: every kind of
allocation costs numba a third of a second of compilation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

from legroom import tables as t
from legroom.tables import Floats, Ints, Tables

Codes = npt.NDArray[np.int8]
Ints32 = npt.NDArray[np.int32]

# Decision codes.
KEEP, OVERLAP, SYNC, RECOMPUTE, AHEAD = 0, 1, 2, 3, 4
# Instruction codes. An instruction is gap << KIND_BITS | code.
SWAP_OUT, RELEASE, DROP, PREFETCH, AWAIT, REPLAY, KIND_BITS, KIND_MASK = 0, 1, 2, 3, 4, 5, 3, 7
# Why a recomputation is impossible.
OK, NO_WRITER, NOT_REPLAYABLE = 0, 1, 2
# More than is worth keeping: see `fixed`.
TOO_LONG = -2

# Columns, and the length of a row. Gaps, ticks (what the segment before does to the lanes, then the memory), ops:
START, END, NBYTES, OUT_NS, IN_NS, FIRST, VALUE, WRITER, GAP = 0, 1, 2, 3, 4, 5, 6, 7, 8
COMPUTE, HOST, ISSUE, LEVEL, PEAK, TICK = 0, 1, 2, 3, 4, 5
NS, ISSUE_NS, WORKSPACE, REPLAYABLE, READS, WRITES, ALONE, OP = 0, 1, 2, 3, 4, 5, 6, 8
# What an op reads, with all there is to know about the value; what it writes:
READ_VALUE, READ_FROM, READ_UNTIL, READ_FIRST, READ_STOP, READ_WRITER, READ_BYTES, READ = 0, 1, 2, 3, 4, 5, 6, 8
WRITE_VALUE, WRITE_BEFORE, WRITE_BYTES, WRITE = 0, 1, 2, 4
# Replays begin as ticks do. REPLAY_OP and REPLAY_OPS: where its ops are in `replay_ops`, and how many. NEEDS and
# NEEDS_STOP: which gaps in `needs` stand in its way if they are recomputed.
REPLAY_PEAK, REPLAY_OP, REPLAY_OPS, NEEDS, NEEDS_STOP, ROW = 3, 4, 5, 6, 7, 8
# Rates.
RATE_OUT, RATE_IN, RATE_DUPLEX_OUT, RATE_DUPLEX_IN, RATE_SHARE, RATE_LATENCY, RATE_SYNCHRONOUS = 0, 1, 2, 3, 4, 5, 6

FAR = 2**62  # later than any time


class Packed(NamedTuple):
    """The tables as the kernels take them."""

    gaps: Ints
    ends: Ints  # of gaps, once more by themselves
    ticks: Ints  # one more than there are: the last is the end of the step
    ops: Ints  # one more than there are
    reads: Ints
    writes: Ints
    by_start: Ints
    by_end: Ints
    rates: Floats
    # The replay of each gap while nothing it reads is recomputed too, as in Program.replays; REPLAY_OPS is 0 where it is
    # not known, impossible or TOO_LONG. Most replays of most plans are just this.
    fixed: Ints
    needs: Ints


class Program(NamedTuple):
    """A lowered plan. `failure` is (code, gap, op, value) where a replay is impossible; the rest is void then."""

    offsets: Ints32  # instructions of tick t are offsets[t] .. offsets[t + 1] - 1
    instructions: Ints32
    replays: Ints  # a row for each gap: lane effect, peak above the level at its start, its ops in `replay_ops`
    replay_ops: Ints  # as many as there is room for; lower_codes() returns how many there are
    failure: Ints


class Scratch(NamedTuple):
    """Memory of the kernels. `seen`, `made` and `last_use` hold stamps, numbers that only grow: nothing is cleared."""

    back: Ints  # gap: the tick at which its storage must be back
    release: Ints  # gap: the tick at which it is freed, -1 for not at all
    fetch: Ints  # gap: the tick at which the copy back starts
    copied: Ints  # first gap of a storage: whether the host has a copy
    reused: Ints  # gap: whether it needs no copy out
    queue: Ints
    done: Ints  # when copies are over
    following: Ints
    lists: Ints
    times: Ints  # tick: when it is reached
    waiting: Ints  # tick: nanoseconds of fetching in it, then the gap that is fetched for it; zero between calls
    found: Ints
    seen: Ints  # op
    met: Ints
    made: Ints  # value
    last_use: Ints  # value
    peaks: Ints  # tick


def pack(tables: Tables) -> Packed:
    gaps, values, ops = tables.gaps, tables.values, tables.ops
    value = gaps[:, t.G_VALUE]
    writer = np.append(values[:, t.V_WRITER], -1)[value]  # value -1 has none
    columns = [gaps[:, c] for c in (t.G_START, t.G_END, t.G_BYTES, t.G_OUT, t.G_IN, t.G_FIRST)]
    memory = np.vstack([tables.ticks[:, [t.T_LEVEL, t.T_PEAK]], np.zeros((1, 2), np.int64)])
    read = values[tables.reads]
    about = [read[:, c] for c in (t.V_FROM, t.V_UNTIL, t.V_FIRST, t.V_STOP, t.V_WRITER, t.V_BYTES)]
    written, before = tables.writes[:, 0], tables.writes[:, 1]
    lanes = [tables.segments[:, c] for c in (t.X_COMPUTE, t.X_HOST, t.X_ISSUE)]
    costs = (t.O_NS, t.O_ISSUE_NS, t.O_WORKSPACE, t.O_REPLAYABLE, t.O_READS, t.O_WRITES, t.O_ALONE)
    speeds = (t.R_OUT, t.R_IN, t.R_DUPLEX_OUT, t.R_DUPLEX_IN, t.R_SHARE, t.R_LATENCY, t.R_SYNCHRONOUS)
    return Packed(
        gaps=_flat([*columns, value, writer], GAP),
        ends=gaps[:, t.G_END].copy(),
        ticks=_flat([*lanes, *memory.T], TICK),
        ops=_flat([ops[:, c] for c in costs], OP),
        reads=_flat([tables.reads, *about], READ),
        writes=_flat([written, before, values[written, t.V_BYTES]], WRITE),
        by_start=tables.order[0].copy(),
        by_end=tables.order[1].copy(),
        rates=tables.rates[list(speeds)],
        fixed=np.zeros(len(gaps) * ROW, np.int64),
        needs=np.zeros(0, np.int64),
    )


def with_fixed_replays(packed: Packed, work: Scratch) -> Packed:
    """With the replays that depend on no other decision worked out beforehand."""
    room = len(packed.ends)
    while True:
        needs = np.zeros(room, np.int64)
        used = fix_replays(
            np.zeros(len(packed.ends), np.int8), packed.fixed, needs, np.zeros(4, np.int64), packed.gaps, packed.ops,
            packed.reads, packed.writes, packed.rates, work.found, work.seen, work.met, work.made, work.last_use,
        )  # fmt: skip
        work.seen[:] = work.made[:] = work.last_use[:] = 0
        if used <= room:
            return packed._replace(needs=needs[:used].copy())
        room = used


def possible_codes(codes: Codes, tables: Tables) -> Codes:
    """What can be done about gaps without a whole segment is nothing."""
    return np.where(tables.gaps[:, t.G_START] < tables.gaps[:, t.G_END], codes, KEEP).astype(np.int8)


def empty_program(packed: Packed, *, replay_room: int = 0) -> Program:
    ticks, gaps = len(packed.ticks) // TICK - 1, len(packed.ends)
    return Program(
        offsets=np.zeros(ticks + 2, np.int32),
        instructions=np.zeros(5 * gaps, np.int32),
        replays=np.zeros(gaps * ROW, np.int64),
        replay_ops=np.zeros(replay_room, np.int64),
        failure=np.zeros(4, np.int64),
    )


def scratch(packed: Packed, tables: Tables) -> Scratch:
    ticks, gaps, ops, values = len(tables.ticks), len(tables.gaps), len(tables.ops), len(tables.values)
    sizes = Scratch(
        back=gaps, release=gaps, fetch=gaps, copied=gaps, reused=gaps, queue=2 * gaps + 2, done=gaps, following=gaps,
        lists=7 * gaps, times=ticks, waiting=ticks, found=ops, seen=ops, met=len(tables.reads), made=values,
        last_use=values, peaks=ticks,
    )  # fmt: skip
    return Scratch(*(np.zeros(size, np.int64) for size in sizes))  # type: ignore[call-overload]


def _flat(columns: list[Ints], length: int) -> Ints:
    rows = np.zeros((len(columns[0]), length), np.int64)
    for index, column in enumerate(columns):
        rows[:, index] = column
    return rows.reshape(-1)


F = TypeVar("F", bound=Callable[..., Any])


def _compiled(function: F) -> F:
    try:
        return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy", _nrt=False)(function))
    except RuntimeError:  # no place to write a cache: compile in each process instead
        return cast(F, numba.njit(nogil=True, error_model="numpy")(function))


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
def _close(
    gap: int, stamp: int, most: int, codes: Codes, failure: Ints, gaps: Ints, ops: Ints, reads: Ints,
    found: Ints, seen: Ints, met: Ints,
) -> tuple[int, int]:  # fmt: skip
    """Collect into `found`, in program order, the ops that bring the gap's storage back.

    Returns how many, or -1 where it is impossible, or TOO_LONG; and the number of gaps in `met`, whose storages are
    read and must be back by then.
    """
    tick = gaps[gap * GAP + END]
    value, writer, reader = gaps[gap * GAP + VALUE], gaps[gap * GAP + WRITER], -1
    count = cursor = away = position = stop = 0
    while True:
        # Here `value` is not in memory: its writer is replayed.
        if writer < 0 or not ops[writer * OP + REPLAYABLE]:
            failure[0] = NO_WRITER if writer < 0 else NOT_REPLAYABLE
            failure[1], failure[2], failure[3] = gap, writer if writer >= 0 else reader, value
            return -1, away
        if seen[writer] != stamp:
            if count == most:
                return TOO_LONG, away
            seen[writer] = stamp
            found[count] = writer
            count += 1
        # On to the next value read that is not in memory.
        missing = False
        while not missing:
            while position >= stop and cursor < count:
                reader = found[cursor]
                cursor += 1
                position, stop = ops[reader * OP + READS], ops[(reader + 1) * OP + READS]
            if position >= stop:
                break
            read = position * READ
            position += 1
            missing = True
            if reads[read + READ_FROM] <= tick <= reads[read + READ_UNTIL]:
                missing = False
                for other in range(reads[read + READ_FIRST], reads[read + READ_STOP]):
                    if gaps[other * GAP + START] <= tick <= gaps[other * GAP + END]:
                        missing = codes[other] == RECOMPUTE
                        met[away] = other
                        away += 1
                        break  # the others lie elsewhere
            value, writer = reads[read + READ_VALUE], reads[read + READ_WRITER]
        if not missing:
            break
    # Found from the last op backwards, so reversed it is almost in order and insertion takes linear time.
    for i in range(count >> 1):
        op = found[i]
        found[i] = found[count - 1 - i]
        found[count - 1 - i] = op
    for i in range(1, count):
        op, j = found[i], i - 1
        while j >= 0 and found[j] > op:
            found[j + 1] = found[j]
            j -= 1
        found[j + 1] = op
    return count, away


@_compiled
def _replay(
    gap: int, stamp: int, count: int, synchronous: bool, replays: Ints, gaps: Ints, ops: Ints, reads: Ints,
    writes: Ints, found: Ints, made: Ints, last_use: Ints,
) -> None:  # fmt: skip
    """What the ops in `found` do: the row of the replay."""
    compute, host, issued = 0, -FAR, 0
    for i in range(count):
        op = found[i] * OP
        if synchronous and i > 0:
            compute += ops[op + ISSUE_NS] + ops[op + NS]
            host += ops[op + ISSUE_NS] + ops[op + NS]
        else:
            issued += ops[op + ISSUE_NS]
            compute, host = compute + ops[op + NS], max(host, issued) + ops[op + NS]
    row = gap * ROW
    replays[row + COMPUTE], replays[row + HOST] = compute, host
    replays[row + ISSUE] = -1 if synchronous else issued
    replays[row + REPLAY_OPS] = count
    if count == 1:  # nothing is made on the way
        replays[row + REPLAY_PEAK] = ops[found[0] * OP + ALONE]
        return
    # How far above its start it takes memory: the walk of schedule.Replay.
    target = gaps[gap * GAP + VALUE]
    extra = peak = 0
    use = stamp * (len(ops) // OP)  # uses by an earlier replay lie below
    for i in range(count):
        op = found[i]
        for read in range(ops[op * OP + READS] * READ, ops[(op + 1) * OP + READS] * READ, READ):
            last_use[reads[read + READ_VALUE]] = use + op
    for i in range(count):
        op = found[i]
        now = use + op
        first_read, last_read = ops[op * OP + READS] * READ, ops[(op + 1) * OP + READS] * READ
        first_write, last_write = ops[op * OP + WRITES] * WRITE, ops[(op + 1) * OP + WRITES] * WRITE
        for write in range(first_write, last_write, WRITE):
            before = writes[write + WRITE_BEFORE]
            if before >= 0 and made[before] == stamp and last_use[before] == now:
                made[before] = 0  # the same bytes go on as the next version
            else:
                extra += writes[write + WRITE_BYTES]
        peak = max(peak, extra + ops[op * OP + WORKSPACE])
        for read in range(first_read, last_read, READ):
            value = reads[read + READ_VALUE]
            if made[value] == stamp and last_use[value] == now:
                made[value] = 0
                extra -= reads[read + READ_BYTES]
        for write in range(first_write, last_write, WRITE):
            value = writes[write + WRITE_VALUE]
            if value == target or last_use[value] > now:
                made[value] = stamp
            else:
                extra -= writes[write + WRITE_BYTES]
    replays[row + REPLAY_PEAK] = peak


@_compiled
def fix_replays(
    codes: Codes, fixed: Ints, needs: Ints, failure: Ints, gaps: Ints, ops: Ints, reads: Ints, writes: Ints,
    rates: Floats, found: Ints, seen: Ints, met: Ints, made: Ints, last_use: Ints,
) -> int:  # fmt: skip
    """Fill in `fixed`, and `needs` as far as there is room; `codes` keep everything. How much room it takes."""
    used = 0
    for gap in range(len(codes)):
        count, away = _close(gap, gap + 1, 32, codes, failure, gaps, ops, reads, found, seen, met)
        if count > 0:
            _replay(gap, gap + 1, count, rates[RATE_SYNCHRONOUS] > 0.0, fixed, gaps, ops, reads, writes, found, made,
                    last_use)  # fmt: skip
            for i in range(min(away, len(needs) - used)):
                needs[used + i] = met[i]
            fixed[gap * ROW + NEEDS], fixed[gap * ROW + NEEDS_STOP] = used, used + away
            used += away
    return used


@_compiled
def _replays(
    codes: Codes, epoch: int, gaps: Ints, ends: Ints, ops: Ints, reads: Ints, writes: Ints, rates: Floats, fixed: Ints,
    needs: Ints, back: Ints, found: Ints, seen: Ints, met: Ints, made: Ints, last_use: Ints, replays: Ints,
    replay_ops: Ints, failure: Ints,
) -> int:  # fmt: skip
    """All replays; how many ops are in those that are not fixed. `back` becomes the tick by which each gap is over."""
    used = 0
    synchronous = rates[RATE_SYNCHRONOUS] > 0.0
    for gap in range(len(codes)):
        if codes[gap] != RECOMPUTE:
            continue
        end, row = ends[gap], gap * ROW
        known = fixed[row + REPLAY_OPS] > 0
        for i in range(fixed[row + NEEDS], fixed[row + NEEDS_STOP]):
            other = needs[i]
            back[other] = min(back[other], end)
            known = known and codes[other] != RECOMPUTE
        if known:
            for i in range(row, row + REPLAY_PEAK + 1):
                replays[i] = fixed[i]
            continue
        stamp = epoch * len(codes) + gap
        count, away = _close(gap, stamp, len(ops), codes, failure, gaps, ops, reads, found, seen, met)
        if count < 0:
            break
        for i in range(away):
            other = met[i]
            back[other] = min(back[other], end)
        _replay(gap, stamp, count, synchronous, replays, gaps, ops, reads, writes, found, made, last_use)
        replays[row + REPLAY_OP] = used
        for i in range(min(count, len(replay_ops) - used)):
            replay_ops[used + i] = found[i]
        used += count
    return used


@_compiled
def _releases(
    codes: Codes, gaps: Ints, ticks: Ints, by_start: Ints, by_end: Ints, rates: Floats, replays: Ints, back: Ints,
    release: Ints, copied: Ints, reused: Ints, queue: Ints, done: Ints, following: Ints, lists: Ints, times: Ints,
    waiting: Ints,
) -> None:  # fmt: skip
    """Model the step up to the fetches: when each tick is reached, and the first tick that finds each copy out done.

    Copies wait for each other on the one lane out, so they end in the order in which they start. A copy that is not
    done when its storage must be back is not worth starting: `release` stays -1.
    """
    synchronous, share = rates[RATE_SYNCHRONOUS] > 0.0, rates[RATE_SHARE]
    # The swaps by start and the replays by end. Counted without branches, which nothing could foretell.
    many = len(codes)
    swaps, replayed = 0, many
    for i in range(many):
        gap = by_start[i]
        lists[swaps] = gap
        swap = (codes[gap] != KEEP) & (codes[gap] != RECOMPUTE)
        swaps += swap & (back[gap] > gaps[gap * GAP + START])
        gap = by_end[i]
        lists[replayed] = gap
        replayed += codes[gap] == RECOMPUTE
    head = tail = out_free = compute = host = 0
    starting, ending = 0, many
    never = len(times)
    next_start = gaps[lists[0] * GAP + START] if swaps > 0 else never
    next_end = gaps[lists[many] * GAP + END] if replayed > many else never
    next_done = FAR
    for tick in range(len(times)):
        row = tick * TICK
        compute, host = _advance(compute, host, ticks[row + COMPUTE], ticks[row + HOST], ticks[row + ISSUE])
        times[tick] = compute  # never behind the host, as an op ends after it is issued
        while next_done <= compute:
            gap = queue[head]
            head += 1
            next_done = done[head] if head < tail else FAR
            if tick < back[gap]:
                release[gap] = tick
                copied[gaps[gap * GAP + FIRST]] = 1
        while next_start == tick:
            gap = lists[starting]
            row = gap * GAP
            starting += 1
            next_start = gaps[lists[starting] * GAP + START] if starting < swaps else never
            if codes[gap] == SYNC:
                waiting[back[gap]] += gaps[row + IN_NS]
            if copied[gaps[row + FIRST]]:
                release[gap], reused[gap] = tick, 1
                continue
            out_free = max(out_free, compute) + gaps[row + OUT_NS]
            if share > 0.0:
                compute += int(gaps[row + OUT_NS] * share)
            if codes[gap] == SYNC:
                compute = max(compute, out_free)
                release[gap] = tick
                copied[gaps[row + FIRST]] = 1
            else:
                if head == tail:
                    next_done = out_free
                queue[tail], done[tail] = gap, out_free
                tail += 1
        compute += waiting[tick]
        waiting[tick] = 0
        if synchronous:
            host = max(host, compute)
        while next_end == tick:
            row = lists[ending] * ROW
            ending += 1
            next_end = gaps[lists[ending] * GAP + END] if ending < replayed else never
            compute, host = _advance(compute, host, replays[row + COMPUTE], replays[row + HOST], replays[row + ISSUE])


@_compiled
def _fetches(
    codes: Codes, ahead: Ints, gaps: Ints, back: Ints, release: Ints, fetch: Ints, following: Ints, times: Ints,
    waiting: Ints,
) -> None:  # fmt: skip
    """When each copy back starts, reserving the lane in from the end of the step towards its beginning."""
    for gap in range(len(codes)):
        if release[gap] >= 0:
            if codes[gap] == OVERLAP:
                following[gap] = waiting[back[gap]]
                waiting[back[gap]] = gap + 1
            elif codes[gap] == SYNC:
                fetch[gap] = back[gap]
            else:
                fetch[gap] = max(back[gap] - ahead[gap], release[gap] + 1)
    lane = FAR
    near = len(times) - 1  # where the last search ended: the next one is seldom far
    for tick in range(len(times) - 1, -1, -1):
        gap = waiting[tick] - 1
        waiting[tick] = 0
        while gap >= 0:
            # The lead of an eighth covers a lane slowed by copies out; a fetch that is late stalls the whole step.
            ns = gaps[gap * GAP + IN_NS]
            start = min(times[tick], lane) - ns - (ns >> 3)
            near = min(near, tick)
            while near > 0 and times[near] > start:
                near -= 1
            while near < tick and times[near + 1] <= start:
                near += 1
            at = max(near, release[gap] + 1)
            lane = min(lane, max(start, times[at]))
            fetch[gap] = at
            gap = following[gap] - 1


@_compiled
def _emit(
    codes: Codes, gaps: Ints, back: Ints, release: Ints, fetch: Ints, reused: Ints, lists: Ints, offsets: Ints32,
    instructions: Ints32,
) -> None:  # fmt: skip
    """The instructions by tick. Within a tick: free, copy out, free what waits, what is needed now, fetch ahead."""
    many = len(codes)
    for i in range(len(offsets)):
        offsets[i] = 0
    # A list for each of these, in which an entry is tick << 32 | instruction.
    free, out, wait, need, replay, early = 0, many, 2 * many, 3 * many, 5 * many, 6 * many
    for gap in range(many):
        start, end, this = gaps[gap * GAP + START], gaps[gap * GAP + END], gap << KIND_BITS
        if codes[gap] == RECOMPUTE:
            lists[free] = start << 32 | this | DROP
            free += 1
            lists[replay] = end << 32 | this | REPLAY
            replay += 1
            offsets[start + 2] += 1
            offsets[end + 2] += 1
        elif release[gap] >= 0:
            end, at = back[gap], fetch[gap]
            if reused[gap]:
                lists[free] = start << 32 | this | DROP
                free += 1
                offsets[start + 2] += 1
            else:
                lists[out] = start << 32 | this | SWAP_OUT
                out += 1
                offsets[start + 2] += 1
                if codes[gap] == SYNC:
                    lists[wait] = start << 32 | this | RELEASE
                    wait += 1
                    offsets[start + 2] += 1
                else:
                    lists[free] = release[gap] << 32 | this | RELEASE
                    free += 1
                    offsets[release[gap] + 2] += 1
            if at < end:
                lists[early] = at << 32 | this | PREFETCH
                early += 1
            else:
                lists[need] = at << 32 | this | PREFETCH
                need += 1
            lists[need] = end << 32 | this | AWAIT
            need += 1
            offsets[at + 2] += 1
            offsets[end + 2] += 1
    total = 0
    for tick in range(len(offsets)):
        total += offsets[tick]
        offsets[tick] = total
    for stage in range(6):
        first = (stage + (stage > 3)) * many
        stop = free if stage == 0 else out if stage == 1 else wait if stage == 2 else need if stage == 3 else replay
        for i in range(first, early if stage == 5 else stop):
            entry = lists[i]
            place = offsets[(entry >> 32) + 1]
            offsets[(entry >> 32) + 1] = place + 1
            instructions[place] = entry & 0x7FFFFFFF


@_compiled
def lower_codes(
    codes: Codes, ahead: Ints, epoch: int,
    gaps: Ints, ends: Ints, ticks: Ints, ops: Ints, reads: Ints, writes: Ints, by_start: Ints, by_end: Ints,
    rates: Floats, fixed: Ints, needs: Ints,
    back: Ints, release: Ints, fetch: Ints, copied: Ints, reused: Ints, queue: Ints, done: Ints, following: Ints,
    lists: Ints, times: Ints, waiting: Ints, found: Ints, seen: Ints, met: Ints, made: Ints, last_use: Ints,
    peaks: Ints,
    offsets: Ints32, instructions: Ints32, replays: Ints, replay_ops: Ints, failure: Ints,
) -> int:  # fmt: skip
    """Lower one decision code for each gap into a program, and return how many ops its replays have.

    Fixed replays are not counted, and their ops are not listed: give none (zeros) to have them all. `codes` are
    `possible_codes`; `ahead` is read for AHEAD only. `epoch` is above zero and above that of any call before with the
    same scratch memory.
    """
    failure[0] = OK
    for gap in range(len(codes)):
        back[gap] = ends[gap]
        release[gap] = -1
        copied[gap] = reused[gap] = 0
    used = _replays(
        codes, epoch, gaps, ends, ops, reads, writes, rates, fixed, needs, back, found, seen, met, made, last_use,
        replays, replay_ops, failure,
    )  # fmt: skip
    if failure[0] == OK:
        _releases(
            codes, gaps, ticks, by_start, by_end, rates, replays, back, release, copied, reused, queue, done,
            following, lists, times, waiting,
        )  # fmt: skip
        _fetches(codes, ahead, gaps, back, release, fetch, following, times, waiting)
        _emit(codes, gaps, back, release, fetch, reused, lists, offsets, instructions)
    return used


@_compiled
def run_program(
    offsets: Ints32, instructions: Ints32, replays: Ints, limit: int, gaps: Ints, ticks: Ints, rates: Floats,
    done: Ints, peaks: Ints,
) -> tuple[int, int, int]:  # fmt: skip
    """(nanoseconds, peak bytes, bytes above the limit summed over ticks) of a program; `peaks` has each tick's peak.

    This is `simulate()` and `check_schedule()` without their records.
    """
    synchronous, latency, share = rates[RATE_SYNCHRONOUS] > 0.0, int(rates[RATE_LATENCY]), rates[RATE_SHARE]
    out_free = in_free = absent = compute = host = 0
    highest = excess = position = 0
    for tick in range(len(peaks)):
        row = tick * TICK
        compute, host = _advance(compute, host, ticks[row + COMPUTE], ticks[row + HOST], ticks[row + ISSUE])
        level, peak = ticks[row + LEVEL], 0
        while position < offsets[tick + 1]:
            kind, gap = instructions[position] & KIND_MASK, instructions[position] >> KIND_BITS
            position += 1
            at = gap * GAP
            nbytes = gaps[at + NBYTES]
            if kind == SWAP_OUT:
                start = max(out_free, compute)
                ns = _copy_ns(
                    nbytes, start, in_free, gaps[at + OUT_NS], rates[RATE_OUT], rates[RATE_DUPLEX_OUT], latency
                )
                out_free = start + ns
                done[gap] = out_free
                if share > 0.0:
                    compute += int(ns * share)
            elif kind == RELEASE:
                compute = max(compute, done[gap])
                absent += nbytes
            elif kind == DROP:
                absent += nbytes
            elif kind == PREFETCH:
                start = max(in_free, compute)  # the copy out is over: compute waited for it at the release
                ns = _copy_ns(nbytes, start, out_free, gaps[at + IN_NS], rates[RATE_IN], rates[RATE_DUPLEX_IN], latency)
                in_free = start + ns
                done[gap] = in_free
                if share > 0.0:
                    compute += int(ns * share)
                absent -= nbytes
                peak = max(peak, level - absent)
            elif kind == AWAIT:
                compute = max(compute, done[gap])
            else:
                if synchronous:
                    host = max(host, compute)
                at = gap * ROW
                peak = max(peak, level - absent + replays[at + REPLAY_PEAK])
                compute, host = _advance(compute, host, replays[at + COMPUTE], replays[at + HOST], replays[at + ISSUE])
                absent -= nbytes
                peak = max(peak, level - absent)
        if synchronous:
            host = max(host, compute)
        peak = max(peak, ticks[row + PEAK] - absent)
        peaks[tick] = peak
        highest = max(highest, peak)
        excess += max(0, peak - limit)
    row = len(peaks) * TICK
    compute, host = _advance(compute, host, ticks[row + COMPUTE], ticks[row + HOST], ticks[row + ISSUE])
    return compute, highest, excess
