"""What a room did, in numbers: as text, as JSON, and as a page."""

from __future__ import annotations

import json
import os
import textwrap
from dataclasses import asdict, dataclass, field

from legroom.errors import LegroomError
from legroom.jsonio import write_text
from legroom.page import Bar, Curve, Page, printable
from legroom.reasons import Held
from legroom.timeline import Breakdown
from legroom.units import format_bytes, format_seconds

COLUMNS = 100  # of the text


@dataclass(frozen=True, slots=True)
class FollowedStep:
    """One step of a room whose inputs vary."""

    features: tuple[int, ...]  # the sizes of the inputs
    course: str  # planned, sheltered, reactive, left alone
    seconds: float
    planning_seconds: float  # what of it went into finding the plan
    measured_bytes: int  # the peak by the allocator's log; 0 where the step was not measured
    predicted_bytes: int  # for the same step; 0 where it was not measured or not planned


@dataclass(frozen=True, slots=True)
class Followed:
    """How steps whose inputs vary were planned for."""

    steps: tuple[FollowedStep, ...]  # the last ones
    structures: int  # op sequences that were learned
    plans: int  # that are at hand
    hits: int
    misses: int
    evicted: int
    residual: float  # of the size models, the worst, as a share of the peak
    reserve_bytes: int
    planning_seconds: float  # the median of planned steps
    slow_planning_seconds: float  # one in a hundred takes longer


@dataclass(frozen=True, slots=True)
class Report:
    steps: int
    sheltered_steps: int
    planned_steps: int
    measured_steps: int  # steps whose peak was read from the allocator's log
    calibrations: int  # measured planned steps that moved the predicted curve
    budget_bytes: int
    peak_bytes: int  # measured, worst step
    planned_peak_bytes: int  # measured, the last planned step that was measured
    predicted_peak_bytes: int
    floor_bytes: int  # the smallest budget that works; 0 until it is known
    predicted_curve: tuple[int, ...]  # the most bytes alive between two ticks, those before the first in front
    measured_curve: tuple[int, ...]  # the same, of the last planned step that was measured
    planner: str  # "" while there is no plan
    notes: tuple[str, ...]  # what the planner says about its plan
    step_seconds: float  # median of the last 50 planned steps
    predicted_step_seconds: float
    baseline_seconds: float  # the modelled step without any action
    pace: float  # what the first steps of a plan took on the device, over what was simulated; all three contain it
    lower_bound_seconds: float | None  # no plan for the bytes that could be filled is faster; None where not stated
    gap: float | None = field(init=False)  # how far the modelled step lies above that bound, as a share of it
    bytes_kept: int
    bytes_swapped: int
    bytes_recomputed: int
    breakdown: Breakdown
    held: tuple[Held, ...]
    unreplayable: tuple[tuple[str, int], ...]  # reason, bytes of saved storages it keeps from being recomputed
    distrusted: tuple[str, ...]  # ops whose replay once gave other bits: kept or swapped since
    fallbacks: dict[str, int]
    followed: Followed | None = None  # None while all inputs have the same size

    def __post_init__(self) -> None:
        bound = self.lower_bound_seconds
        object.__setattr__(self, "gap", self.predicted_step_seconds / bound - 1 if bound else None)

    def to_json(self) -> str:
        """A line for each field: the curves are long."""
        lines = (f" {json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in asdict(self).items())
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page with all of this: one file that needs no other, no network and no script."""
        write_text(path, _page(self).text(), error=LegroomError)

    def __str__(self) -> str:
        lines = [
            f"steps {self.steps}, sheltered {self.sheltered_steps}, planned {self.planned_steps}",
            f"budget {format_bytes(self.budget_bytes)}, peak {format_bytes(self.peak_bytes)} "
            f"(measured in {self.measured_steps} steps)"
            + (f", predicted {format_bytes(self.predicted_peak_bytes)}" if self.predicted_peak_bytes else "")
            + (f", smallest that works {format_bytes(self.floor_bytes)}" if self.floor_bytes else ""),
        ]
        seconds = [f"step {format_seconds(self.step_seconds)}"] if self.planned_steps else []
        if self.planner:
            seconds.append(f"predicted {format_seconds(self.predicted_step_seconds)}")
            seconds.append(f"without any action {format_seconds(self.baseline_seconds)} (modelled)")
        if seconds:
            lines.append(", ".join(seconds))
        if self.planner:
            if self.lower_bound_seconds is not None:
                bound = format_seconds(self.lower_bound_seconds)
                lines.append(f"no plan is modelled below {bound}, this one lies {self.gap or 0.0:.1%} above")
            lines.append(", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in _actions(self)))
            lines.append(", ".join(f"{name} {format_seconds(took)}" for name, took in _parts(self.breakdown)))
        for held in _largest(self.held)[:5]:
            lines.append(f"held by Python code: {format_bytes(held.nbytes)} {held.module} {held.line}")
        for reason, nbytes in self.unreplayable[:5]:
            lines.append(f"cannot be recomputed: {format_bytes(nbytes)}, {reason}")
        if self.distrusted:
            lines.append(f"recomputed no more, as a replay gave other bits: {', '.join(self.distrusted)}")
        lines += [f"fallback: {name}: {count}" for name, count in sorted(self.fallbacks.items())]
        return "\n".join(textwrap.fill(printable(line), COLUMNS, subsequent_indent="    ") for line in lines)


def _actions(report: Report) -> list[tuple[str, int]]:
    return [
        ("kept", report.bytes_kept),
        ("swapped", report.bytes_swapped),
        ("recomputed", report.bytes_recomputed),
    ]


def _parts(breakdown: Breakdown) -> list[tuple[str, float]]:
    return [
        ("computation", breakdown.computation_seconds),
        ("overlapped copy", breakdown.overlapped_copy_seconds),
        ("stalled copy", breakdown.stalled_copy_seconds),
        ("recomputation", breakdown.recomputation_seconds),
    ]


def _largest(held: tuple[Held, ...]) -> list[Held]:
    return sorted(held, key=lambda h: -h.nbytes)


def _page(report: Report) -> Page:
    page = Page("legroom report")
    _headline(page, report)
    _memory(page, report)
    if report.planner:
        _plan(page, report)
    if report.fallbacks:
        page.heading("Fallbacks")
        page.table(("what", "times"), [(name, f"{count}") for name, count in sorted(report.fallbacks.items())])
    if report.held:
        page.heading("Saved, and held by Python code")
        places = [(format_bytes(h.nbytes), h.module, h.line) for h in _largest(report.held)]
        page.table(("bytes", "module", "made in line"), places)
    if report.unreplayable or report.distrusted:
        page.heading("Cannot be recomputed")
        rows = [(format_bytes(nbytes), reason) for reason, nbytes in report.unreplayable]
        rows += [("", f"{name}: a replay gave other bits") for name in report.distrusted]
        page.table(("bytes", "why"), rows)
    return page


def _headline(page: Page, report: Report) -> None:
    over = report.peak_bytes > report.budget_bytes
    figures = [
        ("budget", format_bytes(report.budget_bytes)),
        ("peak, worst step", f"{format_bytes(report.peak_bytes)} ({report.peak_bytes / report.budget_bytes:.1%})"),
    ]
    if report.planned_steps:
        figures.append(("step, median", format_seconds(report.step_seconds)))
    if report.planner:
        figures.append(("step, predicted", format_seconds(report.predicted_step_seconds)))
        figures.append(("step without any action, modelled", format_seconds(report.baseline_seconds)))
    if report.lower_bound_seconds is not None:
        figures.append(("no plan is modelled below", format_seconds(report.lower_bound_seconds)))
        figures.append(("gap to that", f"{report.gap or 0.0:.1%}"))
    page.figures(figures, over=("peak, worst step",) if over else ())
    steps = (
        ("steps", report.steps),
        ("sheltered", report.sheltered_steps),
        ("planned", report.planned_steps),
        ("measured", report.measured_steps),
        ("that moved the prediction", report.calibrations),
    )
    page.table([name for name, _ in steps], [[f"{count}" for _, count in steps]])


def _memory(page: Page, report: Report) -> None:
    page.heading("Memory against the budget")
    bars = [
        ("peak, worst step", report.peak_bytes),
        ("peak, last planned step", report.planned_peak_bytes),
        ("predicted peak", report.predicted_peak_bytes),
        ("smallest budget that works", report.floor_bytes),
        ("budget", report.budget_bytes),
    ]
    page.bars("Memory against the budget", [Bar(name, n, _exact(n)) for name, n in bars if n])
    curves = [("predicted", report.predicted_curve), ("measured", report.measured_curve)]
    curves = [(name, values) for name, values in curves if values]
    if not curves:
        return
    page.heading("Memory over the step")
    top = max(max(values) for _, values in curves)
    # A budget far above the step would press the curve flat against the bottom.
    limit = ("budget", report.budget_bytes) if report.budget_bytes <= 2 * top else None
    drawn = [Curve(f"{name}, at most {format_bytes(max(values))}", values) for name, values in curves]
    page.curves("Memory over the step", drawn, limit=limit)
    page.paragraph("From left to right in program order: what is alive at most between one tick and the next.")


def _plan(page: Page, report: Report) -> None:
    page.heading("Where the modelled step spends its time")
    parts = _parts(report.breakdown)
    page.bars("Where the modelled step spends its time", [Bar(name, s, format_seconds(s)) for name, s in parts])
    page.paragraph("Overlapped copies run beside computation and cost no time.")
    page.heading("Saved bytes by action")
    page.bars("Saved bytes by action", [Bar(name, n, _exact(n)) for name, n in _actions(report)])
    page.heading(f"The plan of {report.planner}")
    for note in report.notes:
        page.paragraph(note)


def _exact(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} = {nbytes} B" if nbytes >= 1024 else format_bytes(nbytes)
