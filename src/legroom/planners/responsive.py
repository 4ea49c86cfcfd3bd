"""Responsive: a plan for another size of a step that is known, within a millisecond.

This is Mimose's setting (see `mimose`), for single storages and for swaps too. Steps whose inputs differ in size have
the same gaps, so a plan for one size can be carried out at another; what changes is its peak, and what it costs.

In two parts. What is slow is done once for a structure: a way down from keeping everything to waiting for every swap,
on which one gap changes at a time, the one that loses the fewest seconds per byte freed. It is greedy by the exact
evaluator, with one budget after the other, so stalls, busy lanes and chains of replays are all in the prices; below a
third of the range, and where gaps are few, it leads through plans that `local` searches for. `decide()` takes the sizes
and times of another input, brings the compiled tables up to date, and looks for the first plan on the way that is
within the budget: by the share of the range at first, then between two looks.

Guarantee: never above the budget, and a plan wherever there is one, as the way ends in the plan of least peak. Memory
does not fall with each change, so what is found need not be the first that fits. Nothing about time.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from legroom import tables as t
from legroom.errors import PlanError
from legroom.evaluate import KEEP, OVERLAP, RECOMPUTE, SHARED, SYNC, Evaluator
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.kernels import codes as k
from legroom.kernels.codes import Codes
from legroom.plan import Decision, Keep, Plan, Recompute, Swap
from legroom.planners.local import Search
from legroom.sizes import Numbers, again_shares
from legroom.tables import NEVER, Ints

# What the way down aims at, one after the other: shares of the range between the smallest peak and the plain one.
_SHARES = (0.85, 0.7, 0.5, 0.35)
# To change one gap after the other ends in many waits below these (20 to 100 % of the step more than plans of their
# own), and is too coarse where gaps are few: there the way passes through plans that are searched for.
_SEARCHED_SHARES = (0.25, 0.1, 0.02, 0.0)
_FEW = 100  # gaps
_FEW_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.02, 0.0)
_EVALUATIONS = 40  # for each gap at most, on the way down
_SEARCH = 40  # evaluations for each gap, in each search; with 25 some end above the budget, and wait for every swap
_LEAST_PROFIT = 0.05
_DEARER = 1.02  # than the next one in line: back into it
MOST_LOOKS = 8  # evaluations of one decision: at 1,000 gaps each takes 60 to 100 µs on an ARM server core
_NEAR = 1e-3  # of the step: what lies between two plans is not worth another look

_DECISIONS = np.empty(5, object)
for _code, _decision in (
    (KEEP, Keep()),
    (OVERLAP, Swap()),
    (SYNC, Swap(when="sync")),
    (RECOMPUTE, Recompute()),
    (SHARED, Recompute(share=True)),
):
    _DECISIONS[_code] = _decision


class Resizable(Evaluator):
    """An evaluator whose trace can be given other sizes and times. Its `tables` stay as they were."""

    def __init__(self, trace: Trace, hardware: Hardware) -> None:
        super().__init__(trace, hardware)
        tables, packed = self.tables, self._packed
        storage_of = np.array([storage for storage, _ in t.value_ids(trace)], np.int64)
        self._of_gap = tables.gaps[:, t.G_STORAGE].copy()
        self._of_read = storage_of[tables.reads]
        self._of_write = storage_of[tables.writes[:, 0]]
        self._issued = np.concatenate([[0], np.cumsum(tables.ops[:-1, t.O_ISSUE_NS])])
        bounds = np.array([0, *(tick.op for tick in trace.ticks), len(trace.ops)])
        self._segments = np.flatnonzero(bounds[1:] > bounds[:-1])  # those with ops; the others do nothing to the lanes
        self._from, self._to = bounds[:-1][self._segments], bounds[1:][self._segments]
        self._synchronous = hardware.synchronous
        self._again_share, self._again_more = again_shares(trace)
        # Rows of the packed tables, to be written in place.
        self._copies = packed.copies.reshape(-1, k.COPY)
        self._heights = packed.heights.reshape(-1, k.HEIGHTS)
        self._costs = packed.costs.reshape(-1, k.COST)[:-1]
        self._lanes = packed.lanes.reshape(-1, k.LANES)
        # Two words, the lower first, are an integer on every machine that torch runs on.
        self._read_bytes = packed.reads.view(np.int64).reshape(-1, k.READ // 2)[:, k.READ_BYTES // 2]
        self._write_bytes = packed.writes.view(np.int64).reshape(-1, k.WRITE // 2)[:, k.WRITE_BYTES // 2]

    def resize(self, numbers: Numbers) -> None:
        """As if made for the trace with these numbers. Nothing here may loop over gaps, ops or ticks in Python."""
        self._check(numbers)
        nbytes, rates, latency = numbers.nbytes, self.tables.rates, int(self.tables.rates[t.R_LATENCY])
        of_gaps = nbytes[self._of_gap]
        self._copies[:, k.NBYTES] = of_gaps
        self._copies[:, k.OUT_NS] = (of_gaps * rates[t.R_OUT]).astype(np.int64) + latency
        self._copies[:, k.IN_NS] = (of_gaps * rates[t.R_IN]).astype(np.int64) + latency
        self._heights[:, k.LEVEL] = numbers.level_bytes
        self._heights[:, k.TOP] = np.maximum(numbers.peak_bytes, numbers.level_bytes)  # as with_numbers() does
        self._read_bytes[:] = nbytes[self._of_read]
        self._write_bytes[:] = nbytes[self._of_write]
        ns = np.rint(numbers.seconds * 1e9).astype(np.int64)
        again = numbers.seconds * self._again_share + self._again_more
        self._costs[:, k.NS] = np.rint(again * 1e9).astype(np.int64)
        self._costs[:, k.WORKSPACE] = numbers.workspace_bytes
        self._pass_segments(ns)
        self.trace = replace(self.trace, head_peak_bytes=int(numbers.head_peak_bytes))
        # What replays cost is remembered there, and the walk of the last evaluation has it too.
        self._scratch.memory[k.MET : self.gaps * k.MEMORY : k.MEMORY] = 0
        self._scratch.leaves[: k.LEAF] = 0
        self._lowered = ()

    def _pass_segments(self, ns: Ints) -> None:
        """tables.lane_effect of all segments: with sums from the start of the step on, it is one maximum each."""
        if not len(self._segments):
            return
        spent, issued = np.concatenate([[0], np.cumsum(ns)]), self._issued
        compute, issue = spent[self._to] - spent[self._from], issued[self._to] - issued[self._from]
        if self._synchronous:  # all but the first op are issued when compute is done with the one before
            self._lanes[self._segments, k.AFTER_HOST] = compute + issue
            compute += issue - (issued[self._from + 1] - issued[self._from])
        else:
            latest = np.maximum.reduceat(issued[1:] - spent[:-1], self._from)
            self._lanes[self._segments, k.AFTER_HOST] = spent[self._to] - issued[self._from] + latest
        self._lanes[self._segments, k.AFTER_COMPUTE] = compute

    def plain_peak_bytes(self) -> int:
        return max(self.trace.head_peak_bytes, int(self._heights[:, k.TOP].max(initial=0)))

    def _check(self, numbers: Numbers) -> None:
        storages, ticks, ops = len(self.trace.storages), len(self.trace.ticks), len(self.trace.ops)
        lengths = (
            ("nbytes", numbers.nbytes, storages),
            ("level_bytes", numbers.level_bytes, ticks),
            ("peak_bytes", numbers.peak_bytes, ticks),
            ("workspace_bytes", numbers.workspace_bytes, ops),
            ("seconds", numbers.seconds, ops),
        )
        for name, array, expected in lengths:
            if len(array) != expected:
                raise PlanError(f"numbers.{name} has {len(array)} entries, the structure has {expected}")


class _Look(NamedTuple):
    """A plan on the way down, and what it costs."""

    at: int
    nanoseconds: int
    peak_bytes: int


_nanoseconds = attrgetter("nanoseconds")


class Responsive:
    """Plans for one structure at any size. Holds scratch memory, so it belongs to one thread.

    Made in a fifth to a tenth of the time if not `thorough`; budgets in the lower third of the range get slow plans.
    """

    def __init__(self, trace: Trace, hardware: Hardware, *, thorough: bool = True) -> None:
        self.evaluator = Resizable(trace, hardware)
        way = _Way(self.evaluator)
        way.down(thorough=thorough)
        self.way = np.array(way.rows)  # plans from keeping everything to waiting for every swap, a row for each
        self._marks = way.marks
        peaks = np.array(way.peaks)[way.marks]
        self._shares = np.minimum.accumulate((peaks - peaks[-1]) / max(1, int(peaks[0] - peaks[-1])))
        self.looks = 0  # evaluations of the last decision

    def decide(self, numbers: Numbers, budget_bytes: int) -> tuple[Decision, ...] | None:
        """What to do about each gap so that the step at this size stays within the budget. None: nothing does that."""
        self.evaluator.resize(numbers)
        codes = self.codes(budget_bytes)
        return None if codes is None else tuple(_DECISIONS[codes].tolist())

    def codes(self, budget_bytes: int) -> Codes | None:
        """The plan within the budget at the size that the evaluator has."""
        self.looks = 0
        plain = self.evaluator.plain_peak_bytes()
        if plain <= budget_bytes:
            return self._at(0)
        last = len(self.way) - 1
        best = below = _Look(last, *self._look(last))
        if below.peak_bytes > budget_bytes:
            return None
        above = _Look(0, 0, plain)  # takes too much memory, while `below` fits; how long it takes is not asked
        # First the plans that were aimed at: from one to the next memory falls, on the way there it may rise.
        share = (budget_bytes - below.peak_bytes) / max(1, plain - below.peak_bytes)
        high, low = 0, len(self._marks) - 1
        mark = int(np.searchsorted(-self._shares, -share))
        while low - high > 1 and self.looks < MOST_LOOKS:
            mark = min(max(mark, high + 1), low - 1)
            look = _Look(self._marks[mark], *self._look(self._marks[mark]))
            if look.peak_bytes <= budget_bytes:
                low, below, best = mark, look, min(best, look, key=_nanoseconds)
                mark -= 1
            else:
                high, above = mark, look
                mark += 1
        while below.at - above.at > 1 and self.looks < MOST_LOOKS:
            if below.nanoseconds - above.nanoseconds <= _NEAR * below.nanoseconds:
                break
            at = (above.at + below.at) // 2
            look = _Look(at, *self._look(at))
            if look.peak_bytes <= budget_bytes:
                below, best = look, min(best, look, key=_nanoseconds)
            else:
                above = look
        return self._at(best.at)

    def _look(self, at: int) -> tuple[int, int]:
        self.looks += 1
        return self.evaluator.evaluate(self._at(at))

    def _at(self, at: int) -> Codes:
        codes: Codes = self.way[at]
        return codes


_Entry = tuple[float, float, int, int]  # price, rank among equals, gap, action


class _Way:
    """Greedy: the cheapest change first, one limit after the other.

    Prices are nanoseconds per byte by which less stands above the limit, summed over ticks. At first they are too low:
    the ticks above the limit in a gap are all thought to profit, and the lanes to be as free as when it was last looked
    at. A price is asked for when its change comes up, and goes back in line where it is no longer the cheapest.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        gaps = evaluator.tables.gaps
        self.starts, self.ends, self.nbytes = (gaps[:, c] for c in (t.G_START, t.G_END, t.G_BYTES))
        self.copying = gaps[:, t.G_OUT] + gaps[:, t.G_IN]
        self.codes: Codes = np.full(evaluator.gaps, KEEP, np.int8)
        self.plain_ns, self.plain, _ = evaluator.judge_as_start(self.codes, NEVER)
        self.rows, self.peaks = [self.codes.copy()], [self.plain]
        self.marks = [0]  # rows of the plans that were aimed at
        self.count = 0
        # What a change costs, by action and gap, as far as known. A swap costs nothing while the lanes are free.
        self.costs = np.zeros((SHARED + 1, evaluator.gaps))
        self.profit = np.ones((SHARED + 1, evaluator.gaps))  # share of what should profit that did when last looked at
        for gap in range(evaluator.gaps):
            self.costs[SHARED, gap] = self._changed(gap, SHARED, NEVER)[0] - self.plain_ns

    def down(self, *, thorough: bool) -> None:
        waiting = np.full(len(self.codes), SYNC, np.int8)
        lowest = self.evaluator.evaluate(waiting)[1]
        few = thorough and len(self.codes) <= _FEW
        shares = () if few else _SHARES
        for number, share in enumerate(shares):
            limit = lowest + int(share * (self.plain - lowest))
            part = (_EVALUATIONS * len(self.codes) - self.count) // (len(shares) - number)
            self._reach(limit, self._shared_or_swapped(limit), self.count + part)
            self.marks.append(len(self.rows) - 1)
        searched = (_FEW_SHARES if few else _SEARCHED_SHARES) if thorough else ()
        for share in searched:
            limit = lowest + int(share * (self.plain - lowest))
            search = Search(self.evaluator, limit, _SEARCH * len(self.codes))
            search.greedy()
            if few:
                search.finish()
            self._toward(search.best, limit)
            self.marks.append(len(self.rows) - 1)
        order = np.argsort(self.copying / np.maximum(1, self.nbytes * (self.ends - self.starts)), kind="stable")
        for gap in order[self.codes[order] != SYNC].tolist():
            self.codes[gap] = SYNC
            self._went(self.evaluator.evaluate(self.codes)[1])
        self.marks.append(len(self.rows) - 1)
        self.marks = sorted(set(self.marks))

    def _went(self, peak: int) -> None:
        self.rows.append(self.codes.copy())
        self.peaks.append(peak)

    def _changed(self, gap: int, action: int, limit: int) -> tuple[int, int, int]:
        self.count += 1
        before = self.codes[gap]
        self.codes[gap] = action
        cost = self.evaluator.judge(self.codes, limit)
        self.codes[gap] = before
        return cost

    def _falls(self, limit: int) -> Ints:
        """By gap: what stands above the limit now and would not if only its storage were away."""
        above = np.concatenate([[0], np.cumsum(self.evaluator.curve() > limit)])
        falls: Ints = (above[self.ends] - above[self.starts]) * self.nbytes
        return falls

    def _shared_or_swapped(self, limit: int) -> list[_Entry]:
        missing = self.evaluator.judge(self.codes, limit)[2]
        falls = self._falls(limit)
        open_ = np.flatnonzero((falls > 0) & (self.codes == KEEP))
        replays = self.costs[SHARED, open_] / (falls[open_] * self.profit[SHARED, open_])
        # The lanes are for what is dear otherwise, but no dearer than what is replayed at last.
        order = np.argsort(replays, kind="stable")
        enough = int(np.searchsorted(np.cumsum(falls[open_][order]), missing))
        marginal = replays[order[min(enough, len(order) - 1)]] if len(order) else 0.0
        saved = np.minimum(self.costs[SHARED, open_], marginal * falls[open_]) / (self.copying[open_] + 1)
        swaps = self.costs[OVERLAP, open_] / (falls[open_] * self.profit[OVERLAP, open_])
        gaps = open_.tolist()
        entries = [(p, -f, g, SHARED) for p, f, g in zip(replays.tolist(), falls[open_].tolist(), gaps, strict=True)]
        entries += [(p, -s, g, OVERLAP) for p, s, g in zip(swaps.tolist(), saved.tolist(), gaps, strict=True)]
        return entries

    def _toward(self, codes: Codes, limit: int) -> None:
        """Change to these codes, gap by gap, those first that cost least for what they free."""
        now = self.evaluator.judge_as_start(self.codes, limit)
        entries = []
        for gap in np.flatnonzero(self.codes != codes).tolist():
            then = self._changed(gap, int(codes[gap]), limit)
            fall = now[2] - then[2]
            price = (then[0] - now[0]) / fall if fall > 0 and then[0] < NEVER else math.inf
            entries.append((price, -fall, gap))
        for _, _, gap in sorted(entries):
            self.codes[gap] = codes[gap]
            self._went(self.evaluator.evaluate(self.codes)[1])

    def _reach(self, limit: int, heap: list[_Entry], until: int) -> None:
        """Change the cheapest until nothing stands above the limit. Later than `until`, whatever helps is taken."""
        now = self.evaluator.judge_as_start(self.codes, limit)
        falls = np.maximum(1, self._falls(limit))
        heapq.heapify(heap)
        while heap and now[2] > 0:
            _, rank, gap, action = heapq.heappop(heap)
            if self.codes[gap] != KEEP and action in (OVERLAP, SHARED):
                continue
            then = self._changed(gap, action, limit)
            fall = now[2] - then[2]
            if then[0] == NEVER or fall <= 0:
                self.profit[action, gap] = _LEAST_PROFIT
                continue
            cost = max(0, then[0] - now[0])
            self.costs[action, gap] = cost
            self.profit[action, gap] = min(1.0, max(fall / falls[gap], _LEAST_PROFIT))
            price = cost / fall
            if heap and price > _DEARER * heap[0][0] and self.count < until:
                heapq.heappush(heap, (price, rank, gap, action))
                continue
            self.codes[gap] = action
            now = then
            self._went(then[1])


@dataclass(frozen=True, slots=True)
class ResponsivePlanner:
    """The same as a planner: one size only, the one of the trace."""

    thorough: bool = False

    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        plans = Responsive(trace, hardware, thorough=self.thorough)
        codes = plans.codes(budget_bytes)
        if codes is None:
            codes = np.full(plans.evaluator.gaps, SYNC, np.int8)  # does not fit: raises, with the floor
        notes = (f"{np.count_nonzero(codes)} gaps changed, after {plans.looks} evaluations on the way down",)
        return plans.evaluator.plan(codes, planner="responsive", budget_bytes=budget_bytes, notes=notes)
