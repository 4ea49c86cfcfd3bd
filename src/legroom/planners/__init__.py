"""Planners: what to do about each gap. One system, one file.

A planner is a value one calls with a trace, a machine and a budget; its knobs are the fields of a frozen dataclass. Its
plan passes check_schedule() with a peak within the budget, or it raises BudgetError.
"""

from __future__ import annotations

from typing import Protocol

from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.plan import Plan
from legroom.planners.auto import Auto
from legroom.planners.none import KeepAll

__all__ = ["PLANNERS", "Planner"]


class Planner(Protocol):
    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan: ...


PLANNERS: dict[str, Planner] = {"none": KeepAll(), "auto": Auto()}
