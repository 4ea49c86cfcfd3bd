"""No plan is below the bound, and on simple steps some plan is at it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from legroom import traceio
from legroom.bound import LinearProgram, Relaxation, lower_bound, ticks_that_matter
from legroom.errors import PlanError
from legroom.evaluate import OVERLAP, SYNC, Evaluator, floor_bytes
from legroom.hardware import PRESETS, Hardware, HostCosts
from legroom.ir import Trace
from legroom.schedule import check_schedule, lower
from legroom.simulate import simulate
from legroom.tables import G_END, G_START, NEVER, tabulate
from tests.pure.strategies import hardwares, host_costs, make_trace, plans_for, traces
from tests.pure.test_schedule import LINK, chain


def link(rate: float) -> Hardware:
    names = ("out", "in", "duplex_out", "duplex_in")
    return dataclasses.replace(LINK, **{f"{name}_bytes_per_second": rate for name in names})  # type: ignore[arg-type]


SLOW = link(1e3)  # nothing worth mentioning comes over it
WAITING = dataclasses.replace(LINK, synchronous=True, copy_compute_share=0.5)


def fast_plans(trace: Trace, hardware: Hardware, seed: int) -> list[tuple[int, int]]:
    """(peak, nanoseconds) of all plans, or of random ones; those alone that no other of them beats in both."""
    evaluator = Evaluator(trace, hardware)
    rng = np.random.default_rng(seed)
    if evaluator.gaps <= 4:
        plans = [np.array(codes, np.int8) for codes in itertools.product(range(5), repeat=evaluator.gaps)]
    else:
        mixes = [rng.dirichlet(np.full(5, 0.7)) for _ in range(100)]
        plans = [rng.choice(5, evaluator.gaps, p=mix).astype(np.int8) for mix in mixes]
    plans.append(np.full(evaluator.gaps, SYNC, np.int8))
    costs = [evaluator.evaluate(codes) for codes in plans]
    found = [(peak, nanoseconds) for nanoseconds, peak in costs if nanoseconds < NEVER]
    best = NEVER
    out = []
    for peak, nanoseconds in sorted(found):
        if nanoseconds < best:
            best = nanoseconds
            out.append((peak, nanoseconds))
    return out


@given(traces(), hardwares(), st.integers(0, 2**32), st.sampled_from((2, 6, 1000)))
@settings(max_examples=10, deadline=None)
def test_no_plan_is_below_the_bound(trace: Trace, hardware: Hardware, seed: int, most_ticks: int) -> None:
    for peak, nanoseconds in fast_plans(trace, hardware, seed):
        assert lower_bound(trace, hardware, peak, most_ticks=most_ticks).seconds <= nanoseconds / 1e9


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_no_plan_of_any_kind_is_below_the_bound(data: st.DataObject) -> None:
    """Those that fetch ahead too, which no planner that searches knows; on hosts that have much to do too."""
    trace, hardware = data.draw(traces()), data.draw(hardwares())
    hardware = dataclasses.replace(hardware, host=data.draw(host_costs()))
    try:
        schedule = lower(trace, data.draw(plans_for(trace)), hardware)
    except PlanError:
        return
    peak, seconds = check_schedule(trace, schedule), simulate(trace, schedule, hardware).seconds
    assert lower_bound(trace, hardware, peak, most_ticks=data.draw(st.sampled_from((2, 6, 1000)))).seconds <= seconds


# What an earlier copy serves.
SLOW_TO_DROP = dataclasses.replace(link(3.3e9), latency_seconds=0.0, host=HostCosts(drop=80e-6))


@example(make_trace(0, forward=1), SLOW_TO_DROP, 2)
@given(traces(), hardwares(), st.sampled_from((2, 6, 1000)))
@settings(max_examples=15, deadline=None)
def test_the_program_has_room_for_a_plan_that_waits_for_every_copy(
    trace: Trace, hardware: Hardware, most_ticks: int
) -> None:
    """If its times were limited to less, it might have no solution where there is a plan."""
    evaluator = Evaluator(trace, hardware)
    nanoseconds, peak = evaluator.evaluate(np.full(evaluator.gaps, SYNC, np.int8))
    relaxed = Relaxation(evaluator.tables, peak, most_ticks=most_ticks)
    assert relaxed.longest * relaxed.unit_ns >= nanoseconds
    assert relaxed.program.solve(60.0)[0] is not None


@pytest.mark.parametrize("hardware", [PRESETS["h200"], PRESETS["cpu"], LINK, SLOW, WAITING], ids=lambda h: h.name)
@pytest.mark.parametrize(("issue", "seed"), [(0.0, 0), (2e-6, 1), (60e-6, 0)])
def test_no_plan_is_below_the_bound_where_the_host_is_slow(hardware: Hardware, issue: float, seed: int) -> None:
    trace = make_trace(seed, forward=12)
    trace = dataclasses.replace(trace, ops=tuple(dataclasses.replace(op, issue_seconds=issue) for op in trace.ops))
    for peak, nanoseconds in fast_plans(trace, hardware, seed):
        assert lower_bound(trace, hardware, peak).seconds <= nanoseconds / 1e9


@given(traces(), hardwares(), host_costs(), st.booleans(), st.integers(0, 2**32), st.sampled_from((2, 6, 1000)))
@settings(max_examples=10, deadline=None)
def test_no_plan_is_below_the_bound_where_the_host_has_much_to_do(
    trace: Trace, hardware: Hardware, host: HostCosts, waits: bool, seed: int, most_ticks: int
) -> None:
    hardware = dataclasses.replace(hardware, host=host, synchronous=waits)
    for peak, nanoseconds in fast_plans(trace, hardware, seed):
        assert lower_bound(trace, hardware, peak, most_ticks=most_ticks).seconds <= nanoseconds / 1e9


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("name", HostCosts.__slots__)
def test_no_plan_for_a_chain_is_below_the_bound_whatever_keeps_the_host(name: str, waits: bool) -> None:
    """All plans: among them those in which one replay brings back all that is shared on its way."""
    for hardware in (LINK, SLOW):
        hardware = dataclasses.replace(hardware, host=HostCosts(**{name: 20e-6}), synchronous=waits)
        for peak, nanoseconds in fast_plans(chain(5), hardware, 0):
            for most_ticks in (3, 1000):
                assert lower_bound(chain(5), hardware, peak, most_ticks=most_ticks).seconds <= nanoseconds / 1e9


def test_where_anything_must_be_done_the_hooks_are_paid_for() -> None:
    """17 ops of 1 µs and 17 ticks of 3 µs, after the last of which an op is to come."""
    trace = chain(8)
    hardware = dataclasses.replace(LINK, host=HostCosts(tick=3e-6))
    assert lower_bound(trace, hardware, trace.peak_bytes).seconds == 17e-6
    assert lower_bound(trace, hardware, trace.peak_bytes - 1).seconds == pytest.approx(52e-6, rel=1e-6)
    waiting = dataclasses.replace(hardware, synchronous=True)
    assert lower_bound(trace, waiting, trace.peak_bytes - 1).seconds == pytest.approx((17 + 17 * 3) * 1e-6, rel=1e-6)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(
    ("name", "microseconds"), [("swap_out", 111), ("release", 102), ("prefetch", 102), ("await_", 102)]
)
def test_what_must_be_copied_keeps_the_host(name: str, microseconds: float, waits: bool) -> None:
    """Nothing can be recomputed, and 2 KB of 8 must be away from tick 7 to 9.

    Both must start to leave by tick 6, after which there are 11 ops to come. The rest can wait until tick 15, with two
    ops to come. A host that waits for compute has all 17 beside that.
    """
    trace = chain(8)
    trace = dataclasses.replace(trace, ops=tuple(dataclasses.replace(op, why_not="random") for op in trace.ops))
    hardware = dataclasses.replace(LINK, host=HostCosts(**{name: 50e-6}), synchronous=waits)
    expected = 117 if waits else microseconds
    assert lower_bound(trace, hardware, 6000).seconds * 1e6 == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("name", "microseconds"), [("drop", 164), ("replay_op", 152)])
def test_what_must_be_recomputed_keeps_the_host(name: str, microseconds: float, waits: bool) -> None:
    """Three storages of a kilobyte, each by an op of its own: dropped by tick 6, with 14 ops to come, or made by 15."""
    hardware = dataclasses.replace(SLOW, host=HostCosts(**{name: 50e-6}), synchronous=waits)
    expected = 170 if waits else microseconds
    assert lower_bound(chain(8), hardware, 5000).seconds * 1e6 == pytest.approx(expected, rel=1e-3)


def test_what_is_not_done_costs_the_host_nothing() -> None:
    """As in test_what_a_chain_takes: three ops again, or swaps that are free."""
    swaps = HostCosts(swap_out=50e-6, release=50e-6, prefetch=50e-6, await_=50e-6)
    replays = HostCosts(drop=50e-6, replay=50e-6, replay_op=50e-6)
    for hardware, host, budget, expected in ((SLOW, swaps, 5000, 20e-6), (LINK, replays, 7000, 17e-6)):
        found = lower_bound(chain(8), dataclasses.replace(hardware, host=host), budget).seconds
        assert found == pytest.approx(expected, rel=5e-4)


def test_with_room_for_everything_it_is_the_plain_step() -> None:
    for hardware in (PRESETS["h200"], PRESETS["cpu"]):
        trace = make_trace(11, forward=12)
        evaluator = Evaluator(trace, hardware)
        nanoseconds, peak = evaluator.evaluate(np.zeros(evaluator.gaps, np.int8))
        assert lower_bound(trace, hardware, peak).seconds == nanoseconds / 1e9


def test_below_the_floor_there_is_no_plan() -> None:
    trace = make_trace(11, forward=12)
    floor = floor_bytes(trace)
    assert lower_bound(trace, LINK, floor).seconds < math.inf
    assert lower_bound(trace, LINK, floor - 1).seconds == math.inf


@pytest.mark.parametrize(
    ("hardware", "budget", "microseconds"),
    [
        (LINK, 7000, 17),  # a swap is free
        (SLOW, 7000, 18),  # one op again
        (SLOW, 5000, 20),  # one op for each kilobyte
        (dataclasses.replace(WAITING, copy_compute_share=1.0), 7000, 18),  # an op again is half of what two copies take
        (dataclasses.replace(WAITING, copy_compute_share=0.2), 7000, 17.2),  # the copy out may be the last fifth of it
        (dataclasses.replace(SLOW, latency_seconds=1.0), 6000, 19),
    ],
)
def test_what_a_chain_takes(hardware: Hardware, budget: int, microseconds: float) -> None:
    """Nine levels of a kilobyte, a microsecond for each op, for each kilobyte on LINK and for nothing else."""
    assert lower_bound(chain(8), hardware, budget).seconds == pytest.approx(microseconds * 1e-6, rel=5e-4)


def test_what_must_be_copied_takes_time() -> None:
    """Nothing can be recomputed, and 2 KB of 8 must be away from tick 7 to 9."""
    trace = chain(8)
    trace = dataclasses.replace(trace, ops=tuple(dataclasses.replace(op, why_not="random") for op in trace.ops))
    assert lower_bound(trace, LINK, 6000).seconds == pytest.approx(17e-6)
    # At 4 µs for a kilobyte, the first of which may leave after 1 µs, 2 KB are gone at 9 µs: tick 7 would be at 7. None
    # may start to come back before tick 10, now at 12 µs, so both are back at 20: tick 15 would be at 17.
    assert lower_bound(trace, link(0.25e9), 6000).seconds == pytest.approx(22e-6, rel=1e-3)


def test_an_op_that_is_not_in_memory_by_itself_is_paid_for_too() -> None:
    """Op 1 reads what op 0 made, which is saved by nobody: to recompute x2 runs both."""
    trace = chain(4)
    storages = list(trace.storages)
    storages[1] = dataclasses.replace(storages[1], gaps=(), kind="temporary")
    trace = dataclasses.replace(trace, storages=tuple(storages))
    plain = lower_bound(trace, SLOW, trace.peak_bytes).seconds
    assert lower_bound(chain(4), SLOW, trace.peak_bytes - 1000).seconds == pytest.approx(plain + 1e-6)
    assert lower_bound(trace, SLOW, trace.peak_bytes - 1000).seconds == pytest.approx(plain + 2e-6)


@given(traces(), hardwares())
@settings(max_examples=6, deadline=None)
def test_more_memory_never_lifts_it(trace: Trace, hardware: Hardware) -> None:
    floor, peak = floor_bytes(trace), max(trace.head_peak_bytes, trace.peak_bytes)
    bounds = [lower_bound(trace, hardware, floor + (peak - floor) * part // 4).seconds for part in range(5)]
    for tighter, wider in itertools.pairwise(bounds):
        assert wider <= tighter * (1 + 1e-6)


@pytest.mark.parametrize("rate", [1e9, 0.5e9, 0.25e9])
@pytest.mark.parametrize("why_not", ["", "random"])
def test_to_look_at_a_chain_more_coarsely_never_lifts_it(rate: float, why_not: str) -> None:
    trace = dataclasses.replace(chain(8), ops=tuple(dataclasses.replace(o, why_not=why_not) for o in chain(8).ops))
    for budget in (4000, 7500):
        fine = lower_bound(trace, link(rate), budget).seconds
        for most_ticks in (2, 3, 5, 8, 11):
            assert lower_bound(trace, link(rate), budget, most_ticks=most_ticks).seconds <= fine * (1 + 1e-6)


@given(traces(), st.integers(2, 30), st.floats(0.0, 1.0))
@settings(max_examples=30, deadline=None)
def test_no_more_ticks_are_looked_at_than_asked_for(trace: Trace, most: int, share: float) -> None:
    tables = tabulate(trace, LINK)
    floor = floor_bytes(trace)
    kept = ticks_that_matter(tables, floor + int(share * (trace.peak_bytes - floor)), most)
    real = tables.gaps[tables.gaps[:, G_START] < tables.gaps[:, G_END]]
    events = set(real[:, [G_START, G_END]].ravel().tolist())
    assert kept == sorted(set(kept))
    assert len(kept) <= 3 * most + 2  # two more at most before, between and after them
    assert set(kept) >= (events if len(events) <= most else {min(events), max(events)})


@pytest.mark.parametrize(
    ("name", "machine"), [("mobilenet", "h200"), ("resnet152", "rtx2080ti-pcie3"), ("gpt", "h200")]
)
def test_of_recorded_steps_a_fifth_of_the_ticks_tell_nearly_all(name: str, machine: str) -> None:
    trace = traceio.load(Path(__file__).parents[1] / "traces" / f"{name}.json.gz")
    floor = floor_bytes(trace)
    budget = floor + (trace.peak_bytes - floor) // 4
    fine, coarse = (lower_bound(trace, PRESETS[machine], budget, most_ticks=most).seconds for most in (10**6, 200))
    assert (1 - 1e-4) * fine <= coarse <= fine * (1 + 1e-6)


@pytest.mark.parametrize("most_ticks", [2, 1000])
def test_a_second_gap_needs_no_second_copy(most_ticks: int) -> None:
    """x2 leaves in its first gap, and must be away as soon as the second has begun; a copy out takes two ops.

    Coarsely looked at, there is no first gap, as neither its start nor its end is kept. x1 is there to see to that.
    """
    gaps = {1: ((1, 15),), 2: ((2, 6), (9, 14))}
    trace = chain(8)
    storages = [dataclasses.replace(s, gaps=gaps.get(s.id, ()), nbytes=s.nbytes * (s.id != 1)) for s in trace.storages]
    ticks = [dataclasses.replace(tick, level_bytes=2000, peak_bytes=2000) for tick in trace.ticks]
    ticks[9] = dataclasses.replace(ticks[9], peak_bytes=2500)
    ops = [dataclasses.replace(op, why_not="random") for op in trace.ops]
    trace = dataclasses.replace(trace, storages=tuple(storages), ops=tuple(ops), ticks=tuple(ticks))
    hardware = dataclasses.replace(LINK, out_bytes_per_second=0.5e9, duplex_out_bytes_per_second=0.5e9)
    evaluator = Evaluator(trace, hardware)
    plain = evaluator.evaluate(np.zeros(3, np.int8))[0]
    assert evaluator.evaluate(np.array([0, OVERLAP, OVERLAP], np.int8)) == (plain, 2000)
    assert evaluator.evaluate(np.array([0, 0, SYNC], np.int8))[0] > plain
    assert lower_bound(trace, hardware, 2000, most_ticks=most_ticks).seconds == plain / 1e9


@given(traces(), hardwares(), st.integers(0, 2**32))
@settings(max_examples=6, deadline=None)
def test_any_duals_prove_something_true(trace: Trace, hardware: Hardware, seed: int) -> None:
    """A solver that stops early, or is wrong, cannot lift the bound."""
    program = Relaxation(tabulate(trace, hardware), floor_bytes(trace)).program
    columns, duals = program.solve(60.0)
    if columns is None:
        return
    best = float(columns @ np.array(program.cost))
    rng = np.random.default_rng(seed)
    assert program.proven(duals) == pytest.approx(best, rel=1e-6, abs=1e-6)
    for scale in (0.0, 0.1, 1.0):
        assert program.proven(duals + rng.normal(size=len(duals)) * scale) <= best * (1 + 1e-6) + 1e-6
    assert program.proven(np.full(len(duals), math.nan)) == 0.0


def test_out_of_time_it_is_still_a_bound() -> None:
    trace = make_trace(5, forward=40)
    bound = lower_bound(trace, PRESETS["cpu"], floor_bytes(trace), time_limit_seconds=0.0)
    plain = Evaluator(trace, PRESETS["cpu"]).evaluate(np.zeros(len(trace.gaps), np.int8))[0]
    in_time = lower_bound(trace, PRESETS["cpu"], floor_bytes(trace)).seconds
    assert plain / 1e9 <= bound.seconds <= in_time * (1 + 1e-9)  # what takes no time at all may be solved all the same


def test_fractions_say_what_to_do() -> None:
    bound = lower_bound(chain(8), SLOW, 5000)
    assert bound.recomputed.sum() == pytest.approx(3.0, abs=1e-3)
    assert bound.swapped.sum() == pytest.approx(0.0, abs=1e-3)
    assert len(bound.swapped) == len(chain(8).gaps)


def test_a_linear_program_by_hand() -> None:
    """The least of 2x + 3y where x + y >= 4 and x <= 3."""
    program = LinearProgram()
    x, y = program.column(3.0, cost=2.0), program.column(10.0, cost=3.0)
    program.row((x, 1.0), (y, 1.0), least=4.0)
    columns, duals = program.solve(10.0)
    assert columns is not None
    assert columns.tolist() == pytest.approx([3.0, 1.0])
    assert program.proven(duals) == pytest.approx(9.0)
