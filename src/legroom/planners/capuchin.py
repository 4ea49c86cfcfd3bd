"""Capuchin: swap what has free time; then whatever saves most memory per second.

X. Peng, X. Shi, H. Dai, H. Jin, W. Ma, Q. Xiong, F. Yang, X. Qian: "Capuchin: Tensor-based GPU Memory Management for
Deep Learning", ASPLOS 2020.

Tensor by tensor, from one measured step. A candidate is a tensor that is away from an access to its next one while
memory is short. Its free time is what is left of that stretch after the copy out and the copy back. Candidates are
swapped in the order of decreasing free time as long as the copies hide. If that is not enough, each of the others is
worth its memory saving per second (MSPS): for a swap, the time that compute would wait; for a recomputation, the time
of the ops from its sources on (rp_time) and the time by which it lengthens recomputations chosen before (ext_time). The
best goes first. When one is chosen, it is replaced by its own sources in the sources of all others, and their times
grow; `_Recomputations.choose` is that algorithm.

Guarantee: a plan for every budget that has one. Where the rule ends above the budget, the rest is swapped on demand,
least recently used first, while compute waits: Capuchin's passive mode, in which it also runs its first step.

Deviations. ext_time counts all recomputations that read the candidate; the paper's counter starts anew with each choice
and sees only those that the choice itself made longer. Whether a swap hides, and how long compute waits for one, is
asked of the evaluator instead of estimated and corrected from step to step: Capuchin moves its in-triggers until the
waiting ends, and this is where it ends. Fetches start where the lowering puts them; where a swap without free time
frees nothing that way, it is fetched when it is needed, or else it is synchronous. So are, in passive mode, swaps whose
fetch ahead finds no room. A candidate that frees nothing at all while memory is short is passed over. With
`collective`, what a recomputation makes on its way stays where another wants it, as in the paper; it is thrown away
where there is no room for that. So tensors that one op makes are one candidate, to be recomputed when the first of them
is needed (the maxima of a pooling, and where they were); in the paper an op makes one. What later choices have made
superfluous is kept in the end: the paper adds up bytes until enough are saved, here memory is short at some ticks and
not at others, and much that is cheap and chosen early frees it where something larger does too.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from legroom.evaluate import KEEP, OVERLAP, RECOMPUTE, SHARED, SYNC, Evaluator
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.kernels.codes import AHEAD, Codes
from legroom.plan import Decision, Keep, Plan, Recompute, Swap, signature
from legroom.planners.vdnn import access_times
from legroom.tables import (
    G_BYTES,
    G_END,
    G_FIRST,
    G_IN,
    G_OUT,
    G_START,
    G_VALUE,
    NEVER,
    O_READS,
    O_REPLAYABLE,
    V_FIRST,
    V_FROM,
    V_STOP,
    V_UNTIL,
    V_WRITER,
    Tables,
    again_ns,
)

# What frees more where this frees nothing: without free time a fetch that hides has to start before the peak is over,
# and what a replay leaves in memory may be too much for it.
_SHORTER: dict[int, tuple[int, ...]] = {OVERLAP: (AHEAD, SYNC), SHARED: (RECOMPUTE,)}

_DECISIONS: dict[int, Decision] = {
    KEEP: Keep(),
    OVERLAP: Swap(),
    AHEAD: Swap(when="ahead"),  # by no tick: fetched when it is needed
    SYNC: Swap(when="sync"),
    RECOMPUTE: Recompute(),
    SHARED: Recompute(share=True),
}


@dataclass(frozen=True, slots=True)
class Capuchin:
    collective: bool = True

    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        search = _Search(Evaluator(trace, hardware), budget_bytes, SHARED if self.collective else RECOMPUTE)
        codes = search.decide()
        counts = np.bincount(codes, minlength=AHEAD + 1)
        waiting = f"{counts[AHEAD] + counts[SYNC]} swapped with waiting"
        done = f"{counts[OVERLAP]} swapped, {waiting}, {counts[RECOMPUTE] + counts[SHARED]} recomputed"
        notes = (f"{counts[KEEP]} gaps kept, {done}", f"{search.hidden} swaps hidden in free time")
        nanoseconds, peak = search.evaluator.evaluate(codes)
        if peak > budget_bytes:
            return search.evaluator.plan(codes, planner="capuchin", budget_bytes=budget_bytes)  # raises
        decisions = tuple(_DECISIONS[code] for code in codes.tolist())
        return Plan(decisions, signature(trace), "capuchin", budget_bytes, peak, nanoseconds / 1e9, notes)


class _Search:
    def __init__(self, evaluator: Evaluator, budget_bytes: int, recompute: int) -> None:
        self.evaluator = evaluator
        self.budget = budget_bytes
        self.recompute = recompute
        self.codes: Codes = np.full(evaluator.gaps, KEEP, np.int8)
        self.now = self.evaluator.judge_as_start(self.codes, budget_bytes)
        self.together: dict[int, list[int]] = {}  # candidates: the gaps of each
        self.taken: list[int] = []
        self.hidden = 0

    def decide(self) -> Codes:
        overheads = self._swap_into_free_time()
        if self.now[2] > 0:
            self._by_msps(overheads)
        if self.now[2] > 0:
            self._passive()
        self._give_back()
        return self.codes

    def _judge(self) -> tuple[int, int, int]:
        return self.evaluator.judge(self.codes, self.budget)

    def _try(self, name: int, code: int) -> int | None:
        """Nanoseconds that it costs to do this about a candidate too, None where it is impossible or frees nothing."""
        gaps = self.together[name]
        before = self.codes[gaps]
        self.codes[gaps] = code
        then = self._judge()
        self.codes[gaps] = before
        return None if then[0] == NEVER or then[2] >= self.now[2] else then[0] - self.now[0]

    def _take(self, name: int, code: int) -> None:
        self.codes[self.together[name]] = code
        self.now = self._judge()
        self.taken.append(name)

    def _candidates(self) -> dict[int, list[int]]:
        """Gaps that reach over a tick at which memory is short: those of what one op makes, by the first that ends.

        Where a storage has several gaps, its second ones are another candidate.
        """
        tables = self.evaluator.tables
        self._judge()
        above = np.concatenate([[0], np.cumsum(self.evaluator.curve() > self.budget)])
        short = np.flatnonzero(above[tables.gaps[:, G_END]] > above[tables.gaps[:, G_START]]).tolist()
        made: dict[tuple[int, int], list[int]] = {}
        for gap in short:
            value = int(tables.gaps[gap, G_VALUE])
            writer = int(tables.values[value, V_WRITER]) if value >= 0 else -1
            together = self.recompute == SHARED and writer >= 0
            key = (writer, gap - int(tables.gaps[gap, G_FIRST])) if together else (-1, gap)
            made.setdefault(key, []).append(gap)
        return {min(gaps, key=lambda gap: (int(tables.gaps[gap, G_END]), gap)): gaps for gaps in made.values()}

    def _swap_into_free_time(self) -> dict[int, int]:
        """Swap what hides; of the other candidates return what a swap costs, as far as is known by now."""
        if self.now[2] == 0:
            return {}
        rows = self.evaluator.tables.gaps
        times = access_times(self.evaluator.tables)
        self.together = self._candidates()
        free = {}
        for name, gaps in self.together.items():
            stretch = times[int(rows[gaps, G_END].min())] - times[int(rows[gaps, G_START].max())]
            free[name] = stretch - int(rows[gaps, G_OUT].sum() + rows[gaps, G_IN].sum())
        overheads = {}
        for name in sorted(free, key=lambda name: (-free[name], name)):
            overheads[name] = max(0, -free[name])
            if free[name] < 0:
                continue
            waiting = self._try(name, OVERLAP)
            if waiting is not None and waiting <= 0:
                self._take(name, OVERLAP)
                self.hidden += len(self.together[name])
                del overheads[name]
                if self.now[2] == 0:
                    break
            elif waiting is not None:
                overheads[name] = waiting
        return overheads

    def _by_msps(self, overheads: dict[int, int]) -> None:
        """The most memory saved per second first, each tensor by the better of its two ways.

        A swap costs more the more there are, so its price is asked for again when it comes to the top.
        """
        rows = self.evaluator.tables.gaps
        sizes = {name: max(1, int(rows[self.together[name], G_BYTES].sum())) for name in overheads}
        recomputations = _Recomputations(self.evaluator.tables, {name: self.together[name] for name in overheads})
        prices = {(name, OVERLAP): ns / sizes[name] for name, ns in overheads.items()}
        prices |= {(name, self.recompute): price for name, price in recomputations.prices()}
        heap = [(price, name, code) for (name, code), price in prices.items()]  # nanoseconds per byte: 1 / MSPS
        heapq.heapify(heap)
        while heap and self.now[2] > 0:
            price, name, code = heapq.heappop(heap)
            if self.codes[name] != KEEP or prices.get((name, code)) != price:
                continue
            del prices[name, code]
            ways = ((way, self._try(name, way)) for way in (code, *_SHORTER.get(code, ())))
            taken, overhead = next(((way, ns) for way, ns in ways if ns is not None), (code, None))
            if overhead is None:
                continue
            entry = overhead / sizes[name], name, code
            if code == OVERLAP and entry[0] > price and heap and entry > heap[0]:
                prices[name, code] = entry[0]
                heapq.heappush(heap, entry)
                continue
            self._take(name, taken)
            if code == OVERLAP:
                recomputations.forget(name)
                continue
            for other, changed in recomputations.choose(name):
                if (other, code) in prices:
                    prices[other, code] = changed
                    heapq.heappush(heap, (changed, other, code))

    def _passive(self) -> None:
        """Wherever memory is short still, let fetches wait until they are needed; then evict the least recently used.

        Compute waits for all of that.
        """
        gaps = self.evaluator.tables.gaps
        order = np.argsort(gaps[:, G_START], kind="stable")
        while self.now[2] > 0:
            self._judge()
            short = np.flatnonzero(self.evaluator.curve() > self.budget)
            tick = short[0] if len(short) else -1
            here = (gaps[order, G_START] <= tick) & (tick <= gaps[order, G_END]) & (self.codes[order] != SYNC)
            if not here.any():  # replays elsewhere hold what is needed here
                self.codes = np.full(len(self.codes), SYNC, np.int8)
                self.now = self._judge()
                return
            if not self._later(order[here & (self.codes[order] == OVERLAP)].tolist()):
                self.codes[order[np.argmax(here)]] = SYNC
                self.now = self._judge()

    def _later(self, gaps: list[int]) -> bool:
        """Let the first fetch wait that frees memory by that; False where none does."""
        for gap in gaps:
            self.codes[gap] = AHEAD
            then = self._judge()
            if then[2] < self.now[2]:
                self.now = then
                return True
            self.codes[gap] = OVERLAP
        return False

    def _give_back(self) -> None:
        """Keep what later choices made superfluous, in the order in which it was chosen."""
        for name in self.taken:
            gaps = self.together[name]
            before = self.codes[gaps]
            self.codes[gaps] = KEEP
            then = self._judge()
            if then[0] <= self.now[0] and then[2] <= self.now[2]:
                self.now = then
            else:
                self.codes[gaps] = before


@dataclass(slots=True)
class _Candidate:
    mem: int  # bytes
    rp_time: int  # nanoseconds of its recomputation from its sources
    srcs: set[int]  # gaps whose storages it is recomputed from
    gaps: frozenset[int]  # what it brings back
    ext_time: int = 0  # nanoseconds by which it lengthens the recomputations chosen before

    @property
    def price(self) -> float:
        return (self.rp_time + self.ext_time) / max(1, self.mem)


class _Recomputations:
    """Capuchin's bookkeeping of what a recomputation costs, given those that are chosen already."""

    def __init__(self, tables: Tables, together: dict[int, list[int]]) -> None:
        self.candidates: dict[int, _Candidate] = {}
        self.chosen: dict[int, _Candidate] = {}
        for name, gaps in together.items():
            found = lineage(tables, name)
            if found is not None:
                ops, srcs = found
                nbytes = int(tables.gaps[gaps, G_BYTES].sum())
                self.candidates[name] = _Candidate(nbytes, again_ns(tables, ops), set(srcs), frozenset(gaps))

    def prices(self) -> list[tuple[int, float]]:
        return [(name, candidate.price) for name, candidate in self.candidates.items()]

    def forget(self, name: int) -> None:
        """It is swapped: a source for others that comes back by itself."""
        self.candidates.pop(name, None)

    def choose(self, name: int) -> list[tuple[int, float]]:
        """Recompute this one; return the prices that change by that."""
        t = self.candidates.pop(name)
        for rp in self.chosen.values():
            if t.gaps & rp.srcs:
                rp.srcs = rp.srcs - t.gaps | t.srcs
        self.chosen[name] = t
        changed = []
        for other, cand in self.candidates.items():
            if t.gaps & cand.srcs:
                cand.srcs = cand.srcs - t.gaps | t.srcs
                cand.rp_time += t.rp_time
            elif not cand.gaps & t.srcs:
                continue
            cand.ext_time = cand.rp_time * sum(bool(cand.gaps & rp.srcs) for rp in self.chosen.values())
            changed.append((other, cand.price))
        return changed


def lineage(tables: Tables, gap: int) -> tuple[list[int], list[int]] | None:
    """The ops that bring a gap's storage back while all else is kept, and the gaps they read from; None if none can."""
    tick = int(tables.gaps[gap, G_END])
    missing = [int(tables.gaps[gap, G_VALUE])]
    ops: set[int] = set()
    sources: set[int] = set()
    while missing:
        value = missing.pop()
        writer = int(tables.values[value, V_WRITER]) if value >= 0 else -1
        if writer < 0 or not tables.ops[writer, O_REPLAYABLE]:
            return None
        if writer in ops:
            continue
        ops.add(writer)
        for read in tables.reads[tables.ops[writer, O_READS] : tables.ops[writer + 1, O_READS]].tolist():
            row = tables.values[read]
            if row[V_FROM] <= tick <= row[V_UNTIL]:
                around = range(int(row[V_FIRST]), int(row[V_STOP]))
                sources.update(g for g in around if tables.gaps[g, G_START] <= tick <= tables.gaps[g, G_END])
            else:
                missing.append(read)
    return sorted(ops), sorted(sources)
