"""Plans of another kind than the linear program leads to, found by searches whose prices are off, kind by kind.

Where a search starts decides which kinds of storages it swaps and which it recomputes: the outputs of normalisations or
the clones behind them, residual sums or the copies that autocast makes of them. No change of a few gaps leads from one
such plan to another, and which one is best depends on how copies fit into the lanes, which no price says. So prices are
varied, alike for all gaps of a kind: a little those of the linear program, more those of a greedy search. Each time
that leads elsewhere, and what comes of it is improved, and mixed by exchanges that go on from slower plans for a while.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from legroom.bound import bound_of
from legroom.evaluate import KEEP, SYNC
from legroom.kernels.codes import Codes
from legroom.planners.kinds import kinds_of, kinds_of_ops, numbers
from legroom.planners.local import ACTIONS, CODES, Prices, Search, rounded
from legroom.tables import G_IN, G_OUT, O_NS, Floats, Ints, Tables

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


class Programs:
    """Linear programs with prices that are off, solved in a thread of their own while the search goes on elsewhere."""

    def __init__(self, search: Search) -> None:
        evaluator, self.rng = search.evaluator, np.random.default_rng(_SEED)
        trace, tables = evaluator.trace, evaluator.tables
        self.kinds = numbers(kinds_of(trace), len(tables.gaps))
        kinds_of_op = numbers(kinds_of_ops(trace), len(tables.ops))
        floor = evaluator.evaluate(np.full(len(tables.gaps), SYNC, np.int8))[1]
        self._programs: list[tuple[Tables, int]] = []
        for off, share in _PROGRAMS:
            ops, gaps = tables.ops.copy(), tables.gaps.copy()
            ops[:, O_NS] = ops[:, O_NS] * self.factors(kinds_of_op, off)
            copying = self.factors(self.kinds, off)
            for column in (G_OUT, G_IN):
                gaps[:, column] = gaps[:, column] * copying
            budget = floor + int(share * (search.budget - floor))
            self._programs.append((tables._replace(ops=ops, gaps=gaps), budget))
        self._pool = ThreadPoolExecutor(1)
        self._starts: list[Future[Codes]] = []

    def __enter__(self) -> Programs:
        with contextlib.suppress(RuntimeError):  # the interpreter is about to end, or there may be no more threads
            for program in self._programs:
                self._starts.append(self._pool.submit(_start, *program))
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def starts(self) -> Iterator[Codes]:
        """In the order of the programs. What no thread took is solved here."""
        for number, program in enumerate(self._programs):
            yield self._starts[number].result() if number < len(self._starts) else _start(*program)

    def factors(self, kinds: Ints, off: float) -> Floats:
        return np.exp(self.rng.normal(0.0, off, int(kinds.max(initial=0)) + 1))[kinds]


def _start(tables: Tables, budget_bytes: int) -> Codes:
    return rounded(bound_of(tables, budget_bytes, most_ticks=_TICKS))


def vary(search: Search, programs: Programs, evaluations: int) -> None:
    """Search from other starts, and mix what they lead to in several chains: every other from the best plan, the rest
    from the best, the second best, the third and so on. All of it takes about so many evaluations."""
    of_a_start = int(_OF_A_START * evaluations)  # to be within the budget, and as many to improve
    exchanges = evaluations - 2 * of_a_start * (len(_PROGRAMS) + len(_GREEDY))
    kept = np.full(search.evaluator.gaps, KEEP, np.int8)
    search.most = search.count + 2 * len(ACTIONS) * len(kept)
    prices = search.prices(kept, ACTIONS, np.arange(len(kept)))
    for start in programs.starts():
        search.most = search.count + 3 * of_a_start  # of which a third is to be within the budget
        search.start_from(_FROM, start)
    for off in _GREEDY:
        factors = np.stack([programs.factors(programs.kinds, off) for _ in range(CODES)], axis=1)
        factors = factors[prices.gaps, prices.actions]
        search.most = search.count + 2 * of_a_start
        search.start_greedy(
            _FROM,
            Prices(prices.prices * factors, prices.ranks * factors, prices.places),
            until=search.count + of_a_start,
            give_up_ns=int(_SLOW * search.best_ns),
        )
    for chain in range(_CHAINS):
        search.most = search.count + exchanges // _CHAINS
        search.exchange(programs.rng, start=0 if chain % 2 else chain // 2, hot=_HOT)
