"""What a room did, in numbers: as text, as JSON, and as a page."""

from __future__ import annotations

import math
import os
import statistics
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from legroom.errors import LegroomError, quote
from legroom.jsonio import Node, dump, parse, write_text
from legroom.page import Axis, Bar, Cloud, Curve, Page, printable
from legroom.reasons import Held
from legroom.timeline import Breakdown
from legroom.units import format_bytes, format_seconds

VERSION = 1
COLUMNS = 100  # of the text
COURSES = {"planned": "colour-1", "sheltered": "colour-2", "reactive": "colour-3", "left alone": "colour-4"}
MOST_FACTORS = 3  # dimensions that an input's size is the product of
MOST_SHOWN = 16  # dimensions of inputs that are written out
LEAST_SECONDS = 1e-9  # of a step that is drawn: the axis is logarithmic
MOST_SECONDS = 1e9  # in a file: thirty years


@dataclass(frozen=True, slots=True)
class FollowedStep:
    """One step of a room whose inputs vary."""

    features: tuple[int, ...]  # the sizes of the inputs
    course: str  # one of COURSES
    seconds: float
    planning_seconds: float  # what of it went into finding the plan
    measured_bytes: int  # the peak by the allocator's log; 0 where the step was not measured
    predicted_bytes: int  # for the same step; 0 where it was not measured or not planned
    planner: str = ""  # whose plan it followed; "" where none
    plan_peak_bytes: int = 0  # of that plan at the size it was made for, which is no smaller; 0 where none


@dataclass(frozen=True, slots=True)
class InputSizes:
    """One number for each step's input, to draw it against."""

    label: str  # "a × b of (2, 3, a, b)": which dimensions it is made of
    values: tuple[int, ...]


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

    def courses(self) -> dict[str, int]:
        """How many steps took which course."""
        counts = Counter(step.course for step in self.steps)
        return {course: counts[course] for course in COURSES if counts[course]}

    def compared(self) -> list[FollowedStep]:
        """The steps whose peak was both predicted and measured."""
        return [step for step in self.steps if step.measured_bytes and step.predicted_bytes]

    def prediction_error(self) -> float | None:
        """Of the peak, as a share, on average; None where no planned step was measured."""
        off = [abs(step.predicted_bytes / step.measured_bytes - 1) for step in self.compared()]
        return statistics.fmean(off) if off else None


def input_sizes(steps: Sequence[FollowedStep]) -> InputSizes:
    """The product of the dimensions that vary, each once where several vary together (as one grows by a constant
    multiple of the other). The sum of all dimensions where none varies, where more than MOST_FACTORS do, or where steps
    have different numbers of them."""
    if len({len(step.features) for step in steps}) == 1:
        columns = list(zip(*(step.features for step in steps), strict=True))
        factors: list[int] = []
        names: list[str] = []
        for column in columns:
            if min(column) == max(column):
                names.append(f"{column[0]}")
                continue
            like = next((f for f, i in enumerate(factors) if _move_together(columns[i], column)), len(factors))
            if like == len(factors):
                factors.append(len(names))
            if len(factors) > MOST_FACTORS:
                break
            names.append("abc"[like] + "'" * (columns[factors[like]] != column))
        if 1 <= len(factors) <= MOST_FACTORS:
            values = tuple(math.prod(step.features[i] for i in factors) for step in steps)
            if len(names) <= MOST_SHOWN:
                return InputSizes(f"{' × '.join('abc'[: len(factors)])} of ({', '.join(names)})", values)
            return InputSizes(f"{' × '.join(f'dimension {i + 1}' for i in factors)} of {len(names)}", values)
    return InputSizes("sum of all dimensions", tuple(sum(step.features) for step in steps))


def peaks(followed: Followed) -> list[Cloud]:
    """Peaks against input sizes: of the plans, predicted, and measured."""
    at = list(zip(input_sizes(followed.steps).values, followed.steps, strict=True))
    clouds = [
        Cloud("the plan's peak", "dash", "soft", tuple((x, step.plan_peak_bytes) for x, step in at)),
        Cloud("predicted", "cross", "ink", tuple((x, step.predicted_bytes) for x, step in at)),
        *(
            Cloud(
                f"measured, {course}", "dot", colour, tuple((x, s.measured_bytes) for x, s in at if s.course == course)
            )
            for course, colour in COURSES.items()
        ),
    ]
    known = [replace(cloud, points=tuple(point for point in cloud.points if point[1])) for cloud in clouds]
    return [cloud for cloud in known if cloud.points]


def times(followed: Followed) -> list[Cloud]:
    """Seconds against input sizes."""
    at = list(zip(input_sizes(followed.steps).values, followed.steps, strict=True))
    return [
        Cloud(
            f"{course}, {count} step{'s' * (count > 1)}",
            "dot",
            COURSES[course],
            tuple((x, max(LEAST_SECONDS, step.seconds)) for x, step in at if step.course == course),
        )
        for course, count in followed.courses().items()
    ]


def near(budget_bytes: int, peak_bytes: float) -> bool:
    """A budget far above all that is drawn would press it flat against the bottom."""
    return budget_bytes <= 2 * peak_bytes


def _move_together(a: Sequence[int], b: Sequence[int]) -> bool:
    other = next(i for i, value in enumerate(a) if value != a[0])
    rise, run = b[other] - b[0], a[other] - a[0]
    return all((y - b[0]) * run == rise * (x - a[0]) for x, y in zip(a, b, strict=True))


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
        gap = self.predicted_step_seconds / bound - 1 if bound and self.modelled else None
        object.__setattr__(self, "gap", gap)

    @property
    def modelled(self) -> bool:
        """Whether there is a prediction of the step; where inputs vary, each size has its own and none is told."""
        return self.predicted_step_seconds > 0

    def to_json(self) -> str:
        """A line for each field: the curves are long."""
        return dump("report", VERSION, asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that `to_json()` wrote."""
        return _read(parse(text, kind="report", version=VERSION, error=LegroomError))

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
        if self.modelled:
            seconds.append(f"predicted {format_seconds(self.predicted_step_seconds)}")
            seconds.append(f"without any action {format_seconds(self.baseline_seconds)} (modelled)")
        if seconds:
            lines.append(", ".join(seconds))
        if self.gap is not None and self.lower_bound_seconds is not None:
            bound = format_seconds(self.lower_bound_seconds)
            lines.append(f"no plan is modelled below {bound}, this one lies {self.gap:.1%} above")
        if self.planner:
            lines.append(", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in _actions(self)))
        if self.modelled:
            lines.append(", ".join(f"{name} {format_seconds(took)}" for name, took in _parts(self.breakdown)))
        if self.followed is not None:
            lines += _followed_lines(self.followed)
        for held in _largest(self.held)[:5]:
            lines.append(f"held by Python code: {format_bytes(held.nbytes)} {held.module} {held.line}")
        for reason, nbytes in self.unreplayable[:5]:
            lines.append(f"cannot be recomputed: {format_bytes(nbytes)}, {reason}")
        if self.distrusted:
            lines.append(f"recomputed no more, as a replay gave other bits: {', '.join(self.distrusted)}")
        lines += [f"fallback: {name}: {count}" for name, count in sorted(self.fallbacks.items())]
        return "\n".join(textwrap.fill(printable(line), COLUMNS, subsequent_indent="    ") for line in lines)


def _followed_lines(followed: Followed) -> list[str]:
    sizes, error = input_sizes(followed.steps), followed.prediction_error()
    lines = []
    if sizes.values:
        courses = ", ".join(f"{course} {count}" for course, count in followed.courses().items())
        lines.append(f"input size {min(sizes.values)} to {max(sizes.values)}, {sizes.label}")
        lines.append(f"the last {len(sizes.values)} steps: {courses}")
    lines.append(", ".join(f"{name} {count}" for name, count in _cache(followed)))
    lines.append(
        f"finding a plan took {format_seconds(followed.planning_seconds)} (median), "
        f"{format_seconds(followed.slow_planning_seconds)} (99th percentile)"
    )
    if error is not None:
        count = len(followed.compared())
        lines.append(f"predicted peaks are off by {error:.2%} on average, in {count} steps that were measured")
    lines.append(
        f"the size model is off by {followed.residual:.2%} of the peak at worst, "
        f"{format_bytes(followed.reserve_bytes)} are held in reserve"
    )
    return lines


def _cache(followed: Followed) -> list[tuple[str, int]]:
    return [
        ("structures", followed.structures),
        ("plans", followed.plans),
        ("hits", followed.hits),
        ("misses", followed.misses),
        ("evicted", followed.evicted),
    ]


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
    if report.followed is not None:
        _following(page, report.followed, report.budget_bytes)
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
    if report.modelled:
        figures.append(("step, predicted", format_seconds(report.predicted_step_seconds)))
        figures.append(("step without any action, modelled", format_seconds(report.baseline_seconds)))
    if report.gap is not None and report.lower_bound_seconds is not None:
        figures.append(("no plan is modelled below", format_seconds(report.lower_bound_seconds)))
        figures.append(("gap to that", f"{report.gap:.1%}"))
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
    limit = ("budget", report.budget_bytes) if near(report.budget_bytes, top) else None
    drawn = [Curve(f"{name}, at most {format_bytes(max(values))}", values) for name, values in curves]
    page.curves("Memory over the step", drawn, limit=limit)
    page.paragraph("From left to right in program order: what is alive at most between one tick and the next.")


def _following(page: Page, followed: Followed, budget_bytes: int) -> None:
    sizes, error = input_sizes(followed.steps), followed.prediction_error()
    if sizes.values:
        least, most = min(sizes.values), max(sizes.values)
        margin = max(0.03 * (most - least), 0.5, 1e-6 * most)  # never so little that the ends are one number
        across = Axis(least - margin, most + margin, lambda size: f"{size:,.10g}")
        below = f"input size: {sizes.label}"
        _peaks(page, peaks(followed), across, below, budget_bytes)
        page.heading("Time against the size of the input")
        took = times(followed)
        seconds = [y for cloud in took for _, y in cloud.points]
        up = Axis(min(seconds) / 1.25, max(seconds) * 1.25, format_seconds, "log")
        page.scatter("Time against the size of the input", took, across=across, up=up, below=below)
    page.heading("How plans follow the input")
    rows = [(name, f"{count}") for name, count in _cache(followed)]
    rows.append(("finding a plan, median", format_seconds(followed.planning_seconds)))
    rows.append(("finding a plan, 99th percentile", format_seconds(followed.slow_planning_seconds)))
    if error is not None:
        rows.append(("predicted peak, mean error", f"{error:.2%} in {len(followed.compared())} measured steps"))
    rows.append(("size model, largest error", f"{followed.residual:.2%}"))
    rows.append(("held in reserve", format_bytes(followed.reserve_bytes)))
    page.table(("what", ""), rows)


def _peaks(page: Page, clouds: list[Cloud], across: Axis, below: str, budget_bytes: int) -> None:
    if not clouds:
        return
    page.heading("Memory against the size of the input")
    top = max(y for cloud in clouds for _, y in cloud.points)
    limit = (f"budget, {format_bytes(budget_bytes)}", budget_bytes) if near(budget_bytes, top) else None
    high = 1.05 * max(top, budget_bytes if limit is not None else 0)
    up = Axis(0.0, high, lambda nbytes: format_bytes(round(nbytes)), "binary")
    page.scatter("Memory against the size of the input", clouds, across=across, up=up, below=below, limit=limit)
    page.paragraph(
        "A plan is made for sizes rounded up, and its peak is that of the largest of them. Not every step is measured. "
        "Sheltered steps, from which sizes are learned, keep next to nothing."
    )


def _plan(page: Page, report: Report) -> None:
    if report.modelled:
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


def _read(root: Node) -> Report:
    fields = root.fields(*Report.__dataclass_fields__)
    breakdown = fields["breakdown"].fields(*Breakdown.__dataclass_fields__)
    report = Report(
        steps=fields["steps"].integer(),
        sheltered_steps=fields["sheltered_steps"].integer(),
        planned_steps=fields["planned_steps"].integer(),
        measured_steps=fields["measured_steps"].integer(),
        calibrations=fields["calibrations"].integer(),
        budget_bytes=fields["budget_bytes"].integer(least=1),
        peak_bytes=fields["peak_bytes"].integer(),
        planned_peak_bytes=fields["planned_peak_bytes"].integer(),
        predicted_peak_bytes=fields["predicted_peak_bytes"].integer(),
        floor_bytes=fields["floor_bytes"].integer(),
        predicted_curve=fields["predicted_curve"].integers(),
        measured_curve=fields["measured_curve"].integers(),
        planner=fields["planner"].text(),
        notes=tuple(node.text() for node in fields["notes"].items()),
        step_seconds=_seconds(fields["step_seconds"]),
        predicted_step_seconds=_seconds(fields["predicted_step_seconds"]),
        baseline_seconds=_seconds(fields["baseline_seconds"]),
        pace=fields["pace"].number(),
        lower_bound_seconds=_optional_seconds(fields["lower_bound_seconds"]),
        bytes_kept=fields["bytes_kept"].integer(),
        bytes_swapped=fields["bytes_swapped"].integer(),
        bytes_recomputed=fields["bytes_recomputed"].integer(),
        breakdown=Breakdown(**{name: _seconds(node) for name, node in breakdown.items()}),
        held=tuple(_read_held(node) for node in fields["held"].items()),
        unreplayable=tuple(_read_reason(node) for node in fields["unreplayable"].items()),
        distrusted=tuple(node.text() for node in fields["distrusted"].items()),
        fallbacks=_read_counts(fields["fallbacks"]),
        followed=_read_followed(fields["followed"]) if fields["followed"].value is not None else None,
    )
    gap = fields["gap"].number(least=-1.0) if fields["gap"].value is not None else None
    if gap != report.gap:
        fields["gap"].fail(f"expected {report.gap}, as the seconds say, got {quote(fields['gap'].value)}")
    return report


def _seconds(node: Node) -> float:
    return node.number(most=MOST_SECONDS)


def _optional_seconds(node: Node) -> float | None:
    return _seconds(node) if node.value is not None else None


def _read_held(node: Node) -> Held:
    fields = node.fields(*Held.__dataclass_fields__)
    return Held(fields["nbytes"].integer(), fields["module"].text(), fields["line"].text())


def _read_reason(node: Node) -> tuple[str, int]:
    entries = list(node.items())
    if len(entries) != 2:
        node.fail(f"expected a reason and its bytes, got {len(entries)} entries")
    return entries[0].text(), entries[1].integer()


def _read_counts(node: Node) -> dict[str, int]:
    if not isinstance(node.value, dict):
        node.fail(f"expected an object of names and counts, got {quote(node.value)}")
    names = [Node(name, f"{node.path}[{number}]", node.error).text() for number, name in enumerate(node.value)]
    return {name: Node(node.value[name], f"{node.path}[{quote(name)}]", node.error).integer() for name in names}


def _read_followed(node: Node) -> Followed:
    fields = node.fields(*Followed.__dataclass_fields__)
    return Followed(
        steps=tuple(_read_step(step) for step in fields["steps"].items()),
        structures=fields["structures"].integer(),
        plans=fields["plans"].integer(),
        hits=fields["hits"].integer(),
        misses=fields["misses"].integer(),
        evicted=fields["evicted"].integer(),
        residual=fields["residual"].number(most=1.0),
        reserve_bytes=fields["reserve_bytes"].integer(),
        planning_seconds=_seconds(fields["planning_seconds"]),
        slow_planning_seconds=_seconds(fields["slow_planning_seconds"]),
    )


def _read_step(node: Node) -> FollowedStep:
    fields = node.fields(*FollowedStep.__dataclass_fields__)
    return FollowedStep(
        features=fields["features"].integers(),
        course=fields["course"].one_of(tuple(COURSES)),
        seconds=_seconds(fields["seconds"]),
        planning_seconds=_seconds(fields["planning_seconds"]),
        measured_bytes=fields["measured_bytes"].integer(),
        predicted_bytes=fields["predicted_bytes"].integer(),
        planner=fields["planner"].text(),
        plan_peak_bytes=fields["plan_peak_bytes"].integer(),
    )
