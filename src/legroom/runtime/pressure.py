"""Room for what comes next, in the first steps of a plan, and in all of one whose memory could not be arranged.

Where a step's memory falls is worked out beforehand (see `arrange`), and what was worked out may be wrong: memory that
others left in between, a tensor that somebody still holds. An op that then finds no room ends the step, and in backward
it cannot be run again. So such steps make every segment's requests before the program does, and give them back at once.
Where one finds no room, what is saved and needed last is swapped out before the program goes on.

Plans that follow the input's size do so wherever a segment takes much of what is free there (see `Program`): of those
nobody knows where their memory falls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import torch

from legroom.arrange import LARGE_BYTES
from legroom.ir import Trace
from legroom.runtime.device import Device
from legroom.runtime.residency import Entry, Ledger

_NEVER = 1 << 60
_ONE_MORE = -1 << 60  # as a key


class Relief:
    """Who can make room: what is saved, that first which is read last."""

    def __init__(self, trace: Trace) -> None:
        self._read: dict[int, list[int]] = defaultdict(list)  # by storage: when backward reads it
        for number, tick in enumerate(trace.ticks):
            if tick.kind == "unpack":
                self._read[tick.storage].append(number)

    def make_room(self, ledger: Ledger, tick: int, asked_for: Entry | None, nbytes: int) -> tuple[int, bool]:
        """See to it that so much is free in one piece. How many storages had to go for it, and whether it is."""
        gone = 0
        while not _is_free(ledger.device, nbytes):
            more = self.evict(ledger, tick, asked_for, nbytes)
            if not more:
                return gone, False
            gone += len(more)
        return gone, True

    def evict(
        self,
        ledger: Ledger,
        tick: int,
        asked_for: Entry | None,
        nbytes: int,
        stay: Collection[Entry] = (),
    ) -> list[Entry]:
        """Until so much is free, be it in pieces. What went."""
        idle = [
            entry
            for entry in ledger.by_key.values()
            if entry is not asked_for and entry.nbytes > LARGE_BYTES and entry.exclusive() and entry not in stay
        ]
        idle.sort(key=lambda entry: (self._next_read(entry, tick), entry.nbytes), reverse=True)
        gone: list[Entry] = []
        for entry in idle:
            if nbytes <= 0:
                break
            entry.start_saving(waits=True)
            entry.release()
            nbytes -= entry.nbytes
            gone.append(entry)
        return gone

    def _next_read(self, entry: Entry, tick: int) -> int:
        """By a step before this one it may be read at any time, or never."""
        if entry.generation != entry.ledger.generation:
            return _NEVER
        return next((number for number in self._read[entry.number] if number > tick), _NEVER)


def _is_free(device: Device, nbytes: int) -> bool:
    try:
        device.allocate(nbytes)
    except torch.OutOfMemoryError:
        return False
    return True


class Pressure:
    """What a trace asks for, segment by segment, and who can make room for it."""

    def __init__(self, trace: Trace) -> None:
        sizes = {key: nbytes for segment in trace.requests for key, nbytes in segment if nbytes > LARGE_BYTES}
        self._sizes = sizes
        self._segments = [
            tuple((key, nbytes) for key, nbytes in segment if nbytes > LARGE_BYTES or (nbytes == 0 and key in sizes))
            for segment in trace.requests[1:]
        ]
        self._relief = Relief(trace)

    def relieve(self, ledger: Ledger, tick: int, asked_for: Entry | None, *, watched: bool = False) -> int:
        """Make sure of what is asked for from this tick to the next. How many storages had to go for it.

        watched: by a mode, which makes PyTorch write sums elsewhere that it writes in place otherwise: one block more.
        """
        segment = self._segments[tick] if tick < len(self._segments) else ()
        if watched and segment:
            segment = (*segment, (_ONE_MORE, max(nbytes for _, nbytes in segment)))
        gone = 0
        while any(nbytes for _, nbytes in segment) and not self._fits(ledger.device, segment):
            more = self._relief.evict(ledger, tick, asked_for, sum(nbytes for _, nbytes in segment))
            if not more:
                break  # the program may still find room: what it gives back on the way is guessed here
            gone += len(more)
        return gone

    def _fits(self, device: Device, segment: tuple[tuple[int, int], ...]) -> bool:
        held: dict[int, torch.Tensor | None] = {}
        left: list[int] = []  # by blocks from before that go on the way
        try:
            for key, nbytes in segment:
                if nbytes == 0:
                    if key not in held:
                        left.append(self._sizes[key])
                    held.pop(key, None)
                    continue
                fitting = [size for size in left if size >= nbytes]
                if fitting:
                    left.remove(min(fitting))
                held[key] = None if fitting else device.allocate(nbytes)
        except torch.OutOfMemoryError:
            return False
        return True
