"""The command line: `legroom demo` and `legroom doctor`.

An error is one line on standard error and exit status 2; a stack trace is for those who write the code.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from legroom import demo as demo_module
from legroom import doctor as doctor_module
from legroom.demo import DEFAULT_BUDGETS, Result, Setup
from legroom.errors import LegroomError
from legroom.jsonio import write_text
from legroom.units import format_bytes, format_seconds

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
_COLOURS = {"ok": "green", "warn": "yellow", "bad": "red"}


@app.callback()
def _about() -> None:
    """Fits PyTorch training into the memory you have."""


@app.command()
def demo(
    budgets: Annotated[
        str,
        typer.Option(help="Budgets, separated by commas: 50% of the way from the floor to the plain peak, or 300MiB."),
    ] = ",".join(DEFAULT_BUDGETS),
    steps: Annotated[int, typer.Option(min=2, max=1000, help="Training steps for each contender.")] = 8,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the results to this file.")] = None,
    html_path: Annotated[Path | None, typer.Option("--html", help="Also write the last room's report here.")] = None,
    spill_dir: Annotated[str | None, typer.Option(help="Folder for swapped bytes.")] = None,
) -> None:
    """Train a small GPT plainly and under budgets, each in a process of its own, and compare."""
    wanted = demo_module.parse_budgets(tuple(text for text in budgets.split(",") if text.strip()))
    if html_path is not None and not wanted:
        raise LegroomError("--html writes the report of the last room, but --budgets names none")
    for path in (json_path, html_path):
        if path is not None and not path.parent.is_dir():  # said now and not after minutes of training
            raise LegroomError(f"{str(path)!r} cannot be written: there is no folder {str(path.parent)!r}")
    setup = Setup(steps=steps)
    console = Console()
    with _progress(steps, 1 + len(wanted)) as progress:
        html = str(html_path) if html_path is not None else None
        results = demo_module.run(setup, wanted, progress=progress, spill_dir=spill_dir, html_path=html)
    console.print(_demo_table(results))
    console.print("peak: by the allocator's log. resident: growth of the resident set. a step: median, second half.")
    console.print(f"The losses of all {setup.steps} steps are identical, bit for bit, in all {len(results)} runs.")
    if json_path is not None:
        write_text(json_path, demo_module.to_json(setup, results), error=LegroomError)
    over = [result.name for result in results if not result.within_budget]
    if over:
        raise LegroomError(f"over the budget: {', '.join(over)}")


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    spill_dir: Annotated[str | None, typer.Option(help="Folder for swapped bytes.")] = None,
) -> None:
    """Say what this machine is and what about it costs memory or time. Exit status 1 if something cannot work."""
    rows = doctor_module.examine(spill_dir)
    if as_json:
        sys.stdout.write(doctor_module.to_json(rows))
    else:
        table = Table(box=None, pad_edge=False)
        for column in ("", "what", "found", "advice"):
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(f"[{_COLOURS[row.state]}]{row.state}[/]", *map(_plain, (row.what, row.value, row.advice)))
        Console().print(table)
    if doctor_module.worst(rows) == "bad":
        raise typer.Exit(1)


def main() -> None:
    """The entry point of the `legroom` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The command line as a function: an exit status, and nothing raised."""
    try:
        app(arguments, prog_name="legroom")
    except SystemExit as end:  # how the parser ends, with its own message where an argument is wrong
        return end.code if isinstance(end.code, int) else 0
    except (LegroomError, OSError) as error:
        return _complain(str(error))
    except Exception as error:
        return _complain(f"unexpected {type(error).__name__}: {error}; this is a bug, please report it")
    return 0


def _complain(message: str) -> int:
    sys.stderr.write(f"legroom: {' '.join(message.split())}\n")
    return 2


@contextlib.contextmanager
def _progress(steps: int, runs: int) -> Iterator[Callable[[str], None]]:
    """Says on standard error which contender is running; a spinner on a terminal, lines elsewhere."""
    console = Console(stderr=True)
    count = 0
    with contextlib.ExitStack() as stack:
        status = stack.enter_context(console.status("starting")) if console.is_terminal else None

        def say(what: str) -> None:
            nonlocal count
            count += 1
            line = f"{count} of {runs}: {what}, {steps} steps"
            if status is not None:
                status.update(line)
            else:
                console.print(line, markup=False, highlight=False)

        yield say


def _demo_table(results: list[Result]) -> Table:
    plain = results[0]
    table = Table(title="A small GPT on this CPU", title_justify="left", box=None, pad_edge=False)
    table.add_column("run")
    for column in ("budget", "peak", "resident", "a step", "x plain"):
        table.add_column(column, justify="right")
    table.add_column("fallbacks", overflow="fold")
    for result in results:
        table.add_row(
            "legroom" if result.budget_bytes else "plain",
            format_bytes(result.budget_bytes) if result.budget_bytes else "",
            format_bytes(result.peak_bytes),
            format_bytes(result.resident_bytes),
            format_seconds(result.step_seconds),
            f"{result.step_seconds / plain.step_seconds:.2f}",
            _plain(result.fallbacks),
            style=None if result.within_budget else "red",
        )
    return table


def _plain(text: str) -> str:
    """Text that rich prints as it is: folders may have square brackets in their names."""
    return text.replace("[", "\\[")


if __name__ == "__main__":
    main()
