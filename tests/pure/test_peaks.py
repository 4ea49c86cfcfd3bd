"""The peak of a schedule at other sizes, against the proof of the schedule there."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.errors import PlanError
from legroom.hardware import PRESETS, Hardware
from legroom.ir import Trace
from legroom.peaks import Peaks
from legroom.plan import Decision, Keep, Recompute, Swap, signature
from legroom.planners import PLANNERS, quick
from legroom.schedule import Schedule, check_schedule, lower
from legroom.sizes import Numbers, numbers_of, with_numbers
from legroom.traceio import load
from tests.pure.honest import honest_plan
from tests.pure.strategies import hardwares, make_plan, make_trace, plans_for, traces
from tests.pure.test_responsive import grown, scaled

H200 = PRESETS["h200"]


def proven(trace: Trace, schedule: Schedule, numbers: Numbers) -> int:
    there = with_numbers(trace, numbers)
    return check_schedule(there, replace(schedule, trace_signature=signature(there)))


def lowered(trace: Trace, decisions: tuple[Decision, ...], hardware: Hardware) -> Schedule:
    """With those kept that cannot be replayed."""
    while True:
        try:
            return lower(trace, make_plan(trace, decisions), hardware)
        except PlanError as error:
            found = re.match(r"gap (\d+) ", str(error))
            assert found is not None
            at = int(found[1])
            decisions = (*decisions[:at], Keep(), *decisions[at + 1 :])


@given(data=st.data(), trace=traces(), hardware=hardwares(), seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_it_is_what_is_proven_of_the_schedule_there(
    data: st.DataObject, trace: Trace, hardware: Hardware, seed: int
) -> None:
    schedule = lowered(trace, data.draw(plans_for(trace)).decisions, hardware)
    peaks = Peaks(trace, schedule)
    for numbers in (numbers_of(trace), grown(trace, seed), grown(trace, seed + 1)):
        assert peaks.at(numbers) == proven(trace, schedule, numbers)


@pytest.mark.parametrize("name", ["squeezenet", "bert", "lstm"])
@pytest.mark.parametrize("planner", ["auto", "superneurons", "checkmate"])
def test_recorded_steps_at_other_sizes(name: str, planner: str) -> None:
    trace = load(Path(__file__).parents[1] / "traces" / f"{name}.json.gz")
    schedule = lower(trace, honest_plan(quick(PLANNERS[planner]), trace, H200, 66), H200)
    peaks = Peaks(trace, schedule)
    for factor in (0.3, 1.0, 1.7):
        numbers = scaled(numbers_of(trace), factor)
        assert peaks.at(numbers) == proven(trace, schedule, numbers)


@pytest.mark.parametrize("decision", [Keep(), Swap(), Swap(when="sync"), Swap(when="ahead", ahead=9), Recompute()])
def test_it_counts_what_each_action_does(decision: Keep | Swap | Recompute) -> None:
    trace = make_trace(0, forward=14)
    schedule = lowered(trace, (decision,) * len(trace.gaps), H200)
    assert Peaks(trace, schedule).at(numbers_of(trace)) == check_schedule(trace, schedule)
    twice = scaled(numbers_of(trace), 2)
    assert Peaks(trace, schedule).at(twice) == proven(trace, schedule, twice)


def test_a_trace_of_nothing() -> None:
    trace = replace(make_trace(3, forward=5), storages=(), ops=(), ticks=(), head_peak_bytes=7)
    schedule = Schedule((), signature(trace))
    assert Peaks(trace, schedule).at(numbers_of(trace)) == check_schedule(trace, schedule) == 7


def test_a_peak_before_the_first_tick_counts() -> None:
    trace = make_trace(3, forward=5)
    schedule = lower(trace, make_plan(trace, (Keep(),) * len(trace.gaps)), H200)
    high = replace(numbers_of(trace), head_peak_bytes=10 * trace.peak_bytes)
    assert Peaks(trace, schedule).at(high) == 10 * trace.peak_bytes
