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
frees nothing that way, it is synchronous. A candidate that frees nothing at all while memory is short is passed over.
With `collective`, what a recomputation makes on its way stays where another wants it, as in the paper; it is thrown
away where there is no room for that.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from legroom.evaluate import KEEP, OVERLAP, RECOMPUTE, SHARED, SYNC, Evaluator
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.kernels import Codes
from legroom.plan import Plan
from legroom.planners.vdnn import access_times
from legroom.tables import (
    G_BYTES,
    G_END,
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
_SHORTER = {OVERLAP: SYNC, SHARED: RECOMPUTE}


@dataclass(frozen=True, slots=True)
class Capuchin:
    collective: bool = True

    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        search = _Search(Evaluator(trace, hardware), budget_bytes, SHARED if self.collective else RECOMPUTE)
        codes = search.decide()
        counts = np.bincount(codes, minlength=SHARED + 1)
        done = f"{counts[OVERLAP]} swapped, {counts[SYNC]} swapped with waiting, {counts[RECOMPUTE] + counts[SHARED]} "
        notes = (f"{counts[KEEP]} gaps kept, {done}recomputed", f"{search.hidden} swaps hidden in free time")
        return search.evaluator.plan(codes, planner="capuchin", budget_bytes=budget_bytes, notes=notes)


class _Search:
    def __init__(self, evaluator: Evaluator, budget_bytes: int, recompute: int) -> None:
        self.evaluator = evaluator
        self.budget = budget_bytes
        self.recompute = recompute
        self.codes: Codes = np.full(evaluator.gaps, KEEP, np.int8)
        self.now = self.evaluator.judge_as_start(self.codes, budget_bytes)
        self.hidden = 0

    def decide(self) -> Codes:
        overheads = self._swap_into_free_time()
        if self.now[2] > 0:
            self._by_msps(overheads)
        if self.now[2] > 0:
            self._passive()
        return self.codes

    def _judge(self) -> tuple[int, int, int]:
        return self.evaluator.judge(self.codes, self.budget)

    def _try(self, gap: int, code: int) -> int | None:
        """Nanoseconds that it costs to do this about a gap too, None where it is impossible or frees nothing."""
        before, self.codes[gap] = self.codes[gap], code
        then = self._judge()
        self.codes[gap] = before
        return None if then[0] == NEVER or then[2] >= self.now[2] else then[0] - self.now[0]

    def _take(self, gap: int, code: int) -> None:
        self.codes[gap] = code
        self.now = self._judge()

    def _candidates(self) -> list[int]:
        """Gaps that reach over a tick at which memory is short."""
        gaps = self.evaluator.tables.gaps
        self._judge()
        above = np.concatenate([[0], np.cumsum(self.evaluator.curve() > self.budget)])
        return [int(gap) for gap in np.flatnonzero(above[gaps[:, G_END]] > above[gaps[:, G_START]])]

    def _swap_into_free_time(self) -> dict[int, int]:
        """Swap what hides; of the other candidates return what a swap costs, as far as is known by now."""
        if self.now[2] == 0:
            return {}
        gaps = self.evaluator.tables.gaps
        times = access_times(self.evaluator.tables)
        free = {}
        for gap in self._candidates():
            start, end, out, back = (int(gaps[gap, column]) for column in (G_START, G_END, G_OUT, G_IN))
            free[gap] = times[end] - times[start] - out - back
        overheads = {}
        for gap in sorted(free, key=lambda gap: (-free[gap], gap)):
            overheads[gap] = max(0, -free[gap])
            if free[gap] < 0:
                continue
            waiting = self._try(gap, OVERLAP)
            if waiting is not None and waiting <= 0:
                self._take(gap, OVERLAP)
                self.hidden += 1
                del overheads[gap]
                if self.now[2] == 0:
                    break
            elif waiting is not None:
                overheads[gap] = waiting
        return overheads

    def _by_msps(self, overheads: dict[int, int]) -> None:
        """The most memory saved per second first, each tensor by the better of its two ways.

        A swap costs more the more there are, so its price is asked for again when it comes to the top.
        """
        sizes = self.evaluator.tables.gaps[:, G_BYTES]
        recomputations = _Recomputations(self.evaluator.tables, list(overheads))
        prices = {(gap, OVERLAP): ns / max(1, int(sizes[gap])) for gap, ns in overheads.items()}
        prices |= {(gap, self.recompute): price for gap, price in recomputations.prices()}
        heap = [(price, gap, code) for (gap, code), price in prices.items()]  # nanoseconds per byte: 1 / MSPS
        heapq.heapify(heap)
        while heap and self.now[2] > 0:
            price, gap, code = heapq.heappop(heap)
            if self.codes[gap] != KEEP or prices.get((gap, code)) != price:
                continue
            del prices[gap, code]
            taken, overhead = code, self._try(gap, code)
            if overhead is None and code in _SHORTER:
                taken, overhead = _SHORTER[code], self._try(gap, _SHORTER[code])
            if overhead is None:
                continue
            entry = overhead / max(1, int(sizes[gap])), gap, code
            if code == OVERLAP and entry[0] > price and heap and entry > heap[0]:
                prices[gap, code] = entry[0]
                heapq.heappush(heap, entry)
                continue
            self._take(gap, taken)
            if code == OVERLAP:
                recomputations.forget(gap)
                continue
            for other, changed in recomputations.choose(gap):
                if (other, code) in prices:
                    prices[other, code] = changed
                    heapq.heappush(heap, (changed, other, code))

    def _passive(self) -> None:
        """Wherever memory is short still, evict what was used least recently, and wait for it."""
        gaps = self.evaluator.tables.gaps
        order = np.argsort(gaps[:, G_START], kind="stable")
        while self.now[2] > 0:
            self._judge()
            short = np.flatnonzero(self.evaluator.curve() > self.budget)
            tick = short[0] if len(short) else -1
            here = (gaps[order, G_START] <= tick) & (tick <= gaps[order, G_END]) & (self.codes[order] != SYNC)
            if not here.any():  # replays elsewhere hold what is needed here
                self.codes = np.full(len(self.codes), SYNC, np.int8)
                return
            self.codes[order[np.argmax(here)]] = SYNC
            self.now = self._judge()


@dataclass(slots=True)
class _Candidate:
    mem: int  # bytes
    rp_time: int  # nanoseconds of its recomputation from its sources
    srcs: set[int] = field(default_factory=set)  # gaps whose storages it is recomputed from
    ext_time: int = 0  # nanoseconds by which it lengthens the recomputations chosen before

    @property
    def price(self) -> float:
        return (self.rp_time + self.ext_time) / max(1, self.mem)


class _Recomputations:
    """Capuchin's bookkeeping of what a recomputation costs, given those that are chosen already."""

    def __init__(self, tables: Tables, gaps: list[int]) -> None:
        self.candidates: dict[int, _Candidate] = {}
        self.chosen: dict[int, _Candidate] = {}
        for gap in gaps:
            found = lineage(tables, gap)
            if found is not None:
                ops, srcs = found
                nanoseconds = again_ns(tables, ops)
                self.candidates[gap] = _Candidate(int(tables.gaps[gap, G_BYTES]), nanoseconds, set(srcs))

    def prices(self) -> list[tuple[int, float]]:
        return [(gap, candidate.price) for gap, candidate in self.candidates.items()]

    def forget(self, gap: int) -> None:
        """It is swapped: a source for others that comes back by itself."""
        self.candidates.pop(gap, None)

    def choose(self, gap: int) -> list[tuple[int, float]]:
        """Recompute this one; return the prices that change by that."""
        t = self.candidates.pop(gap)
        for rp in self.chosen.values():
            if gap in rp.srcs:
                rp.srcs = rp.srcs - {gap} | t.srcs
        self.chosen[gap] = t
        changed = []
        for other, cand in self.candidates.items():
            if gap in cand.srcs:
                cand.srcs = cand.srcs - {gap} | t.srcs
                cand.rp_time += t.rp_time
            elif other not in t.srcs:
                continue
            cand.ext_time = cand.rp_time * sum(other in rp.srcs for rp in self.chosen.values())
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
