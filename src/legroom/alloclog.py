"""The allocator's own account of a step: every allocation and free, op-internal workspace included, in program order.

On the CPU it comes from PyTorch's profiler. The runtime writes marks into the same log, so that what the program did
and what legroom did can be told apart afterwards, and each can be laid beside the ticks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast as mark
from torch.autograd.profiler import profile

# Marks in the log. What lies inside OWN, TICK and PROOF was done by legroom; OP is one op that the mode saw.
TICK = "legroom::tick"
OWN = "legroom::own"
PROOF = "legroom::proof"
OP = "legroom::op"
STANDS = "legroom::stands"  # behind a PROOF that was not repeated: it was the op itself
GONE = "legroom::gone "  # followed by bytes: a storage died in the program while it was not in memory
FREED = "legroom::freed "  # followed by bytes: something from before the log began was seen to be gone


@dataclass(frozen=True, slots=True)
class Allocation:
    address: int
    nbytes: int  # negative: a free


@dataclass(frozen=True, slots=True)
class Enter:
    """The beginning of a mark or of an outermost op."""

    name: str
    seconds: float
    shapes: str
    backward: bool  # inside the autograd engine


@dataclass(frozen=True, slots=True)
class Leave:
    name: str


Event = Allocation | Enter | Leave


def profiler_is_free() -> bool:
    """PyTorch has one profiler; starting ours while the user's runs would end theirs without a word."""
    return not torch._C._autograd._profiler_enabled()


class AllocationLog:
    """Start, run, stop. `events` is there after stop()."""

    def __init__(self) -> None:
        # The profiler greets on standard error at every start unless told otherwise before its first use.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._profile: Any = profile(use_cpu=True, profile_memory=True, record_shapes=True, use_kineto=True)
        self._running = False

    def start(self) -> None:
        self._profile.__enter__()
        self._running = True

    def cancel(self) -> None:
        """End without reading; for steps that raise."""
        if self._running:
            self._running = False
            with contextlib.suppress(Exception):
                self._profile.__exit__(None, None, None)

    def stop(self) -> list[Event]:
        self._running = False
        self._profile.__exit__(None, None, None)
        tree = self._profile.kineto_results.experimental_event_tree()
        return list(_flatten(tree))


def _flatten(roots: list[Any]) -> Iterator[Event]:
    """Pre-order walk: children lie inside their parents in time, so this is program order."""
    stack: list[Any] = [(node, False, False) for node in reversed(roots)]
    while stack:
        item = stack.pop()
        if isinstance(item, Leave):
            yield item
            continue
        node, inside_op, backward = item
        kind = node.tag.name
        if kind == "Allocation":
            fields = node.typed[1]
            if str(fields.device) == "cpu":
                yield Allocation(fields.ptr, fields.alloc_size)
            continue
        name = node.name
        ours = name.startswith("legroom::")
        backward = backward or name.startswith("autograd::engine")
        outermost = not inside_op and "::" in name and not name.startswith("autograd::")
        if ours or outermost:
            seconds = (node.end_time_ns - node.start_time_ns) * 1e-9
            yield Enter(name, seconds, "" if ours else _shapes(node), backward)
            stack.append(Leave(name))
        deeper = inside_op or (outermost and not ours)
        stack.extend((child, deeper, backward) for child in reversed(node.children))


def _shapes(node: Any) -> str:
    inputs = getattr(node.typed[1], "inputs", None) or ()
    return ",".join(str(getattr(i, "sizes", None)) for i in inputs)


__all__ = [
    "FREED",
    "GONE",
    "OP",
    "OWN",
    "PROOF",
    "STANDS",
    "TICK",
    "Allocation",
    "AllocationLog",
    "Enter",
    "Event",
    "Leave",
    "mark",
    "profiler_is_free",
]
