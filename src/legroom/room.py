"""`fit()` and the `Room` it returns: a budget, and training steps that stay inside it."""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import astuple, replace
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
from legroom.arrange import Spacer
from legroom.arranging import Found, find_arranged, space_on
from legroom.assembling import OpSeconds, assemble, correct, less, op_seconds
from legroom.brim import Brim
from legroom.errors import BudgetError, LegroomError, StepError, TraceError
from legroom.evaluate import floor_bytes
from legroom.following import CHECKS, DRIFT_WINDOW_STEPS, DRIFTS, REACTIVE_STEPS, ROOMY, Following, checked
from legroom.hardware import Hardware
from legroom.hostfit import fast_enough, host_factor, with_host
from legroom.ir import Trace
from legroom.patience import patience
from legroom.plan import Keep, Plan, Recompute, Swap
from legroom.planners import Planner, named
from legroom.planners.dual import check_slowdown, least_peak
from legroom.probing import probe
from legroom.reasons import held, unreplayable
from legroom.replayprice import with_short_replays
from legroom.report import Report
from legroom.runtime.called import CalledStep, LeftAlone
from legroom.runtime.checking import Check
from legroom.runtime.device import Device
from legroom.runtime.inputs import Call, InputWatch, Signature, call_of, can_be_watched, remarks
from legroom.runtime.pace import Pace
from legroom.runtime.program import Program
from legroom.runtime.residency import Ledger
from legroom.runtime.steps import Habits, IdleStep, PlannedStep, Setting, ShelteredStep
from legroom.schedule import Schedule, SwapOut, check_schedule, lower, memory_curve
from legroom.simulate import simulate
from legroom.timeline import Breakdown, Memory, Timeline
from legroom.units import format_bytes, parse_bytes

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
        self.trace: Trace | None = None
        self.plan: Plan | None = None
        self.timeline: Timeline | None = None
        self._planner = planner
        self._priced = priced
        self._given = given
        self._spill_dir = os.fspath(spill_dir) if spill_dir is not None else None
        self._device = device
        self._setting = Setting(Ledger(device), device.name, model, optimizer, Counter(), set(), Habits())
        self._device.set_cap(budget_bytes)
        self._program: Program | None = None
        self._floor = 0
        self._baseline_seconds = 0.0
        self._calibrations = 0
        self._calibrated = False
        self._steps = self._sheltered = self._planned = self._measured = 0
        self._sheltered_since_drift = 0
        self._drifts: deque[int] = deque(maxlen=DRIFTS)
        self._sheltered_until = 0
        self._peak = self._planned_peak = 0
        self._measured_curve: tuple[int, ...] = ()
        self._base_bytes = self._planned_base_bytes = 0  # alive at the start of this step, and of the recorded one
        self._seconds: list[float] = []
        self._pace = Pace()
        self._curve: tuple[Timeline, tuple[Spacer, ...], tuple[int, ...]] | None = None  # and what it is of
        self._host_factor = 1.0  # how much slower than assumed the host is, as far as steps have shown
        self._host_fits = 0
        self._found: Found | None = None  # the plan that is used, as it was found
        self._before: tuple[Found, float] | None = None  # the one before, if the host was the reason, and its seconds
        self._plan_again = False  # before the next step: the one before ran out of memory
        self._arena_bytes = 0  # mapped for the plan
        self._steady = False  # whether the allocator has come to terms with the plan
        self._in_flight: list[int] = []  # bytes of each storage that is on the host at once
        self._brim = Brim(budget_bytes) if device.has_cap else None
        self._retries = 0
        self._compared: deque[Check] = deque()  # whose outcome is not known yet
        self._watch = InputWatch(model) if model is not None and can_be_watched(model) else None
        self._op_seconds: OpSeconds = {}  # in the last sheltered step, or the one before if that took less
        self._call: Call | None = None  # of the last step, the first one
        # The last recorded step, if it began with that call: what was alive before it, and its peak.
        self._recorded: tuple[Call, Trace, int, int] | None = None
        self._following: Following | None = None  # once inputs are seen to vary
        self._inputs: tuple[Signature, ...] = ()  # of the last planned step
        self._same_inputs = False  # and of the one before it
        self._may_idle = True
        self._closed = False

    @property
    def settled(self) -> bool:
        """Whether the plan is the one that stays, unless the step changes, and its pace is known."""
        if self._following is not None or self._program is None or not self._steady:
            return False
        if self._pace.timing and not (self.timeline is not None and self._pace.hear(self.timeline.seconds)):
            return False  # what the report predicts would be by the pace of the plan before
        waits_for_host = any(astuple(self._hardware().host)) and not self._program.idle
        return not waits_for_host or (self._host_fits >= MOST_HOST_FITS and self._before is None)

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
        if self._plan_again and self.trace is not None and self._following is None:
            self._plan_again = False
            self._base_bytes = self._setting.alive_bytes()
            self._plan_for(self.trace)
        if self._watch is not None:
            self._watch.begin()
            if self._following is not None:
                return self._following.step(self._watch)
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
            run = ShelteredStep(self._setting, proving=proving, trusting=not foreign)
            if self._watch is not None:
                watch = self._watch
                watch.on_call = lambda number, _: run.called(watch, number)
            return run
        self._base_bytes = self._setting.alive_bytes()
        more = self._base_bytes - self._planned_base_bytes
        assert self.timeline is not None
        if more > 0 and max(self._predicted_curve()) + more > self.budget_bytes:
            self._setting.fallbacks["more was alive at the start than the plan has room for: planned again"] += 1
            self._program = None
            self._sheltered_since_drift = SHELTERED_STEPS - 1
            return self._begin()
        checks = self._program.one_replayed(self._planned)
        calibrating = self._calibrations < MOST_CALIBRATIONS and not self._calibrated
        # Where memory could not be arranged, in every step: one of Inception ran out of memory long after its plan had
        # settled. And in the first step of a plan, in which all ops are looked at and ask for a little more than was
        # arranged: that one is not measured.
        trial = untried = False
        if self._brim is not None and self._given is None and not self._program.idle:
            arranged = self._found is not None and self._found.spacers is not None
            trial = not arranged or (self._program.calls is None and not self._brim.settled)
            untried = self._brim.untried
        measure = (calibrating or self._planned in CHECKS) and not (trial and untried)
        if self._watch is not None and self._program.idle and self._device.has_cap:
            roomy = self.timeline.peak_bytes + max(0, more) <= self.budget_bytes * ROOMY
            known = self._same_inputs and self._inputs and not (self._watch.elsewhere or self._watch.some_free)
            idle = roomy and known and self._may_idle and not (measure or foreign or self._drifts)
            if idle:
                return IdleStep(self._setting, self._program, self._watch, self._inputs)
        return PlannedStep(self._setting, self._program, checks=checks, measure=measure, trial=trial)

    def _hear_of_checks(self, *, wait: bool) -> None:
        while self._compared and (wait or self._compared[0].known()):
            check = self._compared.popleft()
            if not check.same():
                self._setting.fallbacks["a replay gave other bits"] += 1
                self._setting.distrusted.update(check.ops)
                self._program = None
                if self._following is not None:
                    self._following.forget()
                self._sheltered_since_drift = SHELTERED_STEPS - 1
                warnings.warn(
                    f"recomputing {', '.join(check.ops)} gave other bits than the first run, though it was proven to "
                    "give the same: gradients of the last steps may be off. It is kept or swapped from now on. "
                    "Look for writes that PyTorch cannot see (numpy, raw kernels) that began after the first steps",
                    RuntimeWarning,
                    stacklevel=4,
                )

    def _hear_of_refusal(self, run: AnyStep, error: BaseException | None) -> None:
        """A step that follows the input may have been refused by what it proved, or would have been."""
        inner = run.inner if isinstance(run, CalledStep) else None
        if isinstance(inner, PlannedStep) and inner.executor.refused_bits and self._following is not None:
            self._setting.distrusted.update(inner.executor.mismatch)
            self._following.forget()
            if inner.executor.refusal and error is not None:
                error.add_note(f"legroom: {inner.executor.refusal}")
                warnings.warn(inner.executor.refusal, RuntimeWarning, stacklevel=4)

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
        if run.began_with_call and self._call is not None:
            self._recorded = self._call, trace, run.alive_bytes, run.curve.measured_peak_bytes
        if self._following is None:
            self._plan_for(trace)
        elif self._recorded is not None:
            self._following.learn(*self._recorded)

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
            self._following = Following(
                self._setting,
                self.budget_bytes,
                self._unarranged_bytes,
                self._planner,
                self._priced,
                self._hardware,
            )
            self._program = None
            self._sheltered_since_drift, self._sheltered_until = SHELTERED_STEPS, 0
            if self._recorded is not None:
                self._following.learn(*self._recorded)

    def _after_called(self, run: CalledStep, seconds: float) -> None:
        following, inner = self._following, run.inner
        assert following is not None and self._watch is not None
        following.ended(run, seconds)
        if inner is None or self._watch.elsewhere or self._watch.under_hooks or not self._alike(self._watch):
            self._setting.fallbacks["the step does not follow from the first call of the model: not followed"] += 1
            if isinstance(inner, ShelteredStep):
                inner.undo.forget()
            self._stop_following()
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
                self._take_stock(inner)
                if inner.executor.mismatch:
                    self._setting.distrusted.update(inner.executor.mismatch)
                    following.forget()
                elif inner.curve is not None:
                    self._planned_peak = inner.curve.measured_peak_bytes
            case LeftAlone():
                self._planned += 1
                self._seconds.append(seconds)
        rung = following.rung
        if rung is not None and rung.plan is not self.plan:
            self.trace, self.plan, self._schedule, self.timeline = rung.trace, rung.plan, rung.schedule, None
            self._measured_curve = ()

    def _sizes(self) -> tuple[int, ...]:
        """Of the inputs of this step, where they vary."""
        if self._following is None or self._watch is None or not self._watch.calls:
            return ()
        return call_of(self._watch.calls[0], self._setting.device_type).features

    def _alike(self, watch: InputWatch) -> bool:
        """Whether all calls of the model were the same, sizes included."""
        return bool(watch.calls) and all(call == watch.calls[0] for call in watch.calls[1:])

    def _stop_following(self) -> None:
        if self._following is not None:
            self._following.close()
        self._following = self._program = None
        if self._watch is not None:
            self._watch.under_hooks = True  # or as good as that: never again
        self._sheltered_since_drift = SHELTERED_STEPS - 1

    def _unarranged_bytes(self) -> int:
        return self.budget_bytes if self._brim is None else self._brim.unarranged_bytes

    def _hardware(self) -> Hardware:
        return probe(self._setting.device_type, self._spill_dir).scaled_host(self._host_factor)

    def _plan_for(self, trace: Trace) -> None:
        self.trace, self.plan, self.timeline, self._program = trace, None, None, None
        self._planned_base_bytes = self._base_bytes
        self._floor = floor_bytes(trace)
        try:
            found = self._find_plan(trace)
        except BudgetError:
            # The step just ran inside the budget, so the reactive policy can go on doing what no plan can.
            self._setting.fallbacks["no plan fits the budget: the step stays sheltered"] += 1
            return
        self._adopt(trace, found)

    def _find_plan(self, trace: Trace) -> Found:
        with patience("measuring the machine and planning the step"):
            hardware = self._hardware()
            if self._brim is None or self._given is not None:
                plan = self._given or self._planner(trace, hardware, self.budget_bytes)
                plan = checked(trace, plan)
                return Found(plan, lower(trace, plan, hardware), hardware, self._brim)
            space = space_on(
                self._device,
                trace,
                budget_bytes=self.budget_bytes,
                floor_bytes=self._floor,
                base_bytes=self._planned_base_bytes,
            )
            return find_arranged(self._planner, trace, hardware, self._brim, space)

    def _adopt(self, trace: Trace, found: Found) -> None:
        plan, schedule, hardware = found.plan, found.schedule, found.hardware
        self._found, self._before = found, None
        self._brim = found.brim
        if self._brim is not None:
            self._brim.new_plan()
        peak = check_schedule(trace, schedule)
        if peak > self.budget_bytes:
            raise BudgetError(
                f"the plan of {plan.planner!r} needs {format_bytes(peak)}, the budget is "
                f"{format_bytes(self.budget_bytes)}; the smallest budget that works is {format_bytes(self._floor)}. "
                "Plan for this budget, or raise it",
                budget_bytes=self.budget_bytes,
                floor_bytes=self._floor,
            )
        self._predict(trace, schedule, hardware)
        self.plan = plan
        self._schedule = schedule
        self._program = Program(trace, schedule, spacers=found.spacers or ())
        self._arena_bytes = found.arena_bytes
        self._map_arena()
        swapped = {i.storage for i in schedule.instructions if isinstance(i, SwapOut)}
        self._in_flight = [trace.storages[storage].nbytes for storage in swapped]
        self._device.prepare(self._in_flight)
        self._inputs, self._same_inputs = (), False
        self._steady = False
        self._pace.new_plan()
        self._calibrated = False
        self._measured_curve = ()

    def _map_arena(self) -> None:
        if self._arena_bytes > 0:
            self._device.map_free(self._arena_bytes)
            self._retries = self._device.retries()  # what that took is not the steps'

    def _predicted_curve(self) -> tuple[int, ...]:
        """Peaks of the head and of every segment, spacers included."""
        trace, timeline, program = self.trace, self.timeline, self._program
        if trace is None or timeline is None:
            return ()
        before = self._curve  # asked for at the beginning of every step: a millisecond of the host's
        spacers = program.spacers if program is not None else ()  # they go where there is no room for one
        if before is not None and before[0] is timeline and before[1] is spacers:
            return before[2]
        spaced = program.spaced_bytes if program is not None and spacers else lambda _: 0
        peaks = (memory.peak_bytes + spaced(tick) for tick, memory in enumerate(timeline.memory))
        self._curve = (timeline, spacers, (trace.head_peak_bytes, *peaks))
        return self._curve[2]

    def _predict(self, trace: Trace, schedule: Schedule, hardware: Hardware) -> None:
        self._floor = floor_bytes(trace)
        self.timeline = simulate(trace, schedule, hardware)
        self._baseline_seconds = simulate(trace, Schedule((), schedule.trace_signature), hardware).seconds

    def _ran_out(self, run: AnyStep, error: torch.OutOfMemoryError) -> None:
        """The device ran out of memory inside a step. A sheltered one cannot take less; a plan can."""
        if isinstance(run, CalledStep):
            if isinstance(run.inner, ShelteredStep) and run.inner.refusable:
                if self._following is not None:
                    self._following.refused(run.inner)
                self._ran_out(run.inner, error)
            if self._brim is not None:
                self._brim.after_failure(arranged=False)
            if self._following is not None:
                self._setting.fallbacks["a planned step ran out of memory: planned again for less"] += 1
                self._following.ran_out(run.inner)
            return
        if isinstance(run, ShelteredStep):
            run.undo.restore()
            raise out_of_memory(self.budget_bytes, run, error, self._sizes()) from error
        self._may_idle = False
        self._setting.fallbacks["a planned step ran out of memory: planned again for less"] += 1
        if self._brim is not None and self.trace is not None:
            self._brim.after_failure(arranged=True)
            self._plan_again = True  # not now: what the step has made is still there, held by the error
            error.add_note(
                "legroom's plan for this step did not fit, and the next step gets a smaller one. What this step was to "
                "do is lost"
            )

    def _look_at_pieces(self, *, relieved: bool) -> bool:
        """Whether another plan was made because the allocator can give more, or less, than was thought.

        relieved: something had to go beside the plan to make room."""
        if self._brim is None or self._given is not None or self.trace is None or self.timeline is None:
            return False
        if self._brim.settled:
            if not relieved or self._brim.usable_bytes <= self._floor or not self._brim.after_relief():
                return False
        else:
            retries, self._retries = self._retries, self._device.retries()
            rearranged = self._retries > retries
            if not self._brim.after_step(rearranged=rearranged and self._planned > 1):
                if rearranged and self._arena_bytes:  # its pages lie elsewhere now
                    self._device.merge_free()
                    self._map_arena()
                return False
        self._setting.fallbacks["memory was in pieces: planned again for less"] += 1
        self._calibrations, before = 0, self._before
        self._plan_for(self.trace)
        self._before = before
        return True

    def _look_at_host(self) -> bool:
        """Whether another plan was made because the host is slower, or faster, than was thought."""
        trace, plan, timeline = self.trace, self.plan, self.timeline
        if trace is None or plan is None or timeline is None:
            return False
        if self._host_fits >= MOST_HOST_FITS and self._before is None:
            return False
        if self._program is None or self._program.idle or not any(astuple(self._hardware().host)):
            return False
        if not self._pace.hear(timeline.seconds):
            return False
        fits, self._host_fits = self._host_fits, MOST_HOST_FITS
        seconds = timeline.seconds * self._pace.factor
        before, self._before = self._before, None
        faster = before is not None and before[1] < seconds
        if before is not None and faster and check_schedule(trace, before[0].schedule) <= self.budget_bytes:
            # What the host costs is known by a factor only; which of two plans is faster, by running them.
            self._setting.fallbacks["the plan before was faster: back to it"] += 1
            self._device.merge_free()
            self._adopt(trace, before[0])
            self._calibrations = 0
            return True
        if fits >= MOST_HOST_FITS:
            return False
        if self._pace.starved:
            factor = host_factor(trace, self._schedule, self._hardware(), seconds)
        else:  # what the step takes beyond what was simulated, the device takes
            factor = fast_enough(trace, self._schedule, self._hardware())
        if abs(factor - 1.0) < _SAME_HOST:
            return False
        self._host_factor *= factor
        trace = with_host(trace, factor)
        self._predict(trace, self._schedule, self._hardware())  # of the plan that ran, with what is known now
        assert self.timeline is not None
        self.trace = trace
        self._pace.hear(self.timeline.seconds)
        if self._given is not None:
            return False
        simulated = self.timeline.seconds
        try:
            found = self._find_plan(trace)
        except BudgetError:
            found = None
        if found is None or simulate(trace, found.schedule, found.hardware).seconds > simulated * _WORTH_ANOTHER:
            self._map_arena()  # the search gave it back
            return False
        ran = self._found
        self._adopt(trace, found)
        self._before = (ran, seconds) if ran is not None else None
        self._host_fits = fits + 1
        self._calibrations = 0
        return True

    def _after_planned(self, run: PlannedStep | IdleStep, seconds: float) -> None:
        mismatch: list[str] = []
        if run.executor is not None:
            mismatch = run.executor.mismatch
            self._take_stock(run)
        if self._following is not None:
            self._setting.distrusted.update(mismatch)
            return  # the plan was for one size alone
        if run.drifted or mismatch:
            self._program = None
            self._sheltered_since_drift = SHELTERED_STEPS - 1
            if mismatch:
                self._setting.distrusted.update(mismatch)
                return
            self._drifts.append(self._steps)
            if len(self._drifts) == DRIFTS and self._drifts[-1] - self._drifts[0] <= DRIFT_WINDOW_STEPS:
                self._sheltered_until = self._steps + REACTIVE_STEPS
                self._setting.fallbacks["the step keeps changing: sheltered for a while"] += 1
            return
        self._planned += 1
        self._seconds.append(seconds)
        if self._watch is not None:
            before, self._inputs = self._inputs, tuple(self._watch.calls)
            self._same_inputs = before == self._inputs
        if self._look_at_pieces(relieved=run.executor is not None and run.executor.refused):
            return
        if not self._steady and (self._brim is None or self._brim.settled or self._given is not None):
            # Sheltered steps swap everything, and pin memory for it. It goes before steps are timed: timed before it
            # went, a step of ResNet-152 took 134 ms, and 104 later on, which had passed for a slow host.
            self._steady = True
            self._device.trim(self._in_flight)
        if self._steady and run.curve is None and self._look_at_host():
            return
        if run.curve is None or self.trace is None or self.timeline is None:
            return
        if self._base_bytes < self._planned_base_bytes:
            return  # less was alive at the start: nothing to learn about the step that the plan is for
        self._planned_peak = run.curve.measured_peak_bytes
        refused = run.executor is not None and run.executor.refused
        if refused or len(run.curve.segments) != len(self.trace.ticks) + 1:
            # No room, so that something went beside the plan; or a graph of a step before was gone through in this one:
            # not the plan's own curve.
            self._calibrations += 1
            return
        self._measured_curve = tuple(segment.measured_peak_bytes for segment in run.curve.segments)
        predicted = self._predicted_curve()
        self._calibrated = max(self._measured_curve) == max(predicted) and all(
            m <= p for m, p in zip(self._measured_curve, predicted, strict=True)
        )
        if self._calibrated:
            return
        self._calibrations += 1
        self.trace = correct(self.trace, predicted[1:], run.curve)
        # Seconds do not depend on levels: of the timeline, only the memory in it is another one now.
        memory = tuple(Memory(*level) for level in memory_curve(self.trace, self._schedule))
        peak = max((self.trace.head_peak_bytes, *(m.peak_bytes for m in memory)))
        self.timeline = replace(self.timeline, memory=memory, peak_bytes=peak)
        if max(self._predicted_curve()) > self.budget_bytes:
            self._setting.fallbacks["planned again after the first planned step was measured"] += 1
            self._plan_for(self.trace)

    def _take_stock(self, run: PlannedStep | IdleStep) -> None:
        executor = run.executor
        if executor is None:
            return
        copies = executor.lineage.copies_before_write
        if copies:
            self._setting.fallbacks["copied before a write, for a replay that reads it"] += copies
        if self._device.answers_later:
            self._compared.extend(executor.compared)

    # report

    def report(self) -> Report:
        """What happened so far."""
        if self._following is not None and self.timeline is None and self.trace is not None and self.plan is not None:
            self._predict(self.trace, self._schedule, self._hardware())
        trace, plan, timeline = self.trace, self.plan, self.timeline
        sizes = Counter[str]()
        if trace is not None and plan is not None:
            for gap, decision in zip(trace.gaps, plan.decisions, strict=True):
                sizes[type(decision).__name__] += trace.storages[gap.storage].nbytes
        predicted_curve = self._predicted_curve()
        recent = self._seconds[-50:]
        if timeline is not None:
            self._pace.hear(timeline.seconds)
        pace = self._pace.factor
        bound = plan.lower_bound_seconds if plan is not None else None
        return Report(
            steps=self._steps,
            sheltered_steps=self._sheltered,
            planned_steps=self._planned,
            measured_steps=self._measured,
            calibrations=self._calibrations,
            budget_bytes=self.budget_bytes,
            peak_bytes=self._peak,
            planned_peak_bytes=self._planned_peak,
            predicted_peak_bytes=max(predicted_curve, default=0),
            floor_bytes=self._floor,
            predicted_curve=predicted_curve,
            measured_curve=self._measured_curve,
            planner=plan.planner if plan is not None else "",
            notes=plan.notes if plan is not None else (),
            step_seconds=statistics.median(recent) if recent else 0.0,
            predicted_step_seconds=timeline.seconds * pace if timeline is not None else 0.0,
            baseline_seconds=self._baseline_seconds * pace,
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
            if isinstance(run, PlannedStep | IdleStep) and self._room._steady and run.census is None:
                pace, device = self._room._pace, self._room._device
                pace.begin(device)
                if run.executor is not None:
                    run.executor.at_backward = partial(pace.mark, device)
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
            if error is None:
                self._room._pace.end(self._room._device)
            else:
                self._room._pace.cancel()
        finally:
            try:
                self._leave(run, failed=error is not None)
            finally:
                self._room._hear_of_refusal(run, error)
        if error is None:
            self._room._ended(run, seconds)
            return
        if isinstance(error, torch.OutOfMemoryError):
            self._room._ran_out(run, error)
        inner = run.inner if isinstance(run, CalledStep) else run
        if isinstance(inner, ShelteredStep):
            inner.undo.forget()
        if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
            raise StepError(
                "torch.func transforms and code that forbids saved-tensor hooks cannot run inside step(); "
                "use torch.autograd.grad there, or call it outside the step"
            ) from error
