"""A trace and a machine as integer arrays. Rows are addressed by the column names below; `packing.pack` takes it on.

Times are integer nanoseconds. A copy's length is a product of two doubles cut to an integer, never a sum of products,
so that compiled code and plain Python cannot differ by a fused multiply-add.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from legroom.hardware import Hardware
from legroom.ir import Op, Trace, Value

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

NEVER = 2**62  # later than any op and any time; also the cost of what cannot be done

# Columns. A gap's G_FIRST is the first gap of the same storage: it stands for the storage where a number is needed.
# G_VALUE is what stands in it, -1 if no op knows it; G_OUT and G_IN are the nanoseconds of its copies, undisturbed.
G_STORAGE, G_START, G_END, G_VALUE, G_BYTES, G_FIRST, G_OUT, G_IN, G_COLUMNS = 0, 1, 2, 3, 4, 5, 6, 7, 8
# A value stands in memory from tick V_FROM to V_UNTIL (both inclusive), where gaps V_FIRST .. V_STOP - 1 do not take it
# out.
V_WRITER, V_BYTES, V_FROM, V_UNTIL, V_FIRST, V_STOP = 0, 1, 2, 3, 4, 5
# One row more than ops.
O_NS, O_ISSUE_NS, O_WORKSPACE, O_REPLAYABLE, O_READS, O_WRITES, O_COLUMNS = 0, 1, 2, 3, 4, 5, 6
T_LEVEL, T_PEAK = 0, 1  # tick
X_COMPUTE, X_HOST, X_ISSUE = 0, 1, 2  # what a run of ops does to the lanes: see `lane_effect`
# Rates.
R_OUT, R_IN, R_DUPLEX_OUT, R_DUPLEX_IN, R_SHARE, R_LATENCY, R_SYNCHRONOUS, R_COUNT = 0, 1, 2, 3, 4, 5, 6, 7
# Nanoseconds on the host: the fields of hardware.HostCosts.
H_TICK, H_SWAP_OUT, H_RELEASE, H_DROP, H_PREFETCH, H_AWAIT, H_REPLAY, H_REPLAY_OP = 0, 1, 2, 3, 4, 5, 6, 7


class Tables(NamedTuple):
    gaps: Ints
    values: Ints
    ops: Ints
    reads: Ints  # value ids, each once per op
    writes: Ints  # rows (value id, id of the value written over, or -1)
    ticks: Ints
    segments: Ints  # row 0 is the head, row t + 1 is segment t
    rates: Floats
    host: Ints


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def rates(hardware: Hardware) -> Floats:
    out = np.zeros(R_COUNT)
    out[R_OUT] = 1e9 / hardware.out_bytes_per_second
    out[R_IN] = 1e9 / hardware.in_bytes_per_second
    out[R_DUPLEX_OUT] = 1e9 / hardware.duplex_out_bytes_per_second
    out[R_DUPLEX_IN] = 1e9 / hardware.duplex_in_bytes_per_second
    out[R_SHARE] = hardware.copy_compute_share
    out[R_LATENCY] = nanoseconds(hardware.latency_seconds)
    out[R_SYNCHRONOUS] = float(hardware.synchronous)
    return out


def lane_effect(ops: Iterable[Op], *, synchronous: bool) -> tuple[int, int, int]:
    """A run of ops as a step in max-plus algebra: compute' = max(compute + a, host + b), host' = host + c.

    Where the host waits for compute, host' = compute' instead, if there was an op at all (then c is -1).
    """
    after_compute, after_host, issued = 0, -NEVER, 0
    for op in ops:
        ns, issue = nanoseconds(op.seconds), nanoseconds(op.issue_seconds)
        if synchronous and issued:  # not the first: the host stands where compute stands
            after_compute, after_host = after_compute + issue + ns, after_host + issue + ns
        else:
            issued += issue
            after_compute, after_host = after_compute + ns, max(after_host, issued) + ns
        if synchronous:
            issued = -1
    return after_compute, after_host, issued


def with_ticks(tables: Tables) -> Ints:
    """The segments of a step in which anything is done at all: the host has each tick to see to after the ops before.

    The step after the last tick is as it was.
    """
    segments, tick = tables.segments.copy(), int(tables.host[H_TICK])
    if not tick:
        return segments
    before = segments[:-1]  # a view
    if tables.rates[R_SYNCHRONOUS]:
        before[:, X_HOST] = np.maximum(before[:, X_HOST], 0) + tick
        before[:, X_COMPUTE] += tick
        before[:, X_ISSUE] = -1
    else:
        before[:, X_ISSUE] += tick
        before[:, X_HOST] = np.maximum(before[:, X_HOST], before[:, X_ISSUE])
    return segments


def reached(segments: Ints) -> list[int]:
    """The nanoseconds at which the end of each segment is reached where nothing but these segments happens."""
    compute = host = 0
    times = []
    for after_compute, after_host, issue in segments.tolist():
        compute = max(compute + after_compute, host + after_host)
        host = compute if issue < 0 else host + issue
        times.append(compute)
    return times


def again_ns(tables: Tables, ops: Sequence[int]) -> int:
    """What a replay of these ops takes: of compute, and of the host beside the issue of ops."""
    host = tables.host
    return int(tables.ops[list(ops), O_NS].sum() + host[H_DROP] + host[H_REPLAY] + len(ops) * host[H_REPLAY_OP])


def tabulate(trace: Trace, hardware: Hardware) -> Tables:
    ids = value_ids(trace)
    speeds = rates(hardware)
    gaps = _gap_rows(trace, ids, speeds)
    reads, writes, ops = _op_rows(trace, ids)
    bounds = [0, *(tick.op for tick in trace.ticks), len(trace.ops)]
    segments = [
        lane_effect(trace.ops[start:end], synchronous=hardware.synchronous) for start, end in itertools.pairwise(bounds)
    ]
    return Tables(
        gaps=gaps,
        values=_value_rows(trace, ids),
        ops=ops,
        reads=reads,
        writes=writes,
        ticks=_rows([(tick.level_bytes, tick.peak_bytes) for tick in trace.ticks], 2),
        segments=_rows(segments, 3),
        rates=speeds,
        host=np.array([nanoseconds(seconds) for seconds in astuple(hardware.host)], np.int64),
    )


def value_ids(trace: Trace) -> dict[Value, int]:
    ids: dict[Value, int] = {}
    for op in trace.ops:
        for value in (*op.reads, *op.writes):
            ids.setdefault(value, len(ids))
    return ids


def _value_rows(trace: Trace, ids: dict[Value, int]) -> Ints:
    writer = {value: op.id for op in trace.ops for value in op.writes}
    issued = [tick.op for tick in trace.ticks]
    first_gap = list(itertools.accumulate((len(storage.gaps) for storage in trace.storages), initial=0))
    rows = []
    for value in ids:
        storage = trace.storages[value[0]]
        since, until = 0, -1  # nowhere: it may be gone as soon as the program lets go of it
        if storage.persistent:
            until = NEVER
        elif storage.gaps:
            since, until = storage.gaps[0][0], storage.gaps[-1][1]
        overwriter = writer.get((value[0], value[1] + 1))
        if overwriter is not None:
            until = min(until, bisect.bisect_right(issued, overwriter) - 1)
        gaps = first_gap[storage.id], first_gap[storage.id + 1]
        rows.append((writer.get(value, -1), storage.nbytes, since, until, *gaps))
    return _rows(rows, 6)


def _gap_rows(trace: Trace, ids: dict[Value, int], speeds: Floats) -> Ints:
    rows: list[tuple[int, ...]] = []
    for storage in trace.storages:
        last_end, first = -1, len(rows)
        copies = [int(speeds[R_LATENCY]) + int(storage.nbytes * speeds[lane]) for lane in (R_OUT, R_IN)]
        value = ids.get((storage.id, storage.gap_version), -1)
        for start, end in storage.gaps:
            # A gap that starts where the one before it ends: the storage is used at that tick, after the instructions
            # there have run, so it cannot be away before the next.
            rows.append((storage.id, max(start, last_end + 1), end, value, storage.nbytes, first, *copies))
            last_end = end
    return _rows(rows, G_COLUMNS)


def _op_rows(trace: Trace, ids: dict[Value, int]) -> tuple[Ints, Ints, Ints]:
    reads: list[int] = []
    writes: list[tuple[int, int]] = []
    rows = []
    for op in trace.ops:
        rows.append(
            (
                nanoseconds(op.again_seconds),
                nanoseconds(op.issue_seconds),
                op.workspace_bytes,
                int(op.why_not == ""),
                len(reads),
                len(writes),
            )
        )
        reads.extend(ids[value] for value in dict.fromkeys(op.reads))
        writes.extend((ids[s, version], ids[s, version - 1] if version else -1) for s, version in op.writes)
    rows.append((0, 0, 0, 0, len(reads), len(writes)))
    return np.array(reads, dtype=np.int64), _rows(writes, 2), _rows(rows, O_COLUMNS)


def _rows(rows: Sequence[tuple[int, ...]], columns: int) -> Ints:
    return np.array(rows, dtype=np.int64).reshape(len(rows), columns)
