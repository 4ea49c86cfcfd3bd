"""What a replay takes where it needs not all of an op's work.

A normalisation whose statistics are at hand is written out in one pass, and where a cast or a relu follows, in the same
pass as that (see `runtime.fused`). So it takes nothing by itself: what follows it takes as long as it always did, for
it moves the same bytes. Whatever else reads the result has to wait for a pass of its own, and pays for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from legroom.ir import Op, Trace, Value

CASTS = ("aten._to_copy.default",)
_RELUS = ("aten.relu_.default", "aten.relu.default")
# What runs in the same pass; and that of a pass alone, as a share of the op's own time: estimated from the bytes that
# they move. On an H200 a batch norm of 192 x 64 x 56 x 56 took 240 us, and a relu of it, which moves as much, 40.
FOLLOWERS = {"aten.native_layer_norm.default": CASTS, "aten.native_batch_norm.default": _RELUS}
_ONE_PASS = {"aten.native_layer_norm.default": 0.6, "aten.native_batch_norm.default": 0.2}


def with_short_replays(trace: Trace, short: Sequence[bool]) -> Trace:
    """The trace with what replays take. short: of the ops that were seen, one after the other, those of backward are
    not: whether a shorter way was proven."""
    seen = iter(short)
    norms = [op for op in trace.ops if op.phase != "backward" and next(seen, False) and op.why_not == ""]
    norms = [op for op in norms if op.name in _ONE_PASS and op.writes]
    if not norms:
        return trace
    readers: dict[Value, list[Op]] = defaultdict(list)
    for op in trace.ops:
        for value in dict.fromkeys(op.reads):
            readers[value].append(op)
    again: dict[int, float] = {}
    waiting: list[tuple[Op, float]] = []  # for a pass that writes out what they read
    for norm in norms:
        one_pass, followers = norm.seconds * _ONE_PASS[norm.name], FOLLOWERS[norm.name]
        others = readers[norm.writes[0]]
        followed = any(op.name in followers for op in others)
        again[norm.id] = 0.0 if followed else one_pass
        if followed:
            waiting += [(op, one_pass) for op in others if op.name not in followers]
    for op, one_pass in waiting:
        if op.why_not == "" and op.phase != "backward":
            again[op.id] = again.get(op.id, op.seconds) + one_pass
    short_ids = {op.id for op in norms}
    return replace(
        trace,
        ops=tuple(
            replace(op, replay_seconds=again[op.id], short=op.id in short_ids) if op.id in again else op
            for op in trace.ops
        ),
    )
