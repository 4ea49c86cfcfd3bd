"""legroom fits PyTorch training into the memory you have."""

from legroom.errors import BudgetError, DeviceError, LegroomError, PlanError, StepError, TraceError
from legroom.evaluate import floor_bytes
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.plan import Plan
from legroom.planners import PLANNERS, plan
from legroom.probe import probe
from legroom.report import Report
from legroom.room import Room, capture, fit
from legroom.simulate import simulate

__all__ = [
    "PLANNERS",
    "BudgetError",
    "DeviceError",
    "Hardware",
    "LegroomError",
    "Plan",
    "PlanError",
    "Report",
    "Room",
    "StepError",
    "Trace",
    "TraceError",
    "capture",
    "fit",
    "floor_bytes",
    "plan",
    "probe",
    "simulate",
]
__version__ = "0.1.0"
