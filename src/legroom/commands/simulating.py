"""`legroom simulate`: a plan on a modelled machine, told in lines."""

from __future__ import annotations

from legroom.commands.planning import actions, stalls
from legroom.compare import judge
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.page import printable
from legroom.plan import Plan
from legroom.timeline import Breakdown, Timeline
from legroom.units import format_bytes, format_seconds

MOST_STALLS = 5  # shown; the files have them all


def summary(trace: Trace, hardware: Hardware, plan: Plan, timeline: Timeline) -> list[str]:
    judged = judge(trace, hardware, plan)
    peak, budget, plain = map(format_bytes, (timeline.peak_bytes, plan.budget_bytes, trace.peak_bytes))
    seconds = format_seconds(timeline.seconds)
    copied = {lane: sum(i.end_ns - i.start_ns for i in timeline.intervals if i.lane == lane) for lane in ("out", "in")}
    lines = [
        f"plan of {plan.planner} on {hardware.name}: step {seconds}, {judged.overhead:.1%} over keeping everything",
        f"peak {peak} {_where(trace, timeline)}; budget {budget}, everything kept {plain}",
        ", ".join(f"{name} {format_seconds(took)}" for name, took in _parts(timeline.breakdown)),
        f"lanes busy: out {format_seconds(copied['out'] / 1e9)}, in {format_seconds(copied['in'] / 1e9)}",
        f"{actions(judged)}; {stalls(judged)}",
    ]
    for stall in sorted(timeline.stalls, key=lambda s: -s.seconds)[:MOST_STALLS]:
        name = trace.storages[stall.storage].name or f"storage {stall.storage}"
        waited = "to be copied out" if stall.cause == "release" else "to be back"
        lines.append(f"  {format_seconds(stall.seconds)} at tick {stall.tick} for {name} {waited}")
    if abs(timeline.seconds - plan.predicted_seconds) > 1e-9 * max(1.0, timeline.seconds):
        lines.append(
            f"the plan itself predicts {format_seconds(plan.predicted_seconds)}: made for another machine, or from "
            "another measurement"
        )
    return [line[: len(line) - len(line.lstrip())] + printable(line) for line in lines]


def _parts(breakdown: Breakdown) -> list[tuple[str, float]]:
    return [
        ("computation", breakdown.computation_seconds),
        ("recomputation", breakdown.recomputation_seconds),
        ("stalled copy", breakdown.stalled_copy_seconds),
        ("overlapped copy", breakdown.overlapped_copy_seconds),
    ]


def _where(trace: Trace, timeline: Timeline) -> str:
    for memory in timeline.memory:
        if memory.peak_bytes == timeline.peak_bytes:
            return f"at tick {memory.tick} of {len(trace.ticks)}"
    return "before the first tick"
