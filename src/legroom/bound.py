"""A lower bound on the seconds of a step inside a budget: no plan is faster, whatever planner it comes from.

The linear program relaxes the model of `simulate()`, so its optimum is a bound under that model: the order of ops is
fixed, one lane each for host, compute, copies out and copies in, memory as `check_schedule()` counts it. What it grants
a plan that no schedule can do:

- A gap may be kept, swapped and recomputed by fractions.
- Copies are fluid. The bytes that have left, and those that are back, are one number for each lane and tick, limited by
  what may leave and what must be back by then, and by time at the best rate of any copy (its latency spread over its
  bytes). Compute may wait at any tick: that is slack in time. Fetches may run at any time, forward included. A storage
  that an earlier gap copied out needs no second copy.
- To recompute a gap costs the op that made it, and those before it whose results are never in memory by themselves
  while the gap lasts; each once for all gaps that overlap, though a chain of replays may run it more often. The time
  may be spent at any tick of the gap at which some replay could run. What replays need and leave in memory is free.
- Memory is limited in each segment, not inside a tick.
- The host has the hooks of all ticks to see to where anything must be done, each op that runs again, and the
  instructions of what is swapped or dropped: when a gap starts what lets it go, and by its end the rest. What it takes
  for a replay as such is free, as one may bring back many storages. Copies start without it.

The value is computed here from the solver's duals, by weak duality: whatever tolerances it works with, and wherever it
stopped, the bound holds.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from legroom import tables as t
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.tables import Floats, Ints, Tables, tabulate

if TYPE_CHECKING:
    from scipy.sparse import csr_array  # scipy takes half a second to load: only where a program is solved

# Above that, a trace is looked at more coarsely: on GPTs of 700 and 2,000 gaps the bound lost 0.02 % at most, and took
# a third of the time. With 200 it lost 0.05 %, and took a sixth.
MOST_TICKS = 500
ROUNDING = 1e-9  # relative; a sum of ten thousand doubles is a thousand times better
Terms = Sequence[tuple[int, float]]  # (column, factor)
Changes = dict[int, list[tuple[int, float]]]  # tick: terms


@dataclass(frozen=True, slots=True)
class Bound:
    """What the relaxation says. Its fractions, one for each gap, are a good place to start a search from."""

    seconds: float  # infinite where no plan is inside the budget
    swapped: Floats
    recomputed: Floats


def lower_bound(
    trace: Trace,
    hardware: Hardware,
    budget_bytes: int,
    *,
    time_limit_seconds: float = 60.0,
    most_ticks: int = MOST_TICKS,
) -> Bound:
    """The bound for plans whose peak is at most the budget.

    Out of time it is that of a step that keeps everything. Traces of more than `most_ticks` starts and ends of gaps are
    looked at more coarsely.
    """
    if trace.head_peak_bytes > budget_bytes:
        nothing = np.zeros(len(trace.gaps))
        return Bound(math.inf, nothing, nothing)
    tables = tabulate(trace, hardware)
    return bound_of(tables, budget_bytes, time_limit_seconds=time_limit_seconds, most_ticks=most_ticks)


def bound_of(
    tables: Tables, budget_bytes: int, *, time_limit_seconds: float = 60.0, most_ticks: int = MOST_TICKS
) -> Bound:
    """As lower_bound(), of a trace whose head is within the budget."""
    nothing = np.zeros(len(tables.gaps))
    if _floor(tables) > budget_bytes:
        return Bound(math.inf, nothing, nothing)
    relaxed = Relaxation(tables, budget_bytes, most_ticks=most_ticks)
    columns, duals = relaxed.program.solve(time_limit_seconds)
    proven_ns = relaxed.program.proven(duals) * relaxed.unit_ns * (1.0 - ROUNDING)
    return Bound(
        max(float(relaxed.plain_ns), proven_ns) / 1e9,
        *((nothing, nothing) if columns is None else relaxed.fractions(columns)),
    )


def _floor(tables: Tables) -> int:
    """The peak with every storage away in every segment of its gaps."""
    away = np.zeros(len(tables.ticks) + 1, np.int64)
    real = tables.gaps[tables.gaps[:, t.G_START] < tables.gaps[:, t.G_END]]
    np.add.at(away, real[:, t.G_START], real[:, t.G_BYTES])
    np.add.at(away, real[:, t.G_END], -real[:, t.G_BYTES])
    return int((tables.ticks[:, t.T_PEAK] - np.cumsum(away)[:-1]).max(initial=0))


def ticks_that_matter(tables: Tables, budget_bytes: int, most: int) -> list[int]:
    """Those at which gaps start or end, `most` of them at most; and the worst between two of these.

    To leave out a tick is to leave out what it asks for, so a relaxation remains one. Without what is neither start nor
    end it is solved in a third of the time, and on a GPT of 24 layers it lost 0.002 % of its value.

    Where there are too many, about as many bytes start or end from one that is kept to the next: that is by how much
    lanes and memory can be off between them. Every n-th tick in place of that lost up to 0.4 % of the value, as half of
    the ticks of a ResNet are those of small weights. The first is kept, as nothing can be copied before it.
    """
    tops = tables.ticks[:, t.T_PEAK]
    real = tables.gaps[tables.gaps[:, t.G_START] < tables.gaps[:, t.G_END]]
    starting, ending = (np.bincount(real[:, c], real[:, t.G_BYTES], len(tops)) for c in (t.G_START, t.G_END))
    events = np.unique(real[:, [t.G_START, t.G_END]])
    if len(events) > most:
        moved = np.cumsum((starting + ending)[events])
        part = np.ceil(moved * ((most - 1) / max(1.0, moved[-1])))
        events = events[[0, *np.flatnonzero(np.diff(part)), len(events) - 1]]
    # The worst with everything kept, and with as much of each gap away as it takes: what ends in between is back then.
    away = np.maximum(np.cumsum(starting - ending), 1.0)
    share = min(1.0, float(((tops - budget_bytes) / away).max(initial=0.0)))
    kept = set(events.tolist())
    for first, stop in itertools.pairwise((0, *events.tolist(), len(tops))):
        if stop > first and tops[first:stop].max() > budget_bytes:
            kept |= {first + int(curve[first:stop].argmax()) for curve in (tops, tops - share * away)}
    return sorted(kept)


def _merged(segments: Ints, kept: list[int]) -> list[tuple[int, int, int]]:
    """What the ops between two ticks that are kept do to the lanes, and those after the last."""
    out = []
    for first, stop in itertools.pairwise((0, *(tick + 1 for tick in kept), len(segments))):
        compute, host, issued = 0, -t.NEVER, 0
        for after_compute, after_host, issue in segments[first:stop].tolist():
            if issue < 0:  # the host stands where compute stands
                compute += max(after_compute, after_host)
            else:
                host = max(host + after_compute, issued + after_host)
                compute, issued = compute + after_compute, issued + issue
        out.append((compute, host, issued))
    return out


class Return(NamedTuple):
    """Columns of a gap that is over at a tick before its end, by how much it is swapped and how much recomputed."""

    tick: int
    swapped: int
    recomputed: int


class LinearProgram:
    """Minimise the costs of columns within their limits, under rows that say: sum of factor * column >= least."""

    def __init__(self) -> None:
        self.high: list[float] = []  # columns; the low limit of all is 0
        self.cost: list[float] = []
        self.least: list[float] = []  # rows
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._factors: list[float] = []

    def column(self, high: float, *, cost: float = 0.0) -> int:
        self.high.append(high)
        self.cost.append(cost)
        return len(self.high) - 1

    def row(self, *terms: tuple[int, float], least: float = 0.0) -> None:
        scale = 1.0 / (max((abs(factor) for _, factor in terms), default=0.0) or 1.0)  # solvers compare with 1
        for column, factor in terms:
            self._rows.append(len(self.least))
            self._columns.append(column)
            self._factors.append(factor * scale)
        self.least.append(least * scale)

    def matrix(self) -> csr_array:
        from scipy.sparse import csr_array

        entries = np.array(self._factors), (np.array(self._rows, int), np.array(self._columns, int))
        return csr_array(entries, shape=(len(self.least), len(self.high)))

    def solve(self, time_limit_seconds: float) -> tuple[Floats | None, Floats]:
        """The columns, None where the solver did not finish; and a dual for each row, zeros where it has none."""
        from scipy.optimize import linprog

        bounds = np.column_stack([np.zeros(len(self.high)), self.high])
        options = {"time_limit": time_limit_seconds}
        # Interior points: at 700 gaps twice as fast as the dual simplex method, at 2,000 more than four times.
        found = linprog(
            self.cost, -self.matrix(), -np.array(self.least), bounds=bounds, method="highs-ipm", options=options
        )
        duals = np.zeros(len(self.least))
        if found.x is not None and found.ineqlin.marginals is not None:
            duals = -np.asarray(found.ineqlin.marginals, float)
        return np.asarray(found.x, float) if found.status == 0 else None, duals

    def proven(self, duals: Floats) -> float:
        """What no solution is below: for any prices >= 0, to pay for what rows lack is no harder than to keep them."""
        prices = np.where(np.isfinite(duals), np.maximum(duals, 0.0), 0.0)
        reduced = np.array(self.cost) - self.matrix().T @ prices
        return float(prices @ np.array(self.least) + (np.minimum(reduced, 0.0) * np.array(self.high)).sum())


class Relaxation:
    """The linear program of a trace, in units of time and bytes of its own, so that its numbers are not far from one.

    Columns of gaps: `copied` out, `reused` where an earlier copy serves, `recomputed`. Columns of ticks are cumulative
    and stand for what is true after its instructions: the time, bytes `out` and `back`, time `spent` on replays and
    `paid` for copies that share the cores. They are numbered by the ticks that are `kept`; `starts` and `ends` are not.
    """

    def __init__(self, tables: Tables, budget_bytes: int, *, most_ticks: int = MOST_TICKS) -> None:
        self.tables = tables
        self.budget = budget_bytes
        self.program = LinearProgram()
        self.kept = ticks_that_matter(tables, budget_bytes, most_ticks)
        self.ticks = len(self.kept)
        # Above the budget as it is, any step within it has hooks.
        must = bool(tables.ticks[:, t.T_PEAK].max(initial=0) > budget_bytes)
        segments = t.with_ticks(tables) if must else tables.segments
        self.segments = _merged(segments, self.kept)
        self.synchronous = bool(tables.rates[t.R_SYNCHRONOUS] > 0.0)
        self.plain_ns = t.reached(segments)[-1]
        self.starts, self.ends, self.sizes = (tables.gaps[:, c].tolist() for c in (t.G_START, t.G_END, t.G_BYTES))
        real = [g for g in range(len(tables.gaps)) if self.starts[g] < self.ends[g]]
        self.can_run = sorted({self.ends[g] for g in real})  # replays
        self.gaps = [g for g in real if self.sizes[g] and self.place(self.starts[g]) < self.place(self.ends[g])]
        self.unit_bytes = float(max((self.sizes[g] for g in self.gaps), default=1))
        self.unit_ns = max(1.0, self.plain_ns / max(1, self.ticks))
        self.total = sum(self.sizes[g] for g in self.gaps) / self.unit_bytes
        self.longest = self._longest()
        self.copied, self.reused, self.recomputed = self._choices()
        self.replays = self._replays()
        self.returns = self._returns()
        self.time = [self.program.column(self.longest) for _ in range(self.ticks)]
        self.time.append(self.program.column(self.longest, cost=1.0))  # the end of the step
        self._compute()
        self._host()
        self._copies()
        self._memory()

    def place(self, tick: int) -> int:
        """The first tick kept that is not before this one; what holds from a tick on holds from there on."""
        return bisect.bisect_left(self.kept, tick)

    def fractions(self, columns: Floats) -> tuple[Floats, Floats]:
        """How much of each gap is swapped, and how much recomputed."""
        swapped, recomputed = np.zeros(len(self.tables.gaps)), np.zeros(len(self.tables.gaps))
        for chosen, out in ((self.copied, swapped), (self.reused, swapped), (self.recomputed, recomputed)):
            out[list(chosen)] += columns[list(chosen.values())]
        return swapped, recomputed

    def _longest(self) -> float:
        """As long as a step that waits for each copy, which is within any budget: the best plan takes no longer."""
        rates = self.tables.rates
        a_byte = max(rates[t.R_OUT], rates[t.R_DUPLEX_OUT]) + max(rates[t.R_IN], rates[t.R_DUPLEX_IN])
        # All gaps with a segment of their own, also those that this program does not look at.
        real = self.tables.gaps[self.tables.gaps[:, t.G_START] < self.tables.gaps[:, t.G_END]]
        copies = real[:, t.G_BYTES].sum() * a_byte + 2 * rates[t.R_LATENCY] * len(real)
        leaves = max(self._host_ns(t.H_SWAP_OUT, t.H_RELEASE), self._host_ns(t.H_DROP))  # where an earlier copy serves
        swaps = (leaves + self._host_ns(t.H_PREFETCH, t.H_AWAIT)) * len(real)
        return float(self.plain_ns + swaps + copies * (1.0 + rates[t.R_SHARE])) / self.unit_ns + 1.0

    def _host_ns(self, *kinds: int) -> int:
        return sum(int(self.tables.host[kind]) for kind in kinds)

    def _choices(self) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
        copied: dict[int, int] = {}
        reused: dict[int, int] = {}
        recomputed: dict[int, int] = {}
        earlier: dict[int, list[int]] = {}  # of the same storage
        for gap in self.gaps:
            copied[gap] = self.program.column(1.0)
            first = int(self.tables.gaps[gap, t.G_FIRST])
            before = earlier.setdefault(first, [])
            if gap > first:
                reused[gap] = self.program.column(1.0)
                if len(before) == gap - first:  # else one of them is not looked at, and may have been copied for free
                    self.program.row((reused[gap], -1.0), *((copied[other], 1.0) for other in before))
            before.append(gap)
            if self._can_be_made(gap):
                recomputed[gap] = self.program.column(1.0)
            shares = [chosen[gap] for chosen in (copied, reused, recomputed) if gap in chosen]
            self.program.row(*((share, -1.0) for share in shares), least=-1.0)
        return copied, reused, recomputed

    def maker(self, gap: int) -> int:
        value = self.tables.gaps[gap, t.G_VALUE]
        return int(self.tables.values[value, t.V_WRITER]) if value >= 0 else -1

    def needs(self, op: int, first: int, last: int) -> list[int]:
        """The ops that a replay of this one between these ticks runs too, as what they make is not in memory then."""
        ops, values = self.tables.ops, self.tables.values
        read = values[self.tables.reads[ops[op, t.O_READS] : ops[op + 1, t.O_READS]]]
        never = np.maximum(read[:, t.V_FROM], first) > np.minimum(read[:, t.V_UNTIL], last)
        return list(dict.fromkeys(read[never, t.V_WRITER].tolist()))

    def _can_be_made(self, gap: int) -> bool:
        todo, seen = [self.maker(gap)], set()
        while todo:
            op = todo.pop()
            if op < 0 or not self.tables.ops[op, t.O_REPLAYABLE]:
                return False
            if op not in seen:
                seen.add(op)
                todo += self.needs(op, self.starts[gap] + 1, self.ends[gap])
        return True

    def _replays(self) -> list[tuple[int, int, int, int]]:
        """(op, first tick, last tick, column): how often an op runs again between these ticks.

        From the last op to the first, so that all who need an op are known before it. Of one source, gaps of a storage
        or runs of an op, the times do not overlap, so each needs a run of its own; different sources may share.
        """
        wanted: dict[int, list[tuple[int, int, tuple[str, int], int]]] = {}  # op: (first, last, source, column)
        for gap, column in self.recomputed.items():
            source = "storage", int(self.tables.gaps[gap, t.G_STORAGE])
            wanted.setdefault(self.maker(gap), []).append((self.starts[gap] + 1, self.ends[gap], source, column))
        replays = []
        for op in range(len(self.tables.ops) - 2, -1, -1):
            for together in _overlapping(wanted.get(op, [])):
                first, last = min(first for first, *_ in together), max(last for _, last, *_ in together)
                runs = self.program.column(float(len(together)))
                for source in dict.fromkeys(source for _, _, source, _ in together):
                    parts = [column for _, _, other, column in together if other == source]
                    self.program.row((runs, 1.0), *((column, -1.0) for column in parts))
                for writer in self.needs(op, first, last):
                    wanted.setdefault(writer, []).append((first, last, ("op", op), runs))
                replays.append((op, first, last, runs))
        return replays

    def _returns(self) -> dict[int, list[Return]]:
        """What is back before its gap ends, as a replay needs it: nothing, in a relaxation that looks at no chains."""
        return {}

    def _compute(self) -> None:
        """Segments, replays, and what copies take from compute, one after the other."""
        ops, program = self.tables.ops, self.program
        issue = ops[:, t.O_ISSUE_NS] + self.tables.host[t.H_REPLAY_OP]
        cost = (ops[:, t.O_NS] + (issue if self.synchronous else 0)) / self.unit_ns
        may: Changes = {}
        must: Changes = {}
        for op, first, last, runs in self.replays:
            soonest = self.can_run[bisect.bisect_left(self.can_run, first)]
            may.setdefault(self.place(soonest), []).append((runs, float(cost[op])))
            must.setdefault(self.place(last), []).append((runs, float(cost[op])))
        may_spend = self._running(may, self.longest)
        must_spend = self._running(must, self.longest, at_least=True)
        self.spent = [program.column(self.longest) for _ in range(self.ticks)]
        gone, back = self._charges() if self.synchronous else ({}, {})
        charged = [program.column(self.longest) for _ in range(self.ticks if back else 0)]
        must_charge = self._running(back, self.longest, at_least=True)
        self.paid = [program.column(self.longest) for _ in range(self.ticks if self.tables.rates[t.R_SHARE] else 0)]
        for tick in range(self.ticks + 1):
            grown = [_growth(lane, tick) for lane in (self.spent, self.paid, charged)]
            for terms in grown:
                if terms:
                    program.row(*terms)
            replayed, copying, hosted = ([(column, -factor) for column, factor in terms] for terms in grown)
            hosted += [(column, -factor) for column, factor in gone.get(tick, ())]
            passed = [*self._passed(tick), *replayed]
            program.row(*passed, *copying, least=self._segment(tick))
            if hosted:  # what copies take from compute meanwhile, the host does not wait for
                program.row(*passed, *hosted, least=self._segment(tick))
            if tick in back:
                program.row((charged[tick], 1.0), *((column, -factor) for column, factor in must_charge[tick]))
            if tick in must:
                program.row((self.spent[tick], 1.0), *((column, -factor) for column, factor in must_spend[tick]))
            if tick + 1 in may or tick + 1 == self.ticks:
                program.row((self.spent[tick], -1.0), *may_spend[tick])

    def _host(self) -> None:
        """The host waits for nobody, so it is where all it has done takes it; compute is never behind it."""
        if self.synchronous:
            return  # it is where compute is, and has its part in the rows there
        issues, back = self._charges()
        for tick, terms in back.items():
            issues.setdefault(tick, []).extend(terms)
        for op, _, last, runs in self.replays:
            issue = float(self.tables.ops[op, t.O_ISSUE_NS] + self.tables.host[t.H_REPLAY_OP]) / self.unit_ns
            issues.setdefault(self.place(last), []).append((runs, issue))
        replayed = self._running(issues, self.longest, at_least=True)
        host = 0
        before: Terms = ()
        for tick, (_, after_host, issue) in enumerate(self.segments):
            now = self.time[tick], 1.0
            if after_host > 0:
                self.program.row(now, *((c, -f) for c, f in before), least=(host + after_host) / self.unit_ns)
            host += issue
            if tick in issues:
                before = replayed[tick]
                self.program.row(now, *((c, -f) for c, f in before), least=host / self.unit_ns)

    def _charges(self) -> tuple[Changes, Changes]:
        """What the host has to do for gaps: when they start, and when they end at the latest."""
        gone: Changes = {}
        back: Changes = {}
        returns = self._host_ns(t.H_PREFETCH, t.H_AWAIT)
        kinds = (
            (self.copied, self._host_ns(t.H_SWAP_OUT), self._host_ns(t.H_RELEASE) + returns),
            (self.reused, self._host_ns(t.H_DROP), returns),
            (self.recomputed, self._host_ns(t.H_DROP), 0),
        )
        for chosen, at_start, at_end in kinds:
            for gap, column in chosen.items():
                for changes, tick, ns in (gone, self.starts[gap], at_start), (back, self.ends[gap], at_end):
                    if ns:
                        changes.setdefault(self.place(tick), []).append((column, ns / self.unit_ns))
        return gone, back

    def _copies(self) -> None:
        """The two lanes: what may have left, what must be back, and the time that takes."""
        program = self.program
        may: Changes = {}
        must: Changes = {}
        passed_by: set[int] = set()  # where something may leave between the tick kept before and this one
        for gap in self.gaps:
            size = self.sizes[gap] / self.unit_bytes
            start, end = self.place(self.starts[gap]), self.place(self.ends[gap])
            if self.kept[start] != self.starts[gap]:
                passed_by.add(start)
            may.setdefault(start, []).append((self.copied[gap], size))
            must.setdefault(end, []).append((self.copied[gap], size))
            if gap in self.reused:
                must[end].append((self.reused[gap], size))
            for tick, column, factor in self._early(gap, "swapped"):
                must.setdefault(tick, []).append((column, factor * size))
        may_leave = self._running(may, self.total)
        must_be_back = self._running(must, self.total, at_least=True)
        self.out = [program.column(self.total) for _ in range(self.ticks)]
        self.back = [program.column(self.total) for _ in range(self.ticks)]
        out_time, out_share = self._least_times(t.R_OUT, t.R_DUPLEX_OUT)
        self.in_time, in_share = self._least_times(t.R_IN, t.R_DUPLEX_IN)
        for tick in range(self.ticks):
            passed = self._passed(tick)
            for lane, a_unit in ((self.out, out_time), (self.back, self.in_time)):
                grown = _growth(lane, tick)
                program.row(*passed, *((column, -factor * a_unit) for column, factor in grown))
            program.row((self.out[tick], -1.0), *may_leave[tick])
            program.row((self.back[tick], 1.0), *((column, -factor) for column, factor in must_be_back[tick]))
            if tick in may and tick not in passed_by:  # what may leave from here on leaves while compute stays here
                earlier = [(column, factor * out_time) for column, factor in (may_leave[tick - 1] if tick else ())]
                program.row(*passed, (self.out[tick], -out_time), *earlier, least=self._segment(tick))
            if self.paid:
                program.row((self.paid[tick], 1.0), (self.out[tick], -out_share), (self.back[tick], -in_share))

    def _early(self, gap: int, kind: Literal["swapped", "recomputed"]) -> Iterator[tuple[int, int, float]]:
        """(tick, column, factor) of what comes back before the end, and so does not come at the end."""
        ticks = [back.tick for back in self.returns.get(gap, [])]
        columns = [getattr(back, kind) for back in self.returns.get(gap, [])]
        for column, (tick, following) in zip(columns, itertools.pairwise((*ticks, self.ends[gap])), strict=True):
            yield self.place(tick), column, 1.0
            yield self.place(following), column, -1.0

    def _memory(self) -> None:
        taken: Changes = {}
        for gap in self.gaps:
            size = self.sizes[gap] / self.unit_bytes
            start, end = self.place(self.starts[gap]), self.place(self.ends[gap])
            if gap in self.reused:
                taken.setdefault(start, []).append((self.reused[gap], size))
            if gap in self.recomputed:
                taken.setdefault(start, []).append((self.recomputed[gap], size))
                taken.setdefault(end, []).append((self.recomputed[gap], -size))
            for tick, column, factor in self._early(gap, "recomputed"):
                taken.setdefault(tick, []).append((column, -factor * size))
        gone = self._running(taken, self.total)
        for tick, top in enumerate(self.tables.ticks[self.kept, t.T_PEAK].tolist()):
            least = (top - self.budget) / self.unit_bytes
            if least <= 0.0:
                continue
            absent = (self.out[tick], 1.0), *gone[tick]
            self.program.row(*absent, (self.back[tick], -1.0), least=least)
            if self.kept[tick] + 1 in self.kept[tick + 1 : tick + 2]:
                # What is back when compute comes to the next tick was fetched at this one or before, and had its
                # memory. Only what compute waits for there may have been fetched there.
                here = [(column, factor * self.in_time) for column, factor in (*absent, (self.back[tick + 1], -1.0))]
                wait = least * self.in_time + self._segment(tick + 1)
                self.program.row(*here, *self._passed(tick + 1), least=wait)

    def _segment(self, tick: int) -> float:
        """The least time of the ops before a tick."""
        return self.segments[tick][0] / self.unit_ns

    def _passed(self, tick: int) -> list[tuple[int, float]]:
        return _growth(self.time, tick)

    def _running(self, changes: Changes, high: float, *, at_least: bool = False) -> list[Terms]:
        """The sum of all changes up to each tick. It may be taken for less, or with `at_least` for more."""
        sign = 1.0 if at_least else -1.0
        out: list[Terms] = []
        now: Terms = ()
        for tick in range(self.ticks):
            if tick in changes:
                column = self.program.column(high)
                self.program.row((column, sign), *((c, -sign * factor) for c, factor in (*now, *changes[tick])))
                now = ((column, 1.0),)
            out.append(now)
        return out

    def _least_times(self, alone: int, duplex: int) -> tuple[float, float]:
        """The least time in which a copy brings over a unit of bytes, and the least it takes from compute for that."""
        rates = self.tables.rates
        a_byte, latency, share = min(rates[alone], rates[duplex]), int(rates[t.R_LATENCY]), rates[t.R_SHARE]
        lanes, shares = [], []
        for size in {self.sizes[gap] for gap in self.gaps}:
            # Times are cut to integers, that of a copy twice where its rate changes on the way.
            nanoseconds = max(0.0, latency + int(size * a_byte) - 1.0)
            lanes.append(nanoseconds / size)
            shares.append(max(0.0, nanoseconds * share - 1.0) / size)
        unit = self.unit_bytes / self.unit_ns
        return float(min(lanes, default=0.0)) * unit, float(min(shares, default=0.0)) * unit


def _growth(lane: Sequence[int], tick: int) -> list[tuple[int, float]]:
    """By how much a cumulative column grows from the tick before to this one; nothing after the last."""
    if tick >= len(lane):
        return []
    return [(lane[tick], 1.0), (lane[tick - 1], -1.0)] if tick else [(lane[tick], 1.0)]


def _overlapping(
    wanted: Iterable[tuple[int, int, tuple[str, int], int]],
) -> list[list[tuple[int, int, tuple[str, int], int]]]:
    """Grouped so that times in different groups have no tick in common."""
    groups: list[list[tuple[int, int, tuple[str, int], int]]] = []
    reach = -1
    for item in sorted(wanted):
        if item[0] > reach:
            groups.append([])
        groups[-1].append(item)
        reach = max(reach, item[1])
    return groups
