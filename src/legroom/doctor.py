"""`legroom doctor`: what this machine is, and what about it will cost memory or time.

Each row says what was looked at, what was found, whether that is well, and if not, what to do about it.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from legroom.errors import LegroomError
from legroom.hardware import cores
from legroom.probing import memory_bytes, probe
from legroom.units import format_bytes, format_seconds

State = Literal["ok", "warn", "bad"]

# Must be in the environment before Python starts; each is without effect where torch has the other allocator.
_MIMALLOC = {"MIMALLOC_PURGE_DELAY": "0", "MIMALLOC_EAGER_COMMIT": "0", "MIMALLOC_ARENA_EAGER_COMMIT": "0"}
# The system's takes larger and larger tensors from a heap that it seldom shrinks, unless the limit is set by hand: a
# step whose tensors took 368 MiB at most let the process grow by 1343, and by 372 with it.
_SYSTEM = {"MALLOC_MMAP_THRESHOLD_": "1048576"}
ALLOCATOR_SETTINGS = {**_MIMALLOC, **_SYSTEM}
_LITTLE_SPILL_BYTES = 4 * 2**30
_SLOW_BYTES_PER_SECOND = 200e6  # a hard disk; swapping a gibibyte out and in takes ten seconds
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    value: str
    state: State
    advice: str  # "" where all is well


def examine(spill_dir: str | None = None) -> tuple[Row, ...]:
    """Look at everything. Never raises: what cannot be found out is a row that says so."""
    folder = spill_dir if spill_dir is not None else tempfile.gettempdir()
    return (*_software(), *_memory(), *_allocator(), *_spill(folder), *_copies(folder), *_cuda())


def to_json(rows: tuple[Row, ...]) -> str:
    return json.dumps({"kind": "doctor", "version": 1, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"


def _software() -> list[Row]:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2] if part.isdigit())
    old = version < (2, 11)
    return [
        Row("Python", platform.python_version(), "ok", ""),
        Row("torch", torch.__version__, "bad" if old else "ok", "legroom needs torch 2.11 or newer" if old else ""),
    ]


def _memory() -> list[Row]:
    total, available = memory_bytes()
    usable = cores()
    single = usable == 1
    return [
        Row(
            "CPU cores",
            f"{usable} for this process, torch uses {torch.get_num_threads()}",
            "warn" if single else "ok",
            "copies run on threads; with one core they run instead of compute, not beside it" if single else "",
        ),
        Row("main memory", f"{format_bytes(total)}, {format_bytes(available)} available", "ok", ""),
    ]


def _allocator() -> list[Row]:
    name, settings, excess = "the system's", _SYSTEM, "may grow to several times the budget"
    if _embeds_mimalloc():
        name, settings, excess = "mimalloc", _MIMALLOC, "stays about a tenth above the budget"
    missing = [f"{setting}={value}" for setting, value in settings.items() if os.environ.get(setting) != value]
    if not missing:
        return [Row("CPU allocator", f"{name}, told to give freed pages back", "ok", "")]
    return [
        Row(
            "CPU allocator",
            f"{name}, which keeps freed pages",
            "warn",
            f"on the CPU the resident set {excess}; set {' '.join(missing)} before Python starts",
        )
    ]


def _embeds_mimalloc() -> bool:
    """The Linux wheels for ARM do. The symbols are hidden, but the names of its settings stand in the library."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return b"mimalloc" in library.read_bytes()
    except OSError:
        return False


def _spill(folder: str) -> list[Row]:
    try:
        stat = os.statvfs(folder)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except (OSError, ValueError) as error:
        return [Row("spill folder", folder, "bad", f"{error}; name another folder with spill_dir")]
    if not writable:
        return [Row("spill folder", folder, "bad", "cannot be written; name another folder with spill_dir")]
    free = stat.f_bavail * stat.f_frsize
    kind = file_system(folder)
    rows = [Row("spill folder", f"{folder} on {kind}, {format_bytes(free)} free", "ok", "")]
    if kind in _IN_MEMORY:
        advice = "this folder is main memory: swapping to it frees nothing; name a folder on a disk with spill_dir"
        rows = [Row("spill folder", rows[0].value, "warn", advice)]
    elif free < _LITTLE_SPILL_BYTES:
        advice = "little room; a step that swaps more than this fails: free some, or name another folder with spill_dir"
        rows = [Row("spill folder", rows[0].value, "warn", advice)]
    return rows


def file_system(folder: str) -> str:
    """The type of the file system a folder lies on ("ext4", "tmpfs"), "unknown" where it cannot be told."""
    try:
        real = os.path.realpath(folder)
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except (OSError, ValueError):
        return "unknown"
    best, kind = "", "unknown"
    for line in mounts:
        left, separator, right = line.partition(" - ")
        fields = left.split()
        if not separator or len(fields) < 5:
            continue
        point = fields[4].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        # Of two mounts on the same point the later one covers the earlier.
        if inside and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind


def _copies(folder: str) -> list[Row]:
    try:
        hardware = probe("cpu", folder)
    except (LegroomError, OSError, ValueError) as error:
        return [Row("spill speed", "not measured", "bad", str(error))]
    slow = min(hardware.out_bytes_per_second, hardware.in_bytes_per_second) < _SLOW_BYTES_PER_SECOND
    share = hardware.copy_compute_share
    return [
        Row(
            "spill speed",
            f"write {_rate(hardware.out_bytes_per_second)}, read {_rate(hardware.in_bytes_per_second)}; at once "
            f"{_rate(hardware.duplex_out_bytes_per_second)} and {_rate(hardware.duplex_in_bytes_per_second)}; "
            f"latency {format_seconds(hardware.latency_seconds)}",
            "warn" if slow else "ok",
            "a slow disk: plans will recompute rather than swap; name a faster folder with spill_dir" if slow else "",
        ),
        Row("compute lost to a copy", f"{share:.0%} of the copy's time", "ok", ""),
    ]


def _rate(bytes_per_second: float) -> str:
    return f"{format_bytes(round(bytes_per_second))}/s"


def _cuda() -> list[Row]:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        advice = "torch is built for CUDA but sees no device: is the driver there?" if built else ""
        return [Row("CUDA", "none", "warn" if built else "ok", advice)]
    rows = []
    for index in range(torch.cuda.device_count()):
        name, total = torch.cuda.get_device_name(index), torch.cuda.get_device_properties(index).total_memory
        rows.append(Row(f"cuda:{index}", f"{name}, {format_bytes(total)}", "ok", ""))
    settings = ",".join(os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    growing = "expandable_segments:true" in settings.lower().replace(" ", "")
    advice = "fragments count against the budget; set PYTORCH_ALLOC_CONF=expandable_segments:True before Python starts"
    if growing:
        return [*rows, Row("CUDA allocator", "expandable segments", "ok", "")]
    return [*rows, Row("CUDA allocator", "segments of fixed size", "warn", advice)]


def worst(rows: tuple[Row, ...]) -> State:
    states = {row.state for row in rows}
    return "bad" if "bad" in states else "warn" if "warn" in states else "ok"
