"""What a plan must know about a machine: how much memory, how fast a copy is, and what it costs the host to do a plan.

Rates are bytes per second of large copies. `duplex_*` are the rates of each direction while the other one is busy too.
"""

from __future__ import annotations

import os
from dataclasses import asdict, astuple, dataclass, replace

from legroom.errors import PlanError
from legroom.jsonio import dump, parse

VERSION = 2  # 1 had no `host`
GIB = 2**30
GB = 10**9
_RATES = (
    "out_bytes_per_second",
    "in_bytes_per_second",
    "duplex_out_bytes_per_second",
    "duplex_in_bytes_per_second",
)
# A copy of an exabyte at the slowest rate is 2**60 seconds: past that, nanoseconds no longer fit in 64 bits.
_SLOWEST, _FASTEST = 1e3, 1e15
_LONGEST_SECONDS = 10.0  # of what is done once for each copy, instruction or tick


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds of the host for a plan, beside the issue of ops. A step is slower only where the host is behind."""

    tick: float = 0.0  # each pack and unpack hook of a step in which anything is done at all
    swap_out: float = 0.0  # each instruction of a kind
    release: float = 0.0
    drop: float = 0.0  # with having recorded how to make again what is dropped
    prefetch: float = 0.0
    await_: float = 0.0
    replay: float = 0.0
    replay_op: float = 0.0  # each op of a replay, beside its issue

    def __post_init__(self) -> None:
        for name in HostCosts.__slots__:
            seconds = getattr(self, name)
            if not 0.0 <= seconds <= _LONGEST_SECONDS:
                raise PlanError(f"hardware.host.{name}: expected 0 to {_LONGEST_SECONDS:g}, got {seconds}")


@dataclass(frozen=True, slots=True)
class Hardware:
    name: str
    device_bytes: int
    host_bytes: int
    out_bytes_per_second: float  # device to host
    in_bytes_per_second: float  # host to device
    duplex_out_bytes_per_second: float
    duplex_in_bytes_per_second: float
    latency_seconds: float  # of one copy, whatever its size
    synchronous: bool  # the host waits for compute (CPU)
    copy_compute_share: float  # fraction of a copy's time that compute loses: copy threads share the cores of a CPU
    granularity_bytes: int  # the allocator rounds sizes up to this
    host: HostCosts = HostCosts()  # zero where nobody has measured it

    def __post_init__(self) -> None:
        for name in _RATES:
            rate = getattr(self, name)
            if not _SLOWEST <= rate <= _FASTEST:
                raise PlanError(f"hardware.{name}: expected {_SLOWEST:g} to {_FASTEST:g} bytes per second, got {rate}")
        if not 0.0 <= self.latency_seconds <= _LONGEST_SECONDS:
            expected = f"expected 0 to {_LONGEST_SECONDS:g}"
            raise PlanError(f"hardware.latency_seconds: {expected}, got {self.latency_seconds}")
        if not 0.0 <= self.copy_compute_share <= 1.0:
            raise PlanError(f"hardware.copy_compute_share: expected 0 to 1, got {self.copy_compute_share}")

    def scaled_host(self, factor: float) -> Hardware:
        """The same machine with a host that takes so many times as long for what a plan asks of it."""
        return replace(self, host=HostCosts(*(seconds * factor for seconds in astuple(self.host))))


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def to_json(hardware: Hardware) -> str:
    return dump("hardware", VERSION, asdict(hardware))


def from_json(text: str) -> Hardware:
    names = [name for name in Hardware.__slots__ if name != "host"]
    fields = parse(text, kind="hardware", version=VERSION, error=PlanError).fields(*names, optional=("host",))
    costs = fields["host"].fields(*HostCosts.__slots__) if "host" in fields else {}
    rates = {name: fields[name].number(least=_SLOWEST, most=_FASTEST) for name in _RATES}
    return Hardware(
        name=fields["name"].text(longest=256),
        device_bytes=fields["device_bytes"].integer(),
        host_bytes=fields["host_bytes"].integer(),
        **rates,
        latency_seconds=fields["latency_seconds"].number(most=_LONGEST_SECONDS),
        synchronous=fields["synchronous"].boolean(),
        copy_compute_share=fields["copy_compute_share"].number(most=1.0),
        granularity_bytes=fields["granularity_bytes"].integer(least=1),
        host=HostCosts(**{name: seconds.number(most=_LONGEST_SECONDS) for name, seconds in costs.items()}),
    )


def _gpu(name: str, device_gib: int, host_gib: int, one_way: float, both_ways: float) -> Hardware:
    return Hardware(
        name=name,
        device_bytes=device_gib * GIB,
        host_bytes=host_gib * GIB,
        out_bytes_per_second=one_way * GB,
        in_bytes_per_second=one_way * GB,
        duplex_out_bytes_per_second=both_ways * GB,
        duplex_in_bytes_per_second=both_ways * GB,
        latency_seconds=10e-6,
        synchronous=False,
        copy_compute_share=0.0,
        granularity_bytes=512,
    )


# h200 is measured (55 GB/s one way, 45 + 45 at once). The others are what pinned copies reach on their link: PCIe 4 x16
# about 25 GB/s, PCIe 3 x16 about 12. The CPU is a guess at an SSD behind a page cache; probe the machine instead.
PRESETS: dict[str, Hardware] = {
    "h200": _gpu("h200", 141, 512, 55.0, 45.0),
    "a100-80g": _gpu("a100-80g", 80, 512, 25.0, 20.0),
    "v100-16g": _gpu("v100-16g", 16, 128, 12.0, 10.0),
    "rtx2080ti-pcie3": _gpu("rtx2080ti-pcie3", 11, 64, 12.0, 10.0),
    "rtx4090": _gpu("rtx4090", 24, 128, 25.0, 20.0),
    "cpu": Hardware(
        name="cpu",
        device_bytes=16 * GIB,
        host_bytes=256 * GIB,
        out_bytes_per_second=1.0 * GB,
        in_bytes_per_second=2.0 * GB,
        duplex_out_bytes_per_second=0.7 * GB,
        duplex_in_bytes_per_second=1.2 * GB,
        latency_seconds=50e-6,
        synchronous=True,
        copy_compute_share=0.5,
        granularity_bytes=64,
    ),
}
