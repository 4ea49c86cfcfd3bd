"""fit(max_slowdown=...): the least memory at a stated price."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import legroom
from legroom.errors import LegroomError
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.plan import Plan, Swap, signature
from legroom.schedule import lower
from legroom.simulate import simulate
from tests.harness import assert_same, run_plain, run_room
from tests.zoo import ZOO


@pytest.mark.parametrize("max_slowdown", [0.0, 0.3])
def test_the_price_buys_memory_and_changes_no_bit(max_slowdown: float) -> None:
    taken, report, plan = run_room(ZOO["mlp"](), lambda *args: legroom.fit(*args, max_slowdown=max_slowdown))
    assert_same(run_plain(ZOO["mlp"](), len(taken)), taken)
    assert plan.predicted_seconds <= report.baseline_seconds * (1 + max_slowdown) * (1 + 1e-9)
    assert any("least peak at a slowdown of at most" in note for note in report.notes)
    if max_slowdown:
        assert report.bytes_swapped + report.bytes_recomputed > 0
        assert report.planned_peak_bytes < max(report.predicted_curve) + report.bytes_swapped + report.bytes_recomputed


def waits_for_every_copy(trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
    decisions = tuple(Swap("sync") for _ in trace.gaps)
    timeline = simulate(trace, lower(trace, Plan(decisions, signature(trace), "", 0, 0, 0.0, ()), hardware), hardware)
    peak, seconds = timeline.peak_bytes, timeline.seconds
    return Plan(decisions, signature(trace), "waits", budget_bytes, peak, seconds, ())


def test_a_planner_that_is_too_slow_at_any_price_leaves_everything_where_it_is() -> None:
    fit = partial(legroom.fit, max_slowdown=0.0, planner=waits_for_every_copy)
    _, report, plan = run_room(ZOO["mlp"](), fit)
    assert report.planned_steps >= 3 and plan.planner == "none"
    assert any(note.startswith("everything is kept: no plan at a slowdown") for note in report.notes)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "name a budget"),
        ({"budget": "1GiB", "max_slowdown": 0.1}, "one of the two"),
        ({"max_slowdown": -0.1}, "0 or more"),
        ({"max_slowdown": float("nan")}, "0 or more"),
        ({"max_slowdown": "5%"}, "must be a number"),
        ({"max_slowdown": True}, "must be a number"),
        ({"max_slowdown": 0.1, "plan": "p.json"}, "a plan has its price already"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], says: str) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(LegroomError, match=says):
        legroom.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
