"""The dual of every planner: the least peak at a stated slowdown.

A planner answers "how fast within these bytes"; this asks it for one budget after the other, by bisection between the
floor and the plain peak, until the question is turned round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from legroom.bound import lower_bound
from legroom.errors import BudgetError, quote
from legroom.evaluate import floor_bytes
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.plan import Plan, signature
from legroom.planners.auto import Auto, quick
from legroom.schedule import Schedule, check_schedule, lower
from legroom.simulate import simulate
from legroom.units import format_bytes

MOST_BUDGETS = 16  # ten halve the range down to a thousandth; the rest are for its ends and for planners' own floors
RESOLUTION = 1000  # of the range from floor to plain peak; allocators and calibration are no more exact than that


def least_peak(
    planner: Callable[[Trace, Hardware, int], Plan],
    trace: Trace,
    hardware: Hardware,
    max_slowdown: float,
    *,
    most_budgets: int = MOST_BUDGETS,
) -> Plan:
    """The plan of least peak that is at most `max_slowdown` (0.05 is 5 %) slower than keeping everything.

    Guarantee: peak and seconds of the plan are exact in the model, by check_schedule() and simulate(), whatever the
    planner says about them, and no other answer of this search was within the slowdown with a lower peak. Where more
    budget never makes the planner's plans slower and `most_budgets` does not end the search, no budget that is lower by
    more than a thousandth of the range from floor to plain peak would have done. Planners that search are not quite
    like that: for them it is the best seen.

    The plan's budget is its own peak. Raises BudgetError where none of the planner's plans is fast enough.
    """
    check_slowdown(max_slowdown)
    # Only the answer has to be searched for closely, and needs a bound: auto takes three times as long with both.
    asked = quick(planner)
    search = _Search(asked, trace, hardware, max_slowdown)
    search.run(most_budgets)
    if search.best is None:
        raise BudgetError(
            f"no plan at a slowdown of at most {max_slowdown:.4g}, with room for everything: {search.why}"
        )
    if asked is not planner:
        search.planner = planner
        search.ask(search.best[1])
    plan, peak, seconds = search.best
    note = (
        f"least peak at a slowdown of at most {max_slowdown:.4g}: {search.slowdown(seconds):.4g}; "
        f"{search.asked} budgets asked for"
    )
    bound = plan.lower_bound_seconds  # with more memory, so it holds here too
    if bound is None and isinstance(planner, Auto) and planner.bound:
        bound = lower_bound(trace, hardware, peak).seconds
    return replace(
        plan,
        budget_bytes=peak,
        predicted_peak_bytes=peak,
        predicted_seconds=seconds,
        notes=(*plan.notes, note),
        lower_bound_seconds=bound,
    )


def check_slowdown(max_slowdown: object) -> None:
    if isinstance(max_slowdown, bool) or not isinstance(max_slowdown, (int, float)):
        raise TypeError(f"max_slowdown must be a number such as 0.05, got {quote(max_slowdown)}")
    if not (math.isfinite(max_slowdown) and max_slowdown >= 0):
        raise ValueError(f"max_slowdown must be 0 or more, 0.05 for 5 %, got {max_slowdown}")


class _Search:
    def __init__(
        self, planner: Callable[[Trace, Hardware, int], Plan], trace: Trace, hardware: Hardware, max_slowdown: float
    ) -> None:
        self.planner = planner
        self.trace = trace
        self.hardware = hardware
        self.plain_seconds = simulate(trace, Schedule((), signature(trace)), hardware).seconds
        self.limit_seconds = self.plain_seconds * (1 + max_slowdown)
        self.low, self.high = floor_bytes(trace), trace.peak_bytes  # where the answer lies: both are worth asking for
        self.asked = 0
        self.best: tuple[Plan, int, float] | None = None  # exact peak, exact seconds
        self.why = ""  # there is no plan

    def run(self, most_budgets: int) -> None:
        resolution = max(1, (self.high - self.low) // RESOLUTION)
        self.ask(self.high)
        if self.best is None:
            return  # too slow with room for everything
        # The floor, or what the planner calls its own: the lowest that can be, and the answer to a generous slowdown.
        is_floor = True
        while self.low <= self.high and self.asked < most_budgets:
            if not is_floor and self.high - self.low < resolution:
                return
            is_floor = self.ask(self.low if is_floor else (self.low + self.high) // 2)

    def ask(self, budget: int) -> bool:
        """Narrow the range by one answer; whether `low` is now the floor that the planner names."""
        self.asked += 1
        try:
            plan = self.planner(self.trace, self.hardware, budget)
        except BudgetError as error:
            self.low, self.why = max(budget + 1, error.floor_bytes), str(error)
            return error.floor_bytes > budget
        schedule = lower(self.trace, plan, self.hardware)
        peak, seconds = check_schedule(self.trace, schedule), simulate(self.trace, schedule, self.hardware).seconds
        if peak <= budget and seconds <= self.limit_seconds:
            self.best, self.high = (plan, peak, seconds), peak - 1
        else:
            self.low = budget + 1
            self.why = f"{plan.planner} plans {format_bytes(peak)} and a slowdown of {self.slowdown(seconds):.4g}"
        return False

    def slowdown(self, seconds: float) -> float:
        return seconds / self.plain_seconds - 1 if self.plain_seconds else 0.0
