"""Host memory that a device can copy to: a capped pool of it, and the way to a file for what the pool cannot take.

Every buffer is mapped and registered by itself, so it takes the bytes of its size class and no more. PyTorch's own
pinned allocator rounds to powers of two: 24 to 74 % more on the five benchmark models, where these classes take 0 to
3.4 % more.

Nobody waits for a buffer. Each carries one event, recorded after whatever copy last touched it; who takes the buffer
puts his copy behind that event, on the device. In a planned step even that costs nothing: a buffer is given back after
the compute stream has waited for its copy, and the next copy out waits for the compute stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from legroom.errors import DeviceError
from legroom.hardware import cores
from legroom.runtime.spill import CLOSED, Slot, SpillFile

_CLASSES_PER_OCTAVE = 16  # 8 would waste up to 8.8 % on the benchmark models
_MADV_POPULATE_WRITE = 23  # not in the mmap module
_HUGE_BYTES = 2**21
_LEAST_SHARE_BYTES = 16 * 2**20  # of one thread: a thread more takes as long as a few of these
_POPULATE_THREADS = min(4, cores())
_PIECE_BYTES = 16 * 2**20  # at a time: meanwhile nobody else can map memory
_libc = ctypes.CDLL(None)  # its calls drop the interpreter lock, those of the mmap module do not


class Event(Protocol):
    """Of torch.cuda.Event, what copies through a buffer need."""

    def record(self, stream: Any) -> None: ...
    def wait(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...


class Memory(Protocol):
    """Where buffers come from. `get` raises DeviceError where there is no more to be had."""

    def get(self, nbytes: int) -> torch.Tensor: ...
    def free(self, tensor: torch.Tensor) -> None: ...
    def event(self) -> Event: ...


class Buffer:
    """One piece of pinned memory. Without a tensor once it was freed."""

    __slots__ = ("_first", "event", "nbytes", "tensor")

    def __init__(self, tensor: torch.Tensor, event: Event) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.event = event
        self.nbytes = tensor.numel()
        self._first: torch.Tensor | None = None

    def first(self, nbytes: int) -> torch.Tensor:
        """So many bytes of it. Steps repeat, so it is mostly the same number."""
        assert self.tensor is not None
        if self._first is None or self._first.numel() != nbytes:
            self._first = self.tensor[:nbytes]
        return self._first

    def freed(self) -> torch.Tensor:
        """Its memory, which is no longer its own."""
        assert self.tensor is not None
        tensor, self.tensor, self._first = self.tensor, None, None
        return tensor


@functools.lru_cache(4096)
def size_class(nbytes: int) -> int:
    """The size of the buffer that `nbytes` get: at most a sixteenth more, in whole pages."""
    granule = max(mmap.PAGESIZE, (1 << (nbytes - 1).bit_length()) // (2 * _CLASSES_PER_OCTAVE))
    return -(-nbytes // granule) * granule


def pages(nbytes: int) -> torch.Tensor:
    """Whole pages with nothing else on them, all there already: pinning them is then quick."""
    area = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A fork copies pages that a device may write, all of them and at once; a data loader's worker needs none.
    area.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel without them: pinning then takes 2.5 times as long
        area.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(area, dtype=torch.uint8)
    share = max(_LEAST_SHARE_BYTES, -(-nbytes // (_POPULATE_THREADS * _HUGE_BYTES)) * _HUGE_BYTES)
    populate = functools.partial(_populate, tensor.data_ptr(), nbytes, share)
    starts = range(0, nbytes, share)
    if len(starts) == 1:
        populate(0)
        return tensor
    # Most of the time goes into filling pages with zeros: with four threads a quarter of it, on an H200's host.
    with contextlib.suppress(RuntimeError), ThreadPoolExecutor(len(starts)) as crew:  # no threads at the very end
        list(crew.map(populate, starts))
    return tensor


def _populate(address: int, nbytes: int, share: int, start: int) -> None:
    end = min(start + share, nbytes)
    for place in range(start, end, _PIECE_BYTES):
        length = ctypes.c_size_t(min(_PIECE_BYTES, end - place))
        # Kernels before 5.14 refuse, and the pages come with the pinning.
        _libc.madvise(ctypes.c_void_p(address + place), length, _MADV_POPULATE_WRITE)


MOST_LARGER = 2  # a buffer that a copy takes in place of one of its own size
_Request = tuple[int, Future[Buffer | None] | None]  # a size class, and who waits for it; None: nobody yet


class PinnedPool:
    """Buffers by size class, never more than `limit_bytes` of them.

    Taking and giving back need no lock: garbage collection may give a buffer back in the middle of anything. All memory
    is got on one thread, ahead of need where `prepare` was called; what a take has to wait for goes first.
    """

    def __init__(self, memory: Memory, *, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.total_bytes = 0
        self.allocated_in_step = 0  # takes that had to wait for memory to be pinned
        self.refusal = ""  # why the machine gave less than the limit allows
        self._memory = memory
        self._free: dict[int, deque[Buffer]] = {}
        self._owned: set[Buffer] = set()
        self._reserved: Counter[int] = Counter()  # by size class: what is owned, and what is about to be
        self._requests: deque[_Request] = deque()
        self._lock = threading.RLock()  # for requests and what is reserved
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="legroom-pin")
        self._give_up = weakref.finalize(self, _shut, self._thread, self._requests, self._owned, memory)

    def take(self, nbytes: int) -> Buffer | None:
        """A buffer of at least so many bytes, to be used behind its event; None where the limit does not allow it."""
        size = size_class(nbytes)
        return self._pop(size) or self._take_otherwise(size)

    def give_back(self, buffer: Buffer) -> None:
        if buffer.tensor is None:
            return
        try:
            self._free[buffer.nbytes].append(buffer)
        except KeyError:
            self._free.setdefault(buffer.nbytes, deque()).append(buffer)

    def prepare(self, sizes: Iterable[int]) -> None:
        """Get buffers for copies of these sizes at once, in the background, as far as the limit allows and where there
        are none that a take would accept."""
        with self._lock:
            owned = self._reserved + Counter(size for size, answer in self._requests if answer is None)
            wanted = [size for size, buffer in served(map(size_class, sizes), owned) if buffer is None]
            self._requests.extend((size, None) for size in wanted)
        for _ in wanted:
            self._thread.submit(self._serve)

    def trim(self, sizes: Iterable[int]) -> None:
        """Give back, in the background, what copies of these sizes at once do not need."""
        self._thread.submit(self._trim, list(map(size_class, sizes)))

    def settle(self) -> None:
        """Wait for what `prepare` and `trim` began."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Give all memory back, buffers in use too. No copy may be under way."""
        self._closed = True
        self._give_up()
        self._free.clear()
        self.total_bytes = 0

    def _pop(self, size: int) -> Buffer | None:
        try:
            return self._free[size].popleft()
        except LookupError:
            return None

    def _take_otherwise(self, size: int) -> Buffer | None:
        if self._closed:
            raise DeviceError(CLOSED)
        if buffer := self._pop_larger(size, MOST_LARGER * size):
            return buffer
        if not self._reserve(size):
            if buffer := self._pop_larger(size, self.limit_bytes):
                return buffer
            self._evict(size)
            if not self._reserve(size):
                return None
        self.allocated_in_step += 1
        answer: Future[Buffer | None] = Future()
        with self._lock:
            with contextlib.suppress(ValueError):
                self._requests.remove((size, None))  # prepared for, but not got yet: this is the one
            self._requests.appendleft((size, answer))
        self._thread.submit(self._serve)
        return answer.result()

    def _pop_larger(self, size: int, most: int) -> Buffer | None:
        for other in sorted(self._free):
            if size < other <= most and (buffer := self._pop(other)):
                return buffer
        return None

    def _reserve(self, size: int) -> bool:
        with self._lock:
            if self.total_bytes + size > self.limit_bytes:
                return False
            self.total_bytes += size
            self._reserved[size] += 1
            return True

    def _unreserve(self, size: int) -> None:
        with self._lock:
            self.total_bytes -= size
            self._reserved[size] -= 1

    def _evict(self, size: int) -> None:
        """Make room among what is free, the largest first, if that is enough."""
        spare = sum(other * len(free) for other, free in list(self._free.items()))
        missing = self.total_bytes + size - self.limit_bytes
        if spare < missing:
            return
        for other in sorted(self._free, reverse=True):
            while missing > 0 and (buffer := self._pop(other)):
                self._discard(buffer)
                missing -= other

    def _discard(self, buffer: Buffer) -> None:
        self._owned.remove(buffer)
        _free_buffer(self._memory, buffer)
        self._unreserve(buffer.nbytes)

    # on the thread

    def _serve(self) -> None:
        with self._lock:
            if not self._requests:
                return  # a take withdrew it
            size, answer = self._requests.popleft()
            if answer is None and not self._reserve(size):
                return
        if answer is None:
            if buffer := self._get(size):
                self.give_back(buffer)
            return
        try:
            answer.set_result(self._get(size))
        except BaseException as error:
            answer.set_exception(error)

    def _get(self, size: int) -> Buffer | None:
        try:
            buffer = Buffer(self._memory.get(size), self._memory.event())
        except BaseException as error:
            self._unreserve(size)
            if not isinstance(error, DeviceError):
                raise
            # Asking again at every copy would be slow each time: what there is is all there is.
            self.limit_bytes = self.total_bytes
            self.refusal = str(error)
            return None
        self._owned.add(buffer)
        return buffer

    def _trim(self, sizes: list[int]) -> None:
        with self._lock:
            needed = Counter(buffer or size for size, buffer in served(sizes, self._reserved))
            surplus = self._reserved - needed
        for size, count in surplus.items():
            for _ in range(count):
                if buffer := self._pop(size):
                    self._discard(buffer)


def served(sizes: Iterable[int], owned: Mapping[int, int]) -> Iterator[tuple[int, int | None]]:
    """For each size class that is asked for, the class of a buffer that serves it, or None.

    Plans for inputs of many sizes take turns, and the buffers of the largest do for all of them. The largest requests
    choose first; takes come in another order, and find a buffer all the same: each takes the smallest that there is,
    so what it takes from a larger request leaves that one a larger buffer.
    """
    left = Counter({size: count for size, count in owned.items() if count > 0})
    for size in sorted(sizes, reverse=True):
        found = min((other for other in left if size <= other <= MOST_LARGER * size), default=None)
        if found is not None:
            left[found] -= 1
            if not left[found]:
                del left[found]
        yield size, found


def _free_buffer(memory: Memory, buffer: Buffer) -> None:
    tensor = buffer.freed()
    buffer.event.synchronize()
    memory.free(tensor)


def _shut(thread: ThreadPoolExecutor, requests: deque[_Request], owned: set[Buffer], memory: Memory) -> None:
    requests.clear()
    thread.shutdown(wait=True)
    while owned:
        _free_buffer(memory, owned.pop())


class StagedFile:
    """A spill file for bytes that no system call can reach: they pass through a piece of host memory on their way.

    One piece a direction, used by that direction's thread alone, so any size gets through and nothing waits for
    anything but the disk. The threads work on raw addresses: a tensor over the same storage would count as a user of
    it. Whoever asks for a copy keeps both ends alive until it is done.
    """

    def __init__(
        self,
        file: SpillFile,
        memory: Memory,
        *,
        piece_bytes: int,
        device: torch.device,
        out: contextlib.AbstractContextManager[object],
        into: contextlib.AbstractContextManager[object],
    ) -> None:
        """out, into: entered around copies of that direction; the device's stream for them."""
        self._file = file
        self._memory = memory
        self._piece_bytes = piece_bytes
        self._device = device
        self._out = out
        self._into = into
        self._pieces: dict[str, torch.Tensor] = {}
        self._give_up = weakref.finalize(self, _free_pieces, memory, self._pieces)

    def write(self, address: int, slot: Slot) -> Future[None]:
        return self._file.outward(self._write, address, slot)

    def read(self, address: int, slot: Slot) -> Future[None]:
        return self._file.inward(self._read, address, slot)

    def close(self) -> None:
        """Give the memory back. The file must be closed by now: its threads use it."""
        self._give_up()

    def _write(self, address: int, slot: Slot) -> None:
        piece = self._piece("out")
        for start in range(0, slot.nbytes, self._piece_bytes):
            nbytes = min(self._piece_bytes, slot.nbytes - start)
            with self._out:
                piece[:nbytes].copy_(self._at(address + start, nbytes))
            self._file.put(piece.data_ptr(), slot.offset + start, nbytes)

    def _read(self, address: int, slot: Slot) -> None:
        piece = self._piece("in")
        for start in range(0, slot.nbytes, self._piece_bytes):
            nbytes = min(self._piece_bytes, slot.nbytes - start)
            self._file.get(piece.data_ptr(), slot.offset + start, nbytes)
            with self._into:
                self._at(address + start, nbytes).copy_(piece[:nbytes])

    def _piece(self, direction: str) -> torch.Tensor:
        if direction not in self._pieces:
            self._pieces[direction] = self._memory.get(self._piece_bytes)
        return self._pieces[direction]

    def _at(self, address: int, nbytes: int) -> torch.Tensor:
        storage = torch._C._construct_storage_from_data_pointer(address, self._device, nbytes)  # type: ignore[attr-defined]
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)


def _free_pieces(memory: Memory, pieces: dict[str, torch.Tensor]) -> None:
    while pieces:
        memory.free(pieces.popitem()[1])
