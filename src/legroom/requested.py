"""What a step under a plan asks of the allocator, one request after the other.

A trace has what the program asks for, and the plan adds its own. (A trace from a file has no requests: what backward
asks for is then known only by how the level moves between two ticks.) What comes of it where memory is short is worked
out in `arrange`, and that is only as good as this: on an H200 all 2,707 requests of a step of GPT at 25% of its range
came in the order foretold, and every block had the address foretold.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from legroom.ir import Op, Trace
from legroom.replayprice import CASTS, FOLLOWERS
from legroom.schedule import Drop, Instruction, Prefetch, Release, Replay, Schedule

_NOISE_BYTES = 2**19
_ROUNDED_BYTES = 1024  # at most, twice: blocks come in multiples of 512 bytes


class Event(NamedTuple):
    """What an allocator hears of a step: nbytes > 0: a request; 0: the block goes; -1: tick number `key` begins."""

    key: int
    nbytes: int


class _Program:
    """What the program itself holds, with everything kept, as far as a trace tells."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._alive: dict[int, int] = {}
        self._read: dict[int, None] = {}  # those that no op reads again: they go when the level says so
        self._unknown: list[Event] = []
        self._next_key = len(trace.storages)
        self.known_bytes = sum(storage.nbytes for storage in trace.storages if storage.persistent)

    def nameless(self, nbytes: int) -> Event:
        self._next_key += 1
        return Event(self._next_key, nbytes)

    def makes(self, storage: int, most_bytes: int) -> Iterator[Event]:
        """A storage is allocated, and that is no more than so much in all: what was read for the last time may go."""
        nbytes = self._trace.storages[storage].nbytes
        yield from self._lets_go(self.known_bytes + nbytes - most_bytes)
        self._alive[storage] = nbytes
        self.known_bytes += nbytes
        yield Event(storage, nbytes)

    def has_read(self, storage: int) -> None:
        if storage in self._alive:
            self._read[storage] = None

    def frees(self, storage: int) -> Iterator[Event]:
        self._read.pop(storage, None)
        if storage in self._alive:
            self.known_bytes -= self._alive.pop(storage)
            yield Event(storage, 0)

    def stands_at(self, level_bytes: int, *, backward: bool) -> Iterator[Event]:
        """So much is alive now. Backward allocates what no op of the trace is known to."""
        yield from self._lets_go(self.known_bytes - level_bytes)
        while self._unknown and self.known_bytes - level_bytes >= _NOISE_BYTES:
            key, nbytes = self._unknown.pop()
            self.known_bytes -= nbytes
            yield Event(key, 0)
        if backward and level_bytes - self.known_bytes >= _NOISE_BYTES:
            event = self.nameless(level_bytes - self.known_bytes)
            self._unknown.append(event)
            self.known_bytes += event.nbytes
            yield event

    def _lets_go(self, excess_bytes: int) -> Iterator[Event]:
        while excess_bytes >= _NOISE_BYTES and self._read:
            fitting = [s for s in self._read if self._alive[s] <= excess_bytes + _NOISE_BYTES]
            if not fitting:
                return
            storage = max(fitting, key=self._alive.__getitem__)
            excess_bytes -= self._alive[storage]
            yield from self.frees(storage)


def requests(trace: Trace, schedule: Schedule) -> Iterator[Event]:
    """What a step under this schedule asks of the allocator, in order."""
    instructions: dict[int, list[Instruction]] = defaultdict(list)
    for instruction in schedule.instructions:
        instructions[instruction.tick].append(instruction)
    if not trace.requests:
        yield from _estimated(trace, instructions)
        return
    yield from itertools.starmap(Event, trace.requests[0])
    for number, segment in enumerate(trace.requests[1:]):
        yield from _at_tick(trace, number, instructions)
        yield from itertools.starmap(Event, segment)


def _at_tick(trace: Trace, number: int, instructions: Mapping[int, Sequence[Instruction]]) -> Iterator[Event]:
    yield Event(number, -1)
    for instruction in instructions.get(number, ()):
        match instruction:
            case Release() | Drop():
                yield Event(instruction.storage, 0)
            case Prefetch():
                yield Event(instruction.storage, trace.storages[instruction.storage].nbytes)
            case Replay():
                yield from _Again(trace, instruction).requests()


def _estimated(trace: Trace, instructions: Mapping[int, Sequence[Instruction]]) -> Iterator[Event]:
    """The requests where the trace has none.

    When a temporary goes, and what backward allocates, is not known, but how the level moves is: a temporary that was
    read for the last time goes when there would be too much otherwise, and what the level has gained in backward from
    one tick to the next is taken for one block.
    """
    ticks = trace.ticks
    born, read, goes = _lives(trace)
    program = _Program(trace)
    op = 0
    backward = False
    for number in range(len(ticks) + 1):
        last = number == len(ticks)
        most_bytes = ticks[number - 1].peak_bytes if number > 0 else trace.head_peak_bytes
        while op < (len(trace.ops) if last else ticks[number].op):
            for storage in born.get(op, ()):
                yield from program.makes(storage, most_bytes)
            if not backward and trace.ops[op].workspace_bytes > 0:
                workspace = program.nameless(trace.ops[op].workspace_bytes)
                yield workspace
                yield Event(workspace.key, 0)
            for storage in read.get(op, ()):
                program.has_read(storage)
            op += 1
        for storage in goes.get(number, ()):
            yield from program.frees(storage)
        if last:
            return
        tick = ticks[number]
        backward = backward or tick.kind == "unpack"
        yield from program.stands_at(tick.level_bytes, backward=backward)
        yield from _at_tick(trace, number, instructions)
        if backward:
            after = ticks[number + 1].level_bytes if number + 1 < len(ticks) else tick.level_bytes
            beyond = program.nameless(tick.peak_bytes - max(tick.level_bytes, after))
            if beyond.nbytes > 0:
                yield beyond
                yield Event(beyond.key, 0)


def _lives(trace: Trace) -> tuple[dict[int, list[int]], dict[int, list[int]], dict[int, list[int]]]:
    """Storages by the op that allocates them, by the op after which nobody reads them, and, where backward reads them,
    by the tick by which they are gone."""
    allocated: dict[int, int] = {}
    used: dict[int, int] = {}
    for op in trace.ops:
        for storage, version in op.writes:
            if version == 0:
                allocated[storage] = op.id
        for storage, _ in (*op.reads, *op.writes):
            used[storage] = op.id
    unpacked = {tick.storage: number for number, tick in enumerate(trace.ticks) if tick.kind == "unpack"}
    born: dict[int, list[int]] = defaultdict(list)
    dies: dict[int, list[int]] = defaultdict(list)
    goes: dict[int, list[int]] = defaultdict(list)
    for storage, op_id in allocated.items():
        if trace.storages[storage].nbytes == 0:
            continue
        born[op_id].append(storage)
        number = unpacked.get(storage)
        if number is None:
            if trace.storages[storage].kind != "gradient":
                dies[used[storage]].append(storage)
            continue
        after = number + 1
        while after < len(trace.ticks) and trace.ticks[after].op == trace.ticks[number].op:
            after += 1
        goes[after].append(storage)
    return born, dies, goes


class _Again:
    """One replay; see `runtime.replay` for what it does. What is freed again on the way has keys below zero, which are
    not those of the storages."""

    def __init__(self, trace: Trace, instruction: Replay) -> None:
        self._trace = trace
        self._ops = [trace.ops[number] for number in instruction.ops]
        self._targets = dict.fromkeys((instruction.storage, *instruction.also))
        # By whom last.
        self._read = {storage: place for place, op in enumerate(self._ops) for storage, _ in op.reads}
        self._made: dict[int, None] = {}
        # Normalisations that are not written out before somebody needs it: the op, and what it is made from.
        self._unwritten: dict[int, tuple[str, set[int]]] = {}
        # What has the bytes of another takes none; and what only it reads is made in its place.
        twins = {op.writes[0][0]: op.reads[0][0] for op in self._ops if op.twin}
        made = {storage for op in self._ops for storage, _ in op.writes}
        self._taken = set(twins)
        self._place_of = {a: b for b, a in twins.items() if b in self._targets and a in made - self._targets.keys()}

    def requests(self) -> Iterator[Event]:
        for place, op in enumerate(self._ops):
            if self._waits(op):
                for storage, _ in op.reads:
                    yield from self._writes_out(storage, place)
                self._unwritten[op.writes[0][0]] = op.name, {storage for storage, _ in op.reads}
            else:
                yield from self._runs(op, place)
            for storage in [s for s in self._unwritten if s not in self._targets and self._over(s, place)]:
                del self._unwritten[storage]
            yield from self._lets_go(place)
        for storage in self._targets:
            yield from self._writes_out(storage, len(self._ops))

    def _waits(self, op: Op) -> bool:
        """Whether it is a normalisation whose statistics are at hand, and needed for nothing else."""
        return op.short and not any(s in self._targets or s in self._read for s, _ in op.writes[1:])

    def _runs(self, op: Op, place: int) -> Iterator[Event]:
        for number, (storage, _) in enumerate(op.reads):
            if number > 0 or not self._in_one_pass(op, storage):
                yield from self._writes_out(storage, place)
        for storage, _ in op.writes:
            self._unwritten.pop(storage, None)
            yield from self._makes(storage)
        if op.workspace_bytes > 0:
            yield Event(-1 - len(self._trace.storages), op.workspace_bytes)
            yield Event(-1 - len(self._trace.storages), 0)

    def _in_one_pass(self, op: Op, storage: int) -> bool:
        """Whether it runs in one pass with the normalisation that it reads."""
        norm, _ = self._unwritten.get(storage, ("", ()))
        if op.name not in FOLLOWERS.get(norm, ()) or len(op.writes) != 1:
            return False
        source_bytes, nbytes = (self._trace.storages[s].nbytes for s in (storage, op.writes[0][0]))
        # A cast only to half of the bits.
        return op.name not in CASTS or abs(2 * nbytes - source_bytes) <= _ROUNDED_BYTES

    def _writes_out(self, storage: int, place: int) -> Iterator[Event]:
        """Before the op at this place; what it is made from may go."""
        if self._unwritten.pop(storage, None) is not None:
            yield from self._makes(storage)
            yield from self._lets_go(place - 1)

    def _makes(self, storage: int) -> Iterator[Event]:
        if storage in self._taken:
            return
        if storage in self._place_of:
            self._taken.add(storage)
            yield Event(self._place_of[storage], self._trace.storages[storage].nbytes)
        elif storage not in self._made:
            self._made[storage] = None
            key = storage if storage in self._targets else -1 - storage
            yield Event(key, self._trace.storages[storage].nbytes)

    def _lets_go(self, place: int) -> Iterator[Event]:
        waited_for = set[int]().union(*(sources for _, sources in self._unwritten.values()))
        for storage in [s for s in self._made if s not in self._targets and s not in waited_for]:
            if self._over(storage, place):
                del self._made[storage]
                yield Event(-1 - storage, 0)

    def _over(self, storage: int, place: int) -> bool:
        return self._read.get(storage, -1) <= place
