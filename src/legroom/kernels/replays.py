"""Which ops a recomputation runs again, what it reads and leaves in memory, and what that costs."""

from __future__ import annotations

from legroom.kernels.codes import *
from legroom.kernels.compiling import inner
from legroom.tables import Ints


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
def make_replays(
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
