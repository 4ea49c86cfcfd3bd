"""The allocator's own account of a step: every allocation and free, op-internal workspace included, in program order.

On the CPU it comes from PyTorch's profiler, event by event. On CUDA the allocator's counters are read at every mark:
the level, and the peak since the mark before, which is all that a curve over ticks needs. A log that records a step
can tell of the blocks one by one beside that, on CUDA from the allocator's history. The runtime writes marks into the
log, so that what the program did and what legroom did can be told apart afterwards.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import RecordScope, _RecordFunctionFast
from torch.autograd.profiler import profile

from legroom.history import History
from legroom.kerneltimes import Kernel, busy_seconds

# Marks in the log. What lies inside OWN, TICK and PROOF was done by legroom; OP is one op that the mode saw.
TICK = "legroom::tick"
OWN = "legroom::own"
PROOF = "legroom::proof"
OP = "legroom::op"
STANDS = "legroom::stands"  # behind a PROOF that was not repeated: it was the op itself
OPTIMIZER = "legroom::optimizer"  # an optimizer is about to step
GONE = "legroom::gone "  # followed by bytes: a storage died in the program while it was not in memory
FREED = "legroom::freed "  # followed by bytes: something from before the log began was seen to be gone
MOVED = "legroom::moved "  # followed by bytes: something from before the log began was evicted


# Tuples: a step of 10,000 ops has 100,000 of them, and frozen dataclasses take up to half as long again.
class Allocation(NamedTuple):
    nbytes: int  # negative: a free


class Block(NamedTuple):
    """One block, where the log knows them: beside what Allocation counts, not added to it."""

    key: int  # the same when it is asked for and when it goes
    nbytes: int  # 0: it goes


class Enter(NamedTuple):
    """The beginning of a mark or of an outermost op."""

    name: str
    seconds: float
    shapes: str
    backward: bool  # inside the autograd engine


class Leave(NamedTuple):
    name: str


Event = Allocation | Block | Enter | Leave


class Log(Protocol):
    """Start, run, stop: the events of what ran."""

    def start(self) -> None: ...
    def stop(self) -> list[Event]: ...
    def cancel(self) -> None: ...


def profiler_is_free() -> bool:
    """PyTorch has one profiler; starting ours while the user's runs would end theirs without a word."""
    return not torch._C._autograd._profiler_enabled()


# What marks are written into, beside the profiler's ops; one step runs at a time in a process.
_marked: SampledLog | MemoryLog | None = None


def mark(name: str) -> Any:
    """A context that stands in the log of the step that runs."""
    return _RecordFunctionFast(name) if _marked is None else _marked.mark(name)


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
    """For memory that legroom takes and gives back at once: where counters are read, it is in no peak."""
    sampled = _marked if isinstance(_marked, SampledLog) else None
    if sampled is not None:
        sampled.sample()
    try:
        yield
    finally:
        if sampled is not None:
            sampled.forget_peak()


class MemoryLog:
    """The CPU allocator's events and marks, from the profiler, without any op: those are what takes the time.

    Where the profiler hears of no op, it hears of no mark either. So a mark is a block of a size that nothing else has,
    which is there as long as the mark: where it lies tells them apart.
    """

    def __init__(self) -> None:
        self._profile = _profiler(cuda=False, shapes=False)
        self._running = False
        # Drawn from the system: the program's own random state stays as it is.
        self._size = 2**14 + 2 * random.SystemRandom().randrange(2**13) + 1
        self._marks: dict[int, deque[str]] = defaultdict(deque)  # names by address, in the order in which they began

    def start(self) -> None:
        global _marked
        config, activities = self._profile.config(create_trace_id=True), self._profile.kineto_activities
        _prepare_profiler(config, activities)
        _enable_profiler(config, activities, {RecordScope.LITE_INTERPRETER})  # type: ignore[call-arg]  # no op runs in it
        self._running = True
        _marked = self

    def cancel(self) -> None:
        """End without reading; for steps that raise."""
        if self._running:
            with contextlib.suppress(Exception):
                self._end()

    def stop(self) -> list[Event]:
        return list(self._read(self._end().experimental_event_tree()))

    def mark(self, name: str) -> Any:
        """One that does nothing where the profiler does not listen: it listens to this thread and those of autograd."""
        return contextlib.nullcontext() if profiler_is_free() else _PlacedMark(self, name)

    def place(self, name: str) -> torch.UntypedStorage:
        block = torch.UntypedStorage(self._size)  # type: ignore[no-untyped-call]
        self._marks[block.data_ptr()].append(name)
        return block

    def _end(self) -> Any:
        global _marked
        _marked = None
        self._running = False
        return _disable_profiler()

    def _read(self, nodes: Sequence[Any]) -> Iterator[Event]:
        open_: dict[int, str] = {}
        known: set[int] = set()
        for node in nodes:
            if node.name != _MEMORY or node.tag != _ALLOCATION:
                continue
            fields = node.typed[1]
            if fields.device.type != "cpu":
                continue
            nbytes, address = fields.alloc_size, fields.ptr
            if nbytes == self._size and self._marks.get(address):
                open_[address] = self._marks[address].popleft()
                yield Enter(open_[address], 0.0, "", False)
            elif nbytes < 0 and address in open_:
                yield Leave(open_.pop(address))
            elif nbytes > 0 or address in known:  # see `_flatten`
                (known.add if nbytes > 0 else known.discard)(address)
                yield Allocation(nbytes)


class _PlacedMark:
    __slots__ = ("_block", "_log", "_name")

    def __init__(self, log: MemoryLog, name: str) -> None:
        self._log, self._name = log, name
        self._block: torch.UntypedStorage | None = None

    def __enter__(self) -> None:
        self._block = self._log.place(self._name)

    def __exit__(self, *error: Any) -> None:
        self._block = None


class ProfilerLog:
    """The CPU allocator's events, from the profiler, and backward's ops, with their shapes unless these are known: to
    write them down takes a third of the time of such a log."""

    def __init__(self, *, shapes: bool = True, blocks: bool = False) -> None:
        self._profile = _profiler(cuda=False, shapes=shapes)
        self._blocks = blocks
        self._running = False

    def start(self) -> None:
        self._profile.__enter__()
        self._running = True

    def cancel(self) -> None:
        """End without reading; for steps that raise."""
        if self._running:
            self._running = False
            with contextlib.suppress(Exception):
                self._profile.__exit__(None, None, None)

    def stop(self) -> list[Event]:
        self._running = False
        self._profile.__exit__(None, None, None)
        tree = self._profile.kineto_results.experimental_event_tree()
        return [event for _, event in _flatten(tree, None, blocks=self._blocks)]


class SampledLog:
    """The CUDA allocator's counters, read at every mark; with `ops`, the profiler's ops and kernel times, and with
    `blocks`, the allocator's history, as well."""

    def __init__(self, index: int, *, ops: bool, shapes: bool = True, blocks: bool = False) -> None:
        self._index = index
        self._profile = _profiler(cuda=True, shapes=shapes) if ops else None
        self._history = History(index) if blocks else None
        self._events: list[Event] = []
        self._last = 0
        self._marks = 0
        self._requests = 0  # allocations and frees, as the allocator counts them
        self._requests_before = 0  # the log began
        self._places: list[int] = []  # of each mark: how many of them lie between the beginning and it

    def start(self) -> None:
        global _marked
        if self._profile is not None:
            self._profile.__enter__()
        if self._history is not None:
            self._history.start()
        torch._C._cuda_resetPeakMemoryStats(self._index)
        self._last = self._read()[0]
        self._requests_before = self._requests
        _marked = self

    def cancel(self) -> None:
        global _marked
        _marked = None
        if self._history is not None:
            self._history.cancel()
        if self._profile is not None:
            with contextlib.suppress(Exception), _detaching(self._index):
                self._profile.__exit__(None, None, None)

    def stop(self) -> list[Event]:
        global _marked
        self.sample()
        _marked = None
        if self._history is not None:
            requests = self._requests - self._requests_before
            self._events = with_requests(self._events, [*self._places, requests], self._history.stop())
        if self._profile is None:
            return [_unnumbered(event) for event in self._events]
        with _detaching(self._index):
            self._profile.__exit__(None, None, None)
        results = self._profile.kineto_results
        return list(self._merged(_flatten(results.experimental_event_tree(), _kernels(results), blocks=False)))

    def mark(self, name: str) -> _SampledMark:
        return _SampledMark(self, name)

    def sample(self) -> None:
        """What happened since the last look: up to the peak, and from there to where it stands."""
        level, peak = self._read()
        if peak > max(level, self._last):
            self._events += [Allocation(peak - self._last), Allocation(level - peak)]
        elif level != self._last:
            self._events.append(Allocation(level - self._last))
        self._last = level
        torch._C._cuda_resetPeakMemoryStats(self._index)

    def forget_peak(self) -> None:
        """What was taken since the last look and given back is not the step's."""
        torch._C._cuda_resetPeakMemoryStats(self._index)

    def numbered(self, name: str) -> str:
        self._marks += 1
        return f"{name}{_NUMBER}{self._marks}"

    def enter(self, name: str) -> None:
        self._note(Enter(name, 0.0, "", False))

    def leave(self, name: str) -> None:
        self._note(Leave(name))

    def _note(self, mark: Enter | Leave) -> None:
        self.sample()
        self._events.append(mark)
        self._places.append(self._requests - self._requests_before)

    def _read(self) -> tuple[int, int]:
        stats = torch._C._cuda_memoryStats(self._index)
        counters, requests = stats["allocated_bytes"]["all"], stats["allocation"]["all"]
        self._requests = requests["allocated"] + requests["freed"]
        return counters["current"], counters["peak"]

    def _merged(self, profiled: Iterator[tuple[int, Event]]) -> Iterator[Event]:
        """The profiler's ops and times in the sampled log.

        Marks are numbered, and an op stands behind the last one of its thread: the profiler's clock may put what two
        threads did into another order where both are busy.
        """
        marks: dict[tuple[type, str], Event] = {}
        behind: dict[tuple[type, str] | None, list[Event]] = defaultdict(list)
        last: tuple[type, str] | None = None
        last_of: dict[int, tuple[type, str]] = {}
        for thread, event in profiled:
            if isinstance(event, (Allocation, Block)):
                continue
            if event.name.startswith("legroom::"):
                last = last_of[thread] = (type(event), event.name)
                marks[last] = event
            else:
                behind[last_of.get(thread, last)].append(event)
        yield from behind[None]
        for seen in self._events:
            if isinstance(seen, (Allocation, Block)):
                yield seen
            else:
                key = (type(seen), seen.name)
                yield _unnumbered(marks.get(key, seen))
                yield from behind[key]


def with_requests(
    events: Sequence[Event], places: Sequence[int], history: Sequence[tuple[int, int] | None]
) -> list[Event]:
    """Sampled events with the blocks of a history between them, as far as those are told about.

    places: how many of the history's requests came before each mark, and last, how many there were in all. Where that
    is not what the history holds, it is of no use.
    """
    if len(history) != places[-1]:
        return list(events)
    merged: list[Event] = []
    told = marks = 0
    for event in events:
        if isinstance(event, (Enter, Leave)):
            merged += [Block(*block) for block in history[told : places[marks]] if block is not None]
            told, marks = places[marks], marks + 1
        merged.append(event)
    merged += [Block(*block) for block in history[told:] if block is not None]
    return merged


class _SampledMark:
    __slots__ = ("_log", "_name", "_range")

    def __init__(self, log: SampledLog, name: str) -> None:
        self._log = log
        self._name = log.numbered(name)
        self._range = _RecordFunctionFast(self._name)

    def __enter__(self) -> None:
        self._log.enter(self._name)
        self._range.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._range.__exit__(*error)
        self._log.leave(self._name)


_MEMORY, _ALLOCATION = "[memory]", torch._C._profiler._EventType.Allocation
_NUMBER = "#"  # between a mark's name and its number


def _unnumbered(event: Event) -> Event:
    if isinstance(event, (Allocation, Block)) or not event.name.startswith("legroom::"):
        return event
    return event._replace(name=event.name.partition(_NUMBER)[0])


def _profiler(*, cuda: bool, shapes: bool) -> Any:
    # The profiler greets on standard error at every start unless told otherwise before its first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    devices = {"use_device": "cuda"} if cuda else {}
    return profile(use_cpu=True, profile_memory=not cuda, record_shapes=shapes, use_kineto=True, **devices)  # type: ignore[arg-type]


_DETACH = "TEARDOWN_CUPTI"
_SAFE_SINCE = (12, 6)  # CUDA: before, graphs that were captured meanwhile could crash


@contextlib.contextmanager
def _detaching(index: int) -> Iterator[None]:
    """Let the profiler detach from the driver when it stops, unless somebody has decided about that.

    Otherwise every launch of the process stays slower from then on: a step of 35 ms took 48 on an H200. It happens at
    the next calls into CUDA, and a session that begins before it is done can hang: so they are made here.
    """
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    if _DETACH in os.environ or version < _SAFE_SINCE:
        yield
        return
    os.environ[_DETACH] = "1"
    try:
        yield
        for _ in range(5):
            torch.cuda.synchronize(index)
            time.sleep(0.002)
    finally:
        del os.environ[_DETACH]


def _kernels(results: Any) -> dict[int, list[Kernel]]:
    """What ran on the device, by the id that ties it to the op that launched it."""
    found: dict[int, list[Kernel]] = defaultdict(list)
    for event in results.events():
        if event.device_type() == torch._C._autograd.DeviceType.CUDA:
            start_ns = event.start_ns()
            kernel = Kernel(start_ns, start_ns + event.duration_ns(), event.device_resource_id())
            found[event.linked_correlation_id()].append(kernel)
    return found


def _flatten(roots: list[Any], kernels: dict[int, list[Kernel]] | None, *, blocks: bool) -> Iterator[tuple[int, Event]]:
    """With its thread. Pre-order walk: children lie inside their parents in time, so this is program order.

    Of the program's ops only those of backward: in forward the marks around them stand for them.
    """
    stack: list[Any] = [(node, False, False) for node in reversed(roots)]
    # The CPU allocator remembers blocks from earlier logs and reports their frees in this one, those from before any
    # log not at all. Both are left to the census, which knows what was there at the start.
    known: dict[int, int] = {}
    made = 0
    while stack:
        item = stack.pop()
        if len(item) == 2:
            yield item
            continue
        node, inside_op, backward = item
        name = node.name
        if name == _MEMORY and node.tag == _ALLOCATION:
            fields = node.typed[1]
            nbytes = fields.alloc_size
            if fields.device.type != "cpu":
                continue
            pointer, thread = fields.ptr, node.start_tid
            if nbytes > 0:
                known[pointer] = key = made
                made += 1
            elif (key := known.pop(pointer, -1)) < 0:
                continue
            yield thread, Allocation(nbytes)
            if blocks:
                yield thread, Block(key, max(0, nbytes))
            continue
        ours = name.startswith("legroom::")
        deeper = inside_op
        if not ours and not inside_op and "::" in name:
            if not name.startswith("autograd::"):
                deeper = True
            elif name.startswith("autograd::engine"):
                backward = True
        if ours or (backward and deeper and not inside_op):
            thread = node.start_tid
            seconds = (node.end_time_ns - node.start_time_ns) * 1e-9
            if kernels is not None:
                seconds = busy_seconds(_kernels_below(node, kernels))
            yield thread, Enter(name, seconds, "" if ours else _shapes(node), backward)
            stack.append((thread, Leave(name)))
        children = node.children
        if children:
            stack.extend([(child, deeper, backward) for child in reversed(children)])


def _kernels_below(node: Any, kernels: dict[int, list[Kernel]]) -> Iterator[Kernel]:
    stack = [node]
    while stack:
        inner = stack.pop()
        yield from kernels.get(inner.correlation_id, ())
        stack.extend(inner.children)


def _shapes(node: Any) -> str:
    inputs = getattr(node.typed[1], "inputs", None) or ()
    return ",".join(str(getattr(i, "sizes", None)) for i in inputs)
