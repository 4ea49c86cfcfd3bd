"""Plain PyTorch: everything is kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from legroom.evaluate import KEEP, Evaluator
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.plan import Plan
from legroom.planners.vdnn import above_budget


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Guarantees nothing: a budget below the step's own peak, which is its floor, raises BudgetError."""

    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        evaluator = Evaluator(trace, hardware)
        codes = np.full(evaluator.gaps, KEEP, np.int8)
        peak = evaluator.evaluate(codes)[1]
        if peak > budget_bytes:
            raise above_budget("none", floor=peak, budget_bytes=budget_bytes)
        return evaluator.plan(codes, planner="none", budget_bytes=budget_bytes)
