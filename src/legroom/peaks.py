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

_NONE = np.zeros(1, np.int64)


class Peaks:
    """For a schedule that passed check_schedule() with this trace, or with one of the same structure."""

    def __init__(self, trace: Trace, schedule: Schedule) -> None:
        walk = _Walk(trace, schedule)
        self._what, self._signs = np.array(walk.what, np.int64), np.array(walk.signs, np.int64)
        self._heights, self._events = np.array(walk.heights, np.int64), np.array(walk.events, np.int64)

    def at(self, numbers: Numbers) -> int:
        """What check_schedule() would return for the trace with these numbers. Their seconds do not matter."""
        # Numpy is called as seldom as can be: see legroom.fitting.Asked.
        changes = np.concatenate((_NONE, numbers.nbytes, numbers.workspace_bytes))[self._what]
        changes *= self._signs
        # As with_numbers() does.
        tops = np.maximum(numbers.peak_bytes, numbers.level_bytes)
        heights = np.concatenate((numbers.level_bytes, tops))[self._heights]
        heights += changes.cumsum()[self._events]
        return max(numbers.head_peak_bytes, int(heights.max(initial=0)))


class _Walk:
    """Goes through a schedule once."""

    def __init__(self, trace: Trace, schedule: Schedule) -> None:
        self._trace = trace
        # What comes or goes: nothing at first, then a storage, or behind all of these the workspace of an op.
        self.what, self.signs = [0], [0]
        # Where the step may peak: at a tick's level, or behind all of these at its peak; and after which event.
        self.heights: list[int] = []
        self.events: list[int] = []
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
                        self._look(tick)
                    case Replay():
                        self._replay(instruction)
            self._look(len(self._trace.ticks) + tick)

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
            self._look(replay.tick)
            self._change(len(storages) + op.id, -1)
            done = {value for value in op.reads if value in made and last_read[value] == op.id}
            useless = {value for value in op.writes if last_read.get(value, -1) <= op.id}
            made = (made | set(op.writes)) - done - useless
            for storage, _ in done | useless:
                self._change(storage, -1)

    def _change(self, what: int, sign: int) -> None:
        self.what.append(1 + what)
        self.signs.append(sign)

    def _look(self, height: int) -> None:
        self.heights.append(height)
        self.events.append(len(self.what) - 1)
