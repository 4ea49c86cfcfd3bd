"""The clock, the cap and the memory counters of a device.

On CUDA the cap is the allocator's own and holds for reserved memory; time comes from the host between two
synchronisations, and for single steps from events, which do not stop the device. The CPU has neither a cap nor
counters: a peak is read from the profiler's log of one more step, and the figures serve only to try the benchmark.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from legroom.errors import LegroomError
from legroom.units import format_bytes

MIB = 2**20


def host_ms() -> float:
    """What a fixed piece of Python takes now, the slowest of three: on some machines twice as long as a minute ago, and
    the steps that wait for the host with it."""
    slowest = 0.0
    for _ in range(3):
        start = time.perf_counter()
        found: dict[int, int] = {}
        for i in range(50_000):
            found[i & 255] = found.get(i & 127, 0) + i
        slowest = max(slowest, time.perf_counter() - start)
    return slowest * 1e3


class Meter(Protocol):
    def cap(self, nbytes: int | None) -> None: ...
    def check_cap(self, nbytes: int) -> None: ...
    def synchronize(self) -> None: ...
    def reset(self) -> None: ...
    def mark(self) -> Any: ...
    def milliseconds(self, marks: list[Any]) -> list[float]: ...
    def peaks(self, step: Callable[[int], Any] | None) -> tuple[int, int]: ...
    def retries(self) -> int: ...
    def alive_bytes(self) -> int: ...
    def empty(self) -> None: ...


class CudaMeter:
    def __init__(self) -> None:
        self._total_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        self._retries = 0

    def cap(self, nbytes: int | None) -> None:
        # The half byte: the product with the total is cut to an integer, and one byte less can cost a segment.
        fraction = 1.0 if nbytes is None else min(1.0, (nbytes + 0.5) / self._total_bytes)
        torch.cuda.set_per_process_memory_fraction(fraction)

    def check_cap(self, nbytes: int) -> None:
        """Not left to whoever is measured, who may leave room for the pages that the allocator maps beyond its cap."""
        allowed = torch.cuda.get_per_process_memory_fraction() * self._total_bytes
        if allowed > nbytes + 1:
            raise LegroomError(
                f"the allocator may reserve {format_bytes(int(allowed))}, the cap is {format_bytes(nbytes)}"
            )

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, marks: list[Any]) -> list[float]:
        return [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]

    def peaks(self, step: Callable[[int], Any] | None) -> tuple[int, int]:
        """Peak bytes allocated and reserved since reset()."""
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def retries(self) -> int:
        return int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) - self._retries

    def alive_bytes(self) -> int:
        return torch.cuda.memory_allocated()

    def empty(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class CpuMeter:
    def cap(self, nbytes: int | None) -> None:
        pass

    def check_cap(self, nbytes: int) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def reset(self) -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter()

    def milliseconds(self, marks: list[Any]) -> list[float]:
        return [(end - start) * 1e3 for start, end in itertools.pairwise(marks)]

    def peaks(self, step: Callable[[int], Any] | None) -> tuple[int, int]:
        """The peak of one more step, by the profiler; (0, 0) where none may be made."""
        from legroom.alloclog import Allocation, ProfilerLog

        if step is None:
            return 0, 0
        level = peak = self.alive_bytes()
        log = ProfilerLog(shapes=False)
        log.start()
        step(0)
        for event in log.stop():
            if isinstance(event, Allocation):
                level += event.nbytes
                peak = max(peak, level)
        return peak, 0

    def retries(self) -> int:
        return 0

    def alive_bytes(self) -> int:
        gc.collect()
        storages = {}
        for tensor in gc.get_objects():
            # By type: isinstance() asks lazy modules and deprecated names, which warn.
            if (
                issubclass(type(tensor), torch.Tensor)
                and tensor.layout is torch.strided
                and tensor.device.type == "cpu"
            ):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return sum(storages.values())

    def empty(self) -> None:
        gc.collect()


def meter_for(device: str) -> Meter:
    return CudaMeter() if device == "cuda" else CpuMeter()


def rounded_up(nbytes: float) -> int:
    """To whole MiB."""
    return -(-int(nbytes) // MIB) * MIB


def at_share(share: str, floor_bytes: float, peak_bytes: float) -> int:
    """The cap at a share, such as "50%", of the range from the smallest peak to the plain one."""
    return rounded_up(floor_bytes + float(share[:-1]) / 100 * (peak_bytes - floor_bytes))
