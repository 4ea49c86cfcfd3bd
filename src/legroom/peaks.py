"""The peak of one schedule at many sizes of the input.

A plan for a large input serves smaller ones too, and where something falls as the input grows, such a step may take
more. Which bytes stand where in the step depends on the schedule alone, so that is worked out once; then the peak at
other sizes is a few sums over arrays, and can be asked for while a step waits.
"""

from __future__ import annotations

import itertools

import numpy as np

from legroom.ir import Trace, Value
from legroom.schedule import Drop, Prefetch, Release, Replay, Schedule
from legroom.sizes import Numbers


class Peaks:
    """For a schedule that passed check_schedule() with this trace, or with one of the same structure."""

    def __init__(self, trace: Trace, schedule: Schedule) -> None:
        self._trace = trace
        self._what: list[int] = []  # comes or goes: a storage, or behind all of these the workspace of an op
        self._signs: list[int] = []
        # Where the step may peak: the first of them at a tick's level, the others at its peak; and after which event.
        self._at_levels: list[tuple[int, int]] = []
        self._at_peaks: list[tuple[int, int]] = []
        self._walk(schedule)
        self._indices, self._sums = np.array(self._what, np.int64), np.array(self._signs, np.int64)
        self._levels = np.array(self._at_levels, np.int64).reshape(-1, 2).T
        self._tops = np.array(self._at_peaks, np.int64).reshape(-1, 2).T

    def at(self, numbers: Numbers) -> int:
        """What check_schedule() would return for with_numbers(trace, numbers)."""
        change = np.concatenate((numbers.nbytes, numbers.workspace_bytes))[self._indices]
        change *= self._sums
        standing = np.concatenate(((0,), np.cumsum(change)))
        ticks, events = self._tops
        # As with_numbers() does.
        peaks = np.maximum(numbers.peak_bytes, numbers.level_bytes)[ticks] + standing[events]
        peak = max(numbers.head_peak_bytes, int(peaks.max(initial=0)))
        ticks, events = self._levels
        return max(peak, int((numbers.level_bytes[ticks] + standing[events]).max(initial=0)))

    def _walk(self, schedule: Schedule) -> None:
        instructions = {
            tick: list(here) for tick, here in itertools.groupby(schedule.instructions, key=lambda i: i.tick)
        }
        for tick in range(len(self._trace.ticks)):
            for instruction in instructions.get(tick, ()):
                match instruction:
                    case Release() | Drop():
                        self._change(instruction.storage, -1)
                    case Prefetch():
                        self._change(instruction.storage, 1)
                        self._at_levels.append((tick, len(self._what)))
                    case Replay():
                        self._replay(instruction)
            self._at_peaks.append((tick, len(self._what)))

    def _replay(self, replay: Replay) -> None:
        """The walk that Replay describes."""
        ops, storages = [self._trace.ops[op] for op in replay.ops], self._trace.storages
        targets = {(storage, storages[storage].gap_version) for storage in (replay.storage, *replay.also)}
        last_read = {value: op.id for op in ops for value in op.reads} | dict.fromkeys(targets, len(self._trace.ops))
        made: set[Value] = set()
        for op in ops:
            for storage, version in op.writes:
                before = (storage, version - 1)
                if before in made and last_read[before] == op.id:
                    made.remove(before)
                else:
                    self._change(storage, 1)
            self._change(len(storages) + op.id, 1)
            self._at_levels.append((replay.tick, len(self._what)))
            self._change(len(storages) + op.id, -1)
            done = {value for value in op.reads if value in made and last_read[value] == op.id}
            useless = {value for value in op.writes if last_read.get(value, -1) <= op.id}
            made = (made | set(op.writes)) - done - useless
            for storage, _ in done | useless:
                self._change(storage, -1)

    def _change(self, what: int, sign: int) -> None:
        self._what.append(what)
        self._signs.append(sign)
