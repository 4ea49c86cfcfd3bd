"""The schedule: a plan as instructions at ticks, how it is made, and the proof that it is sound.

Instructions of tick t run in list order when the hook of tick t is called, before the hook does its own work. Both the
simulator and the runtime interpret them; nothing else of a plan reaches the runtime.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from legroom import packing
from legroom.errors import PlanError
from legroom.hardware import Hardware
from legroom.ir import Op, Trace, Value
from legroom.jsonio import Node, dump, parse
from legroom.kernels import codes as k
from legroom.plan import MOST_GAPS, Decision, Keep, Plan, Recompute, Swap, check_fits, signature
from legroom.tables import Ints, tabulate, value_ids

VERSION = 2  # 1 had no `also`


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Start the copy to the host. The storage stays."""

    tick: int
    storage: int


@dataclass(frozen=True, slots=True)
class Release:
    """Wait for the copy to the host, then free."""

    tick: int
    storage: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Free without copying: it will be replayed, or the host copy of an earlier gap is still good."""

    tick: int
    storage: int


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Allocate, and start the copy back. The host copy stays good until the storage is written."""

    tick: int
    storage: int


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for the copy back. From here on the storage may be read."""

    tick: int
    storage: int


@dataclass(frozen=True, slots=True)
class Replay:
    """Bring the storage back by running `ops` again, in the order given (which is program order).

    Storages in `also` come back with it: they are away, and `ops` make them on the way. The targets are (storage, gap
    version) of all of these; the last op writes that of `storage`.

    The walk, which simulator, proof and runtime follow alike. `made` holds the values this replay has made so far, each
    in memory of its own; "later" means by a later op of this replay.

    1. An op takes a value it reads from `made` if it is there, else from the storage itself, which then stands in
       memory with that very version.
    2. Before the op runs, each value it writes gets memory: a value of version 0 is allocated by the op; a value (s, n)
       with n > 0 is written in place, over (s, n - 1). If that is in `made`, no target, and no later op reads it, its
       memory is written over and (s, n - 1) leaves `made`. Else the op writes over a copy, made just before.
    3. Memory now stands at: level at the start + all of `made` + what step 2 allocated + the op's workspace.
    4. When the op is done, values it read leave `made` and are freed unless they are targets or a later op reads them.
       Then the values it wrote enter `made`, except those that no later op reads and that are no target: these are
       freed at once.

    The targets alone are left in `made` at the end, and become their storages. No other storage changes. A storage in
    `also` is in memory from here on; nothing happens to it at the end of its gap.
    """

    tick: int
    storage: int
    ops: tuple[int, ...]
    also: tuple[int, ...] = ()


Instruction = SwapOut | Release | Drop | Prefetch | Await | Replay

_KINDS: dict[str, type[SwapOut] | type[Release] | type[Drop] | type[Prefetch] | type[Await]] = {
    "swap-out": SwapOut,
    "release": Release,
    "drop": Drop,
    "prefetch": Prefetch,
    "await": Await,
}
_NAMES = {kind: name for name, kind in _KINDS.items()} | {Replay: "replay"}


def name_of(instruction: Instruction) -> str:
    """What it is called in files and pictures."""
    return _NAMES[type(instruction)]


@dataclass(frozen=True, slots=True)
class Schedule:
    instructions: tuple[Instruction, ...]  # by tick, then in the order they run
    trace_signature: str


def codes_of(decisions: tuple[Decision, ...]) -> tuple[npt.NDArray[np.int8], Ints]:
    """Decisions as the kernels take them: a code for each gap, and how many ticks ahead it is fetched."""
    codes = np.zeros(len(decisions), np.int8)
    ahead = np.zeros(len(decisions), np.int64)
    for index, decision in enumerate(decisions):
        match decision:
            case Keep():
                codes[index] = k.KEEP
            case Swap(when="overlap"):
                codes[index] = k.OVERLAP
            case Swap(when="sync"):
                codes[index] = k.SYNC
            case Swap():
                codes[index], ahead[index] = k.AHEAD, decision.ahead
            case Recompute():
                codes[index] = k.SHARED if decision.share else k.RECOMPUTE
    return codes, ahead


def lower(trace: Trace, plan: Plan, hardware: Hardware) -> Schedule:
    """The schedule of a plan. Raises PlanError where the plan is for another trace or asks for an impossible replay.

    A swap that would leave no whole segment free is left out. A replay reads what stands in memory at its tick: a
    swapped storage it needs comes back by then and stays until its use, a recomputed one is replayed with it and thrown
    away, unless it is to be shared: then it stays too. One that is shared and needed at the very tick at which its gap
    starts does not go away.
    """
    check_fits(trace, plan)
    tables = tabulate(trace, hardware)
    packed = packing.pack(tables)
    codes, ahead = codes_of(plan.decisions)
    codes = packing.possible_codes(codes, packed)
    room = len(trace.ops)
    failure = None
    while True:
        program = packing.empty_program(packed, replay_room=room)
        used = packing.lower(codes, ahead, 1, packed, packing.scratch(tables), program)
        if program.failure[0] != k.OK:
            # The last gap of a chain is replayed first, and fails for what is wrong with the first: look for that.
            failure = program.failure
            codes[failure[1] :] = k.KEEP
        elif failure is not None:
            raise PlanError(_why_impossible(trace, failure))
        elif used <= room:
            break
        else:
            room = used  # replays run the same ops many times over; now it is known how many
    return Schedule(tuple(_instructions(trace, program)), plan.trace_signature)


def _instructions(trace: Trace, program: packing.Program) -> Iterator[Instruction]:
    gaps = trace.gaps
    plain = (SwapOut, Prefetch, Release, Await, Drop)  # as numbered in kernels
    for tick in range(len(trace.ticks)):
        for instruction in program.instructions[program.offsets[tick] : program.offsets[tick + 1]].tolist():
            kind, gap = instruction & k.KIND_MASK, instruction >> k.KIND_BITS
            if kind == k.REPLAY:
                row = program.replays[gap * k.ROW : (gap + 1) * k.ROW].tolist()
                first = row[k.REPLAY_OP]
                stop = first + row[k.OPS]
                back = program.replay_ops[stop : stop + row[k.REPLAY_GAPS]].tolist()
                also = tuple(sorted(gaps[other].storage for other in back if other != gap))
                yield Replay(tick, gaps[gap].storage, tuple(program.replay_ops[first:stop].tolist()), also)
            else:
                yield plain[kind](tick, gaps[gap].storage)


def _why_impossible(trace: Trace, failure: Ints) -> str:
    code, gap_id, op_id, value = failure.tolist()
    gap = trace.gaps[gap_id]
    text = f"gap {gap.id} (storage {gap.storage}{_named(trace, gap.storage)}) cannot be recomputed at tick {gap.end}: "
    if code == k.NOT_REPLAYABLE:
        op = trace.ops[op_id]
        return f"{text}op {op.id} {op.name} cannot be replayed ({op.why_not})"
    if op_id < 0:
        return f"{text}no op of the trace makes it"
    needed, _ = list(value_ids(trace))[value]
    return (
        f"{text}op {op_id} {trace.ops[op_id].name} reads storage {needed}{_named(trace, needed)}, "
        "which is not in memory then as it was, and no op of the trace makes it"
    )


def _named(trace: Trace, storage: int) -> str:
    name = trace.storages[storage].name
    return f" {name!r}" if name else ""


def to_json(schedule: Schedule) -> str:
    rows: dict[str, list[Any]] = {"tick": [], "do": [], "storage": [], "ops": [], "also": []}
    for instruction in schedule.instructions:
        rows["tick"].append(instruction.tick)
        rows["do"].append(name_of(instruction))
        rows["storage"].append(instruction.storage)
        replay = instruction if isinstance(instruction, Replay) else None
        rows["ops"].append(list(replay.ops) if replay else [])
        rows["also"].append(list(replay.also) if replay else [])
    return dump("schedule", VERSION, {"trace_signature": schedule.trace_signature, "instructions": rows})


def from_json(text: str) -> Schedule:
    fields = parse(text, kind="schedule", version=VERSION, error=PlanError).fields("trace_signature", "instructions")
    node = fields["instructions"]
    rows = node.table("tick", "do", "storage", "ops", "also")
    if len(rows["tick"]) > 5 * MOST_GAPS:
        node.fail(f"expected at most {5 * MOST_GAPS} instructions, got {len(rows['tick'])}")
    instructions = tuple(_instruction_from(node, row, rows) for row in range(len(rows["tick"])))
    return Schedule(instructions, fields["trace_signature"].text(longest=64))


def _instruction_from(node: Node, row: int, rows: dict[str, list[Any]]) -> Instruction:
    entry = {column: node.entry(row, column, values[row]) for column, values in rows.items()}
    do = entry["do"].one_of((*_KINDS, "replay"))
    tick, storage = entry["tick"].integer(), entry["storage"].integer()
    ops, also = entry["ops"].integers(), entry["also"].integers()
    if do == "replay":
        return Replay(tick, storage, ops, also)
    for name, found in (("ops", ops), ("also", also)):
        if found:
            entry[name].fail(f"expected none for {do}, got {len(found)}")
    return _KINDS[do](tick, storage)


Level = tuple[int, int, int]  # (tick, bytes after its instructions, peak from this tick to the next)


def check_schedule(trace: Trace, schedule: Schedule) -> int:
    """Prove that every read finds its data, and return the exact peak in bytes.

    Shares no code with lower(), so it holds for schedules from anywhere. Raises PlanError with tick and storage
    otherwise.
    """
    return max((trace.head_peak_bytes, *(peak for _, _, peak in memory_curve(trace, schedule))))


def memory_curve(trace: Trace, schedule: Schedule) -> tuple[Level, ...]:
    """The proof of check_schedule(), tick by tick.

    A segment peaks at `Tick.peak_bytes` less what is absent during it. At a tick, between two instructions, memory
    stands at `Tick.level_bytes` less what is absent then; within a replay it follows the walk that `Replay` describes.
    """
    if schedule.trace_signature != signature(trace):
        raise PlanError(f"the schedule is for trace {schedule.trace_signature}, this trace is {signature(trace)}")
    return tuple(_Proof(trace).walk(schedule.instructions))


class _Proof:
    """What is where while the ticks go by."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.tick = 0
        self.issued = 0  # ops before this one have run
        self.absent_bytes = 0
        self.version = [0] * len(trace.storages)
        self.place = ["here"] * len(trace.storages)  # here, away, coming
        self.copy = ["none"] * len(trace.storages)  # none, started, done: the host copy of the present version
        self.ends: dict[int, list[int]] = {}
        for gap in trace.gaps:
            self.ends.setdefault(gap.end, []).append(gap.storage)

    def walk(self, instructions: tuple[Instruction, ...]) -> Iterator[Level]:
        position = 0
        for index, tick in enumerate(self.trace.ticks):
            self.tick = index
            self._run_ops(tick.op)
            peak = 0
            while position < len(instructions) and instructions[position].tick == self.tick:
                peak = max(peak, self._step(instructions[position]))
                position += 1
            for storage in self.ends.get(self.tick, ()):
                if self.place[storage] != "here":
                    self._fail(storage, f"is used here but is {self.place[storage]}")
            yield self.tick, tick.level_bytes - self.absent_bytes, max(peak, tick.peak_bytes - self.absent_bytes)
        if position < len(instructions):
            self.tick = instructions[position].tick
            self._fail(instructions[position].storage, "has an instruction out of order or at no tick of the trace")

    def _run_ops(self, until: int) -> None:
        for op in self.trace.ops[self.issued : until]:
            for storage, version in op.writes:
                self.version[storage] = version
                self.copy[storage] = "none"
        self.issued = until

    def _step(self, instruction: Instruction) -> int:
        """Do one instruction; return what memory rises to by it, 0 where it does not rise.

        The level at which a tick is reached belongs to the segment before it, and freeing only lowers it.
        """
        storage = instruction.storage
        if not 0 <= storage < len(self.trace.storages):
            self._fail(storage, "is not in the trace")
        match instruction:
            case SwapOut():
                self._expect(storage, "copied out", place="here", copy="none")
                self._expect_gap(storage)
                self.copy[storage] = "started"
            case Release():
                self._expect(storage, "released", place="here", copy="started")
                self.copy[storage] = "done"
                self._free(storage)
            case Drop():
                if self.copy[storage] == "started":
                    self._fail(storage, "is dropped while it is copied out")
                self._expect(storage, "dropped", place="here")
                self._free(storage)
            case Prefetch():
                self._expect(storage, "fetched", place="away", copy="done")
                self.place[storage] = "coming"
                self.absent_bytes -= self.trace.storages[storage].nbytes
                return self._level()
            case Await():
                self._expect(storage, "awaited", place="coming")
                self.place[storage] = "here"
            case Replay():
                return self._replay(instruction)
        return 0

    def _replay(self, replay: Replay) -> int:
        ops = [self._replayable(replay, op) for op in replay.ops]
        targets = {self._target(storage) for storage in (replay.storage, *replay.also)}
        target = (replay.storage, self.trace.storages[replay.storage].gap_version)
        if not ops or target not in ops[-1].writes or list(replay.ops) != sorted(set(replay.ops)):
            self._fail(replay.storage, f"is replayed by ops {replay.ops}, which do not end in the op that makes it")
        if len(targets) != 1 + len(replay.also):
            self._fail(replay.storage, f"is replayed with {replay.also}, in which a storage is named twice")
        for storage, version in sorted(targets):
            if not any((storage, version) in op.writes for op in ops):
                self._fail(storage, f"is to come back by ops {replay.ops}, none of which makes it")
        last_read = {value: op.id for op in ops for value in op.reads} | dict.fromkeys(targets, len(self.trace.ops))
        made: set[Value] = set()
        held = peak = 0
        for op in ops:
            for value in op.reads:
                if value not in made and not self._stands(value):
                    self._fail(replay.storage, f"is replayed by op {op.id}, which does not find {value} in memory")
            for storage, version in op.writes:
                before = (storage, version - 1)
                if before in made and last_read[before] == op.id:
                    made.remove(before)
                else:
                    held += self.trace.storages[storage].nbytes
            peak = max(peak, held + op.workspace_bytes)
            done = {value for value in op.reads if value in made and last_read[value] == op.id}
            useless = {value for value in op.writes if last_read.get(value, -1) <= op.id}
            made = (made | set(op.writes)) - done - useless
            held -= sum(self.trace.storages[storage].nbytes for storage, _ in done | useless)
        assert made == targets
        assert held == sum(self.trace.storages[storage].nbytes for storage, _ in targets)
        peak += self._level()
        for storage, _ in targets:
            self.place[storage] = "here"
        self.absent_bytes -= held
        return max(peak, self._level())

    def _target(self, storage: int) -> Value:
        """The value that comes back into a storage, which is away and was not written since."""
        if not 0 <= storage < len(self.trace.storages):
            self._fail(storage, "is not in the trace")
        self._expect(storage, "replayed", place="away")
        version = self.trace.storages[storage].gap_version
        if self.version[storage] != version:
            stood = self.version[storage]
            self._fail(storage, f"is replayed as version {version}, but version {stood} stood in it")
        return storage, version

    def _replayable(self, replay: Replay, op_id: int) -> Op:
        if not 0 <= op_id < self.issued:
            self._fail(replay.storage, f"is replayed by op {op_id}, which has not run yet")
        op = self.trace.ops[op_id]
        if op.why_not:
            self._fail(replay.storage, f"is replayed by op {op_id} {op.name}, which cannot be replayed ({op.why_not})")
        return op

    def _stands(self, value: Value) -> bool:
        """Whether the value is in memory now for certain: between its first and last gap, or persistent."""
        storage = self.trace.storages[value[0]]
        if self.place[storage.id] != "here":
            return False
        between = bool(storage.gaps) and storage.gaps[0][0] <= self.tick <= storage.gaps[-1][1]
        return (between or storage.persistent) and value[1] == self.version[storage.id]

    def _free(self, storage: int) -> None:
        self._expect_gap(storage)
        self.place[storage] = "away"
        self.absent_bytes += self.trace.storages[storage].nbytes

    def _level(self) -> int:
        return self.trace.ticks[self.tick].level_bytes - self.absent_bytes

    def _expect_gap(self, storage: int) -> None:
        if not any(start <= self.tick < end for start, end in self.trace.storages[storage].gaps):
            self._fail(storage, "is outside its gaps here")

    def _expect(self, storage: int, verb: str, *, place: str, copy: str = "") -> None:
        if self.place[storage] != place:
            self._fail(storage, f"cannot be {verb}: it is {self.place[storage]}, not {place}")
        if copy and self.copy[storage] != copy:
            self._fail(storage, f"cannot be {verb}: its host copy is {self.copy[storage]}, not {copy}")

    def _fail(self, storage: int, what: str) -> NoReturn:
        raise PlanError(f"tick {self.tick}: storage {storage} {what}")
