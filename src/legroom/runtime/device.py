"""The one seam between the runtime and a device: where swapped bytes go, how they travel, what a digest of bits is.

A copy is started and later waited for; nothing here waits by itself. `Copy.wait()` on the CPU blocks the host; on a
device with streams it makes the compute stream wait for an event, which is why the runtime calls it in program order
and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from legroom.alloclog import Log, MemoryLog, ProfilerLog
from legroom.arrange import Piece
from legroom.runtime.hashing import hash_host_bytes
from legroom.runtime.spill import Slot, SpillFile

_DONE: Future[None] = Future()
_DONE.set_result(None)


class Copy(Protocol):
    """Bytes under way, in one direction."""

    def wait(self) -> None: ...


class HostCopy(Protocol):
    """Bytes that arrived outside the device; `drop()` gives their place back."""

    def drop(self) -> None: ...


class Fingerprint(Protocol):
    """A digest of bytes; on a device with streams it arrives when the device has got there."""

    def arrived(self) -> bool: ...
    def value(self) -> bytes: ...


class Stamp(Protocol):
    """A moment in the device's own time."""

    def seconds_since(self, earlier: Any) -> float | None:
        """None where the device has not got there yet."""


class Device(Protocol):
    """What CPU and CUDA implement."""

    name: str
    granularity_bytes: int
    smallest_swap_bytes: int
    has_cap: bool  # whether set_cap() is kept by the allocator, for all that it reserves
    # Whether tensors that a plan keeps may be saved without hooks. They cannot leave where a step goes another way
    # than planned, so only where a cap watches over it.
    leaves_hooks_out: bool
    answers_later: bool  # whether fingerprints arrive some time after they are asked for
    plans_apart: bool  # whether plans are made in another process while the program trains

    @property
    def index(self) -> int | None:
        """Where there may be several."""

    def rounded(self, nbytes: int) -> int: ...
    def alive_bytes(self) -> int | None: ...
    def reserved_bytes(self) -> int: ...
    def retries(self) -> int: ...
    def merge_free(self) -> None: ...
    def map_free(self, nbytes: int) -> None: ...
    def has_captured(self) -> bool: ...
    def free_pieces(self) -> list[Piece]: ...
    def log(self, *, ops: bool, shapes: bool = True, blocks: bool = False) -> Log: ...
    def allocate(self, nbytes: int) -> torch.Tensor: ...
    def prepare(self, sizes: Iterable[int]) -> None: ...
    def trim(self, sizes: Iterable[int]) -> None: ...
    def copy_out(self, bytes_: torch.Tensor, *, waits: bool = False) -> tuple[HostCopy, Copy]:
        """waits: whoever asks waits for it at once."""

    def copy_in(self, host: HostCopy, bytes_: torch.Tensor, *, waits: bool = False) -> Copy: ...
    def digest(self, storage: torch.UntypedStorage) -> bytes: ...
    def fingerprint(self, storage: torch.UntypedStorage, *, due: bool = False) -> Fingerprint:
        """due: its value is asked for soon, together with others, whether it has arrived or not."""

    def stamp(self) -> Stamp | None: ...
    def drain(self) -> None: ...
    def complaints(self) -> dict[str, int]: ...
    def set_cap(self, nbytes: int | None) -> None: ...
    def close(self) -> None: ...


class FileCopy:
    """Bytes in the spill file, or on their way there."""

    __slots__ = ("_file", "_written", "slot")

    def __init__(self, file: SpillFile, slot: Slot, written: Future[None]) -> None:
        self._file = file
        self._written = written
        self.slot = slot

    def drop(self) -> None:
        # A slot that is still being written may not be handed to the next tensor.
        self._written.exception()
        self._file.give_back(self.slot)


class FutureCopy:
    """A copy that a thread makes."""

    __slots__ = ("_future", "_keep")

    def __init__(self, future: Future[None], keep: object) -> None:
        self._future = future
        self._keep = keep  # the thread works on a raw address: the tensor must outlive the copy

    def wait(self) -> None:
        try:
            self._future.result()
        finally:
            self._keep = None


class _Digest:
    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def arrived(self) -> bool:
        return True

    def value(self) -> bytes:
        return self._value


class CpuDevice:
    """This process's tensor memory as the device, a file as the host."""

    name = "cpu"
    index = None
    granularity_bytes = 1  # the CPU allocator's log counts the bytes asked for
    # Below this a hook, a system call and a page are dearer than what they free.
    smallest_swap_bytes = 16 * 1024
    has_cap = False
    leaves_hooks_out = False
    answers_later = False
    plans_apart = False  # what computes here needs the cores

    def __init__(self, spill_dir: str | None = None) -> None:
        self.spill = SpillFile(spill_dir)

    def rounded(self, nbytes: int) -> int:
        """What an allocation of so many bytes counts for."""
        return nbytes

    def alive_bytes(self) -> int | None:
        """What the allocator says is alive; the CPU's does not say, and tensors are counted instead."""
        return None

    def reserved_bytes(self) -> int:
        """What the allocator holds, used or not; the CPU's gives everything back."""
        return 0

    def retries(self) -> int:
        """How often the allocator had to give memory back and get it anew to meet a request."""
        return 0

    def merge_free(self) -> None:
        """Let free memory become one piece again, between steps."""

    def map_free(self, nbytes: int) -> None:
        """Have so much free memory at hand in one piece, between steps."""

    def has_captured(self) -> bool:
        """Whether memory is there that a captured graph may know by its address."""
        return False

    def free_pieces(self) -> list[Piece]:
        """What the allocator holds and nobody uses; nothing where it holds nothing."""
        return []

    def log(self, *, ops: bool, shapes: bool = True, blocks: bool = False) -> Log:
        """The allocator's log. `ops`: with what ops are known by, and their times. blocks: one by one."""
        return ProfilerLog(shapes=shapes, blocks=blocks) if ops else MemoryLog()

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def prepare(self, sizes: Iterable[int]) -> None:
        """Hear of the sizes that will be outside the device at once; a file needs no preparation."""

    def trim(self, sizes: Iterable[int]) -> None:
        """Give back what copies of these sizes at once do not need; nothing here."""

    # Whoever waits at once does it itself: to hand a small copy to a thread and hear of it takes 100 to 200 µs, and a
    # step that is recorded has thousands.

    def copy_out(self, bytes_: torch.Tensor, *, waits: bool = False) -> tuple[HostCopy, Copy]:
        slot = self.spill.take(bytes_.numel())
        if waits:
            try:
                self.spill.put(bytes_.data_ptr(), slot.offset, slot.nbytes)
            except BaseException:
                self.spill.give_back(slot)
                raise
            return FileCopy(self.spill, slot, _DONE), FutureCopy(_DONE, None)
        future = self.spill.write(bytes_.data_ptr(), slot)
        return FileCopy(self.spill, slot, future), FutureCopy(future, bytes_)

    def copy_in(self, host: HostCopy, bytes_: torch.Tensor, *, waits: bool = False) -> Copy:
        assert isinstance(host, FileCopy)
        if waits:
            self.spill.get(bytes_.data_ptr(), host.slot.offset, host.slot.nbytes)
            return FutureCopy(_DONE, None)
        return FutureCopy(self.spill.read(bytes_.data_ptr(), host.slot), bytes_)

    def digest(self, storage: torch.UntypedStorage) -> bytes:
        """A digest of all bytes of a storage; equal digests are taken for equal bits."""
        return hash_host_bytes(storage)

    def fingerprint(self, storage: torch.UntypedStorage, *, due: bool = False) -> Fingerprint:
        return _Digest(self.digest(storage))

    def drain(self) -> None:
        """Wait until all that was asked of the device is done."""

    def stamp(self) -> Stamp | None:
        """None: the host does the work itself, beside all else that it does, and a few steps say little."""
        return None

    def complaints(self) -> dict[str, int]:
        """What did not go as it should, for the report, and how often or how many bytes."""
        return {}

    def set_cap(self, nbytes: int | None) -> None:
        """The CPU has no allocator cap; the budget is kept by the schedule and checked by the allocator's log."""

    def close(self) -> None:
        self.spill.close()
