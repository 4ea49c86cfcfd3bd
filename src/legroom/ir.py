"""The trace: the tensor access sequence of one training step, and the memory curve beside it.

Time is counted in *ticks*. A tick is one call of a saved-tensor hook, a pack or an unpack; it is the only place where
the runtime may act, so it is the only place where a plan may. Between two ticks lies a *segment*: ops run there, the
program allocates and frees, and nothing a plan does can change that. Segment t follows tick t. Before the first tick
lies the head.

Memory is exact because of this: `Tick.peak_bytes` is the most that is alive in segment t when every saved storage is
kept, workspace inside ops included, taken from the allocator's own log. A plan makes a storage absent from whole
segments only, so the peak under a plan is that number less what is absent, and never an estimate.

A *value* is a version of a storage, written (storage, version). An in-place op makes the next version. Views make
none. A *gap* is a stretch of ticks in which nothing but saved handles refers to a storage: from the first tick at
which it may be absent to the tick at which it must be back. Gaps are measured; a storage that Python code holds has
none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NoReturn, get_args

from legroom.errors import TraceError, quote
from legroom.units import LARGEST_BYTES

Kind = Literal[
    "activation",  # made in the step and saved by autograd
    "input",  # alive at the start of the step, none of the kinds below
    "parameter",
    "buffer",
    "gradient",
    "optimizer-state",
    "temporary",  # made in the step, never saved
    "managed",  # handed over by the user; lives across steps
]
Phase = Literal["forward", "backward", "optimizer"]

Value = tuple[int, int]  # (storage id, version)


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation. `nbytes` is rounded as the device's allocator rounds."""

    id: int  # its index in Trace.storages
    nbytes: int
    kind: Kind
    persistent: bool  # alive before the step and after it: a replay may always read it
    held: bool  # saved, but Python code refers to it until its use: can only be kept
    gaps: tuple[tuple[int, int], ...]  # (start tick, end tick), start < end, in order, not overlapping
    gap_version: int  # the version that stands in it during its gaps (0 where it has none)
    name: str  # parameter name, or module path of the op that made it; "" if unknown


@dataclass(frozen=True, slots=True)
class Op:
    """One op in program order. Replaying it runs the same op on the values it read."""

    id: int  # its index in Trace.ops
    name: str  # "aten.addmm.default"
    phase: Phase
    seconds: float  # on the compute lane
    issue_seconds: float  # on the host lane
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]  # version 0: allocated by this op; version n > 0: written in place, (s, n-1) is in reads
    workspace_bytes: int  # the most that is alive inside the op beyond inputs and outputs
    why_not: str  # "" where a replay was proven bit for bit, else the reason it cannot be replayed
    module: str  # module path, "" if none
    line: str  # "file.py:12" of the user's code, "" if unknown
    # On the compute lane where it is replayed, if that takes another time. Not in files.
    replay_seconds: float | None = None
    short: bool = False  # whether a replay can do without most of its work, if its other outputs are at hand
    # Whether its result has the very bytes of what it reads, which an op before made from the same. Not in files: there
    # it reads that, and takes its own time.
    twin: bool = False

    @property
    def again_seconds(self) -> float:
        return self.seconds if self.replay_seconds is None else self.replay_seconds


@dataclass(frozen=True, slots=True)
class Tick:
    kind: Literal["pack", "unpack"]
    storage: int  # the storage packed or unpacked
    op: int  # ops with id < op were issued before this tick
    level_bytes: int  # alive at this very moment, everything kept
    peak_bytes: int  # the most alive from this tick to the next (or the end of the step), everything kept


@dataclass(frozen=True, slots=True)
class Gap:
    """What a plan decides about: one storage, absent at most over segments start .. end - 1."""

    id: int  # its index in Trace.gaps
    storage: int
    start: int  # tick
    end: int  # tick


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Trace:
    storages: tuple[Storage, ...]
    ops: tuple[Op, ...]
    ticks: tuple[Tick, ...]
    head_peak_bytes: int  # the most alive before the first tick
    device: str  # "cpu", "cuda"
    # What the program asks of the allocator, everything kept, in the head and then in each segment: (key, bytes) is a
    # request, (key, 0) lets that block go, and a storage's key is its id. Empty where only the levels are known; files
    # do not have it.
    requests: tuple[tuple[tuple[int, int], ...], ...] = ()

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """All gaps, by storage id, then by start."""
        out: list[Gap] = []
        for storage in self.storages:
            for start, end in storage.gaps:
                out.append(Gap(len(out), storage.id, start, end))
        return tuple(out)

    @property
    def peak_bytes(self) -> int:
        """The peak of the step with everything kept."""
        return max((self.head_peak_bytes, *(tick.peak_bytes for tick in self.ticks)))


LARGEST_SECONDS = float(2**31)  # as nanoseconds in such an integer; no step takes 68 years
LONGEST_TEXT = 4096

_KINDS = frozenset(get_args(Kind))
_PHASES = frozenset(get_args(Phase))


def validate(trace: Trace) -> None:
    """Raise TraceError, naming the field, unless the trace is well-formed. Linear in its size.

    Whoever reads a validated trace may index with every id in it, add up its sizes and times in 64-bit integers, and
    walk `ops` in order with every value read made by an earlier op or alive at the start: the ops cannot form a cycle.
    """
    _text("trace.device", trace.device)
    _integer("trace.head_peak_bytes", trace.head_peak_bytes)
    for index, storage in enumerate(trace.storages):
        _validate_storage(index, storage)
    total = sum(storage.nbytes for storage in trace.storages)
    if total >= LARGEST_BYTES:
        _fail("trace.storages", f"all sizes together are {total} bytes, expected fewer than 2**62")
    born = _validate_ops(trace)
    _validate_ticks(trace)
    if trace.requests and len(trace.requests) != len(trace.ticks) + 1:
        _fail("trace.requests", f"expected those of {len(trace.ticks) + 1} segments or none, got {len(trace.requests)}")
    for storage in trace.storages:
        _validate_gaps(trace, storage, born)


def _validate_storage(index: int, storage: Storage) -> None:
    path = f"trace.storages[{index}]"
    _same(f"{path}.id", storage.id, index)
    _integer(f"{path}.nbytes", storage.nbytes)
    _one_of(f"{path}.kind", storage.kind, _KINDS)
    _boolean(f"{path}.persistent", storage.persistent)
    _boolean(f"{path}.held", storage.held)
    _text(f"{path}.name", storage.name)
    _integer(f"{path}.gap_version", storage.gap_version)


def _validate_ops(trace: Trace) -> dict[Value, int]:
    """Check the ops; return which op wrote each value. A value that is not in there stood at the start."""
    born: dict[Value, int] = {}
    current: dict[int, int] = {}  # the newest version of each storage met so far
    total = 0.0
    for index, op in enumerate(trace.ops):
        path = f"trace.ops[{index}]"
        _same(f"{path}.id", op.id, index)
        for field, text in (("name", op.name), ("why_not", op.why_not), ("module", op.module), ("line", op.line)):
            _text(f"{path}.{field}", text)
        _one_of(f"{path}.phase", op.phase, _PHASES)
        _seconds(f"{path}.seconds", op.seconds)
        _seconds(f"{path}.issue_seconds", op.issue_seconds)
        if op.replay_seconds is not None:
            _seconds(f"{path}.replay_seconds", op.replay_seconds)
        total += op.seconds + op.issue_seconds
        _integer(f"{path}.workspace_bytes", op.workspace_bytes)
        for position, value in enumerate(op.reads):
            _validate_value(f"{path}.reads[{position}]", value, trace)
            storage, version = value
            if version > current.setdefault(storage, 0):
                _fail(f"{path}.reads[{position}]", f"version {version} of storage {storage} is not written before")
        reads = frozenset(op.reads)  # a fused optimizer reads and writes hundreds of values at once
        for position, value in enumerate(op.writes):
            _validate_write(f"{path}.writes[{position}]", value, reads, trace, current)
            current[value[0]] = value[1]
            born[value] = index
    if total >= LARGEST_SECONDS:
        _fail("trace.ops", f"all ops together take {total:.3g} seconds, expected less than {LARGEST_SECONDS:.3g}")
    return born


def _validate_write(path: str, value: Value, reads: frozenset[Value], trace: Trace, current: dict[int, int]) -> None:
    _validate_value(path, value, trace)
    storage, version = value
    if version == 0:
        # `current` knows a storage as soon as anything touched it, so this also refuses a read before the allocation.
        if storage in current:
            _fail(path, f"allocates storage {storage}, which an op before it (or this op) has read or written")
        if trace.storages[storage].persistent:
            _fail(path, f"allocates storage {storage}, which is persistent: it was there before the step")
    elif version != current.get(storage, 0) + 1:
        _fail(path, f"makes version {version} of storage {storage}, whose version is {current.get(storage, 0)}")
    elif (storage, version - 1) not in reads:
        _fail(path, f"version {version} is written in place, so [{storage}, {version - 1}] must be among the reads")


def _validate_value(path: str, value: Value, trace: Trace) -> None:
    if type(value) is not tuple or len(value) != 2:
        _fail(path, f"expected (storage, version), got {quote(value)}")
    _index(path, value[0], len(trace.storages), "storages")
    _integer(path, value[1])


def _validate_ticks(trace: Trace) -> None:
    last_op = 0
    for index, tick in enumerate(trace.ticks):
        path = f"trace.ticks[{index}]"
        _one_of(f"{path}.kind", tick.kind, ("pack", "unpack"))
        _index(f"{path}.storage", tick.storage, len(trace.storages), "storages")
        _integer(f"{path}.op", tick.op)
        if not last_op <= tick.op <= len(trace.ops):
            _fail(f"{path}.op", f"expected {last_op} (the tick before) to {len(trace.ops)} (all ops), got {tick.op}")
        last_op = tick.op
        _integer(f"{path}.level_bytes", tick.level_bytes)
        _integer(f"{path}.peak_bytes", tick.peak_bytes)
        if tick.peak_bytes < tick.level_bytes:
            _fail(f"{path}.peak_bytes", f"expected at least level_bytes ({tick.level_bytes}), got {tick.peak_bytes}")


def _validate_gaps(trace: Trace, storage: Storage, born: dict[Value, int]) -> None:
    path = f"trace.storages[{storage.id}]"
    if not storage.gaps:
        if storage.gap_version != 0:
            _fail(f"{path}.gap_version", f"expected 0 for a storage without gaps, got {storage.gap_version}")
        return
    if storage.held:
        _fail(f"{path}.gaps", "expected none, as the storage is held by Python code and can only be kept")
    last_end = 0
    for position, gap in enumerate(storage.gaps):
        where = f"{path}.gaps[{position}]"
        if type(gap) is not tuple or len(gap) != 2:
            _fail(where, f"expected (start, end), got {quote(gap)}")
        _index(where, gap[0], len(trace.ticks), "ticks")
        _index(where, gap[1], len(trace.ticks), "ticks")
        if gap[0] >= gap[1]:
            _fail(where, f"expected start < end, got {gap[0]} and {gap[1]}")
        if gap[0] < last_end:
            _fail(where, f"starts at {gap[0]}, before the gap before it ends ({last_end})")
        last_end = gap[1]
    issued = trace.ticks[storage.gaps[0][0]].op
    writer = born.get((storage.id, storage.gap_version))
    stands = writer < issued if writer is not None else storage.gap_version == 0
    if not stands:
        _fail(f"{path}.gap_version", f"version {storage.gap_version} is not written before the first gap starts")


def _fail(path: str, what: str) -> NoReturn:
    raise TraceError(f"{path}: {what}")


def _integer(path: str, value: object) -> None:
    if type(value) is not int or value < 0:
        _fail(path, f"expected an integer >= 0, got {quote(value)}")
    if value >= LARGEST_BYTES:
        _fail(path, f"expected less than 2**62, got {quote(value)}")


def _index(path: str, value: int, length: int, of: str) -> None:
    _integer(path, value)
    if value >= length:
        _fail(path, f"refers to number {value} of {length} {of}")


def _same(path: str, value: object, index: int) -> None:
    if type(value) is not int or value != index:
        _fail(path, f"expected its own index {index}, got {quote(value)}")


def _boolean(path: str, value: object) -> None:
    if type(value) is not bool:
        _fail(path, f"expected true or false, got {quote(value)}")


def _seconds(path: str, value: object) -> None:
    if not (isinstance(value, (int, float)) and type(value) is not bool and 0 <= value < LARGEST_SECONDS):
        _fail(path, f"expected seconds, at least 0 and less than {LARGEST_SECONDS:.3g}, got {quote(value)}")


def _one_of(path: str, value: object, known: Iterable[str]) -> None:
    if not isinstance(value, str) or value not in known:
        _fail(path, f"expected one of {', '.join(sorted(known))}, got {quote(value)}")


def _text(path: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > LONGEST_TEXT:
        _fail(path, f"expected a text of at most {LONGEST_TEXT} characters, got {quote(value)}")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        _fail(path, f"expected text that UTF-8 can hold, got {quote(value)}")
