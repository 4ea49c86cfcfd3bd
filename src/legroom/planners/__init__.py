"""Planners: what to do about each gap. One system, one file.

A planner is a value one calls with a trace, a machine and a budget; its knobs are the fields of a frozen dataclass. Its
plan passes check_schedule() with a peak within the budget, or it raises BudgetError: below the floor of the step, or,
where its rule stops earlier, with the least peak that its rule reaches.
"""

from __future__ import annotations

from typing import Protocol

from legroom.errors import PlanError, quote
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.plan import Plan
from legroom.planners.auto import Auto, quick, tighter
from legroom.planners.capuchin import Capuchin
from legroom.planners.checkmate import Checkmate
from legroom.planners.dtr import Dtr
from legroom.planners.home import Home
from legroom.planners.mimose import Mimose
from legroom.planners.none import KeepAll
from legroom.planners.optimal import Optimal
from legroom.planners.responsive import ResponsivePlanner
from legroom.planners.sublinear import Sublinear
from legroom.planners.superneurons import SuperNeurons
from legroom.planners.tensile import Tensile
from legroom.planners.vdnn import Vdnn
from legroom.units import parse_bytes

__all__ = ["PLANNERS", "Planner", "named", "plan", "quick", "tighter"]


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


PLANNERS: dict[str, Planner] = {
    "none": KeepAll(),
    "vdnn": Vdnn(),
    "superneurons": SuperNeurons(),
    "sublinear": Sublinear(),
    "dtr": Dtr(),
    "checkmate": Checkmate(),
    "capuchin": Capuchin(),
    "home": Home(),
    "mimose": Mimose(),
    "tensile": Tensile(),
    "responsive": ResponsivePlanner(),
    "optimal": Optimal(),
    "auto": Auto(),
}
