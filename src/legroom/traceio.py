"""Traces as JSON text and files.

A table of columns for storages, ops and ticks, and one list of distinct texts that the columns refer to by index:
module paths and op names repeat thousands of times. Values and gaps are flat lists of pairs. A step of 5,000 ops takes
about half a megabyte, a tenth of that gzipped (a name ending in .gz).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any, cast

from legroom import jsonio
from legroom.errors import TraceError, quote
from legroom.ir import LONGEST_TEXT, Op, Storage, Tick, Trace, validate
from legroom.jsonio import Node

_KIND = "trace"
VERSION = 1

_STORAGE_COLUMNS = ("nbytes", "kind", "persistent", "held", "gaps", "gap_version", "name")
_OP_COLUMNS = (
    "name", "phase", "seconds", "issue_seconds", "reads", "writes", "workspace_bytes", "why_not", "module", "line",
)  # fmt: skip
_TICK_COLUMNS = ("kind", "storage", "op", "level_bytes", "peak_bytes")


def to_json(trace: Trace) -> str:
    validate(trace)
    texts: dict[str, int] = {}

    def refer(items: Sequence[Any], column: str) -> list[int]:
        return [texts.setdefault(getattr(item, column), len(texts)) for item in items]

    def plain(items: Sequence[Any], column: str) -> list[Any]:
        return [getattr(item, column) for item in items]

    def pairs(items: Sequence[Any], column: str) -> list[list[int]]:
        return [list(itertools.chain.from_iterable(getattr(item, column))) for item in items]

    writers = {
        "kind": refer, "name": refer, "phase": refer, "why_not": refer, "module": refer, "line": refer,
        "gaps": pairs, "reads": pairs, "writes": pairs,
    }  # fmt: skip
    tables = {
        name: {column: writers.get(column, plain)(items, column) for column in columns}
        for name, items, columns in (
            ("storages", trace.storages, _STORAGE_COLUMNS),
            ("ops", trace.ops, _OP_COLUMNS),
            ("ticks", trace.ticks, _TICK_COLUMNS),
        )
    }
    head = {"device": trace.device, "head_peak_bytes": trace.head_peak_bytes, "texts": list(texts)}
    return jsonio.dump(_KIND, VERSION, {**head, **tables})


def from_json(text: str) -> Trace:
    root = jsonio.parse(text, kind=_KIND, version=VERSION, error=TraceError)
    fields = root.fields("device", "head_peak_bytes", "texts", "storages", "ops", "ticks")
    texts = [node.text(longest=LONGEST_TEXT) for node in fields["texts"].items()]
    trace = Trace(
        storages=_storages(fields["storages"], texts),
        ops=_ops(fields["ops"], texts),
        ticks=_ticks(fields["ticks"], texts),
        head_peak_bytes=fields["head_peak_bytes"].integer(),
        device=fields["device"].text(longest=LONGEST_TEXT),
    )
    validate(trace)
    return trace


def save(trace: Trace, path: str | os.PathLike[str]) -> None:
    jsonio.write_text(path, to_json(trace), error=TraceError)


def load(path: str | os.PathLike[str]) -> Trace:
    return from_json(jsonio.read_text(path, error=TraceError))


# The readers below check types only; ranges, references and order are validate()'s, which names fields the same way.


def _storages(node: Node, texts: list[str]) -> tuple[Storage, ...]:
    table = node.table(*_STORAGE_COLUMNS)
    kinds = _texts(node, "kind", table["kind"], texts)
    names = _texts(node, "name", table["name"], texts)
    gaps = _pairs(node, "gaps", table["gaps"])
    return tuple(
        Storage(
            id=row,
            nbytes=table["nbytes"][row],
            kind=cast(Any, kinds[row]),
            persistent=table["persistent"][row],
            held=table["held"][row],
            gaps=gaps[row],
            gap_version=table["gap_version"][row],
            name=names[row],
        )
        for row in range(len(kinds))
    )


def _ops(node: Node, texts: list[str]) -> tuple[Op, ...]:
    table = node.table(*_OP_COLUMNS)
    columns = ("name", "phase", "why_not", "module", "line")
    text = {column: _texts(node, column, table[column], texts) for column in columns}
    reads = _pairs(node, "reads", table["reads"])
    writes = _pairs(node, "writes", table["writes"])
    return tuple(
        Op(
            id=row,
            name=text["name"][row],
            phase=cast(Any, text["phase"][row]),
            seconds=table["seconds"][row],
            issue_seconds=table["issue_seconds"][row],
            reads=reads[row],
            writes=writes[row],
            workspace_bytes=table["workspace_bytes"][row],
            why_not=text["why_not"][row],
            module=text["module"][row],
            line=text["line"][row],
        )
        for row in range(len(reads))
    )


def _ticks(node: Node, texts: list[str]) -> tuple[Tick, ...]:
    table = node.table(*_TICK_COLUMNS)
    kinds = _texts(node, "kind", table["kind"], texts)
    rest = (table[column] for column in _TICK_COLUMNS[1:])
    return tuple(Tick(cast(Any, kind), *row) for kind, *row in zip(kinds, *rest, strict=True))


def _texts(node: Node, column: str, entries: list[Any], texts: list[str]) -> list[str]:
    out = []
    for row, entry in enumerate(entries):
        if type(entry) is not int or not 0 <= entry < len(texts):
            node.entry(row, column, entry).fail(f"expected an index into {len(texts)} texts, got {quote(entry)}")
        out.append(texts[entry])
    return out


def _pairs(node: Node, column: str, entries: list[Any]) -> list[tuple[tuple[int, int], ...]]:
    out = []
    for row, entry in enumerate(entries):
        flat = node.entry(row, column, entry).integers()
        if len(flat) % 2:
            node.entry(row, column, entry).fail(f"expected pairs, got {len(flat)} integers")
        out.append(tuple(zip(flat[::2], flat[1::2], strict=True)))
    return out
