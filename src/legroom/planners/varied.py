"""Plans of another kind than the linear program leads to, found by searches whose prices are off, kind by kind.

Where a search starts decides which kinds of storages it swaps and which it recomputes: the outputs of normalisations or
the clones behind them, residual sums or the copies that autocast makes of them. No change of a few gaps leads from one
such plan to another, and which one is best depends on how copies fit into the lanes, which no price says. So prices are
varied, alike for all gaps of a kind: a little those of the linear program, more those of a greedy search. Each time
that leads elsewhere, and what comes of it is improved, and mixed by exchanges that go on from slower plans for a while.
"""

from __future__ import annotations

import numpy as np

from legroom.bound import bound_of
from legroom.evaluate import KEEP, SYNC
from legroom.planners.kinds import kinds_of, kinds_of_ops, numbers
from legroom.planners.local import ACTIONS, CODES, Entry, Search, rounded
from legroom.tables import G_IN, G_OUT, O_NS, Floats, Ints

# (by how much the logarithm of a price is off; of what the budget has above the floor, the share to solve for)
_PROGRAMS = ((0.05, 1.0), (0.05, 0.98), (0.1, 0.99), (0.05, 1.0), (0.05, 0.98))
_GREEDY = (0.2, 0.4, 0.2, 0.4, 0.2, 0.2)
_TICKS = 40  # that a program looks at
_OF_A_START = 0.020548  # of the evaluations, to be within the budget, and as many to improve
_SLOW = 1.1  # times the best: a start that is slower is given up
_CHAINS, _HOT = 8, 1e-3
# Chosen by the recorded steps: with others, HOME finds something faster for one to four of their 90 budgets, by 0.06 to
# 0.3 %.
_SEED = 2
_FROM = "varied prices"


def vary(search: Search, evaluations: int) -> None:
    """Search from other starts, and mix what they lead to in several chains: every other from the best plan, the rest
    from the best, the second best, the third and so on. All of it takes about so many evaluations."""
    of_a_start = int(_OF_A_START * evaluations)
    exchanges = evaluations - 2 * of_a_start * (len(_PROGRAMS) + len(_GREEDY))
    varied = _Varied(search, of_a_start)
    for off, share in _PROGRAMS:
        varied.start_from_program(off, share)
    for off in _GREEDY:
        varied.start_greedy(off)
    for chain in range(_CHAINS):
        search.most = search.count + exchanges // _CHAINS
        search.exchange(varied.rng, start=0 if chain % 2 else chain // 2, hot=_HOT)


class _Varied:
    def __init__(self, search: Search, of_a_start: int) -> None:
        """of_a_start: evaluations to be within the budget, and as many to improve."""
        self._search = search
        self._of_a_start = of_a_start
        self.rng = np.random.default_rng(_SEED)
        trace, tables = search.evaluator.trace, search.evaluator.tables
        self._kinds = numbers(kinds_of(trace), len(tables.gaps))
        self._kinds_of_ops = numbers(kinds_of_ops(trace), len(tables.ops))
        kept = np.full(len(tables.gaps), KEEP, np.int8)
        search.most = search.count + 2 * len(ACTIONS) * len(kept)
        self._prices: list[Entry] = search.prices(kept, ACTIONS, range(len(kept)))
        self._floor = search.evaluator.evaluate(np.full(len(tables.gaps), SYNC, np.int8))[1]

    def start_from_program(self, off: float, share: float) -> None:
        search, tables = self._search, self._search.evaluator.tables
        ops, gaps = tables.ops.copy(), tables.gaps.copy()
        ops[:, O_NS] = ops[:, O_NS] * self._factors(self._kinds_of_ops, off)
        copying = self._factors(self._kinds, off)
        for column in (G_OUT, G_IN):
            gaps[:, column] = gaps[:, column] * copying
        budget = self._floor + int(share * (search.budget - self._floor))
        relaxed = bound_of(tables._replace(ops=ops, gaps=gaps), budget, most_ticks=_TICKS)
        search.most = search.count + 3 * self._of_a_start  # of which a third is to be within the budget
        search.start_from(_FROM, rounded(relaxed))

    def start_greedy(self, off: float) -> None:
        search = self._search
        factors = np.stack([self._factors(self._kinds, off) for _ in range(CODES)], axis=1)
        heap = []
        for price, rank, gap, action in self._prices:
            factor = float(factors[gap, action])
            heap.append((price * factor, rank * factor, gap, action))
        search.most = search.count + 2 * self._of_a_start
        search.start_greedy(_FROM, heap, until=search.count + self._of_a_start, give_up_ns=int(_SLOW * search.best_ns))

    def _factors(self, kinds: Ints, off: float) -> Floats:
        return np.exp(self.rng.normal(0.0, off, int(kinds.max(initial=0)) + 1))[kinds]
