"""The file that swapped bytes go to, on the CPU all of them, and the threads that carry them.

The file has no name: it is unlinked as soon as it is open, so it is gone at exit, after a crash and after a kill.
pread and pwrite rather than a mapping, because mapped pages count as resident. One thread a direction: copies of one
direction run in order, the two directions overlap, and both overlap with compute because the system calls drop the
interpreter lock.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
import weakref
from bisect import insort
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from legroom.errors import DeviceError
from legroom.units import format_bytes

PAGE_BYTES = 4096
CLOSED = "this room is closed, and a tensor swapped out by it was asked for; finish backward before close()"


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the file. `nbytes` is what it holds, `room` what it takes."""

    offset: int
    nbytes: int
    room: int


class SpillFile:
    """Slots of an unlinked file, reused by size class, and a reader and a writer thread."""

    def __init__(self, directory: str | None = None) -> None:
        where = directory if directory is not None else tempfile.gettempdir()
        self.directory = where
        try:
            self._fd: int | None = _open_unlinked(where)
        except OSError as error:
            raise DeviceError(
                f"cannot make a spill file in {where!r}: {error.strerror}; name another folder as spill_dir"
            ) from error
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="legroom-out")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="legroom-in")
        # Also for those who never call close(): the disk gets its bytes back with the object.
        self._give_back = weakref.finalize(self, _shut, self._fd, self._writer, self._reader)

    def take(self, nbytes: int) -> Slot:
        room = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        free = self._free.get(room)
        if free:
            return Slot(free.pop(0), nbytes, room)
        offset = self._end
        self._end += room
        return Slot(offset, nbytes, room)

    def give_back(self, slot: Slot) -> None:
        # The lowest offset is reused first, so that the file, and the page cache behind it, stays as short as it can.
        insort(self._free.setdefault(slot.room, []), slot.offset)

    def write(self, address: int, slot: Slot) -> Future[None]:
        return self.outward(self.put, address, slot.offset, slot.nbytes)

    def read(self, address: int, slot: Slot) -> Future[None]:
        return self.inward(self.get, address, slot.offset, slot.nbytes)

    def outward(self, job: Callable[..., None], *args: object) -> Future[None]:
        """Run a job on the writer's thread, after those before it."""
        self._descriptor()
        return self._writer.submit(job, *args)

    def inward(self, job: Callable[..., None], *args: object) -> Future[None]:
        """Run a job on the reader's thread, after those before it."""
        self._descriptor()
        return self._reader.submit(job, *args)

    def put(self, address: int, offset: int, nbytes: int) -> None:
        """Write bytes of memory to a place in the file."""
        view = _bytes_at(address, nbytes)
        done = 0
        try:
            while done < nbytes:
                done += os.pwrite(self._descriptor(), view[done:], offset + done)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise DeviceError(
                    f"the spill folder {self.directory!r} is full: {format_bytes(nbytes)} more did not fit beside "
                    f"{format_bytes(self._end)} already there; free space, name another folder as spill_dir, or raise "
                    "the budget"
                ) from error
            raise

    def get(self, address: int, offset: int, nbytes: int) -> None:
        """Read bytes of the file into memory."""
        view = _bytes_at(address, nbytes)
        done = 0
        while done < nbytes:
            got = os.preadv(self._descriptor(), [view[done:]], offset + done)
            if got == 0:
                raise DeviceError(
                    f"the spill file in {self.directory!r} was cut short; it must not be touched while a room is open"
                )
            done += got

    def close(self) -> None:
        """Wait for what is under way, then give the bytes back to the disk. Later copies fail."""
        self._give_back()
        self._fd = None

    def _descriptor(self) -> int:
        if self._fd is None:
            raise DeviceError(CLOSED)
        return self._fd


def _bytes_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _shut(fd: int, *threads: ThreadPoolExecutor) -> None:
    for thread in threads:
        thread.shutdown(wait=True)
    os.close(fd)


def _open_unlinked(directory: str) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT) or not os.path.isdir(directory):
            raise
    # File systems without O_TMPFILE: the name lives for the moment between these two calls.
    fd, path = tempfile.mkstemp(prefix="legroom-spill-", dir=directory)
    os.unlink(path)
    return fd
