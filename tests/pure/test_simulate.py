"""The lane model against sums done by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.hardware import Hardware, HostCosts
from legroom.ir import Trace
from legroom.plan import Decision, Keep, Recompute, Swap
from legroom.schedule import check_schedule, lower
from legroom.simulate import simulate
from legroom.timeline import Stall, Timeline
from tests.pure.strategies import hardwares, make_plan, plans_for, traces
from tests.pure.test_schedule import LINK, chain, lower_what_is_possible


def simulated(trace: Trace, *decisions: Decision, hardware: Hardware = LINK) -> Timeline:
    return simulate(trace, lower(trace, make_plan(trace, decisions), hardware), hardware)


def microseconds(timeline: Timeline) -> float:
    return round(timeline.seconds * 1e6, 3)


def with_issue(trace: Trace, seconds: float) -> Trace:
    return dataclasses.replace(trace, ops=tuple(dataclasses.replace(op, issue_seconds=seconds) for op in trace.ops))


def test_keeping_everything_takes_the_time_of_the_ops() -> None:
    timeline = simulated(chain(4), Keep(), Keep(), Keep())  # 9 ops of 1 µs
    assert microseconds(timeline) == 9
    assert timeline.stalls == ()
    assert timeline.breakdown.computation_seconds == pytest.approx(9e-6)


def test_the_host_can_be_the_bottleneck() -> None:
    assert microseconds(simulated(with_issue(chain(4), 3e-6), Keep(), Keep(), Keep())) == 9 * 3 + 1
    assert microseconds(simulated(with_issue(chain(4), 0.25e-6), Keep(), Keep(), Keep())) == 0.25 + 9


def test_a_host_that_waits_adds_issue_to_every_op() -> None:
    waiting = dataclasses.replace(LINK, synchronous=True)
    assert microseconds(simulated(with_issue(chain(4), 0.25e-6), Keep(), Keep(), Keep(), hardware=waiting)) == 9 * 1.25


def on_host(**costs: float) -> Hardware:
    """LINK with a host that takes so many microseconds for each of these."""
    return dataclasses.replace(LINK, host=HostCosts(**{name: cost * 1e-6 for name, cost in costs.items()}))


def test_hooks_cost_time_only_where_anything_is_done() -> None:
    """Nine ticks and nine ops; the last op is issued after the last tick."""
    assert microseconds(simulated(chain(4), Keep(), Keep(), Keep(), hardware=on_host(tick=3))) == 9
    assert microseconds(simulated(chain(4), Swap(), Keep(), Keep(), hardware=on_host(tick=3))) == 9 * 3 + 1
    assert microseconds(simulated(chain(4), Swap(), Keep(), Keep(), hardware=on_host(tick=0.5))) == 9 + 0.5


@pytest.mark.parametrize(
    ("decision", "costs", "expected"),
    [
        (Swap(when="sync"), {"swap_out": 50}, 50 + 1 + 7 + 1),  # at tick 2: then its copy, seven ops, its copy back
        (Swap(when="sync"), {"release": 50}, 50 + 7 + 1),  # beside the copy out
        (Swap(when="sync"), {"prefetch": 50}, 50 + 1 + 3),  # at tick 6, with three ops to come
        (Swap(when="sync"), {"await_": 50}, 50 + 3),
        (Swap(), {"release": 50}, 50 + 6),  # at tick 3, when its copy is done
        (Recompute(), {"drop": 50}, 50 + 7 + 1),
        (Recompute(), {"replay": 50}, 50 + 1 + 3),
        (Recompute(), {"replay_op": 50}, 50 + 1 + 3),
        (Recompute(), {"swap_out": 50, "release": 50, "prefetch": 50, "await_": 50}, 9 + 1),
        (Swap(when="sync"), {"drop": 50, "replay": 50, "replay_op": 50}, 9 + 2),
    ],
)
def test_what_an_instruction_costs_the_host(decision: Decision, costs: dict[str, float], expected: float) -> None:
    """Nothing else keeps the host, so what it takes begins at once; compute has nothing to do before that is over."""
    assert microseconds(simulated(chain(4), Keep(), decision, Keep(), hardware=on_host(**costs))) == expected


def test_a_host_that_waits_pays_after_compute() -> None:
    waiting = dataclasses.replace(on_host(tick=0.5, replay=2, replay_op=3, drop=4), synchronous=True)
    timeline = simulated(chain(4), Keep(), Recompute(), Keep(), hardware=waiting)
    assert microseconds(timeline) == 9 + 9 * 0.5 + 1 + 2 + 3 + 4


def test_a_copy_does_not_begin_before_it_is_issued() -> None:
    timeline = simulated(chain(4), Swap(), Keep(), Keep(), hardware=on_host(swap_out=2.5, prefetch=0.25))
    copies = [(i.lane, i.start_ns, i.end_ns) for i in timeline.intervals if i.lane in ("out", "in")]
    assert copies[0] == ("out", 2500, 3500)  # compute is at tick 1 after a microsecond
    assert copies[1][0] == "in"
    assert microseconds(timeline) == 2.5 + 8  # the other ops wait for the host


def test_while_compute_waits_the_host_goes_on() -> None:
    """The copy out takes from 1 to 11 µs, and compute waits for it; the host has done all it must by then."""
    slow = dataclasses.replace(on_host(tick=1, release=2), out_bytes_per_second=1e8, duplex_out_bytes_per_second=1e8)
    timeline = simulated(chain(4), Swap(when="sync"), Keep(), Keep(), hardware=slow)
    out = next(i for i in timeline.intervals if i.lane == "out")
    assert out.end_ns - out.start_ns == 10_000
    assert [i for i in timeline.intervals if i.lane == "compute"][1].start_ns == out.end_ns
    assert next(i for i in timeline.intervals if i.cause == "tick 2").end_ns < out.end_ns


def test_only_what_compute_could_have_used_is_a_stall() -> None:
    """The copy out takes a microsecond of the three that the host takes for its release."""
    timeline = simulated(chain(4), Keep(), Swap(when="sync"), Keep(), hardware=on_host(release=3))
    assert timeline.stalls == (Stall(6, 2, 1e-6, "await"),)


def test_what_the_host_does_is_in_the_picture() -> None:
    costs = on_host(tick=0.1, swap_out=0.2, release=0.3, drop=0.4, prefetch=0.5, await_=0.6, replay=0.7, replay_op=0.8)
    timeline = simulated(chain(4), Swap(), Recompute(), Keep(), hardware=costs)
    found = {}
    for interval in timeline.intervals:
        if interval.lane == "host" and not interval.cause.startswith("op "):
            found[interval.label, interval.cause.partition(" ")[2]] = interval.end_ns - interval.start_ns
    ticks = {("tick", str(index)): 100 for index in range(9)}
    assert found == ticks | {
        ("swap-out", "of storage 1"): 200,
        ("release", "of storage 1"): 300,
        ("drop", "of storage 2"): 400,
        ("prefetch", "of storage 1"): 500,
        ("await", "of storage 1"): 600,
        ("replay", "of storage 2"): 700,
        ("op1", "of storage 2"): 800,
    }
    plain = simulated(chain(4), Swap(), Recompute(), Keep())
    assert {i.label for i in plain.intervals if i.lane == "host"} == {op.name for op in chain(4).ops}


def test_an_overlapped_swap_is_free() -> None:
    timeline = simulated(chain(4), Swap(), Keep(), Keep())
    assert microseconds(timeline) == 9
    assert timeline.breakdown.overlapped_copy_seconds == pytest.approx(2e-6)
    assert [(i.lane, i.start_ns, i.end_ns) for i in timeline.intervals if i.lane in ("out", "in")] == [
        ("out", 1000, 2000),
        ("in", 5000, 6000),
    ]


def test_a_synchronous_swap_stalls_both_ways() -> None:
    timeline = simulated(chain(4), Keep(), Swap(when="sync"), Keep())
    assert microseconds(timeline) == 9 + 2
    assert timeline.stalls == (Stall(2, 2, 1e-6, "release"), Stall(6, 2, 1e-6, "await"))
    assert timeline.breakdown.stalled_copy_seconds == pytest.approx(2e-6)
    assert timeline.breakdown.overlapped_copy_seconds == 0


def test_latency_counts_once_for_each_copy() -> None:
    slow = dataclasses.replace(LINK, latency_seconds=0.5e-6)
    assert microseconds(simulated(chain(4), Keep(), Swap(when="sync"), Keep(), hardware=slow)) == 9 + 2 * 1.5


def test_a_replay_occupies_compute_and_host() -> None:
    timeline = simulated(with_issue(chain(4), 2e-6), Recompute(), Recompute(), Recompute())
    assert timeline.breakdown.recomputation_seconds == pytest.approx(6e-6)
    assert microseconds(timeline) == (9 + 6) * 2 + 1


def test_a_copy_takes_its_share_from_compute() -> None:
    shared = dataclasses.replace(LINK, copy_compute_share=0.5)
    timeline = simulated(chain(4), Swap(), Keep(), Keep(), hardware=shared)
    assert microseconds(timeline) == 9 + 2 * 0.5
    assert timeline.breakdown.stalled_copy_seconds == pytest.approx(1e-6)


def test_a_copy_is_slower_while_the_other_lane_is_busy() -> None:
    # Storage 1 (gap 1..9) is fetched 4 ticks before its end, at tick 5 = 5 µs; storage 4 (gap 4..6) goes out from tick
    # 4 on, 4 to 5 µs alone. Storage 3 (gap 3..7) goes out at 3 µs; its copy is over at 4 µs.
    slow_together = dataclasses.replace(LINK, duplex_in_bytes_per_second=0.25e9, out_bytes_per_second=0.5e9)
    timeline = simulated(chain(5), Swap(when="ahead", ahead=4), Keep(), Keep(), Swap(), hardware=slow_together)
    copies = {(i.lane, i.cause[-1]): (i.start_ns, i.end_ns) for i in timeline.intervals if i.lane in ("out", "in")}
    # Nothing else is under way when storage 1 leaves; storage 4 cannot be out before it must be back, so it is not
    # copied.
    assert copies[("out", "1")] == (1000, 3000)
    assert copies[("in", "1")] == (5000, 6000)
    assert ("out", "4") not in copies
    # With storage 3 going out from 3 to 5 µs, a fetch at 4 µs has the lane for itself only from 5 µs on: it moves a
    # quarter of its bytes by then and needs three quarters of a microsecond more.
    timeline = simulated(chain(5), Swap(when="ahead", ahead=5), Keep(), Swap(), Keep(), hardware=slow_together)
    copies = {(i.lane, i.cause[-1]): (i.start_ns, i.end_ns) for i in timeline.intervals if i.lane in ("out", "in")}
    assert copies[("out", "3")] == (3000, 5000)
    assert copies[("in", "1")] == (4000, 5750)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_lanes_never_run_two_things_at_once_and_time_adds_up(data: st.DataObject) -> None:
    trace = data.draw(traces())
    hardware = data.draw(hardwares())
    _, schedule = lower_what_is_possible(trace, data.draw(plans_for(trace)), hardware)
    timeline = simulate(trace, schedule, hardware)
    for lane in ("host", "compute", "out", "in"):
        free = 0
        for interval in timeline.intervals:
            if interval.lane == lane:
                assert interval.start_ns >= free
                free = interval.end_ns
    assert timeline.peak_bytes == check_schedule(trace, schedule)
    assert len(timeline.memory) == len(trace.ticks)
    parts = timeline.breakdown
    busy = parts.computation_seconds + parts.recomputation_seconds
    assert timeline.seconds >= busy - 1e-12
    if not hardware.synchronous:
        issue = sum(i.end_ns - i.start_ns for i in timeline.intervals if i.lane == "host") / 1e9
        assert timeline.seconds <= busy + issue + parts.stalled_copy_seconds + 1e-12
