"""`fit()` and the `Room` it returns: a budget, and training steps that stay inside it."""

from __future__ import annotations

import os
import statistics
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from legroom.admission import (
    check_budget,
    device_bytes,
    find_device_type,
    given_plan,
    open_device,
    out_of_memory,
    over_budget,
)
from legroom.assembling import OpSeconds, assemble, backward_of, less, op_seconds
from legroom.courses import Recorded
from legroom.errors import BudgetError, LegroomError, StepError, TraceError
from legroom.following import DRIFT_WINDOW_STEPS, DRIFTS, REACTIVE_STEPS, Following
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.plan import Keep, Plan, Recompute, Swap
from legroom.planners import Planner, named
from legroom.planners.dual import check_slowdown, least_peak
from legroom.probing import probe
from legroom.reasons import held, unreplayable
from legroom.replayprice import with_short_replays
from legroom.report import Report
from legroom.runtime.called import CalledStep, LeftAlone
from legroom.runtime.census import Lasting
from legroom.runtime.checking import Check
from legroom.runtime.device import Device
from legroom.runtime.executor import Executor
from legroom.runtime.inputs import Call, InputWatch, call_of, can_be_watched, remarks
from legroom.runtime.recorder import Outline
from legroom.runtime.residency import Ledger
from legroom.runtime.steps import Habits, IdleStep, PlannedStep, Setting, ShelteredStep
from legroom.runtime.together import draw_together
from legroom.standing import Standing
from legroom.timeline import Breakdown, Timeline
from legroom.units import parse_bytes

MOST_DRAWS = 4  # in which an optimizer's state is moved together: some make or load theirs anew in every step
SHELTERED_STEPS = 2  # the first makes the optimizer's state, the second is recorded as the step that will repeat
MOST_CALIBRATIONS = 4
MOST_HOST_FITS = 2  # the second corrects what the first, from another plan, got wrong
_SAME_HOST = 0.05
_WORTH_ANOTHER = 0.98  # of the time that the plan before takes

AnyStep = ShelteredStep | PlannedStep | IdleStep | CalledStep


def fit(
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    budget: int | str | None = None,
    max_slowdown: float | None = None,
    planner: str | Planner = "auto",
    plan: Plan | str | os.PathLike[str] | None = None,
    spill_dir: str | os.PathLike[str] | None = None,
    host_budget: int | str | None = None,
    device: str | torch.device | None = None,
) -> Room:
    """Fit training steps into `budget` bytes ("600MiB") of the device's memory.

    max_slowdown: in place of a budget; the least memory at a price of at most so much time, 0.05 for 5 %, as predicted.
    planner: a name in PLANNERS or a callable (trace, hardware, budget_bytes) -> Plan. plan: a plan or its file from an
    earlier run, used instead of planning. host_budget: how much pinned memory a GPU may take; what does not fit goes to
    a file. spill_dir: where such files go, and what the CPU swaps. device: found from the model where not named.
    """
    if (budget is None) is (max_slowdown is None):
        raise LegroomError('name a budget, such as budget="12GiB", or max_slowdown=0.05; one of the two')
    if max_slowdown is not None and plan is not None:
        raise LegroomError("a plan has its price already: name the budget it is for in place of max_slowdown")
    chosen = named(planner)
    if max_slowdown is not None:
        try:
            check_slowdown(max_slowdown)
        except (TypeError, ValueError) as error:
            raise LegroomError(str(error)) from None
        chosen = partial(_least, chosen, max_slowdown)
    device_type = find_device_type(model, optimizer, device)
    total, foreign = device_bytes(device_type)
    budget_bytes = parse_bytes(budget) if budget is not None else total - foreign
    check_budget(budget_bytes, model, optimizer, device_type, total=total, foreign=foreign)
    given = given_plan(plan)
    opened = open_device(device_type, spill_dir, host_budget)
    return Room(model, optimizer, budget_bytes, chosen, given, opened, spill_dir, priced=max_slowdown is not None)


def _least(planner: Planner, max_slowdown: float, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
    try:
        plan = least_peak(planner, trace, hardware, max_slowdown)
    except BudgetError as error:  # not even with room for everything is what it plans fast enough
        kept = named("none")(trace, hardware, budget_bytes)
        return replace(kept, notes=(*kept.notes, f"everything is kept: {error}"))
    return plan if plan.predicted_peak_bytes <= budget_bytes else planner(trace, hardware, budget_bytes)


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
    device_type = find_device_type(model, optimizer, None)
    room = Room(model, optimizer, 2**61, named("none"), None, open_device(device_type, spill_dir), spill_dir)
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
        device: Device,
        spill_dir: str | os.PathLike[str] | None,
        *,
        priced: bool = False,
    ) -> None:
        """priced: the planner takes as little as a slowdown buys, not what the budget allows."""
        self.budget_bytes = budget_bytes
        self._planner = planner
        self._priced = priced
        self._given = given
        self._device = device
        ledger, lasting = Ledger(device), Lasting(model, optimizer)
        self._setting = Setting(ledger, device.name, model, optimizer, Counter(), set(), Habits(), lasting, set())
        self._device.set_cap(budget_bytes)
        self._watch = InputWatch(model) if model is not None and can_be_watched(model) else None
        folder = os.fspath(spill_dir) if spill_dir is not None else None
        self._standing = Standing(
            self._setting, self._watch, budget_bytes, planner, given, partial(probe, device.name, folder)
        )
        self._following: Following | None = None  # once inputs are seen to vary
        self._steps = self._sheltered = self._planned = self._measured = 0
        self._sheltered_since_drift = 0
        self._drifts: deque[int] = deque(maxlen=DRIFTS)
        self._sheltered_until = 0
        self._peak = 0
        self._seconds: list[float] = []
        self._compared: deque[Check] = deque()  # whose outcome is not known yet
        self._op_seconds: OpSeconds = {}  # in the last sheltered step, or the one before if that took less
        self._call: Call | None = None  # of the last step, the first one
        self._recorded: Recorded | None = None  # the last one, if it began with that call
        self._outline: tuple[object, Outline] | None = None  # of one that did not, from the call on; and which call
        # Of the optimizer's state that was moved together: of how many parameters it is, and one tensor, which is not
        # to be kept alive: a program may load another.
        self._together: tuple[int, weakref.ref[torch.Tensor] | None] = 0, None
        self._draws = 0
        self._closed = False

    @property
    def trace(self) -> Trace | None:
        """Of the step that was planned for last."""
        return self._standing.trace

    @property
    def plan(self) -> Plan | None:
        """The last one, if there was one inside the budget."""
        return self._standing.plan

    @property
    def timeline(self) -> Timeline | None:
        """What is predicted of a step under the plan."""
        return self._standing.timeline

    @property
    def settled(self) -> bool:
        """Whether the plan is the one that stays, unless the step changes, and its pace is known."""
        return self._following is None and self._standing.settled

    def step(self) -> Step:
        """A context for one training step: forward, backward and optimizer, as they are."""
        return Step(self)

    def close(self) -> None:
        """Give everything back. Handles still alive can no longer fetch what was swapped out."""
        if not self._closed:
            if _active is not None and _active._room is self:
                raise StepError("close() was called inside step(); leave the step first")
            self._closed = True
            self._hear_of_checks(wait=True)
            if self._following is not None:
                self._following.close()
            self._device.set_cap(None)
            self._device.close()

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # steps

    def _begin(self) -> AnyStep:
        if self._closed:
            raise StepError("this room is closed; make another with legroom.fit()")
        self._hear_of_checks(wait=False)
        self._draw_together()
        if self._following is None:
            self._standing.recover()
        if self._watch is not None:
            self._watch.begin()
            if self._following is not None:
                return self._following.step(self._watch)
        foreign = bool(_get_current_dispatch_mode_stack())
        program = self._standing.program
        if foreign and program is not None and program.recorded:
            # What that mode does to an op is out of sight here, and a replay would not do it.
            self._setting.fallbacks["another dispatch mode is on: planned again without recomputation"] += 1
            self._record_again()
        if self._standing.program is not None:
            run = self._standing.step(self._planned, may_idle=not (foreign or self._drifts))
            if run is not None:
                return run
            self._record_again()
        return self._sheltered_step(trusting=not foreign)

    def _draw_together(self) -> None:
        """Where the device has a cap, and there is state that was not there before or was loaded."""
        optimizer = self._setting.optimizer
        if optimizer is None or not self._device.has_cap or self._draws == MOST_DRAWS:
            return
        count, one = self._together
        if len(optimizer.state) <= count and (one is None or one() is not None):
            return
        states = (state for state in optimizer.state.values() if isinstance(state, dict))
        tensors = (value for state in states for value in state.values() if isinstance(value, torch.Tensor))
        first = next(tensors, None)
        self._together = len(optimizer.state), weakref.ref(first) if first is not None else None
        self._draws += 1
        if draw_together(self._device, optimizer):
            self._standing.memory_moved()

    def _sheltered_step(self, *, trusting: bool) -> ShelteredStep:
        unsteady = self._steps + 1 < self._sheltered_until
        proving = self._sheltered_since_drift >= SHELTERED_STEPS - 1 and not unsteady
        run = ShelteredStep(self._setting, proving=proving, trusting=trusting)
        if self._watch is not None:
            watch = self._watch
            watch.on_call = lambda number, _: run.called(watch, number)
        return run

    def _record_again(self) -> None:
        """The plan is not for the steps to come: the next one is recorded, and planned for."""
        self._standing.give_up()
        self._sheltered_since_drift = SHELTERED_STEPS - 1

    def _distrust(self, ops: list[str]) -> None:
        """What was recorded took these for replayable."""
        self._setting.distrusted.update(ops)
        self._recorded = self._outline = None
        if self._following is not None:
            self._following.forget()
        self._record_again()

    def _hear_of_checks(self, *, wait: bool) -> None:
        if self._setting.doubted:
            ops = sorted(self._setting.doubted)
            self._setting.doubted.clear()
            self._distrust(ops)
        while self._compared and (wait or self._compared[0].known()):
            check = self._compared.popleft()
            if not check.same():
                self._setting.fallbacks["a replay gave other bits"] += 1
                if not self._setting.distrusted.issuperset(check.ops):  # else of a step before that was heard
                    self._distrust(check.ops)
                warnings.warn(
                    f"recomputing {', '.join(check.ops)} gave other bits than the first run, though it was proven to "
                    "give the same: gradients of the last steps may be off. It is kept or swapped from now on. "
                    "Look for writes that PyTorch cannot see (numpy, raw kernels) that began after the first steps",
                    RuntimeWarning,
                    stacklevel=4,
                )

    def _failed(self, run: AnyStep, error: BaseException | None) -> None:
        """A step did not come to its end. What it found out about its replays holds all the same.

        error: of the program; None where the step ended in one of our own."""
        inner = run.inner if isinstance(run, CalledStep) else run
        if not isinstance(inner, PlannedStep):
            return
        executor = inner.executor
        self._take_stock(executor)
        if executor.refusal and error is not None:
            error.add_note(f"legroom: {executor.refusal}")
            warnings.warn(executor.refusal, RuntimeWarning, stacklevel=4)

    def _ended(self, run: AnyStep, seconds: float) -> None:
        self._steps += 1
        if run.curve is not None:
            self._measured += 1
            self._peak = max(self._peak, run.curve.measured_peak_bytes)
        if not isinstance(run, CalledStep):
            self._look_at_inputs()
        match run:
            case ShelteredStep():
                self._sheltered += 1
                self._sheltered_since_drift += 1
                self._learn(run)
            case PlannedStep() | IdleStep():
                self._after_planned(run, seconds)
            case CalledStep():
                self._after_called(run, seconds)

    def _learn(self, run: ShelteredStep) -> None:
        if run.curve is not None and run.refusable and run.needed_bytes() > self.budget_bytes:
            error = over_budget(self.budget_bytes, run, self._sizes())
            run.undo.restore()
            if self._following is not None:
                self._following.refused(run)
            raise error
        run.undo.forget()
        if run.curve is None or run.recorder is None or run.census is None:
            return
        early = self._sheltered_since_drift < SHELTERED_STEPS or self._steps < self._sheltered_until
        earlier = self._op_seconds
        if self._following is None:
            self._op_seconds = less(op_seconds(run.recorder, run.curve), earlier)
            if early:
                return
        try:
            trace = assemble(run.recorder, run.census, run.curve, self._setting.device_type, earlier)
            trace = with_short_replays(trace, [op.short for op in run.recorder.ops])
        except TraceError as error:
            self._setting.fallbacks[f"the step could not be recorded: {error}"] += 1
            return
        recorder, peak = run.recorder, run.curve.measured_peak_bytes
        outline = recorder.outline(backward_of(recorder, run.curve))
        if run.ops_before_call:
            # Of a closure's ops none counts as replayable here. A step that begins with the call sees no optimizer.
            self._outline = None
            if outline is not None and self._call is not None and not run.called_in_optimizer:
                self._outline = self._call.kind, outline.without_first(run.ops_before_call)
            if self._following is not None:
                self._following.outline = self._outline
        elif self._call is not None:
            self._recorded = Recorded(self._call, trace, run.alive_bytes, peak, outline, proven=not recorder.follows)
        if self._following is None:
            self._standing.plan_for(trace, run.alive_bytes)
        elif self._recorded is not None:
            self._following.learn(self._recorded)

    # inputs that vary

    def _look_at_inputs(self) -> None:
        """Whether the model is called with other sizes than before: from then on plans follow them."""
        watch = self._watch
        if watch is None or watch.elsewhere or watch.under_hooks or not watch.calls:
            return
        if not self._alike(watch):
            watch.under_hooks = True  # sizes of later calls are not known at the first
            self._setting.fallbacks["the model is called with several inputs in a step: plans do not follow them"] += 1
            return
        before, self._call = self._call, call_of(watch.calls[0], self._setting.device_type)
        if not self._call.features:
            self._setting.fallbacks.update(remarks(self._call))
        if before is None or self._given is not None or self._following is not None:
            return
        if before.kind == self._call.kind and before.features != self._call.features:
            usable_bytes, hardware = self._standing.unarranged_bytes, self._standing.hardware
            self._following = Following(
                self._setting, self.budget_bytes, usable_bytes, self._planner, self._priced, hardware
            )
            self._following.outline = self._outline
            self._standing.give_up()
            self._sheltered_since_drift, self._sheltered_until = SHELTERED_STEPS, 0
            if self._recorded is not None:
                self._following.learn(self._recorded)

    def _after_called(self, run: CalledStep, seconds: float) -> None:
        following, inner = self._following, run.inner
        assert following is not None and self._watch is not None
        following.ended(run, seconds)
        if isinstance(inner, PlannedStep):
            self._take_stock(inner.executor)
        if inner is None or self._watch.elsewhere or self._watch.under_hooks or not self._alike(self._watch):
            self._setting.fallbacks["the step does not follow from the first call of the model: not followed"] += 1
            if isinstance(inner, ShelteredStep):
                inner.undo.forget()
            following.close()
            self._following = None
            self._watch.under_hooks = True  # or as good as that: never again
            self._record_again()
            return
        self._call = call_of(self._watch.calls[0], self._setting.device_type)
        match inner:
            case ShelteredStep():
                self._sheltered += inner.recording
                self._recorded = None
                self._learn(inner)
            case PlannedStep():
                self._planned += 1
                self._seconds.append(seconds)
                if inner.curve is not None and not inner.executor.checks.mismatch:
                    self._standing.measured_peak_bytes = inner.curve.measured_peak_bytes
            case LeftAlone():
                self._planned += 1
                self._seconds.append(seconds)
        rung = following.rung
        if rung is not None and rung.plan is not self.plan:
            self._standing.show(rung.trace, rung.plan, rung.schedule)

    def _sizes(self) -> tuple[int, ...]:
        """Of the inputs of this step, where they vary."""
        if self._following is None or self._watch is None or not self._watch.calls:
            return ()
        return call_of(self._watch.calls[0], self._setting.device_type).features

    def _alike(self, watch: InputWatch) -> bool:
        """Whether all calls of the model were the same, sizes included."""
        return bool(watch.calls) and all(call == watch.calls[0] for call in watch.calls[1:])

    def _ran_out(self, run: AnyStep, error: torch.OutOfMemoryError) -> None:
        """The device ran out of memory inside a step. A sheltered one cannot take less; a plan can."""
        if isinstance(run, CalledStep):
            if isinstance(run.inner, ShelteredStep) and run.inner.refusable:
                if self._following is not None:
                    self._following.refused(run.inner)
                self._ran_out(run.inner, error)
            if not isinstance(run.inner, PlannedStep | LeftAlone):
                return  # no plan is at fault, and a smaller one would help nobody
            if self._standing.brim is not None:
                self._standing.brim.after_failure(arranged=False)
            if self._following is not None:
                self._setting.fallbacks["a planned step ran out of memory: planned again for less"] += 1
                self._following.ran_out(run.inner)
            return
        if isinstance(run, ShelteredStep):
            run.undo.restore()
            raise out_of_memory(self.budget_bytes, run, error, self._sizes()) from error
        next_one = self._standing.ran_out()
        if next_one:
            error.add_note(f"{next_one}. What this step was to do is lost")

    def _after_planned(self, run: PlannedStep | IdleStep, seconds: float) -> None:
        if run.executor is not None:
            self._take_stock(run.executor)
            if run.executor.checks.mismatch:
                return
        if self._following is not None:
            return  # the plan was for one size alone
        if run.drifted:
            self._record_again()
            self._drifts.append(self._steps)
            if len(self._drifts) == DRIFTS and self._drifts[-1] - self._drifts[0] <= DRIFT_WINDOW_STEPS:
                self._sheltered_until = self._steps + REACTIVE_STEPS
                self._setting.fallbacks["the step keeps changing: sheltered for a while"] += 1
            return
        self._planned += 1
        self._seconds.append(seconds)
        self._standing.ended(run)

    def _take_stock(self, executor: Executor) -> None:
        """Of what a planned step shows about its replays, however it ended."""
        copies = executor.lineage.copies_before_write
        if copies:
            self._setting.fallbacks["copied before a write, for a replay that reads it"] += copies
        if self._device.answers_later:
            self._compared.extend(executor.checks.compared)
        if executor.checks.mismatch:
            self._distrust(executor.checks.mismatch)

    # report

    def report(self) -> Report:
        """What happened so far."""
        standing = self._standing
        if self._following is not None:
            standing.predict_shown()
        trace, plan, timeline = standing.trace, standing.plan, standing.timeline
        sizes = Counter[str]()
        if trace is not None and plan is not None:
            for gap, decision in zip(trace.gaps, plan.decisions, strict=True):
                sizes[type(decision).__name__] += trace.storages[gap.storage].nbytes
        predicted_curve = standing.predicted_curve()
        recent = self._seconds[-50:]
        if timeline is not None:
            standing.pace.hear(timeline.seconds)
        pace = standing.pace.factor
        bound = plan.lower_bound_seconds if plan is not None else None
        return Report(
            steps=self._steps,
            sheltered_steps=self._sheltered,
            planned_steps=self._planned,
            measured_steps=self._measured,
            calibrations=standing.calibrations,
            budget_bytes=self.budget_bytes,
            peak_bytes=self._peak,
            planned_peak_bytes=standing.measured_peak_bytes,
            predicted_peak_bytes=max(predicted_curve, default=0),
            floor_bytes=standing.floor_bytes,
            predicted_curve=predicted_curve,
            measured_curve=standing.measured_curve,
            planner=plan.planner if plan is not None else "",
            notes=plan.notes if plan is not None else (),
            step_seconds=statistics.median(recent) if recent else 0.0,
            predicted_step_seconds=timeline.seconds * pace if timeline is not None else 0.0,
            baseline_seconds=standing.baseline_seconds * pace,
            pace=pace,
            lower_bound_seconds=bound * pace if bound is not None else None,
            bytes_kept=sizes[Keep.__name__],
            bytes_swapped=sizes[Swap.__name__],
            bytes_recomputed=sizes[Recompute.__name__],
            breakdown=timeline.breakdown if timeline is not None else Breakdown(0.0, 0.0, 0.0, 0.0),
            held=held(trace) if trace is not None else (),
            unreplayable=unreplayable(trace) if trace is not None else (),
            distrusted=tuple(sorted(self._setting.distrusted)),
            fallbacks={**self._setting.fallbacks, **self._device.complaints()},
            followed=self._following.report() if self._following is not None else None,
        )


_active: Step | None = None  # the engine stand-in is one for the process, so one step runs at a time


class Step:
    """`with room.step():` around one training step."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._run: AnyStep | None = None
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
            if isinstance(run, PlannedStep | IdleStep):
                self._room._standing.begun(run)
        except BaseException:
            self._leave(run, failed=True)
            raise
        self._run = run
        self._began = time.perf_counter()
        return self

    def _leave(self, run: AnyStep, *, failed: bool) -> None:
        global _active
        _active = None
        try:
            run.end(failed=failed)
        finally:
            if self._room._watch is not None:
                self._room._watch.end()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._run is not None
        run, self._run = self._run, None
        seconds = time.perf_counter() - self._began
        try:
            try:
                if error is None:
                    self._room._standing.pace.end(self._room._device)
                else:
                    self._room._standing.pace.cancel()
            finally:
                self._leave(run, failed=error is not None)
        except BaseException:
            self._room._failed(run, error)
            raise
        if error is None:
            self._room._ended(run, seconds)
            return
        if isinstance(error, torch.OutOfMemoryError):
            self._room._ran_out(run, error)
        # After that: what is not believed any more is not planned from for less memory, either.
        self._room._failed(run, error)
        inner = run.inner if isinstance(run, CalledStep) else run
        if isinstance(inner, ShelteredStep):
            inner.undo.forget()
        if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
            raise StepError(
                "torch.func transforms and code that forbids saved-tensor hooks cannot run inside step(); "
                "use torch.autograd.grad there, or call it outside the step"
            ) from error
