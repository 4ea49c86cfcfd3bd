"""Child processes that measure: their rows as they come, and what became of the process.

A child appends one line of JSON to a file for each contender it has measured. Nothing is read from a pipe: a child that
hangs, dies or leaves something behind can then neither block its parent nor take finished rows with it.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.rows import Row, RowsError, Status, row_from
from legroom.jsonio import Node

_TAIL_CHARACTERS = 600
OVER = "the time for the whole run was over"
TOLD = "told to end"


@dataclass(frozen=True, slots=True)
class Ended:
    rows: tuple[Row, ...]
    status: Status  # "ok": it ended by itself, without an error
    detail: str


def run_child(
    command: Sequence[str],
    folder: Path,
    *,
    timeout_seconds: float,
    until: float = math.inf,
    stop: threading.Event | None = None,
    environment: dict[str, str] | None = None,
) -> Ended:
    """Run `command` with the path of its result file added; kill it when no row came for `timeout_seconds`.

    until: when it is killed in any case, by time.monotonic(). stop: or when this is set, by another thread.
    """
    result, log = folder / "rows.jsonl", folder / "log.txt"
    result.unlink(missing_ok=True)
    with log.open("wb") as out:
        child = subprocess.Popen(
            [*command, str(result)], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment
        )
        try:
            late = _wait(child, result, timeout_seconds, until, stop)
        finally:
            # Also when this process is interrupted: nothing may go on using the device.
            if child.poll() is None:
                child.kill()
            child.wait()
    rows = _rows(result)
    said = log.read_text(encoding="utf-8", errors="replace").strip()[-_TAIL_CHARACTERS:]
    if late:
        return Ended(rows, "timeout", f"{late}; {said}")
    if child.returncode < 0:
        return Ended(rows, "killed", f"ended by {signal.Signals(-child.returncode).name}; {said}")
    if child.returncode:
        return Ended(rows, "error", f"exit status {child.returncode}; {said}")
    return Ended(rows, "ok", "")


def out_of_time(row: Row) -> bool:
    """There was no time to measure it, or to end measuring it."""
    return row.status in ("skipped", "timeout") and row.detail.startswith((OVER, TOLD))


def append_row(path: Path, fields: dict[str, object]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(fields, allow_nan=False) + "\n")


def _wait(
    child: subprocess.Popen[bytes], result: Path, timeout_seconds: float, until: float, stop: threading.Event | None
) -> str:
    """Empty when it ended by itself, else why it has to be ended."""
    last, size = time.monotonic(), 0
    while True:
        try:
            child.wait(timeout=0.1)
            return ""
        except subprocess.TimeoutExpired:
            now, now_size = time.monotonic(), result.stat().st_size if result.exists() else 0
            if now_size != size:
                last, size = now, now_size
            if now - last > timeout_seconds:
                return f"no result within {timeout_seconds:.0f} s"
            if stop is not None and stop.is_set():
                return TOLD
            if now > until:
                return OVER


def _rows(result: Path) -> tuple[Row, ...]:
    if not result.exists():
        return ()
    rows = []
    for line in result.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            rows.append(row_from(Node(json.loads(line), "row", RowsError)))
        except (ValueError, RowsError):
            break  # killed in the middle of a line
    return tuple(rows)
