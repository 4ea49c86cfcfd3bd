"""vDNN's rule on nets written by hand; `net` and `assert_rule_holds` serve the other static rules too."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.errors import BudgetError
from legroom.evaluate import floor_bytes
from legroom.hardware import Hardware
from legroom.ir import Op, Storage, Tick, Trace, validate
from legroom.plan import Decision, Keep, Plan, Swap
from legroom.planners import Planner
from legroom.planners.vdnn import Vdnn, feature_maps, offloads
from legroom.schedule import check_schedule, lower
from tests.pure.strategies import hardwares, make_plan, make_trace, traces
from tests.pure.test_planners import assert_honest, peak_of
from tests.pure.test_schedule import KB, LINK

CONV, RELU, MM, NORM, POOL = (
    "aten.convolution.default",
    "aten.relu.default",
    "aten.mm.default",
    "aten.native_batch_norm.default",
    "aten.max_pool2d_with_indices.default",
)
FAST = dataclasses.replace(
    LINK,
    out_bytes_per_second=1e12,
    in_bytes_per_second=1e12,
    duplex_out_bytes_per_second=1e12,
    duplex_in_bytes_per_second=1e12,
)
SLOW = dataclasses.replace(LINK, out_bytes_per_second=1e6, in_bytes_per_second=1e6)


def net(
    names: Sequence[str],
    *,
    unsaved: frozenset[int] = frozenset(),
    microseconds: Sequence[int] = (),
    why_not: frozenset[int] = frozenset(),
) -> Trace:
    """A chain: op i reads storage i, which it saves, and makes storage i + 1; then as many ops back.

    Storage i is away at most from tick i + 1, when its op is issued, to tick 2n - 1 - i; the last has no such time.
    """
    n = len(names)
    times = [*(microseconds or [1] * n), *([1] * n)]
    storages = [Storage(0, KB, "input", True, False, (), 0, "")]
    for i in range(1, n + 1):
        gaps = ((i + 1, 2 * n - 1 - i),) if i < n - 1 and i not in unsaved else ()
        storages.append(Storage(i, KB, "activation" if gaps else "temporary", False, False, gaps, 0, ""))
    ops = []
    for i in range(2 * n):
        name, phase = (names[i], "forward") if i < n else ("aten::backward", "backward")
        reads, writes = (((i, 0),), ((i + 1, 0),)) if i < n else ((), ())
        reason = "two runs gave different bits" if i in why_not else ""
        ops.append(Op(i, name, phase, times[i] / 1e6, 0.0, reads, writes, 0, reason, "", ""))  # type: ignore[arg-type]
    ticks = []
    for i in range(2 * n):
        kind, saved = ("pack", i) if i < n else ("unpack", 2 * n - 1 - i)
        level = KB * (1 + sum(1 <= s < n and s <= i <= 2 * n - 1 - s for s in range(n) if s not in unsaved))
        ticks.append(Tick(kind, saved, i, level, level))  # type: ignore[arg-type]
    trace = Trace(tuple(storages), tuple(ops), tuple(ticks), 0, "cuda")
    validate(trace)
    return trace


def actions(trace: Trace, decisions: tuple[Decision, ...]) -> dict[int, Decision]:
    """By storage, what is not kept."""
    pairs = zip(trace.gaps, decisions, strict=True)
    return {gap.storage: decision for gap, decision in pairs if decision != Keep()}


def asked(planner: Planner, trace: Trace, hardware: Hardware, budget: int) -> Plan | BudgetError:
    try:
        return planner(trace, hardware, budget)
    except BudgetError as error:
        return error


def assert_rule_holds(planner: Planner, trace: Trace, hardware: Hardware, budget: int) -> None:
    """An honest plan, the same when asked again; or a floor above the budget that the planner does reach."""
    plan = asked(planner, trace, hardware, budget)
    if isinstance(plan, BudgetError):
        floor = plan.floor_bytes
        assert budget == plan.budget_bytes < floor
        assert f"({floor} bytes)" in str(plan)
        plan, budget = planner(trace, hardware, floor), floor
        assert plan.predicted_peak_bytes == floor
    assert_honest(trace, hardware, budget, plan)
    assert planner(trace, hardware, budget) == plan


def budgets_of(trace: Trace) -> st.SearchStrategy[int]:
    floor, peak = floor_bytes(trace), peak_of(trace)
    return st.sampled_from((0, floor, peak, (floor + peak) // 2, (9 * floor + peak) // 10))


def test_inputs_of_convolutions_are_fetched_at_the_backward_of_the_convolution_before() -> None:
    trace = net([CONV, RELU, CONV, RELU, CONV, RELU])
    plan = Vdnn()(trace, FAST, peak_of(trace))
    # Storage 2 is needed at tick 9, and the last convolution unpacks its input at tick 7. For that one, the backward
    # pass starts at tick 6.
    assert actions(trace, plan.decisions) == {2: Swap("ahead", 2), 4: Swap("ahead", 1)}


def test_without_convolutions_inputs_of_multiplications_go() -> None:
    trace = net([RELU, MM, RELU, "aten.addmm.default", RELU, "aten._scaled_dot_product_flash_attention.default", RELU])
    assert [trace.gaps[gap].storage for gap in offloads(trace)] == [1, 3, 5]
    trace = net([RELU, MM, RELU, CONV, RELU, "prims.convert_element_type.default", RELU])
    assert [trace.gaps[gap].storage for gap in offloads(trace)] == [3]


def test_all_layers_are_fetched_one_ahead() -> None:
    trace = net([CONV, RELU, CONV, RELU, CONV, RELU])
    plan = Vdnn(variant="all")(trace, FAST, peak_of(trace))
    assert actions(trace, plan.decisions) == {storage: Swap("ahead", 1) for storage in (1, 2, 3, 4)}


def test_a_copy_that_outlasts_the_next_layer_is_waited_for_there() -> None:
    trace = net([CONV] * 6)
    # A copy takes two ops: that of storage 1 is under way when that of storage 2 starts, which waits for both; so on.
    slower = dataclasses.replace(LINK, out_bytes_per_second=0.5e9, duplex_out_bytes_per_second=0.5e9)
    plan = Vdnn()(trace, slower, peak_of(trace))
    found = [decision.when for decision in actions(trace, plan.decisions).values() if isinstance(decision, Swap)]
    assert found == ["ahead", "sync", "ahead", "sync"]
    # So memory falls as far as on a link that is never late; were nobody to wait, it would not.
    assert Vdnn()(trace, FAST, peak_of(trace)).predicted_peak_bytes == plan.predicted_peak_bytes == 3 * KB
    hasty = make_plan(trace, (Swap("ahead", 1),) * 4)
    assert check_schedule(trace, lower(trace, hasty, slower)) == 5 * KB


def test_copies_of_weights_stay() -> None:
    weight, other = (Storage(i, KB, "parameter", True, False, (), 0, "") for i in (0, 1))
    made = [Storage(i, KB, "temporary", False, False, (), 0, "") for i in (2, 3, 4)]
    ops = [
        Op(0, "aten._to_copy.default", "forward", 0.0, 0.0, ((0, 0),), ((2, 0),), 0, "", "", ""),
        Op(1, "aten.rand.default", "forward", 0.0, 0.0, (), ((3, 0),), 0, "", "", ""),
        Op(2, "aten.mm.default", "forward", 0.0, 0.0, ((3, 0), (2, 0)), ((4, 0),), 0, "", "", ""),
    ]
    assert feature_maps(Trace((weight, other, *made), tuple(ops), (), 0, "cuda")) == {3, 4}


def test_the_rule_stops_where_its_layers_end() -> None:
    trace = net([CONV, RELU, CONV, RELU, CONV, RELU])
    reached = Vdnn()(trace, FAST, peak_of(trace)).predicted_peak_bytes
    assert floor_bytes(trace) < reached < peak_of(trace)
    with pytest.raises(BudgetError, match=f"vdnn's rule stops at .* \\({reached} bytes\\)") as caught:
        Vdnn()(trace, FAST, reached - 1)
    assert caught.value.floor_bytes == reached


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ValueError, match="'conv' or 'all', got 'both'"):
        Vdnn(variant="both")  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", ["conv", "all"])
@given(data=st.data())
@settings(max_examples=20)
def test_every_plan_is_honest_or_names_its_floor(variant: str, data: st.DataObject) -> None:
    trace, hardware = data.draw(traces()), data.draw(hardwares())
    assert_rule_holds(Vdnn(variant=variant), trace, hardware, data.draw(budgets_of(trace)))  # type: ignore[arg-type]


def test_random_traces_are_swapped_from() -> None:
    """The property above is about something: most of these traces have a gap the rule takes."""
    assert sum(bool(offloads(make_trace(seed, forward=12))) for seed in range(20)) > 10
