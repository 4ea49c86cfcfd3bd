"""The CUDA allocator's history of a step: every block that was asked for or given back, one by one.

PyTorch keeps such a history for its memory viewer. Counters tell how many requests there were by any moment, and the
history holds each of them under the same lock, so what lies between two moments is found by counting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

# A step of 10,000 ops that is proven makes some 200,000. They take a few hundred bytes each, while they last.
_MOST_ENTRIES = 2_000_000
_GRANULARITY_BYTES = 512  # the allocator's blocks are multiples of it; the history has what was asked for


class History:
    """The history of one device, recorded from start() to stop(). Somebody else's is left alone."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._running = False
        self._stream = 0

    def start(self) -> None:
        if _recording():
            return
        try:
            torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=_MOST_ENTRIES)
        except RuntimeError:  # an allocator that has none
            return
        self._running = True
        self._stream = torch.cuda.current_stream(self._index).cuda_stream

    def stop(self) -> list[tuple[int, int] | None]:
        """As `blocks`; nothing where there is no history, or where somebody has ended it."""
        if not self._running:
            return []
        try:
            entries = torch.cuda.memory._snapshot()["device_traces"][self._index] if _recording() else []
        finally:
            self.cancel()
        return blocks(entries, self._stream) if len(entries) < _MOST_ENTRIES else []

    def cancel(self) -> None:
        if self._running:
            self._running = False
            torch.cuda.memory._record_memory_history(None)


def _recording() -> bool:
    """Whether anybody does; where PyTorch does not tell, somebody might."""
    asked = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return asked is None or bool(asked())


def blocks(entries: Iterable[Mapping[str, Any]], stream: int) -> list[tuple[int, int] | None]:
    """(key, bytes) of every request in a history, (key, 0) where that block goes, in order.

    None stands for those that are not told about: blocks of other streams, and frees of what was there before. A free
    counts when it is requested: only a block that other streams use stays for longer.
    """
    found: list[tuple[int, int] | None] = []
    key_at: dict[int, int] = {}
    keys = 0
    for entry in entries:
        match entry["action"]:
            case "alloc" if entry["stream"] == stream and entry["size"] > 0:
                key_at[entry["addr"]] = keys
                found.append((keys, -(-entry["size"] // _GRANULARITY_BYTES) * _GRANULARITY_BYTES))
                keys += 1
            case "free_requested" if entry["addr"] in key_at:
                found.append((key_at.pop(entry["addr"]), 0))
            case "alloc" | "free_requested":
                found.append(None)
    return found
