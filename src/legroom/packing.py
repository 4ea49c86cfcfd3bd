"""What the kernels work on: the tables packed into flat arrays, the program they make, and their memory.

Not in kernels.py, as what is compiled there is compiled again whenever that file changes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from legroom import tables as t
from legroom.kernels import KEEP, MEMORY, OP, READ, ROW, WRITE, Codes, Words, lower_codes, run_program
from legroom.tables import Floats, Ints, Tables


class Packed(NamedTuple):
    """The tables as the kernels take them."""

    starts: Words  # gaps
    ends: Words
    sizes: Ints  # bytes
    out_ns: Ints
    in_ns: Ints
    firsts: Words  # the first gap of the same storage
    targets: Ints  # the value in it
    makers: Ints  # the op that made that
    after_compute: Ints  # ticks: what the segment before does to the lanes; the last is the end of the step
    after_host: Ints
    issue: Ints
    levels: Ints
    tops: Ints  # the peak with everything kept
    ops: Ints  # one more than there are
    reads: Ints
    writes: Ints
    # Where gaps start and end: tick << 32 | gap << 1 | whether it ends. In this order; within a tick starts first.
    events: Ints
    by_end: Words  # gaps in the order in which they end
    rates: Floats


class Program(NamedTuple):
    """A lowered plan. `failure` is (code, gap, op, value) where a replay is impossible; the rest is void then."""

    offsets: Words  # instructions of tick t are offsets[t] .. offsets[t + 1] - 1
    instructions: Words
    replays: Ints  # a row for each gap: lane effect, peak and bytes above the level at its start, its `replay_ops`
    replay_ops: Ints  # as much as there is room for; lower() returns how much there is
    failure: Ints


class Scratch(NamedTuple):
    """Memory of the kernels. `seen`, `made` and `last_use` hold stamps, numbers that only grow: nothing is cleared."""

    back: Words  # gap: the tick at which its storage must be back
    away: Words  # gap: what a replay does that makes its storage
    release: Ints  # gap: the tick at which it is freed, -1 for not at all
    fetch: Words  # gap: the tick at which the copy back starts
    copied: Ints  # first gap of a storage: whether the host has a copy
    reused: Ints  # gap: whether it needs no copy out
    queue: Ints
    done: Ints  # when copies are over
    following: Words  # gap: the next in the list of `latest`, and one
    lists: Ints
    times: Ints  # tick: when it is reached
    waiting: Ints  # tick and one: nanoseconds of waiting for copies in; zero between calls
    latest: Words  # tick: the last gap fetched for it, and one; zero between calls
    found: Words
    seen: Ints  # op
    met: Words
    made: Ints  # value
    last_use: Ints  # value
    memory: Ints  # gap
    peaks: Ints  # tick


def pack(tables: Tables) -> Packed:
    gaps, values = tables.gaps, tables.values
    starts, ends, firsts = (gaps[:, c].astype(np.uint32) for c in (t.G_START, t.G_END, t.G_FIRST))
    sizes, out_ns, in_ns, targets = (gaps[:, c].copy() for c in (t.G_BYTES, t.G_OUT, t.G_IN, t.G_VALUE))
    after_compute, after_host, issue = (tables.segments[:, c].copy() for c in (t.X_COMPUTE, t.X_HOST, t.X_ISSUE))
    costs = (t.O_NS, t.O_ISSUE_NS, t.O_WORKSPACE, t.O_REPLAYABLE, t.O_READS, t.O_WRITES, t.O_ALONE)
    about = (t.V_FROM, t.V_UNTIL, t.V_FIRST, t.V_STOP, t.V_WRITER, t.V_BYTES)
    speeds = (t.R_OUT, t.R_IN, t.R_DUPLEX_OUT, t.R_DUPLEX_IN, t.R_SHARE, t.R_LATENCY, t.R_SYNCHRONOUS)
    return Packed(
        starts=starts,
        ends=ends,
        sizes=sizes,
        out_ns=out_ns,
        in_ns=in_ns,
        firsts=firsts,
        targets=targets,
        makers=np.append(values[:, t.V_WRITER], -1)[targets],  # a target of -1 has none
        after_compute=after_compute,
        after_host=after_host,
        issue=issue,
        levels=tables.ticks[:, t.T_LEVEL].copy(),
        tops=tables.ticks[:, t.T_PEAK].copy(),
        ops=_flat(tables.ops[:, costs], OP),
        reads=_flat(np.column_stack([tables.reads, values[tables.reads][:, about]]), READ),
        writes=_flat(np.column_stack([tables.writes, _written(tables)]), WRITE),
        by_end=np.argsort(gaps[:, t.G_END], kind="stable").astype(np.uint32),
        events=_events(gaps[:, t.G_START], gaps[:, t.G_END]),
        rates=tables.rates[list(speeds)],
    )


def _events(starts: Ints, ends: Ints) -> Ints:
    gaps = np.arange(len(starts))
    order = np.lexsort((np.tile(gaps, 2), np.repeat([0, 1], len(gaps)), np.concatenate([starts, ends])))
    return np.concatenate([starts << 32 | gaps << 1, ends << 32 | gaps << 1 | 1])[order]


def _written(tables: Tables) -> Ints:
    """Of each value written: its bytes, and the gaps in which it stands, first and one past the last."""
    written = tables.writes[:, 0]
    about = tables.values[written][:, (t.V_BYTES, t.V_FIRST, t.V_STOP)]
    stands = np.append(tables.gaps[:, t.G_VALUE], -1)[about[:, 1]] == written  # all gaps of a storage have one version
    about[:, 2] = np.where(stands, about[:, 2], about[:, 1])
    return about


def _flat(table: Ints, length: int) -> Ints:
    rows = np.zeros((len(table), length), np.int64)
    rows[:, : table.shape[1]] = table
    return rows.reshape(-1)


def possible_codes(codes: Codes, packed: Packed) -> Codes:
    """What can be done about a gap without a whole segment is nothing."""
    return np.where(packed.starts < packed.ends, codes, np.int8(KEEP))


def empty_program(packed: Packed, *, replay_room: int = 0) -> Program:
    ticks, gaps = len(packed.levels), len(packed.ends)
    return Program(
        offsets=np.zeros(ticks + 2, np.uint32),
        instructions=np.zeros(5 * gaps, np.uint32),
        replays=np.zeros(gaps * ROW, np.int64),
        replay_ops=np.zeros(replay_room, np.int64),
        failure=np.zeros(4, np.int64),
    )


def scratch(tables: Tables) -> Scratch:
    ticks, gaps, ops, values = len(tables.ticks), len(tables.gaps), len(tables.ops), len(tables.values)
    met = len(tables.reads) + len(tables.writes) + 1  # they are taken two at a time
    sizes = {"lists": 7 * gaps, "waiting": ticks + 1, "met": met, "memory": 2 * gaps * MEMORY}
    sizes |= dict.fromkeys(("times", "latest", "peaks"), ticks)
    sizes |= dict.fromkeys(("found", "seen"), ops)
    sizes |= dict.fromkeys(("made", "last_use"), values)
    words = ("back", "away", "fetch", "following", "latest", "found", "met")
    arrays: dict[str, Any] = {
        name: np.zeros(sizes.get(name, gaps), np.uint32 if name in words else np.int64) for name in Scratch._fields
    }
    return Scratch(**arrays)


def lower(codes: Codes, ahead: Ints, epoch: int, packed: Packed, work: Scratch, program: Program) -> int:
    """Lower one decision code for each gap into a program, and return how much its replays need of `replay_ops`.

    Replays remembered from an earlier call with the same scratch memory are not counted, and their ops are not listed.
    `codes` are `possible_codes`; `ahead` is read for AHEAD only. `epoch` is above zero and above that of any call
    before with the same scratch memory.
    """
    arrays: tuple[Any, ...] = (*packed, *work, *program)
    return lower_codes(codes, ahead, epoch, *arrays)


def run(program: Program, limit: int, packed: Packed, work: Scratch) -> tuple[int, int, int]:
    """(nanoseconds, peak bytes, bytes above the limit summed over ticks) of a program; `peaks` has each tick's peak.

    This is `simulate()` and `check_schedule()` without their records.
    """
    return run_program(
        program.offsets, program.instructions, program.replays, limit, packed.sizes, packed.out_ns, packed.in_ns,
        packed.after_compute, packed.after_host, packed.issue, packed.levels, packed.tops, packed.rates, work.done,
        work.peaks,
    )  # fmt: skip
