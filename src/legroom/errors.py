"""What legroom raises.

    Exception
    └── LegroomError            catch this to catch everything below
        ├── BudgetError         no plan fits the budget; carries the numbers
        ├── PlanError           a plan or a schedule is not valid for its trace
        ├── TraceError          a trace, or the file it came from, is not well-formed
        ├── DeviceError         this machine or device cannot do what was asked
        ├── StepError           a step was used in a way that cannot work (nested, after close, ...)
        └── UnitError           a number of bytes could not be read; also a ValueError (lives in units.py)

A message says what happened, the numbers, and the way out, in one line that a command line can print as it is.
A wrong argument to a function (an unknown planner name, a negative count) is a plain ValueError or TypeError; the tree
above is for what only turns out while working.
"""

from __future__ import annotations


class LegroomError(Exception):
    """Base class of all errors of this library."""


class BudgetError(LegroomError):
    """The budget is below what the step needs, whatever the plan."""

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int = 0,
        floor_bytes: int = 0,
        breakdown: tuple[tuple[str, int], ...] = (),
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes  # the smallest budget that works; 0 where it is not known
        self.breakdown = breakdown  # what stands at the floor: (what, bytes), largest first

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions pickle as cls(*args), which would lose the keyword fields on the way out of a worker process.
        return _rebuild_budget_error, (str(self), self.budget_bytes, self.floor_bytes, self.breakdown)


def _rebuild_budget_error(
    message: str, budget_bytes: int, floor_bytes: int, breakdown: tuple[tuple[str, int], ...]
) -> BudgetError:
    return BudgetError(message, budget_bytes=budget_bytes, floor_bytes=floor_bytes, breakdown=breakdown)


class PlanError(LegroomError):
    """A plan or a schedule does not fit the trace it is used with."""


class TraceError(LegroomError):
    """A trace contradicts itself, or a trace file cannot be read."""


class DeviceError(LegroomError):
    """The machine cannot do what was asked: no such device, no room to spill, a copy that failed."""


class StepError(LegroomError):
    """A step was entered, left or used in a way that cannot work."""


def quote(value: object) -> str:
    """A value as a message shows it: its repr, cut short, and never an exception of its own."""
    if isinstance(value, int) and abs(value) >= 2**128:  # Python refuses to write out very long integers
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (str, bytes)):
        value = value[:80]  # before repr(), which would copy a gigabyte to show sixty characters of it
    containers = (list, tuple, dict)
    if isinstance(value, containers) and (len(value) > 4 or any(isinstance(entry, containers) for entry in value)):
        return f"a {type(value).__name__} of {len(value)}"  # its repr may be as large, or nested as deeply, as a file
    text = ascii(value)
    return text if len(text) <= 64 else text[:60] + "..."
