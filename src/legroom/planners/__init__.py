"""Planners: what to do about each gap. One system, one file.

A planner is a value one calls with a trace, a machine and a budget; its knobs are the fields of a frozen dataclass. Its
plan passes check_schedule() with a peak within the budget, or it raises BudgetError.
"""

from __future__ import annotations

from typing import Protocol

from legroom.errors import PlanError, quote
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.plan import Plan
from legroom.planners.auto import Auto
from legroom.planners.none import KeepAll
from legroom.units import parse_bytes

__all__ = ["PLANNERS", "Planner", "named", "plan"]


class Planner(Protocol):
    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan: ...


def named(planner: str | Planner) -> Planner:
    """The planner of that name; a planner itself is returned as it is."""
    if callable(planner):
        return planner
    if not isinstance(planner, str) or planner not in PLANNERS:
        known = ", ".join(sorted(PLANNERS))
        raise PlanError(f"unknown planner {quote(planner)}; there are {known}, or pass a callable")
    return PLANNERS[planner]


def plan(trace: Trace, hardware: Hardware, budget: int | str, *, planner: str | Planner = "auto") -> Plan:
    """A plan for a trace on a machine, inside a budget."""
    return named(planner)(trace, hardware, parse_bytes(budget))


PLANNERS: dict[str, Planner] = {"none": KeepAll(), "auto": Auto()}
