"""What is known about a program whose inputs vary: the ways in which its model is called, the op sequences behind them,
and the plans of each, by size."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from legroom.ir import Trace
from legroom.ladder import MOST_RUNGS, Features, Ladder, Shelf, covers, rounded_up
from legroom.peaks import Peaks
from legroom.plan import Plan
from legroom.planners.responsive import Responsive
from legroom.runtime.calls import Lesson
from legroom.runtime.inputs import Call
from legroom.runtime.knownsizes import Proof
from legroom.runtime.program import Program
from legroom.runtime.recorder import Outline
from legroom.schedule import Schedule
from legroom.sizes import Numbers, SizeModel, with_numbers

# Plans are for sizes rounded up to one of so many an octave; half as many where so many plans had to go for others.
# With two dimensions of four octaves, eight are 1,000 plans: all but the last 128 would be made again and again, and
# most inputs be served by one that is much too large.
FINEST, COARSER = 8, (1, MOST_RUNGS, 4 * MOST_RUNGS)
MOST_COURSES = 4  # op sequences behind one way of calling. Beyond, what served the fewest steps is forgotten.
MOST_DRIFTS = 3  # of a way that has no step that repeats: two of them may be one change for good
MOST_STRAYED = 32
REMEMBERED_PEAKS = 4096
AT_ONCE = "responsive"  # the planner whose plans are replaced


class Recorded(NamedTuple):
    """A recorded step that began with a call of the model."""

    call: Call
    trace: Trace
    alive_bytes: int  # before it
    peak_bytes: int  # measured
    outline: Outline | None  # None: where the next one is the same, it has to be proven again
    proven: bool  # every op, at this size


@dataclass(frozen=True, slots=True)
class Rung:
    """A plan for one size, ready to run. A trace of a large model is tens of thousands of objects, which every full
    collection of garbage goes through: of its own a plan has the storages, and numbers for the rest."""

    template: Trace  # of the structure
    numbers: Numbers
    plan: Plan
    schedule: Schedule
    program: Program
    peak_bytes: int
    peaks: Peaks  # at other sizes

    def trace(self) -> Trace:
        """The step that it is for, put together anew."""
        return with_numbers(self.template, self.numbers)


@dataclass(slots=True)
class Course:
    """One op sequence, at all sizes."""

    structure: str
    model: SizeModel
    base_bytes: int  # alive before the call beside its inputs, when it was recorded
    low: Features  # the smallest and the largest of each feature that was met
    high: Features
    responsive: Responsive | None = None  # from the first plan on
    ladder: Ladder[Rung] = field(default_factory=lambda: Ladder(most=MOST_RUNGS))
    asked: set[Features] = field(default_factory=set)  # of the planner, done or not
    planned: int = 0
    refuses: bool = True  # whether its floor is one
    recorded: set[Features] = field(default_factory=set)  # sizes at which every op was proven
    ran: deque[Features] = field(default_factory=lambda: deque(maxlen=MOST_RUNGS))  # sizes that were seen to fit
    strayed: deque[Features] = field(default_factory=lambda: deque(maxlen=MOST_STRAYED))  # sizes of steps that drifted
    # By the plan's size and the input's; by the input's and () where everything is kept.
    peaks: dict[tuple[Features, Features], int] = field(default_factory=dict)
    version: int = 0  # plans of another one were made from what is no longer believed
    proven: dict[Features, set[Proof]] = field(default_factory=dict)  # by size, what was seen to give the same bits
    outline: Outline | None = None  # of its ops, so that they need not be proven at every size that is recorded
    lesson: Lesson | None = None  # of its calls, from the first planned step that could be learned from
    recipes: WeakKeyDictionary[Program, Mapping[int, int]] = field(default_factory=WeakKeyDictionary)
    numbers: dict[object, int] = field(default_factory=dict)  # of recipes
    all_hooks: bool = False  # whether all that is saved is looked at, whatever the samples say of sizes

    @property
    def an_octave(self) -> int:
        """How many sizes."""
        return FINEST >> sum(self.ladder.evicted >= evicted for evicted in COARSER)

    def goal(self, features: Features, edge: Features, rung: Rung) -> Features | None:
        """The sizes for which to ask for a plan in place of this one; None where one was asked for, or this is good
        enough: for an input that is not much larger in any dimension, and not made at once."""
        goal = self.edge_for(features)
        if goal in self.asked or features in self.asked:
            return None
        loose = any(e > f + f / self.an_octave for e, f in zip(edge, features, strict=True))
        return goal if loose or rung.plan.planner == AT_ONCE else None

    def forget_plans(self) -> None:
        self.version += 1
        self.ladder.clear()
        self.asked.clear()
        self.peaks.clear()

    def improve(self, edge: Features, rung: Rung) -> None:
        """Put a plan in the place of those that were made at once for sizes that it is for."""
        for other, made in self.ladder:
            alike = covers(edge, other) and self.edge_for(other) == self.edge_for(edge)
            if made.plan.planner == AT_ONCE and alike:
                self.ladder.remove(other)
                self._forget_peaks({other})
        self.put(edge, rung)

    def put(self, edge: Features, rung: Rung) -> None:
        gone = self.ladder.add(edge, rung)
        self._forget_peaks({edge, *gone})
        if self.an_octave > 1:  # else there are too many sizes for it ever to end
            self.asked.difference_update(gone)  # may be asked for again

    def _forget_peaks(self, edges: Set[Features]) -> None:
        """Another plan for the same size takes other amounts at smaller ones."""
        self.peaks = {key: nbytes for key, nbytes in self.peaks.items() if key[0] not in edges}

    def remember_peak(self, key: tuple[Features, Features], nbytes: int) -> None:
        if len(self.peaks) >= REMEMBERED_PEAKS:
            self.peaks.clear()
        self.peaks[key] = nbytes

    def met(self, features: Features) -> None:
        self.low = tuple(map(min, self.low, features))
        self.high = tuple(map(max, self.high, features))

    def edge_for(self, features: Features) -> Features:
        """The sizes rounded up, of those that vary."""
        moving = [low != high for low, high in zip(self.low, self.high, strict=True)]
        steps = self.an_octave
        return tuple(rounded_up(f, steps) if moves else f for f, moves in zip(features, moving, strict=True))


@dataclass(slots=True)
class Way:
    """One way in which the model is called, sizes apart."""

    courses: Shelf[str, Course] = field(default_factory=lambda: Shelf(most=MOST_COURSES))
    course: Course | None = None  # the one that ran last
    steps: int = 0
    sheltered: int = 0
    drifts: deque[int] = field(default_factory=lambda: deque(maxlen=MOST_DRIFTS))
    again: int = 0  # recorded steps that were like some that drifted
    turned: tuple[str, int] = ("", -1)  # the op sequence that a step turned out to be, and when
    reactive_until: int = 0
    # Sizes that a sheltered step could not bring inside, and what was alive before it.
    refused: list[tuple[Features, int]] = field(default_factory=list)
    # Sizes at which one was inside, what was alive before it, and its peak.
    fitted: deque[tuple[Features, int, int]] = field(default_factory=lambda: deque(maxlen=MOST_RUNGS))

    def others(self, course: Course) -> list[Course]:
        return [other for other in self.courses if other is not course]

    def turn(self, course: Course) -> None:
        """A step was of this op sequence. Once it may be an odd one among others; twice in a row, and more follow."""
        if course is not self.course:
            if self.turned == (course.structure, self.steps - 1):
                self.course = course
            self.turned = course.structure, self.steps
