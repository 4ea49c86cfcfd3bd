"""Mixed integer programming with HiGHS: for small traces, and as an oracle for the other planners.

This project's own. The program is that of `legroom.bound` with whole gaps in place of fractions, and more of what
`lower()` does. Chains: where a replay needs a storage that is away, that comes back at this tick and stays (it is
shared), or its op runs once more and it goes again. And where it has room for that, whole copies: memory is free when
all of a storage has left, and taken when its copy back begins.

Guarantee: a plan for every budget that has one, with the bound of the linear program, below which no plan is. The notes
give that of the integer program, and whether it was solved to its end. It still grants more than a schedule can do:
compute may wait for a copy at any tick; memory inside a tick, where replays have their workspace, is free; ops whose
results are never in memory run once for all replays that need them; of a long chain only the last ticks before the end
of a gap are looked at (`chain`); with many gaps bytes leave and arrive little by little (`whole_copies`). So its
solution is a proposal: the exact evaluator judges it, what is above the budget is repaired there, one to three gaps at
a time are changed as long as that helps, and where gaps are few the result is annealed. On random traces and chains of
up to 7 gaps that gave the best of all plans in each of some hundred cases.

The same input gives the same plan as long as the solver ends before its time limit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from legroom import tables as t
from legroom.bound import Bound, Changes, Relaxation, Return, lower_bound
from legroom.errors import BudgetError
from legroom.evaluate import KEEP, OVERLAP, RECOMPUTE, SHARED, SYNC, Evaluator
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.kernels import loops
from legroom.kernels.codes import Codes
from legroom.plan import Plan
from legroom.planners import local
from legroom.planners.floors import descended
from legroom.planners.local import CHANGES, MOST_ANNEALED
from legroom.tables import Floats, Ints, Tables
from legroom.units import format_bytes

_LISTED = 100_000  # combinations of gaps that are all looked at; of more, some are drawn
SWAPS, REPLAYS = (OVERLAP, SYNC), (SHARED, RECOMPUTE)
_OUT, _IN = (t.R_OUT, t.R_DUPLEX_OUT), (t.R_IN, t.R_DUPLEX_IN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimal:
    time_limit_seconds: float = 30.0  # of the solver; with what comes before and after, a minute is enough
    gap: float = 1e-4  # the solver ends this close to its own bound, relative
    chain: int = 24  # ticks before the end of a gap at which replays may ask for it; a block of a GPT has 14
    # With more gaps than this chains are left to the search: the program with them is three times as large, and in 60 s
    # led to slower plans for a GPT of 340 gaps (161.6 ms in place of 160.8, 181.1 in place of 180.9).
    chained_gaps: int = 100
    # With more pairs of a gap and a tick within it than this, copies stay fluid. The 1,534 of VGG16 lift what is proven
    # at a quarter of its range on the h200 preset from 59.9 to 63.3 ms in ten minutes (the best plan known takes 65.1);
    # with the 29,000 of a MobileNet not even the first linear program is solved in a minute.
    whole_copies: int = 5000
    evaluations: int = 100_000  # of the search that follows

    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        return solve(self, trace, hardware, budget_bytes, planner="optimal", actions=(*SWAPS, *REPLAYS))


def solve(
    knobs: Optimal, trace: Trace, hardware: Hardware, budget_bytes: int, *, planner: str, actions: tuple[int, ...]
) -> Plan:
    """The best plan found with these actions; BudgetError with the least peak that they reach where there is none."""
    evaluator = Evaluator(trace, hardware)
    bound = lower_bound(trace, hardware, budget_bytes)
    codes, said = np.full(evaluator.gaps, KEEP, np.int8), "not needed, as everything can be kept"
    if evaluator.judge(codes, budget_bytes)[2] > 0:
        search = Search(evaluator, budget_bytes, actions, knobs.evaluations)
        found, said = _searched(search, bound, knobs)
        if found is None:
            least = search.least_peak()
            floor = evaluator.evaluate(least)[1]
            if evaluator.gaps <= MOST_ANNEALED:  # with more, every step takes as long as a plan
                least, floor = descended(_lower(search, trace, hardware, knobs), (least, floor), budget_bytes)
            if floor > budget_bytes:
                raise _too_small(planner, floor, budget_bytes)
            found = search.best([least])
            assert found is not None
        codes = found
        if evaluator.gaps <= MOST_ANNEALED:
            annealed = local.Search(evaluator, budget_bytes, knobs.evaluations, start=found)
            for some in dict.fromkeys(((KEEP, *actions), (KEEP, *REPLAYS))):  # see auto for the second
                annealed.anneal(min(CHANGES * evaluator.gaps, knobs.evaluations // 8), some)
            codes = annealed.best
    notes = (f"integer program: {said}",)
    plan = evaluator.plan(codes, planner=planner, budget_bytes=budget_bytes, notes=notes)
    return replace(plan, lower_bound_seconds=bound.seconds)


def _searched(search: Search, bound: Bound, knobs: Optimal) -> tuple[Codes | None, str]:
    """The best plan within the budget, and what is to be said of the solution that it came from."""
    starts, said = [_rounded(bound.swapped, bound.recomputed, search.actions)], "not possible"
    if bound.seconds < math.inf:
        solution, said = _Whole(search.evaluator.tables, search.budget, search.actions[1:], knobs).solved()
        starts += [] if solution is None else [solution]
    if SYNC in search.actions:
        starts.append(search.least_peak())
    return search.best(starts), said


def _lower(search: Search, trace: Trace, hardware: Hardware, knobs: Optimal) -> Callable[[int], tuple[Codes, int]]:
    def find(budget_bytes: int) -> tuple[Codes, int]:
        tighter = Search(search.evaluator, budget_bytes, search.actions[1:], knobs.evaluations)
        codes, _ = _searched(tighter, lower_bound(trace, hardware, budget_bytes), knobs)
        kept: Codes = np.full(search.evaluator.gaps, KEEP, np.int8)
        return (kept, trace.peak_bytes) if codes is None else (codes, search.evaluator.evaluate(codes)[1])

    return find


def _too_small(planner: str, floor: int, budget: int) -> BudgetError:
    text = f"the least peak that {planner} reaches is {format_bytes(floor)} ({floor} bytes)"
    return BudgetError(
        f"{text}, the budget is {format_bytes(budget)}; give it that much, or let another planner try",
        budget_bytes=budget,
        floor_bytes=floor,
    )


def _rounded(swapped: Floats, recomputed: Floats, actions: tuple[int, ...]) -> Codes:
    swap = OVERLAP if OVERLAP in actions else KEEP
    codes = np.where(recomputed > np.maximum(swapped, 0.5), SHARED, np.where(swapped > 0.5, swap, KEEP))
    return codes.astype(np.int8)


class _Whole(Relaxation):
    """The relaxation with whole gaps and whole copies, and with what a replay needs from other gaps."""

    def __init__(self, tables: Tables, budget_bytes: int, actions: tuple[int, ...], knobs: Optimal) -> None:
        self.knobs = knobs
        self.chain = knobs.chain if len(tables.gaps) <= knobs.chained_gaps else 0
        self.alone: dict[int, int] = {}  # gap: column, whether it is thrown away by replays that need it
        # (gap, tick kept): columns, whether all of it has been copied out by then, and whether its copy back has begun
        self.left: dict[tuple[int, int], int] = {}
        self.begun: dict[tuple[int, int], int] = {}
        super().__init__(tables, budget_bytes)
        kinds = self.copied, self.reused, self.recomputed, self.alone, self.left, self.begun
        self.whole = [column for kind in kinds for column in kind.values()]
        for column in () if OVERLAP in actions else (*self.copied.values(), *self.reused.values()):
            self.program.high[column] = 0.0

    def solved(self) -> tuple[Codes | None, str]:
        """The codes of the best solution found, and what is known about it."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        program, knobs = self.program, self.knobs
        integral = np.zeros(len(program.high))
        integral[self.whole] = 1
        found = milp(
            program.cost,
            integrality=integral,
            bounds=Bounds(np.zeros(len(program.high)), np.array(program.high)),
            constraints=LinearConstraint(program.matrix(), np.array(program.least), np.inf),
            options={"time_limit": knobs.time_limit_seconds, "mip_rel_gap": knobs.gap},
        )
        bound = getattr(found, "mip_dual_bound", None)
        known = "nothing is known" if bound is None else f"its own bound is {bound * self.unit_ns / 1e9:.9f} s"
        if found.x is None:
            return None, f"no solution in {knobs.time_limit_seconds:g} s, {known}"
        ended = "solved" if found.status == 0 else "out of time"
        return self._codes(found.x), f"{ended} at {found.fun * self.unit_ns / 1e9:.9f} s, {known}"

    def _codes(self, columns: Floats) -> Codes:
        swapped, recomputed = self.fractions(columns)
        codes = _rounded(swapped, recomputed, (OVERLAP,))
        for gap, column in self.alone.items():
            if codes[gap] == SHARED and columns[column] > 0.5:
                codes[gap] = RECOMPUTE
        return codes

    def _returns(self) -> dict[int, list[Return]]:
        """From the last op to the first, so that all replays that may need a gap are known before it."""
        asking: dict[int, dict[int, list[int]]] = {}  # gap: tick: the gaps whose replay at that tick reads it
        returns: dict[int, list[Return]] = {}
        again: dict[tuple[int, int], int] = {}  # (gap, tick): column, whether it is made there and thrown away
        for gap in sorted(self.gaps, key=self.maker, reverse=True):
            ticks = sorted(asking.get(gap, {}))
            ticks = ticks[len(ticks) - min(self.chain, len(ticks)) :]
            if ticks:
                self._return(gap, ticks, returns, again)
                for tick in ticks:
                    for reader in asking[gap][tick]:
                        self._ask(gap, tick, self._replayed(reader, tick, returns, again), returns, again)
            if gap in self.recomputed:
                # What happens before the first tick looked at is not known, so nothing follows from it there.
                cut = len(ticks) < len(asking.get(gap, {}))
                for tick in (*ticks[cut:], self.ends[gap]):
                    for other in self._read(gap, tick):
                        asking.setdefault(other, {}).setdefault(tick, []).append(gap)
        return returns

    def _return(
        self, gap: int, ticks: list[int], returns: dict[int, list[Return]], again: dict[tuple[int, int], int]
    ) -> None:
        """The columns of a gap that replays at these ticks may ask for."""
        program, made = self.program, gap in self.recomputed
        backs = [Return(tick, program.column(1.0), program.column(float(made))) for tick in ticks]
        returns[gap] = backs
        for one, next_one in itertools.pairwise(backs):
            program.row((next_one.swapped, 1.0), (one.swapped, -1.0))
            program.row((next_one.recomputed, 1.0), (one.recomputed, -1.0))
        if made:
            self.alone[gap] = program.column(1.0)
            program.row((self.alone[gap], -1.0), (backs[-1].recomputed, -1.0), least=-1.0)
            for tick in ticks:
                again[gap, tick] = program.column(1.0)
                program.row((self.alone[gap], 1.0), (again[gap, tick], -1.0))
                self.replays.append((self.maker(gap), tick, tick, again[gap, tick]))

    def _replayed(
        self, gap: int, tick: int, returns: dict[int, list[Return]], again: dict[tuple[int, int], int]
    ) -> list[tuple[int, float]]:
        """Whether a gap is replayed at a tick, as terms."""
        backs = returns.get(gap, [])
        if tick == self.ends[gap]:
            last = [(backs[-1].recomputed, -1.0)] if backs else []
            return [(self.recomputed[gap], 1.0), *last]
        position = [back.tick for back in backs].index(tick)
        before = [(backs[position - 1].recomputed, -1.0)] if position else []
        return [(backs[position].recomputed, 1.0), *before, (again[gap, tick], 1.0)]

    def _ask(
        self,
        gap: int,
        tick: int,
        replayed: list[tuple[int, float]],
        returns: dict[int, list[Return]],
        again: dict[tuple[int, int], int],
    ) -> None:
        """If something is replayed at a tick that reads this gap's storage, and that is away, it comes back."""
        back = next(back for back in returns[gap] if back.tick == tick)
        asked = [(column, -factor) for column, factor in replayed]
        swapped = [(kind[gap], -1.0) for kind in (self.copied, self.reused) if gap in kind]
        self.program.row((back.swapped, 1.0), *asked, *swapped, least=-1.0)
        if gap in self.recomputed:
            made = (back.recomputed, 1.0), (again[gap, tick], 1.0), (self.recomputed[gap], -1.0)
            self.program.row(*made, *asked, least=-1.0)

    def _read(self, gap: int, tick: int) -> Iterator[int]:
        """The gaps that a replay of this one reads, and that are not over at this tick."""
        tables = self.tables
        todo, seen = [self.maker(gap)], set()
        while todo:
            op = todo.pop()
            if op in seen:
                continue
            seen.add(op)
            todo += self.needs(op, self.starts[gap] + 1, self.ends[gap])
            for value in tables.reads[tables.ops[op, t.O_READS] : tables.ops[op + 1, t.O_READS]].tolist():
                since, until, first, stop = tables.values[value, (t.V_FROM, t.V_UNTIL, t.V_FIRST, t.V_STOP)].tolist()
                for other in range(first, stop) if since <= tick <= until else ():
                    stands = tables.gaps[other, t.G_VALUE] == value and other in self.copied
                    if stands and self.starts[other] < tick < self.ends[other]:
                        yield other

    def _memory(self) -> None:
        super()._memory()
        inside = {gap: range(self.place(self.starts[gap]), self.place(self.ends[gap])) for gap in self.gaps}
        if sum(map(len, inside.values())) > self.knobs.whole_copies:
            return
        for gap, ticks in inside.items():
            self._whole_copy(gap, ticks)
        self._whole_lanes(inside)

    def _whole_copy(self, gap: int, ticks: range) -> None:
        """The columns of a gap, and that its own copies take their time, whatever else is on the lanes."""
        program, first = self.program, ticks.start
        out_time, in_time = (self._copy_time(gap, *rates) for rates in (_OUT, _IN))
        # What comes before the start of the gap is known only if that is a tick which is kept.
        before = self._segment(first) if self.kept[first] == self.starts[gap] else 0.0
        since = [(self.time[first - 1], -1.0)] if first else []
        for tick in ticks:
            left, begun = program.column(1.0), program.column(1.0)
            self.left[gap, tick], self.begun[gap, tick] = left, begun
            away = [(left, 1.0), *self._again(gap), (begun, -1.0)]
            program.row((self.copied[gap], 1.0), (left, -1.0))
            program.row(*away)
            if tick > first:
                program.row((left, 1.0), (self.left[gap, tick - 1], -1.0))
                program.row((begun, 1.0), (self.begun[gap, tick - 1], -1.0))
            program.row((self.time[tick], 1.0), *since, (left, -out_time), least=before)
            rest = [(self.time[ticks.stop], 1.0), (self.time[tick], -1.0)]
            program.row(*rest, *((c, -f * in_time) for c, f in away), least=self._next_segment(tick))
            for back in self.returns.get(gap, []):
                if self.place(back.tick) <= tick:
                    program.row((back.swapped, -1.0), *((c, -f) for c, f in away), least=-1.0)

    def _whole_lanes(self, inside: dict[int, range]) -> None:
        """What has left and what is back, on the lanes and in memory, is made of whole copies."""
        program = self.program
        left: Changes = {}  # all of it by then, of gaps that are over
        back: Changes = {}
        replayed: Changes = {}
        for gap, ticks in inside.items():
            size = self.sizes[gap] / self.unit_bytes
            left.setdefault(ticks.stop, []).append((self.copied[gap], size))
            back.setdefault(ticks.stop, []).extend((c, size) for c, _ in ((self.copied[gap], 1.0), *self._again(gap)))
            if gap in self.recomputed:
                replayed.setdefault(ticks.start, []).append((self.recomputed[gap], size))
                replayed.setdefault(ticks.stop, []).append((self.recomputed[gap], -size))
            for tick, column, factor in self._early(gap, "recomputed"):
                replayed.setdefault(tick, []).append((column, -factor * size))
        all_left = self._running(left, self.total, at_least=True)
        all_back = self._running(back, self.total)
        dropped = self._running(replayed, self.total)
        for tick, top in enumerate(self.tables.ticks[self.kept, t.T_PEAK].tolist()):
            sizes = {gap: self.sizes[gap] / self.unit_bytes for gap, ticks in inside.items() if tick in ticks}
            now_left = [(self.left[gap, tick], size) for gap, size in sizes.items()]
            now_begun = [(self.begun[gap, tick], size) for gap, size in sizes.items()]
            again = [(column, size) for gap, size in sizes.items() for column, _ in self._again(gap)]
            program.row((self.out[tick], 1.0), *((c, -f) for c, f in (*now_left, *all_left[tick])))
            fetched = [*now_begun, *all_back[tick]]
            program.row(*fetched, (self.back[tick], -1.0))
            if self._next_segment(tick):  # as in the relaxation: what is not begun here is waited for there
                here = [(c, f * self.in_time) for c, f in (*fetched, (self.back[tick + 1], -1.0))]
                program.row(*here, *self._passed(tick + 1), least=self._next_segment(tick))
            if top > self.budget:
                absent = [*now_left, *again, *((c, -f) for c, f in now_begun), *dropped[tick]]
                program.row(*absent, least=(top - self.budget) / self.unit_bytes)

    def _again(self, gap: int) -> list[tuple[int, float]]:
        """Whether a gap is swapped that needs no copy out."""
        return [(self.reused[gap], 1.0)] if gap in self.reused else []

    def _copy_time(self, gap: int, alone: int, duplex: int) -> float:
        """The least time of a gap's copy; it is cut to integers twice where its rate changes on the way.

        No more than ten steps: next to a copy of a million ticks, the solver takes a tick for no time at all, and has
        said of a program that it has no solution below 13.8 s where a plan takes 0.3 ms.
        """
        rates = self.tables.rates
        nanoseconds = int(rates[t.R_LATENCY]) + int(self.sizes[gap] * min(rates[alone], rates[duplex])) - 1
        return max(0.0, min(nanoseconds, 10 * self.plain_ns) / self.unit_ns)

    def _next_segment(self, tick: int) -> float:
        """The least time from a tick kept to the very next one, 0 where that is not kept."""
        return self._segment(tick + 1) if self.kept[tick] + 1 in self.kept[tick + 1 : tick + 2] else 0.0


class Search:
    """Repairs and improves plans, judged by the exact evaluator, with some of the actions only."""

    def __init__(self, evaluator: Evaluator, budget_bytes: int, actions: tuple[int, ...], evaluations: int) -> None:
        self.evaluator = evaluator
        self.budget = budget_bytes
        self.actions = (KEEP, *actions)
        self.most = evaluations
        self.count = 0

    def least_peak(self) -> Codes:
        """A plan of the least peak known, whatever the budget.

        Synchronous swaps of everything are the floor of all plans. Without swaps, as far as changes of one or two gaps
        lead down.
        """
        gaps, evaluate = self.evaluator.gaps, self.evaluator.evaluate
        if SYNC in self.actions:
            return np.full(gaps, SYNC, np.int8)
        kept = np.full(gaps, KEEP, np.int8)
        possible = np.array([self._changed(kept, (gap, SHARED))[0] < t.NEVER for gap in range(gaps)], bool)
        starts = [kept, *(np.where(possible, action, KEEP).astype(np.int8) for action in self.actions[1:])]
        codes = min(starts, key=lambda start: evaluate(start)[1])
        search = Search(self.evaluator, 0, self.actions[1:], self.most)
        rng = np.random.default_rng(0)
        while search.count < self.most:
            peak = evaluate(codes)[1]
            search.budget = peak - 1
            lower = search.repaired(codes)
            if evaluate(lower)[1] >= peak:
                pairs = itertools.takewhile(lambda _: search.count < self.most, search._several(codes, 2, rng))
                found = next((pair for pair in pairs if search._changed(codes, *pair)[1] < peak), None)
                if found is None:
                    break
                lower = codes.copy()
                for gap, action in found:
                    lower[gap] = action
            codes = lower
        return codes

    def best(self, starts: list[Codes]) -> Codes | None:
        """The fastest plan within the budget to which these lead, if any is."""
        best: tuple[int, Codes] | None = None
        first = self.count
        for number, start in enumerate(starts, 1):
            codes = self.repaired(start)
            if self._judge(codes)[2] == 0:
                codes = self.improved(codes, first + self.most * number // len(starts))
                ns = self._judge(codes)[0]
                if best is None or ns < best[0]:
                    best = ns, codes
        return None if best is None else best[1]

    def repaired(self, codes: Codes) -> Codes:
        """With single changes, each the cheapest for what it lowers, until all is within the budget or none helps."""
        codes = codes.copy()
        ns, _, excess = self._judge(codes)
        if ns == t.NEVER:  # a recomputation that is impossible: keep what is recomputed instead
            codes[(codes == SHARED) | (codes == RECOMPUTE)] = KEEP
            ns, _, excess = self._judge(codes)
        while excess > 0:
            best: tuple[float, int, int] | None = None
            for gap, action in itertools.product(range(len(codes)), self.actions):
                then_ns, _, then_excess = self._changed(codes, (gap, action))
                if then_ns == t.NEVER or then_excess >= excess:
                    continue
                price = (then_ns - ns) / (excess - then_excess)
                best = min(best or (price, gap, action), (price, gap, action))
            if best is None:
                return codes
            codes[best[1]] = best[2]
            ns, _, excess = self._judge(codes)
        return codes

    def improved(self, codes: Codes, until: int) -> Codes:
        """Change one gap, or two or three at once, as long as it makes the step faster."""
        codes = codes.copy()
        now_ns = self._judge(codes)[0]
        rng = np.random.default_rng(0)
        actions = np.array(self.actions)
        changed = True
        while changed and self.count < until:
            changed = False
            for together in itertools.chain.from_iterable(_together(len(codes), many, rng) for many in (1, 2, 3)):
                if self.count >= until:
                    break
                judged, now_ns, taken = self.evaluator.loop(
                    loops.take_faster, self.budget, codes, together, actions, now_ns, until - self.count
                )
                self.count += judged
                changed = changed or taken > 0
        return codes

    def _several(self, codes: Codes, many: int, rng: np.random.Generator) -> Iterator[tuple[tuple[int, int], ...]]:
        """So many gaps at once, those that do less about one and more about another too; in random order."""
        for gaps in itertools.chain.from_iterable(together.tolist() for together in _together(len(codes), many, rng)):
            if many > 1 and (codes[gaps] == KEEP).all():
                continue
            for change in itertools.product(self.actions, repeat=many):
                if all(codes[gap] != action for gap, action in zip(gaps, change, strict=True)):
                    yield tuple(zip(gaps, change, strict=True))

    def _judge(self, codes: Codes) -> tuple[int, int, int]:
        self.count += 1
        return self.evaluator.judge(codes, self.budget)

    def _changed(self, codes: Codes, *changes: tuple[int, int]) -> tuple[int, int, int]:
        before = [(gap, codes[gap]) for gap, _ in changes]
        for gap, action in changes:
            codes[gap] = action
        cost = self._judge(codes)
        for gap, action in before:
            codes[gap] = action
        return cost


def _together(gaps: int, many: int, rng: np.random.Generator) -> Iterator[Ints]:
    """So many different gaps at once, in rows: all there are in random order, or, where these are too many, any."""
    total = math.comb(gaps, many)
    if 0 < total <= _LISTED:
        chosen = np.array(list(itertools.combinations(range(gaps), many)))
        yield chosen[rng.permutation(total)]
    else:
        for _ in range(total):
            yield np.sort(rng.choice(gaps, many, replace=False))[None]
