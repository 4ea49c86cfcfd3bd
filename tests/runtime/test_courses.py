"""How many plans a program whose inputs vary is given, and for which sizes."""

from __future__ import annotations

import random

import pytest

from legroom.courses import FINEST, Course, Rung
from legroom.hardware import PRESETS
from legroom.ladder import MOST_RUNGS, Features
from legroom.peaks import Peaks
from legroom.planners import named
from legroom.runtime.program import Program
from legroom.schedule import lower
from legroom.sizes import SizeModel, numbers_of, structure_of
from tests.pure.test_traces import read

H200 = PRESETS["h200"]


def course_and_rung(low: Features, high: Features) -> tuple[Course, Rung]:
    trace = read("lstm")
    plan = named("auto")(trace, H200, trace.peak_bytes)
    schedule = lower(trace, plan, H200)
    program = Program(trace, schedule, reserve_bytes=0, sizes_fit=True)
    rung = Rung(trace, numbers_of(trace), plan, schedule, program, trace.peak_bytes, Peaks(trace, schedule))
    model = SizeModel(granularity_bytes=H200.granularity_bytes)
    return Course(structure_of(trace), model, 0, low, high), rung


def looseness(course: Course, rung: Rung, features: Features) -> tuple[float, bool]:
    """How much larger the input is that a plan is found for, and whether a better one was asked for. That is there at
    once."""
    found = course.ladder.find(features)
    assert found is not None
    edge, _ = found
    goal = course.goal(features, *found)
    if goal is not None:
        course.asked.add(goal)
        course.improve(goal, rung)
    return max(e / f for e, f in zip(edge, features, strict=True)), goal is not None


@pytest.mark.parametrize(
    ("low", "high"), [((32,), (512,)), ((32, 16), (512, 128)), ((32, 32, 32), (512, 512, 512)), ((32,) * 4, (512,) * 4)]
)
def test_plans_come_to_an_end(low: Features, high: Features) -> None:
    """However many dimensions vary: where there is no room for plans of every size, they are for fewer sizes."""
    course, rung = course_and_rung(low, high)
    course.put(high, rung)
    chance = random.Random(0)
    drawn = [tuple(map(chance.randint, low, high)) for _ in range(6000)]
    seen = [looseness(course, rung, features) for features in drawn]
    assert sum(asked for _, asked in seen) < 8 * MOST_RUNGS
    assert sum(asked for _, asked in seen[-2000:]) < MOST_RUNGS // 2
    if len(high) == 4:
        return  # too many sizes for plans of each: what goes is not made again
    # What is found is no looser than what is asked for, nearly always.
    tight = sum(loose <= 1 + 1 / course.an_octave for loose, _ in seen[-2000:])
    assert tight > 1900


def test_a_few_sizes_get_plans_of_their_own() -> None:
    course, rung = course_and_rung((32, 16), (512, 128))
    course.put((512, 128), rung)
    chance = random.Random(0)
    drawn = [(chance.randint(32, 512), chance.randint(16, 128)) for _ in range(MOST_RUNGS)]
    for features in drawn:
        looseness(course, rung, features)
    assert course.an_octave == FINEST
    for _ in range(2):
        again = [looseness(course, rung, features) for features in drawn]
    assert not any(asked for _, asked in again)
    assert max(loose for loose, _ in again) <= 1 + 1 / FINEST
