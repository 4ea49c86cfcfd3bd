"""The one seam between the runtime and a device: where swapped bytes go, how they travel, what a digest of bits is.

A copy is started and later waited for; nothing here waits by itself. `Copy.wait()` on the CPU blocks the host; on a
device with streams it makes the compute stream wait for an event, which is why the runtime calls it in program order
and nowhere else.
"""

from __future__ import annotations

import ctypes
import hashlib
from concurrent.futures import Future
from typing import Protocol

import torch

from legroom.alloclog import Log, ProfilerLog
from legroom.runtime.spill import Slot, SpillFile


class Copy(Protocol):
    """Bytes under way, in one direction."""

    def wait(self) -> None: ...
    def done(self) -> bool: ...


class HostCopy(Protocol):
    """Bytes that arrived outside the device; `drop()` gives their place back."""

    def drop(self) -> None: ...


class Device(Protocol):
    """What CPU and CUDA implement."""

    name: str
    granularity_bytes: int
    smallest_swap_bytes: int

    def plannable(self, budget_bytes: int) -> int: ...
    def rounded(self, nbytes: int) -> int: ...
    def alive_bytes(self) -> int | None: ...
    def log(self, *, ops: bool) -> Log: ...
    def allocate(self, nbytes: int) -> torch.Tensor: ...
    def copy_out(self, bytes_: torch.Tensor) -> tuple[HostCopy, Copy]: ...
    def copy_in(self, host: HostCopy, bytes_: torch.Tensor) -> Copy: ...
    def digest(self, storage: torch.UntypedStorage) -> bytes: ...
    def set_cap(self, nbytes: int | None) -> None: ...
    def close(self) -> None: ...


class _FileCopy:
    __slots__ = ("_file", "slot", "_future")

    def __init__(self, file: SpillFile, slot: Slot) -> None:
        self._file = file
        self.slot = slot
        self._future: Future[None] | None = None

    def written_by(self, future: Future[None]) -> None:
        self._future = future

    def drop(self) -> None:
        # A slot that is still being written may not be handed to the next tensor.
        if self._future is not None:
            self._future.exception()
        self._file.give_back(self.slot)


class _FutureCopy:
    __slots__ = ("_future", "_keep")

    def __init__(self, future: Future[None], keep: object) -> None:
        self._future = future
        self._keep = keep  # the thread works on a raw address: the tensor must outlive the copy

    def wait(self) -> None:
        try:
            self._future.result()
        finally:
            self._keep = None

    def done(self) -> bool:
        return self._future.done()


class CpuDevice:
    """This process's tensor memory as the device, a file as the host."""

    name = "cpu"
    granularity_bytes = 1  # the CPU allocator's log counts the bytes asked for
    # Below this a hook, a system call and a page are dearer than what they free.
    smallest_swap_bytes = 16 * 1024

    def __init__(self, spill_dir: str | None = None) -> None:
        self.spill = SpillFile(spill_dir)

    def plannable(self, budget_bytes: int) -> int:
        """What of a budget a plan may fill; on the CPU all of it."""
        return budget_bytes

    def rounded(self, nbytes: int) -> int:
        """What an allocation of so many bytes counts for."""
        return nbytes

    def alive_bytes(self) -> int | None:
        """What the allocator says is alive; the CPU's does not say, and tensors are counted instead."""
        return None

    def log(self, *, ops: bool) -> Log:
        """The allocator's log. `ops`: with op times; the CPU's always has them."""
        return ProfilerLog()

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy_out(self, bytes_: torch.Tensor) -> tuple[HostCopy, Copy]:
        slot = self.spill.take(bytes_.numel())
        host = _FileCopy(self.spill, slot)
        future = self.spill.write(bytes_.data_ptr(), slot)
        host.written_by(future)
        return host, _FutureCopy(future, bytes_)

    def copy_in(self, host: HostCopy, bytes_: torch.Tensor) -> Copy:
        assert isinstance(host, _FileCopy)
        return _FutureCopy(self.spill.read(bytes_.data_ptr(), host.slot), bytes_)

    def digest(self, storage: torch.UntypedStorage) -> bytes:
        """A digest of all bytes of a storage; equal digests are taken for equal bits."""
        nbytes = storage.nbytes()
        if nbytes == 0:
            return b""
        view = memoryview((ctypes.c_char * nbytes).from_address(storage.data_ptr()))
        return hashlib.sha256(view).digest()

    def set_cap(self, nbytes: int | None) -> None:
        """The CPU has no allocator cap; the budget is kept by the schedule and checked by the allocator's log."""

    def close(self) -> None:
        self.spill.close()
