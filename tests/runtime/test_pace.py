"""What the first steps of a plan say about how long the next will take."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from legroom.runtime.pace import TIMED_STEPS, Pace


@dataclass(frozen=True)
class Moment:
    seconds: float
    clock: Clock

    def seconds_since(self, earlier: Moment) -> float | None:
        return self.seconds - earlier.seconds if self.clock.reached >= self.seconds else None


class Clock:
    """A device whose own time is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reached = 0.0

    def stamp(self) -> Moment:
        return Moment(self.now, self)


def run(pace: Pace, clock: Clock, seconds: list[float]) -> None:
    for each in seconds:
        pace.begin(clock)  # type: ignore[arg-type]
        clock.now += each
        pace.end(clock)  # type: ignore[arg-type]
        clock.now += 1.0  # between steps


def test_the_median_of_the_timed_steps_counts() -> None:
    pace, clock = Pace(), Clock()
    run(pace, clock, [0.11] * (TIMED_STEPS - 2) + [0.9, 0.01] + [5.0] * 10)
    clock.reached = clock.now
    pace.hear(0.1)
    assert pace.factor == pytest.approx(1.1)


def test_what_has_not_arrived_is_waited_for_by_nobody() -> None:
    pace, clock = Pace(), Clock()
    run(pace, clock, [0.12] * TIMED_STEPS)
    clock.reached = 2.0
    pace.hear(0.1)
    assert pace.factor == 1.0
    clock.reached = clock.now
    pace.hear(0.1)
    assert pace.factor == pytest.approx(1.2)


def test_a_new_plan_is_timed_anew() -> None:
    pace, clock = Pace(), Clock()
    run(pace, clock, [0.12] * TIMED_STEPS)
    clock.reached = clock.now
    pace.hear(0.1)
    pace.new_plan()
    assert pace.factor == pytest.approx(1.2)
    run(pace, clock, [0.3] * TIMED_STEPS)
    clock.reached = clock.now
    pace.hear(0.2)
    assert pace.factor == pytest.approx(1.5)


def test_nonsense_is_bounded() -> None:
    pace, clock = Pace(), Clock()
    run(pace, clock, [100.0] * TIMED_STEPS)
    clock.reached = clock.now
    pace.hear(0.0)
    assert pace.factor == 1.0
    pace.hear(0.1)
    assert pace.factor == 3.0
