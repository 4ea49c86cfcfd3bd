"""`legroom compare`: the table, and a bar for each planner while it is being made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from legroom.compare import Comparison, Judged, Row, Watch
from legroom.page import printable
from legroom.units import format_bytes, format_seconds

COLUMNS = ("predicted", "overhead", "peak", "kept", "swapped", "recomputed", "stalls", "stalled", "solved in", "gap")


def table(comparison: Comparison, budget_bytes: int) -> Table:
    """All planners within one budget, the fastest plan first, those without one last."""
    span = comparison.plain_peak_bytes - comparison.floor_bytes
    share = f", {(budget_bytes - comparison.floor_bytes) / span:.0%} of the range" if span else ""
    out = Table(
        title=f"within {format_bytes(budget_bytes)}{share}, on {printable(comparison.hardware)}",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
    )
    out.add_column("planner", no_wrap=True)
    for column in COLUMNS:
        out.add_column(column, justify="right", overflow="fold")  # a narrow terminal may break figures, not cut them
    rows = [row for row in comparison.rows if row.budget_bytes == budget_bytes]
    failed: list[Row] = []
    for row in sorted(rows, key=_seconds):
        if row.judged is None:
            failed.append(row)
        else:
            out.add_row(row.planner, *_cells(row.judged, row.solve_seconds))
    for row in failed:
        out.add_row(row.planner, *[""] * (len(COLUMNS) - 2), format_seconds(row.solve_seconds), "")
    return out


def remarks(comparison: Comparison, budget_bytes: int) -> list[str]:
    """Why planners have no plan within a budget, a line each: next to the table, as a cell has no room for it."""
    return [
        f"{row.planner}: {printable(row.message)}"
        for row in comparison.rows
        if row.budget_bytes == budget_bytes and row.judged is None
    ]


@contextlib.contextmanager
def progress(planners: Sequence[str], budgets: Sequence[int]) -> Iterator[Watch]:
    """A bar for each planner on standard error; lines where that is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(console, len(planners) * len(budgets))
        return
    said = TextColumn("{task.fields[said]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), said)
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {
            name: bars.add_task(name, total=len(budgets), start=False, said="") for name in planners
        }

        def watch(name: str, budget: int, row: Row | None) -> None:
            if row is None:
                bars.start_task(tasks[name])
                bars.update(tasks[name], said=f"within {format_bytes(budget)}")
            else:
                bars.update(tasks[name], advance=1, said=_short(row))

        yield watch


def _lines(console: Console, total: int) -> Watch:
    count = 0

    def watch(name: str, budget: int, row: Row | None) -> None:
        nonlocal count
        if row is not None:
            count += 1
            line = f"{count} of {total}: {name} within {format_bytes(budget)}: {_short(row)}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    return watch


def _short(row: Row) -> str:
    return f"{row.judged.overhead:.1%} over keeping everything" if row.judged is not None else printable(row.message)


def _seconds(row: Row) -> float:
    return row.judged.seconds if row.judged is not None else float("inf")


def _cells(judged: Judged, solve_seconds: float) -> tuple[str, ...]:
    return (
        format_seconds(judged.seconds),
        f"{judged.overhead:.1%}",
        format_bytes(judged.peak_bytes),
        format_bytes(judged.kept_bytes),
        format_bytes(judged.swapped_bytes),
        format_bytes(judged.recomputed_bytes),
        f"{judged.stalls}",
        format_seconds(judged.stalled_seconds),
        format_seconds(solve_seconds),
        "" if judged.gap is None else f"{judged.gap:.1%}",
    )
