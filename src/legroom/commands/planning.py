"""`legroom plan`: one planner, one trace, one plan."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from legroom.compare import Judged, judge
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.page import printable
from legroom.plan import Plan
from legroom.planners import Planner
from legroom.planners.dual import least_peak
from legroom.units import format_bytes, format_seconds


def make_plan(
    trace: Trace, hardware: Hardware, planner: Planner, *, budget_bytes: int | None, max_slowdown: float | None
) -> Plan:
    """The plan for a budget, or the least peak at a slowdown."""
    with _nothing_printed():
        if budget_bytes is not None:
            return planner(trace, hardware, budget_bytes)
        assert max_slowdown is not None
        return least_peak(planner, trace, hardware, max_slowdown)


@contextlib.contextmanager
def _nothing_printed() -> Iterator[None]:
    """Standard output is for the plan; a solver that writes to its descriptor goes to standard error."""
    try:
        output = os.dup(1)
    except OSError:  # there is none
        yield
        return
    try:
        sys.stdout.flush()
        with contextlib.suppress(OSError):  # there is no standard error
            os.dup2(2, 1)
        yield
    finally:
        os.dup2(output, 1)
        os.close(output)


def summary(trace: Trace, hardware: Hardware, plan: Plan) -> list[str]:
    """A few lines for people, all figures from the simulator."""
    judged = judge(trace, hardware, plan)
    peak, budget, plain = map(format_bytes, (judged.peak_bytes, plan.budget_bytes, trace.peak_bytes))
    lines = [
        f"{plan.planner} on {hardware.name}: peak {peak} of a budget of {budget}; everything kept takes {plain}",
        f"step {format_seconds(judged.seconds)} predicted, {judged.overhead:.1%} over keeping everything{_gap(judged)}",
        f"{actions(judged)}; {stalls(judged)}",
        *plan.notes,
    ]
    return [printable(line) for line in lines]


def actions(judged: Judged) -> str:
    return (
        f"kept {format_bytes(judged.kept_bytes)}, swapped {format_bytes(judged.swapped_bytes)}, "
        f"recomputed {format_bytes(judged.recomputed_bytes)}"
    )


def stalls(judged: Judged) -> str:
    if not judged.stalls:
        return "no stalls"
    return f"{judged.stalls} stall{'s' * (judged.stalls > 1)}, {format_seconds(judged.stalled_seconds)}"


def _gap(judged: Judged) -> str:
    return "" if judged.gap is None else f", at most {judged.gap:.1%} above the best plan there can be"
