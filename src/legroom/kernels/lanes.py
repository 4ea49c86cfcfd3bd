"""What ops, ticks and copies do to the lanes: the device, the host and the link."""

from __future__ import annotations

from legroom.kernels.codes import *
from legroom.kernels.compiling import compiled, inner
from legroom.tables import Ints


@compiled
def advance(compute: int, host: int, after_compute: int, after_host: int, issue: int) -> tuple[int, int]:
    """A run of ops on the lanes; see tables.lane_effect."""
    compute = max(compute + after_compute, host + after_host)
    return compute, compute if issue < 0 else host + issue


@inner
def pass_tick(compute: int, host: int, tick: int, lanes: Ints) -> tuple[int, int]:
    """The segment before a tick on the lanes."""
    row = tick * LANES
    return advance(compute, host, lanes[row + AFTER_COMPUTE], lanes[row + AFTER_HOST], lanes[row + ISSUED])


@inner
def copy_ns(
    nbytes: int, start: int, other_free: int, undisturbed: int, alone: float, together: float, latency: int
) -> int:
    """How long a copy takes that begins at `start` while the other lane is known to be busy until `other_free`."""
    busy = other_free - start - latency
    if busy <= 0:
        return undisturbed
    shared = int(nbytes * together)
    if shared <= busy:
        return latency + shared
    return latency + busy + int((nbytes - int(busy / together)) * alone)
