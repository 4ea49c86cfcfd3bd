"""The default planner: no slower than any other, close to the best there is, and honest about how close."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom import traceio
from legroom.bound import lower_bound
from legroom.errors import BudgetError, PlanError
from legroom.evaluate import KEEP, OVERLAP, RECOMPUTE, SHARED, SYNC, Evaluator, floor_bytes
from legroom.hardware import PRESETS, Hardware, HostCosts
from legroom.ir import Trace
from legroom.plan import Plan
from legroom.planners import PLANNERS, quick, tighter
from legroom.planners.auto import Auto
from legroom.planners.checkmate import Checkmate
from legroom.planners.home import Home
from legroom.planners.local import Search
from legroom.planners.optimal import Optimal
from legroom.schedule import lower
from legroom.simulate import simulate
from legroom.tables import NEVER
from tests.pure.strategies import hardwares, make_trace, traces
from tests.pure.test_bound import SLOW, link
from tests.pure.test_optimal import SMALL, all_costs, proven
from tests.pure.test_planners import assert_honest, peak_of
from tests.pure.test_schedule import LINK, chain

OTHERS = {name: planner for name, planner in PLANNERS.items() if name not in ("auto", "optimal")} | {
    "home": Home(particles=10, iterations=10, threads=1),
    "checkmate": Checkmate(time_limit_seconds=0.5, evaluations=300),
}
TRACES = Path(__file__).parents[1] / "traces"
CODES = (KEEP, OVERLAP, SYNC, RECOMPUTE, SHARED)
SHORT = Auto(evaluations=4000)  # a quarter of what users get, which is enough for these steps


def budgets(trace: Trace) -> list[int]:
    floor, peak = floor_bytes(trace), peak_of(trace)
    return [floor, *(floor + (peak - floor) * part // 8 for part in (1, 2, 4, 6))]


def answers(trace: Trace, hardware: Hardware, budget: int) -> dict[str, Plan | BudgetError]:
    out: dict[str, Plan | BudgetError] = {}
    for name, planner in OTHERS.items():
        try:
            out[name] = planner(trace, hardware, budget)
        except BudgetError as error:
            out[name] = error
    return out


@given(st.data())
@settings(max_examples=3, derandomize=True)
def test_no_other_planner_is_faster_or_goes_lower(data: st.DataObject) -> None:
    trace, hardware = data.draw(traces(most_ops=14)), data.draw(hardwares())
    budget = data.draw(st.sampled_from(budgets(trace)))
    plan = SHORT(trace, hardware, budget)
    for name, other in answers(trace, hardware, budget).items():
        if isinstance(other, Plan):
            assert plan.predicted_seconds <= other.predicted_seconds, name
        else:
            assert other.floor_bytes >= floor_bytes(trace), name


@pytest.mark.parametrize(("rate", "budget"), [(0.1e9, 9000), (0.5e9, 4000)])
def test_no_other_planner_is_faster_on_a_chain(rate: float, budget: int) -> None:
    trace = chain(12)
    plan = SHORT(trace, link(rate), budget)
    for name, other in answers(trace, link(rate), budget).items():
        assert isinstance(other, BudgetError) or plan.predicted_seconds <= other.predicted_seconds, name


@pytest.mark.parametrize(
    ("seed", "forward", "gaps", "budget"),
    [(1910554750, 24, 42, 226048), (2798570523, 26, 75, 177689), (3728367029, 34, 75, 189849)],
)
def test_the_swarm_is_hardly_faster_where_gaps_are_few(seed: int, forward: int, gaps: int, budget: int) -> None:
    """As users ask for it, and not as auto does. It was, by 1.8, 3.3 and 0.1 %.

    Both are searches whose luck depends on how a processor rounds: on one the last is won, on another lost by 0.5 %.
    """
    trace, hardware = make_trace(seed, forward=forward), PRESETS["h200"]
    assert len(trace.gaps) == gaps
    plan, other = Auto()(trace, hardware, budget), PLANNERS["home"](trace, hardware, budget)
    assert plan.predicted_seconds <= other.predicted_seconds * 1.01


def test_no_other_planner_is_faster_on_a_recorded_step() -> None:
    """Those that it asks only where gaps are fewer.

    bench/planners.py has all planners, all steps and more budgets.
    """
    trace, hardware = traceio.load(TRACES / "mobilenet.json.gz"), PRESETS["h200"]
    assert len(trace.gaps) > 100
    floor = floor_bytes(trace)
    budget = floor + (peak_of(trace) - floor) // 2
    plan = Auto()(trace, hardware, budget)
    assert_honest(trace, hardware, budget, plan)
    assert plan.gap is not None
    assert plan.gap <= 0.02
    for other in ("dtr", "sublinear", "superneurons", "vdnn"):
        with contextlib.suppress(BudgetError):
            assert plan.predicted_seconds <= PLANNERS[other](trace, hardware, budget).predicted_seconds, other


# Half a millisecond for each instruction is far from any machine, but mobilenet's host has little to do.
BUSY_HOST = HostCosts(
    tick=20e-6, swap_out=500e-6, release=200e-6, drop=300e-6, prefetch=500e-6, await_=200e-6, replay=300e-6,
    replay_op=100e-6,
)  # fmt: skip


@pytest.mark.parametrize("name", ["mobilenet", 0])
def test_where_the_host_is_slow_it_asks_less_of_it(name: str | int) -> None:
    trace = make_trace(name, forward=20) if isinstance(name, int) else traceio.load(TRACES / f"{name}.json.gz")
    fast = PRESETS["h200"]
    slow = dataclasses.replace(fast, host=BUSY_HOST).scaled_host(0.05 if isinstance(name, int) else 1.0)
    floor = floor_bytes(trace)
    budget = floor + (peak_of(trace) - floor) // 2
    unaware, aware = SHORT(trace, fast, budget), SHORT(trace, slow, budget)
    assert_honest(trace, slow, budget, aware)
    assert aware.gap is not None and aware.gap >= 0.0
    schedules = [lower(trace, plan, slow) for plan in (unaware, aware)]
    many, few = (len(schedule.instructions) for schedule in schedules)
    assert few < many
    assert aware.predicted_seconds < 0.95 * simulate(trace, schedules[0], slow).seconds


@pytest.mark.parametrize("share", [0.244, 0.248, 0.252])
def test_where_a_search_ends_depends_little_on_the_program_it_starts_from(share: float) -> None:
    """From the program of this budget alone: 0.80, 0.70 and 0.67 % above the bound."""
    trace, hardware = traceio.load(TRACES / "resnet152.json.gz"), PRESETS["rtx2080ti-pcie3"]
    floor = floor_bytes(trace)
    plan = Auto()(trace, hardware, floor + int(share * (trace.peak_bytes - floor)))
    assert plan.gap is not None and plan.gap < 0.004


@pytest.mark.parametrize(("factor", "found_by_home"), [(1.0, 0.108216356), (7.8, 0.764628645)])
def test_a_swarm_of_a_minute_finds_nothing_faster(factor: float, found_by_home: float) -> None:
    trace = traceio.load(TRACES / "resnet152.json.gz")
    ops = tuple(dataclasses.replace(op, seconds=op.seconds * factor) for op in trace.ops)
    trace = dataclasses.replace(trace, ops=ops)
    floor = floor_bytes(trace)
    plan = Auto()(trace, PRESETS["rtx2080ti-pcie3"], int(floor + 0.25 * (trace.peak_bytes - floor)))
    assert plan.predicted_seconds < found_by_home


def test_fetches_ahead_of_others_are_taken_over_where_they_are_faster() -> None:
    """The swaps of vdnn come back a layer ahead; the search knows none of that kind."""
    fast = Auto(evaluations=0)
    for seed in range(15):
        trace = make_trace(seed, forward=12)
        for budget in budgets(trace):
            try:
                other = PLANNERS["vdnn"](trace, PRESETS["v100-16g"], budget)
            except BudgetError:
                continue
            plan = fast(trace, PRESETS["v100-16g"], budget)
            assert plan.planner == "auto"
            assert plan.predicted_seconds <= other.predicted_seconds
            assert_honest(trace, PRESETS["v100-16g"], budget, plan)


@pytest.mark.parametrize("name", SMALL)
def test_of_all_plans_of_a_small_step_it_finds_the_best(name: str) -> None:
    trace, hardware = SMALL[name]
    costs = all_costs(trace, hardware, CODES)
    for budget in budgets(trace)[1:4:2]:
        best = min(nanoseconds for nanoseconds, peak in costs if peak <= budget) / 1e9
        assert Auto(evaluations=1500)(trace, hardware, budget).predicted_seconds <= 1.01 * best


NARROW = dataclasses.replace(link(3e9), duplex_out_bytes_per_second=2e9, duplex_in_bytes_per_second=2e9)
MACHINES = {"narrow": NARROW, "slow": SLOW, "h200": PRESETS["h200"], "v100": PRESETS["v100-16g"], "cpu": PRESETS["cpu"]}


def share_of_range(trace: Trace, share: float) -> int:
    floor = floor_bytes(trace)
    return floor + int(share * (peak_of(trace) - floor))


# (gaps, seed, ops, machine, share of the range). The linear program alone is 2 to 33 % below the best plan here.
LISTED = [(8, 39, 6, "cpu", 0.5), (9, 49, 4, "cpu", 0.5), (9, 55, 4, "h200", 0.25), (10, 59, 6, "narrow", 0.75)]


@pytest.mark.parametrize(("gaps", "seed", "ops", "machine", "share"), LISTED)
def test_it_is_within_a_percent_of_the_best_of_all_plans(
    gaps: int, seed: int, ops: int, machine: str, share: float
) -> None:
    """Of up to 60,000 plans, a second's work; 20 s are enough for some 10 to 11 gaps."""
    trace, hardware = make_trace(seed, forward=ops), MACHINES[machine]
    assert len(trace.gaps) == gaps
    budget = share_of_range(trace, share)
    evaluator = Evaluator(trace, hardware)
    kept = np.full(gaps, KEEP, np.int8)
    # What cannot be recomputed while everything else is kept cannot be recomputed at all.
    lone = [np.where(np.arange(gaps) == gap, np.int8(RECOMPUTE), kept) for gap in range(gaps)]
    actions = [CODES if evaluator.evaluate(codes)[0] < NEVER else (KEEP, OVERLAP, SYNC) for codes in lone]
    costs = (evaluator.judge(np.array(codes, np.int8), budget) for codes in itertools.product(*actions))
    best = min(nanoseconds for nanoseconds, _, excess in costs if excess == 0)
    assert SHORT(trace, hardware, budget).predicted_seconds <= 1.01 * best / 1e9


# As above, drawn at random. Of 70 steps of 6 to 40 gaps in which something must be done, the programs prove for 29 that
# auto is within 1 % of the best, with 20 s for each: 5 of 7 with up to 10 gaps, 7 of 19 with more than 30. One is known
# to fall short: (25, 18, 8, "narrow", 0.75), where auto takes 284.9 µs and a plan that fetches ahead 281.1, as its own
# search knows no such fetches. For the other 40 nothing is proven.
PROVEN = [
    (12, 70, 6, "cpu", 0.75),
    (12, 79, 7, "slow", 0.5),
    (17, 72, 5, "v100", 0.75),
    (18, 77, 11, "cpu", 0.25),
    (19, 42, 6, "narrow", 0.75),
    (25, 28, 6, "h200", 0.75),
    (35, 29, 20, "narrow", 0.5),
    (36, 30, 20, "cpu", 0.75),
    (39, 16, 14, "slow", 0.5),
]


@pytest.mark.parametrize(("gaps", "seed", "ops", "machine", "share"), PROVEN)
def test_it_is_within_a_percent_of_what_is_proven_to_be_the_best(
    gaps: int, seed: int, ops: int, machine: str, share: float
) -> None:
    trace, hardware = make_trace(seed, forward=ops), MACHINES[machine]
    assert len(trace.gaps) == gaps
    budget = share_of_range(trace, share)
    plan = SHORT(trace, hardware, budget)
    lowest = proven(Optimal(time_limit_seconds=20.0, evaluations=0)(trace, hardware, budget))
    assert lowest <= plan.predicted_seconds * (1 + 1e-6) <= 1.01 * lowest


# Greedy searches and exchanges of a few gaps miss the best plan known by 1.4 and 3.5 % here.
HARD = [(46, 9, NARROW, 0.0), (86, 6, NARROW, 0.25)]


@pytest.mark.parametrize(("seed", "ops", "hardware", "share"), HARD, ids=lambda part: str(part)[:8])
def test_on_steps_of_up_to_forty_gaps_it_is_within_a_percent_of_the_oracle(
    seed: int, ops: int, hardware: Hardware, share: float
) -> None:
    trace = make_trace(seed, forward=ops)
    assert 15 <= len(trace.gaps) <= 40
    budget = share_of_range(trace, share)
    best = Optimal(time_limit_seconds=2.0, evaluations=2000)(trace, hardware, budget).predicted_seconds
    assert SHORT(trace, hardware, budget).predicted_seconds <= 1.01 * best


def test_annealing_finds_what_the_search_before_it_misses() -> None:
    seed, ops, hardware, share = HARD[0]
    trace = make_trace(seed, forward=ops)
    budget = share_of_range(trace, share)
    found = SHORT(trace, hardware, budget).predicted_seconds
    assert Auto(thorough=False)(trace, hardware, budget).predicted_seconds > 1.01 * found


@given(st.data())
@settings(max_examples=6)
def test_the_bound_it_states_is_one(data: st.DataObject) -> None:
    trace, hardware = data.draw(traces()), data.draw(hardwares())
    budget = data.draw(st.sampled_from(budgets(trace)))
    plan = Auto(evaluations=200)(trace, hardware, budget)
    assert plan.lower_bound_seconds is not None
    assert plan.lower_bound_seconds <= lower_bound(trace, hardware, budget).seconds + 1e-15
    for other in (PLANNERS["capuchin"], PLANNERS["tensile"], PLANNERS["vdnn"]):
        try:
            assert plan.lower_bound_seconds <= other(trace, hardware, budget).predicted_seconds
        except BudgetError:
            continue


def test_the_gap_says_how_far_the_plan_is_above_the_bound() -> None:
    plan = Auto()(chain(8), SLOW, 5000)
    assert plan.gap == pytest.approx(0.0, abs=1e-3)  # an op again for each kilobyte, and not less
    assert plan.lower_bound_seconds == lower_bound(chain(8), SLOW, 5000).seconds


def test_with_room_for_everything_the_plan_is_its_own_bound() -> None:
    trace = make_trace(11, forward=12)
    plan = Auto()(trace, PRESETS["h200"], peak_of(trace))
    assert plan.lower_bound_seconds == plan.predicted_seconds
    assert plan.gap == 0.0


def test_it_can_do_without_a_bound() -> None:
    assert quick(Auto(evaluations=7)) == Auto(evaluations=7, bound=False, thorough=False)
    assert quick(PLANNERS["none"]) is PLANNERS["none"]
    for planner in (Auto(bound=False), quick(Auto())):
        for budget in (5000, 9000):
            plan = planner(chain(8), LINK, budget)
            assert plan.lower_bound_seconds is None and plan.gap is None
            assert_honest(chain(8), LINK, budget, plan)


def test_where_gaps_are_many_it_starts_from_the_linear_program_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """From keeping everything, evaluations would not be enough to come within the budget."""
    monkeypatch.setattr("legroom.planners.auto._MOST_GREEDY", 50)
    trace, hardware, budget = chain(80), link(0.5e9), 40_000
    lowest = lower_bound(trace, hardware, budget).seconds
    for bound in (True, False):
        plan = Auto(evaluations=750, bound=bound, thorough=False)(trace, hardware, budget)
        assert_honest(trace, hardware, budget, plan)
        assert plan.notes[-1].startswith("found from: the linear program")
        assert plan.predicted_seconds < 1.05 * lowest
        assert (plan.lower_bound_seconds is None) == (not bound)


@pytest.mark.parametrize("length", [150, 600])
def test_plans_that_will_not_last_start_from_the_linear_program_too(length: int) -> None:
    """Greedy search alone waits for every swap of the longer one, and was 1.7 times slower for a T5."""
    trace, hardware = chain(length), link(0.5e9)
    budget = share_of_range(trace, 0.25)
    plan = quick(Auto())(trace, hardware, budget)
    assert_honest(trace, hardware, budget, plan)
    assert plan.predicted_seconds < 1.05 * lower_bound(trace, hardware, budget).seconds


def test_plans_that_will_not_last_are_looked_for_without_the_program_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the floor, where gaps are few."""
    trace = traceio.load(TRACES / "unet.json.gz")
    budget = share_of_range(trace, 0.05)
    both = quick(Auto())(trace, PRESETS["h200"], budget)
    assert_honest(trace, PRESETS["h200"], budget, both)
    monkeypatch.setattr("legroom.planners.auto._MOST_ALONE", 0)
    assert both.predicted_seconds < 0.95 * quick(Auto())(trace, PRESETS["h200"], budget).predicted_seconds


def test_far_above_the_bound_it_starts_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = make_trace(5, forward=12)
    budget = budgets(trace)[1]
    planner = Auto(evaluations=1500, thorough=False)
    monkeypatch.setattr("legroom.planners.auto._MOST_ALONE", 0)
    plan = planner(trace, PRESETS["cpu"], budget)
    monkeypatch.setattr("legroom.planners.auto._FAR", math.inf)
    before = planner(trace, PRESETS["cpu"], budget)
    assert plan.lower_bound_seconds == before.lower_bound_seconds
    assert plan.predicted_seconds < before.predicted_seconds


def test_annealing_keeps_to_the_actions_it_is_given() -> None:
    evaluator = Evaluator(make_trace(25, forward=20), LINK)
    kept = np.full(evaluator.gaps, KEEP, np.int8)
    codes = np.full(evaluator.gaps, OVERLAP, np.int8)
    budget = evaluator.evaluate(codes)[1]
    search = Search(evaluator, budget, 0, start=codes)
    before = search.best_ns
    search.anneal(300, (KEEP, OVERLAP))
    assert search.feasible
    assert set(search.best.tolist()) <= {KEEP, OVERLAP}
    assert search.best_ns < before
    assert evaluator.judge(search.best, budget) == (search.best_ns, evaluator.evaluate(search.best)[1], 0)
    assert evaluator.judge(kept, budget)[2] > 0


def test_same_input_same_plan() -> None:
    trace = make_trace(86, forward=6)
    budget = budgets(trace)[2]
    planner = Auto(evaluations=1000)
    assert planner(trace, PRESETS["cpu"], budget) == planner(trace, PRESETS["cpu"], budget)
    assert dataclasses.asdict(Auto()) == {"evaluations": 16000, "bound": True, "thorough": True, "start": None}


def where_nothing_leads_to_replays() -> tuple[Trace, Hardware, int]:
    """Copies wait and replays are long: random changes with swaps among them end 16 % above a plan of replays alone."""
    hardware = dataclasses.replace(
        SLOW,
        out_bytes_per_second=1e7,
        in_bytes_per_second=3.3e9,
        duplex_out_bytes_per_second=1e7,
        duplex_in_bytes_per_second=3.3e9,
        latency_seconds=1e-6,
        synchronous=True,
        copy_compute_share=0.0,
        host=HostCosts(swap_out=4.12e-5, prefetch=1.03e-4, await_=1.236e-4, replay_op=1.648e-4),
    )
    return make_trace(7982353, forward=12), hardware, 196_864


@pytest.mark.parametrize("late", ["nobody", "search", "thread", "no thread"])
def test_the_plan_does_not_depend_on_who_is_done_first(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, hardware, budget = where_nothing_leads_to_replays()
    expected = SHORT(trace, hardware, budget)
    anneal = Search.anneal
    threads: list[bool] = []

    def slow(self: Search, changes: int, actions: Sequence[int]) -> None:
        threads.append(threading.current_thread() is not threading.main_thread())
        if late == ("thread" if threads[-1] else "search"):
            time.sleep(0.5)
        anneal(self, changes, actions)

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Search, "anneal", slow)
    if late == "no thread":
        monkeypatch.setattr(threading.Thread, "start", full)
    assert SHORT(trace, hardware, budget) == expected
    assert sorted(threads) == [False, late != "no thread"]


@pytest.mark.parametrize("where", ["search", "thread"])
def test_no_thread_is_left_where_planning_fails(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    anneal = Search.anneal

    def failing(self: Search, changes: int, actions: Sequence[int]) -> None:
        if (threading.current_thread() is threading.main_thread()) == (where == "search"):
            raise KeyboardInterrupt
        anneal(self, changes, actions)

    monkeypatch.setattr(Search, "anneal", failing)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        SHORT(*where_nothing_leads_to_replays())
    assert threading.active_count() == before


# What a plan costs the host beside an H200, as bench/gaps.py has it.
A_HOST = HostCosts(
    tick=8e-6, swap_out=110e-6, release=50e-6, drop=60e-6, prefetch=90e-6, await_=30e-6, replay=40e-6, replay_op=38e-6
)


def evaluations(plan: Plan) -> int:
    return int(plan.notes[-1].rsplit(";", 1)[1].split()[0])


@pytest.mark.parametrize("name", ["bert", "unet"])
def test_a_plan_for_more_is_as_good_a_start_as_all_the_others(name: str) -> None:
    """Where a little less is asked for, time and again."""
    trace = traceio.load(TRACES / f"{name}.json.gz")
    hardware = dataclasses.replace(PRESETS["h200"], host=A_HOST)
    floor = floor_bytes(trace)
    budget = floor + (peak_of(trace) - floor) // 3
    plan = Auto()(trace, hardware, budget)
    for share in (0.97, 0.94):
        less = int(budget * share)
        anew, plan = Auto()(trace, hardware, less), tighter(Auto(), plan)(trace, hardware, less)
        assert_honest(trace, hardware, less, plan)
        assert plan.predicted_seconds <= anew.predicted_seconds * 1.005
        assert plan.gap is not None
        assert evaluations(plan) < evaluations(anew) / 2


def test_a_plan_of_another_step_is_no_start() -> None:
    trace, other = make_trace(86, forward=6), make_trace(87, forward=6)
    plan = SHORT(trace, LINK, budgets(trace)[2])
    with pytest.raises(PlanError, match="the plan is for trace"):
        tighter(SHORT, plan)(other, LINK, budgets(other)[1])


def test_other_planners_start_as_always() -> None:
    trace = make_trace(86, forward=6)
    planner = PLANNERS["capuchin"]
    assert tighter(planner, SHORT(trace, LINK, budgets(trace)[2])) is planner


def test_plans_of_replays_alone_are_found_where_nothing_leads_to_them() -> None:
    trace, hardware, budget = where_nothing_leads_to_replays()
    assert len(trace.gaps) <= 40
    best = Checkmate(time_limit_seconds=5.0)(trace, hardware, budget).predicted_seconds
    for planner in (Auto(), Optimal(time_limit_seconds=5.0)):
        assert planner(trace, hardware, budget).predicted_seconds <= 1.01 * best
