"""The command line.

An error is one line on standard error and exit status 2, or 1 where no plan fits; a stack trace is for those who write
the code. A file is written whole or not at all.
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
from legroom import timeline, traceio
from legroom.commands import comparing, planning, reporting, scatter, simulating
from legroom.commands.arguments import budgets_in, check_targets, hardware_of, planners_of, read_plan, slowdown_of
from legroom.commands.capturing import capture_script
from legroom.compare import compare as compare_planners
from legroom.compare import to_json as comparison_to_json
from legroom.demo import DEFAULT_BUDGETS, Result, Setup
from legroom.errors import BudgetError, LegroomError
from legroom.evaluate import floor_bytes
from legroom.hardware import PRESETS
from legroom.jsonio import write_text
from legroom.page import printable
from legroom.patience import patience
from legroom.plan import to_json as plan_to_json
from legroom.planners import named
from legroom.simulate import simulate as simulate_plan
from legroom.units import format_bytes, format_seconds

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
_COLOURS = {"ok": "green", "warn": "yellow", "bad": "red"}
_NARROWEST = 120  # columns of a table that goes into a file or a pipe
_INTERRUPTED = 130  # how the parser ends at Ctrl-C

TracePath = Annotated[Path, typer.Argument(metavar="TRACE", help="A trace, as `legroom capture` writes it.")]
HardwareName = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="NAME|FILE",
        help=f"The machine: {', '.join(PRESETS)}, or a file. h200 for traces of a GPU, cpu for others, if not named.",
    ),
]


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


@app.command()
def plan(
    trace_path: TracePath,
    budget: Annotated[
        str | None, typer.Option(help="12GiB, or 50% of the way from the floor to the plain peak.")
    ] = None,
    max_slowdown: Annotated[
        str | None, typer.Option(help="Instead of a budget: the least peak at this price, such as 5%.")
    ] = None,
    planner: Annotated[str, typer.Option(help="Who plans.")] = "auto",
    hardware: HardwareName = None,
    output: Annotated[Path | None, typer.Option(help="Write the plan here, not to standard output.")] = None,
) -> None:
    """Plan a trace. The plan is JSON, for `legroom simulate` and fit(plan=...). Exit status 1 if no plan fits."""
    if (budget is None) == (max_slowdown is None):
        raise LegroomError("name either --budget 12GiB or --max-slowdown 5%")
    slowdown = slowdown_of(max_slowdown) if max_slowdown is not None else None
    check_targets([output], sources=[trace_path])
    chosen = named(planner)
    trace = traceio.load(trace_path)
    machine = hardware_of(hardware, trace)
    budget_bytes = budgets_in(trace, [budget])[0] if budget is not None else None
    with patience(f"{planner} is planning"):
        made = planning.make_plan(trace, machine, chosen, budget_bytes=budget_bytes, max_slowdown=slowdown)
        lines = planning.summary(trace, machine, made)
    _put(plan_to_json(made), output)
    _say(*lines)


@app.command()
def compare(
    trace_path: TracePath,
    budget: Annotated[
        list[str], typer.Option(help="12GiB, or 50% of the way from the floor to the plain peak; more than once.")
    ],
    planners: Annotated[str | None, typer.Option(help="Who plans, separated by commas; all, if not named.")] = None,
    hardware: HardwareName = None,
    time_limit: Annotated[float, typer.Option(min=0.1, max=1e6, help="Seconds that one answer may take.")] = 60.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the results to this file.")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Also draw the plot here, as a PNG.")] = None,
) -> None:
    """Let planners plan the same trace within the same budgets, and compare. Exit status 1 if none has any plan."""
    check_targets([json_path, plot_path], sources=[trace_path])
    if plot_path is not None:
        scatter.check_matplotlib("--plot")
    chosen = planners_of(planners)
    trace = traceio.load(trace_path)
    machine = hardware_of(hardware, trace)
    budgets = budgets_in(trace, budget)
    with comparing.progress(list(chosen), budgets) as watch:
        found = compare_planners(trace, machine, budgets, chosen, time_limit_seconds=time_limit, watch=watch)
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(_NARROWEST, console.width))
    for budget_bytes in budgets:
        console.print(comparing.table(found, budget_bytes))
        for line in (*comparing.remarks(found, budget_bytes), ""):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    for line in scatter.as_text(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if json_path is not None:
        write_text(json_path, comparison_to_json(found), error=LegroomError)
    if plot_path is not None:
        scatter.write_png(found, plot_path)
    if all(row.judged is None for row in found.rows):
        floor = format_bytes(found.floor_bytes)
        raise BudgetError(f"no planner has a plan within any of the budgets; the smallest that works is {floor}")


@app.command()
def simulate(
    trace_path: TracePath,
    plan_path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan for it, as `legroom plan` writes it.")],
    hardware: HardwareName = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the timeline to this file.")] = None,
    perfetto_path: Annotated[
        Path | None, typer.Option("--perfetto", help="Also write the timeline for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Show the step that a plan makes on a modelled machine. Exit status 1 if it does not keep to its budget there."""
    check_targets([json_path, perfetto_path], sources=[trace_path, plan_path])
    trace = traceio.load(trace_path)
    given = read_plan(plan_path)
    machine = hardware_of(hardware, trace)
    shown = simulate_plan(trace, given, machine)
    for line in simulating.summary(trace, machine, given, shown):
        sys.stdout.write(f"{line}\n")
    if json_path is not None:
        write_text(json_path, timeline.to_json(shown), error=LegroomError)
    if perfetto_path is not None:
        write_text(perfetto_path, timeline.to_perfetto(shown), error=LegroomError)
    if shown.peak_bytes > given.budget_bytes:
        raise BudgetError(
            f"the plan's budget is {format_bytes(given.budget_bytes)}, but on {machine.name} it needs "
            f"{format_bytes(shown.peak_bytes)}; plan again for this machine"
        )


@app.command()
def report(
    report_path: Annotated[Path, typer.Argument(metavar="REPORT", help="What room.report().to_json() gave.")],
    html_path: Annotated[Path | None, typer.Option("--html", help="Also write a page with all of it here.")] = None,
    png_path: Annotated[Path | None, typer.Option("--png", help="Also draw the plot here, as a PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what is drawn as JSON, not as text.")] = False,
) -> None:
    """Show what a room did, and draw the memory of its steps against the size of their inputs and the budget."""
    check_targets([html_path, png_path], sources=[report_path])
    if png_path is not None:
        scatter.check_matplotlib("--png")
    told = reporting.read_report(report_path)
    if png_path is not None:
        reporting.write_png(told, png_path)
    if html_path is not None:
        told.to_html(html_path)
    lines = [str(told), *reporting.as_text(told)]
    _put(reporting.as_json(told) if as_json else "".join(f"{line}\n" for line in lines), None)


@app.command(context_settings={"ignore_unknown_options": True})
def capture(
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="Defines step(), and should define model and optimizer.")
    ],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGUMENTS]...", help="The script's own.")] = None,
    output: Annotated[Path, typer.Option(help="Where the trace goes; gzipped if it ends in .gz.")] = Path(
        "trace.json.gz"
    ),
) -> None:
    """Run a script, which must define a function step() that makes one training step, and trace that step.

    The script is not run as __main__: a training loop behind `if __name__ == "__main__"` does not run. Options that
    legroom does not know go to the script; write -- before those that are meant for it alone, such as its own --output.
    """
    check_targets([output], sources=[script])
    trace = capture_script(script, arguments or [])
    traceio.save(trace, output)
    _say(
        f"{printable(str(output))}: {len(trace.ops)} ops, {len(trace.gaps)} gaps on {trace.device}; peak "
        f"{format_bytes(trace.peak_bytes)}, the smallest budget that works is {format_bytes(floor_bytes(trace))}"
    )


def main() -> None:
    """The entry point of the `legroom` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The command line as a function: an exit status, and nothing raised."""
    try:
        app(arguments, prog_name="legroom")
    except SystemExit as end:  # how the parser ends, with its own message where an argument is wrong
        if end.code == _INTERRUPTED:
            return _complain("interrupted")
        return end.code if isinstance(end.code, int) else 0
    except BudgetError as error:
        return _complain(str(error), status=1)
    except (LegroomError, OSError) as error:
        return _complain(str(error))
    except MemoryError:
        return _complain("out of main memory")
    except Exception as error:
        return _complain(f"unexpected {type(error).__name__}: {error}; this is a bug, please report it")
    return 0


def _complain(message: str, *, status: int = 2) -> int:
    _say(f"legroom: {printable(message)}")
    return status


def _say(*lines: str) -> None:
    for line in lines:
        sys.stderr.write(f"{line}\n")


def _put(text: str, path: Path | None) -> None:
    if path is not None:
        write_text(path, text, error=LegroomError)
    else:
        sys.stdout.write(text)
        sys.stdout.flush()  # a disk that is full says so now


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
