"""Interpret a schedule on a modelled machine: what the step will look like.

Four lanes, integer nanoseconds. The host issues ops in order, and between them does what the ticks and instructions of
a plan ask of it (`hardware.HostCosts`); a step in which nothing is asked for has no hooks, so its ticks cost nothing.
Compute runs ops in order, each when it is issued and the one before is done; copies out and copies in have a lane each
and run in the order in which they are issued. A copy starts when its lane is free, compute has reached it and the host
has issued it. Where the other lane is known to be busy, it goes at the duplex rate until that lane is free, and at the
full rate from then on. Nothing else slows down: kernels and copies share no bandwidth in this model.

Compute can do nothing that the host has not issued, so it is never taken to be behind the host: a tick is reached, and
a step ends, when both have come there. To wait for a copy is a matter of compute alone; the host goes on. Where the
host waits for compute, it does so before and after each op, and before each replay and each tick.

This is the plain reading; `evaluate.Evaluator` must give the same nanoseconds and bytes.
"""

from __future__ import annotations

from legroom.hardware import Hardware
from legroom.ir import Op, Trace
from legroom.plan import Plan
from legroom.schedule import (
    Await,
    Drop,
    Instruction,
    Prefetch,
    Release,
    Replay,
    Schedule,
    SwapOut,
    lower,
    memory_curve,
    name_of,
)
from legroom.timeline import Breakdown, Interval, Lane, Memory, Stall, Timeline


def simulate(trace: Trace, plan: Plan | Schedule, hardware: Hardware) -> Timeline:
    """The predicted timeline of a plan, or of a schedule made from one. Raises PlanError where it is not sound."""
    schedule = lower(trace, plan, hardware) if isinstance(plan, Plan) else plan
    memory = tuple(Memory(*level) for level in memory_curve(trace, schedule))
    machine = _Machine(trace, hardware)
    machine.step(schedule.instructions)
    copied = sum(i.end_ns - i.start_ns for i in machine.intervals if i.lane in ("out", "in"))
    return Timeline(
        intervals=tuple(machine.intervals),
        memory=memory,
        stalls=tuple(machine.stalls),
        seconds=machine.compute / 1e9,
        peak_bytes=max((trace.head_peak_bytes, *(m.peak_bytes for m in memory))),
        breakdown=Breakdown(
            computation_seconds=machine.computed / 1e9,
            overlapped_copy_seconds=max(0, copied - machine.stalled) / 1e9,
            stalled_copy_seconds=machine.stalled / 1e9,
            recomputation_seconds=machine.recomputed / 1e9,
        ),
    )


class _Machine:
    def __init__(self, trace: Trace, hardware: Hardware) -> None:
        self.trace = trace
        self.hardware = hardware
        self.host = 0  # each lane: when it is free
        self.compute = 0  # never behind the host
        self.free: dict[Lane, int] = {"out": 0, "in": 0}
        self.done: dict[tuple[Lane, int], int] = {}  # (lane, storage): when its last copy is over
        self.tick = 0
        self.computed = self.recomputed = self.stalled = 0
        self.intervals: list[Interval] = []
        self.stalls: list[Stall] = []

    def step(self, instructions: tuple[Instruction, ...]) -> None:
        issued = position = 0
        for index, tick in enumerate(self.trace.ticks):
            self._program(issued, tick.op)
            self.tick, issued = index, tick.op
            if instructions:
                self._catch_up()
                self._charge(self.hardware.host.tick, "tick", f"tick {index}")
            while position < len(instructions) and instructions[position].tick == index:
                self._do(instructions[position])
                position += 1
        self._program(issued, len(self.trace.ops))

    def _program(self, start: int, end: int) -> None:
        for op in self.trace.ops[start:end]:
            self.computed += self._run(op, op.seconds, f"op {op.id}")

    def _do(self, instruction: Instruction) -> None:
        storage, costs = instruction.storage, self.hardware.host
        name = name_of(instruction)
        cause = f"{name} of storage {storage}"
        match instruction:
            case SwapOut():
                self._charge(costs.swap_out, name, cause)
                self._copy("out", storage)
            case Release():
                self._charge(costs.release, name, cause)
                self._wait("out", storage, name)
            case Drop():
                self._charge(costs.drop, name, cause)
            case Prefetch():
                self._charge(costs.prefetch, name, cause)
                self._copy("in", storage)
            case Await():
                self._charge(costs.await_, name, cause)
                self._wait("in", storage, name)
            case Replay():
                self._catch_up()
                self._charge(costs.replay, name, cause)
                more = round(costs.replay_op * 1e9)
                for op_id in instruction.ops:
                    op = self.trace.ops[op_id]
                    self.recomputed += self._run(op, op.again_seconds, cause, more_ns=more)

    def _charge(self, seconds: float, label: str, cause: str) -> None:
        """Time on the host for something that is no op."""
        ns = round(seconds * 1e9)
        if ns:
            self._record("host", self.host, ns, label, cause)
        self.host += ns
        self.compute = max(self.compute, self.host)

    def _run(self, op: Op, seconds: float, cause: str, *, more_ns: int = 0) -> int:
        """Issue an op, for which the host takes `more_ns` more than in the program, and compute it."""
        issue, ns = round(op.issue_seconds * 1e9) + more_ns, round(seconds * 1e9)
        self._catch_up()
        self._record("host", self.host, issue, op.name, cause)
        self.host += issue
        start = max(self.compute, self.host)
        self._record("compute", start, ns, op.name, cause)
        self.compute = start + ns
        self._catch_up()
        return ns

    def _copy(self, lane: Lane, storage: int) -> None:
        """Start a copy; where copy threads share the cores with compute, compute pays its share here."""
        start = max(self.free[lane], self.compute, self.done.get(("out", storage), 0))
        ns = self._copy_ns(lane, self.trace.storages[storage].nbytes, start)
        self.free[lane] = self.done[lane, storage] = start + ns
        name = self.trace.storages[storage].name or f"storage {storage}"
        self._record(lane, start, ns, name, f"swap-{lane} of storage {storage}")
        share = int(ns * self.hardware.copy_compute_share)
        self.stalled += share
        self.compute += share

    def _copy_ns(self, lane: Lane, nbytes: int, start: int) -> int:
        hardware = self.hardware
        if lane == "out":
            rate, duplex = hardware.out_bytes_per_second, hardware.duplex_out_bytes_per_second
        else:
            rate, duplex = hardware.in_bytes_per_second, hardware.duplex_in_bytes_per_second
        latency = round(hardware.latency_seconds * 1e9)
        alone, together = 1e9 / rate, 1e9 / duplex  # nanoseconds for a byte
        busy = self.free["in" if lane == "out" else "out"] - start - latency
        if busy <= 0:
            return latency + int(nbytes * alone)
        if int(nbytes * together) <= busy:
            return latency + int(nbytes * together)
        return latency + busy + int((nbytes - int(busy / together)) * alone)

    def _wait(self, lane: Lane, storage: int, cause: str) -> None:
        until = self.done[lane, storage]
        waited = until - self.compute
        if waited > 0:
            self.stalls.append(Stall(self.tick, storage, waited / 1e9, cause))
            self.stalled += waited
        self.compute = max(self.compute, until)

    def _catch_up(self) -> None:
        """Where the host waits for compute, it does so here."""
        if self.hardware.synchronous:
            self.host = self.compute

    def _record(self, lane: Lane, start: int, ns: int, label: str, cause: str) -> None:
        self.intervals.append(Interval(lane, start, start + ns, label, cause))
