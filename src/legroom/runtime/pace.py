"""How long planned steps take on the device, against what was simulated.

Op times come from a recorded step, in which the device idles between ops and runs at another clock than under load,
and from which the host's share is missing. The first steps of a settled plan are timed, by events on the device where
it has a stream; what is predicted for later steps is multiplied by what came out.
"""

from __future__ import annotations

import statistics
from collections import deque

from legroom.runtime.device import Device, Stamp

TIMED_STEPS = 8
_LEAST, _MOST = 0.5, 3.0  # beyond that something else went on than the step that was simulated


class Pace:
    """The factor between measured and simulated seconds, from the last plan whose steps were timed."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._open: deque[tuple[Stamp, Stamp]] = deque()
        self._seconds: list[float] = []
        self._begun: Stamp | None = None
        self._steps = 0

    def new_plan(self) -> None:
        """Time again. Until then the factor of the plan before is the best guess."""
        self._open.clear()
        self._seconds.clear()
        self._begun = None
        self._steps = 0

    def begin(self, device: Device) -> None:
        if self._steps < TIMED_STEPS:
            self._begun = device.stamp()

    def end(self, device: Device) -> None:
        begun, self._begun = self._begun, None
        ended = device.stamp() if begun is not None else None
        if begun is not None and ended is not None:
            self._steps += 1
            self._open.append((begun, ended))

    def hear(self, simulated_seconds: float) -> bool:
        """Read what has arrived; once all of it has, the factor is another one. Whether it has."""
        while self._open and (seconds := self._open[0][1].seconds_since(self._open[0][0])) is not None:
            self._open.popleft()
            self._seconds.append(seconds)
        known = len(self._seconds) == TIMED_STEPS and simulated_seconds > 0.0
        if known:
            self.factor = min(max(statistics.median(self._seconds) / simulated_seconds, _LEAST), _MOST)
        return known
