"""`fit()` and the `Room` it returns: a budget, and training steps that stay inside it."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from legroom.capture import assemble, correct
from legroom.errors import BudgetError, DeviceError, LegroomError, PlanError, StepError, TraceError, quote
from legroom.evaluate import floor_bytes
from legroom.hardware import Hardware
from legroom.ir import Op, Trace, Value
from legroom.patience import patience
from legroom.plan import Keep, Plan, Recompute, Swap, check_fits
from legroom.plan import from_json as plan_from_json
from legroom.planners import Planner, named
from legroom.probe import probe
from legroom.report import Breakdown, Held, Report
from legroom.runtime.census import state_bytes
from legroom.runtime.device import CpuDevice, Device
from legroom.runtime.executor import Program
from legroom.runtime.residency import Ledger
from legroom.runtime.steps import PlannedStep, Setting, ShelteredStep
from legroom.schedule import Schedule, check_schedule, lower, memory_curve
from legroom.simulate import simulate
from legroom.timeline import Timeline
from legroom.units import format_bytes, parse_bytes

SHELTERED_STEPS = 2  # the first makes the optimizer's state, the second is recorded as the step that will repeat
MOST_CALIBRATIONS = 4
# A program that drifts this often within so many steps has no step that repeats: no plan is tried for a while.
DRIFTS, DRIFT_WINDOW_STEPS, SHELTER_STEPS = 2, 8, 32
# Planned steps are measured again, the 64th and then ever more rarely: counting all tensors takes half a second.
FIRST_CHECK = 64


def fit(
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    budget: int | str,
    planner: str | Planner = "auto",
    plan: Plan | str | os.PathLike[str] | None = None,
    spill_dir: str | os.PathLike[str] | None = None,
    device: str | torch.device | None = None,
) -> Room:
    """Fit training steps into `budget` bytes ("600MiB") of the device's memory.

    planner: a name in PLANNERS or a callable (trace, hardware, budget_bytes) -> Plan. plan: a plan or its file from an
    earlier run, used instead of planning. spill_dir: where swapped bytes go on the CPU. device: found from the model
    where not named.
    """
    budget_bytes = parse_bytes(budget)
    chosen = named(planner)
    device_type = _device_type(model, optimizer, device)
    _check_budget(budget_bytes, model, optimizer, device_type)
    given = _given_plan(plan)
    return Room(
        model,
        optimizer,
        budget_bytes,
        chosen,
        given,
        device_type,
        os.fspath(spill_dir) if spill_dir is not None else None,
    )


def capture(
    step: Callable[[], Any],
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    spill_dir: str | os.PathLike[str] | None = None,
) -> Trace:
    """Run a training step twice, for real, and return the trace of the second run.

    `floor_bytes(trace)` is then the smallest budget that works, `trace.peak_bytes` what the step takes without legroom.
    """
    device_type = _device_type(model, optimizer, None)
    room = Room(
        model,
        optimizer,
        2**61,
        named("none"),
        None,
        device_type,
        os.fspath(spill_dir) if spill_dir is not None else None,
    )
    try:
        for _ in range(SHELTERED_STEPS):
            with room.step():
                step()
        if room.trace is None:
            raise TraceError(f"the step could not be recorded: {dict(room.report().fallbacks)}")
        return room.trace
    finally:
        room.close()


class Room:
    """Training steps inside a budget. Made by `fit()`."""

    def __init__(
        self,
        model: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        budget_bytes: int,
        planner: Planner,
        given: Plan | None,
        device_type: str,
        spill_dir: str | None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.trace: Trace | None = None
        self.plan: Plan | None = None
        self.timeline: Timeline | None = None
        self._planner = planner
        self._given = given
        self._spill_dir = spill_dir
        self._device = _open_device(device_type, spill_dir)
        self._setting = Setting(Ledger(self._device), device_type, model, optimizer, Counter(), set())
        self._device.set_cap(budget_bytes)
        self._program: Program | None = None
        self._predicted: list[int] = []
        self._predicted_peak = 0
        self._floor = 0
        self._baseline_seconds = 0.0
        self._calibrations = 0
        self._calibrated = False
        self._steps = self._sheltered = self._planned = self._measured = 0
        self._sheltered_since_drift = 0
        self._drifts: deque[int] = deque(maxlen=DRIFTS)
        self._sheltered_until = 0
        self._peak = self._planned_peak = 0
        self._base_bytes = self._planned_base_bytes = 0  # alive at the start of this step, and of the recorded one
        self._seconds: list[float] = []
        self._closed = False

    def step(self) -> Step:
        """A context for one training step: forward, backward and optimizer, as they are."""
        return Step(self)

    def close(self) -> None:
        """Give everything back. Handles still alive can no longer fetch what was swapped out."""
        if not self._closed:
            if _active is not None and _active._room is self:
                raise StepError("close() was called inside step(); leave the step first")
            self._closed = True
            self._device.set_cap(None)
            self._device.close()

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # steps

    def _begin(self) -> ShelteredStep | PlannedStep:
        if self._closed:
            raise StepError("this room is closed; make another with legroom.fit()")
        foreign = bool(_get_current_dispatch_mode_stack())
        if foreign and self._program is not None and self._program.recorded:
            # What that mode does to an op is out of sight here, and a replay would not do it.
            self._setting.fallbacks["another dispatch mode is on: planned again without recomputation"] += 1
            self._program = None
            self._sheltered_since_drift = SHELTERED_STEPS - 1
        if self._program is None:
            self._base_bytes = self._setting.alive_bytes()
            unsteady = self._steps + 1 < self._sheltered_until
            proving = self._sheltered_since_drift >= SHELTERED_STEPS - 1 and not unsteady
            return ShelteredStep(self._setting, proving=proving, trusting=not foreign)
        self._base_bytes = self._setting.alive_bytes()
        more = self._base_bytes - self._planned_base_bytes
        if more > 0 and self._predicted_peak + more > self.budget_bytes:
            self._setting.fallbacks["more was alive at the start than the plan has room for: planned again"] += 1
            self._program = None
            self._sheltered_since_drift = SHELTERED_STEPS - 1
            return self._begin()
        replayed = self._program.replayed_storages
        check = replayed[self._planned % len(replayed)] if replayed else -1
        calibrating = self._calibrations < MOST_CALIBRATIONS and not self._calibrated
        measure = calibrating or (self._planned >= FIRST_CHECK and self._planned.bit_count() == 1)
        return PlannedStep(self._setting, self._program, check=check, measure=measure)

    def _ended(self, run: ShelteredStep | PlannedStep, seconds: float) -> None:
        self._steps += 1
        if run.curve is not None:
            self._measured += 1
            self._peak = max(self._peak, run.curve.measured_peak_bytes)
        match run:
            case ShelteredStep():
                self._sheltered += 1
                self._sheltered_since_drift += 1
                self._learn(run)
            case PlannedStep():
                self._after_planned(run, seconds)

    def _learn(self, run: ShelteredStep) -> None:
        if run.curve is None or run.recorder is None or run.census is None:
            return
        if run.needed_bytes() > self.budget_bytes:
            error = _over_budget(self.budget_bytes, run)
            run.undo.restore()
            raise error
        run.undo.forget()
        if self._sheltered_since_drift < SHELTERED_STEPS or self._steps < self._sheltered_until:
            return
        try:
            trace = assemble(run.recorder, run.census, run.curve, self._setting.device_type)
        except TraceError as error:
            self._setting.fallbacks[f"the step could not be recorded: {error}"] += 1
            return
        self._plan_for(trace)

    def _plan_for(self, trace: Trace) -> None:
        self.trace = trace
        self._planned_base_bytes = self._base_bytes
        self._floor = floor_bytes(trace)
        try:
            with patience("measuring the machine and planning the step"):
                hardware = probe(self._setting.device_type, self._spill_dir)
                plan = self._given
                if plan is None:
                    plan = self._planner(trace, hardware, self._device.plannable(self.budget_bytes))
                if not isinstance(plan, Plan):
                    raise PlanError(f"a planner returns a Plan; this one returned {quote(plan)}")
                check_fits(trace, plan)
        except BudgetError:
            # The step just ran inside the budget, so the reactive policy can go on doing what no plan can.
            self._setting.fallbacks["no plan fits the budget: the step stays sheltered"] += 1
            self._program = None
            return
        self._adopt(trace, plan, hardware)

    def _adopt(self, trace: Trace, plan: Plan, hardware: Hardware) -> None:
        schedule = lower(trace, plan, hardware)
        peak = check_schedule(trace, schedule)
        if peak > self.budget_bytes:
            raise BudgetError(
                f"the plan of {plan.planner!r} needs {format_bytes(peak)}, the budget is "
                f"{format_bytes(self.budget_bytes)}; the smallest budget that works is {format_bytes(self._floor)}. "
                "Plan for this budget, or raise it",
                budget_bytes=self.budget_bytes,
                floor_bytes=self._floor,
            )
        self.plan = plan
        self._program = Program(trace, schedule)
        self._predict(trace, schedule)
        self._calibrated = False
        self.timeline = simulate(trace, schedule, hardware)
        self._baseline_seconds = simulate(trace, Schedule((), schedule.trace_signature), hardware).seconds

    def _predict(self, trace: Trace, schedule: Schedule) -> None:
        self._schedule = schedule
        self._predicted = [peak for _, _, peak in memory_curve(trace, schedule)]
        self._predicted_peak = max([trace.head_peak_bytes, *self._predicted])

    def _after_planned(self, run: PlannedStep, seconds: float) -> None:
        if run.executor.reactive is not None or run.executor.mismatch:
            self._program = None
            self._sheltered_since_drift = SHELTERED_STEPS - 1
            if run.executor.mismatch:
                self._setting.distrusted.update(run.executor.mismatch)
                return
            self._drifts.append(self._steps)
            if len(self._drifts) == DRIFTS and self._drifts[-1] - self._drifts[0] <= DRIFT_WINDOW_STEPS:
                self._sheltered_until = self._steps + SHELTER_STEPS
                self._setting.fallbacks["the step keeps changing: sheltered for a while"] += 1
            return
        self._planned += 1
        self._seconds.append(seconds)
        if run.curve is None or self.trace is None:
            return
        if self._base_bytes < self._planned_base_bytes:
            return  # less was alive at the start: nothing to learn about the step that the plan is for
        self._planned_peak = run.curve.measured_peak_bytes
        measured = [segment.measured_peak_bytes for segment in run.curve.segments]
        predicted = [self.trace.head_peak_bytes, *self._predicted]
        self._calibrated = max(measured) == max(predicted) and all(
            m <= p for m, p in zip(measured, predicted, strict=True)
        )
        if self._calibrated:
            return
        self._calibrations += 1
        self.trace = correct(self.trace, self._predicted, run.curve)
        self._predict(self.trace, self._schedule)
        if self._predicted_peak > self.budget_bytes:
            self._setting.fallbacks["planned again after the first planned step was measured"] += 1
            self._plan_for(self.trace)

    # report

    def report(self) -> Report:
        """What happened so far."""
        sizes = Counter[str]()
        if self.trace is not None and self.plan is not None:
            for gap, decision in zip(self.trace.gaps, self.plan.decisions, strict=True):
                sizes[type(decision).__name__] += self.trace.storages[gap.storage].nbytes
        recent = self._seconds[-50:]
        b = self.timeline.breakdown if self.timeline is not None else None
        return Report(
            steps=self._steps,
            sheltered_steps=self._sheltered,
            planned_steps=self._planned,
            measured_steps=self._measured,
            budget_bytes=self.budget_bytes,
            peak_bytes=self._peak,
            planned_peak_bytes=self._planned_peak,
            predicted_peak_bytes=self._predicted_peak,
            floor_bytes=self._floor,
            step_seconds=statistics.median(recent) if recent else 0.0,
            predicted_step_seconds=self.timeline.seconds if self.timeline is not None else 0.0,
            baseline_seconds=self._baseline_seconds,
            bytes_kept=sizes[Keep.__name__],
            bytes_swapped=sizes[Swap.__name__],
            bytes_recomputed=sizes[Recompute.__name__],
            breakdown=Breakdown(
                b.computation_seconds, b.overlapped_copy_seconds, b.stalled_copy_seconds, b.recomputation_seconds
            ) if b is not None else Breakdown(0.0, 0.0, 0.0, 0.0),
            held=_held(self.trace) if self.trace is not None else (),
            unreplayable=_unreplayable(self.trace) if self.trace is not None else (),
            fallbacks=dict(self._setting.fallbacks),
        )  # fmt: skip


_active: Step | None = None  # the engine stand-in is one for the process, so one step runs at a time


class Step:
    """`with room.step():` around one training step."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._run: ShelteredStep | PlannedStep | None = None
        self._began = 0.0

    def __enter__(self) -> Step:
        global _active
        if _active is not None:
            raise StepError(
                "a step is already running; steps cannot be nested, and only one room steps at a time in a process"
            )
        run = self._room._begin()
        _active = self
        try:
            run.begin()
        except BaseException:
            _active = None
            run.end(failed=True)
            raise
        self._run = run
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        assert self._run is not None
        run, self._run = self._run, None
        seconds = time.perf_counter() - self._began
        _active = None
        run.end(failed=error is not None)
        if error is None:
            self._room._ended(run, seconds)
        elif isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
            raise StepError(
                "torch.func transforms and code that forbids saved-tensor hooks cannot run inside step(); "
                "use torch.autograd.grad there, or call it outside the step"
            ) from error


def _open_device(device_type: str, spill_dir: str | None) -> Device:
    if device_type == "cpu":
        return CpuDevice(spill_dir)
    from legroom.runtime.cuda import CudaDevice

    return CudaDevice(torch.cuda.current_device())


def _given_plan(plan: Plan | str | os.PathLike[str] | None) -> Plan | None:
    if plan is None or isinstance(plan, Plan):
        return plan
    try:
        text = Path(plan).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read the plan file {os.fspath(plan)!r}: {error}") from error
    return plan_from_json(text)


def _device_type(
    model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None, device: str | torch.device | None
) -> str:
    found: set[str] = set()
    if model is not None:
        if not isinstance(model, torch.nn.Module):
            raise LegroomError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        found |= {t.device.type for t in (*model.parameters(), *model.buffers())}
    if optimizer is not None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise LegroomError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        found |= {p.device.type for group in optimizer.param_groups for p in group["params"]}
    named = torch.device(device).type if device is not None else None
    if len(found) > 1:
        raise DeviceError(
            f"the model lies on several devices ({', '.join(sorted(found))}); move it to one with model.to(...)"
        )
    if named is not None and found and found != {named}:
        raise DeviceError(
            f"device={named!r} was asked for, but the model lies on {found.pop()!r}; move it with model.to({named!r})"
        )
    chosen = named or (found.pop() if found else "cpu")
    if chosen not in ("cpu", "cuda") or (chosen == "cuda" and not torch.cuda.is_available()):
        raise DeviceError(f"legroom works on 'cpu' and on 'cuda' where there is one, not on {chosen!r}")
    return chosen


def _check_budget(
    budget_bytes: int, model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None, device_type: str
) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device_type == "cuda":
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if budget_bytes > total:
        raise BudgetError(
            f"the budget is {format_bytes(budget_bytes)}, but the device has {format_bytes(total)}; name at most that",
            budget_bytes=budget_bytes,
        )
    parts = state_bytes(model, optimizer, device_type)
    needed = sum(nbytes for _, nbytes in parts)
    if needed > budget_bytes:
        listed = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts)
        raise BudgetError(
            f"{listed} alone take {format_bytes(needed)}, the budget is {format_bytes(budget_bytes)}; "
            "raise the budget, or train fewer or smaller parameters",
            budget_bytes=budget_bytes,
            floor_bytes=needed,
            breakdown=tuple(sorted(parts, key=lambda part: -part[1])),
        )


def _over_budget(budget_bytes: int, run: ShelteredStep) -> BudgetError:
    assert run.census is not None
    census, peak = run.census, run.needed_bytes()
    kinds = Counter[str]()
    for key, kind in census.kinds.items():
        kinds[kind] += census.nbytes[key]
    kinds["activations in use, gradients and workspace"] = max(0, peak - sum(kinds.values()))
    parts = tuple((name, nbytes) for name, nbytes in kinds.most_common() if nbytes)
    listed = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts)
    return BudgetError(
        f"the step needs {format_bytes(peak)} even with everything saved swapped out ({listed}), the budget is "
        f"{format_bytes(budget_bytes)}; the smallest budget seen so far that works is {format_bytes(peak)} "
        f"({peak} bytes). "
        "Raise the budget or make the batch smaller",
        budget_bytes=budget_bytes,
        floor_bytes=peak,
        breakdown=parts,
    )


def _held(trace: Trace) -> tuple[Held, ...]:
    makers = {value[0]: op for op in trace.ops for value in op.writes if value[1] == 0}
    return tuple(Held(s.nbytes, s.name, makers[s.id].line if s.id in makers else "") for s in trace.storages if s.held)


def _unreplayable(trace: Trace) -> tuple[tuple[str, int], ...]:
    """Why saved storages cannot be recomputed even if all others are in memory, and how many bytes that concerns."""
    reasons = Counter[str]()
    makers = {value: op for op in trace.ops for value in op.writes}
    for storage in trace.storages:
        if storage.gaps:
            reason = _why_not(trace, (storage.id, storage.gap_version), makers)
            if reason:
                reasons[reason] += storage.nbytes
    return tuple(reasons.most_common())


def _why_not(trace: Trace, target: Value, makers: dict[Value, Op]) -> str:
    seen = {target}
    stack = [target]
    while stack:
        value = stack.pop()
        maker = makers.get(value)
        if maker is None or maker.why_not:
            return maker.why_not if maker is not None else "made outside forward"
        for source in maker.reads:
            storage = trace.storages[source[0]]
            if source not in seen and not storage.persistent and not storage.gaps:
                seen.add(source)
                stack.append(source)
    return ""
