"""The CUDA device: pinned host memory with a file behind it, copy streams, and waits by event in program order.

A copy out starts when the compute stream has reached the point where it was asked for; the source stays alive until
`Release`, where the compute stream waits for the copy and the reference is dropped. A reload is allocated on the
compute stream, so the order of instructions decides the peak whatever the clock says. `record_stream` is not used: it
delays the reuse of memory by an amount nobody can plan with.

What the pinned pool cannot take goes to a file, by threads that wait for their own copies. There `wait()` stops the
host until the bytes have arrived, which is later than needed and right.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from legroom.alloclog import Log, SampledLog
from legroom.arrange import UNBOUNDED, Piece
from legroom.errors import DeviceError
from legroom.runtime.device import Copy, FileCopy, Fingerprint, FutureCopy, HostCopy
from legroom.runtime.hashing import DeviceFingerprint, DueFingerprint, hash_bytes, make_current, prepare_digests
from legroom.runtime.pinned import Buffer, PinnedPool, StagedFile, pages
from legroom.runtime.spill import CLOSED, SpillFile
from legroom.units import format_bytes

# The allocator holds a request against its cap, rounded up to 2 MiB, and then maps whole pages of 20 MiB for it.
_MAPPED_BEYOND_BYTES = 18 * 2**20
_LARGEST_PIECE_BYTES = 32 * 2**20  # on the way to and from the file; a disk gains nothing from larger ones


class PinnedMemory:
    """Pages registered with the driver, for exactly as many bytes as asked for.

    Used on threads of its own only: a refusal stays behind as that thread's last CUDA error, and on the main thread the
    next kernel launch would report it.
    """

    event = torch.cuda.Event

    def __init__(self, index: int) -> None:
        self._index = index

    def get(self, nbytes: int) -> torch.Tensor:
        try:
            tensor = pages(nbytes)
        except OSError as error:
            raise DeviceError(f"no {format_bytes(nbytes)} of main memory could be had: {error.strerror}") from error
        cudart = torch.cuda.cudart()
        with torch.cuda.device(self._index):
            status = cudart.cudaHostRegister(tensor.data_ptr(), nbytes, 0)
        if int(status) != 0:
            raise DeviceError(
                f"{format_bytes(nbytes)} of main memory could not be pinned: {cudart.cudaGetErrorString(status)}"
            )
        return tensor

    def free(self, tensor: torch.Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


class _PinnedCopy:
    """Bytes in a pinned buffer, and the wait for the copy that last touched it."""

    __slots__ = ("_device", "buffer")

    def __init__(self, device: CudaDevice, buffer: Buffer) -> None:
        self._device = device
        self.buffer = buffer

    def wait(self) -> None:
        self.buffer.event.wait(self._device._compute())

    def drop(self) -> None:
        self._device.pool.give_back(self.buffer)


class _EventStamp:
    __slots__ = ("event",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(stream)

    def seconds_since(self, earlier: _EventStamp) -> float | None:
        return earlier.event.elapsed_time(self.event) * 1e-3 if self.event.query() else None


@functools.cache
def _streams(index: int) -> tuple[torch.cuda.Stream, ...]:
    """Out, in, and the same for the file. Made once for the process: streams are scarce and never given back."""
    return tuple(torch.cuda.Stream(index) for _ in range(4))


def _allocator_settings(text: str) -> None:
    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (newer or torch.cuda.memory._set_allocator_settings)(text)


def pieces_of(segments: Sequence[Mapping[str, Any]]) -> list[Piece]:
    """What is free in segments of one stream, as the allocator describes them. A stretch that ends with a block in use
    ends with a piece of no bytes, which could grow."""
    found: list[Piece] = []
    fixed = [segment for segment in segments if not segment.get("is_expandable")]
    # Stretches of one range of addresses: what lies between two has no memory.
    growing = sorted((s for s in segments if s.get("is_expandable")), key=lambda segment: segment["address"])
    for place, segment in enumerate([*growing, *fixed]):
        beyond = 0
        if place < len(growing):
            end = segment["address"] + segment["total_size"]
            beyond = growing[place + 1]["address"] - end if place + 1 < len(growing) else UNBOUNDED
        blocks = segment["blocks"]
        for number, block in enumerate(blocks):
            last = number + 1 == len(blocks)
            if block["state"] == "inactive":
                found.append(Piece(block["size"], beyond if last else 0))
            elif last and beyond:
                found.append(Piece(0, beyond))
    return found


def foreign_bytes(index: int) -> int:
    """What of the device's memory this process's allocator does not hold and cannot get.

    CUDA's own context, its libraries, and other processes: no cap counts them, and no budget can be met out of them.
    """
    free, total = torch.cuda.mem_get_info(index)
    return total - free - torch.cuda.memory_reserved(index)


class CudaDevice:
    """One GPU."""

    name = "cuda"
    has_cap = True
    leaves_hooks_out = True
    answers_later = True
    plans_apart = True
    granularity_bytes = 512
    smallest_swap_bytes = 1024 * 1024  # a 64 KiB copy reached 0.6 GB/s, a 1 MiB copy 49 of 55

    def __init__(self, index: int, *, host_budget_bytes: int, spill_dir: str | None = None) -> None:
        """host_budget_bytes: pinned memory, at most; what does not fit goes to a file in spill_dir."""
        self.index = index
        piece_bytes = min(_LARGEST_PIECE_BYTES, host_budget_bytes // 4 // mmap.PAGESIZE * mmap.PAGESIZE)
        if piece_bytes == 0:
            raise DeviceError(
                f"a host budget of {format_bytes(host_budget_bytes)} has no room for bytes on their way to the file; "
                f"name at least {format_bytes(4 * mmap.PAGESIZE)}"
            )
        self.spill = SpillFile(spill_dir)
        self.spilled_bytes = 0
        memory = PinnedMemory(index)
        self.pool = PinnedPool(memory, limit_bytes=host_budget_bytes - 2 * piece_bytes)
        self._out, self._in, self._file_out, self._file_in = _streams(index)
        self._staged = StagedFile(
            self.spill,
            memory,
            piece_bytes=piece_bytes,
            device=torch.device("cuda", index),
            out=torch.cuda.stream(self._file_out),
            into=torch.cuda.stream(self._file_in),
        )
        # One is enough: a stream that waits for an event waits for what was recorded by then.
        self._reached = torch.cuda.Event()
        self._current = torch._C._cuda_getCurrentStream(index), torch.cuda.current_stream(index)
        self._fraction_before: float | None = None
        # Without expandable segments a block may be up to 1 MiB larger than asked for, and no plan can say by how much.
        _allocator_settings("expandable_segments:True")
        prepare_digests(torch.device("cuda", index))

    def rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.granularity_bytes) * self.granularity_bytes

    # Straight from the allocator: torch.cuda.memory_allocated() sorts all its counters into a dictionary first.

    def alive_bytes(self) -> int | None:
        return int(torch._C._cuda_memoryStats(self.index)["allocated_bytes"]["all"]["current"])

    def reserved_bytes(self) -> int:
        return int(torch._C._cuda_memoryStats(self.index)["reserved_bytes"]["all"]["current"])

    def retries(self) -> int:
        return int(torch._C._cuda_memoryStats(self.index)["num_alloc_retries"])

    def merge_free(self) -> None:
        torch.cuda.empty_cache()

    def map_free(self, nbytes: int) -> None:
        with contextlib.suppress(torch.OutOfMemoryError):  # then it is mapped as it is needed
            self.allocate(nbytes)

    def has_captured(self) -> bool:
        """Graphs have pools of their own."""
        return any(
            segment["device"] == self.index and tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
            for segment in torch.cuda.memory_snapshot()
        )

    def free_pieces(self) -> list[Piece]:
        stream = self._compute().cuda_stream
        own = [
            segment
            for segment in torch.cuda.memory_snapshot()
            if (segment["device"], segment["stream"], segment["segment_type"]) == (self.index, stream, "large")
        ]
        return pieces_of(own)

    def log(self, *, ops: bool, shapes: bool = True, blocks: bool = False) -> Log:
        return SampledLog(self.index, ops=ops, shapes=shapes, blocks=blocks)

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{self.index}")

    def prepare(self, sizes: Iterable[int]) -> None:
        self.pool.prepare(sizes)

    def trim(self, sizes: Iterable[int]) -> None:
        # To give pinned memory back stops the device, again and again. In the background of the next dozen steps it
        # made each take 216 ms in place of 161.
        self.pool.trim(sizes)
        self.pool.settle()

    def copy_out(self, bytes_: torch.Tensor, *, waits: bool = False) -> tuple[HostCopy, Copy]:
        buffer = self.pool.take(bytes_.numel())
        if buffer is None:
            return self._copy_to_file(bytes_)
        self._copy(self._out, buffer.first(bytes_.numel()), bytes_, buffer)
        host = _PinnedCopy(self, buffer)
        return host, host

    def copy_in(self, host: HostCopy, bytes_: torch.Tensor, *, waits: bool = False) -> Copy:
        if isinstance(host, FileCopy):
            self._after_compute(self._file_in)
            return FutureCopy(self._staged.read(bytes_.data_ptr(), host.slot), bytes_)
        assert isinstance(host, _PinnedCopy)
        if host.buffer.tensor is None:
            raise DeviceError(CLOSED)
        self._copy(self._in, bytes_, host.buffer.first(bytes_.numel()), host.buffer)
        return host

    def _copy(self, stream: torch.cuda.Stream, to: torch.Tensor, source: torch.Tensor, buffer: Buffer) -> None:
        compute = self._after_compute(stream)
        buffer.event.wait(stream)  # the copy before this one, here or of the tensor that had the buffer before
        make_current(stream)
        try:
            to.copy_(source, non_blocking=True)
        finally:
            make_current(compute)
        buffer.event.record(stream)

    def _copy_to_file(self, bytes_: torch.Tensor) -> tuple[HostCopy, Copy]:
        self.spilled_bytes += bytes_.numel()
        self._after_compute(self._file_out)
        slot = self.spill.take(bytes_.numel())
        future = self._staged.write(bytes_.data_ptr(), slot)
        return FileCopy(self.spill, slot, future), FutureCopy(future, bytes_)

    def _after_compute(self, stream: torch.cuda.Stream) -> torch.cuda.Stream:
        """Let a stream wait for all that was asked of the compute stream until now."""
        compute = self._compute()
        self._reached.record(compute)
        self._reached.wait(stream)
        return compute

    def _compute(self) -> torch.cuda.Stream:
        """The current stream. Seldom another one than the last time, and an object for it takes its time to make."""
        now = torch._C._cuda_getCurrentStream(self.index)
        if now != self._current[0]:
            self._current = now, torch.cuda.current_stream(self.index)
        return self._current[1]

    def digest(self, storage: torch.UntypedStorage) -> bytes:
        return hash_bytes(storage)

    def fingerprint(self, storage: torch.UntypedStorage, *, due: bool = False) -> Fingerprint:
        return DueFingerprint(storage) if due else DeviceFingerprint(storage)

    def drain(self) -> None:
        torch.cuda.synchronize(self.index)

    def stamp(self) -> _EventStamp:
        return _EventStamp(torch.cuda.current_stream(self.index))

    def complaints(self) -> dict[str, int]:
        found = {"bytes swapped to a file, the host budget being spent": self.spilled_bytes}
        if self.pool.refusal:
            found[f"less main memory could be pinned than allowed: {self.pool.refusal}"] = 1
        return {name: count for name, count in found.items() if count}

    def set_cap(self, nbytes: int | None) -> None:
        """Let the allocator reserve at most so much; None: as much as before."""
        if self._fraction_before is None:
            self._fraction_before = torch.cuda.get_per_process_memory_fraction(self.index)
        total = torch.cuda.get_device_properties(self.index).total_memory
        if nbytes is not None:
            # Of a budget so small that this would take more than an eighth, no more than that.
            nbytes -= min(_MAPPED_BEYOND_BYTES, nbytes // 8)
        # Half a byte more: the allocator rounds the product down, and a cap of whole segments would lose one.
        fraction = self._fraction_before if nbytes is None else min(1.0, (nbytes + 0.5) / total)
        torch.cuda.set_per_process_memory_fraction(fraction, self.index)

    def close(self) -> None:
        torch.cuda.synchronize(self.index)
        self.spill.close()
        self._staged.close()
        self.pool.close()
