"""legroom fits PyTorch training into the memory you have."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from legroom.errors import BudgetError, DeviceError, LegroomError, PlanError, StepError, TraceError
from legroom.evaluate import floor_bytes
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.plan import Plan
from legroom.planners import PLANNERS, plan
from legroom.report import Report
from legroom.simulate import simulate

if TYPE_CHECKING:
    from legroom.probing import probe
    from legroom.room import Room, capture, fit

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

# What needs torch is loaded when it is asked for: planning from a file does not, and torch takes two seconds.
_WITH_TORCH = {"Room": "legroom.room", "capture": "legroom.room", "fit": "legroom.room", "probe": "legroom.probing"}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module 'legroom' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_WITH_TORCH[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
