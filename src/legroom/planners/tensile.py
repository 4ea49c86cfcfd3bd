"""TENSILE: swap what stands at the peak as long as computation need not wait; recompute only if that is not enough.

Kaixin Zhang, Hongzhi Wang, Tongxin Li, Han Hu, Jiye Qiu and Songling Zou, "TENSILE: A Tensor granularity dynamic GPU
memory scheduler method towards multitasking dynamic workloads system", preprint, 2021.

Algorithm 3: while swaps succeed, analyse the memory curve (algorithm 2) and swap the largest tensor that stands at its
peak (algorithm 1). All copies, out and in, share one lane that carries one at a time. A copy out takes the earliest
free place after the access before it and is over by the peak; the copy back takes the latest that is over by the next
access. Where the copy back finds no place, the next stretch between two accesses of the tensor is tried. Later accesses
of a tensor that was swapped need a copy back only, as the host copy is still good. Once no swap succeeds and the peak
is above the budget, tensors are recomputed in the order of memory saved per second (MSPS).

Guarantee: a plan within the budget, or BudgetError with the least peak of its rule; and no swap in it makes computation
wait, in the model. As in the paper, swapping goes on below the budget: the peak is what is minimised, and what is left
free is left to others.

Deviations. Activity analysis is done by the program itself: PyTorch frees a tensor after its last access, and the trace
has that curve. The plan says Swap("overlap"), early out and late in, which acts at ticks and has a lane for each
direction; so a swap counts only if the exact evaluator agrees that the peak falls and nothing waits. Where copies take
time from computation (a CPU), no swap is free, and swapping stops at the budget. Line 21 of algorithm 1 sets the latest
time of a copy out where the text means the earliest; algorithm 3 never sets swap_succeed back to true. The maximum
swapping ratio is a job's share of all tensors swapped in the system, which for one job is always all of them: here it
is the share of its own tensors that it may swap. Recomputation is for accesses never released, as it would otherwise
read what was swapped out and undo the swaps: so neither the tensor nor what its replay reads is released, and a replay
never needs another. What would save nothing above the budget is passed over. Parameters and optimizer states have no
gaps in a trace, so they stay.

Several jobs: a `_Job` is all that belongs to one trace, and `_Lane` counts in nanoseconds, not in ticks. To plan jobs
together, let the peak be that of the sum of their curves over time, take the largest tensor of all jobs there, and give
every job the same lane.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

from legroom import tables as t
from legroom.errors import BudgetError
from legroom.evaluate import KEEP, OVERLAP, SHARED, Evaluator
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.kernels.codes import Codes
from legroom.plan import Plan
from legroom.planners.floors import descended
from legroom.planners.recipes import recipe
from legroom.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensile:
    max_swapping_ratio: float = 1.0  # of the storages that have gaps
    descends: bool = True  # where the budget is missed, come as low as can be; else as with all recomputed that helps

    def __post_init__(self) -> None:
        if not 0.0 <= self.max_swapping_ratio <= 1.0:
            raise ValueError(f"max_swapping_ratio: expected 0 to 1, got {self.max_swapping_ratio}")

    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        evaluator = Evaluator(trace, hardware)

        def find(budget_bytes: int, *, recompute_for: int | None = None) -> tuple[Codes, int]:
            job = _Job(evaluator, self.max_swapping_ratio)
            lane: _Lane | None = _Lane()
            while lane is not None and (hardware.copy_compute_share == 0.0 or job.peak() > budget_bytes):
                lane = job.swap_one(lane)
            job.recompute(budget_bytes if recompute_for is None else recompute_for)
            return job.codes, job.peak()

        codes, floor = find(budget_bytes)
        if floor > budget_bytes:
            codes, floor = find(budget_bytes, recompute_for=0)
            if self.descends:
                codes, floor = descended(find, (codes, floor), budget_bytes)
        if floor > budget_bytes:
            raise BudgetError(
                f"tensile's rule stops at {format_bytes(floor)} ({floor} bytes), the budget is "
                f"{format_bytes(budget_bytes)}; raise the budget, or use planner auto, which also waits for swaps",
                budget_bytes=budget_bytes,
                floor_bytes=floor,
            )
        counts = np.bincount(codes, minlength=5)
        notes = (f"{counts[KEEP]} gaps kept, {counts[OVERLAP]} swapped, {counts[SHARED]} recomputed",)
        return evaluator.plan(codes, planner="tensile", budget_bytes=budget_bytes, notes=notes)


@dataclass(frozen=True, slots=True)
class _Lane:
    """The one lane of all copies: when it is busy, in order."""

    busy: tuple[tuple[int, int], ...] = ()  # nanoseconds

    def earliest(self, length: int, after: int, before: int) -> int | None:
        """When a copy of this length can start so that it is over by `before`."""
        start = after
        for begin, end in self.busy:
            if begin >= start + length:
                break
            start = max(start, end)
        return start if start + length <= before else None

    def latest(self, length: int, after: int, before: int) -> int | None:
        """When it can start at the latest."""
        end = before
        for begin, over in reversed(self.busy):
            if over <= end - length:
                break
            end = min(end, begin)
        return end - length if end - length >= after else None

    def reserved(self, start: int, length: int) -> _Lane:
        place = bisect.bisect(self.busy, (start, start + length))
        return _Lane((*self.busy[:place], (start, start + length), *self.busy[place:]))


class _Job:
    """One trace: when its ticks are reached, and what was decided so far. A storage is named by its first gap."""

    def __init__(self, evaluator: Evaluator, max_swapping_ratio: float) -> None:
        self.evaluator = evaluator
        self.codes: Codes = np.full(evaluator.gaps, KEEP, np.int8)
        self.times = _tick_times(evaluator)
        self.gaps_of: dict[int, list[int]] = {}
        starts, ends, firsts = (evaluator.tables.gaps[:, column].tolist() for column in (t.G_START, t.G_END, t.G_FIRST))
        for gap, first in enumerate(firsts):
            if starts[gap] < ends[gap]:
                self.gaps_of.setdefault(first, []).append(gap)
        self.may_swap = int(max_swapping_ratio * len(self.gaps_of))
        self.starts, self.ends, self.firsts = starts, ends, firsts

    def peak(self) -> int:
        return self.evaluator.evaluate(self.codes)[1]

    def released(self) -> set[int]:
        return {self.firsts[gap] for gap in np.flatnonzero(self.codes != KEEP).tolist()}

    def swap_one(self, lane: _Lane) -> _Lane | None:
        """Algorithm 1: swap one tensor that stands at the peak. The lane after that; None where none can be swapped."""
        released = self.released()
        if len(released) >= self.may_swap or not self.times:
            return None
        before, _ = self.evaluator.evaluate(self.codes)
        curve = self.evaluator.curve().copy()
        peak_tick = int(curve.argmax())
        at_peak = [
            first
            for first, gaps in self.gaps_of.items()
            if first not in released and any(self.starts[gap] <= peak_tick < self.ends[gap] for gap in gaps)
        ]
        sizes = self.evaluator.tables.gaps[:, t.G_BYTES]
        for first in sorted(at_peak, key=lambda first: (-sizes[first], first)):
            after, swapped = self._scheduling_swap(first, peak_tick, lane)
            if not swapped:
                continue
            self.codes[swapped] = OVERLAP
            nanoseconds, _ = self.evaluator.evaluate(self.codes)
            falls = self.evaluator.curve()[peak_tick] < curve[peak_tick]
            if falls and nanoseconds - before <= self._copying_nanoseconds(swapped):
                return after
            self.codes[swapped] = KEEP
        return None

    def _scheduling_swap(self, first: int, peak_tick: int, lane: _Lane) -> tuple[_Lane, list[int]]:
        """Places on the lane for the copies of a storage, and the gaps it is away in: none if there is no place."""
        copy_out, copy_in = (int(self.evaluator.tables.gaps[first, column]) for column in (t.G_OUT, t.G_IN))
        gaps = self.gaps_of[first]
        for position, gap in enumerate(gaps):
            if self.starts[gap] > peak_tick:
                break
            out = lane.earliest(copy_out, self.times[self.starts[gap]], self.times[peak_tick])
            if out is None:
                break
            with_out = lane.reserved(out, copy_out)
            back = out + copy_out
            if peak_tick < self.ends[gap]:
                back = max(back, self.times[peak_tick + 1])  # before that it would stand at the peak again
            start = with_out.latest(copy_in, back, self.times[self.ends[gap]])
            if start is None:
                continue
            after, swapped = with_out.reserved(start, copy_in), [gap]
            for later in gaps[position + 1 :]:
                start = after.latest(copy_in, self.times[self.starts[later] + 1], self.times[self.ends[later]])
                if start is not None:
                    after = after.reserved(start, copy_in)
                    swapped.append(later)
            return after, swapped
        return lane, []

    def _copying_nanoseconds(self, gaps: list[int]) -> int:
        """What computation loses to these copies where they share its cores; it need not wait for that."""
        rates, row = self.evaluator.tables.rates, self.evaluator.tables.gaps[gaps[0]]
        slowest = max(rates[t.R_OUT], rates[t.R_DUPLEX_OUT]), max(rates[t.R_IN], rates[t.R_DUPLEX_IN])
        copies = [int(rates[t.R_LATENCY] + row[t.G_BYTES] * rate) for rate in slowest]
        return int((copies[0] + len(gaps) * copies[1]) * rates[t.R_SHARE])

    def recompute(self, budget_bytes: int) -> None:
        """Recompute by MSPS until the budget is met; where it never is, up to where the peak is lowest."""
        needed: set[int] = set()  # storages that replays read
        _, lowest, excess = self.evaluator.judge(self.codes, budget_bytes)
        best, curve = self.codes.copy(), self.evaluator.curve().copy()
        for gap, reads in self._by_msps() if excess else ():
            released = self.released()
            saves = (curve[self.starts[gap] : self.ends[gap]] > budget_bytes).any()
            if not saves or self.firsts[gap] in released | needed or reads & released:
                continue
            self.codes[gap] = SHARED
            _, peak, remains = self.evaluator.judge(self.codes, budget_bytes)
            if remains >= excess:
                self.codes[gap] = KEEP
                continue
            needed |= reads
            excess, curve = remains, self.evaluator.curve().copy()
            if peak < lowest:
                lowest, best = peak, self.codes.copy()
            if excess == 0:
                break
        self.codes[:] = best

    def _by_msps(self) -> list[tuple[int, frozenset[int]]]:
        """Gaps that can be recomputed, most bytes per nanosecond first; and the storages that this reads."""
        sizes = self.evaluator.tables.gaps[:, t.G_BYTES].tolist()
        found = []
        for gap in (gap for gaps in self.gaps_of.values() for gap in gaps):
            made_by = recipe(self.evaluator.tables, gap)
            if made_by is not None:
                found.append((-sizes[gap] / (made_by.nanoseconds + 1), gap, made_by.reads))
        return [(gap, reads) for _, gap, reads in sorted(found, key=lambda entry: entry[:2])]


def _tick_times(evaluator: Evaluator) -> list[int]:
    """When each tick is reached, in nanoseconds, with everything kept and the hooks at work."""
    return t.reached(t.with_ticks(evaluator.tables)[:-1])
