"""Local search over plans: greedy by price, judged by the exact evaluator, then improved as long as it helps.

A price is nanoseconds per byte by which less stands above the budget, summed over all ticks. Prices come from
evaluating the whole plan with one gap changed, so stalls, busy lanes and chains of replays are all in them. They wait
in a heap and are brought up to date only when they come to the top. Fewer ticks are above the budget as the search goes
on, so an old price is nearly always too low and is asked for again in time.

What is recomputed is shared first: a chain of gaps then costs each of its ops once, as it does for a checkpointed
block, and the prices of gaps add up. To throw a value away again is tried one gap at a time.

Where a search ends depends on where it started: from programs of nearly the same budget, on ResNet-152 between 0.2 and
0.7 % above the bound. Plans differ in what is on the lanes, one large storage or four smaller ones, and no change of a
few gaps leads from one to the other. So what the starts led to is mixed: some gaps as another plan has them, the rest
as the best has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from legroom.bound import Bound
from legroom.evaluate import KEEP, OVERLAP, RECOMPUTE, SHARED, SYNC, Evaluator
from legroom.kernels import loops
from legroom.kernels.codes import Codes
from legroom.tables import (
    G_BYTES,
    G_END,
    G_IN,
    G_OUT,
    G_START,
    G_VALUE,
    H_DROP,
    H_REPLAY,
    H_REPLAY_OP,
    NEVER,
    O_NS,
    V_WRITER,
    Floats,
    Ints,
)

ACTIONS = (OVERLAP, SHARED)
_LAST_RESORTS = (RECOMPUTE, SYNC)  # near the floor only these free enough: to throw away again, and to wait for swaps
_STARTS = {
    "all actions": ACTIONS,
    "swaps": (OVERLAP,),
    "replays": (SHARED,),
    "nothing shared": (OVERLAP, RECOMPUTE),
}
CODES = 1 + max(*ACTIONS, *_LAST_RESORTS)
_IN_VAIN, _HOT_IN_VAIN = 300, 2000  # exchanges without a gain after which the search ends
_OFF, _FAR_OFF = 1.25, 2.0  # times: how far prices are off at most
_MOST_UNDONE = 16  # gaps in an exchange: about what a block of a transformer has
_ONE_EXCHANGE = 300  # evaluations
_SLOW, _SLOW_HOT = 1.05, 1.03  # times the best: what is not faster is not mixed with it
_CLOSE, _KEPT_AGAIN = 1.003, 40  # times the best: in what is faster, so many gaps are tried to be kept again
_LEAST_PRICED = 20  # gaps
# (temperature at first, as a share of the plain step; how often two gaps change at once). Steps differ in what they ask
# for: of 50 random ones of 6 to 40 gaps, by which these were chosen, all eight missed the best plan known by more than
# 1 % once, the first alone with as many changes in two runs as these have in six four times, and none of them 11 times.
_ANNEALINGS = ((0.1, 0.3), (0.03, 0.7), (0.01, 0.3), (0.3, 0.5), (0.03, 0.3), (0.1, 0.7), (0.01, 0.7), (0.3, 0.3))
MOST_ANNEALED = 50  # gaps; with more, random changes find too little
CHANGES = 125  # of a gap, in each annealing
_COLDEST = 2e-4
_PENALTY_GROWS = 1.002  # with each change while the plan is above the budget; else it falls

_Cost = tuple[int, int, int]  # as Evaluator.judge() says


class Prices(NamedTuple):
    """Of single changes: the price, the rank among equals (minus the bytes by which memory falls over the ticks above
    the budget), and where the change is: gap * CODES + action."""

    prices: Floats
    ranks: Floats
    places: Ints

    @property
    def gaps(self) -> Ints:
        return self.places // CODES

    @property
    def actions(self) -> Ints:
        return self.places % CODES

    def some(self, which: Any) -> Prices:
        return Prices(self.prices[which], self.ranks[which], self.places[which])


_NO_PRICES = Prices(np.zeros(0), np.zeros(0), np.zeros(0, np.int64))


class Search:
    """Looks for the fastest plan within a budget. `feasible`: the start is; by default that of least peak."""

    def __init__(
        self, evaluator: Evaluator, budget_bytes: int, evaluations: int, *, start: Codes | None = None
    ) -> None:
        self.evaluator = evaluator
        self.budget = budget_bytes
        self.count = 0
        self.most = evaluations
        # By place, the price and the rank when last asked for; not a number where nobody has asked.
        self._known = np.full((evaluator.gaps * CODES, 2), np.nan)
        self.found: list[tuple[int, Codes]] = []  # nanoseconds of a plan within the budget
        self.best = np.full(evaluator.gaps, SYNC, np.int8) if start is None else start
        self.best_ns, _, excess = self._judge(self.best)
        self.feasible = excess == 0
        self.found_from = "waiting for every swap"

    def greedy(self) -> None:
        """Start from keeping everything: with all actions, with some; and unshared, where memory is short for that."""
        kept = np.full(self.evaluator.gaps, KEEP, np.int8)
        prices = self.prices(kept, ACTIONS, np.arange(len(kept)))
        # While all else is kept there is nothing to share.
        alone = prices.some(prices.actions == SHARED)
        alone = alone._replace(places=alone.places - SHARED + RECOMPUTE)
        prices = Prices(*(np.concatenate(both) for both in zip(prices, alone, strict=True)))
        for name, actions in _STARTS.items():
            if name == "nothing shared" and not (self.best == SYNC).any():
                break  # what is shared takes memory, but there is enough
            start = prices.some(np.isin(prices.actions, actions))
            reached = self._reach(kept.copy(), start, actions, until=self._share(), give_up_ns=self.best_ns)
            self.consider(name, self._force(reached))

    def start_from(self, name: str, codes: Codes) -> None:
        """Start from a plan that may be above the budget, or a recomputation of which may be impossible."""
        codes = codes.copy()
        if self._judge(codes)[0] == NEVER:
            codes[(codes == SHARED) | (codes == RECOMPUTE)] = KEEP
        reached = self._reach(codes, _NO_PRICES, ACTIONS, until=self._share(), give_up_ns=NEVER)
        self.consider(name, self._improve(self._force(reached), until=self._share()))

    def start_greedy(self, name: str, prices: Prices, *, until: int, give_up_ns: int) -> None:
        """Start from keeping everything with other prices than those that are true."""
        kept = np.full(self.evaluator.gaps, KEEP, np.int8)
        reached = self._reach(kept, prices, ACTIONS, until=until, give_up_ns=give_up_ns)
        if self._judge(reached)[2] == 0:
            self.consider(name, self._improve(reached, until=self.most))

    def finish(self) -> None:
        """Improve the best so far as long as evaluations are left, and any change helps."""
        self.consider(self.found_from, self._improve(self.best.copy(), until=self._share()))
        self.exchange(np.random.default_rng(0))
        self.consider(self.found_from, self._improve(self.best.copy(), until=self.most))

    def anneal(self, changes: int, actions: Sequence[int]) -> None:
        """Random changes from the best so far, for the worse too while it is hot: so many, once for each annealing.

        Above the budget a plan pays a penalty. It follows the plan to and fro across the budget, as the right one is
        not known: too low, and no plan is within it; too high, and there is no way from one that is to a better one.
        """
        rng = np.random.default_rng(0)
        plain_ns, _, missing = self._judge(np.full(self.evaluator.gaps, KEEP, np.int8))
        for hot, pairs in _ANNEALINGS:
            start, codes, found = self.best, self.best.copy(), self.best.copy()
            penalty = 3.0 * (self.best_ns - 0.98 * plain_ns) / max(1, missing)
            gaps = rng.integers(len(codes), size=(changes, 2))
            chosen = rng.choice(np.array(actions), size=(changes, 2))
            many, luck = 1 + (rng.random(changes) < pairs), rng.random(changes)
            found_ns = self._loop(
                loops.anneal, codes, self.best_ns, gaps, chosen, many, luck, plain_ns * hot,
                (_COLDEST / hot) ** (1.0 / max(1, changes)), penalty, _PENALTY_GROWS, start, found,
            )[0]  # fmt: skip
            if found_ns < NEVER:
                self.consider("annealing", found)

    def consider(self, name: str, codes: Codes) -> None:
        """Take a plan if it is the best so far. If it is only within the budget, to be mixed with the best."""
        ns, _, excess = self._judge(codes)
        if excess == 0:
            self.found.append((ns, codes))
            if ns < self.best_ns:
                self.best, self.best_ns, self.found_from = codes, ns, name

    def _share(self) -> int:
        """How far the next part of the search may count."""
        return self.count + (self.most - self.count) // 3

    def _judge(self, codes: Codes) -> _Cost:
        self.count += 1
        return self.evaluator.judge(codes, self.budget)

    def _judge_as_start(self, codes: Codes) -> _Cost:
        self.count += 1
        return self.evaluator.judge_as_start(codes, self.budget)

    def _loop(self, compiled: Callable[..., Any], *arguments: object) -> Any:
        """What a loop returns beside how many plans it judged."""
        judged, *told = self.evaluator.loop(compiled, self.budget, *arguments)
        self.count += judged
        return told

    def _try(self, codes: Codes, places: Ints, now_ns: int, how: int, most: int = 0) -> tuple[Ints, int, int]:
        """(the costs of single changes, nanoseconds, changes made); see loops.try_changes()."""
        costs = np.full((len(places), 2), NEVER)
        now_ns, taken = self._loop(loops.try_changes, codes, places, CODES, now_ns, most, how, costs)
        return costs, now_ns, taken

    def prices(self, codes: Codes, actions: tuple[int, ...], gaps: Ints) -> Prices:
        """What each single change costs, where it helps."""
        now_ns, _, excess = self._judge_as_start(codes)
        places = _places(codes, gaps, actions)[: max(0, self.most - self.count)]
        costs = self._try(codes, places, 0, loops.ALL)[0]
        falls = excess - costs[:, 1]
        helps = (costs[:, 0] != NEVER) & (falls > 0)
        costs, falls = costs[helps], falls[helps]
        return self._rank_free(Prices((costs[:, 0] - now_ns) / falls, -falls.astype(float), places[helps]), excess)

    def _promising(self, codes: Codes, many: int) -> Ints:
        """The gaps to be priced: so many at most, those that save most above the budget for the time of their op."""
        tables = self.evaluator.tables
        if len(codes) <= many:
            return np.arange(len(codes))
        self._judge(codes)
        above = np.concatenate([[0], np.cumsum(self.evaluator.curve() > self.budget)])
        falls = (above[tables.gaps[:, G_END] + 1] - above[tables.gaps[:, G_START]]) * tables.gaps[:, G_BYTES]
        writers = np.append(tables.values[:, V_WRITER], -1)[tables.gaps[:, G_VALUE]]
        hosted = tables.host[[H_DROP, H_REPLAY, H_REPLAY_OP]].sum()
        prices = (tables.ops[writers, O_NS] + hosted) / np.maximum(falls, 1)
        order = np.argsort(np.where(falls > 0, prices, np.inf), kind="stable")
        return order[: min(many, int((falls > 0).sum()))]

    def _rank_free(self, entries: Prices, missing_bytes: int) -> Prices:
        """Of changes that cost nothing, put first those that save most per nanosecond of copying.

        Swaps are free only while the lanes have room. What a swap saves is what its gap would cost otherwise, but no
        more than its bytes would cost elsewhere: at the price of the last gap needed if gaps were paid for, cheapest
        first.
        """
        paid = entries.some(np.lexsort((entries.places, entries.ranks, entries.prices)))
        paid = paid.some(paid.prices > 0.0)
        paid = paid.some(np.sort(np.unique(paid.gaps, return_index=True)[1]))  # the cheapest of each gap
        needed = np.searchsorted(np.cumsum(-paid.ranks), missing_bytes) if missing_bytes > 0 else -1
        marginal = paid.prices[min(needed, len(paid.prices) - 1)] if needed >= 0 and len(paid.prices) else 0.0
        otherwise = np.full(self.evaluator.gaps, marginal)
        otherwise[paid.gaps] = paid.prices
        copying = self.evaluator.tables.gaps[entries.gaps, G_OUT] + self.evaluator.tables.gaps[entries.gaps, G_IN]
        saves = entries.ranks * np.minimum(otherwise[entries.gaps], marginal) / (copying + 1)
        out = entries._replace(ranks=np.where(entries.prices <= 0.0, saves, entries.ranks))
        self._known[out.places, 0], self._known[out.places, 1] = out.prices, out.ranks
        return out

    def _reach(self, codes: Codes, heap: Prices, actions: tuple[int, ...], *, until: int, give_up_ns: int) -> Codes:
        """Change gaps, cheapest first, until the budget is met or the search has cost too much."""
        now_ns, _, excess = self._judge_as_start(codes)
        fresh = False
        while True:
            now_ns, excess, fresh = self._loop(
                loops.reach, codes, heap.prices, heap.ranks, heap.places, np.empty_like(heap.places), CODES, now_ns,
                excess, until - self.count, give_up_ns, fresh, SYNC, self._known,
            )  # fmt: skip
            if excess <= 0 or self.count >= until or now_ns >= give_up_ns or fresh:
                return codes
            # What was useless before may be useful now.
            every = (*actions, *_LAST_RESORTS)
            many = max(_LEAST_PRICED, (until - self.count) // (3 * len(every)))  # the rest is left to act on prices
            heap, fresh = self.prices(codes, every, self._promising(codes, many)), True

    def _force(self, codes: Codes) -> Codes:
        """Meet the budget whatever it costs: wait for swaps wherever memory is above it, at last everywhere."""
        gaps = self.evaluator.tables.gaps
        for _ in range(4):
            if self._judge(codes)[2] == 0:
                return codes
            above = np.concatenate([[0], np.cumsum(self.evaluator.curve() > self.budget)])
            codes[above[gaps[:, G_END] + 1] > above[gaps[:, G_START]]] = SYNC
        return np.full(len(codes), SYNC, np.int8)

    def exchange(self, rng: np.random.Generator, *, start: int = 0, hot: float = 0.0) -> None:
        """Undo some changes or mix in another plan, and pay anew: with prices a little off, so that other gaps come
        first than did before.

        start: the place of the plan to begin with among what was found, where it is hot. hot: what is slower than the
        plan before by up to this share is gone on from, too, less and less of it.
        """
        ranked = self._ranked() if hot else [found for found in self.found if found[0] < _SLOW * self.best_ns]
        others = [codes for _, codes in ranked]
        best_ns, best = ranked[start] if 0 < start < len(ranked) else (self.best_ns, self.best)
        now, now_ns = best, best_ns
        began, vain = self.count, 0
        while vain < (_HOT_IN_VAIN if hot else _IN_VAIN) and self.count < self.most and (now != KEEP).any():
            most_ns = int(now_ns * (1.0 + hot * (self.most - self.count) / (self.most - began)))
            mixed = self._mixed(now, others[rng.integers(len(others))], rng) if others and rng.random() < 0.5 else None
            trial = self._undone(now, rng) if mixed is None else mixed
            wide = _FAR_OFF if hot and rng.random() < 0.5 else _OFF
            heap = self._prices_off(now, trial, rng.uniform(1.0 / wide, wide, (len(trial), CODES)))
            until = min(self.most, self.count + _ONE_EXCHANGE)
            trial = self._reach(trial, heap, ACTIONS, until=until, give_up_ns=most_ns)
            ns, _, excess = self._judge(trial)
            if mixed is not None and excess == 0 and ns < _CLOSE * best_ns:
                ns = self._keep_again(trial, ns, rng)
            vain += 1
            if excess == 0 and ns < most_ns:
                now, now_ns = trial, ns
            if excess == 0 and ns < best_ns:
                best, best_ns, vain = trial, ns, 0
        self.found.append((best_ns, best))
        if best_ns < self.best_ns:
            self.best, self.best_ns = best, best_ns

    def _prices_off(self, now: Codes, trial: Codes, factors: Floats) -> Prices:
        """Known prices of what a trial keeps, each multiplied by a factor; of what the plan before did there, all."""
        room = Prices(np.empty(len(self._known)), np.empty(len(self._known)), np.empty(len(self._known), np.int64))
        return room.some(slice(loops.prices_off(now, trial, factors, self._known, *room)))

    def _ranked(self) -> list[tuple[int, Codes]]:
        """Different plans that were found, the fastest first."""
        different = {codes.tobytes(): (ns, codes) for ns, codes in self.found if ns < _SLOW_HOT * self.best_ns}
        return sorted(different.values(), key=lambda found: found[0])

    @staticmethod
    def _mixed(codes: Codes, other: Codes, rng: np.random.Generator) -> Codes | None:
        """A plan with some gaps as another has them, neighbours or any; None where they are the same plan."""
        differ = (other != codes).nonzero()[0]
        if not len(differ):
            return None
        some = int(rng.integers(1, len(differ) + 1))
        order = np.roll(differ, -rng.integers(len(differ))) if rng.random() < 0.5 else rng.permutation(differ)
        out = codes.copy()
        out[order[:some]] = other[order[:some]]
        return out

    def _keep_again(self, codes: Codes, ns: int, rng: np.random.Generator) -> int:
        """Two plans together do more than is needed: keep what can be kept. Returns the nanoseconds of the plan."""
        gaps = rng.permutation(codes.nonzero()[0])[:_KEPT_AGAIN]
        return self._try(codes, gaps * CODES + KEEP, ns, loops.TAKE)[1]

    def _undone(self, codes: Codes, rng: np.random.Generator) -> Codes:
        """With some gaps kept again: neighbours, such as a layer has; or alike, as in all layers; or any."""
        changed = codes.nonzero()[0]
        some = int(rng.integers(2, _MOST_UNDONE + 1))
        how = rng.integers(3)
        if how == 0:
            first = int(rng.integers(len(changed)))
            undone = changed[first : first + some]
        else:
            one = changed[rng.integers(len(changed))]
            sizes = self.evaluator.tables.gaps[:, G_BYTES]
            alike = (codes == codes[one]) & (sizes == sizes[one])
            undone = rng.permutation(alike.nonzero()[0] if how == 1 else changed)[:some]
        out = codes.copy()
        out[undone] = KEEP
        return out

    def _improve(self, codes: Codes, *, until: int) -> Codes:
        """Change single gaps for the better, the highest win first, until nothing helps."""
        now_ns = self._judge(codes)[0]
        changed = 1
        while changed and self.count < until:
            places = _places(codes, codes.nonzero()[0], (KEEP, *ACTIONS, *_LAST_RESORTS))
            ns, excess = self._try(codes, places, now_ns, loops.WIN, until - self.count)[0].T
            gaps, chosen = places // CODES, places % CODES
            order = np.lexsort((gaps, chosen, ns))
            wins = order[((excess == 0) & ((ns < now_ns) | ((ns == now_ns) & (chosen == KEEP))))[order]]
            _, now_ns, changed = self._try(codes, places[wins], now_ns, loops.TAKE)
        return codes


def _places(codes: Codes, gaps: Ints, actions: tuple[int, ...]) -> Ints:
    """Of all changes of these gaps to these actions, gap by gap."""
    places: Ints = (gaps[:, None] * CODES + np.array(actions)).ravel()
    others: Ints = places[codes[places // CODES] != places % CODES]
    return others


def rounded(relaxed: Bound) -> Codes:
    """Each gap as the linear program mostly has it."""
    recompute = relaxed.recomputed > np.maximum(relaxed.swapped, 0.5)
    return np.where(recompute, SHARED, np.where(relaxed.swapped > 0.5, OVERLAP, KEEP)).astype(np.int8)
