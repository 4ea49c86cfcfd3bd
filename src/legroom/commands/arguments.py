"""What the commands take: budgets, slowdowns, planners, machines, and files to read and to write.

All of it is checked before anything takes long, and what does not fit raises an error of one line that names it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from legroom.demo import parse_budgets
from legroom.errors import LegroomError, PlanError, quote
from legroom.evaluate import floor_bytes
from legroom.hardware import PRESETS, Hardware
from legroom.hardware import from_json as hardware_from_json
from legroom.ir import Trace
from legroom.jsonio import read_text
from legroom.plan import Plan
from legroom.plan import from_json as plan_from_json
from legroom.planners import PLANNERS, Planner, named
from legroom.units import UnitError


def budgets_in(trace: Trace, texts: Sequence[str]) -> tuple[int, ...]:
    """Budgets in bytes; "50%" is halfway from the floor to the plain peak. The largest first, each once."""
    wanted = parse_budgets(tuple(texts))
    floor, peak = floor_bytes(trace), trace.peak_bytes
    nbytes = {max(1, floor + round(w * (peak - floor))) if isinstance(w, float) else w for w in wanted}
    return tuple(sorted(nbytes, reverse=True))


def slowdown_of(text: str) -> float:
    """ "5%" is 0.05."""
    match = re.fullmatch(r"\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*%\s*", text, re.ASCII)
    if match is None:
        raise UnitError(f"cannot read {quote(text)} as a slowdown; write it as 5% or 0.5%")
    return float(match[1]) / 100


def planners_of(names: str | None) -> dict[str, Planner]:
    """The planners of a list such as "auto,none", in its order; all there are where it is None."""
    if names is None:
        return dict(PLANNERS)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise PlanError(f"no planner in {quote(names)}; there are {', '.join(sorted(PLANNERS))}")
    return {name: named(name) for name in wanted}


def hardware_of(text: str | None, trace: Trace) -> Hardware:
    """A preset or a file; where none is named, the preset that goes with the trace's device."""
    if text is None:
        return PRESETS["cpu" if trace.device == "cpu" else "h200"]
    if text in PRESETS:
        return PRESETS[text]
    if not os.path.lexists(text) and os.sep not in text:
        raise PlanError(f"unknown hardware {quote(text)}; there are {', '.join(PRESETS)}, or name a file")
    return hardware_from_json(read_text(text, error=PlanError))


def read_plan(path: Path) -> Plan:
    return plan_from_json(read_text(path, error=PlanError))


def check_targets(targets: Sequence[Path | None], *, sources: Sequence[Path] = ()) -> None:
    """Refuse, before the work, what cannot be written after it or would be written over what was read."""
    seen = {os.path.realpath(source): source for source in sources}
    for target in targets:
        if target is None:
            continue
        name = quote(str(target))
        if "\0" in str(target) or not target.name:
            raise LegroomError(f"{name} cannot be written: it is not the name of a file")
        if not target.parent.is_dir():
            raise LegroomError(f"{name} cannot be written: there is no folder {quote(str(target.parent))}")
        if target.exists() and not target.is_file():  # a file is replaced whole, and that must not happen to /dev/null
            raise LegroomError(f"{name} cannot be written: it is there and not a file")
        if not os.access(target.parent, os.W_OK | os.X_OK):
            raise LegroomError(f"{name} cannot be written: the folder {quote(str(target.parent))} is not writable")
        real = os.path.realpath(target)
        if real in seen:
            raise LegroomError(
                f"{name} cannot be written: this command uses {quote(str(seen[real]))} for something else"
            )
        seen[real] = target
