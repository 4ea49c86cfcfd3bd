"""DTR: a cache that evicts what is cheap to make again, large, and long unused.

Marisa Kirisame, Steven Lyubomirsky, Altan Haan, Jennifer Brennan, Mike He, Jared Roesch, Tianqi Chen and Zachary
Tatlock, "Dynamic Tensor Rematerialization", ICLR 2021.

A reactive policy, played over the trace tick by tick without looking ahead. Where memory would exceed the limit, the
resident storage with the least c / (m * s) is evicted: c is the time of its own ops and of its evicted neighbourhood
(the ancestors that a replay of it would have to replay first, the descendants that would have to replay it), m its
bytes, s the time since it was last read or written. What is used while it is evicted is replayed: its inputs are
locked, and brought back if need be; room is made for what comes out; all of it stays until it is evicted again. What
was evicted within a gap becomes Recompute.

Guarantee: a plan within the budget, or BudgetError with the least peak that the policy came to. Nothing about time.

Deviations. A plan acts at ticks, so room is made at a tick, for the whole segment after it. A plan frees at the start
of a gap, so what the policy evicts later is away earlier. It is shared (stays once it is back), as in the paper, unless
a replay made or read it before it was evicted for the last time: then it has to go once more, and is thrown away. The
peak of such a plan differs from the policy's, so the exact one decides: while it is above the budget, the policy is
played again with a lower limit. Temporaries that nobody saved belong to every storage whose replay makes them. What
cannot be replayed is never evicted.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from legroom import tables as t
from legroom.errors import BudgetError
from legroom.evaluate import IMPOSSIBLE, KEEP, RECOMPUTE, SHARED, SYNC, Evaluator
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.kernels.codes import Codes
from legroom.plan import Plan
from legroom.planners.floors import descended
from legroom.planners.recipes import Recipe, recipe
from legroom.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtr:
    corrections: int = 8  # how often the limit is lowered by what the exact peak is too high
    steps: int = 16  # then: limits from the plain peak down to where nothing may stay, the same whatever the budget
    descends: bool = True  # and then limits a byte below the last peak, for as long as that leads lower

    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        evaluator = Evaluator(trace, hardware)
        recipes = tuple(recipe(evaluator.tables, gap) for gap in range(evaluator.gaps))
        plain, lowest = (evaluator.evaluate(np.full(evaluator.gaps, code, np.int8))[1] for code in (KEEP, SYNC))

        def corrected(budget_bytes: int) -> tuple[_Play | None, int]:
            """The first play within the budget, and its peak; none, and that of no plan."""
            limit = budget_bytes
            for _ in range(1 + self.corrections):
                if limit < lowest:
                    break  # no plan keeps to it; the policy would evict and replay without end
                play = _Play(evaluator, recipes, limit)
                peak = evaluator.evaluate(play.codes)[1]
                if peak <= budget_bytes:
                    return play, peak
                limit -= peak - budget_bytes
            return None, plain

        found = corrected(budget_bytes)
        if found[1] > budget_bytes:
            for step in reversed(range(self.steps)):
                play = _Play(evaluator, recipes, lowest + (plain - lowest) * step // self.steps)
                found = min(found, (play, evaluator.evaluate(play.codes)[1]), key=lambda found: found[1])
                if found[1] <= budget_bytes:
                    break
            if self.descends:
                found = descended(corrected, found, budget_bytes)
        best, floor = found
        if best is not None and floor <= budget_bytes:
            return best.plan(budget_bytes)
        raise BudgetError(
            f"dtr's rule stops at {format_bytes(floor)} ({floor} bytes), the budget is {format_bytes(budget_bytes)}; "
            "raise the budget, or use planner auto, which also swaps",
            budget_bytes=budget_bytes,
            floor_bytes=floor,
        )


class _Play:
    """The policy, played once under a limit. A storage is named by its first gap."""

    def __init__(self, evaluator: Evaluator, recipes: tuple[Recipe | None, ...], limit_bytes: int) -> None:
        self.evaluator = evaluator
        self.recipes = recipes
        self.limit = limit_bytes
        self.codes: Codes = np.full(evaluator.gaps, KEEP, np.int8)
        gaps = evaluator.tables.gaps
        self.sizes = gaps[:, t.G_BYTES].tolist()
        self.first = gaps[:, t.G_FIRST].tolist()
        self.readers: dict[int, list[int]] = {}  # storage: gaps whose recipe reads it
        for gap, made_by in enumerate(recipes):
            for read in made_by.reads if made_by else ():
                self.readers.setdefault(read, []).append(gap)
        self.open: dict[int, int] = {}  # storage: the gap it is in
        self.away: dict[int, int] = {}  # storage: the gap in which it was evicted
        self.absent_bytes = 0
        self.locked: Counter[int] = Counter()
        self.replayed: set[int] = set()  # gaps whose storage a replay made or read
        self.stuck: set[int] = set()  # gaps that can no longer be recomputed, with what else is away
        self.now = 0  # nanoseconds
        self.used: dict[int, int] = {}  # storage: when it was last read or written
        self.costs: dict[int, int] = {}  # gap: its own time and its evicted neighbourhood's, where that is known
        self._walk()

    def plan(self, budget_bytes: int) -> Plan:
        counts = np.bincount(self.codes, minlength=5)
        notes = (
            f"{counts[KEEP]} gaps kept, {counts[SHARED]} recomputed, {counts[RECOMPUTE]} thrown away in between",
            f"the policy kept to {format_bytes(self.limit)}",
        )
        return self.evaluator.plan(self.codes, planner="dtr", budget_bytes=budget_bytes, notes=notes)

    def _walk(self) -> None:
        trace, tables = self.evaluator.trace, self.evaluator.tables
        starts: dict[int, list[int]] = {}
        ends: dict[int, list[int]] = {}
        for gap, (start, end) in enumerate(tables.gaps[:, [t.G_START, t.G_END]].tolist()):
            if start < end:
                starts.setdefault(start, []).append(gap)
                ends.setdefault(end, []).append(gap)
        named = dict(zip(tables.gaps[:, t.G_STORAGE].tolist(), self.first, strict=True))
        done = 0
        for index, tick in enumerate(trace.ticks):
            for op in trace.ops[done : tick.op]:
                self.now += int(tables.ops[op.id, t.O_NS])
                self._touch(named[s] for s, _ in itertools.chain(op.reads, op.writes) if s in named)
            done = tick.op
            over = ends.get(index, ())
            for gap in over:
                del self.open[self.first[gap]]
            for gap in over:
                self._bring_back(gap, tick.level_bytes)
            self._touch(self.first[gap] for gap in over)
            for gap in starts.get(index, ()):
                self.open[self.first[gap]] = gap
            self._make_room(tick.peak_bytes)

    def _touch(self, storages: Iterable[int]) -> None:
        for storage in storages:
            self.used[storage] = self.now

    def _make_room(self, nbytes: int) -> None:
        """Evict until so much fits, everything else kept; or until nothing is left to evict."""
        while nbytes - self.absent_bytes > self.limit:
            candidates = [
                gap
                for storage, gap in self.open.items()
                if storage not in self.away and not self.locked[storage] and gap not in self.stuck
                if self.sizes[gap] and self.recipes[gap] is not None
            ]
            if not candidates:
                return
            self._evict(min(candidates, key=lambda gap: (self._score(gap), gap)))

    def _score(self, gap: int) -> float:
        staleness = self.now - self.used.get(self.first[gap], 0)
        score: float = self._cost(gap) / (self.sizes[gap] * (staleness + 1))
        return score

    def _cost(self, gap: int) -> int:
        cost = self.costs.get(gap)
        if cost is None:
            around = self._around(gap, self._parents) | self._around(gap, self._children)
            neighbourhood = {other for other in around if self._is_away(other)}
            cost = sum(self._own_nanoseconds(other) for other in neighbourhood | {gap})
            self.costs[gap] = cost
        return cost

    def _own_nanoseconds(self, gap: int) -> int:
        made_by = self.recipes[gap]
        return made_by.nanoseconds if made_by else 0

    def _around(self, gap: int, step: Callable[[int], list[int]]) -> set[int]:
        """What is reached in one direction through evicted storages, the first that are resident included."""
        seen = {gap}
        stack = [gap]
        while stack:
            for other in step(stack.pop()):
                if other not in seen:
                    seen.add(other)
                    if self._is_away(other):
                        stack.append(other)
        return seen

    def _parents(self, gap: int) -> list[int]:
        made_by = self.recipes[gap]
        found = [self.away.get(read, self.open.get(read)) for read in (made_by.reads if made_by else ())]
        return [other for other in found if other is not None]

    def _children(self, gap: int) -> list[int]:
        readers = self.readers.get(self.first[gap], ())
        return [other for other in readers if self.open.get(self.first[other]) == other or self._is_away(other)]

    def _is_away(self, gap: int) -> bool:
        return self.away.get(self.first[gap]) == gap

    def _forget_costs(self, gap: int) -> None:
        """Those in whose neighbourhood this gap is, or was."""
        for other in self._around(gap, self._parents) | self._around(gap, self._children):
            self.costs.pop(other, None)

    def _evict(self, gap: int) -> None:
        before = self.codes[gap]
        self.codes[gap] = RECOMPUTE if gap in self.replayed else SHARED
        if self.codes[gap] != before and self.evaluator.judge(self.codes, t.NEVER) == IMPOSSIBLE:
            self.codes[gap] = before
            self.stuck.add(gap)
            return
        self.away[self.first[gap]] = gap
        self.absent_bytes += self.sizes[gap]
        self._forget_costs(gap)

    def _bring_back(self, gap: int, level_bytes: int) -> None:
        """Replay, inputs first. An input is locked until what reads it is made."""
        stack = [(gap, False)]
        while stack:
            gap, is_ready = stack.pop()
            made_by = self.recipes[gap]
            if not self._is_away(gap):
                if is_ready and made_by:  # made meanwhile, by an op with several outputs
                    self.locked.subtract(made_by.reads)
                continue
            assert made_by is not None, "only what has a recipe is evicted"
            if not is_ready:
                self.locked.update(made_by.reads)
                stack.append((gap, True))
                stack += [(self.away[read], False) for read in sorted(made_by.reads) if read in self.away]
                continue
            made = sorted(storage for storage in made_by.makes if storage in self.away)
            coming = sum(self.sizes[self.away[storage]] for storage in made)
            self._make_room(level_bytes + coming + made_by.workspace_bytes)
            self.now += made_by.nanoseconds
            self._touch((*made_by.reads, *made))
            self.replayed.update(self.open[read] for read in made_by.reads if read in self.open)
            for storage in made:
                back = self.away[storage]
                self._forget_costs(back)
                del self.away[storage]
                self.absent_bytes -= self.sizes[back]
                self.replayed.add(back)
            self.locked.subtract(made_by.reads)
