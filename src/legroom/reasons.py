"""Why bytes of a trace stay in memory: Python code holds them, or what made them cannot be run again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from legroom.ir import Op, Trace, Value


@dataclass(frozen=True, slots=True)
class Held:
    """A saved storage that stays because Python code refers to it."""

    nbytes: int
    module: str
    line: str


def held(trace: Trace) -> tuple[Held, ...]:
    makers = {value[0]: op for op in trace.ops for value in op.writes if value[1] == 0}
    return tuple(Held(s.nbytes, s.name, makers[s.id].line if s.id in makers else "") for s in trace.storages if s.held)


def unreplayable(trace: Trace) -> tuple[tuple[str, int], ...]:
    """Why saved storages cannot be recomputed even if all others are in memory, and how many bytes that concerns."""
    reasons = Counter[str]()
    makers = {value: op for op in trace.ops for value in op.writes}
    for storage in trace.storages:
        if storage.gaps:
            reason = _why_not(trace, (storage.id, storage.gap_version), makers)
            if reason:
                reasons[reason] += storage.nbytes
    return tuple(reasons.most_common())


def _why_not(trace: Trace, target: Value, makers: dict[Value, Op]) -> str:
    seen = {target}
    stack = [target]
    while stack:
        value = stack.pop()
        maker = makers.get(value)
        if maker is None or maker.why_not:
            return maker.why_not if maker is not None else "made outside forward"
        for source in maker.reads:
            storage = trace.storages[source[0]]
            if source not in seen and not storage.persistent and not storage.gaps:
                seen.add(source)
                stack.append(source)
    return ""
