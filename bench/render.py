"""Results as text, as a page and as a picture; all of it from the file, nothing written by hand."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from bench.measure import LEGROOM
from bench.peers import PEERS
from bench.rows import Results, Row
from bench.verdicts import overhead, verdicts
from legroom.units import format_bytes

GIB = 2**30
_HEAD = ("contender", "ms", "median", "overhead", "peak GiB", "reserved", "cap", "retries", "notes")
_RIGHT = range(1, 8)
_LONGEST_NOTE = 60
_PREFACE = (
    "Written by `python bench/budget.py --render`. Every contender ran in a process of its own under a hard cap on "
    "reserved memory, plain without one; a peer's cap is what it was seen to need, and legroom at a peer's name has "
    "that cap as its budget. Shares are of the range from legroom's smallest peak to the plain peak. Times are means "
    "over all timed steps, medians are of single steps."
)


def table(results: Results) -> str:
    """Plain text, a block for each workload, and the verdicts."""
    blocks = []
    for workload in results.workloads():
        lines = [_HEAD, *_lines(results, workload)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
        blocks.append("\n".join([workload, *(_aligned(line, widths) for line in lines)]))
    return "\n\n".join([*blocks, "\n".join(str(verdict) for verdict in verdicts(results))])


def page(results: Results, picture: str | None) -> str:
    """The same as Markdown."""
    out = ["# Time against memory", _PREFACE]
    for number, run in enumerate(results.runs):
        out.append(f"Run {number}: " + ", ".join(f"{key} {value}" for key, value in run.items() if key != "command"))
        out.append(f"```console\n$ {run.get('command', '')}\n```")
    if picture is not None:
        out.append(f"![step time against peak memory]({picture})")
    for workload in results.workloads():
        rule = ["---"] + ["---:"] * len(_RIGHT) + ["---"]
        lines = [_HEAD, rule, *_lines(results, workload)]
        out.append(f"## {workload}")
        out.append("\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines))
    out.append("## What must hold")
    lines = [("workload", "", "", "figures"), ("---",) * 4]
    lines += [(v.workload, v.claim, v.word if v.met else f"**{v.word}**", v.figures) for v in verdicts(results)]
    out.append("\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines))
    return "\n\n".join(out) + "\n"


def draw(results: Results, path: Path) -> bool:
    """One panel for each workload. False where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    workloads = results.workloads()
    figure, panels = pyplot.subplots(1, len(workloads), figsize=(5.2 * len(workloads), 4.6), squeeze=False)
    for panel, workload in zip(panels[0], workloads, strict=True):
        rows = [row for row in results.of(workload).values() if row.ok]
        plain = results.of(workload).get("plain")
        ours = sorted((r for r in rows if r.contender.startswith(LEGROOM)), key=lambda r: r.allocated_bytes)
        panel.plot([r.allocated_bytes / GIB for r in ours], [r.mean_ms for r in ours], "o-", label="legroom")
        for row in rows:
            if row.contender in PEERS:
                panel.plot(row.allocated_bytes / GIB, row.mean_ms, "s", label=PEERS[row.contender].label)
        if plain is not None and plain.ok:
            panel.axhline(plain.mean_ms, color="grey", linewidth=0.5)
        # Offloading everything takes tens of times as long as the rest; on a linear axis nothing else would be seen.
        panel.set_yscale("log")
        times = [row.mean_ms for row in rows if row.mean_ms > 0]
        if times:  # where there is one time alone, matplotlib may choose an axis without any height
            panel.set_ylim(0.9 * min(times), 1.1 * max(times))
        for set_formatter in (panel.yaxis.set_major_formatter, panel.yaxis.set_minor_formatter):
            set_formatter(ticker.ScalarFormatter())
        panel.set(title=workload, xlabel="peak allocated, GiB", ylabel="ms per step")
        panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _lines(results: Results, workload: str) -> Iterator[tuple[str, ...]]:
    rows = results.of(workload)
    plain = rows.get("plain")
    for row in rows.values():
        yield (
            PEERS[row.contender].label if row.contender in PEERS else row.contender,
            f"{row.mean_ms:.1f}" if row.ok else row.status,
            f"{row.median_ms:.1f}" if row.ok else "",
            f"{overhead(row, plain):+.1%}" if row.ok and plain is not None and plain.ok else "",
            _gib(row.allocated_bytes),
            _gib(row.reserved_bytes),
            _gib(row.cap_bytes),
            str(row.retries) if row.ok else "",
            _notes(row, len(results.runs)),
        )


def _notes(row: Row, runs: int) -> str:
    notes = [f"run {row.run}"] if runs > 1 else []
    if row.uncapped_ms and row.contender != "plain":
        reserved = f", {_gib(row.uncapped_reserved_bytes)} reserved" if row.uncapped_reserved_bytes else ""
        notes.append(f"uncapped {row.uncapped_ms:.1f} ms{reserved}")
    if row.report:
        moved = (("kept", "bytes_kept"), ("swapped", "bytes_swapped"), ("recomputed", "bytes_recomputed"))
        notes.append(", ".join(f"{word} {_gib(int(row.reported(name))) or 0}" for word, name in moved))
        predicted = f"predicted {row.reported('predicted_step_seconds') * 1e3:.1f} ms"
        notes.append(f"{predicted}, {_gib(int(row.reported('predicted_peak_bytes')))}")
        notes.append(f"set-up {row.setup_seconds:.1f} s")
        breakdown = row.report.get("breakdown")
        if isinstance(breakdown, dict) and isinstance(breakdown.get("stalled_copy_seconds"), (int, float)):
            notes.append(f"stalled {breakdown['stalled_copy_seconds'] * 1e3:.1f} ms")
        fallbacks = row.report.get("fallbacks")
        if isinstance(fallbacks, dict):
            notes += [f"fallback: {name}: {count}" for name, count in fallbacks.items()]
    if row.detail:
        short = row.detail if row.ok or len(row.detail) <= _LONGEST_NOTE else row.detail[:_LONGEST_NOTE] + "…"
        notes.append(" ".join(short.split()))
    return "; ".join(notes)


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f}" if nbytes >= GIB / 10 else format_bytes(nbytes) if nbytes else ""


def _aligned(line: tuple[str, ...], widths: list[int]) -> str:
    cells = (
        cell.rjust(width) if column in _RIGHT else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(line, widths, strict=True))
    )
    return "  ".join(cells).rstrip()
