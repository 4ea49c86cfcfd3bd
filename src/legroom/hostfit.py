"""How fast the host is, from steps that were timed.

What an op, a hook or an instruction takes on the host depends on the processor, on the model's own Python and on what
else runs there. It cannot be measured op by op without slowing it down. But the more the host is behind, the longer the
step takes: so one factor on all that the host does is found, with which the simulated step takes as long as the real
one did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.schedule import Schedule
from legroom.simulate import simulate

SLOWEST, FASTEST = 4.0, 0.25
_HALVINGS = 12
_NOISE = 0.03  # of the step's time
_WAITS = 0.002  # of it: less than that nobody sees


def with_host(trace: Trace, factor: float) -> Trace:
    """The trace on a host that takes so many times as long to issue an op."""
    return replace(trace, ops=tuple(replace(op, issue_seconds=op.issue_seconds * factor) for op in trace.ops))


def host_factor(trace: Trace, schedule: Schedule, hardware: Hardware, seconds: float) -> float:
    """By how much slower than assumed the host is, if steps of this schedule take so long."""

    def simulated(factor: float) -> float:
        return _simulated(trace, schedule, hardware, factor)

    if abs(simulated(1.0) - seconds) <= _NOISE * seconds:
        return 1.0
    low, high = FASTEST, SLOWEST
    fastest, slowest = simulated(low), simulated(high)
    if fastest == slowest:
        return 1.0  # the host is never waited for: the step says nothing about it
    if not fastest < seconds < slowest:
        return high if seconds >= slowest else low
    return _between(low, high, lambda factor: simulated(factor) < seconds)[1]


def fast_enough(trace: Trace, schedule: Schedule, hardware: Hardware) -> float:
    """The factor, at most 1, of a host that the device does not wait for, as it was seen not to."""
    free = _simulated(trace, schedule, hardware, FASTEST)
    low, high = FASTEST, 1.0
    if _simulated(trace, schedule, hardware, high) <= free * (1 + _WAITS):
        return high
    return _between(low, high, lambda f: _simulated(trace, schedule, hardware, f) <= free * (1 + _WAITS))[0]


def _between(low: float, high: float, is_low: Callable[[float], bool]) -> tuple[float, float]:
    """The last factor for which it holds and the first for which it does not, close together."""
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_low(middle) else (low, middle)
    return low, high


def _simulated(trace: Trace, schedule: Schedule, hardware: Hardware, factor: float) -> float:
    return simulate(with_host(trace, factor), schedule, hardware.scaled_host(factor)).seconds
