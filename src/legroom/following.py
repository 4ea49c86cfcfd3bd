"""Plans that follow the input: a size model and a ladder of plans for each way in which the model is called.

A few sheltered steps at different sizes teach how every tensor grows with the input. From then on a step finds its plan
by the sizes that the model is called with: the nearest larger one on the ladder, or, above all of them, one that is
made at once by the responsive greedy. The room's planner makes better ones in the background, for sizes rounded up;
they are taken up between steps.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from legroom.alloclog import profiler_is_free
from legroom.beside import Beside
from legroom.courses import AT_ONCE, MOST_COURSES, MOST_DRIFTS, MOST_STRAYED, Course, Recorded, Rung, Way
from legroom.errors import BudgetError
from legroom.evaluate import floor_bytes
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.ladder import Features, Shelf, covers
from legroom.peaks import Peaks
from legroom.plan import Plan, checked, signature
from legroom.planners import Planner, quick
from legroom.planners.responsive import Responsive
from legroom.report import Followed, FollowedStep
from legroom.runtime.called import CalledStep, Decided, LeftAlone, ReactiveStep
from legroom.runtime.calls import Lesson
from legroom.runtime.inputs import Call, InputWatch, Signature, call_of, remarks
from legroom.runtime.knownsizes import KnownAt, KnownSizes, Proof
from legroom.runtime.program import Program
from legroom.runtime.recorder import Outline
from legroom.runtime.steps import PlannedStep, Setting, ShelteredStep
from legroom.schedule import Schedule, SwapOut, lower, memory_curve
from legroom.sizes import Numbers, SizeModel, structure_of, with_numbers
from legroom.strays import foreseen
from legroom.units import format_bytes

MOST_WAYS = 16  # of calling the model. Beyond, what served the fewest steps is forgotten.
MOST_SHELTERED = 10  # steps for one op sequence
STEPS_A_LESSON = 64  # once they are spent, one step in so many is recorded while its op sequence is not known
# Of a course, the first ones are measured, and then ever fewer: to count all tensors and read the allocator's log takes
# as long as several steps.
MEASURED_STEPS = 2
CHECKS = frozenset(4**power for power in range(3, 20))
# A program that drifts this often within so many steps has no step that repeats: no plan is tried for a while.
DRIFTS, DRIFT_WINDOW_STEPS, REACTIVE_STEPS = 2, 8, 32
CERTAIN = 1.05  # of the budget: only what is predicted to need more is refused without being tried
MOST_RELIEFS = 4  # steps for which something had to go beside the plan, until plans are made for less
GROWN = 1.01  # of what a plan is to take at most
LESS = 0.97  # of what a plan was to take under which a step ran out of memory: what the next one may
ROOMY = 0.95  # of the budget: a step that stays below with everything kept is left alone where a cap watches over it
# Of the budget: where a reactive step stayed below, one that is no larger is not held against it. Such steps go one way
# and then another: with four times as much it is still inside.
FREE_SHARE = 0.25
REMEMBERED_STEPS = 4096
REMEMBERED_SIZES = 512  # at which replays of a plan were proven; beyond, they are proven again


class Following:
    """Decides about every step when the model is called, and learns from what came of it."""

    def __init__(
        self,
        setting: Setting,
        budget_bytes: int,
        usable_bytes: Callable[[], int],
        planner: Planner,
        priced: bool,
        hardware: Callable[[], Hardware],
    ) -> None:
        """priced: the planner takes less than it may, so that keeping everything is not the end of it."""
        self._setting = setting
        self._budget_bytes = budget_bytes
        self._usable_bytes = usable_bytes
        self._priced = priced
        self._hardware = hardware
        self._device = setting.ledger.device
        self._ways: Shelf[object, Way] = Shelf(most=MOST_WAYS)
        self._hits = self._misses = 0  # steps that found their plan, and those that did not
        self._evicted = 0  # ways, courses and the plans of those; what ladders at hand evict they count themselves
        self._may_idle = self._device.has_cap
        self._most_bytes = budget_bytes  # that any plan may take, whatever it leaves in reserve
        self._reliefs = 0  # steps since that was last lowered for which something had to go beside the plan
        self._known_sizes = KnownSizes()
        # Plans are many, and made while the program trains.
        self._beside = Beside(quick(planner), setting.fallbacks, apart=self._device.plans_apart)
        # Of ops that were proven before sizes were seen to vary, and in which way the model was called.
        self.outline: tuple[object, Outline] | None = None
        self._arrived: deque[tuple[Course, int, Features, Rung]] = deque()
        # of the step that runs
        self._call: Call | None = None
        self._way: Way | None = None
        self._course: Course | None = None  # where a plan is followed, the one that it is for
        self._stays: Course | None = None  # the one that others go on with, whatever this step is
        self._alive_bytes = 0
        self._more_bytes = 0  # alive beside what its plan knows of
        self._planning_seconds = 0.0
        self._instead: dict[int, tuple[Course, Rung]] = {}  # by program, what the step may turn out to be
        self.rung: Rung | None = None  # the last one that ran
        self._rows: deque[FollowedStep] = deque(maxlen=REMEMBERED_STEPS)

    def step(self, watch: InputWatch) -> CalledStep:
        self._call = self._way = self._course = self._stays = None
        self._planning_seconds = 0.0
        while self._arrived:
            course, version, edge, rung = self._arrived.popleft()
            # Steps that were measured meanwhile may have shown that it takes more.
            if version == course.version and self._now(course, edge, rung) <= self._budget_bytes:
                course.improve(edge, rung)
        return CalledStep(self._setting, watch, self._decide)

    def close(self) -> None:
        self._beside.close()

    def settle(self) -> None:
        """Wait for what is planned in the background."""
        self._beside.settle()

    # before

    def _decide(self, signature_: Signature, others: bool) -> Decided:
        began = time.perf_counter()
        try:
            hits = self._hits
            decided = self._chosen(call_of(signature_, self._setting.device_type), others)
            self._misses += self._hits == hits
            return decided
        finally:
            self._planning_seconds = time.perf_counter() - began

    def _chosen(self, call: Call, others: bool) -> Decided:
        fallbacks = self._setting.fallbacks
        if call.free or call.unknown:
            fallbacks.update(remarks(call))
        way = self._way_of(call)
        way.steps += 1
        self._call, self._way = call, way
        self._alive_bytes = self._setting.alive_bytes()
        if others or not call.features:
            why = "another dispatch mode is on" if others else "no tensor among the inputs"
            fallbacks[f"{why}: the step ran under the reactive policy"] += 1
            return self._reactive(call, way)
        course = way.course
        if way.steps <= way.reactive_until:
            return self._reactive(call, way)
        if course is None or not course.model.knows(call.features):
            if course is None or course.model.wants_more():
                return self._unknown(call, way)
            fallbacks["sizes that cannot be told from the input: the step ran under the reactive policy"] += 1
            return self._reactive(call, way)
        if course.strayed:
            other = foreseen(call.features, course, way.others(course))
            if other is None and way.again < MOST_SHELTERED * max(1, len(way.courses) - 1) and profiler_is_free():
                way.again += 1
                self._stays = course
                return self._recorded_step(call, way)
            if other is not None and other is not course:
                with contextlib.suppress(BudgetError):  # a guess: nothing is refused for it
                    return self._planned(call, way, other)
        return self._planned(call, way, course)

    def _way_of(self, call: Call) -> Way:
        way = self._ways.get(call.kind)
        if way is None:
            way = Way()
            gone = self._ways.add(call.kind, way)
            if gone is not None:
                self._setting.fallbacks["called in too many ways: what was learned of one was forgotten"] += 1
                self._evicted += 1 + sum(1 + course.ladder.evicted for course in gone.courses)
        return way

    def _check_not_refused(self, call: Call, way: Way) -> None:
        """Before a step without a plan: one that was no larger may have been tried, and did not fit."""
        for features, alive in way.refused if call.tells_all else ():
            if covers(call.features, features) and self._alive_bytes >= alive:
                raise too_large(call.features, 0, self._budget_bytes)

    def _reactive(self, call: Call, way: Way) -> Decided:
        """Nothing watches over such a step where there is no cap: it is held against the budget, which takes a count of
        all tensors and a copy of all that it writes, unless one that was no smaller left much of the budget free."""
        self._check_not_refused(call, way)
        most = self._budget_bytes * FREE_SHARE
        roomy = call.tells_all and any(
            covers(features, call.features) and peak + max(0, self._alive_bytes - alive) <= most
            for features, alive, peak in way.fitted
        )
        return ShelteredStep(self._setting, proving=False, trusting=False, recording=False, refusable=not roomy)

    def _unknown(self, call: Call, way: Way) -> Decided:
        self._check_not_refused(call, way)
        most = MOST_SHELTERED * max(1, len(way.courses))
        if way.course is None:
            most += way.steps // STEPS_A_LESSON
        if way.sheltered < most and profiler_is_free():
            way.sheltered += 1
            return self._recorded_step(call, way)
        self._setting.fallbacks["not known, and recorded often enough: the step ran under the reactive policy"] += 1
        return self._reactive(call, way)

    def _recorded_step(self, call: Call, way: Way) -> ShelteredStep:
        outlines = [course.outline for course in way.courses if course.outline is not None]
        if not way.courses and self.outline is not None and self.outline[0] == call.kind:
            outlines = [self.outline[1]]
        # What one size asks of the allocator, block by block, says nothing of others.
        return ShelteredStep(self._setting, proving=True, trusting=True, blocks=False, outlines=outlines)

    def _planned(self, call: Call, way: Way, course: Course) -> Decided:
        more_bytes = max(0, self._alive_bytes - call.input_bytes - course.base_bytes)
        features, self._course, self._more_bytes = call.features, course, more_bytes
        found = course.ladder.find(features)
        if (found is None or not found[1].program.idle) and self._needs_no_plan(call, course, more_bytes):
            self._hits += 1
            self._ways.served(call.kind)
            way.courses.served(course.structure)
            self.rung = None
            return LeftAlone()
        if found is not None and self._peak(course, features, *found) + more_bytes <= self._budget_bytes:
            edge, rung = found
            self._hits += 1
        else:
            made = self._for_all_met(course, features, more_bytes) if found is None else None
            if made is None:
                exact = self._made_at_once(course, features, more_bytes)
                if exact is None:
                    return self._unknown(call, way)
                made = features, exact
            edge, rung = made
            course.put(edge, rung)
        self._ways.served(call.kind)
        way.courses.served(course.structure)
        every = len(way.courses) > 1 or not call.tells_all or course.all_hooks
        self._ask_for_better(course, features, edge, rung, every=every)
        self.rung = rung
        roomy = rung.peak_bytes + more_bytes <= self._roomy_bytes()
        if rung.program.idle and self._may_idle and call.tells_all and roomy:
            return LeftAlone()
        self._teach(rung.program, course.lesson, every=every)
        known_at = rung.program.known_at(self._known_sizes, features)
        new = self._unproven(course, features, rung.program, known_at)
        checks = new or rung.program.one_replayed(course.planned)
        measure = course.planned < MEASURED_STEPS or course.planned in CHECKS

        instead: dict[int, tuple[Course, Rung]] = {}
        self._instead = instead  # its own: the graph of a step before may be gone through in this one

        def others() -> list[Program]:
            instead.update(self._others(call, way, course))
            return [other.program for _, other in instead.values()]

        late = self._setting.habits.goes_on_after_optimizer  # then the outcome would come too late
        return PlannedStep(
            self._setting,
            rung.program,
            checks=checks,
            wait=bool(new) and late,
            due=bool(new) and not late and self._device.answers_later,
            measure=measure,
            known_at=known_at,
            others=others,
            at_backward=partial(self._look_at_level, course, rung, more_bytes) if rung.program.few_ticks else None,
        )

    def _look_at_level(self, course: Course, rung: Rung, more_bytes: int) -> None:
        """Where hooks are left out, a program that saves more than it did at this size is not seen to. It shows in what
        is alive; from then on all that is saved is looked at."""
        alive = self._device.alive_bytes()
        most = (rung.peak_bytes + more_bytes + course.model.reserve_bytes()) * GROWN
        if alive is not None and alive > most and not course.all_hooks:
            course.all_hooks = True
            self._setting.fallbacks["more was saved than at this size before: all of it is looked at from now on"] += 1

    def _teach(self, program: Program, lesson: Lesson | None, *, every: bool) -> None:
        """What was learned of the calls at another size. every: hook is needed, for the step may turn out to be another
        one that is known, which shows by what is saved."""
        few = self._device.leaves_hooks_out and not every
        if program.few_ticks is not None and not few and program.lesson is not None:
            program.learn(program.lesson, {}, may_leave_hooks_out=False)
        elif lesson is not None and program.learns and not program.learns_itself:
            program.learn(lesson, {}, may_leave_hooks_out=few)

    def _unproven(
        self, course: Course, features: Features, program: Program, known_at: KnownAt | None
    ) -> frozenset[int]:
        """What to hold against the real bytes: ops were proven at other sizes, and may take other ways at this one, or
        be told wrong from others."""
        proofs = self._proofs(course, program, known_at)
        proven = course.proven.get(features, set())
        if proven.issuperset(proofs.values()):
            return frozenset()
        seen = features in course.recorded
        return frozenset(s for s, proof in proofs.items() if proof not in proven and (proof[1] or not seen))

    def _proofs(self, course: Course, program: Program, known_at: KnownAt | None) -> Mapping[int, Proof]:
        """Of each storage that a program makes again, what says in which way it does at this size."""
        recipes = course.recipes.get(program)
        if recipes is None:
            numbers = course.numbers
            recipes = {s: numbers.setdefault((s, times), len(numbers)) for s, times in program.recipes.items()}
            course.recipes[program] = recipes
        if known_at is None:
            return {storage: (recipe, ()) for storage, recipe in recipes.items()}
        if known_at.proofs is None:
            known_at.proofs = {s: (recipe, program.told_by(s, known_at)) for s, recipe in recipes.items()}
        return known_at.proofs

    def _others(self, call: Call, way: Way, course: Course) -> dict[int, tuple[Course, Rung]]:
        """Plans of other op sequences for the step that runs: asked for when it is not the one that was expected."""
        known: dict[int, tuple[Course, Rung]] = {}
        for other in way.others(course):
            if not other.model.knows(call.features):
                continue
            more = max(0, self._alive_bytes - call.input_bytes - other.base_bytes)
            found = other.ladder.find(call.features)
            if found is not None and self._peak(other, call.features, *found) + more <= self._budget_bytes:
                known[id(found[1].program)] = other, found[1]
                continue
            try:
                made = self._made_at_once(other, call.features, more)
            except BudgetError:
                continue
            if made is not None:
                other.put(call.features, made)
                known[id(made.program)] = other, made
        return known

    def _needs_no_plan(self, call: Call, course: Course, more_bytes: int) -> bool:
        """Whether the step stays well below the budget as it is, and a cap watches over it."""
        if not self._may_idle or not call.tells_all or self._priced:
            return False
        peak = course.peaks.get((call.features, ()))
        if peak is None:
            numbers = course.model.predict(call.features, timed=False)
            peak = max(numbers.head_peak_bytes, int(numbers.peak_bytes.max(initial=0)))
            course.remember_peak((call.features, ()), peak)
        return peak + course.model.reserve_bytes() + more_bytes <= self._roomy_bytes()

    def _roomy_bytes(self) -> float:
        """What a step may take that nothing watches over: what it has in pieces is for nobody to arrange."""
        return min(self._budget_bytes * ROOMY, self._usable_bytes())

    def _for_all_met(self, course: Course, features: Features, more_bytes: int) -> tuple[Features, Rung] | None:
        """A plan for the largest input so far: it serves all others until better ones are made in the background.

        To lay out a plan takes 20 milliseconds and more, and where several dimensions vary, many an input is larger
        than those before in one of them.
        """
        largest = course.edge_for(tuple(map(max, course.high, features)))
        if largest == features or not course.model.knows(largest):
            return None
        try:
            rung = self._made_at_once(course, largest, more_bytes)
        except BudgetError:
            return None
        if rung is None or self._now(course, features, rung) + more_bytes > self._budget_bytes:
            return None
        return largest, rung

    def _made_at_once(self, course: Course, features: Features, more_bytes: int) -> Rung | None:
        numbers = course.model.predict(features)
        reserve = course.model.reserve_bytes()
        # Near the floor a plan without anything in reserve is better than none, and one with a little better than that.
        usable, budget = self._usable_bytes(), self._budget_bytes
        for most in dict.fromkeys((usable - reserve, usable, (usable + budget) // 2, budget)):
            target = min(most, self._most_bytes) - more_bytes
            decisions = self._responsive(course).decide(numbers, target)
            if decisions is not None:
                trace = with_numbers(course.model.template, numbers)
                plan = Plan(decisions, signature(trace), AT_ONCE, target, 0, 0.0, ())
                sure = course.model.sizes_are_sure()
                return self._laid_out(course.model.template, numbers, trace, plan, reserve, sizes_fit=sure)
        floor = floor_bytes(with_numbers(course.model.template, numbers)) + more_bytes
        ran = any(covers(other, features) for other in course.ran)
        if course.refuses and floor - reserve > self._budget_bytes * CERTAIN and not ran:
            raise too_large(features, floor, self._budget_bytes)
        return None

    def _peak(self, course: Course, features: Features, edge: Features, rung: Rung) -> int:
        """Of a plan for a larger input, at this one: where something falls as the input grows, it may be the more."""
        if edge == features:
            return rung.peak_bytes
        peak = course.peaks.get((edge, features))
        if peak is None:
            peak = self._now(course, features, rung)
            course.remember_peak((edge, features), peak)
        return peak

    def _now(self, course: Course, features: Features, rung: Rung) -> int:
        """The peak at this input with what is known by now."""
        return rung.peaks.at(course.model.predict(features, timed=False)) + course.model.reserve_bytes()

    def _laid_out(
        self,
        template: Trace,
        numbers: Numbers,
        trace: Trace,
        plan: Plan,
        reserve_bytes: int,
        schedule: Schedule | None = None,
        *,
        sizes_fit: bool,
    ) -> Rung:
        """trace: the template with the numbers."""
        if schedule is None:
            schedule = lower(trace, plan, self._hardware())
        curve = memory_curve(trace, schedule)
        peak = max((trace.head_peak_bytes, *(peak for _, _, peak in curve)))
        # What a program asks of ops and ticks is the same at all sizes, and so they are shared.
        shared = replace(trace, ops=template.ops, ticks=template.ticks)
        room = (curve, self._budget_bytes) if self._device.has_cap else None
        program = Program(shared, schedule, reserve_bytes=reserve_bytes, sizes_fit=sizes_fit, room=room)
        swapped = {i.storage for i in schedule.instructions if isinstance(i, SwapOut)}
        self._device.prepare([trace.storages[storage].nbytes for storage in swapped])
        return Rung(template, numbers, plan, schedule, program, peak, Peaks(trace, schedule))

    # in the background

    def _ask_for_better(self, course: Course, features: Features, edge: Features, rung: Rung, *, every: bool) -> None:
        model, goal = course.model, course.goal(features, edge, rung)
        if (rung.program.idle and not self._priced) or goal is None:
            return
        sizes = [size for size in dict.fromkeys((goal, features)) if model.knows(size)]
        course.asked.add(sizes[0])
        template, reserve, sure = model.template, model.reserve_bytes(), model.sizes_are_sure()
        at = [(size, model.predicting(size)) for size in sizes]
        target, version = min(self._usable_bytes() - reserve, self._most_bytes), course.version

        def improve() -> None:
            for size, predicted in at:
                if version != course.version:
                    return  # while this waited, what it was asked from became doubtful: it would not be taken up
                numbers = predicted(True)
                trace = with_numbers(template, numbers)
                try:
                    plan, schedule = self._beside.plan(trace, self._hardware(), target, like=(template, numbers))
                except BudgetError:
                    continue  # not at the size rounded up; perhaps at this very one
                plan = checked(trace, plan)
                rung = self._laid_out(template, numbers, trace, plan, reserve, schedule, sizes_fit=sure)
                if rung.peak_bytes > self._budget_bytes - reserve:
                    raise over_target(plan.planner, size, rung.peak_bytes + reserve, self._budget_bytes)
                self._teach(rung.program, course.lesson, every=every)
                rung.program.prepare_proofs()
                self._arrived.append((course, version, size, rung))
                return

        self._beside.ask(improve)

    # afterwards

    def learn(self, recorded: Recorded) -> None:
        call, trace = recorded.call, recorded.trace
        way = self._way_of(call)
        structure = structure_of(trace)
        course = way.courses.get(structure)
        if course is not None and course is self._stays:
            # Not one that strays, and of a size that was known: what is planned stays.
            course.ran.append(call.features)
            course.strayed = deque((size for size in course.strayed if size != call.features), MOST_STRAYED)
            return
        base = recorded.alive_bytes - call.input_bytes
        if course is None:
            model = SizeModel(granularity_bytes=self._device.rounded(1))
            model.add(call.features, trace)
            course = Course(structure, model, base, call.features, call.features, outline=recorded.outline)
            gone = way.courses.add(structure, course)
            if gone is not None:
                self._setting.fallbacks["too many op sequences: what was learned of one was forgotten"] += 1
                self._evicted += 1 + gone.ladder.evicted
                self._stays = self._stays if gone is not self._stays else None
        else:
            before = course.model.template
            course.model.add(call.features, trace)
            course.base_bytes = max(course.base_bytes, base)
            course.met(call.features)
            if course.model.template != before:
                course.responsive = None
            course.forget_plans()
        # Where backward runs after the step, the trace does not show that what was saved could be away.
        course.refuses = course.refuses and floor_bytes(trace) <= recorded.peak_bytes * CERTAIN
        if recorded.proven:
            course.recorded.add(call.features)
        course.ran.append(call.features)
        way.course = self._stays or course

    def _responsive(self, course: Course) -> Responsive:
        """Made for the first plan: the steps before it teach one after the other, and each would take it back."""
        if course.responsive is None:
            template, hardware = course.model.template, self._hardware()
            first = course.responsive = Responsive(template, hardware, thorough=False)

            def make() -> None:
                """Small budgets need a better way down, which takes a second or two to find."""
                if course.responsive is first:
                    better = Responsive(template, hardware)
                    if course.responsive is first:
                        course.responsive = better

            self._beside.ask(make)
        return course.responsive

    def ended(self, run: CalledStep, seconds: float) -> None:
        inner, call, way = run.inner, self._call, self._way
        measured = inner.curve.measured_peak_bytes if inner is not None and inner.curve is not None else 0
        if call is None or way is None or inner is None:
            return
        row = FollowedStep(call.features, _name(inner), seconds, self._planning_seconds, measured, 0)
        if self.rung is not None and isinstance(inner, PlannedStep | LeftAlone):
            row = replace(row, planner=self.rung.plan.planner, plan_peak_bytes=self.rung.peak_bytes)
        self._rows.append(row)
        if isinstance(inner, ShelteredStep) and 0 < measured <= self._budget_bytes:
            way.fitted.append((call.features, self._alive_bytes, measured))
        course = self._course
        if course is None or not isinstance(inner, PlannedStep):
            return
        if inner.drifted:
            inner.executor.program.learn_anew()
            if measured > self._budget_bytes:
                self._setting.fallbacks["a step that left its plan took more than the budget"] += 1
            # Another op sequence, or sizes that were not foreseen. Once may be an odd step among others; twice in a row
            # it has to be looked at again.
            if way.drifts and way.drifts[-1] == way.steps - 1:
                way.course = None
            way.drifts.append(way.steps)
            course.strayed.append(call.features)
            if len(way.drifts) == MOST_DRIFTS and way.drifts[-1] - way.drifts[0] <= DRIFT_WINDOW_STEPS:
                way.reactive_until = way.steps + REACTIVE_STEPS
                self._setting.fallbacks["the step keeps changing: under the reactive policy for a while"] += 1
            return
        if inner.executor.switched:
            self._course, self.rung = self._instead[id(inner.executor.program)]
            course = self._course
            course.met(call.features)
            course.ran.append(call.features)
            way.courses.served(course.structure)
            way.turn(course)
            self._rows[-1] = replace(row, planner=self.rung.plan.planner, plan_peak_bytes=self.rung.peak_bytes)
            return
        way.turn(course)
        course.planned += 1
        course.met(call.features)
        course.ran.append(call.features)
        course.lesson = course.lesson or inner.executor.program.lesson
        program = inner.executor.program
        if inner.executor.met_other_calls():
            program.learn_anew()
        if inner.executor.checks.replayed:
            if len(course.proven) >= REMEMBERED_SIZES:
                course.proven.clear()
            proofs = self._proofs(course, program, inner.known_at)
            proven = course.proven.setdefault(call.features, set())
            for storage, times in inner.executor.checks.replayed.items():
                if times >= len(program.recipes[storage]):
                    proven.add(proofs[storage])
        if inner.executor.refused and self.rung is not None:
            self._reliefs += 1
            if self._reliefs == MOST_RELIEFS:
                self._setting.fallbacks["memory was in pieces: planned again for less"] += 1
                self._take_less_than(self.rung)
                self.forget_plans()
        # Where something went beside the plan, to make room, it is not the plan's own curve.
        if inner.curve is not None and self.rung is not None and not inner.executor.refused:
            segments = inner.curve.segments[1:]
            # Going through the graph of another step meanwhile has ticks of its own in the log.
            if len(segments) == len(course.model.template.ticks):
                trace = with_numbers(course.model.template, course.model.predict(call.features))
                schedule = replace(self.rung.schedule, trace_signature=signature(trace))
                predicted = np.array([peak for *_, peak in memory_curve(trace, schedule)], np.int64)
                seen = np.array([segment.measured_peak_bytes for segment in segments], np.int64)
                self._more_than_foretold(course, course.model.heard(call.features, seen - predicted))
                self._rows[-1] = replace(row, predicted_bytes=int(predicted.max(initial=trace.head_peak_bytes)))
            if measured > self._budget_bytes:
                self._setting.fallbacks["a planned step took more than the budget: planned again"] += 1
                self.forget_plans()

    def _more_than_foretold(self, course: Course, rise_bytes: int) -> None:
        """Plans that the rise takes over the budget are made again."""
        if rise_bytes:
            course.peaks.clear()
            for edge, rung in course.ladder:
                if rung.peak_bytes + rise_bytes > self._budget_bytes:
                    course.ladder.remove(edge)
                    course.asked.discard(edge)

    def refused(self, run: ShelteredStep) -> None:
        """The sheltered step that just ended did not fit, and was taken back."""
        # Of one that was recorded on the side, nothing follows for others.
        if self._way is not None and self._call is not None and self._stays is None:
            self._way.sheltered -= run.recording
            refused = self._call.features, self._alive_bytes
            self._way.refused = [*self._way.refused, refused][-MOST_COURSES:]

    def ran_out(self, inner: Decided | None) -> None:
        """A planned step ran out of memory: plan for less from now on."""
        if isinstance(inner, LeftAlone):
            self._may_idle = False
        elif self._course is not None:
            self._course.all_hooks = True  # what is saved may be more than it was
            if self.rung is not None:
                self._take_less_than(self.rung)
        self.forget_plans()

    def _take_less_than(self, rung: Rung) -> None:
        """Of plans that are made from now on."""
        # Near the floor plans go beyond what is usable, and without this the same one would be made again.
        self._most_bytes = min(self._most_bytes, int((rung.peak_bytes + self._more_bytes) * LESS))
        self._reliefs = 0

    def forget_plans(self) -> None:
        self._known_sizes.clear()
        for way in self._ways:
            for course in way.courses:
                course.forget_plans()

    def forget(self) -> None:
        """An op gave other bits when it was replayed: what was learned took it for replayable."""
        self.forget_plans()
        self._ways.clear()
        self.outline = None

    # report

    def report(self) -> Followed:
        courses = [course for way in self._ways for course in way.courses]
        planning = sorted(row.planning_seconds for row in self._rows if row.course == "planned")
        return Followed(
            steps=tuple(self._rows),
            structures=len(courses),
            hits=self._hits,
            misses=self._misses,
            evicted=self._evicted + sum(course.ladder.evicted for course in courses),
            plans=sum(len(course.ladder) for course in courses),
            residual=max((course.model.residual() for course in courses), default=0.0),
            reserve_bytes=max((course.model.reserve_bytes() for course in courses), default=0),
            planning_seconds=planning[len(planning) // 2] if planning else 0.0,
            slow_planning_seconds=planning[int(len(planning) * 0.99)] if planning else 0.0,
        )


def too_large(features: Features, floor: int, budget: int) -> BudgetError:
    sizes = ", ".join(map(str, features))
    needs = format_bytes(floor) if floor else "no less than one that was refused before,"
    return BudgetError(
        f"an input of sizes ({sizes}) needs {needs} even with everything saved moved out, the budget is "
        f"{format_bytes(budget)}. Nothing was changed: skip this batch, cut it, or raise the budget",
        budget_bytes=budget,
        floor_bytes=floor,
    )


def over_target(planner: str, features: Features, peak: int, budget: int) -> BudgetError:
    sizes = ", ".join(map(str, features))
    return BudgetError(
        f"the plan of {planner!r} for an input of sizes ({sizes}) needs {format_bytes(peak)}, the budget is "
        f"{format_bytes(budget)}: not used",
        budget_bytes=budget,
    )


def _name(inner: Decided) -> str:
    match inner:
        case PlannedStep():
            return "planned"
        case ShelteredStep():
            return "sheltered" if inner.recording else "reactive"
        case ReactiveStep():
            return "reactive"
        case LeftAlone():
            return "left alone"
