"""What the first steps of a plan say about how long the next will take."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from legroom.runtime.pace import MOST_ROUNDS, TIMED_STEPS, Pace


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
        self.drained = False

    def stamp(self) -> Moment:
        return Moment(self.now, self)

    def drain(self) -> None:
        self.drained = True


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


def test_steps_that_still_change_are_timed_again() -> None:
    pace, clock = Pace(), Clock()
    run(pace, clock, [0.15] * (TIMED_STEPS // 2) + [0.13] * (TIMED_STEPS // 2))
    clock.reached = clock.now
    assert not pace.hear(0.1)
    assert pace.factor == 1.0
    run(pace, clock, [0.12] * TIMED_STEPS)
    clock.reached = clock.now
    assert pace.hear(0.1)
    assert pace.factor == pytest.approx(1.2)


def test_what_never_settles_is_taken_as_it_is() -> None:
    pace, clock = Pace(), Clock()
    heard = []
    for _ in range(MOST_ROUNDS):
        run(pace, clock, [0.3] * (TIMED_STEPS // 2) + [0.1] * (TIMED_STEPS // 2))
        clock.reached = clock.now
        heard.append(pace.hear(0.1))
    assert heard == [False] * (MOST_ROUNDS - 1) + [True]
    assert pace.factor == pytest.approx(2.0)
    assert pace.hear(0.1)  # and stays so


def test_steps_that_go_up_and_down_are_timed_again() -> None:
    """The halves are alike, and the median of one round says nothing about the next."""
    pace, clock = Pace(), Clock()
    run(pace, clock, [0.1, 0.14] * (TIMED_STEPS // 2))
    clock.reached = clock.now
    assert not pace.hear(0.1)
    run(pace, clock, [0.14] + [0.1] * (TIMED_STEPS - 1))  # one alone is nothing
    clock.reached = clock.now
    assert pace.hear(0.1)
    assert pace.factor == pytest.approx(1.0)


def test_the_steadiest_round_counts_and_not_one_of_another_plan() -> None:
    pace, clock = Pace(), Clock()
    uneasy, calmer = [0.2, 0.1] * (TIMED_STEPS // 2), [0.12, 0.13] * (TIMED_STEPS // 2)
    for number in range(MOST_ROUNDS):
        run(pace, clock, calmer if number == 1 else uneasy)
        clock.reached = clock.now
        heard = pace.hear(0.1)
    assert heard
    assert pace.factor == pytest.approx(1.25)
    pace.new_plan()
    for _ in range(MOST_ROUNDS):
        run(pace, clock, uneasy)
        clock.reached = clock.now
        heard = pace.hear(0.1)
    assert heard
    assert pace.factor == pytest.approx(1.5)


def test_nonsense_is_bounded() -> None:
    pace, clock = Pace(), Clock()
    run(pace, clock, [100.0] * TIMED_STEPS)
    clock.reached = clock.now
    pace.hear(0.0)
    assert pace.factor == 1.0
    pace.hear(0.1)
    assert pace.factor == 3.0


@pytest.mark.parametrize(
    ("host_seconds", "waits"),
    [(0.06, False), (0.099, False), (0.1, True), (0.13, True)],
)
def test_a_device_that_is_behind_did_not_wait_for_the_host(host_seconds: float, waits: bool) -> None:
    """Steps of 100 ms on the device; the host takes so long for each, and the device waits where it is slower."""
    host, device = 5.0, Clock()
    pace = Pace(lambda: host)
    for _ in range(TIMED_STEPS):
        device.now = max(device.now, host)
        pace.begin(device)  # type: ignore[arg-type]
        for part in (0.3, 0.7):  # forward, backward
            host += part * host_seconds
            device.now = max(device.now + part * 0.1, host)
            pace.mark(device)  # type: ignore[arg-type]
        pace.end(device)  # type: ignore[arg-type]
    device.reached = device.now
    assert device.drained
    assert pace.starved
    assert pace.hear(0.09)
    assert pace.starved is waits


def test_waiting_in_forward_alone_is_waiting() -> None:
    host, device = 0.0, Clock()
    pace = Pace(lambda: host)
    for _ in range(TIMED_STEPS):
        device.now = max(device.now, host)
        pace.begin(device)  # type: ignore[arg-type]
        for on_host, on_device in ((0.05, 0.03), (0.04, 0.05)):
            host += on_host
            device.now = max(device.now + on_device, host)
            pace.mark(device)  # type: ignore[arg-type]
        pace.end(device)  # type: ignore[arg-type]
    device.reached = device.now
    assert pace.hear(0.1)
    assert pace.starved


def test_a_step_that_failed_is_not_part_of_the_next() -> None:
    pace, clock = Pace(), Clock()
    pace.begin(clock)  # type: ignore[arg-type]
    pace.cancel()
    clock.now += 100.0
    pace.end(clock)  # type: ignore[arg-type]
    run(pace, clock, [0.1] * TIMED_STEPS)
    clock.reached = clock.now
    assert pace.hear(0.1)
    assert pace.factor == pytest.approx(1.0)


def test_whether_a_plan_is_still_being_timed() -> None:
    pace, clock = Pace(), Clock()
    assert not pace.timing  # there is no plan
    pace.new_plan()
    run(pace, clock, [0.12] * TIMED_STEPS)
    pace.hear(0.1)
    assert pace.timing  # nothing has arrived
    clock.reached = clock.now
    assert pace.hear(0.1) and not pace.timing
    pace.new_plan()
    assert pace.timing


def test_nothing_is_timed_on_a_device_without_a_clock() -> None:
    class Clockless(Clock):
        def stamp(self) -> None:  # type: ignore[override]
            return None

    pace = Pace()
    pace.new_plan()
    pace.begin(Clockless())  # type: ignore[arg-type]
    assert not pace.timing
