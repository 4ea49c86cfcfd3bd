from __future__ import annotations

import timeit
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom import packing
from legroom.errors import BudgetError, PlanError
from legroom.evaluate import Evaluator, floor_bytes
from legroom.hardware import PRESETS, Hardware
from legroom.ir import Trace
from legroom.plan import Decision, Keep, Recompute, Swap
from legroom.planners.auto import Auto
from legroom.planners.responsive import Resizable, Responsive, ResponsivePlanner
from legroom.schedule import check_schedule, codes_of, lower
from legroom.sizes import Numbers, numbers_of, with_numbers
from legroom.tables import NEVER, tabulate
from legroom.traceio import load
from tests.pure.honest import honest_plan
from tests.pure.strategies import hardwares, make_plan, plans_for, traces

H200 = PRESETS["h200"]

read = cache(lambda name: load(Path(__file__).parents[1] / "traces" / f"{name}.json.gz"))


@cache
def prepared(name: str, *, thorough: bool = True) -> Responsive:
    return Responsive(read(name), H200, thorough=thorough)


def grown(trace: Trace, seed: int) -> Numbers:
    """Each storage up to three times as large, each op up to three times as long; memory rises with the largest."""
    rng = np.random.default_rng(seed)
    now = numbers_of(trace)
    return Numbers(
        nbytes=now.nbytes * rng.integers(0, 4, len(now.nbytes)),
        level_bytes=now.level_bytes * 3,
        peak_bytes=now.peak_bytes * 3,
        head_peak_bytes=now.head_peak_bytes * int(rng.integers(0, 30)),
        workspace_bytes=now.workspace_bytes * rng.integers(0, 4, len(now.workspace_bytes)),
        seconds=(now.seconds + 1e-6) * rng.uniform(0, 3, len(now.seconds)),
    )


def scaled(numbers: Numbers, factor: float) -> Numbers:
    """Another batch size: all in proportion."""
    sizes = {
        name: np.ceil(getattr(numbers, name) * factor / 512).astype(np.int64) * 512
        for name in ("nbytes", "level_bytes", "peak_bytes", "workspace_bytes")
    }
    return Numbers(**sizes, head_peak_bytes=int(numbers.head_peak_bytes * factor), seconds=numbers.seconds * factor)


def exact_peak(trace: Trace, decisions: tuple[Decision, ...], hardware: Hardware) -> int:
    return check_schedule(trace, lower(trace, make_plan(trace, decisions), hardware))


def seconds_of(trace: Trace, decisions: tuple[Decision, ...], hardware: Hardware) -> float:
    codes = {Keep(): 0, Swap(): 1, Swap(when="sync"): 2, Recompute(): 3, Recompute(share=True): 4}
    return Evaluator(trace, hardware).evaluate(np.array([codes[d] for d in decisions], np.int8))[0] / 1e9


def with_replays(trace: Trace, seed: int) -> Trace:
    """Some ops take another time where they are replayed."""
    rng = np.random.default_rng(seed)
    ops = [replace(op, seconds=op.seconds * rng.integers(0, 2)) for op in trace.ops]
    ops = [replace(op, replay_seconds=rng.uniform(0, 3) * 1e-3) if rng.integers(2) else op for op in ops]
    return replace(trace, ops=tuple(ops))


@given(trace=traces(), hardware=hardwares(), seed=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_tables_of_another_size_are_those_of_the_trace_at_that_size(
    trace: Trace, hardware: Hardware, seed: int
) -> None:
    trace = with_replays(trace, seed)
    evaluator = Resizable(trace, hardware)
    numbers = grown(trace, seed)
    evaluator.resize(numbers)
    fresh = packing.pack(tabulate(with_numbers(trace, numbers), hardware))
    for name in packing.Packed._fields:
        if name != "blocks":  # the same arrays once more
            assert np.array_equal(getattr(evaluator._packed, name), getattr(fresh, name)), name


@given(data=st.data(), trace=traces(), hardware=hardwares(), seed=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_the_peak_is_exact_at_one_size_after_the_other(
    data: st.DataObject, trace: Trace, hardware: Hardware, seed: int
) -> None:
    evaluator = Responsive(trace, hardware, thorough=False).evaluator
    for numbers in (grown(trace, seed), grown(trace, seed + 1), numbers_of(trace)):
        decisions = data.draw(plans_for(trace)).decisions
        evaluator.resize(numbers)
        codes, ahead = codes_of(decisions)
        if not ahead.any():
            peak = evaluator.evaluate(codes)[1]
            try:
                assert peak == exact_peak(with_numbers(trace, numbers), decisions, hardware)
            except PlanError:
                assert peak == NEVER


@given(
    trace=traces(),
    hardware=hardwares(),
    seed=st.integers(0, 2**32),
    part=st.sampled_from((-1, 0, 1, 10, 30, 60, 90, 100)),
)
@settings(max_examples=20, deadline=None)
def test_decisions_are_within_the_budget_wherever_any_are(
    trace: Trace, hardware: Hardware, seed: int, part: int
) -> None:
    plans = Responsive(trace, hardware, thorough=part % 60 == 0)
    for numbers in (grown(trace, seed), numbers_of(trace)):
        there = with_numbers(trace, numbers)
        floor = floor_bytes(there)
        budget = floor - 1 if part < 0 else floor + (there.peak_bytes - floor) * part // 100
        decisions = plans.decide(numbers, budget)
        if budget < floor:
            assert decisions is None
        else:
            assert decisions is not None
            assert exact_peak(there, decisions, hardware) <= budget
            assert plans.decide(numbers, budget) == decisions
            if part == 100:
                assert set(decisions) <= {Keep()}


@given(trace=traces(), hardware=hardwares(), part=st.sampled_from((0, 10, 30, 60, 90, 100)))
@settings(max_examples=8, deadline=None)
def test_as_a_planner(trace: Trace, hardware: Hardware, part: int) -> None:
    planner = ResponsivePlanner(thorough=False)
    plan = honest_plan(planner, trace, hardware, part)
    assert plan.planner == "responsive"
    low = floor_bytes(trace)
    with pytest.raises(BudgetError) as caught:
        planner(trace, hardware, low - 1)
    assert caught.value.floor_bytes == low


@pytest.mark.parametrize("name", ["vgg16", "squeezenet"])
def test_recorded_steps_at_other_sizes_are_close_to_what_auto_finds(name: str) -> None:
    plans = prepared(name)
    for factor in (0.4, 2.5):
        numbers = scaled(numbers_of(read(name)), factor)
        trace = with_numbers(read(name), numbers)
        plain = seconds_of(trace, tuple([Keep()] * len(trace.gaps)), H200)
        budget = (floor_bytes(trace) + trace.peak_bytes) // 2
        decisions = plans.decide(numbers, budget)
        assert decisions is not None
        assert exact_peak(trace, decisions, H200) <= budget
        best = Auto(bound=False, thorough=False)(trace, H200, budget).predicted_seconds
        assert seconds_of(trace, decisions, H200) - plain <= 1.25 * (best - plain) + 0.03 * plain


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_decision_takes_no_more_than_twenty_evaluations(share: float) -> None:
    plans = prepared("resnet152", thorough=False)
    numbers = numbers_of(read("resnet152"))
    floor, peak = floor_bytes(read("resnet152")), read("resnet152").peak_bytes
    budget = int(floor + share * (peak - floor))
    decisions = plans.decide(numbers, budget)
    assert decisions is not None
    codes = plans.codes(budget)
    assert codes is not None
    evaluator = Evaluator(read("resnet152"), H200)

    def evaluations() -> float:
        one = min(timeit.repeat(lambda: evaluator.evaluate(codes), number=1, repeat=30))
        return min(timeit.repeat(lambda: plans.decide(numbers, budget), number=1, repeat=30)) / one

    assert min(evaluations() for _ in range(4)) <= 20  # others may have the processor for all of one of them


def test_what_is_of_another_structure_is_refused() -> None:
    plans, trace = prepared("squeezenet"), read("squeezenet")
    numbers = numbers_of(trace)
    with pytest.raises(PlanError, match=r"numbers.seconds has \d+ entries, the structure has \d+"):
        plans.decide(replace(numbers, seconds=numbers.seconds[1:]), trace.peak_bytes)


def test_a_trace_without_gaps() -> None:
    trace = Trace((), (), (), 512, "cuda")
    plans = Responsive(trace, H200)
    assert plans.decide(numbers_of(trace), 512) == ()
    assert plans.decide(numbers_of(trace), 511) is None
