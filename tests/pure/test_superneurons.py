from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.errors import BudgetError
from legroom.evaluate import floor_bytes
from legroom.hardware import PRESETS
from legroom.plan import Keep, Plan, Recompute, Swap
from legroom.planners.capuchin import Capuchin
from legroom.planners.superneurons import SuperNeurons
from legroom.planners.vdnn import Vdnn
from legroom.schedule import Replay, lower
from tests.pure.strategies import hardwares, make_trace, traces
from tests.pure.test_planners import assert_honest, peak_of
from tests.pure.test_schedule import KB, LINK
from tests.pure.test_traces import read
from tests.pure.test_vdnn import CONV, FAST, MM, NORM, POOL, RELU, actions, asked, assert_rule_holds, budgets_of, net

BLOCKS = (CONV, NORM, RELU) * 3


def test_outputs_of_convolutions_are_swapped_and_the_rest_is_recomputed() -> None:
    trace = net(BLOCKS)
    plan = SuperNeurons(cache=False)(trace, FAST, peak_of(trace))
    # Convolutions make 1, 4 and 7, and use 0, 3 and 6 at ticks 17, 14 and 11. Storage 1 is needed at 16; 4, at 13.
    assert {s for s, decision in actions(trace, plan.decisions).items() if isinstance(decision, Swap)} == {1, 4, 7}
    assert actions(trace, plan.decisions)[1] == Swap("ahead", 3)
    assert actions(trace, plan.decisions)[7] == Swap("ahead", 1)  # the backward pass starts at tick 9
    assert {s for s, decision in actions(trace, plan.decisions).items() if isinstance(decision, Recompute)} == {
        2,
        3,
        5,
        6,
    }


def test_multiplications_of_matrices_are_checkpoints_too() -> None:
    trace = net([MM, RELU, MM, RELU, RELU])
    plan = SuperNeurons(cache=False)(trace, FAST, peak_of(trace))
    assert [type(decision) for decision in actions(trace, plan.decisions).values()] == [Swap, Recompute, Swap]


@pytest.mark.parametrize(("cheap", "share"), [([NORM, RELU], True), ([NORM, RELU, POOL], False)])
def test_a_segment_larger_than_any_layer_is_recomputed_output_by_output(cheap: list[str], share: bool) -> None:
    trace = net([CONV, *cheap, CONV, *cheap, CONV, RELU])  # a layer reads and writes 2 kB
    plan = SuperNeurons()(trace, LINK, peak_of(trace))
    assert actions(trace, plan.decisions)[2] == actions(trace, plan.decisions)[3] == Recompute(share=share)


def test_the_cache_lets_the_least_recently_used_go_and_no_more_than_must() -> None:
    trace = net(BLOCKS * 2)
    checkpoints = [1, 4, 7, 10, 13, 16]
    with pytest.raises(BudgetError) as caught:
        SuperNeurons()(trace, FAST, 0)
    floor = caught.value.floor_bytes
    gone = []
    for budget in range(peak_of(trace), floor - 1, -KB):
        plan = SuperNeurons()(trace, FAST, budget)
        swapped = [s for s, decision in actions(trace, plan.decisions).items() if isinstance(decision, Swap)]
        assert swapped == checkpoints[: len(swapped)]
        gone.append(len(swapped))
    assert gone == sorted(gone)
    assert gone[0] == 0
    assert len(set(gone)) > 2


def test_a_fetch_ahead_waits_where_there_is_no_room_for_it() -> None:
    trace = net(BLOCKS * 2)
    ahead = SuperNeurons(cache=False)(trace, FAST, peak_of(trace))
    with pytest.raises(BudgetError) as caught:
        SuperNeurons()(trace, FAST, 0)
    floor = caught.value.floor_bytes
    assert floor < ahead.predicted_peak_bytes
    least = SuperNeurons(cache=False)(trace, FAST, floor)
    assert least.predicted_peak_bytes == floor
    early, late = (
        sum(decision.ahead > 0 for decision in plan.decisions if isinstance(decision, Swap)) for plan in (ahead, least)
    )
    assert late < early == 6


@pytest.mark.parametrize("name", ["aten.add_.Tensor", "aten.cat.default"])
def test_where_branches_meet_is_a_checkpoint(name: str) -> None:
    chain = net([CONV, NORM, RELU, CONV, name, RELU, CONV, RELU])
    meets = dataclasses.replace(chain.ops[4], reads=((4, 0), (3, 0)))
    joined = dataclasses.replace(chain, ops=(*chain.ops[:4], meets, *chain.ops[5:]))
    cheap, checkpoint = (SuperNeurons(cache=False)(trace, FAST, peak_of(trace)) for trace in (chain, joined))
    assert actions(chain, cheap.decisions)[5] == Recompute(share=True)
    assert isinstance(actions(joined, checkpoint.decisions)[5], Swap)


def test_what_a_pooling_makes_comes_back_together() -> None:
    """The maxima are wanted before the input of the pooling is, and where they were after that."""
    trace = read("vgg16")
    plan = SuperNeurons(cache=False)(trace, PRESETS["rtx2080ti-pcie3"], peak_of(trace))
    made = {storage for op in trace.ops if "max_pool2d" in op.name for storage, _ in op.writes}
    decisions = [decision for storage, decision in actions(trace, plan.decisions).items() if storage in made]
    assert decisions == [Recompute(share=True)] * 10
    poolings = sum("max_pool2d" in op.name for op in trace.ops if op.phase == "forward")
    replays = [i for i in lower(trace, plan, PRESETS["rtx2080ti-pcie3"]).instructions if isinstance(i, Replay)]
    run = [op for replay in replays for op in replay.ops if "max_pool2d" in trace.ops[op].name]
    assert len(run) == len(set(run)) == poolings == 5
    assert not any("convolution" in trace.ops[op].name for replay in replays for op in replay.ops)


@pytest.mark.parametrize("factor", [1.0, 7.8])
@pytest.mark.parametrize("share", [0.75, 0.5, 0.25])
def test_the_order_of_the_papers_without_the_search(share: float, factor: float) -> None:
    trace = read("vgg16")
    trace = dataclasses.replace(
        trace, ops=tuple(dataclasses.replace(op, seconds=factor * op.seconds) for op in trace.ops)
    )
    floor = floor_bytes(trace)
    budget = int(floor + share * (trace.peak_bytes - floor))
    plans = [
        asked(planner, trace, PRESETS["rtx2080ti-pcie3"], budget) for planner in (Capuchin(), SuperNeurons(), Vdnn())
    ]
    seconds = [plan.predicted_seconds if isinstance(plan, Plan) else math.inf for plan in plans]
    assert seconds == sorted(seconds)
    assert seconds[1] < math.inf


def test_what_only_a_convolution_can_bring_back_is_swapped_in_its_place() -> None:
    """Autograd saves what comes out of the activation, and of the convolution before it nothing."""
    trace = net([CONV, RELU] * 3 + [RELU], unsaved=frozenset({1, 3, 5}))
    plan = SuperNeurons(cache=False)(trace, FAST, peak_of(trace))
    assert [type(decision) for decision in actions(trace, plan.decisions).values()] == [Swap, Swap]
    assert sorted(actions(trace, plan.decisions)) == [2, 4]


def test_what_cannot_be_recomputed_is_kept() -> None:
    trace = net(BLOCKS, why_not=frozenset({2}))
    plan = SuperNeurons(cache=False)(trace, FAST, peak_of(trace))
    assert 3 not in actions(trace, plan.decisions)
    assert len(actions(trace, plan.decisions)) == 6


@pytest.mark.parametrize("seed", [159, 369, 599])
def test_what_can_be_recomputed_alone_but_not_together_is_no_obstacle(seed: int) -> None:
    trace = make_trace(seed, forward=5 + seed % 20)
    plan = SuperNeurons()(trace, LINK, 2 * peak_of(trace))
    assert any(isinstance(decision, Recompute) for decision in plan.decisions)
    assert_honest(trace, LINK, 2 * peak_of(trace), plan)


@pytest.mark.parametrize("cache", [True, False])
@given(data=st.data())
@settings(max_examples=12)
def test_every_plan_is_honest_or_names_its_floor(cache: bool, data: st.DataObject) -> None:
    trace, hardware = data.draw(traces()), data.draw(hardwares())
    assert_rule_holds(SuperNeurons(cache=cache), trace, hardware, data.draw(budgets_of(trace)))


def test_with_fewer_swapped_the_peak_may_be_lower() -> None:
    """A step on which the floor that was named, with all of them swapped, was above what the planner then reached."""
    trace = make_trace(35812, forward=5)
    assert_rule_holds(SuperNeurons(cache=True), trace, PRESETS["cpu"], 0)


@pytest.mark.parametrize("seed", [9, 15])
def test_where_its_rule_takes_more_than_everything_does_everything_is_kept(seed: int) -> None:
    trace = make_trace(seed, forward=5)
    plan = SuperNeurons()(trace, LINK, trace.peak_bytes)
    assert all(isinstance(decision, Keep) for decision in plan.decisions)
    with pytest.raises(BudgetError) as caught:
        SuperNeurons()(trace, LINK, trace.peak_bytes - 1)
    assert caught.value.floor_bytes == trace.peak_bytes
