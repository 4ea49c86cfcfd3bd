"""The swarm against algorithms 1 to 3 written out as the paper prints them, against brute force, and its promises."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.errors import BudgetError
from legroom.evaluate import KEEP, OVERLAP, RECOMPUTE, SHARED, SYNC, Evaluator, floor_bytes
from legroom.hardware import PRESETS, Hardware
from legroom.ir import Trace
from legroom.kernels.codes import Codes
from legroom.plan import Keep, Plan, Recompute, Swap
from legroom.planners.home import Draw, Home, convergence
from legroom.tables import NEVER
from tests.pure.strategies import hardwares, make_trace, traces
from tests.pure.test_schedule import LINK, chain
from tests.pure.test_vdnn import RELU, net

SLOW = dataclasses.replace(LINK, out_bytes_per_second=1e6, in_bytes_per_second=1e6)


def between(trace: Trace, share: float) -> int:
    floor = floor_bytes(trace)
    return floor + int(share * (max(trace.head_peak_bytes, trace.peak_bytes) - floor))


def as_printed(
    evaluator: Evaluator, budget: int, particles: list[Codes], iterations: int
) -> tuple[Codes, list[int], list[Codes]]:
    """Algorithms 1 to 3 without a shortcut: the best policy, its nanoseconds by iteration, and all particles."""
    error = (NEVER, 0)

    def evaluate(policy: Codes) -> tuple[int, int]:
        ns, _, excess = evaluator.judge(policy, budget)
        return (ns, int((policy != KEEP).sum())) if excess == 0 else error

    best_particle, lowest_overhead = particles[0], error
    historical = [(error, policy.copy()) for policy in particles]
    curve = []
    for _ in range(iterations):
        last_best, last_overhead = particles[0], error
        for i, policy in enumerate(particles):
            overhead = evaluate(policy)
            if overhead < historical[i][0]:
                historical[i] = overhead, policy.copy()
            if overhead < last_overhead:
                last_best, last_overhead = policy, overhead
            if overhead < lowest_overhead:
                best_particle, lowest_overhead = policy.copy(), overhead
        curve.append(lowest_overhead[0])
        p1 = last_best.copy()
        for i, policy in enumerate(particles):
            p2 = historical[i][1]
            for j in range(len(policy)):
                policy[j] = p1[j]
                o1 = evaluate(policy)
                policy[j] = p2[j]
                o2 = evaluate(policy)
                policy[j] = p1[j] if o1 < o2 else p2[j]
    return best_particle, curve, particles


def searched(home: Home, trace: Trace, hardware: Hardware, budget: int) -> tuple[Plan, list[int]]:
    """The plan, and the nanoseconds of the best policy by iteration."""
    curve: list[int] = []
    home = dataclasses.replace(home, progress=lambda _, seconds: curve.append(round(seconds * 1e9)))
    return home(trace, hardware, budget), curve


def assert_as_printed(home: Home, trace: Trace, hardware: Hardware, budget: int) -> None:
    plan, curve = searched(home, trace, hardware, budget)
    if not curve:  # everything fits
        assert set(plan.decisions) <= {Keep()}
        return
    evaluator = Evaluator(trace, hardware)
    recompute = SHARED if home.share else RECOMPUTE
    particles = Draw(evaluator, recompute, home.seed).policies(home.particles)
    best, expected, _ = as_printed(evaluator, budget, particles, home.iterations)
    assert plan.decisions == evaluator.plan(best, planner="", budget_bytes=budget).decisions
    assert curve == expected[: len(curve)]
    assert set(expected[len(curve) - 1 :]) == {curve[-1]}  # it stopped only where nothing was to come


@given(data=st.data())
@settings(max_examples=12)
def test_the_shortcuts_change_nothing(data: st.DataObject) -> None:
    trace, hardware = data.draw(traces()), data.draw(hardwares())
    budget = between(trace, data.draw(st.sampled_from((0.0, 0.1, 0.3, 0.6))))
    share, seed = data.draw(st.booleans()), data.draw(st.integers(0, 3))
    home = Home(particles=8, iterations=12, share=share, seed=seed, restless=False, swarms=1)
    assert_as_printed(home, trace, hardware, budget)


@pytest.mark.parametrize("seed", range(4))
def test_the_shortcuts_change_nothing_among_equals(seed: int) -> None:
    """In a chain many policies are equally fast: which of them leads on is a matter of order."""
    assert_as_printed(Home(particles=30, iterations=10, seed=seed, restless=False, swarms=1), chain(8), SLOW, 5000)


def test_the_swarm_stops_where_the_printed_one_stands_still() -> None:
    trace = make_trace(5, forward=16)
    hardware, budget = PRESETS["cpu"], between(trace, 0.4)
    plan, curve = searched(Home(particles=12, restless=False, swarms=1), trace, hardware, budget)
    assert "no particle changes any more" in plan.notes[1]
    evaluator = Evaluator(trace, hardware)
    swarms = [
        as_printed(evaluator, budget, Draw(evaluator, SHARED, 0).policies(12), len(curve) + more)[2] for more in (-1, 5)
    ]
    assert all((a == b).all() for a, b in zip(*swarms, strict=True))
    before = as_printed(evaluator, budget, Draw(evaluator, SHARED, 0).policies(12), len(curve) - 2)[2]
    assert any((a != b).any() for a, b in zip(before, swarms[0], strict=True))  # no earlier, and no later


def test_the_plan_does_not_depend_on_the_number_of_threads() -> None:
    trace = make_trace(5, forward=24)
    budget = between(trace, 0.4)
    plans = [Home(particles=12, patience=10, threads=threads)(trace, PRESETS["h200"], budget) for threads in (1, 2, 3)]
    assert all(plan == plans[0] for plan in plans)
    other = Home(particles=12, patience=10, threads=2, seed=1)(trace, PRESETS["h200"], budget)
    assert other.decisions != plans[0].decisions  # or the comparison would say little


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_the_curve_falls_from_the_seed_to_the_plan(share: float) -> None:
    trace = make_trace(5, forward=40)
    budget = between(trace, share)
    evaluator = Evaluator(trace, PRESETS["cpu"])
    seed_ns, seed_peak = evaluator.evaluate(np.full(evaluator.gaps, SYNC, np.int8))
    plan, curve = searched(Home(particles=20, patience=20), trace, PRESETS["cpu"], budget)
    assert seed_peak <= budget
    assert seed_ns >= curve[0]
    assert curve == sorted(curve, reverse=True)
    assert curve[-1] == round(plan.predicted_seconds * 1e9)
    if share > 0.0:
        assert curve[-1] < curve[0] <= seed_ns


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_restless_swarm_goes_on_where_the_printed_one_stands_still(share: float) -> None:
    trace = make_trace(5, forward=40)
    budget = between(trace, share)
    printed, restless = (
        Home(particles=12, swarms=1, patience=20, restless=restless)(trace, PRESETS["cpu"], budget)
        for restless in (False, True)
    )
    assert "no particle changes any more" in printed.notes[1]
    assert restless.predicted_seconds < printed.predicted_seconds


def test_the_best_of_all_swarms_is_taken() -> None:
    trace = make_trace(5, forward=24)
    budget = between(trace, 0.3)
    one, three = (searched(Home(particles=4, swarms=swarms, patience=3), trace, SLOW, budget) for swarms in (1, 3))
    assert three[1][: len(one[1])] == one[1]
    assert three[0].predicted_seconds < one[0].predicted_seconds
    assert "4 particles in each of 3 swarms (the last 3 in vain)" in three[0].notes[1]


def test_of_equals_the_policy_that_keeps_more_is_taken() -> None:
    """One storage has to go, and the copies of many would hide."""
    plan = Home(particles=20, patience=20)(chain(8), LINK, 7000)
    assert sum(decision != Keep() for decision in plan.decisions) == 1


def test_gaps_of_one_kind_are_drawn_alike() -> None:
    trace = net([RELU] * 40)  # all gaps are of one kind
    policies = Draw(Evaluator(trace, LINK), SHARED, 0).policies(60)[1:]
    most = [np.bincount(policy).max() / len(policy) for policy in policies]
    assert np.mean(most) > 0.6  # 0.54 if each gap were drawn by itself


def test_what_is_drawn_near_a_policy_differs_in_some_runs() -> None:
    trace = net([RELU] * 40)
    draw = Draw(Evaluator(trace, LINK), SHARED, 0)
    policy = draw.policies(1)[0]
    changed = [np.flatnonzero(draw.near(policy) != policy) for _ in range(50)]
    assert 0 < np.mean([len(gaps) for gaps in changed]) < len(policy) / 2
    assert any(len(gaps) > 1 and gaps[-1] - gaps[0] == len(gaps) - 1 for gaps in changed)


def test_one_particle_is_the_seed() -> None:
    trace = chain(8)
    plan = Home(particles=1, restless=False)(trace, LINK, floor_bytes(trace))
    assert set(plan.decisions) == {Swap(when="sync")}


def test_a_free_swap_is_found() -> None:
    plan = Home(particles=40, patience=20)(chain(8), LINK, 7000)
    assert Swap() in plan.decisions
    assert round(plan.predicted_seconds * 1e6) == 17  # ops alone: copies hide behind them


def test_a_replay_is_found_where_the_link_is_slow() -> None:
    plan = Home(particles=40, patience=20)(chain(8), SLOW, 7000)
    assert plan.decisions.count(Recompute(share=True)) == 1
    assert round(plan.predicted_seconds * 1e6) == 18  # one op more


@pytest.mark.parametrize("hardware", [LINK, SLOW], ids=["link", "slow link"])
@pytest.mark.parametrize("budget", [2000, 3000, 4000])
def test_the_best_policy_of_a_small_chain_is_found(budget: int, hardware: Hardware) -> None:
    trace = chain(5)
    evaluator = Evaluator(trace, hardware)
    judged = [
        evaluator.judge(np.array(codes, np.int8), budget)
        for codes in product((KEEP, OVERLAP, SYNC, SHARED), repeat=evaluator.gaps)
    ]
    best = min(ns for ns, _, excess in judged if excess == 0)
    plan = Home(particles=100, patience=20)(trace, hardware, budget)
    assert round(plan.predicted_seconds * 1e9) == best


def test_sharing_makes_chains_of_replays_cheap() -> None:
    trace = chain(21)
    alone, shared = (Home(particles=60, share=share, patience=20)(trace, SLOW, 8000) for share in (False, True))
    assert shared.predicted_seconds < alone.predicted_seconds
    assert Recompute(share=True) in shared.decisions


def test_what_cannot_be_recomputed_is_swapped_or_kept() -> None:
    trace = chain(6, why_not="not deterministic")  # the op all others hang on
    for policy in Draw(Evaluator(trace, SLOW), SHARED, 0).policies(50):
        assert policy[0] != SHARED
    plan = Home(particles=50, patience=20)(trace, SLOW, 4000)
    assert not isinstance(plan.decisions[0], Recompute)
    assert Recompute(share=True) in plan.decisions


def test_with_room_for_everything_nothing_is_done() -> None:
    trace = make_trace(11, forward=12)
    plan, curve = searched(Home(), trace, PRESETS["h200"], between(trace, 1.0))
    assert (set(plan.decisions), curve) == ({Keep()}, [])


def test_a_budget_below_the_floor_is_refused_with_the_numbers() -> None:
    trace = make_trace(11, forward=12)
    floor = floor_bytes(trace)
    with pytest.raises(BudgetError) as caught:
        Home(particles=4)(trace, PRESETS["h200"], floor - 1)
    assert (caught.value.floor_bytes, caught.value.budget_bytes) == (floor, floor - 1)


def test_the_notes_say_why_the_search_ended() -> None:
    trace = make_trace(5, forward=40)
    budget = between(trace, 0.4)
    hardware = PRESETS["cpu"]
    plan, curve = searched(Home(particles=12, restless=False, swarms=1), trace, hardware, budget)
    assert plan.notes[1].startswith(f"{len(curve)} iterations of 12 particles (no particle changes any more)")
    assert len(curve) > 2
    short, few = searched(Home(particles=12, iterations=2, restless=False, swarms=1), trace, hardware, budget)
    assert (few, "as many as allowed" in short.notes[1]) == (curve[:2], True)
    hasty, some = searched(Home(particles=12, patience=1, restless=False, swarms=1), trace, hardware, budget)
    assert (some[-1], "the last 1 in vain" in hasty.notes[1]) == (some[-2], True)
    assert plan.notes[2] == convergence(curve)


def test_the_curve_in_the_notes() -> None:
    assert convergence([3_000_000]) == "convergence (iteration:ms): 1:3"
    assert convergence([3_000_000, 2_500_000, 2_500_000]) == "convergence (iteration:ms): 1:3 2:2.5 3:2.5"
    points = convergence([10**9 - 10**6 * i for i in range(500)]).split(": ")[1].split()
    assert (points[0], points[-1], len(points) <= 61) == ("1:1000", "500:501", True)


@pytest.mark.parametrize("knob", ["particles", "iterations", "swarms", "patience", "threads"])
def test_a_knob_of_nothing_is_refused(knob: str) -> None:
    knobs: dict[str, Any] = {knob: 0}
    with pytest.raises(ValueError, match=f"{knob} must be at least 1, got 0"):
        Home(**knobs)
