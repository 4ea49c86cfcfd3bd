"""What a child process does: measure its contenders one after the other and hand over a row for each."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import quantiles
from typing import Any

import torch

from bench.meters import MIB, Meter, at_share, host_ms, meter_for, rounded_up
from bench.peers import PEERS, Step, Unavailable
from bench.rows import Row
from bench.workloads import WORKLOADS, Workload, train_step
from legroom.errors import BudgetError
from legroom.units import format_bytes, parse_bytes

LEGROOM = "legroom@"
# Sheltered steps, then planned ones; the first planned ones are measured and may be planned again.
LEAST_SETUP_STEPS, MOST_SETUP_STEPS, PLANNED_STEPS = 8, 16, 6
# Where memory is capped, plans of three steps each are tried and eight steps of the last are timed for what the report
# predicts, up to six times where the host is unsteady, and for three plans where it is slow: none may be among those
# that are compared with the prediction.
LEAST_SETUP_STEPS_CAPPED, MOST_SETUP_STEPS_CAPPED = 12, 170
FEWEST_STEPS = 3
STEADY = 0.03  # of a step's time, between a quarter of the steps and another
LONG = ("predicted_curve", "measured_curve", "followed")  # of a report: thousands of figures that no table shows
# The cap is on reserved memory, of which a plan leaves a few percent between blocks: the smallest peak is tried first.
SMALLEST_TRIES = (1.0, 1.02, 1.035, 1.06, 1.1, 1.2, 1.35)
CAP_OVER_PEAK = 1.03
# What may be left over from the contender before; more than that would be taken from the next one's budget.
MOST_LEFT_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True)
class Job:
    """One child's work. Peers come one to a child, legroom's budgets together unless asked for apart.

    Contenders are peers, `legroom@BUDGET`, and `PLANNER@BUDGET` for legroom with another planner than its own.
    """

    workload: str
    device: str
    contenders: tuple[str, ...]
    steps: int
    warmup: int
    seconds: float  # about as long as one contender may be timed, where steps of one size make that possible
    cap_bytes: int = 0  # peers: the cap; 0: find it first
    uncapped_only: bool = False
    rounds: int = 1  # steps are timed anew where they are not steady, so many times at most
    plain_bytes: int = 0
    above_bytes: int = 0
    floor_bytes: int = 0  # 0: capture a step to find it
    caps: Mapping[str, int] = field(default_factory=dict)  # of the peers
    plans: Mapping[str, str] = field(default_factory=dict)  # files, by contender, of those that do not plan now

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        fields = json.loads(text)
        return Job(**{**fields, "contenders": tuple(fields["contenders"])})


@dataclass(frozen=True, slots=True)
class _Timing:
    mean_ms: float
    median_ms: float
    steps: int
    apart: float  # of the median: how much longer the slowest quarter took at least than the fastest at most
    rounds: int = 1
    host_ms: float = 0.0


def measure(job: Job, emit: Callable[[Row], None]) -> None:
    """Measure every contender of the job. One that leaves memory behind ends it: the rest needs another process."""
    torch.manual_seed(0)
    bench = _Bench(job)
    for contender in job.contenders:
        start = time.perf_counter()
        row = bench.guarded(contender)
        emit(replace(row, wall_seconds=time.perf_counter() - start))
        if not bench.clean():
            return


class _Bench:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.meter: Meter = meter_for(job.device)
        self.floor_bytes = job.floor_bytes
        self._workload: Workload | None = None
        self._alive_bytes = 0

    @property
    def workload(self) -> Workload:
        if self._workload is None:
            self._workload = WORKLOADS[self.job.workload](device=self.job.device)
        return self._workload

    def guarded(self, contender: str) -> Row:
        try:
            if "@" in contender:
                return self.legroom(contender)
            return self.peer(contender)
        except Exception as error:
            return _failed(Row(self.job.workload, contender, "error"), error)

    def clean(self) -> bool:
        """Whether a next contender finds the device as this one did."""
        if self._workload is None:
            return False
        self._workload.optimizer.zero_grad()
        self.meter.empty()
        alive, before = self.meter.alive_bytes(), self._alive_bytes
        self._alive_bytes = alive
        return not before or alive <= before + MOST_LEFT_BYTES

    # peers

    def peer(self, name: str) -> Row:
        self.meter.cap(self.job.cap_bytes or None)
        step = PEERS[name].make(self.workload)
        row = Row(self.job.workload, name, "ok", cap_bytes=self.job.cap_bytes)
        if not self.job.cap_bytes:
            glance = not (self.job.uncapped_only or self.workload.varies)
            row = self._with_figures(row, self._timed(step, most=FEWEST_STEPS if glance else None), step)
            row = replace(
                row,
                uncapped_ms=row.mean_ms,
                uncapped_allocated_bytes=row.allocated_bytes,
                uncapped_reserved_bytes=row.reserved_bytes,
            )
            if self.job.uncapped_only:
                return row
            row = replace(row, cap_bytes=needed_bytes(row.allocated_bytes, row.reserved_bytes))
            self.meter.empty()
            self.meter.cap(row.cap_bytes)
        try:
            return self._with_figures(row, self._timed(step), step)
        except torch.OutOfMemoryError as error:
            return _failed(replace(row, mean_ms=0.0, median_ms=0.0, steps=0, host_ms=0.0), error)

    # legroom

    def legroom(self, contender: str) -> Row:
        planner, _, what = contender.partition("@")
        if what == "smallest":
            return self._smallest(contender)
        if contender.startswith(LEGROOM):
            return self._room(contender, self._budget_bytes(what))
        plan = self.job.plans.get(contender)
        return self._room(contender, self._budget_bytes(what), planner=planner, plan=plan, planned_only=True)

    def _smallest(self, contender: str) -> Row:
        tried: list[str] = []
        floor = self._floor_bytes()
        row = Row(self.job.workload, contender, "error")
        least = 0
        for factor in SMALLEST_TRIES:
            budget = rounded_up(floor * factor)
            if budget < least:
                continue
            try:
                row = self._room(contender, budget, planned_only=True)
            except Exception as error:
                row = _failed(Row(self.job.workload, contender, "error", cap_bytes=budget), error)
                if isinstance(error, BudgetError):
                    least = error.floor_bytes
            if row.ok:
                break
            tried.append(f"{format_bytes(budget)}: {row.detail}")
            if not self.clean():
                break
        note = f"the smallest peak of the captured step is {format_bytes(floor)}"
        return replace(row, detail="; ".join([note, *tried]))

    def _room(
        self,
        contender: str,
        budget_bytes: int,
        *,
        planner: str = "auto",
        plan: str | None = None,
        planned_only: bool = False,
    ) -> Row:
        import legroom

        workload = self.workload
        self.meter.cap(budget_bytes)
        start = time.perf_counter()
        options: dict[str, Any] = {"planner": planner} if plan is None else {"plan": plan}
        with legroom.fit(workload.model, workload.optimizer, budget=budget_bytes, **options) as room:
            self.meter.check_cap(budget_bytes)

            def step(number: int) -> Any:
                with room.step():
                    return train_step(workload, number)

            row = Row(self.job.workload, contender, "ok", cap_bytes=budget_bytes)
            least, most = LEAST_SETUP_STEPS, MOST_SETUP_STEPS
            if self.job.device == "cuda":
                least, most = LEAST_SETUP_STEPS_CAPPED, MOST_SETUP_STEPS_CAPPED
            for number in range(most):
                step(number)
                planned = room.report().planned_steps if number + 1 >= least or planned_only else 0
                if number + 1 >= least and planned >= PLANNED_STEPS and (room.settled or self.job.device != "cuda"):
                    break
                if planned_only and number >= 3 and not planned:
                    return replace(row, status="budget", detail="no step could be planned")
            self.meter.synchronize()
            setup_seconds = time.perf_counter() - start
            before, settled = room.report(), room.settled or self.job.device != "cuda"
            row = self._with_figures(row, self._timed(step), None)
            report = room.report()
            if planned_only and report.planner == "":
                return replace(row, status="budget", detail="the plan was lost on the way, and no other one fits")
            if not settled:
                row = replace(row, detail="; ".join(filter(None, (row.detail, "the plan had not settled"))))
        self.floor_bytes = report.floor_bytes or self.floor_bytes
        # Where the device does not count, legroom's own reading of the allocator's log has to do.
        allocated = row.allocated_bytes or report.planned_peak_bytes or report.peak_bytes
        told = {name: value for name, value in json.loads(report.to_json()).items() if name not in LONG}
        # What was predicted before those steps, not what is known since.
        told |= {"predicted_step_seconds": before.predicted_step_seconds, "pace": before.pace}
        return replace(row, setup_seconds=setup_seconds, allocated_bytes=allocated, report=told)

    def _budget_bytes(self, what: str) -> int:
        if what == "above":
            return self.job.above_bytes
        if what in self.job.caps:
            return self.job.caps[what]
        if what in PEERS:
            raise Unavailable(f"the cap of {what!r} is not known; measure it in this run or give --from")
        if what.endswith("%"):
            return at_share(what, self._floor_bytes(), self.job.plain_bytes)
        return parse_bytes(what)

    def _floor_bytes(self) -> int:
        if not self.floor_bytes:
            import legroom

            self.meter.cap(None)
            workload = self.workload
            trace = legroom.capture(lambda: train_step(workload, 0), model=workload.model, optimizer=workload.optimizer)
            self.floor_bytes = legroom.floor_bytes(trace)
            self.meter.empty()
        return self.floor_bytes

    # figures

    def _timed(self, step: Step | Callable[[int], Any], *, most: int | None = None) -> _Timing:
        job, meter = self.job, self.meter
        pace_seconds = 0.0
        for number in range(max(1, job.warmup)):
            start = time.perf_counter()
            step(number)
            meter.synchronize()
            pace_seconds = time.perf_counter() - start
        count = most or job.steps
        if not self.workload.varies:
            count = min(count, max(FEWEST_STEPS, int(job.seconds / pace_seconds)))
        meter.reset()
        before_ms = host_ms()
        began = time.perf_counter()
        timings = [self._round(step, count)]
        while min(timing.apart for timing in timings) > STEADY and len(timings) < job.rounds:
            if time.perf_counter() - began > job.seconds:
                break
            timings.append(self._round(step, count))
        slowest_ms = max(before_ms, host_ms())
        return replace(min(timings, key=lambda timing: timing.apart), rounds=len(timings), host_ms=slowest_ms)

    def _round(self, step: Step | Callable[[int], Any], count: int) -> _Timing:
        meter = self.meter
        gc.collect()
        start = time.perf_counter()
        marks = [meter.mark()]
        for number in range(count):
            step(number)
            marks.append(meter.mark())
        meter.synchronize()
        seconds = time.perf_counter() - start
        single = meter.milliseconds(marks)
        first, middle, third = quantiles(single, n=4, method="inclusive") if count > 1 else single * 3
        return _Timing(seconds / count * 1e3, middle, count, apart=(third - first) / middle if middle else 0.0)

    def _with_figures(self, row: Row, timing: _Timing, step: Step | None) -> Row:
        allocated, reserved = self.meter.peaks(step)
        return replace(
            row,
            detail=f"timed {timing.rounds}× for steady steps" if timing.rounds > 1 else row.detail,
            mean_ms=timing.mean_ms,
            median_ms=timing.median_ms,
            steps=timing.steps,
            host_ms=timing.host_ms,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            retries=self.meter.retries(),
        )


def needed_bytes(allocated_bytes: int, reserved_bytes: int) -> int:
    """The cap for a contender seen without one: a little over its peak, or what it reserved if that is less."""
    over = rounded_up(allocated_bytes * CAP_OVER_PEAK)
    return min(over, reserved_bytes) if reserved_bytes else over


def _failed(row: Row, error: Exception) -> Row:
    message = " ".join(str(error).split())[:600]
    match error:
        case torch.OutOfMemoryError():
            return replace(row, status="oom", detail=message)
        case BudgetError():
            return replace(row, status="budget", detail=message)
        case Unavailable() | ModuleNotFoundError():
            return replace(row, status="unavailable", detail=message)
        case _:
            return replace(row, status="error", detail=f"{type(error).__name__}: {message}")
