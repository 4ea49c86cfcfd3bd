"""The timeline of a step, predicted by the simulator or measured by the runtime, in one format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, cast, get_args

from legroom.errors import PlanError
from legroom.jsonio import Node, dump, parse

VERSION = 1
MOST_ROWS = 10_000_000

Lane = Literal["host", "compute", "out", "in"]
LANES: tuple[Lane, ...] = get_args(Lane)


@dataclass(frozen=True, slots=True)
class Interval:
    lane: Lane
    start_ns: int
    end_ns: int
    label: str  # the op's name, or the storage that is copied
    cause: str  # "op 12", "replay of storage 3", "swap-out of storage 3", ...


@dataclass(frozen=True, slots=True)
class Memory:
    tick: int
    level_bytes: int  # after the instructions of this tick
    peak_bytes: int  # from this tick to the next


@dataclass(frozen=True, slots=True)
class Stall:
    tick: int
    storage: int
    seconds: float
    cause: str  # "release": a copy out was not done; "await": a copy in was not


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where the seconds of a step went, as in figure 7 of the HOME paper. Overlapped copies cost nothing."""

    computation_seconds: float
    overlapped_copy_seconds: float
    stalled_copy_seconds: float  # compute waited, or lost its cores to the copy
    recomputation_seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    intervals: tuple[Interval, ...]
    memory: tuple[Memory, ...]
    stalls: tuple[Stall, ...]
    seconds: float
    peak_bytes: int
    breakdown: Breakdown


def to_json(timeline: Timeline) -> str:
    return dump(
        "timeline",
        VERSION,
        {
            "seconds": timeline.seconds,
            "peak_bytes": timeline.peak_bytes,
            "breakdown": asdict(timeline.breakdown),
            "intervals": _columns(timeline.intervals, Interval.__slots__),
            "memory": _columns(timeline.memory, Memory.__slots__),
            "stalls": _columns(timeline.stalls, Stall.__slots__),
        },
    )


def from_json(text: str) -> Timeline:
    names = ("seconds", "peak_bytes", "breakdown", "intervals", "memory", "stalls")
    fields = parse(text, kind="timeline", version=VERSION, error=PlanError).fields(*names)
    parts = fields["breakdown"].fields(*Breakdown.__slots__)
    return Timeline(
        intervals=tuple(_interval(row) for row in _records(fields["intervals"], Interval.__slots__)),
        memory=tuple(
            Memory(row["tick"].integer(), row["level_bytes"].integer(), row["peak_bytes"].integer())
            for row in _records(fields["memory"], Memory.__slots__)
        ),
        stalls=tuple(
            Stall(
                row["tick"].integer(),
                row["storage"].integer(),
                row["seconds"].number(),
                row["cause"].text(),
            )
            for row in _records(fields["stalls"], Stall.__slots__)
        ),
        seconds=fields["seconds"].number(),
        peak_bytes=fields["peak_bytes"].integer(),
        breakdown=Breakdown(*(parts[name].number() for name in Breakdown.__slots__)),
    )


def to_perfetto(timeline: Timeline) -> str:
    """Chrome trace events, for ui.perfetto.dev: a track for each lane, a counter for memory, a mark for each stall."""
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 1, "tid": index, "name": "thread_name", "args": {"name": lane}}
        for index, lane in enumerate(LANES)
    ]
    for interval in timeline.intervals:
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": LANES.index(interval.lane),
                "ts": interval.start_ns / 1000,  # microseconds
                "dur": (interval.end_ns - interval.start_ns) / 1000,
                "name": interval.label,
                "args": {"cause": interval.cause},
            }
        )
    # Memory is counted in ticks, not in time, so it is shown on a track of its own with a tick as a microsecond.
    for memory in timeline.memory:
        values = {"level": memory.level_bytes, "peak": memory.peak_bytes}
        events.append({"ph": "C", "pid": 2, "ts": memory.tick, "name": "bytes by tick", "args": values})
    for stall in timeline.stalls:
        wait = {"storage": stall.storage, "seconds": stall.seconds}
        events.append({"ph": "i", "s": "p", "pid": 2, "ts": stall.tick, "name": f"stall: {stall.cause}", "args": wait})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}, separators=(",", ":"))


def _columns(rows: Sequence[Interval | Memory | Stall], names: tuple[str, ...]) -> dict[str, object]:
    return {name: [getattr(row, name) for row in rows] for name in names}


def _records(node: Node, names: tuple[str, ...]) -> list[dict[str, Node]]:
    table = node.table(*names)
    rows = len(table[names[0]])
    if rows > MOST_ROWS:
        node.fail(f"expected at most {MOST_ROWS} rows, got {rows}")
    return [{name: node.entry(row, name, table[name][row]) for name in names} for row in range(rows)]


def _interval(row: dict[str, Node]) -> Interval:
    lane = cast(Lane, row["lane"].one_of(LANES))
    start, end = row["start_ns"].integer(), row["end_ns"].integer()
    if end < start:
        row["end_ns"].fail(f"expected at least start_ns ({start}), got {end}")
    return Interval(lane, start, end, row["label"].text(), row["cause"].text())
