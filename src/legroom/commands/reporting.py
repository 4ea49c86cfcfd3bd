"""`legroom report`: peaks against the size of the input, or over the step where all inputs are of one size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module  # matplotlib is an extra
from pathlib import Path
from typing import Any

from legroom.commands.scatter import COLUMNS, LINES, framed, save_png
from legroom.errors import LegroomError
from legroom.jsonio import read_text
from legroom.page import MOST_POINTS, Cloud, thinned
from legroom.report import Report, input_sizes, near, peaks, times
from legroom.units import format_bytes

# By the label of a cloud, as a terminal may have no colours to tell courses apart.
LETTERS = {
    "the plan's peak": "·",
    "predicted": "x",
    "measured, planned": "P",
    "measured, sheltered": "S",
    "measured, reactive": "R",
    "measured, left alone": "L",
    "measured": "m",
}
PNG_COLOURS = {
    "colour-1": "tab:blue",
    "colour-2": "tab:orange",
    "colour-3": "tab:purple",
    "colour-4": "tab:green",
    "ink": "black",
    "soft": "gray",
}
PNG_MARKS = {"dot": ("o", 4), "cross": ("x", 8), "dash": ("_", 6)}  # and how large


@dataclass(frozen=True, slots=True)
class Drawing:
    clouds: list[Cloud]
    across: str  # what runs from left to right
    low: int
    high: int
    ends: tuple[str, str]  # these two, as people read them


def read_report(path: Path) -> Report:
    return Report.from_json(read_text(path, error=LegroomError))


def as_text(report: Report) -> list[str]:
    """A letter for each peak, and the budget as a line; no lines where there is nothing to draw."""
    drawing = _drawing(report, most=COLUMNS)
    if not drawing.clouds:
        return []
    top = max(y for cloud in drawing.clouds for _, y in cloud.points)
    limit = report.budget_bytes if near(report.budget_bytes, top) else 0
    top = max(top, limit)
    grid = [[" "] * COLUMNS for _ in range(LINES)]
    if limit:
        grid[LINES - 1 - round(limit / top * (LINES - 1))] = ["-"] * COLUMNS
    for cloud in drawing.clouds:  # what was measured is last: where two fall on one place, it is the one to see
        for x, y in cloud.points:
            column = round((x - drawing.low) / max(1, drawing.high - drawing.low) * (COLUMNS - 1))
            grid[LINES - 1 - round(y / top * (LINES - 1))][column] = LETTERS[cloud.label]
    legend = [f"{LETTERS[cloud.label]} {cloud.label}" for cloud in drawing.clouds]
    legend += [f"--- budget, {format_bytes(limit)}"] if limit else []
    frame = framed(grid, lambda share: format_bytes(round(share * top)), ends=drawing.ends)
    return [f"peak, by {drawing.across}", *frame, "  ".join(legend)]


def as_json(report: Report) -> str:
    """What is drawn, with the size of every step's input."""
    followed = report.followed
    steps = followed.steps if followed is not None else ()
    sizes = input_sizes(steps)
    shown = {
        "budget_bytes": report.budget_bytes,
        "peak_bytes": report.peak_bytes,
        "courses": followed.courses() if followed is not None else {},
        "prediction_error": followed.prediction_error() if followed is not None else None,
        "input_size": sizes.label,
        "steps": [{"input_size": size, **asdict(step)} for size, step in zip(sizes.values, steps, strict=True)],
        "predicted_curve": report.predicted_curve,
        "measured_curve": report.measured_curve,
    }
    return json.dumps(shown, allow_nan=False) + "\n"


def write_png(report: Report, path: Path) -> None:
    """The plot as a PNG; where inputs vary, with one of the seconds below it."""
    drawing = _drawing(report, most=MOST_POINTS)
    if not drawing.clouds:
        raise LegroomError("there is nothing to draw: no step of this report was planned or measured")
    took = times(report.followed) if report.followed is not None else []
    figure = import_module("matplotlib.figure").Figure(figsize=(8.0, 8.0 if took else 4.5), layout="constrained")
    upper, *lower = figure.subplots(2 if took else 1, squeeze=False, sharex=True)[:, 0]
    _scatter(upper, drawing.clouds, unit=2**20)
    if near(report.budget_bytes, max(y for cloud in drawing.clouds for _, y in cloud.points)):
        label = f"budget, {format_bytes(report.budget_bytes)}"
        upper.axhline(report.budget_bytes / 2**20, color="tab:red", linestyle="--", linewidth=1, label=label)
    upper.set_ylim(bottom=0)
    upper.set_ylabel("peak, MiB")
    for axes in lower:
        _scatter(axes, took, unit=1)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_ylabel("a step, seconds (logarithmic)")
    for axes in (upper, *lower):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    (upper, *lower)[-1].set_xlabel(drawing.across)
    save_png(figure, path)


def _scatter(axes: Any, clouds: Sequence[Cloud], *, unit: float) -> None:
    for cloud in clouds:
        at = [(float(x), y / unit) for x, y in cloud.points]
        mark, size = PNG_MARKS[cloud.mark]
        style = {"color": PNG_COLOURS[cloud.colour], "linestyle": "", "marker": mark, "markersize": size}
        axes.plot(*zip(*at, strict=True), **style, label=cloud.label)


def _drawing(report: Report, *, most: int) -> Drawing:
    if report.followed is not None:
        sizes = input_sizes(report.followed.steps)
        low, high = min(sizes.values, default=0), max(sizes.values, default=0)
        return Drawing(peaks(report.followed), f"input size: {sizes.label}", low, high, (f"{low}", f"{high}"))
    curves = {
        ("predicted", "colour-1"): thinned(report.predicted_curve, most=most),
        ("measured", "colour-2"): thinned(report.measured_curve, most=most),
    }
    clouds = [
        Cloud(label, "dot", colour, tuple(enumerate(values)))
        for (label, colour), values in curves.items()
        if any(values)
    ]
    last = max(map(len, curves.values())) - 1
    return Drawing(clouds, "program order", 0, last, ("first tick", "last tick"))
