"""Gaps and ops that are alike: what repeated blocks have in common."""

from __future__ import annotations

import numpy as np

from legroom.ir import Trace
from legroom.tables import Ints


def kinds_of(trace: Trace) -> list[Ints]:
    """Gaps of as many bytes that were made by the same ops."""
    made: dict[int, tuple[str, ...]] = {}
    for op in trace.ops:
        for storage, _ in op.writes:
            made[storage] = (*made.get(storage, ()), op.name)
    kinds: dict[tuple[object, ...], list[int]] = {}
    for gap in trace.gaps:
        where = trace.storages[gap.storage]
        number = where.gaps.index((gap.start, gap.end))  # of its gaps
        kinds.setdefault((made.get(gap.storage), where.nbytes, number), []).append(gap.id)
    return [np.array(gaps) for gaps in kinds.values()]


def kinds_of_ops(trace: Trace) -> list[Ints]:
    """Ops of one name that write as many bytes."""
    kinds: dict[tuple[str, int], list[int]] = {}
    for number, op in enumerate(trace.ops):
        nbytes = sum(trace.storages[storage].nbytes for storage, _ in op.writes)
        kinds.setdefault((op.name, nbytes), []).append(number)
    return [np.array(ops) for ops in kinds.values()]


def numbers(kinds: list[Ints], count: int) -> Ints:
    """Of each member, the number of its kind."""
    out = np.zeros(count, np.int64)
    for number, members in enumerate(kinds):
        out[members] = number
    return out
