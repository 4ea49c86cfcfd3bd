"""The compiled loops of the searches, against the same in plain Python, which asks the evaluator plan by plan."""

from __future__ import annotations

import heapq
import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from legroom.evaluate import KEEP, OVERLAP, RECOMPUTE, SHARED, SYNC, Evaluator
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.kernels import loops
from legroom.kernels.codes import Codes
from legroom.planners.local import CODES
from legroom.tables import G_BYTES, G_END, G_START, NEVER, T_PEAK
from tests.pure.strategies import hardwares, traces

ACTIONS = np.array((KEEP, OVERLAP, SYNC, RECOMPUTE, SHARED))
GIVE_UP = 0.5  # share of the searches that end once a plan is too slow


class Case:
    """A plan to begin with, a budget between its peak and the floor, and a second evaluator that nothing compiled has
    touched."""

    def __init__(self, trace: Trace, hardware: Hardware, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.evaluator, self.plain = Evaluator(trace, hardware), Evaluator(trace, hardware)
        self.gaps = self.evaluator.gaps
        floor = self.plain.evaluate(np.full(self.gaps, SYNC, np.int8))[1]
        # Below the floor too: what is alive before the first tick may be above the budget whatever is done.
        lowest = self.rng.choice((floor, trace.head_peak_bytes // 2))
        self.budget = int(lowest + self.rng.random() * (trace.peak_bytes - lowest))
        self.codes = self.rng.choice(ACTIONS, self.gaps, p=(0.6, 0.1, 0.1, 0.1, 0.1)).astype(np.int8)

    def cost(self, codes: Codes) -> tuple[int, int]:
        ns, _, excess = self.plain.judge(codes, self.budget)
        return ns, excess

    def changed(self, codes: Codes, *changes: tuple[int, int]) -> tuple[int, int]:
        codes = codes.copy()
        for gap, action in changes:
            codes[gap] = action
        return self.cost(codes)

    def places(self) -> list[int]:
        """Gap by gap, but these in any order, and to keep a gap before all else."""
        drawn = self.rng.permutation(self.gaps)[: self.rng.integers(self.gaps + 1)].tolist()
        return [gap * CODES + action for gap in drawn for action in ACTIONS.tolist() if action != self.codes[gap]]

    def still_judges(self) -> None:
        """The evaluator is as good as before."""
        for codes in (self.codes, np.full(self.gaps, KEEP, np.int8), self.codes):
            assert self.evaluator.judge(codes, self.budget) == self.plain.judge(codes, self.budget)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    trace = draw(traces(most_ops=12))
    assume(trace.gaps)
    return Case(trace, draw(hardwares()), draw(st.integers(0, 2**32)))


@settings(deadline=None)
@given(cases(), st.sampled_from([loops.ALL, loops.WIN, loops.TAKE]))
def test_single_changes(case: Case, how: int) -> None:
    places, codes, now = case.places(), case.codes.copy(), case.codes.copy()
    now_ns, most = case.cost(case.codes)[0], int(case.rng.integers(1, 12))
    judged, taken, lost = 0, 0, set()
    expected = np.full((len(places), 2), -1)
    told_ns = now_ns
    for i, place in enumerate(places):
        gap, action = divmod(place, CODES)
        first = i == 0 or places[i - 1] // CODES != gap
        if how == loops.WIN and first and judged >= most:
            break
        if gap in lost:
            continue
        ns, excess = case.changed(now, (gap, action))
        judged += 1
        expected[i] = ns, excess
        if how == loops.WIN and action == KEEP and ns >= now_ns:
            lost.add(gap)
        if how == loops.TAKE and excess == 0 and (ns < now_ns or (ns == now_ns and action == KEEP)):
            now[gap], now_ns, taken = action, ns, taken + 1
    costs = np.full((len(places), 2), -1)
    told = case.evaluator.loop(
        loops.try_changes, case.budget, codes, np.array(places, np.int64), CODES, told_ns, most, how, costs
    )
    assert told == (judged, now_ns, taken)
    assert (costs == expected).all()
    assert (codes == now).all()
    case.still_judges()


@settings(deadline=None)
@given(cases(), st.integers(1, 3))
def test_changes_of_several_gaps(case: Case, many: int) -> None:
    assume(case.gaps >= many)
    together = np.array(list(itertools.combinations(range(case.gaps), many)))
    together = together[case.rng.permutation(len(together))][:20]
    codes, now, (now_ns, _) = case.codes.copy(), case.codes.copy(), case.cost(case.codes)
    most, judged, taken, told_ns = int(case.rng.integers(1, 200)), 0, 0, now_ns
    for gaps in together.tolist():
        if many > 1 and (now[gaps] == KEEP).all():
            continue
        for chosen in itertools.product(ACTIONS.tolist(), repeat=many):
            if judged >= most or any(now[gap] == action for gap, action in zip(gaps, chosen, strict=True)):
                continue
            ns, excess = case.changed(now, *zip(gaps, chosen, strict=True))
            judged += 1
            if excess == 0 and ns < now_ns:
                now[gaps], now_ns, taken = chosen, ns, taken + 1
    told = case.evaluator.loop(loops.take_faster, case.budget, codes, together, ACTIONS, told_ns, most)
    assert told == (judged, now_ns, taken)
    assert (codes == now).all()
    case.still_judges()


@settings(deadline=None)
@given(cases(), st.booleans())
def test_reaching_the_budget(case: Case, fresh: bool) -> None:
    places = np.array(case.places(), np.int64)
    (now_ns, excess), codes, now = case.cost(case.codes), case.codes.copy(), case.codes.copy()
    assume(now_ns < NEVER)
    costs = [case.changed(now, divmod(place, CODES)) for place in places.tolist()]
    prices = np.array([(ns - now_ns) / (excess - then) if then < excess else 0.0 for ns, then in costs])
    prices = prices * case.rng.uniform(0.2, 1.5, len(places))  # as they were when fewer gaps were changed
    ranks = np.round(case.rng.normal(0.0, 1.0, len(places)), 1)
    most = int(case.rng.integers(0, 40))
    give_up_ns = int(1.2 * now_ns) if case.rng.random() < GIVE_UP else NEVER
    known, expected = np.zeros((case.gaps * CODES, 2)), np.zeros((case.gaps * CODES, 2))
    told = case.evaluator.loop(
        loops.reach, case.budget, codes, prices.copy(), ranks.copy(), places, np.empty_like(places), CODES, now_ns,
        excess, most, give_up_ns, fresh, SYNC, known,
    )  # fmt: skip

    heap = list(zip(prices.tolist(), ranks.tolist(), places.tolist(), strict=True))
    heapq.heapify(heap)
    judged = 0
    while heap and excess > 0 and judged < most and now_ns < give_up_ns:
        place = heapq.heappop(heap)[2]
        gap, action = divmod(place, CODES)
        if now[gap] != KEEP and (action != SYNC or now[gap] == SYNC) and not fresh:
            continue
        then_ns, then_excess = case.changed(now, (gap, action))
        judged += 1
        if then_ns == NEVER or then_excess >= excess:
            continue
        price, rank = (then_ns - now_ns) / (excess - then_excess), float(then_excess - excess)
        expected[place] = price, rank
        if heap and price > 0 and price > 1.02 * heap[0][0]:
            heapq.heappush(heap, (price, rank, place))
            continue
        now[gap] = action
        now_ns, excess, fresh = then_ns, then_excess, False
    assert told == (judged, now_ns, excess, fresh)
    assert (known == expected).all()
    assert (codes == now).all()
    case.still_judges()


@pytest.mark.parametrize("gaps", [0, 1, 30])
def test_prices_that_are_off(gaps: int) -> None:
    rng = np.random.default_rng(gaps)
    now, trial = (rng.choice(ACTIONS, gaps).astype(np.int8) for _ in range(2))
    trial[rng.random(gaps) < 0.5] = KEEP
    factors = rng.uniform(0.5, 2.0, (gaps, CODES))
    known = np.where(rng.random((gaps * CODES, 1)) < 0.5, math.nan, rng.normal(size=(gaps * CODES, 2)))
    expected = []
    for gap, action in itertools.product(range(gaps), range(CODES)):
        price, rank = known[gap * CODES + action].tolist()
        if math.isnan(price) and action == now[gap] != KEEP:
            price = rank = 0.0
        if trial[gap] == KEEP and not math.isnan(price):
            expected.append((price * factors[gap, action], rank * factors[gap, action], gap * CODES + action))
    prices, ranks, places = np.empty(len(known)), np.empty(len(known)), np.empty(len(known), np.int64)
    many = loops.prices_off(now, trial, factors, known, prices, ranks, places)
    assert list(zip(prices[:many], ranks[:many], places[:many], strict=True)) == expected


@settings(deadline=None)
@given(cases())
def test_annealing(case: Case) -> None:
    start = np.full(case.gaps, SYNC, np.int8)
    start_ns, excess = case.cost(start)
    assume(excess == 0)
    changes, temperature, cooling, penalty, grows = 60, 0.1 * start_ns, 0.95, 0.01, 1.01
    gaps, chosen = case.rng.integers(case.gaps, size=(changes, 2)), case.rng.choice(ACTIONS, (changes, 2))
    many, luck = case.rng.integers(1, 3, changes), case.rng.random(changes)
    codes, found = start.copy(), start.copy()
    told = case.evaluator.loop(
        loops.anneal, case.budget, codes, start_ns, gaps, chosen, many, luck, temperature, cooling, penalty, grows,
        start, found,
    )  # fmt: skip

    now, now_ns, now_excess = start.copy(), start_ns, 0
    best_ns, best = NEVER, start
    for i in range(changes):
        temperature *= cooling
        then = now.copy()
        for gap, action in zip(gaps[i, : many[i]], chosen[i], strict=False):
            then[gap] = action
        ns, excess = case.cost(then)
        worse = ns - now_ns + penalty * (excess - now_excess)
        if ns < NEVER and (worse <= 0 or luck[i] < math.exp(-worse / temperature)):
            now, now_ns, now_excess = then, ns, excess
            if excess == 0 and ns < best_ns and (now != start).any():
                best_ns, best = ns, now
        penalty *= grows if now_excess else 1 / grows
    assert told == (changes, best_ns)
    assert (found == best).all()
    assert (codes == now).all()
    case.still_judges()


@settings(deadline=None)
@given(cases())
def test_a_particle_follows_the_best(case: Case) -> None:
    """Lines 3 to 14 of HOME's algorithm 3, with what was tried before left out."""

    def cost(policy: Codes) -> tuple[int, int]:
        ns, excess = case.cost(policy)
        return (ns, int((policy != KEEP).sum())) if excess == 0 else (NEVER, 0)

    def least(policy: Codes) -> list[int]:
        """The bytes of each tick without all that may be away."""
        out = tables.ticks[:, T_PEAK].copy()
        for start, end, nbytes in tables.gaps[policy != KEEP][:, (G_START, G_END, G_BYTES)].tolist():
            out[start:end] -= nbytes
        return out.tolist()

    tables = case.evaluator.tables
    policy, p1 = case.codes.copy(), case.rng.choice(ACTIONS, case.gaps, p=(0.6, 0.1, 0.1, 0.1, 0.1)).astype(np.int8)
    tried = case.rng.random((case.gaps, CODES)) < 0.2
    left = tried.copy()
    room = np.empty(len(tables.ticks), np.int64)
    told = case.evaluator.loop(
        loops.follow, case.budget, policy, p1, left, tables.gaps, tables.ticks, room, *cost(policy)
    )

    now, judged, trials, changed = case.codes.copy(), 0, 0, False
    for gap in range(case.gaps):
        action = int(p1[gap])
        if action == now[gap] or tried[gap, action]:
            continue
        tried[gap, action] = True
        trials += 1
        then = now.copy()
        then[gap] = action
        judged += max(least(then)) <= case.budget
        if cost(then) < cost(now):
            now, changed, tried = then, True, np.zeros_like(tried)
    assert told == (judged, trials, *cost(now), changed)
    assert (policy == now).all()
    assert (left == tried).all()
    assert room.tolist() == least(now)
    case.still_judges()
