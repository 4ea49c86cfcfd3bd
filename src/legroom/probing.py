"""Measures Hardware on this machine, in about a second, once per process.

The CPU is measured through the very file and threads that swap (`SpillFile`): out is a write, in is a read. What counts
is the steady state of a training run, which writes the same places of the file again every step, so the first write of
each place (the file system allocates there) is left out. Rates are medians: one hiccup must not decide a plan.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import astuple

import torch

from legroom.errors import DeviceError
from legroom.hardware import Hardware, HostCosts
from legroom.runtime.spill import SpillFile

_COPY_BYTES = 8 * 2**20  # large enough that latency does not count, small enough for several within the time
_PLACES = 4  # copies go round these, so that a processor's cache does not pass for a disk's speed
_SECONDS_EACH = 0.12  # for each of the five measurements; a slow disk takes as long as one copy needs
_MOST_COPIES = 32
_CUDA_COPY_BYTES = 64 * 2**20  # at 55 GB/s about a millisecond


def probe(device: str | torch.device = "cpu", spill_dir: str | None = None) -> Hardware:
    """What this machine can do. The first call for a device and a folder measures, later calls remember."""
    where = torch.device(device)
    if where.type == "cpu":
        return _probe_cpu(os.path.realpath(spill_dir if spill_dir is not None else tempfile.gettempdir()))
    if where.type == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError('this torch sees no CUDA device; use device="cpu", or install a CUDA build of torch')
        index = where.index if where.index is not None else torch.cuda.current_device()
        if index >= torch.cuda.device_count():
            raise DeviceError(f"there is no cuda:{index}; this machine has {torch.cuda.device_count()} CUDA devices")
        return _probe_cuda(index)
    raise DeviceError(f'cannot probe a device of type {where.type!r}; known are "cpu" and "cuda"')


def memory_bytes() -> tuple[int, int]:
    """(total, available) bytes of main memory, within the limit of this process's control group."""
    fields = {}
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                name, _, rest = line.partition(":")
                fields[name] = int(rest.split()[0]) * 1024
    except OSError:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        fields = {"MemTotal": pages, "MemAvailable": pages}
    limit = _cgroup_limit_bytes()
    total = min(fields["MemTotal"], limit) if limit else fields["MemTotal"]
    return total, min(total, fields.get("MemAvailable", total))


def _cgroup_limit_bytes() -> int:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return 0


@functools.cache
def _probe_cpu(directory: str) -> Hardware:
    file = SpillFile(directory)
    try:
        # full(), not rand(): the user's random state is not ours to advance.
        sources = [torch.full((_COPY_BYTES,), 1, dtype=torch.uint8) for _ in range(_PLACES)]
        slots = [file.take(_COPY_BYTES) for _ in sources]
        outward, inward = itertools.cycle(range(_PLACES)), itertools.cycle(reversed(range(_PLACES)))
        small = file.take(4096)
        targets: deque[torch.Tensor] = deque(maxlen=2)  # a read under way, and the one before it

        def write() -> Future[None]:
            place = next(outward)
            return file.write(sources[place].data_ptr(), slots[place])

        def read() -> Future[None]:
            # Into fresh memory, as a fetch does: first touches of its pages are part of the price.
            targets.append(torch.empty(_COPY_BYTES, dtype=torch.uint8))
            return file.read(targets[-1].data_ptr(), slots[next(inward)])

        for _ in range(_PLACES):
            write().result()
        file.write(sources[0].data_ptr(), small).result()
        out_rate, in_rate = _rate(write), _rate(read)
        duplex_out, duplex_in = _rates_together(write, read)
        latency = statistics.median(_seconds(lambda: file.write(sources[0].data_ptr(), small)) for _ in range(20))
        share = _compute_share(write)
    finally:
        file.close()
    disk = os.statvfs(directory)
    return Hardware(
        name=f"cpu, {torch.get_num_threads()} threads",
        device_bytes=memory_bytes()[0],
        host_bytes=disk.f_bavail * disk.f_frsize,
        out_bytes_per_second=out_rate,
        in_bytes_per_second=in_rate,
        # Two at once never beat one alone; where they seem to, it was noise, and a plan must not count on it.
        duplex_out_bytes_per_second=min(duplex_out, out_rate),
        duplex_in_bytes_per_second=min(duplex_in, in_rate),
        latency_seconds=min(latency, 10.0),
        synchronous=True,
        copy_compute_share=share,
        granularity_bytes=64,
    )


def _seconds(start_copy: Callable[[], Future[None]]) -> float:
    start = time.perf_counter()
    start_copy().result()
    return time.perf_counter() - start


def _rate(start_copy: Callable[[], Future[None]]) -> float:
    seconds: list[float] = []
    while len(seconds) < _MOST_COPIES and sum(seconds) < _SECONDS_EACH:
        seconds.append(_seconds(start_copy))
    return _COPY_BYTES / max(statistics.median(seconds), 1e-9)


def _rates_together(write: Callable[[], Future[None]], read: Callable[[], Future[None]]) -> tuple[float, float]:
    """Each direction's rate while the other one is busy: a new copy starts as soon as one ends, until time is up."""
    begin = time.perf_counter()
    seconds: tuple[list[float], list[float]] = ([], [])
    started = [(write(), begin), (read(), begin)]
    while time.perf_counter() - begin < _SECONDS_EACH or not all(seconds):
        for lane, start_copy in enumerate((write, read)):
            future, since = started[lane]
            if future.done():
                future.result()
                now = time.perf_counter()
                seconds[lane].append(now - since)
                started[lane] = (start_copy(), now)
        time.sleep(1e-4)
    for future, _ in started:
        future.result()
    out_seconds, in_seconds = (max(statistics.median(lane), 1e-9) for lane in seconds)
    return _COPY_BYTES / out_seconds, _COPY_BYTES / in_seconds


def _compute_share(write: Callable[[], Future[None]]) -> float:
    """The fraction of a copy's time that compute loses to it: 0 with cores to spare, towards 1 on a single core."""
    matrix = torch.full((384, 384), 1e-3)
    result = torch.empty_like(matrix)

    def multiply() -> float:
        start = time.perf_counter()
        torch.mm(matrix, matrix, out=result)
        return time.perf_counter() - start

    with torch.no_grad():
        multiply()
        alone: list[float] = []
        while sum(alone) < _SECONDS_EACH:
            alone.append(multiply())
        beside: list[float] = []
        future = write()
        while sum(beside) < _SECONDS_EACH:
            if future.done():
                future.result()
                future = write()
            beside.append(multiply())
        future.result()
    # Means, not medians: a copy that stops compute now and then shows in few, long multiplications.
    quiet, busy = statistics.fmean(alone), statistics.fmean(beside)
    return min(max(1.0 - quiet / busy, 0.0), 1.0)


@functools.cache
def _probe_cuda(index: int) -> Hardware:
    with torch.cuda.device(index), torch.no_grad():
        on_device = [torch.zeros(_CUDA_COPY_BYTES, dtype=torch.uint8, device=f"cuda:{index}") for _ in range(2)]
        on_host = [torch.zeros(_CUDA_COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        streams = [torch.cuda.Stream(index) for _ in range(2)]
        torch.cuda.synchronize(index)

        def copy(lane: int, nbytes: int = _CUDA_COPY_BYTES) -> None:
            out = lane == 0
            to, source = (on_host[0], on_device[0]) if out else (on_device[1], on_host[1])
            to[:nbytes].copy_(source[:nbytes], non_blocking=True)

        def rates(*lanes: int) -> list[float]:
            copies = 6
            events = {}
            for lane in lanes:
                with torch.cuda.stream(streams[lane]):
                    events[lane] = [torch.cuda.Event(enable_timing=True) for _ in range(copies + 1)]
                    events[lane][0].record()
            for number in range(copies):  # in turns, so that both lanes have work from the first copy on
                for lane in lanes:
                    with torch.cuda.stream(streams[lane]):
                        copy(lane)
                        events[lane][number + 1].record()
            torch.cuda.synchronize(index)
            # Without the first copy: in it the other lane is still getting going.
            medians = [
                statistics.median(before.elapsed_time(after) for before, after in itertools.pairwise(marks[1:]))
                for marks in events.values()
            ]
            return [_CUDA_COPY_BYTES / (max(milliseconds, 1e-3) * 1e-3) for milliseconds in medians]

        rates(0, 1)  # warm: the first copies set up the engines
        (out_rate,), (in_rate,) = rates(0), rates(1)
        duplex_out, duplex_in = rates(0, 1)
        latencies = []
        for _ in range(20):
            start = time.perf_counter()
            copy(0, 4096)
            torch.cuda.synchronize(index)
            latencies.append(time.perf_counter() - start)
        properties = torch.cuda.get_device_properties(index)
    return Hardware(
        name=properties.name,
        device_bytes=properties.total_memory,
        host_bytes=memory_bytes()[1],
        out_bytes_per_second=out_rate,
        in_bytes_per_second=in_rate,
        duplex_out_bytes_per_second=min(duplex_out, out_rate),
        duplex_in_bytes_per_second=min(duplex_in, in_rate),
        latency_seconds=statistics.median(latencies),
        synchronous=False,
        copy_compute_share=0.0,
        granularity_bytes=512,
        host=_host_costs(index),
    )


# What a plan costs the host, measured inside training steps on an H200's host, in which issuing a small op took
# _ISSUE_SECONDS: copies in ResNet-152 and BERT. The rest is estimated from what the fastest steps of BERT and ViT took
# beyond plain ones (15 and 12 ms of forward with 108 and 57 drops, 20 and 13 ms of backward with 218 and 126 ops in
# replays). A tick has its share of the calls that are counted.
_ISSUE_SECONDS = 9.5e-6
_HOST_COSTS = HostCosts(
    tick=8e-6, swap_out=110e-6, release=50e-6, drop=60e-6, prefetch=90e-6, await_=30e-6, replay=40e-6, replay_op=38e-6
)


def _host_costs(index: int) -> HostCosts:
    """The same for a host that is slower or faster, by how long it takes to issue a small op."""
    with torch.cuda.device(index):
        small = torch.zeros(8, device=f"cuda:{index}")
        rounds = []
        for _ in range(5):
            torch.cuda.synchronize(index)
            start = time.perf_counter()
            for _ in range(200):
                torch.add(small, small)
            rounds.append((time.perf_counter() - start) / 200)
    factor = min(max(min(rounds) / _ISSUE_SECONDS, 0.25), 8.0)
    return HostCosts(*(seconds * factor for seconds in astuple(_HOST_COSTS)))
