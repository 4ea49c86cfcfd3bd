"""From the allocator's log to a memory curve over ticks.

Two sums run side by side. *Measured* is what was alive: the log as it stands. *Kept* is what would have been alive
had legroom kept everything: evictions and reloads are taken out again, and a storage that was elsewhere when the
program let go of it is subtracted at that moment. The kept curve is what plans are computed on; the measured one is
what the budget is held against.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from legroom.alloclog import (
    FREED,
    GONE,
    MOVED,
    OP,
    OPTIMIZER,
    OWN,
    PROOF,
    STANDS,
    TICK,
    Allocation,
    Block,
    Enter,
    Event,
    Leave,
)


class Move(NamedTuple):
    """A block comes or goes."""

    # gone: a storage of so many bytes died while it was not in memory, so that no block tells of it
    what: Literal["asked", "freed", "reloaded", "evicted", "gone"]
    key: int
    nbytes: int  # 0: freed or evicted


@dataclass(slots=True)
class Segment:
    """What lies between a tick and the next; the head before the first tick is one too."""

    level_bytes: int  # kept, at the tick
    peak_bytes: int  # kept, the most until the next tick
    measured_peak_bytes: int  # measured, the tick's own work included
    ops: int  # ops begun before this tick
    moves: list[Move] = field(default_factory=list)  # empty where the log does not tell of single blocks
    reloads: list[Move] = field(default_factory=list)  # what the tick's own work asked for and left there


@dataclass(slots=True)
class RunOp:
    """One op as the log shows it. `seen` is its number among the ops that the mode saw; -1 in backward."""

    seen: int
    name: str
    shapes: str
    seconds: float
    growth_bytes: int  # the most alive inside it beyond what was alive before
    left: list[Move] = field(default_factory=list)  # what it asked for and left there


@dataclass(slots=True)
class Curve:
    segments: list[Segment] = field(default_factory=list)  # [0] is the head, [t + 1] follows tick t
    ops: list[RunOp] = field(default_factory=list)
    measured_peak_bytes: int = 0
    before_optimizer_bytes: int = 0  # measured, the most before an optimizer first stepped; 0 if none did


class _Reader:
    def __init__(self, base_bytes: int) -> None:
        self.kept = self.measured = base_bytes
        self.curve = Curve([Segment(base_bytes, base_bytes, base_bytes, 0)], [], base_bytes)
        self.own_depth = 0
        self.in_tick = False
        self.seen = 0
        self.open_ops: list[tuple[RunOp, int]] = []
        self.blocks: set[int] = set()  # that were asked for since the log began, and are there

    def block(self, event: Block) -> None:
        own = self.own_depth > 0
        if event.nbytes > 0:
            self.blocks.add(event.key)
            move = Move("reloaded" if own else "asked", event.key, event.nbytes)
            if self.in_tick:
                self.curve.segments[-1].reloads.append(move)
            elif self.open_ops and not own:
                self.open_ops[0][0].left.append(move)
        else:
            self.blocks.discard(event.key)
            move = Move("evicted" if own else "freed", event.key, 0)
        self.curve.segments[-1].moves.append(move)

    def still_there(self, moves: list[Move]) -> list[Move]:
        return [move for move in moves if move.key in self.blocks]

    def allocation(self, event: Allocation) -> None:
        self.measured += event.nbytes
        # Inside legroom's own work an allocation is a reload and a free an eviction; outside it is the program that
        # allocates, or lets go of its first allocation or of the reload that stands for it.
        if not self.own_depth:
            self.kept += event.nbytes
        if event.nbytes > 0:
            self.note()

    def note(self) -> None:
        segment = self.curve.segments[-1]
        segment.peak_bytes = max(segment.peak_bytes, self.kept)
        segment.measured_peak_bytes = max(segment.measured_peak_bytes, self.measured)
        self.curve.measured_peak_bytes = max(self.curve.measured_peak_bytes, self.measured)
        for op, before in self.open_ops:
            op.growth_bytes = max(op.growth_bytes, self.kept - before)

    def enter(self, event: Enter, *, trial: bool) -> str:
        name = event.name
        if name == TICK:
            self.curve.segments.append(Segment(self.kept, self.kept, 0, len(self.curve.ops)))
        if name in (TICK, OWN) or trial:
            self.own_depth += 1
            self.in_tick = self.in_tick or name == TICK
            return "tick" if name == TICK else "own"
        if name == OPTIMIZER:
            self.curve.before_optimizer_bytes = self.curve.before_optimizer_bytes or self.curve.measured_peak_bytes
            return ""
        if name in (OP, PROOF):
            self.begin_op(event, self.seen)
            self.seen += 1
            if self.own_depth:
                self.curve.segments[-1].ops += 1  # a write found out at a tick lies before it
            return "op"
        if name.startswith(GONE):
            self.kept -= int(name[len(GONE) :])
            self.curve.segments[-1].moves.append(Move("gone", -1, int(name[len(GONE) :])))
        elif name.startswith(FREED):
            self.kept -= int(name[len(FREED) :])
            self.measured -= int(name[len(FREED) :])
        elif name.startswith(MOVED):
            self.measured -= int(name[len(MOVED) :])
        elif event.backward and not self.own_depth and not name.startswith("legroom::"):
            self.begin_op(event, -1)
            return "op"
        return ""

    def leave(self, kind: str) -> None:
        if kind in ("own", "tick"):
            self.own_depth -= 1
            if kind == "tick":
                self.note()  # what the tick's own work left; what stood before it belongs to the segment before
                self.in_tick = False
                self.curve.segments[-1].reloads = self.still_there(self.curve.segments[-1].reloads)
        elif kind == "op":
            op, _ = self.open_ops.pop()
            op.left = self.still_there(op.left)

    def begin_op(self, event: Enter, seen: int) -> None:
        op = RunOp(seen, event.name, event.shapes, event.seconds, 0)
        self.curve.ops.append(op)
        self.open_ops.append((op, self.kept))


def read_curve(events: list[Event], base_bytes: int) -> Curve:
    """Read a step's log. `base_bytes` was alive when it began."""
    reader = _Reader(base_bytes)
    stands = _proofs_that_stand(events)
    inside: list[str] = []
    for i, event in enumerate(events):
        match event:
            case Allocation():
                reader.allocation(event)
            case Block():
                reader.block(event)
            case Enter():
                inside.append(reader.enter(event, trial=event.name == PROOF and i not in stands))
            case Leave():
                reader.leave(inside.pop())
    return reader.curve


def _proofs_that_stand(events: list[Event]) -> set[int]:
    """Where a first run could not be repeated it was the op itself, not a trial; a mark right behind it says so."""
    found: set[int] = set()
    last_proof = -1
    for i, event in enumerate(events):
        if isinstance(event, Enter):
            if event.name == PROOF:
                last_proof = i
            elif event.name == STANDS:
                found.add(last_proof)
    return found
