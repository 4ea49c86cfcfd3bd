"""The results of benchmark runs, and their file.

A file holds the runs that made it (command, date, versions, commit) and the rows, each with the number of its run: what
is measured again replaces its row or, where only rows of one run are compared, stands beside it; what is not keeps the
conditions under which it was measured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from legroom.errors import LegroomError
from legroom.jsonio import Node, parse, read_text, write_text

KIND, VERSION = "budget benchmark", 1
MOST_ROWS = 10_000

Status = Literal["ok", "oom", "budget", "unavailable", "skipped", "error", "timeout", "killed"]
STATUSES: tuple[Status, ...] = get_args(Status)


class RowsError(LegroomError):
    """A file of benchmark results cannot be read."""


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one workload. The figures of a peer are those under its cap, those of plain without one."""

    workload: str
    contender: str
    status: Status
    detail: str = ""
    cap_bytes: int = 0  # 0: none
    mean_ms: float = 0.0
    median_ms: float = 0.0
    steps: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0  # 0: this device does not say
    retries: int = 0  # times the allocator emptied its cache because nothing was left
    uncapped_ms: float = 0.0
    uncapped_allocated_bytes: int = 0
    uncapped_reserved_bytes: int = 0
    host_ms: float = 0.0  # a fixed piece of Python, the slowest of a few around the timed steps; 0: not known
    setup_seconds: float = 0.0
    wall_seconds: float = 0.0
    report: Mapping[str, Any] = field(default_factory=dict)  # legroom's own, as it gives it
    run: int = 0

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def reported(self, name: str) -> float:
        """A number of legroom's report, 0 where it has none of this name."""
        value = self.report.get(name, 0)
        return float(value) if isinstance(value, (int, float)) else 0.0


@dataclass(frozen=True, slots=True)
class Results:
    runs: tuple[Mapping[str, Any], ...]
    rows: tuple[Row, ...]

    def with_rows(self, rows: Iterable[Row]) -> Results:
        """New rows replace old ones of the same workload and contender, at the same place."""
        merged = {(row.workload, row.contender): row for row in self.rows}
        merged.update({(row.workload, row.contender): row for row in rows})
        return replace(self, rows=tuple(merged.values()))

    def after(self, earlier: Results) -> Results:
        """What an earlier file has and these lack, in front: a row that did not come about replaces none that did."""
        shifted = [replace(row, run=row.run + len(earlier.runs)) for row in self.rows]
        known = {(row.workload, row.contender) for row in earlier.rows if row.ok}
        new = [row for row in shifted if row.ok or (row.workload, row.contender) not in known]
        return replace(earlier, runs=(*earlier.runs, *self.runs)).with_rows(new)

    def workloads(self) -> list[str]:
        return list(dict.fromkeys(row.workload for row in self.rows))

    def of(self, workload: str, run: int | None = None) -> dict[str, Row]:
        """By contender. run: only those of this one; else the last of each, where a file keeps several."""
        rows = (row for row in self.rows if row.workload == workload)
        return {row.contender: row for row in rows if run is None or row.run == run}

    def runs_of(self, workload: str) -> list[int]:
        return sorted({row.run for row in self.rows if row.workload == workload})


def to_json(results: Results) -> str:
    document = {
        "kind": KIND,
        "version": VERSION,
        "runs": list(results.runs),
        "rows": [asdict(row) for row in results.rows],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def from_json(text: str) -> Results:
    fields = parse(text, kind=KIND, version=VERSION, error=RowsError).fields("runs", "rows")
    runs = tuple(_strings(node) for node in fields["runs"].items(longest=MOST_ROWS))
    rows = tuple(row_from(node) for node in fields["rows"].items(longest=MOST_ROWS))
    for row in rows:
        if row.run >= len(runs):
            raise RowsError(f"a row names run {row.run}, the file has {len(runs)}")
    return Results(runs, rows)


def row_from(node: Node) -> Row:
    integers = (
        "cap_bytes", "steps", "allocated_bytes", "reserved_bytes", "retries", "uncapped_allocated_bytes",
        "uncapped_reserved_bytes", "run",
    )  # fmt: skip
    numbers = ("mean_ms", "median_ms", "uncapped_ms", "setup_seconds", "wall_seconds")
    named = ("workload", "contender", "status", "detail", "report", *integers, *numbers)
    fields = node.fields(*named, optional=("host_ms",))  # older files have none
    report = fields["report"].value
    if not isinstance(report, dict):
        fields["report"].fail("expected an object")
    return Row(
        workload=fields["workload"].text(),
        contender=fields["contender"].text(),
        status=cast(Status, fields["status"].one_of(STATUSES)),
        detail=fields["detail"].text(longest=100_000),
        report=report,
        host_ms=fields["host_ms"].number() if "host_ms" in fields else 0.0,
        **{name: fields[name].integer() for name in integers},
        **{name: fields[name].number() for name in numbers},  # type: ignore[arg-type]
    )


def read(path: str | os.PathLike[str]) -> Results:
    return from_json(read_text(path, error=RowsError))


def write(path: str | os.PathLike[str], results: Results) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_text(path, to_json(results), error=RowsError)


def _strings(node: Node) -> Mapping[str, Any]:
    if not isinstance(node.value, dict):
        node.fail("expected an object")
    return {name: Node(value, f"{node.path}.{name}", RowsError).text() for name, value in node.value.items()}
