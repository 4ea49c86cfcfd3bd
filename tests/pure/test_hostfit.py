"""The host's factor is found again from the time that a step takes with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from legroom.hardware import PRESETS, HostCosts
from legroom.hostfit import FASTEST, SLOWEST, fast_enough, host_factor, with_host
from legroom.ir import Trace
from legroom.planners import named
from legroom.schedule import lower
from legroom.simulate import simulate
from tests.pure.strategies import make_trace

MACHINE = replace(PRESETS["h200"], host=HostCosts(2e-6, 100e-6, 40e-6, 200e-6, 90e-6, 30e-6, 60e-6, 50e-6))


def host_bound(issue_seconds: float) -> Trace:
    trace = make_trace(3, forward=40)
    return replace(trace, ops=tuple(replace(op, issue_seconds=issue_seconds) for op in trace.ops))


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.3, 2.4, 3.9])
def test_the_factor_is_found_from_the_step_s_time(factor: float) -> None:
    trace = host_bound(1e-3)
    plan = named("auto")(trace, MACHINE, int(trace.peak_bytes * 0.8))
    schedule = lower(trace, plan, MACHINE)
    assert schedule.instructions
    seconds = simulate(with_host(trace, factor), schedule, MACHINE.scaled_host(factor)).seconds

    assert host_factor(trace, schedule, MACHINE, seconds) == pytest.approx(factor, rel=0.02)


def test_a_step_that_never_waits_for_the_host_says_nothing_about_it() -> None:
    trace = host_bound(0.0)
    schedule = lower(trace, named("none")(trace, MACHINE, 2 * trace.peak_bytes), MACHINE)
    seconds = simulate(trace, schedule, MACHINE).seconds

    assert host_factor(trace, schedule, MACHINE, 2 * seconds) == 1.0


def test_noise_is_not_taken_for_another_host() -> None:
    trace = host_bound(1e-3)
    schedule = lower(trace, named("none")(trace, MACHINE, 2 * trace.peak_bytes), MACHINE)

    assert host_factor(trace, schedule, MACHINE, 1.02 * simulate(trace, schedule, MACHINE).seconds) == 1.0


def test_no_step_is_too_slow_to_be_explained() -> None:
    trace = host_bound(1e-4)
    schedule = lower(trace, named("none")(trace, MACHINE, 2 * trace.peak_bytes), MACHINE)

    assert host_factor(trace, schedule, MACHINE, 1e3) == SLOWEST
    assert host_factor(trace, schedule, MACHINE, 1e-9) == FASTEST


def test_a_host_that_nobody_waited_for_is_as_fast_as_that_takes() -> None:
    trace = make_trace(3, forward=40)
    trace = replace(trace, ops=tuple(replace(op, seconds=1e-4, issue_seconds=3e-5) for op in trace.ops))
    slow = MACHINE.scaled_host(40.0)
    schedule = lower(trace, named("auto")(trace, MACHINE, int(trace.peak_bytes * 0.8)), MACHINE)
    assert schedule.instructions
    factor = fast_enough(trace, schedule, slow)

    def seconds(factor: float) -> float:
        return simulate(with_host(trace, factor), schedule, slow.scaled_host(factor)).seconds

    assert FASTEST < factor < 1.0
    assert seconds(factor) == pytest.approx(seconds(FASTEST), rel=3e-3)
    assert seconds(factor * 1.1) > seconds(FASTEST) * 1.002


def test_a_host_that_is_fast_enough_already_stays_as_it_is() -> None:
    trace = host_bound(0.0)
    schedule = lower(trace, named("none")(trace, MACHINE, 2 * trace.peak_bytes), MACHINE)

    assert fast_enough(trace, schedule, MACHINE) == 1.0
