"""How long planned steps take on the device, against what was simulated, and whether it waited for the host.

Op times come from a recorded step, in which the device idles between ops and runs at another clock than under load,
and from which the host's share is missing. The first steps of a settled plan are timed, by events on the device where
it has a stream; what is predicted for later steps is multiplied by what came out.

Whether the host or the device is slower than thought shows in how far the device is behind: a host that is faster gets
ahead until the queue is full (half a step, on a GPT of 24 layers on an H200), and a device that has caught up waits.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from legroom.runtime.device import Device, Stamp

TIMED_STEPS = 8
# Steps that are still getting faster, or slower, say nothing about later ones: ResNet-152 took 148 ms, and 128 a second
# later. Nor do steps that go up and down, as where others use the host: BERT took 76 ms and 106 in turn, ten steps long
# each. They are timed again, so many times at most; then the steadiest of them count.
MOST_ROUNDS, _STEADY = 6, 0.03
_LEAST, _MOST = 0.5, 3.0  # beyond that something else went on than the step that was simulated
_AHEAD_AFTER = 4  # steps: to get ahead takes a while
_AHEAD = 0.02  # of the step's time: a device that is less behind is as good as waiting


class _Mark(NamedTuple):
    stamp: Stamp
    host_seconds: float


class _Round(NamedTuple):
    """What one round of timed steps came to."""

    moved: float  # how far its steps lie apart, of the time of one: the quarters, or the first half and the second
    seconds: float
    behind: float

    @staticmethod
    def of(seconds: list[float], behind: list[float]) -> _Round:
        median = statistics.median(seconds)
        first, _, third = statistics.quantiles(seconds, n=4, method="inclusive")
        halves = [statistics.median(half) for half in (seconds[: len(seconds) // 2], seconds[len(seconds) // 2 :])]
        apart = max(third - first, abs(halves[0] - halves[1]))
        return _Round(apart / median if median > 0.0 else 0.0, median, statistics.median(behind))


class Pace:
    """The factor between measured and simulated seconds, from the last plan whose steps were timed."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.factor = 1.0
        self.timing = False  # whether the factor is still that of the plan before
        self.starved = True  # whether the device had to wait for the host, as far as is known
        self._clock = clock
        self._zero: _Mark | None = None  # when the device was not behind
        self._open: deque[list[_Mark]] = deque()  # of a step: its beginning, where backward began, its end
        self._seconds: list[float] = []
        self._behind: list[float] = []  # seconds; of each of the later steps, the least at its marks
        self._marks: list[_Mark] = []
        self._steps = 0
        self._rounds = 1
        self._steadiest: _Round | None = None

    def new_plan(self) -> None:
        """Time again. Until then the factor of the plan before is the best guess."""
        self._rounds = 1
        self._steadiest = None
        self.timing = True
        self._time_again()

    def _time_again(self) -> None:
        self._open.clear()
        self._seconds.clear()
        self._behind.clear()
        self._marks = []
        self._steps = 0

    def begin(self, device: Device) -> None:
        if self._steps < TIMED_STEPS:
            if self._steps == 0:
                device.drain()
                stamp = device.stamp()
                self._zero = _Mark(stamp, self._clock()) if stamp is not None else None
                self.timing = self.timing and stamp is not None
            self._marks = []
            self.mark(device)

    def mark(self, device: Device) -> None:
        """A moment inside a step that is timed, such as the beginning of backward."""
        if self._steps < TIMED_STEPS and (stamp := device.stamp()) is not None:
            self._marks.append(_Mark(stamp, self._clock()))

    def end(self, device: Device) -> None:
        marks, self._marks = self._marks, []
        if marks and self._steps < TIMED_STEPS and (stamp := device.stamp()) is not None:
            self._steps += 1
            self._open.append([*marks, _Mark(stamp, self._clock())])

    def cancel(self) -> None:
        """The step that began did not come to its end."""
        self._marks = []

    def hear(self, simulated_seconds: float) -> bool:
        """Read what has arrived; once all of it has, the factor is another one. Whether it has."""
        while self._open and (seconds := self._open[0][-1].stamp.seconds_since(self._open[0][0].stamp)) is not None:
            marks = self._open.popleft()
            self._seconds.append(seconds)
            if len(self._seconds) > _AHEAD_AFTER:
                self._behind.append(min(self._seconds_behind(mark) for mark in marks))
        known = len(self._seconds) == TIMED_STEPS and simulated_seconds > 0.0
        if known:
            timed = _Round.of(self._seconds, self._behind)
            best = min(self._steadiest or timed, timed, key=lambda round_: round_.moved)
            if best.moved > _STEADY and self._rounds < MOST_ROUNDS:
                self._rounds += 1
                self._steadiest = best
                self._time_again()
                return False
            self.timing = False
            self.factor = min(max(best.seconds / simulated_seconds, _LEAST), _MOST)
            # Of most steps: one that is measured, or checks a replay, stops the device and the host gets ahead anew.
            self.starved = best.behind < best.seconds * _AHEAD
        return known

    def _seconds_behind(self, mark: _Mark) -> float:
        assert self._zero is not None
        reached = mark.stamp.seconds_since(self._zero.stamp)
        return (reached or 0.0) - (mark.host_seconds - self._zero.host_seconds)
