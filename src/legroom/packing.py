"""What the kernels work on: the tables packed into flat arrays, the program they make, and their memory.

Not among the kernels, as these are compiled again whenever a file beside them changes.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from legroom import tables as t
from legroom.kernels import codes as k
from legroom.kernels.codes import COPY, COST, HEIGHTS, KEEP, LANES, OP, READ, ROW, WRITE, Charges, Codes, Words
from legroom.kernels.lowering import lower_and_run
from legroom.tables import Floats, Ints, Tables

LINE = 64  # bytes of a cache line


class Blocks(NamedTuple):
    """Arrays side by side in two, as the 35 that there are cost Python 2 µs to hand over."""

    words: Words
    ints: Ints


class Packed(NamedTuple):
    """The tables as the kernels take them."""

    starts: Words  # gaps
    ends: Words
    copies: Ints
    firsts: Words  # the first gap of the same storage
    targets: Ints  # the value in it
    makers: Words  # the op that made that
    lanes: Ints  # ticks, and one more for the end of the step
    heights: Ints
    ops: Words  # one more than there are
    reads: Words
    writes: Words
    costs: Ints  # ops
    # Where gaps start and end: tick << 32 | gap << 1 | whether it ends. In this order; within a tick starts first.
    events: Ints
    by_end: Words  # gaps in the order in which they end
    rates: Floats
    blocks: Blocks  # with all of these but the rates


class Walk(NamedTuple):
    """A lowered plan as it is run.

    `failure` is (code, gap, op, value) where a replay is impossible; the rest is void then.
    """

    offsets: Words  # steps of tick t are offsets[t] .. offsets[t + 1] - 1
    steps: Words
    freed: Ints  # tick: bytes freed before its steps; those of synchronous copies are not among them
    charges: Charges  # tick: nanoseconds of the host before its steps, for these frees and itself; None where all are 0
    waits: Words  # tick: the gap whose copy out is waited for before that
    replays: Ints  # a row for each gap: lane effect, peak and bytes above the level at its start, its `replay_ops`
    replay_ops: Ints  # as much as there is room for; lower() returns how much there is
    failure: Ints


class Program(NamedTuple):
    """A lowered plan as instructions; the rest is as in its walk."""

    offsets: Words  # instructions of tick t are offsets[t] .. offsets[t + 1] - 1
    instructions: Words
    replays: Ints
    replay_ops: Ints
    failure: Ints


class Scratch(NamedTuple):
    """Memory of the kernels. `seen` and `uses` hold stamps, numbers that only grow: nothing is cleared."""

    wanted: Words  # gap: whether it is to be recomputed, in the last lowering
    back: Words  # gap: the tick at which its storage must be back
    away: Words  # gap: what a replay does that makes its storage
    release: Ints  # gap: the tick at which it is freed, -1 for not at all
    fetch: Words  # gap: the tick at which the copy back starts
    copied: Words  # first gap of a storage: whether the host has a copy
    reused: Words  # gap: whether it needs no copy out
    queue: Words
    done: Ints  # gap, and one for none: when its copy is over
    following: Words  # gap: the next in the list of `latest`, and one
    lists: Ints
    times: Ints  # tick: when it is reached
    waiting: Ints  # tick and one: nanoseconds of waiting for copies in; zero between calls
    due: Ints  # tick: nanoseconds of the host, as far as they are foreseen
    latest: Words  # tick: the last gap fetched for it, and one; zero between calls
    found: Words
    seen: Ints  # op
    asked: Words  # what the replay at hand has asked about gaps, with the answers
    uses: Ints  # value: the last replay that made it and still has it, the last use
    memory: Words  # a tree for each gap
    leaves: Ints
    peaks: Ints  # tick
    blocks: Blocks


def pack(tables: Tables) -> Packed:
    gaps, values = tables.gaps, tables.values
    starts, ends, firsts = (gaps[:, c].astype(np.uint32) for c in (t.G_START, t.G_END, t.G_FIRST))
    targets = gaps[:, t.G_VALUE].copy()
    links, costs = (t.O_READS, t.O_WRITES, t.O_REPLAYABLE), (t.O_NS, t.O_ISSUE_NS, t.O_WORKSPACE)
    read = values[tables.reads]
    nowhere = read[:, t.V_UNTIL] < 0
    since = np.where(nowhere, k.NONE, read[:, t.V_FROM])
    until = np.where(nowhere, 0, np.minimum(read[:, t.V_UNTIL], k.NONE))
    about = read[:, (t.V_FIRST, t.V_STOP, t.V_WRITER)]
    again = tables.ops[:, costs]
    again[:-1, 1] += tables.host[t.H_REPLAY_OP]  # these are what replays cost; the segments have the program
    speeds = (t.R_OUT, t.R_IN, t.R_DUPLEX_OUT, t.R_DUPLEX_IN, t.R_SHARE, t.R_LATENCY, t.R_SYNCHRONOUS)
    arrays: dict[str, Any] = {
        "starts": starts,
        "ends": ends,
        "copies": _flat(gaps[:, (t.G_BYTES, t.G_OUT, t.G_IN)], COPY, np.int64),
        "firsts": firsts,
        "targets": targets,
        "makers": np.append(values[:, t.V_WRITER], -1)[targets].astype(np.uint32),  # a target of -1 has none
        "lanes": _flat(tables.segments[:, (t.X_COMPUTE, t.X_HOST, t.X_ISSUE)], LANES, np.int64),
        "heights": _flat(tables.ticks[:, (t.T_LEVEL, t.T_PEAK)], HEIGHTS, np.int64),
        "ops": _flat(tables.ops[:, links], OP, np.uint32),
        "reads": _flat(
            np.column_stack([tables.reads, since, until, about, _halves(read[:, t.V_BYTES])]), READ, np.uint32
        ),
        "writes": _flat(np.column_stack([tables.writes, _written(tables)]), WRITE, np.uint32),
        "costs": _flat(again, COST, np.int64),
        "by_end": np.argsort(gaps[:, t.G_END], kind="stable").astype(np.uint32),
        "events": _events(gaps[:, t.G_START], gaps[:, t.G_END]),
    }
    words = {name for name, array in arrays.items() if array.dtype == np.uint32}
    blocks, places = _side_by_side({name: len(array) for name, array in arrays.items()}, words)
    for name, array in arrays.items():
        places[name][:] = array
    kinds = [t.H_TICK, t.H_SWAP_OUT, t.H_RELEASE, t.H_DROP, t.H_PREFETCH, t.H_AWAIT, t.H_REPLAY]
    rates = np.concatenate([tables.rates[list(speeds)], tables.host[kinds]])
    return Packed(**places, rates=rates, blocks=blocks)


def _events(starts: Ints, ends: Ints) -> Ints:
    gaps = np.arange(len(starts))
    order = np.lexsort((np.tile(gaps, 2), np.repeat([0, 1], len(gaps)), np.concatenate([starts, ends])))
    return np.concatenate([starts << 32 | gaps << 1, ends << 32 | gaps << 1 | 1])[order]


def _written(tables: Tables) -> Ints:
    """Of each value written: the gaps in which it stands, first and one past the last, and its bytes."""
    written = tables.writes[:, 0]
    about = tables.values[written]
    first = about[:, t.V_FIRST]
    stands = np.append(tables.gaps[:, t.G_VALUE], -1)[first] == written  # all gaps of a storage have one version
    return np.column_stack([first, np.where(stands, about[:, t.V_STOP], first), _halves(about[:, t.V_BYTES])])


def _halves(numbers: Ints) -> Ints:
    return np.column_stack([numbers & k.LOW, numbers >> 32])


def _flat(table: Ints, length: int, kind: type[np.generic]) -> Any:
    flat = _aligned(len(table) * length, kind)
    flat.reshape(-1, length)[:, : table.shape[1]] = table.astype(kind)  # -1 becomes NONE
    return flat


def _side_by_side(sizes: dict[str, int], words: set[str]) -> tuple[Blocks, dict[str, Any]]:
    """Blocks for arrays of these sizes, each from a border of cache lines on, and the arrays."""
    arrays, blocks = {}, []
    for kind in (np.uint32, np.int64):
        mine = {name: size for name, size in sizes.items() if (name in words) == (kind is np.uint32)}
        line = LINE // np.dtype(kind).itemsize
        firsts = list(itertools.accumulate((-(-size // line) * line for size in mine.values()), initial=0))
        blocks.append(_aligned(firsts.pop(), kind))
        for (name, size), first in zip(mine.items(), firsts, strict=True):
            arrays[name] = blocks[-1][first : first + size]
    return Blocks(*blocks), arrays


def in_blocks(packed: Packed, work: Scratch) -> tuple[Any, ...]:
    """The tables and the memory as `lower_and_run` takes them: in blocks, and where each array is in these."""
    edges = []
    for part in (packed, work):
        for block in part.blocks:
            for array in part[:-1]:
                if array.dtype == block.dtype:
                    first = (array.ctypes.data - block.ctypes.data) // block.itemsize
                    edges += [first, first + len(array)]
    return *packed.blocks, packed.rates, *work.blocks, np.array(edges)


def _aligned(length: int, kind: type[np.generic]) -> Any:
    """Zeros from a border of cache lines on, so that a row is in one line."""
    room = np.zeros(length * np.dtype(kind).itemsize + LINE, np.uint8)
    first = -room.ctypes.data % LINE
    return room[first : first + length * np.dtype(kind).itemsize].view(kind)


def possible_codes(codes: Codes, packed: Packed) -> Codes:
    """What can be done about a gap without a whole segment is nothing."""
    return np.where(packed.starts < packed.ends, codes, np.int8(KEEP))


def empty_walk(packed: Packed, *, replay_room: int = 0) -> Walk:
    ticks, gaps = len(packed.heights) // HEIGHTS, len(packed.ends)
    return Walk(
        offsets=np.zeros(ticks + 2, np.uint32),
        steps=np.zeros(3 * gaps, np.uint32),
        freed=np.zeros(ticks, np.int64),
        charges=np.zeros(ticks, np.int64) if packed.rates[k.HOST_TICK : k.HOST_REPLAY].any() else None,
        waits=np.zeros(ticks, np.uint32),
        replays=_aligned(gaps * ROW, np.int64),
        replay_ops=np.zeros(replay_room, np.int64),
        failure=np.zeros(4, np.int64),
    )


def empty_program(packed: Packed, *, replay_room: int = 0) -> Program:
    walk = empty_walk(packed, replay_room=replay_room)
    instructions = np.zeros(5 * len(packed.ends), np.uint32)
    return Program(walk.offsets.copy(), instructions, walk.replays, walk.replay_ops, walk.failure)


def scratch(tables: Tables) -> Scratch:
    ticks, gaps, ops, values = len(tables.ticks), len(tables.gaps), len(tables.ops), len(tables.values)
    asked = len(tables.reads) + len(tables.writes) + 1
    sizes = {"lists": 4 * gaps, "waiting": ticks + 1, "asked": asked, "done": gaps + 1, "uses": values * k.USE}
    sizes |= {"memory": gaps * (1 + k.NODES_PER_GAP) * k.MEMORY, "leaves": (1 + gaps * k.LEAVES_PER_GAP) * k.LEAF}
    sizes |= dict.fromkeys(("times", "due", "latest", "peaks"), ticks)
    sizes |= dict.fromkeys(("found", "seen"), ops)
    words = {"wanted", "back", "away", "fetch", "copied", "reused", "queue", "following", "latest"}
    words |= {"found", "asked", "memory"}
    blocks, arrays = _side_by_side({name: sizes.get(name, gaps) for name in Scratch._fields[:-1]}, words)
    return Scratch(**arrays, blocks=blocks)


def lower(codes: Codes, ahead: Ints, epoch: int, packed: Packed, work: Scratch, program: Program) -> int:
    """Lower one decision code for each gap into a program, and return how much its replays need of `replay_ops`.

    Replays remembered from an earlier call with the same scratch memory are not counted, and their ops are not listed.
    `codes` are `possible_codes`; `ahead` is read for AHEAD only. `epoch` is above zero and above that of any call
    before with the same scratch memory.
    """
    walk = empty_walk(packed)._replace(replays=program.replays, replay_ops=program.replay_ops, failure=program.failure)
    arrays: tuple[Any, ...] = (*in_blocks(packed, work), *walk)
    used = lower_and_run(True, False, False, 0, codes, ahead, epoch, *arrays)[0]
    if program.failure[0] == k.OK:
        _emit(codes, packed, work, program)
    return used


def _emit(codes: Codes, packed: Packed, work: Scratch, program: Program) -> None:
    """The instructions by tick. Within a tick: free, copy out, free what waits, what is needed now, fetch ahead."""
    start, end, at, freed = packed.starts, work.back, work.fetch, work.release
    swapped = freed >= 0
    copies = swapped & (work.reused == 0)
    drops = (codes == k.RECOMPUTE) | (codes == k.SHARED) & (end > start) | swapped & ~copies
    early = swapped & (at < end)
    stages = (
        (0, drops, start, k.DROP),
        (0, copies & (codes != k.SYNC), freed, k.RELEASE),
        (1, copies, start, k.SWAP_OUT),
        (2, copies & (codes == k.SYNC), freed, k.RELEASE),
        (3, swapped & ~early, at, k.PREFETCH),
        (3, swapped, end, k.AWAIT),  # after its fetch, as it has a higher code
        (4, work.away == k.REPLAYED, packed.ends, k.REPLAY),
        (5, early, at, k.PREFETCH),
    )
    rows = np.concatenate(
        [
            np.column_stack(np.broadcast_arrays(ticks[which], stage, np.flatnonzero(which), kind)).astype(np.int64)
            for stage, which, ticks, kind in stages
        ]
    )
    rows = rows[np.lexsort(rows.T[::-1])]
    program.offsets[:] = np.searchsorted(rows[:, 0], np.arange(len(program.offsets)))
    program.instructions[: len(rows)] = rows[:, 2] << k.KIND_BITS | rows[:, 3]
