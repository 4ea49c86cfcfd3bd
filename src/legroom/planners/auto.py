"""The default planner: greedy by price, judged by the exact evaluator, then improved as long as it helps.

Guarantee: a plan for every budget that has one, down to the floor (all swaps synchronous). Not optimal: it changes one
gap at a time, so it misses exchanges in which two gaps must change at once.

A price is nanoseconds per byte by which memory falls where it is above the budget. Prices come from evaluating the
whole plan with one gap changed, so stalls, busy lanes and chains of replays are all in them. They wait in a heap and
are brought up to date only when they come to the top: prices rise far more often than they fall. Three searches start
from keeping everything: with all actions, with swaps only, with replays first; the best goes on.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from legroom.evaluate import KEEP, OVERLAP, RECOMPUTE, SYNC, Evaluator
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.kernels import Codes
from legroom.plan import Plan
from legroom.tables import G_END, G_IN, G_OUT, G_START, NEVER, Ints

_ACTIONS = (OVERLAP, RECOMPUTE, SYNC)
# Synchronous swaps are in each: near the floor nothing else reaches the budget.
_STARTS = {"all actions": _ACTIONS, "swaps": (OVERLAP, SYNC), "replays": (RECOMPUTE, SYNC)}


@dataclass(frozen=True, slots=True)
class Auto:
    evaluations: int = 6000  # of the whole search; at 500 gaps one takes 20 to 60 µs on an ARM server core

    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        search = _Search(Evaluator(trace, hardware), budget_bytes, self.evaluations)
        codes, start = search.best()
        counts = np.bincount(codes, minlength=4)
        done = f"{counts[OVERLAP]} swapped, {counts[SYNC]} swapped with waiting, {counts[RECOMPUTE]} recomputed"
        notes = (f"{counts[KEEP]} gaps kept, {done}", f"found from: {start}; {search.count} evaluations")
        return search.evaluator.plan(codes, planner="auto", budget_bytes=budget_bytes, notes=notes)


# (price, rank among equals: minus the bytes by which memory falls over the ticks above the budget, gap, action)
_Entry = tuple[float, float, int, int]
_Cost = tuple[int, int, int]  # as Evaluator.judge() says


class _Search:
    def __init__(self, evaluator: Evaluator, budget_bytes: int, evaluations: int) -> None:
        self.evaluator = evaluator
        self.budget = budget_bytes
        self.count = 0
        self.most = evaluations

    def best(self) -> tuple[Codes, str]:
        """The best plan found, feasible if any is; and the search it came from."""
        codes = np.full(self.evaluator.gaps, KEEP, np.int8)
        if self._judge(codes)[2] == 0:
            return codes, "keeping everything"
        sync = np.full(self.evaluator.gaps, SYNC, np.int8)
        if self._judge(sync)[2] > 0:
            return sync, "below the floor"
        prices = self._prices(codes, _ACTIONS)
        best = self._judge(sync)[0], "waiting for every swap", sync
        for name, actions in _STARTS.items():
            share = self.count + (self.most - self.count) // 2
            start = [entry for entry in prices if entry[3] in actions]
            result = self._reach(codes.copy(), start, actions, until=share, give_up_ns=best[0])
            ns = self._judge(result)[0]
            if ns < best[0]:
                best = ns, name, result
        return self._improve(best[2]), best[1]

    def _judge(self, codes: Codes) -> _Cost:
        self.count += 1
        return self.evaluator.judge(codes, self.budget)

    def _changed(self, codes: Codes, gap: int, action: int) -> _Cost:
        """What the plan costs with one gap changed."""
        before = codes[gap]
        codes[gap] = action
        cost = self._judge(codes)
        codes[gap] = before
        return cost

    def _prices(self, codes: Codes, actions: tuple[int, ...]) -> list[_Entry]:
        """What each single change costs, where it helps; a heap."""
        now, curve = self._judge(codes), self.evaluator.curve().copy()
        entries = []
        for gap in range(len(codes)):
            for action in actions:
                if codes[gap] != action and self.count < self.most:
                    entry = self._entry(now, self._changed(codes, gap, action), curve, gap, action)
                    entries += [] if entry is None else [entry]
        entries = self._rank_free(entries, now[1] - self.budget)
        heapq.heapify(entries)
        return entries

    def _rank_free(self, entries: list[_Entry], missing_bytes: int) -> list[_Entry]:
        """Of changes that cost nothing, put first those that save most per nanosecond of copying.

        Swaps are free only while the lanes have room. What a swap saves is what its gap would cost otherwise, but no
        more than its bytes would cost elsewhere: at the price of the last gap needed if gaps were paid for, cheapest
        first.
        """
        paid: dict[int, _Entry] = {}
        for entry in sorted(entries):
            if entry[0] > 0.0:
                paid.setdefault(entry[2], entry)
        marginal = 0.0
        for price, fall, _, _ in paid.values():
            if missing_bytes <= 0:
                break
            missing_bytes += int(fall)
            marginal = price
        out = []
        for price, fall, gap, action in entries:
            rank = fall
            if price <= 0.0:
                otherwise = paid[gap][0] if gap in paid else marginal
                copying = int(self.evaluator.tables.gaps[gap, G_OUT] + self.evaluator.tables.gaps[gap, G_IN])
                rank = fall * min(otherwise, marginal) / (copying + 1)
            out.append((price, rank, gap, action))
        return out

    def _entry(self, now: _Cost, then: _Cost, curve: Ints, gap: int, action: int) -> _Entry | None:
        if then[0] == NEVER or then[2] >= now[2]:
            return None
        above = curve > self.budget
        fall = float((curve[above] - self.evaluator.curve()[above]).mean()) if above.any() else 0.0
        return ((then[0] - now[0]) / fall, -fall, gap, action) if fall > 0.0 else None

    def _reach(
        self, codes: Codes, heap: list[_Entry], actions: tuple[int, ...], *, until: int, give_up_ns: int
    ) -> Codes:
        """Change gaps, cheapest first, until the budget is met."""
        heapq.heapify(heap)
        now, curve = self._judge(codes), self.evaluator.curve().copy()
        fresh = False
        while now[2] > 0 and self.count < until and now[0] < give_up_ns:
            if not heap:
                if fresh:
                    break
                heap, fresh = self._prices(codes, actions), True  # what was useless before may be useful now
                continue
            _, _, gap, action = heapq.heappop(heap)
            if codes[gap] != KEEP and (action != SYNC or codes[gap] == SYNC) and not fresh:
                continue  # something was done about this gap; only waiting for it frees more
            then = self._changed(codes, gap, action)
            entry = self._entry(now, then, curve, gap, action)
            if entry is None:
                continue
            if heap and entry[0] > 0.0 and entry[0] > 1.02 * heap[0][0]:
                heapq.heappush(heap, entry)
                continue
            codes[gap] = action
            now, curve, fresh = then, self.evaluator.curve().copy(), False
        return codes if now[2] == 0 else self._force(codes)

    def _force(self, codes: Codes) -> Codes:
        """Meet the budget whatever it costs: wait for swaps wherever memory is above it, at last everywhere."""
        gaps = self.evaluator.tables.gaps
        for _ in range(4):
            if self._judge(codes)[2] == 0:
                return codes
            above = np.concatenate([[0], np.cumsum(self.evaluator.curve() > self.budget)])
            codes[above[gaps[:, G_END] + 1] > above[gaps[:, G_START]]] = SYNC
        return np.full(len(codes), SYNC, np.int8)

    def _improve(self, codes: Codes) -> Codes:
        """Change single gaps for the better, the highest win first, until nothing helps."""
        now = self._judge(codes)
        changed = True
        while changed and self.count < self.most:
            changed = False
            for _, action, gap in sorted(self._wins(codes, now)):
                then = self._changed(codes, gap, action)
                if self._is_better(then, now, action):
                    codes[gap] = action
                    now, changed = then, True
        return codes

    def _wins(self, codes: Codes, now: _Cost) -> list[tuple[int, int, int]]:
        """(minus nanoseconds won, action, gap) of every single change that is for the better."""
        wins = []
        for gap in np.flatnonzero(codes != KEEP).tolist():
            if self.count >= self.most:
                break
            for action in (KEEP, *_ACTIONS):
                if action == codes[gap]:
                    continue
                then = self._changed(codes, gap, action)
                if self._is_better(then, now, action):
                    wins.append((then[0] - now[0], action, gap))
                if action == KEEP and then[0] >= now[0]:
                    break  # not even keeping it would win time: nothing else will
        return wins

    @staticmethod
    def _is_better(then: _Cost, now: _Cost, action: int) -> bool:
        """Within the budget and faster, or as fast with less to do."""
        return then[2] == 0 and (then[0] < now[0] or (then[0] == now[0] and action == KEEP))
