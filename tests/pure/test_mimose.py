from __future__ import annotations

import dataclasses
import timeit
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom import traceio
from legroom.errors import BudgetError
from legroom.evaluate import Evaluator
from legroom.hardware import PRESETS, Hardware
from legroom.ir import Op, Trace
from legroom.plan import Keep, Plan, Recompute
from legroom.planners.mimose import Mimose, choose, layer_name, layers_of
from tests.pure.honest import honest_plan
from tests.pure.strategies import hardwares, traces
from tests.pure.test_schedule import KB, LINK, op, storage, trace_of


def in_modules(trace: Trace, seed: int) -> Trace:
    """With the forward ops in five blocks, some ops in none; one after the other, or by chance."""
    forward = sum(op.phase == "forward" for op in trace.ops)

    def module(op: Op) -> str:
        block = op.id * 5 // forward if seed % 2 else (op.id * 7919 + seed) % 6
        return "" if block == 5 or op.phase != "forward" else f"blocks.{block}.mlp"

    return dataclasses.replace(trace, ops=tuple(dataclasses.replace(op, module=module(op)) for op in trace.ops))


@given(data=st.data(), trace=traces(), hardware=hardwares(), part=st.sampled_from((0, 10, 30, 60, 90, 100)))
@settings(max_examples=30)
def test_a_plan_within_its_budget_or_a_floor_that_is_reached(
    data: st.DataObject, trace: Trace, hardware: Hardware, part: int
) -> None:
    trace = in_modules(trace, data.draw(st.integers(0, 99)))
    plan = honest_plan(Mimose(), trace, hardware, part)
    assert set(plan.decisions) <= {Keep(), Recompute(share=True)}


def test_the_nearest_above_the_excess_is_taken() -> None:
    assert choose([100, 50, 20], 45) == [1]
    assert choose([100, 50, 20], 15) == [2]
    assert choose([100, 50, 20], 50) == [1]


def test_the_largest_is_taken_if_none_covers_the_excess() -> None:
    assert choose([50, 100, 20], 120) == [1, 2]
    assert choose([50, 100, 20], 1000) == [1, 0, 2]
    assert choose([50, 100, 20], 0) == []


def test_of_similar_layers_the_earliest_in_the_forward_pass_is_taken() -> None:
    assert choose([95, 100, 91, 20], 60) == [0]
    assert choose([95, 100, 91, 20], 250) == [0, 1, 2]
    assert choose([90, 100], 60) == [0]  # 90 is not within 10 % of 100: another bucket, nearer to 60
    assert choose([100, 90], 60) == [1]


@given(st.lists(st.integers(0, 10**9), max_size=40), st.integers(-10, 10**10))
def test_no_more_is_chosen_than_it_takes(sizes: list[int], excess: int) -> None:
    chosen = choose(sizes, excess)
    assert len(set(chosen)) == len(chosen)
    taken = [sizes[layer] for layer in chosen]
    assert sum(taken) >= min(excess, sum(sizes))
    assert not chosen or sum(taken[:-1]) < excess


def test_choosing_takes_less_than_a_millisecond_for_thirty_layers() -> None:
    sizes = [(i * 7919 % 900 + 100) * 10**6 for i in range(30)]
    once = min(timeit.repeat(lambda: choose(sizes, sum(sizes) * 9 // 10), number=1, repeat=30))
    assert once < 1e-3


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        ("blocks.3.mlp.0", "blocks.3"),
        ("blocks.3", "blocks.3"),
        ("stages.1.blocks.0.norm", "stages.1.blocks.0"),
        ("features.4", "features.4"),
        ("bert.embeddings.words", "bert.embeddings"),
        ("head", "head"),
        ("", ""),
    ],
)
def test_layers_are_blocks(module: str, layer: str) -> None:
    containers = {"blocks.3", "blocks.3.mlp", "stages.1.blocks.0", "features", "bert.embeddings"}
    assert layer_name(module, containers) == layer


def blocks(sizes: list[int], *, why_not: str = "") -> Trace:
    """Block i makes its inner storage (of this size) from its input, and its output, 1 KB, from that; both are saved.

    Storage 0 is a parameter, 2i + 1 is inside block i, 2i + 2 comes out of it. An op of 1 µs for each, and a tick.
    """
    many = len(sizes)
    ops, storages = [], [storage(0, persistent=True)]
    for i, nbytes in enumerate(sizes):
        ops.append(op(2 * i, ((2 * i, 0),), ((2 * i + 1, 0),), why_not=why_not if i == 0 else ""))
        ops.append(op(2 * i + 1, ((2 * i + 1, 0),), ((2 * i + 2, 0),)))
        storages += [storage(2 * i + 1, nbytes, gaps=((2 * i + 1, 4 * many - 2 * i - 1),))]
        storages += [storage(2 * i + 2, gaps=((2 * i + 2, 4 * many - 2 * i - 2),) if i < many - 1 else ())]
    ops = [dataclasses.replace(op, module=f"blocks.{op.id // 2}.part.{op.id % 2}") for op in ops]
    ops += [dataclasses.replace(op(2 * many, ((2 * many, 0),), ()), module="head")]
    ops += [dataclasses.replace(op(2 * many + i, (), ()), phase="backward") for i in range(1, 2 * many + 1)]
    return trace_of(storages, ops, [*range(2 * many), *([2 * many + 1] * 2), *range(2 * many + 2, len(ops) + 1)])


def checkpointed(plan: Plan) -> list[int]:
    """The blocks of `blocks()`, which have a gap for each inner storage and each output but the last."""
    assert all(decision == Keep() for decision in plan.decisions[1::2])
    assert set(plan.decisions) <= {Keep(), Recompute(share=True)}
    return [i for i, decision in enumerate(plan.decisions[::2]) if decision != Keep()]


def test_what_is_inside_a_layer_is_what_no_other_reads() -> None:
    layers = layers_of(Evaluator(blocks([3 * KB, 5 * KB, 4 * KB]), LINK))
    assert [(layer.name, layer.nbytes, layer.gaps) for layer in layers] == [
        ("blocks.0", 3 * KB, (0,)),
        ("blocks.1", 5 * KB, (2,)),
        ("blocks.2", 4 * KB, (4,)),
    ]


def test_what_cannot_be_replayed_is_kept() -> None:
    layers = layers_of(Evaluator(blocks([3 * KB, 5 * KB], why_not="draws numbers of its own"), LINK))
    assert [layer.name for layer in layers] == ["blocks.1"]


def test_layers_are_checkpointed_and_their_inputs_kept() -> None:
    trace = blocks([3 * KB, 5 * KB, 4 * KB, KB])
    assert checkpointed(Mimose()(trace, LINK, trace.peak_bytes)) == []
    assert checkpointed(Mimose()(trace, LINK, trace.peak_bytes - 2 * KB)) == [0]
    assert checkpointed(Mimose()(trace, LINK, trace.peak_bytes - 5 * KB)) == [1]


def test_more_layers_are_taken_while_the_exact_peak_is_above_the_budget() -> None:
    """The last block is restored at once, while all else stands: it frees nothing, though by its size it should."""
    sizes = [2 * KB, 2 * KB, 2 * KB, 9 * KB]
    trace = blocks(sizes)
    budget = trace.peak_bytes - 3 * KB
    plan = Mimose()(trace, LINK, budget)
    assert choose(sizes, 3 * KB) == [3]
    assert checkpointed(plan) == [0, 1, 3]
    assert plan.notes[1] == "in the order chosen: blocks.3, blocks.0, blocks.1"
    assert plan.predicted_peak_bytes == trace.peak_bytes - 4 * KB


def test_the_floor_is_that_of_all_layers() -> None:
    trace = blocks([3 * KB, 5 * KB, 4 * KB])
    with pytest.raises(BudgetError, match=r"mimose's rule stops at .* with 3 of 3 layers checkpointed") as caught:
        Mimose()(trace, LINK, 1)
    plan = Mimose()(trace, LINK, caught.value.floor_bytes)
    assert plan.predicted_peak_bytes == caught.value.floor_bytes < trace.peak_bytes


@pytest.mark.parametrize("machine", sorted(PRESETS))
def test_fewer_layers_can_take_less_than_all(machine: str) -> None:
    """Of BERT with all of them checkpointed, more is alive at once than where nothing is."""
    trace = traceio.load(Path(__file__).parents[1] / "traces" / "bert.json.gz")
    plan = honest_plan(Mimose(), trace, PRESETS[machine], 0)
    assert plan.predicted_peak_bytes < 0.7 * trace.peak_bytes
