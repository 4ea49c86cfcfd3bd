"""What every planner that has a floor of its own owes: a plan that is what it says, or the floor, which it reaches."""

from __future__ import annotations

import pytest

from legroom.errors import BudgetError
from legroom.evaluate import floor_bytes
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.plan import Plan
from legroom.planners import Planner
from legroom.schedule import check_schedule, lower
from legroom.simulate import simulate


def honest_plan(planner: Planner, trace: Trace, hardware: Hardware, part: int) -> Plan:
    """At `part` percent of the way from the floor to the plain peak, or at the floor that the planner names."""
    low = floor_bytes(trace)
    budget = low + (trace.peak_bytes - low) * part // 100
    try:
        plan = planner(trace, hardware, budget)
    except BudgetError as error:
        refusal = error
        plan = planner(trace, hardware, refusal.floor_bytes)
        assert budget == refusal.budget_bytes < refusal.floor_bytes <= trace.peak_bytes
        assert f"({refusal.floor_bytes} bytes)" in str(refusal)
        budget = refusal.floor_bytes
        with pytest.raises(BudgetError) as below:
            planner(trace, hardware, budget - 1)
        assert below.value.floor_bytes == budget
    schedule = lower(trace, plan, hardware)
    assert check_schedule(trace, schedule) == plan.predicted_peak_bytes <= budget
    assert simulate(trace, schedule, hardware).seconds == plan.predicted_seconds
    assert planner(trace, hardware, budget) == plan
    return plan
