"""The fast evaluator: what a plan costs, for planners that ask thousands of times.

Exactly `simulate()` of `lower()`, and the peak of `check_schedule()`; a property test keeps it so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from legroom import packing
from legroom.errors import BudgetError
from legroom.hardware import PRESETS, Hardware
from legroom.ir import Trace
from legroom.kernels.codes import KEEP, OVERLAP, RECOMPUTE, SHARED, SYNC, Codes
from legroom.kernels.lowering import lower_and_run
from legroom.packing import Walk
from legroom.plan import Decision, Keep, Plan, Recompute, Swap, signature
from legroom.tables import NEVER, Ints, reached, tabulate, with_ticks
from legroom.units import format_bytes

__all__ = ["IMPOSSIBLE", "KEEP", "OVERLAP", "RECOMPUTE", "SHARED", "SYNC", "Evaluator", "floor_bytes"]

IMPOSSIBLE = (NEVER, NEVER, NEVER)  # what a plan costs that asks for an impossible replay

_DECISIONS: dict[int, Decision] = {
    KEEP: Keep(),
    OVERLAP: Swap(),
    SYNC: Swap(when="sync"),
    RECOMPUTE: Recompute(),
    SHARED: Recompute(share=True),
}


class Evaluator:
    """Evaluates vectors of decision codes, one int8 for each gap, against one trace on one machine.

    Holds scratch memory, so it belongs to one thread.
    """

    def __init__(self, trace: Trace, hardware: Hardware) -> None:
        self.trace = trace
        self.tables = tabulate(trace, hardware)
        self.gaps = len(self.tables.gaps)
        self._packed = packing.pack(self.tables)
        self._scratch = packing.scratch(self.tables)
        self._memory = packing.in_blocks(self._packed, self._scratch)
        self._judged = (*self._memory, *packing.empty_walk(self._packed))
        self._ahead = np.zeros(self.gaps, np.int64)
        self._possible = packing.possible_codes(np.ones(self.gaps, np.int8), self._packed)
        self._codes = np.zeros(self.gaps, np.int8)
        self._epoch = 0
        self._lowered: tuple[Any, ...] = ()  # where the last lowering went
        self._again = np.zeros(1, np.int64)  # for loop()

    def evaluate(self, codes: Codes) -> tuple[int, int]:
        """(nanoseconds, peak bytes); both NEVER where a recomputation is impossible."""
        return self.judge(codes, NEVER)[:2]

    def judge(self, codes: Codes, budget_bytes: int) -> tuple[int, int, int]:
        """(nanoseconds, peak bytes, bytes above the budget summed over all ticks), or IMPOSSIBLE."""
        return self._work(codes, budget_bytes, self._judged)

    def judge_ahead(self, codes: Codes, ahead: Ints, budget_bytes: int) -> tuple[int, int, int]:
        """As judge(), with AHEAD among the codes: how many ticks before the end of its gap each of these is fetched."""
        self._ahead[:] = ahead
        return self.judge(codes, budget_bytes)

    def judge_as_start(self, codes: Codes, budget_bytes: int) -> tuple[int, int, int]:
        """As judge(), but with the hooks at work even where everything is kept.

        They cost the same whatever else is done: no single change is to be charged with them.
        """
        nanoseconds, peak, excess = self.judge(codes, budget_bytes)
        return nanoseconds if codes.any() else self._hooked_ns, peak, excess

    @cached_property
    def _hooked_ns(self) -> int:
        return reached(with_ticks(self.tables))[-1]

    def lowered(self, codes: Codes) -> Walk:
        """The walk of these codes, to run more than once."""
        walk = packing.empty_walk(self._packed)
        self._work(codes, NEVER, (*self._memory, *walk), runs=False)
        return walk

    def run(self, walk: Walk) -> tuple[int, int]:
        return self._work(self._codes, NEVER, (*self._memory, *walk), lowers=False)[:2]

    def loop(self, compiled: Callable[..., Any], budget_bytes: int, *arguments: object) -> Any:
        """What a compiled loop returns that judges plans one after another; see `kernels.loops`."""
        self._again[0] = self._judged is self._lowered
        above = max(0, self.trace.head_peak_bytes - budget_bytes)
        view = (budget_bytes, above, self._possible, self._codes, self._ahead, self._again, self._judged)
        told = compiled(view, self._epoch + 1, *arguments)
        self._epoch += told[0]
        self._lowered = self._judged if self._again[0] else ()
        return told

    def curve(self) -> Ints:
        """The peak of each tick under what was evaluated last. A view: copy it to keep it."""
        return self._scratch.peaks

    def plan(self, codes: Codes, *, planner: str, budget_bytes: int, notes: tuple[str, ...] = ()) -> Plan:
        """The plan of these codes. Raises BudgetError where it does not fit."""
        nanoseconds, peak = self.evaluate(codes)
        if peak > budget_bytes:
            floor = floor_bytes(self.trace)
            raise BudgetError(
                f"planner {planner} needs {format_bytes(peak)}, the budget is {format_bytes(budget_bytes)}; "
                f"the smallest budget that works is {format_bytes(floor)} ({floor} bytes)",
                budget_bytes=budget_bytes,
                floor_bytes=floor,
            )
        decisions = tuple(_DECISIONS[code] for code in codes.tolist())
        return Plan(decisions, signature(self.trace), planner, budget_bytes, peak, nanoseconds / 1e9, notes)

    def _work(
        self, codes: Codes, limit: int, arrays: tuple[Any, ...], *, lowers: bool = True, runs: bool = True
    ) -> tuple[int, int, int]:
        np.multiply(codes, self._possible, out=self._codes)
        self._epoch += 1
        used, nanoseconds, peak, excess = lower_and_run(
            lowers, runs, arrays is self._lowered, limit, self._codes, self._ahead, self._epoch, *arrays
        )
        if lowers:
            self._lowered = arrays if used >= 0 else ()
        if used < 0:
            return IMPOSSIBLE
        # What is alive before the first tick is out of any plan's reach.
        head = self.trace.head_peak_bytes
        return nanoseconds, max(peak, head), excess + max(0, head - limit)


def floor_bytes(trace: Trace) -> int:
    """The smallest peak any plan reaches: every storage away in every segment of its gaps."""
    evaluator = Evaluator(trace, PRESETS["h200"])  # the peak of synchronous swaps is the same on any machine
    return evaluator.evaluate(np.full(evaluator.gaps, SYNC, np.int8))[1]
