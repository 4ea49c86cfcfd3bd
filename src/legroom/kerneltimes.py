"""How long an op keeps the device busy, from its kernels as the profiler saw them.

In a recorded step the device waits for the host before most ops, which it does not in later ones: the time between an
op's first kernel and its last is too long. The sum of its kernels is too long where they run side by side, on streams
of a library's own: a backward of cuDNN's LSTM was taken for 18 ms in place of 15 on an H200.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# From the end of a kernel to the start of the next that is waiting already: 1,770 of them took 1.4 to 4 ms on an H200.
_BETWEEN_KERNELS_NS = 1_500
# Between streams, where one has to hear of the other, it is 2.7 microseconds as a rule, and 5 in one of a hundred; more
# is the host's.
_MOST_BETWEEN_STREAMS_NS = 5_000


class Kernel(NamedTuple):
    start_ns: int
    end_ns: int
    stream: int


def busy_seconds(kernels: Iterable[Kernel]) -> float:
    """Of one op, with what lies between its kernels, and between the op before and its first."""
    in_order = sorted(kernels)
    if not in_order:
        return 0.0
    several = len({kernel.stream for kernel in in_order}) > 1
    busy_ns, until_ns = 0, in_order[0].start_ns - _BETWEEN_KERNELS_NS
    for start_ns, end_ns, _ in in_order:
        if start_ns >= until_ns:  # otherwise it began beside one that still runs
            between_ns = min(start_ns - until_ns, _MOST_BETWEEN_STREAMS_NS) if several else _BETWEEN_KERNELS_NS
            busy_ns += between_ns + end_ns - start_ns
        else:
            busy_ns += max(0, end_ns - until_ns)
        until_ns = max(until_ns, end_ns)
    return busy_ns * 1e-9
