"""The recorded steps: each is well-formed, and planners meet their promise on it.

`bench/record.py` makes the files. Every trace with every planner at every budget would take minutes, and is what
`bench/planners.py` does. Here each planner is asked about some traces, always the same ones, so that each trace gets
some planners.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from legroom.errors import BudgetError
from legroom.evaluate import floor_bytes
from legroom.hardware import PRESETS
from legroom.ir import Trace
from legroom.planners import PLANNERS
from legroom.schedule import check_schedule, lower
from legroom.simulate import simulate
from legroom.traceio import load

FOLDER = Path(__file__).parents[1] / "traces"
NAMES = sorted(path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz"))
# A swarm and solvers search for seconds; auto has a recorded step among its own tests.
FAST = [name for name in PLANNERS if name not in ("auto", "home", "optimal", "checkmate")]
SHARES = (0.9, 0.75, 0.5, 0.25, 0.1)
MACHINES = ("h200", "rtx2080ti-pcie3")
LARGEST_FILE_BYTES = 2**20

assert NAMES, "bench/record.py makes them"

read = cache(lambda name: load(FOLDER / f"{name}.json.gz"))


def chosen() -> list[tuple[str, str, float, str]]:
    """(planner, trace, share, machine): each planner takes a small file and a large one."""
    by_size = sorted(NAMES, key=lambda name: (FOLDER / f"{name}.json.gz").stat().st_size)
    taken = [(planner, by_size[at % len(NAMES)]) for i, planner in enumerate(FAST) for at in (i, -1 - i)]
    return [(*pair, SHARES[i % len(SHARES)], MACHINES[i % len(MACHINES)]) for i, pair in enumerate(taken)]


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_step_is_well_formed_and_small(name: str) -> None:
    path = FOLDER / f"{name}.json.gz"
    assert path.stat().st_size < LARGEST_FILE_BYTES
    trace = read(name)  # loading validates
    assert trace.gaps and trace.ticks
    assert {op.phase for op in trace.ops} == {"forward", "backward", "optimizer"}
    assert sum(op.seconds for op in trace.ops) > 0
    assert floor_bytes(trace) < trace.peak_bytes
    assert not any(op.line.startswith("/") for op in trace.ops)  # folders of the machine it was recorded on


@pytest.mark.parametrize(("planner", "name", "share", "machine"), chosen())
def test_a_plan_is_within_the_budget_or_the_floor_is_named(planner: str, name: str, share: float, machine: str) -> None:
    trace = read(name)
    floor = floor_bytes(trace)
    budget = int(floor + share * (trace.peak_bytes - floor))
    try:
        peak = planned_peak(trace, planner, machine, budget)
    except BudgetError as refusal:
        own = refusal.floor_bytes
        assert own > budget
        assert own >= floor
        assert planned_peak(trace, planner, machine, own) <= own
        return
    assert peak <= budget


def planned_peak(trace: Trace, planner: str, machine: str, budget_bytes: int) -> int:
    hardware = PRESETS[machine]
    plan = PLANNERS[planner](trace, hardware, budget_bytes)
    schedule = lower(trace, plan, hardware)
    peak = check_schedule(trace, schedule)
    timeline = simulate(trace, schedule, hardware)
    assert timeline.peak_bytes == peak == plan.predicted_peak_bytes
    assert timeline.seconds == pytest.approx(plan.predicted_seconds, abs=1e-9)
    return peak
