"""The default planner: greedy by price, judged by the exact evaluator, then improved as long as it helps.

Guarantee: a plan for every budget that has one, down to the floor (all swaps synchronous). Not optimal.

A price is nanoseconds per byte by which less stands above the budget, summed over all ticks. Prices come from
evaluating the whole plan with one gap changed, so stalls, busy lanes and chains of replays are all in them. They wait
in a heap and are brought up to date only when they come to the top. Fewer ticks are above the budget as the search goes
on, so an old price is nearly always too low and is asked for again in time. Three searches start from keeping
everything: with all actions, with swaps only, with replays only; a fourth, where memory is too short to share. The best
goes on: gaps change one at a time for the better, and where no single change helps, some are undone together and paid
for anew.

What is recomputed is shared first: a chain of gaps then costs each of its ops once, as it does for a checkpointed
block, and the prices of gaps add up. To throw a value away again is tried one gap at a time.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from legroom.evaluate import KEEP, OVERLAP, RECOMPUTE, SHARED, SYNC, Evaluator
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.kernels import Codes
from legroom.plan import Plan
from legroom.tables import G_BYTES, G_END, G_IN, G_OUT, G_START, NEVER

_ACTIONS = (OVERLAP, SHARED)
_LAST_RESORTS = (RECOMPUTE, SYNC)  # near the floor only these free enough: to throw away again, and to wait for swaps
_STARTS = {
    "all actions": _ACTIONS,
    "swaps": (OVERLAP,),
    "replays": (SHARED,),
    "nothing shared": (OVERLAP, RECOMPUTE),
}
_CODES = 1 + max(*_ACTIONS, *_LAST_RESORTS)
_IN_VAIN = 80  # exchanges without a gain after which the search ends
_MOST_UNDONE = 16  # gaps in an exchange: about what a block of a transformer has
_ONE_EXCHANGE = 300  # evaluations


@dataclass(frozen=True, slots=True)
class Auto:
    evaluations: int = 16000  # of the whole search; at 350 gaps one takes 30 to 60 µs on an ARM server core

    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        search = _Search(Evaluator(trace, hardware), budget_bytes, self.evaluations)
        codes, start = search.best()
        counts = np.bincount(codes, minlength=5)
        recomputed = counts[RECOMPUTE] + counts[SHARED]
        done = f"{counts[OVERLAP]} swapped, {counts[SYNC]} swapped with waiting, {recomputed} recomputed"
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
        self.known: dict[tuple[int, int], _Entry] = {}  # (gap, action): its price when last asked for

    def best(self) -> tuple[Codes, str]:
        """The best plan found, feasible if any is; and the search it came from."""
        codes = np.full(self.evaluator.gaps, KEEP, np.int8)
        if self._judge(codes)[2] == 0:
            return codes, "keeping everything"
        sync = np.full(self.evaluator.gaps, SYNC, np.int8)
        if self._judge(sync)[2] > 0:
            return sync, "below the floor"
        prices = self._prices(codes, _ACTIONS)
        # While all else is kept there is nothing to share.
        prices += [(price, rank, gap, RECOMPUTE) for price, rank, gap, action in prices if action == SHARED]
        best = self._judge(sync)[0], "waiting for every swap", sync
        for name, actions in _STARTS.items():
            if name == "nothing shared" and not (best[2] == SYNC).any():
                break  # what is shared takes memory, but there is enough
            start = [entry for entry in prices if entry[3] in actions]
            reached = self._reach(codes.copy(), start, actions, until=self._share(), give_up_ns=best[0])
            result = self._force(reached)
            ns = self._judge(result)[0]
            if ns < best[0]:
                best = ns, name, result
        codes = self._exchange(self._improve(best[2], until=self._share()))
        return self._improve(codes, until=self.most), best[1]

    def _share(self) -> int:
        """How far the next part of the search may count."""
        return self.count + (self.most - self.count) // 3

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
        """What each single change costs, where it helps."""
        now = self._judge(codes)
        entries = []
        for gap in range(len(codes)):
            for action in actions:
                if codes[gap] != action and self.count < self.most:
                    entry = self._entry(now, self._changed(codes, gap, action), gap, action)
                    entries += [] if entry is None else [entry]
        return self._rank_free(entries, now[2])

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
            self.known[gap, action] = out[-1]
        return out

    def _entry(self, now: _Cost, then: _Cost, gap: int, action: int) -> _Entry | None:
        fall = now[2] - then[2]
        if then[0] == NEVER or fall <= 0:
            return None
        return (then[0] - now[0]) / fall, -float(fall), gap, action

    def _reach(
        self, codes: Codes, heap: list[_Entry], actions: tuple[int, ...], *, until: int, give_up_ns: int
    ) -> Codes:
        """Change gaps, cheapest first, until the budget is met or the search has cost too much."""
        heapq.heapify(heap)
        now = self._judge(codes)
        fresh = False
        while now[2] > 0 and self.count < until and now[0] < give_up_ns:
            if not heap:
                if fresh:
                    break
                # What was useless before may be useful now.
                heap, fresh = self._prices(codes, (*actions, *_LAST_RESORTS)), True
                heapq.heapify(heap)
                continue
            _, _, gap, action = heapq.heappop(heap)
            if codes[gap] != KEEP and (action != SYNC or codes[gap] == SYNC) and not fresh:
                continue  # something was done about this gap; only waiting for it frees more
            then = self._changed(codes, gap, action)
            entry = self._entry(now, then, gap, action)
            if entry is None:
                continue
            self.known[gap, action] = entry
            if heap and entry[0] > 0.0 and entry[0] > 1.02 * heap[0][0]:
                heapq.heappush(heap, entry)
                continue
            codes[gap] = action
            now, fresh = then, False
        return codes

    def _force(self, codes: Codes) -> Codes:
        """Meet the budget whatever it costs: wait for swaps wherever memory is above it, at last everywhere."""
        gaps = self.evaluator.tables.gaps
        for _ in range(4):
            if self._judge(codes)[2] == 0:
                return codes
            above = np.concatenate([[0], np.cumsum(self.evaluator.curve() > self.budget)])
            codes[above[gaps[:, G_END] + 1] > above[gaps[:, G_START]]] = SYNC
        return np.full(len(codes), SYNC, np.int8)

    def _exchange(self, codes: Codes) -> Codes:
        """Undo some changes and pay anew, with prices a little off so that other gaps come first than did before."""
        rng = np.random.default_rng(0)
        best = self._judge(codes)[0]
        vain = 0
        while vain < _IN_VAIN and self.count < self.most and (codes != KEEP).any():
            trial = self._undone(codes, rng)
            off = rng.uniform(0.8, 1.25, (len(codes), _CODES))
            heap = []
            for price, rank, gap, action in self.known.values():
                if trial[gap] == KEEP:
                    factor = float(off[gap, action])
                    heap.append((price * factor, rank * factor, gap, action))
            until = min(self.most, self.count + _ONE_EXCHANGE)
            trial = self._reach(trial, heap, _ACTIONS, until=until, give_up_ns=best)
            ns, _, excess = self._judge(trial)
            vain += 1
            if excess == 0 and ns < best:
                codes, best, vain = trial, ns, 0
        return codes

    def _undone(self, codes: Codes, rng: np.random.Generator) -> Codes:
        """With some gaps kept again: neighbours, such as a layer has; or alike, as in all layers; or any."""
        changed = np.flatnonzero(codes != KEEP)
        some = int(rng.integers(2, _MOST_UNDONE + 1))
        how = rng.integers(3)
        if how == 0:
            first = int(rng.integers(len(changed)))
            undone = changed[first : first + some]
        else:
            one = rng.choice(changed)
            sizes = self.evaluator.tables.gaps[:, G_BYTES]
            alike = (codes == codes[one]) & (sizes == sizes[one])
            undone = rng.permutation(np.flatnonzero(alike) if how == 1 else changed)[:some]
        out = codes.copy()
        out[undone] = KEEP
        return out

    def _improve(self, codes: Codes, *, until: int) -> Codes:
        """Change single gaps for the better, the highest win first, until nothing helps."""
        now = self._judge(codes)
        changed = True
        while changed and self.count < until:
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
            for action in (KEEP, *_ACTIONS, *_LAST_RESORTS):
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
