"""The compiled half of planning: lower decisions to a walk through the ticks, and run it.

`lower_and_run` is the only lowering there is. What it decides is written down twice: as the instructions of
`schedule.lower` (by `packing.lower`), and as a walk, which has fewer steps (frees are summed up by tick, and what
always comes in pairs is one step) and which the evaluator runs. That must agree to the nanosecond and the byte with
`simulate()` and `check_schedule()` of the instructions.

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
# None where ticks and instructions cost the host nothing. That is another type, so other functions are compiled for it:
# the same ones for both were 5 to 15 % slower where they cost nothing.
Charges = Ints | None

# Decision codes. SHARED is a recomputation that stays once some replay has made it.
KEEP, OVERLAP, SYNC, RECOMPUTE, SHARED, AHEAD = 0, 1, 2, 3, 4, 5
# Instruction codes: those that copy, those that wait or free, and replays. An instruction is gap << KIND_BITS | code.
SWAP_OUT, PREFETCH, RELEASE, AWAIT, DROP, REPLAY, KIND_BITS, KIND_MASK = 0, 1, 2, 3, 4, 5, 3, 7
# Steps of a walk, coded alike: copy out, copy out and wait, fetch and wait, fetch, wait for a fetch, replay.
OUT, OUT_NOW, IN_NOW, IN, WAIT, AGAIN = 0, 1, 2, 3, 4, 5
# Why a recomputation is impossible.
OK, NO_WRITER, NOT_REPLAYABLE = 0, 1, 2
# Bit code * 2 + whether a gap ends: whether the model of the lanes must look at that (swaps start, replays end).
MATTERS = 1 << OVERLAP * 2 | 1 << SYNC * 2 | 1 << AHEAD * 2 | 1 << RECOMPUTE * 2 + 1 | 1 << SHARED * 2 + 1
# What a replay does that makes the storage of a gap: nothing as it is in memory (or comes back by then); throw it away;
# leave it in memory. REPLAYED is for those that are here since a replay of their own.
HERE, ALONE, STAYS, REPLAYED = 0, 1, 2, 4

# Columns, and the length of a row, all in words as they fill the cache: ops, what they read (with all there is to know
# about the value), what they write; and what ops cost. Bytes take two words, the lower first.
READS, WRITES, REPLAYABLE, OP = 0, 1, 2, 4
READ_VALUE, READ_FROM, READ_UNTIL, READ_FIRST, READ_STOP, READ_WRITER, READ_BYTES, READ = 0, 1, 2, 3, 4, 5, 6, 8
# The gaps of a value written are those that it stands in.
WRITE_VALUE, WRITE_BEFORE, WRITE_FIRST, WRITE_STOP, WRITE_BYTES, WRITE = 0, 1, 2, 3, 4, 8
NS, ISSUE_NS, WORKSPACE, COST = 0, 1, 2, 3
NONE = 2**32 - 1  # no op, no value
# Values, as stamps: the last replay that made it and still has it, and the last use.
MADE, LAST_USE, USE = 0, 1, 2
# Gaps: what copying them takes. Ticks: what the segment before does to the lanes; level and peak with everything kept.
NBYTES, OUT_NS, IN_NS, COPY = 0, 1, 2, 4
AFTER_COMPUTE, AFTER_HOST, ISSUED, LANES = 0, 1, 2, 3
LEVEL, TOP, HEIGHTS = 0, 1, 2
# Replays: what they do to the lanes, how far they take memory above the level at their start, the bytes they leave
# there; how many ops they have, where these are in `replay_ops`, and how many gaps follow them there, whose storages
# stay.
COMPUTE, HOST, ISSUE, PEAK, BYTES, OPS, REPLAY_OP, REPLAY_GAPS, ROW = 0, 1, 2, 3, 4, 5, 6, 7, 8
# Replays remembered: a tree for each gap, whose nodes ask what is done about another gap. A node has the question (gap
# << 1 | whether the replay makes its storage; otherwise it reads it), and for each answer what is met there: 0 nothing
# yet, node << 1, or leaf << 1 | 1. A leaf has the row of the replay up to OPS. Nodes 0 .. gaps - 1 only lead to the
# trees, so with 0 in all MET nothing is remembered. Leaf 0 has how many nodes and leaves are in use; when there are no
# more, all is forgotten. A replay that was not known adds at most GROWTH nodes, as few long ones come twice. All this
# pays where plans or parts of them come again: of plans never seen before it saves nearly nothing.
QUESTION, MET, MEMORY, LEAF, GROWTH, NODES_PER_GAP, LEAVES_PER_GAP = 0, 1, 4, 8, 4, 64, 32
# A question with its answer is question << ANSWER_BITS | answer.
ANSWER_BITS, ANSWER = 2, 3
# Rates.
RATE_OUT, RATE_IN, RATE_DUPLEX_OUT, RATE_DUPLEX_IN, RATE_SHARE, RATE_LATENCY, RATE_SYNCHRONOUS = 0, 1, 2, 3, 4, 5, 6
# Among them the nanoseconds that the host takes for ticks and instructions.
HOST_TICK, HOST_OUT, HOST_RELEASE, HOST_DROP, HOST_IN, HOST_AWAIT, HOST_REPLAY = 7, 8, 9, 10, 11, 12, 13

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


def compiled(function: F) -> F:
    """For functions that Python calls."""
    try:
        return cast(F, numba.njit(cache=True, **_OPTIONS)(function))
    except RuntimeError:  # no place to write a cache: compile in each process instead
        return cast(F, numba.njit(**_OPTIONS)(function))


def inner(function: F) -> F:
    """For functions that only compiled functions call, and that end up in the caches of these."""
    return cast(F, numba.njit(**_OPTIONS, **_lean(no_cpython_wrapper=True))(function))


def inlined(function: F) -> F:
    """For small functions that call large ones: these would be optimised once more for each function around them."""
    return cast(F, numba.njit(inline="always", **_OPTIONS)(function))


@compiled
def _advance(compute: int, host: int, after_compute: int, after_host: int, issue: int) -> tuple[int, int]:
    """A run of ops on the lanes; see tables.lane_effect."""
    compute = max(compute + after_compute, host + after_host)
    return compute, compute if issue < 0 else host + issue


@inner
def _pass(compute: int, host: int, tick: int, lanes: Ints) -> tuple[int, int]:
    """The segment before a tick on the lanes."""
    row = tick * LANES
    return _advance(compute, host, lanes[row + AFTER_COMPUTE], lanes[row + AFTER_HOST], lanes[row + ISSUED])


@inner
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


@inner
def _bytes(words: Words, at: int) -> int:
    nbytes: int = words[at] + words[at + 1] * TICKS
    return nbytes


@inner
def _close(
    gap: int, tick: int, stamp: int, failure: Ints, starts: Words, ends: Words, targets: Ints, makers: Words,
    ops: Words, reads: Words, back: Words, away: Words, found: Words, seen: Ints, asked: Words, uses: Ints,
) -> tuple[int, int]:  # fmt: skip
    """Collect into `found`, in program order, the ops that bring the gap's storage back.

    Returns how many, -1 where it is impossible; and the number of questions in `asked`, each with its answer.
    """
    value, writer, reader = targets[gap], makers[gap], -1
    count = cursor = many = read = stop = 0
    use = stamp * (len(ops) // OP)  # uses by an earlier replay lie below
    missing = True
    while missing:
        if writer == NONE or not ops[writer * OP + REPLAYABLE]:
            failure[0] = NO_WRITER if writer == NONE else NOT_REPLAYABLE
            failure[1], failure[2], failure[3] = gap, reader if writer == NONE else writer, value
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
            value, writer, missing = reads[row + READ_VALUE], reads[row + READ_WRITER], True
            uses[value * USE + LAST_USE] = max(uses[value * USE + LAST_USE], use + reader)
            if reads[row + READ_FROM] <= tick <= reads[row + READ_UNTIL]:
                missing = False
                for i in range(reads[row + READ_FIRST], reads[row + READ_STOP]):
                    other = i & LOW
                    if starts[other] <= tick <= ends[other]:  # gaps of a storage do not overlap: the only one
                        state = _state(other, tick, starts, away)
                        missing = state != HERE
                        asked[many & LOW] = other << 1 + ANSWER_BITS | state
                        many += 1
                        if not missing:
                            _hold(other, tick, back, away)
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


@inner
def _state(gap: int, tick: int, starts: Words, away: Words) -> int:
    """What a replay at this tick does about a gap whose storage it makes; a gap that starts here has lost nothing."""
    state: int = away[gap] & (ALONE | STAYS if starts[gap] < tick else ALONE)
    return state


@inner
def _replay(
    gap: int, tick: int, stamp: int, count: int, many: int, place: int, synchronous: bool, replay_ns: int,
    starts: Words, ends: Words, ops: Words, reads: Words, writes: Words, costs: Ints, back: Words, away: Words,
    found: Words, asked: Words, uses: Ints, replays: Ints, replay_ops: Ints,
) -> int:  # fmt: skip
    """Run the ops in `found`: the row of the replay. What they make and a gap wants stays.

    Those gaps are listed in `replay_ops` from `place` on. Returns the number of questions in `asked`.
    """
    compute, host, issued, row = 0, -FAR, replay_ns, gap * ROW
    nbytes = stay = extra = peak = 0
    use = stamp * (len(ops) // OP)
    forever = use + len(ops) // OP - 1  # after any op of this replay
    for i in range(count):
        op = found[i]
        now, this, following, cost = use + op, op * OP, (op + 1) * OP, op * COST
        ns, issue = costs[cost + NS], costs[cost + ISSUE_NS]
        if synchronous and i > 0:
            compute += issue + ns
            host += issue + ns
        else:
            issued += issue
            compute += ns
            host = max(host, issued) + ns
        # How far above its start it takes memory: the walk of schedule.Replay.
        unused = 0
        for write in range(ops[this + WRITES] * WRITE, ops[following + WRITES] * WRITE, WRITE):
            at = write & LOW
            value, before = writes[at + WRITE_VALUE] * USE, writes[at + WRITE_BEFORE]
            size = _bytes(writes, at + WRITE_BYTES)
            for j in range(writes[at + WRITE_FIRST], writes[at + WRITE_STOP]):
                other = j & LOW
                if starts[other] <= tick <= ends[other]:
                    state = _state(other, tick, starts, away)
                    asked[many & LOW] = (other << 1 | 1) << ANSWER_BITS | state
                    many += other != gap  # whose answer is known
                    if state == STAYS:
                        uses[value + LAST_USE] = forever
                        nbytes += size
                        back[other] = tick
                        away[other] = HERE
                        if place + stay < len(replay_ops):
                            replay_ops[place + stay] = other
                        stay += 1
                    break
            if before != NONE and uses[before * USE + MADE] == stamp and uses[before * USE + LAST_USE] == now:
                uses[before * USE + MADE] = 0  # the same bytes go on as the next version
            else:
                extra += size
            used = uses[value + LAST_USE] > now
            uses[value + MADE] = stamp * used
            unused += size * (1 - used)
        peak = max(peak, extra + costs[cost + WORKSPACE])
        extra -= unused
        if i == 0:  # reads nothing that this replay has made
            continue
        for read in range(ops[this + READS] * READ, ops[following + READS] * READ, READ):
            value = reads[(read & LOW) + READ_VALUE] * USE
            if uses[value + MADE] == stamp and uses[value + LAST_USE] == now:
                uses[value + MADE] = 0
                extra -= _bytes(reads, (read & LOW) + READ_BYTES)
    replays[row + COMPUTE], replays[row + HOST] = compute, host
    replays[row + ISSUE] = -1 if synchronous else issued
    replays[row + PEAK], replays[row + BYTES] = peak, nbytes
    replays[row + OPS], replays[row + REPLAY_GAPS] = count, stay
    return many


@inner
def _remember(
    row: int, link: int, first: int, many: int, asked: Words, memory: Words, leaves: Ints, replays: Ints
) -> None:
    """Let the tree of a replay grow from `link`, where nothing is met yet, by the questions from `first` on."""
    gaps = len(replays) // ROW
    if leaves[0] + GROWTH > gaps * NODES_PER_GAP or leaves[1] == gaps * LEAVES_PER_GAP:
        leaves[0] = leaves[1] = 0
        for gap in range(gaps):
            memory[gap * MEMORY + MET] = 0
        return
    for i in range(first, min(first + GROWTH, many)):
        node = gaps + leaves[0]
        leaves[0] += 1
        memory[link & LOW] = node << 1
        place = node * MEMORY & LOW
        memory[place + QUESTION] = asked[i & LOW] >> ANSWER_BITS
        memory[place + MET] = memory[place + MET + ALONE] = memory[place + MET + STAYS] = 0
        link = place + MET + (asked[i & LOW] & ANSWER)
    if first + GROWTH >= many:
        leaves[1] += 1
        memory[link & LOW] = leaves[1] << 1 | 1
        for i in range(OPS + 1):
            leaves[leaves[1] * LEAF + i] = replays[row + i]


@inner
def _hold(gap: int, tick: int, back: Words, away: Words) -> None:
    """A replay at this tick reads the storage of a gap from memory."""
    back[gap] = min(back[gap], tick)
    away[gap] &= ALONE | REPLAYED  # one that would stay does not go away in the first place


@inner
def _replays(
    epoch: int, starts: Words, ends: Words, targets: Ints, makers: Words, ops: Words, reads: Words, writes: Words,
    costs: Ints, by_end: Words, synchronous: bool, replay_ns: int, back: Words, away: Words, found: Words, seen: Ints,
    asked: Words, uses: Ints, memory: Words, leaves: Ints, replays: Ints, replay_ops: Ints, failure: Ints,
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
        # Is one remembered that holds for what is away now?
        link, depth, stay = gap * MEMORY + MET, 0, 0
        behind = memory[link]
        while behind & 1 == 0 and behind > 0:
            node = (behind >> 1) * MEMORY
            question = memory[node + QUESTION]
            other = question >> 1
            state, was = _state(other, end, starts, away), away[other]
            link = node + MET + state
            behind = memory[link]
            # As _hold() where it is read from memory, and nothing otherwise. No branch: nothing could foretell it.
            makes = question & 1
            holds = (state == HERE) & (makes == 0)
            back[other] = min(back[other], end if holds else NONE)
            away[other] = was & (NONE - STAYS * holds)
            asked[stay] = other  # those that stay, for the end of the search
            stay += (state == STAYS) & makes
            depth += 1
        if behind > 0:
            leaf = (behind >> 1) * LEAF
            for i in range(stay):
                back[asked[i]] = end
                away[asked[i]] = HERE
            for i in range(OPS + 1):
                replays[row + i] = leaves[leaf + i]
            away[gap] = REPLAYED
            continue
        stamp = epoch * len(by_end) + position
        count, asks = _close(
            gap, end, stamp, failure, starts, ends, targets, makers, ops, reads, back, away, found, seen, asked, uses
        )
        if count < 0:
            break
        many = _replay(
            gap, end, stamp, count, asks, used + count, synchronous, replay_ns, starts, ends, ops, reads, writes,
            costs, back, away, found, asked, uses, replays, replay_ops,
        )  # fmt: skip
        away[gap] = REPLAYED
        replays[row + REPLAY_OP] = used
        for i in range(min(count, len(replay_ops) - used)):
            replay_ops[used + i] = found[i]
        used += count + replays[row + REPLAY_GAPS]
        _remember(row, link, depth, many, asked, memory, leaves, replays)
    return used


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
def _releases(
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
            compute, host = _pass(compute, host, tick, lanes)
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
            compute, host = _advance(compute, host, replays[row + COMPUTE], replays[row + HOST], replays[row + ISSUE])
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
def _fetches(copies: Ints, release: Ints, fetch: Words, following: Words, times: Ints, latest: Words) -> None:
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


@inner
def _emit(
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
        compute, host = _pass(compute, host, tick, lanes)
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
                ns = _copy_ns(nbytes, start, in_free, copies[gap * COPY + OUT_NS], alone, together, latency)
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
                ns = _copy_ns(nbytes, start, out_free, copies[gap * COPY + IN_NS], alone, together, latency)
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
                compute, host = _advance(
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
    compute, host = _pass(compute, host, last, lanes)
    return max(compute, host), highest, excess


@compiled
def lower_and_run(
    lowers: bool, runs: bool, again: bool, limit: int, codes: Codes, ahead: Ints, epoch: int,
    words: Words, ints: Ints, rates: Floats, work_words: Words, work_ints: Ints, edges: Ints,
    offsets: Words, steps: Words, freed: Ints, charges: Charges, waits: Words, replays: Ints, replay_ops: Ints,
    failure: Ints,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Lower the codes into a walk if `lowers`, then run it if `runs`.

    Returns how much the replays need of `replay_ops` (see packing.lower), -1 where one is impossible, and what run_walk
    returns. `again` says that the last lowering succeeded, with all these arrays. One entry for both, and what is in
    `packing.Packed` and `packing.Scratch` in blocks: Python takes 60 ns to hand over an array.
    """
    # In the order of packing.in_blocks().
    starts = words[edges[0] : edges[1]]
    ends = words[edges[2] : edges[3]]
    firsts = words[edges[4] : edges[5]]
    makers = words[edges[6] : edges[7]]
    ops = words[edges[8] : edges[9]]
    reads = words[edges[10] : edges[11]]
    writes = words[edges[12] : edges[13]]
    by_end = words[edges[14] : edges[15]]
    copies = ints[edges[16] : edges[17]]
    targets = ints[edges[18] : edges[19]]
    lanes = ints[edges[20] : edges[21]]
    heights = ints[edges[22] : edges[23]]
    costs = ints[edges[24] : edges[25]]
    events = ints[edges[26] : edges[27]]
    wanted = work_words[edges[28] : edges[29]]
    back = work_words[edges[30] : edges[31]]
    away = work_words[edges[32] : edges[33]]
    fetch = work_words[edges[34] : edges[35]]
    copied = work_words[edges[36] : edges[37]]
    reused = work_words[edges[38] : edges[39]]
    queue = work_words[edges[40] : edges[41]]
    following = work_words[edges[42] : edges[43]]
    latest = work_words[edges[44] : edges[45]]
    found = work_words[edges[46] : edges[47]]
    asked = work_words[edges[48] : edges[49]]
    memory = work_words[edges[50] : edges[51]]
    release = work_ints[edges[52] : edges[53]]
    done = work_ints[edges[54] : edges[55]]
    lists = work_ints[edges[56] : edges[57]]
    times = work_ints[edges[58] : edges[59]]
    waiting = work_ints[edges[60] : edges[61]]
    due = work_ints[edges[62] : edges[63]]
    seen = work_ints[edges[64] : edges[65]]
    uses = work_ints[edges[66] : edges[67]]
    leaves = work_ints[edges[68] : edges[69]]
    peaks = work_ints[edges[70] : edges[71]]
    used = nanoseconds = highest = excess = 0
    if lowers:
        synchronous = rates[RATE_SYNCHRONOUS] > 0.0
        failure[0] = OK
        differ = 0
        for gap in range(len(codes)):
            release[gap] = -1
            copied[gap] = reused[gap] = 0
            before = wanted[gap]
            wanted[gap] = (ALONE if codes[gap] == RECOMPUTE else HERE) | (STAYS if codes[gap] == SHARED else HERE)
            differ |= before ^ wanted[gap]
        # What replays do depends only on what is recomputed; `back`, `away` and `replays` have stood since.
        if differ or not again:
            for gap in range(len(codes)):
                back[gap] = ends[gap]
                away[gap] = wanted[gap]
            used = _replays(
                epoch, starts, ends, targets, makers, ops, reads, writes, costs, by_end, synchronous,
                int(rates[HOST_REPLAY]), back, away, found, seen, asked, uses, memory, leaves, replays, replay_ops,
                failure,
            )  # fmt: skip
        if failure[0] == OK and len(times) > 0:
            _releases(
                codes, ahead, starts, copies, firsts, lanes, events, rates, replays, back, away, release, fetch, copied,
                reused, queue, done, following, lists, times, waiting, due, latest, freed, charges, waits,
            )  # fmt: skip
            _fetches(copies, release, fetch, following, times, latest)
            _emit(codes, starts, ends, copies, back, away, release, fetch, reused, lists, offsets, steps, freed)
            if charges is not None and offsets[len(times)] == 0:
                charges[:] = 0  # a step in which nothing is done has no hooks
    if runs and failure[0] == OK:
        nanoseconds, highest, excess = run_walk(
            limit, copies, lanes, heights, rates, done, peaks, offsets, steps, freed, charges, waits, replays,
        )  # fmt: skip
    return used if failure[0] == OK else -1, nanoseconds, highest, excess
