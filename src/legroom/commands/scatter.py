"""Plans by peak and overhead: a plot for the terminal, and one as a PNG. Also what other plots need for either."""

from __future__ import annotations

import io
import math
import os
import secrets
import string
from collections.abc import Callable, Sequence
from importlib import import_module  # matplotlib is an extra
from pathlib import Path
from typing import Any

from legroom.compare import Comparison, Row, front
from legroom.errors import LegroomError, quote
from legroom.units import format_bytes

COLUMNS, LINES = 64, 14
LEAST = 1e-3  # an overhead below this is drawn here: the axis is logarithmic, and nobody measures less


def as_text(comparison: Comparison) -> list[str]:
    """A letter for each planner, a capital where nothing beats the plan in both peak and seconds; none: no lines."""
    rows = [row for row in comparison.rows if row.judged is not None]
    if not rows:
        return []
    letters = _letters(comparison.rows)
    best = {id(row) for row in front(rows)}
    peaks, overheads = [_peak(row) for row in rows], [_overhead(row) for row in rows]
    left, right = min(peaks), max(peaks)
    top = max(*overheads, 10 * LEAST)
    grid = [[" "] * COLUMNS for _ in range(LINES)]
    # The front last: where two fall on one place, it is the one to see.
    for row in sorted(rows, key=lambda row: id(row) in best):
        x = round((_peak(row) - left) / max(1, right - left) * (COLUMNS - 1))
        y = round(math.log(_overhead(row) / LEAST) / math.log(top / LEAST) * (LINES - 1))
        letter = letters[row.planner]
        grid[LINES - 1 - y][x] = letter.upper() if id(row) in best else letter
    out = ["overhead over keeping everything (logarithmic), by peak; capitals: nothing beats it in both"]
    out += framed(
        grid,
        lambda share: f"{'' if share else '≤'}{LEAST * (top / LEAST) ** share:.1%}",
        ends=(format_bytes(left), format_bytes(right)),
    )
    shown = {row.planner: letters[row.planner] for row in rows}
    out.append("  ".join(f"{letter} {name}" for name, letter in shown.items()))
    return out


def framed(grid: Sequence[Sequence[str]], label: Callable[[float], str], *, ends: tuple[str, str]) -> list[str]:
    """LINES of COLUMNS with both axes; `label` tells what a height is, from 0.0 at the bottom to 1.0 at the top."""
    labels = {number: label((LINES - 1 - number) / (LINES - 1)) for number in range((LINES - 1) % 3, LINES, 3)}
    width = max(8, *map(len, labels.values()))
    out = [f"{labels.get(number, ''):>{width}} │{''.join(cells)}".rstrip() for number, cells in enumerate(grid)]
    out.append(f"{'':{width}} └{'─' * COLUMNS}")
    out.append(f"{'':{width + 2}}{ends[0]}{ends[1]:>{COLUMNS - len(ends[0])}}")
    return out


def check_matplotlib(option: str) -> None:
    try:
        import_module("matplotlib.figure")
    except ImportError as error:
        raise LegroomError(
            f"{option} needs matplotlib ({error}): pip install 'legroom[plot]', or leave {option} out, the terminal "
            "shows the same plot"
        ) from None


def write_png(comparison: Comparison, path: Path) -> None:
    """The same as a PNG."""
    figure = import_module("matplotlib.figure").Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.add_subplot()
    rows = [row for row in comparison.rows if row.judged is not None]
    for number, name in enumerate(dict.fromkeys(row.planner for row in rows)):
        mine = sorted((_peak(row) / 2**30, 100 * _overhead(row)) for row in rows if row.planner == name)
        style = "os^D"[number // 10 % 4]  # there are ten colours
        axes.plot(*zip(*mine, strict=True), f"{style}-", markersize=4, linewidth=0.8, label=name.replace("$", r"\$"))
    best = [(_peak(row) / 2**30, 100 * _overhead(row)) for row in front(rows)]
    if best:
        axes.plot(*zip(*best, strict=True), color="black", linewidth=2.5, alpha=0.25, label="nothing beats these")
        axes.set_yscale("log")
        axes.set_ylim(bottom=80 * LEAST)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.tick_params(which="minor", labelleft=False)
        axes.legend(fontsize="small")
    axes.set_xlabel("peak, GiB")
    axes.set_ylabel(f"overhead over keeping everything, % ({LEAST:.1%} at least)")
    axes.set_title(f"plans for trace {comparison.trace_signature} on {comparison.hardware}".replace("$", r"\$"))
    axes.grid(alpha=0.3)
    save_png(figure, path)


def save_png(figure: Any, path: Path) -> None:
    """A figure of matplotlib as a file, whole or not at all, whatever the name ends in."""
    picture = io.BytesIO()
    import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure).print_png(picture)  # needs no display
    scratch = path.with_name(f".{path.name[:100]}.{secrets.token_hex(6)}")
    try:
        scratch.write_bytes(picture.getvalue())
        os.replace(scratch, path)
    except OSError as cause:
        scratch.unlink(missing_ok=True)
        raise LegroomError(f"{quote(str(path))}: cannot be written ({cause.strerror or cause})") from None


def _letters(rows: Sequence[Row]) -> dict[str, str]:
    names = dict.fromkeys(row.planner for row in rows)
    return {name: string.ascii_lowercase[i % 26] for i, name in enumerate(names)}


def _peak(row: Row) -> int:
    assert row.judged is not None
    return row.judged.peak_bytes


def _overhead(row: Row) -> float:
    assert row.judged is not None
    return max(LEAST, row.judged.overhead)
