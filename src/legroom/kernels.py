"""The compiled half of planning: lower decisions to a program, and run a program.

`lower_codes` is the only lowering there is; `schedule.lower` wraps its program into instructions, and the evaluator
runs it with `run_program`, which must agree to the nanosecond and the byte with `simulate()` and `check_schedule()`.

All compiled functions are in this one file, and so are the constants they freeze: a cached function is not rebuilt when
another file changes. They take flat arrays, which `packing` makes from the tables and names; row r of a table has its
columns from r * (length of a row) on. They allocate nothing: every kind of allocation costs numba a third of a second
of compilation, and without any, no references need be counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from numba.core.registry import cpu_target

from legroom.tables import Floats, Ints

Codes = npt.NDArray[np.int8]
Words = npt.NDArray[np.uint32]

# Decision codes. SHARED is a recomputation that stays once some replay has made it.
KEEP, OVERLAP, SYNC, RECOMPUTE, SHARED, AHEAD = 0, 1, 2, 3, 4, 5
# Instruction codes: those that copy, those that wait or free, and replays. An instruction is gap << KIND_BITS | code.
SWAP_OUT, PREFETCH, RELEASE, AWAIT, DROP, REPLAY, KIND_BITS, KIND_MASK = 0, 1, 2, 3, 4, 5, 3, 7
# Why a recomputation is impossible.
OK, NO_WRITER, NOT_REPLAYABLE = 0, 1, 2
# Bit code * 2 + whether a gap ends: whether the model of the lanes must look at that (swaps start, replays end).
MATTERS = 1 << OVERLAP * 2 | 1 << SYNC * 2 | 1 << AHEAD * 2 | 1 << RECOMPUTE * 2 + 1 | 1 << SHARED * 2 + 1
# What a replay does that makes the storage of a gap: nothing as it is in memory (or comes back by then); throw it away;
# leave it in memory. REPLAYED is for those that are here since a replay of their own.
HERE, ALONE, STAYS, REPLAYED = 0, 1, 2, 4

# Columns, and the length of a row: ops, what they read (with all there is to know about the value), what they write.
NS, ISSUE_NS, WORKSPACE, REPLAYABLE, READS, WRITES, BY_ITSELF, OP = 0, 1, 2, 3, 4, 5, 6, 8
READ_VALUE, READ_FROM, READ_UNTIL, READ_FIRST, READ_STOP, READ_WRITER, READ_BYTES, READ = 0, 1, 2, 3, 4, 5, 6, 8
# The gaps of a value written are those that it stands in.
WRITE_VALUE, WRITE_BEFORE, WRITE_BYTES, WRITE_FIRST, WRITE_STOP, WRITE = 0, 1, 2, 3, 4, 8
# Replays: what they do to the lanes, how far they take memory above the level at their start, the bytes they leave
# there; how many ops they have, where these are in `replay_ops`, and how many gaps follow them there, whose storages
# stay.
COMPUTE, HOST, ISSUE, PEAK, BYTES, OPS, REPLAY_OP, REPLAY_GAPS, ROW = 0, 1, 2, 3, 4, 5, 6, 7, 8
# Replays remembered: as above up to OPS; the number of gaps they met, and one (0: nothing here), plus SOME_MET times
# how many of these they read; what they do about each, two bits; and these gaps, at most MOST_MET, two in a word. Two
# rows for each gap, small as they fill the cache: the one that meets nothing else that is away, which is the most
# frequent in most plans, and the last of the others.
MET, STATES, FIRST_MET, MOST_MET, SOME_MET, MEMORY = 6, 7, 8, 16, 256, 16
# Rates.
RATE_OUT, RATE_IN, RATE_DUPLEX_OUT, RATE_DUPLEX_IN, RATE_SHARE, RATE_LATENCY, RATE_SYNCHRONOUS = 0, 1, 2, 3, 4, 5, 6

FAR = 2**62  # later than any time
# Ticks stand above, gaps below. `& LOW` also tells the compiler that an index is not negative, which spares it a test
# for those that count from the end (a fifth of the time of lowering); so do arrays of words.
TICKS, LOW = 2**32, 2**32 - 1


F = TypeVar("F", bound=Callable[..., Any])


def _lean(**options: bool) -> dict[str, Any]:
    """Those of these options that this numba knows."""
    return {name: value for name, value in options.items() if hasattr(cpu_target.options, name)}


# Not to count references to arrays halves the time of lowering; that, and to make no entries nobody uses, saves a third
# of the compilation.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", **_lean(_nrt=False, no_cfunc_wrapper=True)}


def _compiled(function: F) -> F:
    """For functions that Python calls."""
    try:
        return cast(F, numba.njit(cache=True, **_OPTIONS)(function))
    except RuntimeError:  # no place to write a cache: compile in each process instead
        return cast(F, numba.njit(**_OPTIONS)(function))


def _inner(function: F) -> F:
    """For functions that only compiled functions call, and that end up in the caches of these."""
    return cast(F, numba.njit(**_OPTIONS, **_lean(no_cpython_wrapper=True))(function))


@_compiled
def _advance(compute: int, host: int, after_compute: int, after_host: int, issue: int) -> tuple[int, int]:
    """A run of ops on the lanes; see tables.lane_effect."""
    compute = max(compute + after_compute, host + after_host)
    return compute, compute if issue < 0 else host + issue


@_inner
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


@_inner
def _close(
    gap: int, tick: int, stamp: int, failure: Ints, starts: Words, ends: Words, targets: Ints, makers: Ints, ops: Ints,
    reads: Ints, back: Words, away: Words, found: Words, seen: Ints, met: Words, last_use: Ints,
) -> tuple[int, int]:  # fmt: skip
    """Collect into `found`, in program order, the ops that bring the gap's storage back.

    Returns how many, -1 where it is impossible; and the number of gaps in `met`, whose storages they read from memory.
    """
    value, writer, reader = targets[gap], makers[gap], -1
    count = cursor = many = read = stop = 0
    use = stamp * (len(ops) // OP)  # uses by an earlier replay lie below
    missing = True
    while missing:
        if writer < 0 or not ops[writer * OP + REPLAYABLE]:
            failure[0] = NO_WRITER if writer < 0 else NOT_REPLAYABLE
            failure[1], failure[2], failure[3] = gap, writer if writer >= 0 else reader, value
            return -1, many
        if seen[writer] != stamp:
            seen[writer] = stamp
            found[count] = writer
            count += 1
        missing = False
        while not missing:  # on to the next value read that is not in memory
            while read >= stop and cursor < count:
                reader = found[cursor & LOW]
                cursor += 1
                read, stop = ops[reader * OP + READS] * READ, ops[(reader + 1) * OP + READS] * READ
            if read >= stop:
                break
            row = read & LOW
            value, writer, missing = reads[row + READ_VALUE] & LOW, reads[row + READ_WRITER], True
            last_use[value] = max(last_use[value], use + reader)
            if reads[row + READ_FROM] <= tick <= reads[row + READ_UNTIL]:
                missing = False
                for i in range(reads[row + READ_FIRST], reads[row + READ_STOP]):
                    other = i & LOW
                    if starts[other] <= tick <= ends[other]:  # gaps of a storage do not overlap: the only one
                        if starts[other] == tick:
                            away[other] &= ALONE  # one that would stay does not go away in the first place
                        missing = away[other] & (ALONE | STAYS) != HERE
                        if not missing:
                            met[many & LOW] = other
                            many += 1
                            back[other] = min(back[other], tick)
                        break
            read += READ
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
    return count, many


@_inner
def _stay(
    row: int, tick: int, stamp: int, count: int, many: int, place: int, starts: Words, ends: Words, ops: Ints,
    writes: Ints, back: Words, away: Words, found: Words, met: Words, last_use: Ints, replays: Ints, replay_ops: Ints,
) -> tuple[int, int]:  # fmt: skip
    """Let stay what the ops in `found` make and a gap wants; add to `met` the gaps of all they make.

    What stays is listed in `replay_ops` from `place` on.

    Returns the number of gaps in `met`, and what is done about each, two bits.
    """
    states = nbytes = stay = 0
    forever = (stamp + 1) * (len(ops) // OP) - 1  # after any op of this replay
    for i in range(count):
        this = found[i] * OP
        for write in range(ops[this + WRITES] * WRITE, ops[this + OP + WRITES] * WRITE, WRITE):
            at = write & LOW
            for j in range(writes[at + WRITE_FIRST], writes[at + WRITE_STOP]):
                other = j & LOW
                if starts[other] <= tick <= ends[other]:
                    state = _state(other, tick, starts, away)
                    states |= state << (many << 1 & 63)
                    met[many & LOW] = other
                    many += 1
                    if state == STAYS:
                        last_use[writes[at + WRITE_VALUE] & LOW] = forever
                        nbytes += writes[at + WRITE_BYTES]
                        back[other] = tick
                        away[other] = HERE
                        if place + stay < len(replay_ops):
                            replay_ops[place + stay] = other
                        stay += 1
                    break
    replays[row + BYTES], replays[row + REPLAY_GAPS] = nbytes, stay
    return many, states


@_inner
def _state(gap: int, tick: int, starts: Words, away: Words) -> int:
    """What a replay at this tick does about a gap whose storage it makes; a gap that starts here has lost nothing."""
    state: int = away[gap] & (ALONE | STAYS if starts[gap] < tick else ALONE)
    return state


@_inner
def _replay(
    row: int, stamp: int, count: int, synchronous: bool, replays: Ints, ops: Ints, reads: Ints, writes: Ints,
    found: Words, made: Ints, last_use: Ints,
) -> None:  # fmt: skip
    """What the ops in `found` do: the row of the replay."""
    compute, host, issued = 0, -FAR, 0
    for i in range(count):
        ns, issue = ops[found[i] * OP + NS], ops[found[i] * OP + ISSUE_NS]
        if synchronous and i > 0:
            compute += issue + ns
            host += issue + ns
        else:
            issued += issue
            compute += ns
            host = max(host, issued) + ns
    replays[row + COMPUTE], replays[row + HOST] = compute, host
    replays[row + ISSUE] = -1 if synchronous else issued
    replays[row + OPS] = count
    if count == 1:  # nothing is made on the way
        replays[row + PEAK] = ops[found[0] * OP + BY_ITSELF]
        return
    # How far above its start it takes memory: the walk of schedule.Replay.
    extra = peak = 0
    use = stamp * (len(ops) // OP)
    for i in range(count):
        op = found[i]
        now, this, following = use + op, op * OP, (op + 1) * OP
        first, stop = ops[this + WRITES] * WRITE, ops[following + WRITES] * WRITE
        for write in range(first, stop, WRITE):
            before = writes[(write & LOW) + WRITE_BEFORE]
            if before >= 0 and made[before] == stamp and last_use[before] == now:
                made[before] = 0  # the same bytes go on as the next version
            else:
                extra += writes[(write & LOW) + WRITE_BYTES]
        peak = max(peak, extra + ops[this + WORKSPACE])
        for read in range(ops[this + READS] * READ, ops[following + READS] * READ, READ):
            value = reads[(read & LOW) + READ_VALUE] & LOW
            if made[value] == stamp and last_use[value] == now:
                made[value] = 0
                extra -= reads[(read & LOW) + READ_BYTES]
        for write in range(first, stop, WRITE):
            value = writes[(write & LOW) + WRITE_VALUE] & LOW
            if last_use[value] > now:
                made[value] = stamp
            else:
                extra -= writes[(write & LOW) + WRITE_BYTES]
    replays[row + PEAK] = peak


@_inner
def _recall(gap: int, tick: int, starts: Words, away: Words, memory: Ints) -> int:
    """Where a replay is remembered that holds for what is away now, or -1."""
    for row in range(2 * gap * MEMORY, (2 * gap + 2) * MEMORY, MEMORY):
        states = 0
        for i in range((memory[row + MET] & SOME_MET - 1) - 1):
            other = memory[row + FIRST_MET + (i >> 1)] >> ((i & 1) << 5) & LOW
            states |= _state(other, tick, starts, away) << (i << 1)
        if memory[row + MET] > 0 and states == memory[row + STATES]:
            return row
    return -1


@_inner
def _replays(
    epoch: int, starts: Words, ends: Words, targets: Ints, makers: Ints, ops: Ints, reads: Ints, writes: Ints,
    by_end: Words, synchronous: bool, back: Words, away: Words, found: Words, seen: Ints, met: Words, made: Ints,
    last_use: Ints, memory: Ints, replays: Ints, replay_ops: Ints, failure: Ints,
) -> int:  # fmt: skip
    """All replays; how much of `replay_ops` those need that are not remembered.

    In the order in which they run, as one finds in memory what those before it have left there. `back` becomes the tick
    by which each gap is over.
    """
    used = 0
    for position in range(len(by_end)):
        gap = by_end[position]
        if away[gap] == HERE:
            continue
        away[gap] = STAYS
        end, row = ends[gap], gap * ROW
        known = _recall(gap, end, starts, away, memory)
        if known >= 0:
            read, many = memory[known + MET] // SOME_MET, (memory[known + MET] & SOME_MET - 1) - 1
            for i in range(many):
                other = memory[known + FIRST_MET + (i >> 1)] >> ((i & 1) << 5) & LOW
                if i < read or _state(other, end, starts, away) == STAYS:
                    back[other] = min(back[other], end)
                    away[other] &= ALONE | REPLAYED
            for i in range(OPS + 1):
                replays[row + i] = memory[known + i]
            away[gap] = REPLAYED
            continue
        stamp = epoch * len(by_end) + position
        count, read = _close(
            gap, end, stamp, failure, starts, ends, targets, makers, ops, reads, back, away, found, seen, met, last_use
        )
        if count < 0:
            break
        many, states = _stay(
            row, end, stamp, count, read, used + count, starts, ends, ops, writes, back, away, found, met, last_use,
            replays, replay_ops,
        )  # fmt: skip
        away[gap] = REPLAYED
        _replay(row, stamp, count, synchronous, replays, ops, reads, writes, found, made, last_use)
        replays[row + REPLAY_OP] = used
        for i in range(min(count, len(replay_ops) - used)):
            replay_ops[used + i] = found[i]
        used += count + replays[row + REPLAY_GAPS]
        if many <= MOST_MET:
            known = (2 * gap + (states & states - 1 != 0)) * MEMORY
            for i in range(OPS + 1):
                memory[known + i] = replays[row + i]
            memory[known + MET], memory[known + STATES] = many + 1 + read * SOME_MET, states
            for i in range(0, many, 2):
                memory[known + FIRST_MET + (i >> 1)] = met[i & LOW] + met[(i & LOW) + 1] * TICKS
    return used


@_inner
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


@_inner
def _releases(
    codes: Codes, ahead: Ints, out_ns: Ints, in_ns: Ints, firsts: Words, after_compute: Ints, after_host: Ints,
    issue: Ints, events: Ints, synchronous: bool, share: float, replays: Ints, back: Words, away: Words, release: Ints,
    fetch: Words, copied: Ints, reused: Ints, queue: Ints, done: Ints, following: Words, lists: Ints, times: Ints,
    waiting: Ints, latest: Words,
) -> None:  # fmt: skip
    """Model the step up to the fetches: when each tick is reached, and the first tick that finds each copy out done.

    Copies wait for each other on the one lane out, so they end in the order in which they start. A copy that is not
    done when its storage must be back is not worth starting: `release` stays -1.
    """
    # First the events that matter: where swaps start and replays end. No branch here: nothing could foretell it.
    count = 0
    for i in range(len(events)):
        event = events[i]
        lists[count] = event
        count += (MATTERS >> (codes[(event & LOW) >> 1] << 1 | event & 1)) & 1
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
            compute, host = _advance(compute, host, after_compute[tick], after_host[tick], issue[tick])
            times[tick] = compute  # never behind the host, as an op ends after it is issued
            while next_done <= compute:
                gap = queue[head & LOW] & LOW
                head += 1
                next_done = done[head & LOW] if head < tail else FAR
                if tick < back[gap]:
                    release[gap] = tick
                    copied[firsts[gap]] = 1
                    _call_back(gap, tick, codes, ahead, back, fetch, following, latest)
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
            compute, host = _advance(compute, host, replays[row + COMPUTE], replays[row + HOST], replays[row + ISSUE])
        elif back[gap] > tick:
            sync = codes[gap] == SYNC
            waiting[back[gap] + 1] += in_ns[gap] if sync else 0
            if copied[firsts[gap]]:
                release[gap], reused[gap] = tick, 1
                _call_back(gap, tick, codes, ahead, back, fetch, following, latest)
                continue
            out_free = max(out_free, compute) + out_ns[gap]
            if share > 0.0:
                compute += int(out_ns[gap] * share)
            # A synchronous one is released here and now, the others wait in the queue. No branch, as above.
            compute = max(compute, out_free if sync else 0)
            release[gap] = tick if sync else -1
            copied[firsts[gap]] = 1 if sync else 0
            fetch[gap] = back[gap]
            next_done = out_free if head == tail and not sync else next_done
            queue[tail & LOW], done[tail & LOW] = gap, out_free
            tail += 0 if sync else 1
    waiting[len(times)] = 0


@_inner
def _fetches(in_ns: Ints, release: Ints, fetch: Words, following: Words, times: Ints, latest: Words) -> None:
    """When each copy back starts, reserving the lane in from the end of the step towards its beginning."""
    lane = FAR
    near = len(times) - 1  # where the last search ended: the next one is seldom far
    for tick in range(len(times) - 1, -1, -1):
        gap = latest[tick] - 1
        latest[tick] = 0
        while gap >= 0:
            # The lead of an eighth covers a lane slowed by copies out; a fetch that is late stalls the whole step.
            start = min(times[tick], lane) - in_ns[gap] - (in_ns[gap] >> 3)
            near = min(near, tick)
            while near > 0 and times[near] > start:
                near -= 1
            while near < tick and times[(near & LOW) + 1] <= start:
                near += 1
            at = max(near, release[gap] + 1) & LOW
            lane = min(lane, max(start, times[at]))
            fetch[gap] = at
            gap = following[gap] - 1


@_inner
def _emit(
    codes: Codes, starts: Words, ends: Words, back: Words, away: Words, release: Ints, fetch: Words, reused: Ints,
    lists: Ints, offsets: Words, instructions: Words,
) -> None:  # fmt: skip
    """The instructions by tick. Within a tick: free, copy out, free what waits, what is needed now, fetch ahead."""
    many = len(codes)
    offsets[:] = 0
    # A list for each of these, in which an entry is tick << 32 | instruction.
    free, out, wait, need, replay, early = 0, many, 2 * many, 3 * many, 5 * many, 6 * many
    for gap in range(many):
        this, start = gap << KIND_BITS, starts[gap]
        if codes[gap] == RECOMPUTE or codes[gap] == SHARED:
            end = ends[gap]
            gone = 1 if codes[gap] == RECOMPUTE or back[gap] > start else 0
            again = 1 if away[gap] == REPLAYED else 0
            lists[free & LOW] = start * TICKS | this | DROP
            lists[replay & LOW] = end * TICKS | this | REPLAY
            offsets[start + 2] += gone
            offsets[end + 2] += again
            free += gone
            replay += again
        elif release[gap] >= 0:
            end, at, freed = back[gap], fetch[gap], release[gap]
            if reused[gap]:
                lists[free & LOW] = start * TICKS | this | DROP
                free += 1
            else:
                lists[out & LOW] = start * TICKS | this | SWAP_OUT
                out += 1
                offsets[freed + 2] += 1
                if codes[gap] == SYNC:
                    lists[wait & LOW] = freed * TICKS | this | RELEASE
                    wait += 1
                else:
                    lists[free & LOW] = freed * TICKS | this | RELEASE
                    free += 1
            if at < end:
                lists[early & LOW] = at * TICKS | this | PREFETCH
                early += 1
            else:
                lists[need & LOW] = at * TICKS | this | PREFETCH
                need += 1
            lists[need & LOW] = end * TICKS | this | AWAIT
            need += 1
            offsets[start + 2] += 1
            offsets[at + 2] += 1
            offsets[end + 2] += 1
    total = 0
    for tick in range(len(offsets)):
        total += offsets[tick]
        offsets[tick] = total
    stages = (0, free), (many, out), (2 * many, wait), (3 * many, need), (5 * many, replay), (6 * many, early)
    for first, stop in stages:
        for i in range(first, stop):
            entry = lists[i & LOW]
            after = (entry >> 32 & LOW) + 1
            place = offsets[after]
            offsets[after] = place + 1
            instructions[place] = entry & LOW


@_compiled
def lower_codes(
    codes: Codes, ahead: Ints, epoch: int,
    starts: Words, ends: Words, sizes: Ints, out_ns: Ints, in_ns: Ints, firsts: Words, targets: Ints, makers: Ints,
    after_compute: Ints, after_host: Ints, issue: Ints, levels: Ints, tops: Ints, ops: Ints, reads: Ints, writes: Ints,
    events: Ints, by_end: Words, rates: Floats,
    back: Words, away: Words, release: Ints, fetch: Words, copied: Ints, reused: Ints, queue: Ints, done: Ints,
    following: Words, lists: Ints, times: Ints, waiting: Ints, latest: Words, found: Words, seen: Ints, met: Words,
    made: Ints, last_use: Ints, memory: Ints, peaks: Ints,
    offsets: Words, instructions: Words, replays: Ints, replay_ops: Ints, failure: Ints,
) -> int:  # fmt: skip
    """See packing.lower()."""
    synchronous = rates[RATE_SYNCHRONOUS] > 0.0
    failure[0] = OK
    for gap in range(len(codes)):
        back[gap] = ends[gap]
        release[gap] = -1
        copied[gap] = reused[gap] = 0
        away[gap] = (ALONE if codes[gap] == RECOMPUTE else HERE) | (STAYS if codes[gap] == SHARED else HERE)
    used = _replays(
        epoch, starts, ends, targets, makers, ops, reads, writes, by_end, synchronous, back, away, found, seen, met,
        made, last_use, memory, replays, replay_ops, failure,
    )  # fmt: skip
    if failure[0] == OK and len(times) > 0:
        _releases(
            codes, ahead, out_ns, in_ns, firsts, after_compute, after_host, issue, events, synchronous,
            rates[RATE_SHARE], replays, back, away, release, fetch, copied, reused, queue, done, following, lists,
            times, waiting, latest,
        )  # fmt: skip
        _fetches(in_ns, release, fetch, following, times, latest)
        _emit(codes, starts, ends, back, away, release, fetch, reused, lists, offsets, instructions)
    return used


@_compiled
def run_program(
    offsets: Words, instructions: Words, replays: Ints, limit: int, sizes: Ints, out_ns: Ints, in_ns: Ints,
    after_compute: Ints, after_host: Ints, issue: Ints, levels: Ints, tops: Ints, rates: Floats, done: Ints,
    peaks: Ints,
) -> tuple[int, int, int]:  # fmt: skip
    """See packing.run()."""
    synchronous, latency, share = rates[RATE_SYNCHRONOUS] > 0.0, int(rates[RATE_LATENCY]), rates[RATE_SHARE]
    zero: Any = np.int64(0)  # as above
    compute = host = out_free = in_free = zero
    absent = highest = excess = 0
    for tick in range(len(peaks)):
        compute, host = _advance(compute, host, after_compute[tick], after_host[tick], issue[tick])
        level, peak = levels[tick], 0
        for position in range(offsets[tick], offsets[tick + 1]):
            kind, gap = instructions[position] & KIND_MASK, instructions[position] >> KIND_BITS
            nbytes = sizes[gap]
            if kind == SWAP_OUT:
                start = max(out_free, compute)
                ns = _copy_ns(nbytes, start, in_free, out_ns[gap], rates[RATE_OUT], rates[RATE_DUPLEX_OUT], latency)
                done[gap] = out_free = start + ns
                if share > 0.0:
                    compute += int(ns * share)
            elif kind == RELEASE:
                compute = max(compute, done[gap])
                absent += nbytes
            elif kind == DROP:
                absent += nbytes
            elif kind == PREFETCH:
                start = max(in_free, compute)  # the copy out is over: compute waited for it at the release
                ns = _copy_ns(nbytes, start, out_free, in_ns[gap], rates[RATE_IN], rates[RATE_DUPLEX_IN], latency)
                done[gap] = in_free = start + ns
                if share > 0.0:
                    compute += int(ns * share)
                absent -= nbytes
                peak = max(peak, level - absent)
            elif kind == AWAIT:
                compute = max(compute, done[gap])
            else:
                if synchronous:
                    host = max(host, compute)
                row = gap * ROW
                peak = max(peak, level - absent + replays[row + PEAK])
                compute, host = _advance(
                    compute, host, replays[row + COMPUTE], replays[row + HOST], replays[row + ISSUE]
                )
                absent -= replays[row + BYTES]
                peak = max(peak, level - absent)
        if synchronous:
            host = max(host, compute)
        peak = max(peak, tops[tick] - absent)
        peaks[tick] = peak
        highest = max(highest, peak)
        excess += max(0, peak - limit)
    last = len(peaks)
    compute, host = _advance(compute, host, after_compute[last], after_host[last], issue[last])
    return compute, highest, excess
