"""What a room reports of real steps, and that it does so whatever has happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import legroom
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.plan import Plan, Swap, signature
from legroom.report import Report, input_sizes
from tests.runtime.test_opdb import recompute_all

SHAPE = (64, 128)  # 32 KiB: large enough to be moved
COPIED = "copied before a write, for a replay that reads it"


def number(seed: int) -> Tensor:
    return torch.randn(*SHAPE, generator=torch.Generator().manual_seed(seed))


def step(w: Tensor, table: Tensor, *, layers: int = 3) -> None:
    w.grad = None
    total = torch.zeros(())
    for i in range(layers):
        total = total + ((w + table) * (1.0 + i) + 0.5).sin().sum()
    total.backward()


def swap_all(trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
    return Plan((Swap(when="sync"),) * len(trace.gaps), signature(trace), "swap all", budget_bytes, 0, 0.0, ())


def test_the_curves_lie_over_each_other(tmp_path: Path) -> None:
    w, table = number(0).requires_grad_(), number(1)
    with legroom.fit(budget="1GiB", planner=swap_all) as room:
        for _ in range(5):
            with room.step():
                step(w, table)
        report, trace, timeline = room.report(), room.trace, room.timeline
    assert trace is not None and timeline is not None
    assert report.planner == "swap all"
    assert len(report.predicted_curve) == len(report.measured_curve) == len(trace.ticks) + 1
    assert max(report.predicted_curve) == report.predicted_peak_bytes == timeline.peak_bytes
    assert max(report.measured_curve) == report.planned_peak_bytes == report.predicted_peak_bytes
    assert report.lower_bound_seconds is None and report.gap is None
    report.to_html(tmp_path / "report.html")
    assert "swap all" in (tmp_path / "report.html").read_text()


def test_a_prediction_that_a_step_disproves_is_moved() -> None:
    """Planned steps take more than the recorded one did. The timeline says so too, and new curves are of a new plan."""
    w, table = number(0).requires_grad_(), number(1)
    with legroom.fit(budget="1GiB", planner=swap_all) as room:
        for index in range(6):
            with room.step():
                step(w, table)
                if index >= 2:
                    torch.zeros(8 * w.numel())
        report, timeline = room.report(), room.timeline
        assert timeline is not None
        assert report.calibrations >= 1
        assert max(m.peak_bytes for m in timeline.memory) == timeline.peak_bytes == report.planned_peak_bytes
        assert max(report.predicted_curve) == max(report.measured_curve) == report.planned_peak_bytes
        for _ in range(2):  # the first drifts, and after the second there is another plan
            with room.step():
                step(w, table, layers=5)
        assert len(room.report().predicted_curve) > len(report.predicted_curve)
        assert room.report().measured_curve == ()


def test_a_copy_made_before_a_write_is_counted() -> None:
    """From step 4 on an op writes to what dropped values are recomputed from, while they are away."""
    w, table, spare = number(0).requires_grad_(), number(1), number(2)
    with legroom.fit(budget="1GiB", planner=recompute_all) as room:
        for index in range(6):
            with room.step():
                w.grad = None
                loss = ((w + table) * 2.0 + 0.5).sin().sum()
                (table if index >= 4 else spare).add_(1.0)
                (loss + ((w - 1.0) * 2.0).cos().sum()).backward()
                del loss
            assert (COPIED in room.report().fallbacks) == (index >= 4), f"step {index}: {room.report().fallbacks}"


def test_a_room_whose_plan_no_longer_fits_its_step_still_reports(tmp_path: Path) -> None:
    """A plan given from outside, then another program: the plan is refused, and its gaps are not mixed with others."""
    w, table = number(0).requires_grad_(), number(1)
    with legroom.fit(budget="1GiB", planner=swap_all) as room:
        for _ in range(2):
            with room.step():
                step(w, table)
        plan = room.plan
    with legroom.fit(budget="1GiB", plan=plan) as room:
        for _ in range(4):
            with room.step():
                step(w, table)
        assert room.report().bytes_swapped > 0
        with room.step():
            step(w, table, layers=5)
        with pytest.raises(legroom.PlanError), room.step():
            step(w, table, layers=5)
        report = room.report()
    assert report.planned_steps == 2
    assert (report.planner, report.bytes_swapped, report.predicted_peak_bytes) == ("", 0, 0)
    assert str(report)
    report.to_html(tmp_path / "report.html")


def test_steps_of_other_sizes_are_told_with_their_plans(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = [256, 192, 320, 224, 288, 200, 272, 240]
    with legroom.fit(model, optimizer, budget="1GiB") as room:
        for size in sizes:
            with room.step():
                model(torch.ones(size, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        report = room.report()
    followed = report.followed
    assert followed is not None
    told = [step.features for step in followed.steps]
    assert told == [(size, 64) for size in sizes[-len(told) :]]
    assert input_sizes(followed.steps).label == "a of (a, 64)"
    assert followed.courses()["planned"] >= 2
    assert followed.prediction_error() == pytest.approx(0.0, abs=0.01)
    assert Report.from_json(report.to_json()) == report
    assert "a of (a, 64)" in str(report)
    report.to_html(tmp_path / "report.html")
    assert "measured, planned" in (tmp_path / "report.html").read_text()
