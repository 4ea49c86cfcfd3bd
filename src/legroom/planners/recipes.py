"""How a storage is made again while nothing else is away: what DTR and TENSILE think in."""

from __future__ import annotations

from dataclasses import dataclass

from legroom import tables as t
from legroom.tables import Tables


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the storage of a gap is made again at its end, with everything that may be in memory there."""

    ops: tuple[int, ...]
    reads: frozenset[int]  # storages it finds in memory that may be away, each by its first gap
    makes: frozenset[int]  # such storages that its ops make in the version that may be away
    nanoseconds: int
    workspace_bytes: int


def recipe(tables: Tables, gap: int) -> Recipe | None:
    """None where it is impossible."""
    tick, target = int(tables.gaps[gap, t.G_END]), int(tables.gaps[gap, t.G_VALUE])
    ops: set[int] = set()
    reads: set[int] = set()
    missing = [target]
    while missing:
        value = missing.pop()
        writer = int(tables.values[value, t.V_WRITER]) if value >= 0 else -1
        if writer < 0 or not tables.ops[writer, t.O_REPLAYABLE]:
            return None
        if writer in ops:
            continue
        ops.add(writer)
        for read in tables.reads[tables.ops[writer, t.O_READS] : tables.ops[writer + 1, t.O_READS]].tolist():
            _, _, since, until, first, stop = tables.values[read].tolist()
            if not since <= tick <= until:
                missing.append(read)
            elif first < stop:
                reads.add(first)
    makes = set()
    for op in ops:
        for value in tables.writes[tables.ops[op, t.O_WRITES] : tables.ops[op + 1, t.O_WRITES], 0].tolist():
            first, stop = tables.values[value, [t.V_FIRST, t.V_STOP]].tolist()
            if first < stop and tables.gaps[first, t.G_VALUE] == value:
                makes.add(first)
    workspace = int(tables.ops[sorted(ops), t.O_WORKSPACE].max())
    nanoseconds = t.again_ns(tables, sorted(ops))
    return Recipe(tuple(sorted(ops)), frozenset(reads), frozenset(makes), nanoseconds, workspace)
