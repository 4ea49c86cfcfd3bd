"""The CUDA device: pinned host memory, two copy streams, and waits by event in program order.

A copy out starts when the compute stream has reached the point where it was asked for; the source stays alive until
`Release`, where the compute stream waits for the copy and the reference is dropped. A reload is allocated on the
compute stream, so the order of instructions decides the peak whatever the clock says. `record_stream` is not used: it
delays the reuse of memory by an amount nobody can plan with.
"""

from __future__ import annotations

import functools
from collections import deque

import torch

from legroom.alloclog import Log, SampledLog
from legroom.runtime.device import Copy, HostCopy
from legroom.runtime.hashing import hash_bytes

_SLAB_BYTES = 2 * 1024 * 1024


class PinnedPool:
    """Pinned buffers by size class. Getting pinned memory costs half a second a GiB and stops the device: keep it."""

    def __init__(self) -> None:
        self._free: dict[int, deque[tuple[torch.Tensor, torch.cuda.Event | None]]] = {}
        self.total_bytes = 0

    def take(self, nbytes: int) -> torch.Tensor:
        room = -(-nbytes // _SLAB_BYTES) * _SLAB_BYTES
        free = self._free.get(room)
        # A buffer given back may still be read by a copy that is under way; the oldest is the first to be done.
        if free and ((busy := free[0][1]) is None or busy.query()):
            return free.popleft()[0]
        self.total_bytes += room
        return torch.empty(room, dtype=torch.uint8, pin_memory=True)

    def give_back(self, buffer: torch.Tensor, busy: torch.cuda.Event | None) -> None:
        self._free.setdefault(buffer.numel(), deque()).append((buffer, busy))

    def clear(self) -> None:
        self._free.clear()


class _PinnedCopy:
    __slots__ = ("_pool", "buffer", "last_use", "written")

    def __init__(self, pool: PinnedPool, buffer: torch.Tensor, written: torch.cuda.Event) -> None:
        self._pool = pool
        self.buffer = buffer
        self.written = written
        self.last_use = written

    def drop(self) -> None:
        self._pool.give_back(self.buffer, self.last_use)


class _StreamCopy:
    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def done(self) -> bool:
        return self._event.query()


@functools.cache
def _streams(index: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Made once for the process: streams are a scarce thing and are never given back."""
    return torch.cuda.Stream(index), torch.cuda.Stream(index)


def _allocator_settings(text: str) -> None:
    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (newer or torch.cuda.memory._set_allocator_settings)(text)


class CudaDevice:
    """One GPU."""

    name = "cuda"
    granularity_bytes = 512
    smallest_swap_bytes = 1024 * 1024  # a 64 KiB copy reached 0.6 GB/s, a 1 MiB copy 49 of 55

    def __init__(self, index: int) -> None:
        self.index = index
        self.pool = PinnedPool()
        self._out, self._in = _streams(index)
        self._previous_fraction: float | None = None
        # Without expandable segments a block may be up to 1 MiB larger than asked for, and no plan can say by how much.
        _allocator_settings("expandable_segments:True")

    def plannable(self, budget_bytes: int) -> int:
        # The cap holds for reserved memory, of which some is always between blocks: 0.1 to 0.5 GiB of 20 were seen.
        return int(budget_bytes * 0.97)

    def rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.granularity_bytes) * self.granularity_bytes

    def alive_bytes(self) -> int | None:
        return torch.cuda.memory_allocated(self.index)

    def log(self, *, ops: bool) -> Log:
        return SampledLog(self.index, ops=ops)

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{self.index}")

    def copy_out(self, bytes_: torch.Tensor) -> tuple[HostCopy, Copy]:
        buffer = self.pool.take(bytes_.numel())
        done = self._copy(self._out, buffer[: bytes_.numel()], bytes_, None)
        return _PinnedCopy(self.pool, buffer, done), _StreamCopy(done)

    def copy_in(self, host: HostCopy, bytes_: torch.Tensor) -> Copy:
        assert isinstance(host, _PinnedCopy)
        host.last_use = self._copy(self._in, bytes_, host.buffer[: bytes_.numel()], host.written)
        return _StreamCopy(host.last_use)

    def _copy(
        self, stream: torch.cuda.Stream, to: torch.Tensor, source: torch.Tensor, after: torch.cuda.Event | None
    ) -> torch.cuda.Event:
        # The compute stream is asked for before the side stream becomes current.
        reached = torch.cuda.current_stream(self.index).record_event()
        stream.wait_event(reached)
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            return stream.record_event()

    def digest(self, storage: torch.UntypedStorage) -> bytes:
        return hash_bytes(storage)

    def set_cap(self, nbytes: int | None) -> None:
        total = torch.cuda.get_device_properties(self.index).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if nbytes is None else min(1.0, nbytes / total), self.index)

    def close(self) -> None:
        torch.cuda.synchronize(self.index)
        self.pool.clear()
