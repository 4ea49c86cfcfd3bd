"""Checkmate: the cheapest recomputation, by mixed integer programming.

P. Jain, A. Jain, A. Nrusimha, A. Gholami, P. Abbeel, K. Keutzer, I. Stoica, J. E. Gonzalez: Checkmate: Breaking the
Memory Wall with Optimal Tensor Rematerialization. MLSys 2020.

The paper's program has a variable for each op and each stage (R: it runs there) and for each value and each stage (S:
it is still in memory), and is optimal among all schedules that recompute. This version is `optimal` with swapping
switched off, and differs as the decisions of this library do: a gap is kept, or freed at its start and back from the
first replay that makes it, or made by each replay that needs it and kept by none; stages are the ticks at which gaps
end. The memory inside a replay (the paper's U, exact there) is left to the evaluator, which repairs the solution where
it goes above the budget.

Guarantee: a plan within the budget, or BudgetError with the least peak found without swapping, by changes of one or two
gaps at a time and, with up to 50 gaps, by programs for less and less. The bound it states is that of all plans, those
that swap included.
"""

from __future__ import annotations

from dataclasses import dataclass

from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.plan import Plan
from legroom.planners.optimal import REPLAYS, Optimal, solve


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkmate:
    time_limit_seconds: float = 30.0
    gap: float = 1e-4
    chain: int = 24
    chained_gaps: int = 100
    evaluations: int = 100_000

    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        knobs = Optimal(
            time_limit_seconds=self.time_limit_seconds,
            gap=self.gap,
            chain=self.chain,
            chained_gaps=self.chained_gaps,
            evaluations=self.evaluations,
        )
        return solve(knobs, trace, hardware, budget_bytes, planner="checkmate", actions=REPLAYS)
