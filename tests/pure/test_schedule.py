"""lower() against hand-written answers, check_schedule() against broken schedules, and both against random plans."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.errors import PlanError
from legroom.evaluate import RECOMPUTE, Evaluator
from legroom.hardware import PRESETS, Hardware
from legroom.ir import Op, Storage, Tick, Trace, Value, validate
from legroom.plan import Decision, Keep, Plan, Recompute, Swap, signature
from legroom.schedule import (
    Await,
    Drop,
    Instruction,
    Prefetch,
    Release,
    Replay,
    Schedule,
    SwapOut,
    check_schedule,
    from_json,
    lower,
    memory_curve,
    to_json,
)
from tests.pure.strategies import hardwares, make_plan, make_trace, plans_for, traces

KB = 1000
# 1 MB/ms both ways, no latency: a storage of 1000 bytes takes 1 µs, an op takes 1 µs.
LINK = dataclasses.replace(
    PRESETS["h200"],
    out_bytes_per_second=1e9,
    in_bytes_per_second=1e9,
    duplex_out_bytes_per_second=1e9,
    duplex_in_bytes_per_second=1e9,
    latency_seconds=0.0,
)


def storage(
    index: int, nbytes: int = KB, *, gaps: tuple[tuple[int, int], ...] = (), version: int = 0, **more: bool
) -> Storage:
    persistent = more.get("persistent", False)
    kind = "parameter" if persistent else "activation" if gaps else "temporary"
    return Storage(index, nbytes, kind, persistent, more.get("held", False), gaps, version, "")  # type: ignore[arg-type]


def op(index: int, reads: tuple[Value, ...], writes: tuple[Value, ...], *, workspace: int = 0, why_not: str = "") -> Op:
    return Op(index, f"op{index}", "forward", 1e-6, 0.0, reads, writes, workspace, why_not, "", "")


def trace_of(storages: list[Storage], ops: list[Op], issued: list[int], *, base: int = 0) -> Trace:
    """Levels: everything persistent or within its gaps (ends included), plus `base`."""
    ticks = []
    for index, done in enumerate(issued):
        level = base + sum(s.nbytes for s in storages if s.persistent or any(a <= index <= b for a, b in s.gaps))
        ticks.append(Tick("pack", 0, done, level, level))
    trace = Trace(tuple(storages), tuple(ops), tuple(ticks), 0, "cuda")
    validate(trace)
    return trace


def chain(length: int, *, why_not: str = "") -> Trace:
    """x0 is a parameter; op i makes x(i+1) from x(i); then one op and one tick for each, backwards."""
    ops = [op(i, ((i, 0),), ((i + 1, 0),), why_not=why_not if i == 0 else "") for i in range(length)]
    ops += [op(length + i, (), ()) for i in range(length + 1)]
    storages = [storage(0, persistent=True)]
    storages += [storage(i, gaps=((i, 2 * length - i),)) for i in range(1, length)] + [storage(length)]
    return trace_of(storages, ops, list(range(2 * length + 1)))


def lowered(trace: Trace, *decisions: Decision, hardware: Hardware = LINK) -> tuple[Instruction, ...]:
    schedule = lower(trace, make_plan(trace, decisions), hardware)
    check_schedule(trace, schedule)
    return schedule.instructions


def test_keeping_needs_no_instruction() -> None:
    trace = chain(4)
    assert lowered(trace, Keep(), Keep(), Keep()) == ()
    assert check_schedule(trace, Schedule((), signature(trace))) == trace.peak_bytes == 4 * KB


def test_an_overlapped_swap_is_released_when_its_copy_is_done_and_fetched_just_in_time() -> None:
    # Gap 1..7. The copy takes one op, so it is done at tick 2. A fetch of one op and an eighth for tick 7 starts at 5.
    assert lowered(chain(4), Swap(), Keep(), Keep()) == (SwapOut(1, 1), Release(2, 1), Prefetch(5, 1), Await(7, 1))


def test_swaps_wait_for_each_other_on_a_lane() -> None:
    slow = dataclasses.replace(LINK, out_bytes_per_second=0.5e9)  # two ops for a copy out
    made = lowered(chain(5), Swap(), Swap(), Keep(), Keep(), hardware=slow)
    assert [i for i in made if isinstance(i, Release)] == [Release(3, 1), Release(5, 2)]


def test_a_synchronous_swap_is_away_for_its_whole_gap() -> None:
    made = lowered(chain(4), Keep(), Swap(when="sync"), Keep())
    assert made == (SwapOut(2, 2), Release(2, 2), Prefetch(6, 2), Await(6, 2))


@pytest.mark.parametrize(("ahead", "tick"), [(0, 7), (1, 6), (3, 4), (99, 3)])
def test_fetching_ahead(ahead: int, tick: int) -> None:
    made = lowered(chain(4), Swap(when="ahead", ahead=ahead), Keep(), Keep())
    assert [i for i in made if isinstance(i, Prefetch)] == [Prefetch(tick, 1)]


def test_a_swap_that_frees_no_segment_is_left_out() -> None:
    slow = dataclasses.replace(LINK, out_bytes_per_second=1e8)
    assert lowered(chain(4), Swap(), Keep(), Keep(), hardware=slow) == ()


def test_a_replay_reads_what_is_kept() -> None:
    assert lowered(chain(4), Keep(), Keep(), Recompute()) == (Drop(3, 3), Replay(5, 3, (2,)))


def test_a_replay_of_a_chain_starts_at_what_is_there() -> None:
    made = lowered(chain(4), Recompute(), Recompute(), Recompute())
    assert [i for i in made if isinstance(i, Replay)] == [
        Replay(5, 3, (0, 1, 2)),
        Replay(6, 2, (0, 1)),
        Replay(7, 1, (0,)),
    ]


def test_what_is_shared_stays_once_a_replay_has_made_it() -> None:
    trace, share = chain(4), Recompute(share=True)
    made = lowered(trace, share, share, share)
    assert made == (Drop(1, 1), Drop(2, 2), Drop(3, 3), Replay(5, 3, (0, 1, 2), also=(1, 2)))
    # x0 stands alone at first, then x1 to x3 beside it; each goes after its own use.
    curve = memory_curve(trace, Schedule(made, signature(trace)))
    assert curve[4:] == ((4, KB, KB), (5, 4 * KB, 4 * KB), (6, 3 * KB, 3 * KB), (7, 2 * KB, 2 * KB), (8, KB, KB))


def test_what_is_not_shared_is_thrown_away_by_a_replay_that_others_share() -> None:
    share = Recompute(share=True)
    made = lowered(chain(4), Recompute(), share, share)
    assert [i for i in made if isinstance(i, Replay)] == [Replay(5, 3, (0, 1, 2), also=(2,)), Replay(7, 1, (0,))]
    made = lowered(chain(4), share, Recompute(), Recompute())
    assert [i for i in made if isinstance(i, Replay)] == [Replay(5, 3, (0, 1, 2), also=(1,)), Replay(6, 2, (1,))]


def test_what_is_shared_and_never_made_on_the_way_is_replayed_by_itself() -> None:
    assert lowered(chain(4), Keep(), Keep(), Recompute(share=True)) == (Drop(3, 3), Replay(5, 3, (2,)))


def test_outputs_of_one_op_come_back_together() -> None:
    trace = two_outputs()
    made = lowered(trace, Recompute(share=True), Recompute(share=True))
    assert made == (Drop(1, 1), Drop(2, 2), Replay(4, 2, (0,), also=(1,)))
    assert lowered(trace, Recompute(), Recompute())[2:] == (Replay(4, 2, (0,)), Replay(5, 1, (0,)))
    assert lowered(trace, Keep(), Recompute(share=True))[1:] == (Replay(4, 2, (0,)),)


def two_outputs() -> Trace:
    """One op makes two storages, used one after the other."""
    ops = [op(0, ((0, 0),), ((1, 0), (2, 0))), *(op(i, (), ()) for i in range(1, 6))]
    storages = [storage(0, persistent=True), storage(1, gaps=((1, 5),)), storage(2, gaps=((2, 4),))]
    return trace_of(storages, ops, list(range(6)))


def test_what_a_replay_reads_where_its_own_gap_starts_does_not_go_away_if_shared() -> None:
    ops = [op(0, ((0, 0),), ((1, 0),)), op(1, ((1, 0),), ((2, 0),)), *(op(i, (), ()) for i in range(2, 7))]
    storages = [storage(0, persistent=True), storage(1, gaps=((1, 3), (4, 6))), storage(2, gaps=((2, 4),))]
    trace = trace_of(storages, ops, list(range(7)))
    made = lowered(trace, Keep(), Recompute(share=True), Recompute())
    assert made == (Drop(2, 2), Replay(4, 2, (1,)))
    made = lowered(trace, Keep(), Recompute(), Recompute())
    assert made == (Drop(2, 2), Drop(4, 1), Replay(4, 2, (0, 1)), Replay(6, 1, (0,)))


def test_what_stays_is_not_written_over_and_counts_to_the_end_of_the_replay() -> None:
    trace = in_place_trace()
    made = lowered(trace, Recompute(share=True), Recompute(share=True))
    assert made == (Drop(3, 1), Drop(3, 2), Replay(5, 2, (0, 1, 2), also=(1,)))
    assert memory_curve(trace, Schedule(made, signature(trace)))[5] == (5, 1110, 10 + 100 + 1000 + 5000)


def test_a_swapped_storage_comes_back_for_a_replay_that_reads_it() -> None:
    made = lowered(chain(4), Keep(), Swap(when="sync"), Recompute())
    assert made == (SwapOut(2, 2), Release(2, 2), Drop(3, 3), Prefetch(5, 2), Await(5, 2), Replay(5, 3, (2,)))


def test_an_unchanged_storage_is_copied_out_once() -> None:
    ops = [op(i, (), ((1, 0),) if i == 0 else ()) for i in range(8)]
    trace = trace_of([storage(0, persistent=True), storage(1, gaps=((1, 3), (4, 6)))], ops, list(range(8)))
    made = lowered(trace, Swap(when="sync"), Swap(when="sync"))
    assert made == (
        SwapOut(1, 1), Release(1, 1), Prefetch(3, 1), Await(3, 1), Drop(4, 1), Prefetch(6, 1), Await(6, 1),
    )  # fmt: skip


def test_a_gap_that_starts_where_the_last_one_ended_loses_that_tick() -> None:
    ops = [op(i, (), ((1, 0),) if i == 0 else ()) for i in range(8)]
    trace = trace_of([storage(0, persistent=True), storage(1, gaps=((1, 3), (3, 4), (4, 6)))], ops, list(range(8)))
    assert lowered(trace, Keep(), Swap(when="sync"), Swap(when="sync")) == (
        SwapOut(5, 1), Release(5, 1), Prefetch(6, 1), Await(6, 1),
    )  # fmt: skip


def in_place_trace(*, why_not: str = "") -> Trace:
    """op 0 makes y from w, op 1 changes y in place, op 2 makes z (and an unused u) from y; z and y have gaps."""
    ops = [
        op(0, ((0, 0),), ((1, 0),)),
        op(1, ((1, 0),), ((1, 1),), workspace=50),
        op(2, ((1, 1),), ((2, 0), (3, 0)), why_not=why_not),
        *(op(i, (), ()) for i in range(3, 8)),
    ]
    storages = [
        storage(0, 10, persistent=True),
        storage(1, 100, gaps=((3, 6),), version=1),
        storage(2, 1000, gaps=((3, 5),)),
        storage(3, 5000),
    ]
    return trace_of(storages, ops, list(range(8)))


def test_an_in_place_op_is_replayed_from_the_first_version_over_its_own_bytes() -> None:
    trace = in_place_trace()
    made = lowered(trace, Recompute(), Keep())
    assert made == (Drop(3, 1), Replay(6, 1, (0, 1)))
    # Tick 6: w alone stands. The first op adds y, the second works in its bytes with 50 bytes of workspace.
    assert memory_curve(trace, Schedule(made, signature(trace)))[6] == (6, 110, 10 + 100 + 50)


def test_what_a_replay_makes_on_the_way_counts_until_its_last_use() -> None:
    trace = in_place_trace()
    made = lowered(trace, Recompute(), Recompute())
    assert made == (Drop(3, 1), Drop(3, 2), Replay(5, 2, (0, 1, 2)), Replay(6, 1, (0, 1)))
    # Tick 5: w stands; y is made, changed in place, read by op 2 while z and the unused u stand.
    assert memory_curve(trace, Schedule(made, signature(trace)))[5] == (5, 1010, 10 + 100 + 1000 + 5000)


def test_an_in_place_op_works_on_a_copy_where_the_version_before_is_read_again() -> None:
    ops = [
        op(0, ((0, 0),), ((1, 0),)),
        op(1, ((1, 0),), ((1, 1), (2, 0))),
        op(2, ((1, 0), (2, 0)), ((3, 0),)),
        *(op(i, (), ()) for i in range(3, 7)),
    ]
    storages = [storage(0, 10, persistent=True), storage(1, 100), storage(2, 7), storage(3, 1000, gaps=((3, 5),))]
    trace = trace_of(storages, ops, list(range(7)))
    made = lowered(trace, Recompute())
    assert made == (Drop(3, 3), Replay(5, 3, (0, 1, 2)))
    # Op 1 stands on 100 bytes, their copy and 7 more; op 2 on 100, 7 and 1000, as nobody reads the changed copy.
    assert memory_curve(trace, Schedule(made, signature(trace)))[5] == (5, 1010, 10 + 100 + 7 + 1000)
    wide = dataclasses.replace(ops[1], workspace_bytes=5000)
    trace = trace_of(storages, [ops[0], wide, *ops[2:]], list(range(7)))
    curve = memory_curve(trace, Schedule(made, signature(trace)))
    assert curve[5] == (5, 1010, 10 + 100 + 100 + 7 + 5000)
    evaluator = Evaluator(trace, LINK)
    evaluator.evaluate(np.array([RECOMPUTE], np.int8))
    assert evaluator.curve().tolist() == [peak for _, _, peak in curve]


def test_a_parameter_that_was_written_over_cannot_be_read_by_a_replay() -> None:
    ops = [op(0, ((0, 0),), ((1, 0),)), op(1, ((0, 0),), ((0, 1),)), op(2, (), ()), op(3, (), ())]
    trace = trace_of([storage(0, persistent=True), storage(1, gaps=((1, 3),))], ops, list(range(4)))
    with pytest.raises(PlanError, match="op 0 op0 reads storage 0"):
        lowered(trace, Recompute())
    before = trace_of([storage(0, persistent=True), storage(1, gaps=((1, 3),))], ops, [0, 1, 1, 1])
    assert lowered(before, Recompute()) == (Drop(1, 1), Replay(3, 1, (0,)))


@pytest.mark.parametrize(
    ("trace", "decisions", "why"),
    [
        (chain(4, why_not="draws random numbers"), (Recompute(), Keep(), Keep()), "draws random numbers"),
        (chain(4, why_not="draws random numbers"), (Recompute(), Recompute(), Keep()), "gap 0"),
        (in_place_trace(why_not="has hidden state"), (Keep(), Recompute()), "hidden state"),
    ],
)
def test_an_impossible_replay_is_refused_with_the_reason(
    trace: Trace, decisions: tuple[Decision, ...], why: str
) -> None:
    with pytest.raises(PlanError, match=why):
        lowered(trace, *decisions)


def test_a_value_that_nothing_makes_cannot_be_replayed() -> None:
    ops = [op(i, (), ()) for i in range(4)]
    trace = trace_of([storage(0, gaps=((0, 2),))], ops, list(range(4)))
    with pytest.raises(PlanError, match="no op of the trace makes it"):
        lowered(trace, Recompute())


def test_a_held_storage_is_not_trusted_by_a_replay() -> None:
    ops = [op(0, (), ((0, 0),), why_not="x"), op(1, ((0, 0),), ((1, 0),)), op(2, (), ()), op(3, (), ())]
    trace = trace_of([storage(0, held=True), storage(1, gaps=((2, 3),))], ops, list(range(4)))
    with pytest.raises(PlanError, match="op 0"):
        lowered(trace, Recompute())


# What check_schedule() must catch, each a small damage to a sound schedule of chain(4).
BROKEN = {
    "not back": ((Drop(3, 3),), "tick 5: storage 3 is used here but is away"),
    "not awaited": ((SwapOut(1, 1), Release(2, 1), Prefetch(5, 1)), "tick 7: storage 1 is used here but is coming"),
    "released uncopied": ((Release(2, 1),), "host copy is none"),
    "fetched uncopied": ((Drop(1, 1), Prefetch(5, 1), Await(7, 1)), "host copy is none"),
    "dropped while copied": ((SwapOut(1, 1), Drop(2, 1)), "dropped while it is copied"),
    "freed twice": ((Drop(3, 3), Drop(4, 3)), "cannot be dropped: it is away"),
    "freed before its gap": ((Drop(2, 3),), "outside its gaps"),
    "freed at its use": ((Drop(5, 3),), "outside its gaps"),
    "no gap at all": ((Drop(1, 0),), "outside its gaps"),
    "copied twice": ((SwapOut(1, 1), SwapOut(2, 1)), "host copy is started"),
    "replayed in place": ((Replay(5, 3, (2,)),), "cannot be replayed: it is here"),
    "wrong op": ((Drop(3, 3), Replay(5, 3, (1,))), "do not end in the op that makes it"),
    "no ops": ((Drop(3, 3), Replay(5, 3, ())), "do not end in the op that makes it"),
    "ops out of order": ((Drop(3, 3), Replay(5, 3, (1, 0, 2))), "do not end in the op that makes it"),
    "input missing": ((Drop(2, 2), Drop(3, 3), Replay(5, 3, (2,))), "does not find (2, 0)"),
    "input on its way": (
        (SwapOut(2, 2), Release(2, 2), Drop(3, 3), Prefetch(5, 2), Replay(5, 3, (2,)), Await(6, 2)),
        "does not find (2, 0)",
    ),
    "made too but here": ((Drop(3, 3), Replay(5, 3, (1, 2), (2,))), "storage 2 cannot be replayed: it is here"),
    "made too by none": ((Drop(1, 1), Drop(3, 3), Replay(5, 3, (2,), (1,))), "storage 1 is to come back by ops (2,)"),
    "made too, twice": ((Drop(2, 2), Drop(3, 3), Replay(5, 3, (1, 2), (2, 2))), "named twice"),
    "made too, itself": ((Drop(3, 3), Replay(5, 3, (2,), (3,))), "named twice"),
    "made too, unknown": ((Drop(3, 3), Replay(5, 3, (2,), (77,))), "storage 77 is not in the trace"),
    "made too, then again": (
        (Drop(2, 2), Drop(3, 3), Replay(5, 3, (1, 2), (2,)), Replay(6, 2, (1,))),
        "storage 2 cannot be replayed: it is here",
    ),
    "future op": ((Drop(3, 3), Replay(5, 3, (2, 9))), "has not run yet"),
    "ticks out of order": ((SwapOut(2, 1), SwapOut(1, 2)), "out of order"),
    "no such tick": ((SwapOut(99, 1),), "out of order or at no tick"),
    "no such storage": ((Drop(1, 77),), "not in the trace"),
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_an_unsound_schedule_is_refused(name: str) -> None:
    instructions, message = BROKEN[name]
    trace = chain(4)
    with pytest.raises(PlanError) as caught:
        check_schedule(trace, Schedule(instructions, signature(trace)))
    assert message in str(caught.value)


def test_an_op_that_cannot_be_replayed_is_refused() -> None:
    trace = chain(4, why_not="draws random numbers")
    schedule = Schedule((Drop(1, 1), Replay(7, 1, (0,))), signature(trace))
    with pytest.raises(PlanError, match="draws random numbers"):
        check_schedule(trace, schedule)


def test_a_stale_host_copy_is_refused() -> None:
    ops = [op(0, ((0, 0),), ((0, 1),)) if i == 2 else op(i, (), ()) for i in range(7)]
    ops = [dataclasses.replace(o, id=i) for i, o in enumerate(ops)]
    trace = trace_of([storage(0, persistent=True, gaps=((0, 2), (4, 6)))], ops, list(range(7)))
    once = (SwapOut(0, 0), Release(0, 0), Prefetch(2, 0), Await(2, 0))
    check_schedule(trace, Schedule(once, signature(trace)))
    with pytest.raises(PlanError, match="tick 6: storage 0 cannot be fetched: its host copy is none"):
        check_schedule(trace, Schedule((*once, Drop(4, 0), Prefetch(6, 0), Await(6, 0)), signature(trace)))


def test_a_schedule_for_another_trace_is_refused() -> None:
    with pytest.raises(PlanError, match="is for trace"):
        check_schedule(chain(4), Schedule((), signature(chain(5))))


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_lower_makes_sound_schedules_or_refuses(data: st.DataObject) -> None:
    trace = data.draw(traces())
    validate(trace)
    plan = data.draw(plans_for(trace))
    plan, schedule = lower_what_is_possible(trace, plan, data.draw(hardwares()))
    check_schedule(trace, schedule)
    gone = {i.storage for i in schedule.instructions if isinstance(i, (Drop, Release))}
    kept = {g.storage for g in trace.gaps} - {
        g.storage for g, d in zip(trace.gaps, plan.decisions, strict=True) if not isinstance(d, Keep)
    }
    assert not gone & kept
    assert from_json(to_json(schedule)) == schedule


def lower_what_is_possible(trace: Trace, plan: Plan, hardware: Hardware) -> tuple[Plan, Schedule]:
    """Lower the plan; a gap that cannot be recomputed is swapped instead."""
    while True:
        try:
            return plan, lower(trace, plan, hardware)
        except PlanError as error:
            gap = int(str(error).split()[1])
            assert isinstance(plan.decisions[gap], Recompute)
            plan = dataclasses.replace(plan, decisions=(*plan.decisions[:gap], Swap(), *plan.decisions[gap + 1 :]))


@pytest.mark.parametrize("seed", range(12))
def test_damage_to_a_schedule_is_noticed(seed: int) -> None:
    """Leaving out any instruction but a SwapOut that nobody waits for breaks a sound schedule."""
    trace = make_trace(seed, forward=8)
    choices = (Swap(when="sync"), Recompute(share=seed % 3 == 0))
    plan = make_plan(trace, tuple(choices[(seed + i) % 2] for i in range(len(trace.gaps))))
    _, schedule = lower_what_is_possible(trace, plan, PRESETS["h200"])
    for index in range(len(schedule.instructions)):
        rest = schedule.instructions[:index] + schedule.instructions[index + 1 :]
        with pytest.raises(PlanError):
            check_schedule(trace, dataclasses.replace(schedule, instructions=rest))


@pytest.mark.parametrize(
    ("column", "value", "field"),
    [
        ("tick", -1, "schedule.instructions[0].tick"),
        ("do", "explode", "schedule.instructions[0].do"),
        ("storage", 1.5, "schedule.instructions[0].storage"),
        ("ops", [1], "schedule.instructions[0].ops"),
        ("ops", "x", "schedule.instructions[0].ops"),
        ("also", [1], "schedule.instructions[0].also"),
    ],
)
def test_a_bad_schedule_file_is_refused(column: str, value: object, field: str) -> None:
    document = json.loads(to_json(Schedule((SwapOut(1, 2), Replay(3, 4, (5, 6))), "abc")))
    document["instructions"][column][0] = value
    with pytest.raises(PlanError) as caught:
        from_json(json.dumps(document))
    assert field in str(caught.value)
