from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.errors import BudgetError
from legroom.evaluate import KEEP, RECOMPUTE, SHARED, Evaluator, floor_bytes
from legroom.hardware import PRESETS
from legroom.ir import Trace
from legroom.plan import Decision, Keep, Recompute, Swap
from legroom.planners.capuchin import Capuchin, _Recomputations, _Search, lineage
from legroom.tables import G_END, G_START, NEVER, tabulate
from tests.pure.strategies import hardwares, traces
from tests.pure.test_planners import assert_honest, peak_of
from tests.pure.test_schedule import KB, LINK
from tests.pure.test_traces import read
from tests.pure.test_vdnn import RELU, SLOW, actions, assert_rule_holds, budgets_of, net

SHARE = Recompute(share=True)


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_what_has_most_free_time_is_swapped_first(missing: int) -> None:
    trace = net([RELU] * 10)
    plan = Capuchin()(trace, LINK, peak_of(trace) - missing * KB)
    assert actions(trace, plan.decisions) == {storage: Swap() for storage in range(1, missing + 1)}


def test_without_free_time_the_most_memory_per_second_is_recomputed() -> None:
    trace = net([RELU] * 10, microseconds=[9, 9, 9, 2, 9, 1, 9, 9, 9, 9])
    one, two = (Capuchin()(trace, SLOW, peak_of(trace) - missing * KB) for missing in (1, 2))
    assert actions(trace, one.decisions) == {6: SHARE}
    assert actions(trace, two.decisions) == {4: SHARE, 6: SHARE}


@pytest.mark.parametrize(("microseconds", "better"), [(50, Swap("sync")), (1, SHARE)])
def test_when_no_swap_hides_the_better_of_two_ways_is_taken(microseconds: int, better: Decision) -> None:
    """Out and back take 20 µs, the longest stretch is 16. Only the first storage can be recomputed."""
    slower = dataclasses.replace(LINK, out_bytes_per_second=1e8, in_bytes_per_second=1e8)
    trace = net([RELU] * 10, microseconds=[microseconds] + [1] * 9, why_not=frozenset(range(1, 10)))
    plan = Capuchin()(trace, slower, peak_of(trace) - KB)
    assert actions(trace, plan.decisions) == {1: better}


def test_a_source_that_is_gone_makes_others_dearer() -> None:
    trace = net([RELU] * 8, microseconds=[1, 10, 100, 1000, 1, 1, 1, 1])
    gaps = {trace.gaps[i].storage: i for i in range(len(trace.gaps))}
    one, two, three = (gaps[storage] for storage in (1, 2, 3))
    book = _Recomputations(tabulate(trace, LINK), {gap: [gap] for gap in (one, two, three)})
    assert book.candidates[three].srcs == {two}
    assert book.candidates[three].rp_time == 100_000
    book.choose(two)
    assert book.candidates[three].srcs == {one}
    assert book.candidates[three].rp_time == 110_000  # op 1 runs before op 2
    assert book.candidates[one].ext_time == 1000  # and op 0 would before op 1
    book.choose(three)
    assert book.candidates[one].ext_time == 2000  # for both
    assert book.candidates[one].price == 3000 / KB
    assert book.choose(one) == []
    assert book.chosen[two].srcs == book.chosen[three].srcs == set()


def vgg16_at_a_quarter() -> tuple[Trace, int]:
    """Ops as slow as on a 2080 Ti: some swaps hide then."""
    trace = read("vgg16")
    ops = tuple(dataclasses.replace(op, seconds=7.8 * op.seconds) for op in trace.ops)
    floor = floor_bytes(trace)
    return dataclasses.replace(trace, ops=ops), floor + (trace.peak_bytes - floor) // 4


def test_what_one_op_makes_is_one_candidate() -> None:
    """By themselves, the places of a pooling's maxima could only be had by running the convolution before it."""
    trace, budget = vgg16_at_a_quarter()
    plan = Capuchin()(trace, PRESETS["rtx2080ti-pcie3"], budget)
    done = dict(zip((gap.storage for gap in trace.gaps), plan.decisions, strict=True))
    poolings = [[s for s, _ in op.writes] for op in trace.ops if "max_pool2d" in op.name and op.phase == "forward"]
    assert len(poolings) == 5
    assert all(done[maxima] == done[places] for maxima, places in poolings)
    assert {done[maxima] for maxima, _ in poolings} == {Keep(), SHARE}


def test_a_hidden_swap_that_comes_back_too_early_is_fetched_when_it_is_needed() -> None:
    trace, budget = vgg16_at_a_quarter()
    plan = Capuchin()(trace, PRESETS["rtx2080ti-pcie3"], budget)
    swaps = [decision for decision in plan.decisions if isinstance(decision, Swap)]
    assert swaps == [Swap("ahead", 0)]
    assert_honest(trace, PRESETS["rtx2080ti-pcie3"], budget, plan)


def test_what_later_choices_made_superfluous_is_kept() -> None:
    trace, budget = vgg16_at_a_quarter()
    evaluator = Evaluator(trace, PRESETS["rtx2080ti-pcie3"])
    search = _Search(evaluator, budget, SHARED)
    codes = search.decide()
    kept = [name for name in search.taken if codes[name] == KEEP]
    assert kept
    for name in set(search.taken) - set(kept):
        trial = codes.copy()
        trial[search.together[name]] = KEEP
        ns, _, excess = evaluator.judge(trial, budget)
        assert excess > 0 or ns > search.now[0]


def test_the_lineage_of_a_gap() -> None:
    trace = net([RELU] * 8, unsaved=frozenset({2}), why_not=frozenset({4}))
    tables = tabulate(trace, LINK)
    found = {gap.storage: lineage(tables, gap.id) for gap in trace.gaps}
    assert found == {1: ([0], []), 3: ([1, 2], [0]), 4: ([3], [1]), 5: None, 6: ([5], [3])}


def test_where_nothing_hides_swaps_are_waited_for() -> None:
    trace = net([RELU] * 10, why_not=frozenset(range(10)))  # nothing can be recomputed, and nothing hides
    plan = Capuchin()(trace, SLOW, floor_bytes(trace))
    assert set(actions(trace, plan.decisions).values()) == {Swap("sync")}
    some = Capuchin()(trace, SLOW, peak_of(trace) - 2 * KB)
    assert sorted(actions(trace, some.decisions)) == [1, 2]  # all cost the same


def test_the_floor_of_the_step_is_its_own() -> None:
    trace = net([RELU] * 10)
    with pytest.raises(BudgetError) as caught:
        Capuchin()(trace, LINK, floor_bytes(trace) - 1)
    assert caught.value.floor_bytes == floor_bytes(trace)


@pytest.mark.parametrize("collective", [True, False])
@given(data=st.data())
@settings(max_examples=20)
def test_every_budget_from_the_floor_on_has_a_plan(collective: bool, data: st.DataObject) -> None:
    trace, hardware = data.draw(traces()), data.draw(hardwares())
    budget = data.draw(budgets_of(trace))
    assert_rule_holds(Capuchin(collective=collective), trace, hardware, budget)
    if budget >= floor_bytes(trace):
        Capuchin(collective=collective)(trace, hardware, budget)


@given(trace=traces())
@settings(max_examples=30, deadline=None)
def test_a_lineage_is_found_where_a_recomputation_is_possible(trace: Trace) -> None:
    evaluator = Evaluator(trace, LINK)
    for gap in range(evaluator.gaps):
        codes = np.zeros(evaluator.gaps, np.int8)
        codes[gap] = RECOMPUTE
        if evaluator.tables.gaps[gap, G_START] < evaluator.tables.gaps[gap, G_END]:
            assert (lineage(evaluator.tables, gap) is None) == (evaluator.evaluate(codes)[0] == NEVER)
