"""The one plan of a program whose step repeats: how it is found, and what its steps show of it.

Steps under a plan show that a peak is elsewhere, that free memory lies in pieces, or that the host is slower than was
thought. Each may lead to another plan, until one stays. Where inputs change size, see `following`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace
from functools import partial

from legroom.arrange import Spacer
from legroom.arranging import Found, arranged, find_arranged, rearranged, space_on
from legroom.assembling import correct
from legroom.brim import Brim
from legroom.curve import Curve
from legroom.errors import BudgetError, PlanError
from legroom.evaluate import floor_bytes
from legroom.following import CHECKS, ROOMY
from legroom.hardware import Hardware
from legroom.hostfit import fast_enough, host_factor, with_host
from legroom.ir import Trace
from legroom.patience import patience
from legroom.plan import Plan, checked
from legroom.planners import Planner
from legroom.runtime.inputs import InputWatch, Signature
from legroom.runtime.pace import Pace
from legroom.runtime.program import Program
from legroom.runtime.steps import IdleStep, PlannedStep, Setting
from legroom.schedule import Schedule, SwapOut, check_schedule, lower, memory_curve
from legroom.simulate import simulate
from legroom.timeline import Memory, Timeline
from legroom.units import format_bytes

MOST_CALIBRATIONS = 4
MOST_HOST_FITS = 2  # the second corrects what the first, from another plan, got wrong
_SAME_HOST = 0.05
_WORTH_ANOTHER = 0.98  # of the time that the plan before takes


class Standing:
    """Makes the plan, gives out steps that follow it, and learns from what came of them."""

    def __init__(
        self,
        setting: Setting,
        watch: InputWatch | None,
        budget_bytes: int,
        planner: Planner,
        given: Plan | None,
        probe: Callable[[], Hardware],
    ) -> None:
        """watch: of the model's calls, where they can be seen. given: used in place of what the planner would find."""
        self._setting = setting
        self._watch = watch
        self._budget_bytes = budget_bytes
        self._planner = planner
        self._given = given
        self._probe = probe
        self._device = setting.ledger.device
        # the plan, and what is expected of it
        self._trace: Trace | None = None
        self._shown: Callable[[], Trace] | None = None  # puts it together, when somebody asks for it
        self.plan: Plan | None = None
        self._schedule: Schedule  # once there is a plan
        self.timeline: Timeline | None = None
        self.program: Program | None = None  # while steps follow the plan
        self.floor_bytes = 0
        self.baseline_seconds = 0.0
        self._found: Found | None = None  # the plan that is used, as it was found
        self._curve: tuple[Timeline, tuple[Spacer, ...], tuple[int, ...]] | None = None  # and what it is of
        self._base_bytes = self._planned_base_bytes = 0  # alive at the start of this step, and of the recorded one
        # its memory
        self.brim = Brim(budget_bytes) if self._device.has_cap else None
        self._arena_bytes = 0  # mapped for the plan
        self._retries = 0
        self._in_flight: list[int] = []  # bytes of each storage that is on the host at once
        self._steady = False  # whether the allocator has come to terms with the plan
        self._plan_again = False  # before the next step: the one before ran out of memory
        # what its measured steps showed
        self.calibrations = 0
        self._calibrated = False
        self.measured_curve: tuple[int, ...] = ()
        self.measured_peak_bytes = 0  # of the last planned step that was measured
        # its time
        self.pace = Pace()
        self._host_factor = 1.0  # how much slower than assumed the host is, as far as steps have shown
        self._host_fits = 0
        self._before: tuple[Found, float] | None = None  # the one before, if the host was the reason, and its seconds
        # its inputs
        self._inputs: tuple[Signature, ...] = ()  # of the last step
        self._same_inputs = False  # and of the one before it
        self._may_idle = True

    @property
    def settled(self) -> bool:
        """Whether the plan is the one that stays, unless the step changes, and its pace is known."""
        if self.program is None or not self._steady:
            return False
        if self.pace.timing and not (self.timeline is not None and self.pace.hear(self.timeline.seconds)):
            return False  # what the report predicts would be by the pace of the plan before
        return not self._asks_about_host()

    def unarranged_bytes(self) -> int:
        """What a plan may fill whose memory nobody arranges."""
        return self._budget_bytes if self.brim is None else self.brim.unarranged_bytes

    def hardware(self) -> Hardware:
        """With the host as steps have shown it."""
        return self._probe().scaled_host(self._host_factor)

    # the plan

    def plan_for(self, trace: Trace, base_bytes: int) -> None:
        """For a step that was just recorded. base_bytes: alive at its start."""
        self.calibrations = 0
        self._plan_for(trace, base_bytes)

    def _plan_for(self, trace: Trace, base_bytes: int, *, before: Plan | None = None) -> None:
        """before: a plan of the same step, for more memory."""
        self.trace, self.plan, self.timeline, self.program = trace, None, None, None
        self._planned_base_bytes = base_bytes
        self.floor_bytes = floor_bytes(trace)
        try:
            found = self._find_plan(trace, before)
        except PlanError:
            if self._given is None or not self._setting.distrusted:
                raise
            # Some of what it recomputes is not believed any more, and with that the step is another one.
            self._setting.fallbacks["the given plan relies on a replay that gave other bits: planned anew"] += 1
            self._given = None
            self._plan_for(trace, base_bytes)
            return
        except BudgetError:
            # The step just ran inside the budget, so the reactive policy can go on doing what no plan can.
            self._setting.fallbacks["no plan fits the budget: the step stays sheltered"] += 1
            return
        self._adopt(trace, found)

    def give_up(self) -> None:
        """Steps follow it no more, nor another of the same trace. What is known of it stays, for the report."""
        self.program = None
        self._plan_again = False

    @property
    def trace(self) -> Trace | None:
        if self._trace is None and self._shown is not None:
            self._trace, self._shown = self._shown(), None
        return self._trace

    @trace.setter
    def trace(self, trace: Trace) -> None:
        self._trace, self._shown = trace, None

    def show(self, trace: Callable[[], Trace], plan: Plan, schedule: Schedule) -> None:
        """Have this plan reported, which somebody else follows."""
        self._trace, self._shown = None, trace
        self.plan, self._schedule, self.timeline = plan, schedule, None
        self.measured_curve = ()

    def predict_shown(self) -> None:
        """Not before somebody asks: plans to show may change with every step."""
        if self.timeline is None and self.trace is not None and self.plan is not None:
            self._predict(self.trace, self._schedule, self.hardware())

    def _find_plan(self, trace: Trace, before: Plan | None = None) -> Found:
        with patience("measuring the machine and planning the step"):
            hardware = self.hardware()
            if self.brim is None:
                plan = checked(trace, self._given or self._planner(trace, hardware, self._budget_bytes))
                return Found(plan, lower(trace, plan, hardware), hardware, None)
            space = space_on(
                self._device,
                trace,
                budget_bytes=self._budget_bytes,
                floor_bytes=self.floor_bytes,
                base_bytes=self._planned_base_bytes,
            )
            if self._given is not None:
                return arranged(checked(trace, self._given), trace, hardware, self.brim, space)
            return find_arranged(self._planner, trace, hardware, self.brim, space, before)

    def _adopt(self, trace: Trace, found: Found) -> None:
        plan, schedule = found.plan, found.schedule
        peak = check_schedule(trace, schedule)
        if peak > self._budget_bytes:
            raise BudgetError(
                f"the plan of {plan.planner!r} needs {format_bytes(peak)}, the budget is "
                f"{format_bytes(self._budget_bytes)}; the smallest budget that works is "
                f"{format_bytes(self.floor_bytes)}. Plan for this budget, or raise it",
                budget_bytes=self._budget_bytes,
                floor_bytes=self.floor_bytes,
            )
        self._arena_bytes = found.arena_bytes
        self._map_arena()
        if self._arena_bytes:
            with patience("looking for room for the plan"):
                found = rearranged(found, trace, self._device.free_pieces())
        self._found, self._before = found, None
        self.brim = found.brim
        if self.brim is not None:
            self.brim.new_plan()
        self._predict(trace, schedule, found.hardware)
        self.plan = plan
        self._schedule = schedule
        self.program = Program(trace, schedule, spacers=found.spacers or ())
        swapped = {i.storage for i in schedule.instructions if isinstance(i, SwapOut)}
        self._in_flight = [trace.storages[storage].nbytes for storage in swapped]
        self._device.prepare(self._in_flight)
        self._inputs, self._same_inputs = (), False
        self._steady = False
        self.pace.new_plan()
        self._calibrated = False
        self.measured_curve = ()

    def _map_arena(self) -> None:
        if self._arena_bytes > 0:
            self._device.map_free(self._arena_bytes)
            self._retries = self._device.retries()  # what that took is not the steps'

    def memory_moved(self) -> None:
        """Between two steps, something moved that lasts."""
        if self._arena_bytes:
            self._map_arena_again()
        self._retries = self._device.retries()

    def _map_arena_again(self) -> None:
        """Of the plan that steps follow: it may lie elsewhere now, and other spacers be needed."""
        self._map_arena()
        found, trace = self._found, self.trace
        if not self._arena_bytes or found is None or trace is None or self.program is None:
            return
        self._found = rearranged(found, trace, self._device.free_pieces())
        if self._found is not found:
            self.program = Program(trace, self._schedule, spacers=self._found.spacers or ())

    def _predict(self, trace: Trace, schedule: Schedule, hardware: Hardware) -> Timeline:
        self.floor_bytes = floor_bytes(trace)
        self.timeline = simulate(trace, schedule, hardware)
        self.baseline_seconds = simulate(trace, Schedule((), schedule.trace_signature), hardware).seconds
        return self.timeline

    def predicted_curve(self) -> tuple[int, ...]:
        """Peaks of the head and of every segment, spacers included."""
        trace, timeline, program = self.trace, self.timeline, self.program
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

    # its steps

    def step(self, planned_steps: int, *, may_idle: bool) -> PlannedStep | IdleStep | None:
        """The next one, or None where more is alive than the plan has room for.

        planned_steps: so far. may_idle: it may be left alone, if the plan and the inputs allow it too.
        """
        setting, program, timeline, watch = self._setting, self.program, self.timeline, self._watch
        assert program is not None and timeline is not None
        self._base_bytes = setting.alive_bytes()
        more = self._base_bytes - self._planned_base_bytes
        if more > 0 and max(self.predicted_curve()) + more > self._budget_bytes:
            setting.fallbacks["more was alive at the start than the plan has room for: planned again"] += 1
            return None
        calibrating = self.calibrations < MOST_CALIBRATIONS and not self._calibrated
        # Where memory could not be arranged, in every step: one of Inception ran out of memory long after its plan had
        # settled. And in the first step of a plan, in which all ops are looked at and ask for a little more than was
        # arranged: that one is not measured.
        trial = untried = False
        if self.brim is not None and not program.idle:
            fits = self._found is not None and self._found.spacers is not None
            trial = not fits or (program.calls is None and not self.brim.settled)
            untried = self.brim.untried
        measure = (calibrating or planned_steps in CHECKS) and not (trial and untried)
        if watch is not None and program.idle and self._device.has_cap:
            roomy = timeline.peak_bytes + max(0, more) <= self._budget_bytes * ROOMY
            known = self._same_inputs and self._inputs and not (watch.elsewhere or watch.some_free)
            if roomy and known and self._may_idle and may_idle and not measure:
                return IdleStep(setting, program, watch, self._inputs)
        checks = program.one_replayed(planned_steps)
        return PlannedStep(setting, program, checks=checks, measure=measure, trial=trial)

    def begun(self, run: PlannedStep | IdleStep) -> None:
        """Time it, if it is one of those to time."""
        if self._steady and run.census is None:
            self.pace.begin(self._device)
            if run.executor is not None:
                run.executor.at_backward = partial(self.pace.mark, self._device)

    def ended(self, run: PlannedStep | IdleStep) -> None:
        """Hear of a step that went as planned."""
        if self._watch is not None:
            before, self._inputs = self._inputs, tuple(self._watch.calls)
            self._same_inputs = before == self._inputs
        relieved = run.executor is not None and run.executor.refused
        if self._look_at_pieces(relieved=relieved):
            return
        if not self._steady and (self.brim is None or self.brim.settled):
            # Sheltered steps swap everything, and pin memory for it. It goes before steps are timed: timed before it
            # went, a step of ResNet-152 took 134 ms, and 104 later on, which had passed for a slow host.
            self._steady = True
            self._device.trim(self._in_flight)
        if run.curve is None:
            if self._steady:
                self._look_at_host()
        elif self._base_bytes >= self._planned_base_bytes:
            # Where less was alive at the start, there is nothing to learn about the step that the plan is for.
            self.measured_peak_bytes = run.curve.measured_peak_bytes
            self._calibrate(run.curve, relieved=relieved)

    def ran_out(self) -> str:
        """A step ran out of memory. What to say of the next one."""
        self._may_idle = False
        given = self._given is not None
        how = "the given plan stays" if given else "planned again for less"
        self._setting.fallbacks[f"a planned step ran out of memory: {how}"] += 1
        if self.brim is None:
            return ""
        self.brim.after_failure(arranged=True)
        self._plan_again = True  # not now: what the step has made is still there, held by the error
        if given:
            return "The plan that was given did not fit, and stays: give one for less, or none"
        return "legroom's plan for this step did not fit, and the next step gets a smaller one"

    def recover(self) -> None:
        """Before a step: the smaller plan, if the one before ran out of memory."""
        if self._plan_again and self.trace is not None:
            self._plan_again = False
            self._base_bytes = self._setting.alive_bytes()
            self.calibrations = 0
            self._plan_for(self.trace, self._base_bytes, before=self.plan)

    # what they show

    def _calibrate(self, curve: Curve, *, relieved: bool) -> None:
        """Peaks go to where they were measured; if that is above the budget, it is planned again."""
        trace, timeline = self.trace, self.timeline
        assert trace is not None and timeline is not None
        if relieved or len(curve.segments) != len(trace.ticks) + 1:
            # No room, so that something went beside the plan; or a graph of a step before was gone through in this one:
            # not the plan's own curve.
            self.calibrations += 1
            return
        self.measured_curve = tuple(segment.measured_peak_bytes for segment in curve.segments)
        predicted = self.predicted_curve()
        self._calibrated = max(self.measured_curve) == max(predicted) and all(
            m <= p for m, p in zip(self.measured_curve, predicted, strict=True)
        )
        if self._calibrated:
            return
        self.calibrations += 1
        self.trace = trace = correct(trace, predicted[1:], curve)
        self.floor_bytes = floor_bytes(trace)
        # Seconds do not depend on levels: of the timeline, only the memory in it is another one now.
        memory = tuple(Memory(*level) for level in memory_curve(trace, self._schedule))
        peak = max((trace.head_peak_bytes, *(m.peak_bytes for m in memory)))
        self.timeline = replace(timeline, memory=memory, peak_bytes=peak)
        if max(self.predicted_curve()) > self._budget_bytes:
            self._setting.fallbacks["planned again after the first planned step was measured"] += 1
            self._plan_for(trace, self._base_bytes)

    def _look_at_pieces(self, *, relieved: bool) -> bool:
        """Whether another plan was made because the allocator can give more, or less, than was thought.

        relieved: something had to go beside the plan to make room."""
        if self.brim is None or self.trace is None:
            return False
        stays = self._given is not None  # whatever comes of it: there is no other
        if self.brim.settled:
            if stays or not relieved or self.brim.usable_bytes <= self.floor_bytes or not self.brim.after_relief():
                return False
        else:
            retries, self._retries = self._retries, self._device.retries()
            rearranged = self._retries > retries
            if not self.brim.after_step(rearranged=rearranged and not stays):
                if rearranged and stays and self.brim.settled:
                    self._setting.fallbacks["memory was in pieces, and the given plan stays: plan for less"] += 1
                if rearranged and self._arena_bytes:  # its pages lie elsewhere now
                    self._device.merge_free()
                    self._map_arena_again()
                return False
        self._setting.fallbacks["memory was in pieces: planned again for less"] += 1
        self.calibrations, before = 0, self._before
        self._plan_for(self.trace, self._base_bytes, before=self.plan)
        self._before = before
        return True

    def _asks_about_host(self) -> bool:
        """Whether steps are still to show how fast the host is, or which of two plans it is faster with."""
        if self._host_fits >= MOST_HOST_FITS and self._before is None:
            return False
        return self.program is not None and not self.program.idle and any(astuple(self.hardware().host))

    def _look_at_host(self) -> None:
        """Make another plan, or take up the one before, if the host is slower, or faster, than was thought."""
        trace, timeline = self.trace, self.timeline
        assert trace is not None and timeline is not None
        if not self._asks_about_host() or not self.pace.hear(timeline.seconds):
            return
        fits, self._host_fits = self._host_fits, MOST_HOST_FITS
        before, self._before = self._before, None
        seconds = timeline.seconds * self.pace.factor
        faster = before is not None and before[1] < seconds
        if before is not None and faster and check_schedule(trace, before[0].schedule) <= self._budget_bytes:
            # What the host costs is known by a factor only; which of two plans is faster, by running them.
            self._setting.fallbacks["the plan before was faster: back to it"] += 1
            self._device.merge_free()
            self._adopt(trace, before[0])
            self.calibrations = 0
        elif fits < MOST_HOST_FITS and self._plan_for_host(trace, seconds):
            self._host_fits = fits + 1

    def _plan_for_host(self, trace: Trace, seconds: float) -> bool:
        """Whether another plan was made for the host on which steps take so long."""
        if self.pace.starved:
            factor = host_factor(trace, self._schedule, self.hardware(), seconds)
        else:  # what the step takes beyond what was simulated, the device takes
            factor = fast_enough(trace, self._schedule, self.hardware())
        if abs(factor - 1.0) < _SAME_HOST:
            return False
        self._host_factor *= factor
        self.trace = trace = with_host(trace, factor)
        # of the plan that ran, with what is known now
        simulated_seconds = self._predict(trace, self._schedule, self.hardware()).seconds
        self.pace.hear(simulated_seconds)
        if self._given is not None:
            return False
        try:
            found = self._find_plan(trace)
        except BudgetError:
            found = None
        if found is not None and check_schedule(trace, found.schedule) > self._budget_bytes:
            # The step is through and its plan fits: a planner that now minds no budget is no reason to fail.
            self._setting.fallbacks["planned again for the host, above the budget: the plan before stays"] += 1
            found = None
        most_seconds = simulated_seconds * _WORTH_ANOTHER
        if found is None or simulate(trace, found.schedule, found.hardware).seconds > most_seconds:
            self._map_arena_again()  # the search gave it back
            return False
        ran = self._found
        self._adopt(trace, found)
        self._before = (ran, seconds) if ran is not None else None
        self.calibrations = 0
        return True
