"""The default planner: a linear program, rounded and repaired, beside greedy searches; the best of all is improved.

Guarantee: a plan for every budget that has one, down to the floor (all swaps synchronous); no slower than what the
planners find that it asks (`_asked`); and a bound below which no plan is, so that its `gap` says how far from the best
it can be at most. Not optimal.

The linear program of `legroom.bound` gives the bound, and what to do about nearly all gaps: few are left in fractions.
Rounded, it is a plan a little above the budget and some percent above the bound, as chains of replays and whole copies
cost more than the program grants. `local` repairs and improves it by the exact evaluator. Where gaps are not too many,
`varied` searches from other starts and mixes what they lead to. Where gaps are few, it is annealed, and changes of two
and three gaps at once are tried at last.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from legroom.bound import bound_of
from legroom.errors import BudgetError
from legroom.evaluate import KEEP, OVERLAP, RECOMPUTE, SHARED, SYNC, Evaluator
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.kernels.codes import AHEAD, Codes
from legroom.plan import Plan, check_fits
from legroom.planners.capuchin import Capuchin
from legroom.planners.dtr import Dtr
from legroom.planners.home import Home
from legroom.planners.local import CHANGES, MOST_ANNEALED, Search, rounded
from legroom.planners.mimose import Mimose
from legroom.planners.optimal import REPLAYS, SWAPS
from legroom.planners.optimal import Search as Neighbours
from legroom.planners.sublinear import Sublinear
from legroom.planners.superneurons import SuperNeurons
from legroom.planners.tensile import Tensile
from legroom.planners.varied import Programs, vary
from legroom.planners.vdnn import Vdnn
from legroom.schedule import codes_of

_Planner = Callable[[Trace, Hardware, int], Plan]
# With more gaps, evaluations run out before a greedy search is within the budget, and it starts from the linear program
# alone: at 2,000 gaps that is 0.5 % above the bound where greedy search was several times slower, and for a T5 with 890
# at a quarter of its range 1 % where greedy search alone was 1.7 times slower.
_MOST_GREEDY = 500
# With so many gaps at most, a search that knows nothing of the program is worth its time where nothing else is asked
# for: near the floor, where that is 15 % faster for a U-Net.
_MOST_ALONE = 100
# The ticks that the program looks at: on the recorded steps the bound loses 0.01 % at most, and takes a quarter of the
# time.
_TICKS = 200
# (with how many gaps at most, share): more programs, for so much of what the budget has above the floor, lead to plans
# to mix with that of the first. They give no bound, so they may be coarser. On recorded steps at a quarter of the
# range, plans are 0.1 to 0.2 % faster by that.
_TIGHTER, _COARSE_TICKS = ((math.inf, 0.98), (500, 0.99)), 100
# With so many gaps at most, prices are varied instead, for so many times the evaluations of the rest; with more gaps,
# that takes too long.
_MOST_VARIED, _VARIED = 280, 4.5625
# That far above the bound, it is worth another: for a GPT of 24 layers on the slower preset, at 1 and 2 % of the range,
# 1.1 % above the bound in place of 10.8 and 7.4 %.
_FAR, _SMALLER = 0.05, 0.4
_HALF_IS_ENOUGH = 0.01  # that close, of a plan that will not last
_NEAR = 5e-3  # that close, greedy searches find nothing faster
_NEARER = 1e-3  # that close, annealing for longer than all the rest takes can gain no more than that
_CLOSE = 5e-4  # that close, another program is not worth its time
_AS_GOOD = 1e-6  # that close to the bound, a plan is not worth improving
# Planners that are asked too, and with how many gaps at most: their time grows with the square of that, or is
# longer than all the rest.
_OTHERS = (
    (500, Capuchin()),
    (500, Mimose(descends=False)),
    (500, Tensile(descends=False)),
    (100, Dtr(descends=False)),
    (100, Sublinear()),
    (100, SuperNeurons()),
    (100, Vdnn()),
)
# Asked where gaps are few, as `_few_gaps` has it. With a third of the iterations, and annealing up to 50 gaps, HOME by
# default was faster for 5 of 35 random steps of 20 to 120 gaps, by 1.7 % at most; now for one, by 0.5 %.
_SWARM = Home(swarms=1, iterations=60, patience=20, threads=1)
# Gaps, and gaps times ticks: what an evaluation takes goes by those.
_MOST_FEW, _MOST_SMALL = 120, 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    evaluations: int = 16000  # of the search; varied prices and annealing take several times as many
    bound: bool = True  # state a bound
    thorough: bool = True  # ask other planners too, and anneal where gaps are few
    start: Plan | None = None  # of the same trace for a larger budget: the search starts from it, too

    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        evaluator = Evaluator(trace, hardware)
        kept = np.full(evaluator.gaps, KEEP, np.int8)
        if evaluator.judge(kept, budget_bytes)[2] == 0:
            plan = evaluator.plan(kept, planner="auto", budget_bytes=budget_bytes, notes=("everything is kept",))
            return replace(plan, lower_bound_seconds=plan.predicted_seconds if self.bound else None)
        # Of many gaps, the program and a full search take a second each; near the bound half of both is as good.
        brief = evaluator.gaps > _MOST_GREEDY and not (self.thorough or self.bound)
        search = Search(evaluator, budget_bytes, self.evaluations // (2 if brief else 1))
        if not search.feasible:
            return evaluator.plan(search.best, planner="auto", budget_bytes=budget_bytes)  # raises
        relaxed = bound_of(evaluator.tables, budget_bytes, most_ticks=_COARSE_TICKS if brief else _TICKS)
        lowest_ns = relaxed.seconds * 1e9
        search.start_from("the linear program", rounded(relaxed))
        if search.best_ns > lowest_ns * (1 + _HALF_IS_ENOUGH):
            search.most = self.evaluations
        if self.start is not None:
            check_fits(trace, self.start)
            search.start_from("the plan for more", _codes(self.start))
        open_ended = self.thorough and search.best_ns > lowest_ns * (1 + _CLOSE)
        varied = open_ended and evaluator.gaps <= _MOST_VARIED
        for most, share in _TIGHTER if open_ended and not varied else ():
            if evaluator.gaps <= most and search.best_ns > lowest_ns * (1 + _CLOSE):
                _start_tighter(search, share, most_ticks=_COARSE_TICKS)
        plans: list[Plan] = []
        with contextlib.ExitStack() as meanwhile:
            programs = meanwhile.enter_context(Programs(search)) if varied else None
            if search.best_ns > lowest_ns * (1 + _NEAR) and evaluator.gaps <= _MOST_GREEDY:
                search.greedy()
            if search.best_ns > lowest_ns * (1 + _AS_GOOD) and self.thorough:
                plans = list(_asked(trace, hardware, budget_bytes))
                for plan in plans:
                    search.consider(plan.planner, _codes(plan))
            if programs is not None:
                vary(search, programs, int(_VARIED * self.evaluations))
                search.most = search.count + self.evaluations // 4
        search.finish()
        if search.best_ns > lowest_ns * (1 + _FAR):
            search.most += self.evaluations
            _start_tighter(search, _SMALLER, most_ticks=_TICKS)
            search.finish()
        if not self.thorough and search.best_ns > lowest_ns * (1 + _NEAR) and evaluator.gaps <= _MOST_ALONE:
            alone = Search(evaluator, budget_bytes, self.evaluations)
            alone.greedy()
            alone.finish()
            search.consider(alone.found_from, alone.best)
            search.count += alone.count
        if search.best_ns > lowest_ns * (1 + _NEARER) and self.thorough and _few_gaps(trace):
            changes = min(CHANGES * evaluator.gaps, self.evaluations // 2)
            # Where swaps wait and replays are long, a plan of replays alone can be far from any other, and random
            # changes do not come by.
            alone = Search(Evaluator(trace, hardware), budget_bytes, self.evaluations, start=search.best.copy())
            with _meanwhile(partial(alone.anneal, changes, (KEEP, *REPLAYS))) as annealed:
                search.anneal(changes, (KEEP, *SWAPS, *REPLAYS))
                search.most = search.count + self.evaluations // 4
                search.finish()  # with what each annealing found
                closely = Neighbours(evaluator, budget_bytes, (*SWAPS, *REPLAYS), self.evaluations)
                search.consider(search.found_from, closely.improved(search.best, self.evaluations))
                annealed()
            search.count += alone.count
            search.consider("annealing", alone.best)
        own = evaluator.plan(search.best, planner="auto", budget_bytes=budget_bytes, notes=_notes(search))
        # What others do with fetches ahead can be faster than what the search makes of it.
        best = min((own, *plans), key=lambda plan: plan.predicted_seconds)
        return replace(best, planner="auto", lower_bound_seconds=relaxed.seconds if self.bound else None)


@contextlib.contextmanager
def _meanwhile(work: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Do this in a thread of its own. What is given is to be called before the end: it returns when the work is done,
    which it does itself where no thread took it."""
    with ThreadPoolExecutor(1) as pool:
        done: Callable[[], None] = work
        with contextlib.suppress(RuntimeError):  # the interpreter is about to end, or there may be no more threads
            done = pool.submit(work).result
        yield done


def _start_tighter(search: Search, share: float, *, most_ticks: int) -> None:
    """Start from the program of a smaller budget: this share of what is above the floor.

    Whole copies and replays need memory that the program grants them, and to repair a plan that is above the budget
    takes changes that the program knows nothing of; near the floor, long waits.
    """
    evaluator = search.evaluator
    floor = evaluator.evaluate(np.full(evaluator.gaps, SYNC, np.int8))[1]
    smaller = floor + int(share * (search.budget - floor))
    if smaller < search.budget:
        relaxed = bound_of(evaluator.tables, smaller, most_ticks=most_ticks)
        search.start_from("a tighter linear program", rounded(relaxed))


def quick(planner: _Planner) -> _Planner:
    """The planner for plans that will not last: auto without other planners and annealing, and stating no bound."""
    return replace(planner, bound=False, thorough=False) if isinstance(planner, Auto) else planner


def tighter(planner: _Planner, plan: Plan) -> _Planner:
    """The planner for a little less than it was asked for before, given what it found then: auto repairs that plan,
    which takes fewer evaluations and comes as close."""
    return replace(planner, thorough=False, start=plan) if isinstance(planner, Auto) else planner


def _notes(search: Search) -> tuple[str, ...]:
    counts = np.bincount(search.best, minlength=5)
    recomputed = counts[RECOMPUTE] + counts[SHARED]
    done = f"{counts[OVERLAP]} swapped, {counts[SYNC]} swapped with waiting, {recomputed} recomputed"
    return (f"{counts[KEEP]} gaps kept, {done}", f"found from: {search.found_from}; {search.count} evaluations")


def _few_gaps(trace: Trace) -> bool:
    """Whether they are so few that random changes find something in little time."""
    gaps = len(trace.gaps)
    return gaps <= MOST_ANNEALED or (gaps <= _MOST_FEW and gaps * len(trace.ticks) <= _MOST_SMALL)


def _asked(trace: Trace, hardware: Hardware, budget_bytes: int) -> Iterator[Plan]:
    gaps = len(trace.gaps)
    others: list[_Planner] = [planner for most, planner in _OTHERS if gaps <= most]
    if _few_gaps(trace):
        others.append(_SWARM)
    for planner in others:
        with contextlib.suppress(BudgetError):
            yield planner(trace, hardware, budget_bytes)


def _codes(plan: Plan) -> Codes:
    codes, _ = codes_of(plan.decisions)
    return np.where(codes == AHEAD, OVERLAP, codes).astype(np.int8)
