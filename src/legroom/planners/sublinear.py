"""Sublinear memory: keep the borders of segments, recompute what lies inside.

T. Chen, B. Xu, C. Zhang, C. Guestrin: "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174, 2016. It is
what users of torch.utils.checkpoint do by hand.

The forward pass is cut into segments. What crosses a border is kept; everything else goes, and a segment is run once
more, as a whole, when the backward pass comes to it. With sqrt(n) segments of equal size the borders and the one
segment that stands in memory cost sqrt(n) each. As in the paper, the number of segments is found by trying: here all of
them are, judged by their exact peak, and the fastest that fits is taken, the one with fewer segments among equals.
Where everything fits, everything is kept.

Guarantee: none below its own floor, the least peak of all these divisions.

Here: a border may lie where the fewest values cross: one in a chain of blocks. Where that gives less than sqrt(n)
places, two may cross, and so on (skip connections of a U-Net). Segments have equal bytes to recompute, as far as the
places allow. What cannot be recomputed stays, and weights that were copied into another type stay too.

Deviations. Ops that only make a border are not run again, as what they make is there. The recursive version, which
takes log(n) memory for n log(n) time, is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from legroom.evaluate import KEEP, SHARED, Evaluator
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.kernels.codes import Codes
from legroom.plan import Plan
from legroom.planners.capuchin import lineage
from legroom.planners.vdnn import above_budget, feature_maps, gaps_into_backward
from legroom.tables import NEVER

_MOST_DIVISIONS = 256  # tried; with more places than that, numbers of segments are left out, large ones first


@dataclass(frozen=True, slots=True)
class Sublinear:
    segments: int = 0  # 0: as many as are best; more than the net has places for are as many as there are

    def __post_init__(self) -> None:
        if self.segments < 0:
            raise ValueError(f"segments must be 0 or more, got {self.segments}")

    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        evaluator = Evaluator(trace, hardware)
        forward = _Forward(trace)
        codes = np.full(evaluator.gaps, KEEP, np.int8)
        _, plain_peak, excess = evaluator.judge(codes, budget_bytes)
        if excess == 0 and not self.segments:
            return evaluator.plan(codes, planner="sublinear", budget_bytes=budget_bytes, notes=("everything kept",))
        floor, best = NEVER if self.segments else plain_peak, None
        gaps = [gap for gap in forward.gaps if lineage(evaluator.tables, gap) is not None]
        for borders in forward.divisions(self.segments):
            kept = forward.kept(borders)
            trial = recompute_all(evaluator, codes, [gap for gap in gaps if forward.gaps[gap] not in kept], SHARED)
            seconds, peak, excess = evaluator.judge(trial, budget_bytes)
            floor = min(floor, peak)
            if excess == 0 and (best is None or (seconds, len(borders)) < best[:2]):
                best = seconds, len(borders), trial
        if best is None:
            raise above_budget("sublinear", floor=floor, budget_bytes=budget_bytes)
        notes = (f"{best[1] + 1} segments, {int((best[2] == SHARED).sum())} gaps recomputed",)
        return evaluator.plan(best[2], planner="sublinear", budget_bytes=budget_bytes, notes=notes)


def recompute_all(evaluator: Evaluator, codes: Codes, gaps: list[int], code: int) -> Codes:
    """The codes with all these gaps recomputed, less those that make it impossible: found by halving, earlier first."""
    trial = codes.copy()
    trial[gaps] = code
    if not gaps or evaluator.evaluate(trial)[0] != NEVER:
        return trial
    if len(gaps) == 1:
        return codes
    middle = len(gaps) // 2
    return recompute_all(evaluator, recompute_all(evaluator, codes, gaps[:middle], code), gaps[middle:], code)


class _Forward:
    """The forward pass as a row of places for borders. Place p lies before op p."""

    def __init__(self, trace: Trace) -> None:
        maps = feature_maps(trace)
        self.gaps = {gap.id: gap.storage for gap in gaps_into_backward(trace) if gap.storage in maps}
        self.made: dict[int, int] = {}  # storage: the op that allocates it
        self.read: dict[int, int] = {}  # storage: the last op of the forward pass that reads it
        for op in trace.ops:
            if op.phase != "forward":
                continue
            self.read.update((storage, op.id) for storage, _ in op.reads)
            self.made.update((storage, op.id) for storage, version in op.writes if version == 0 and storage in maps)
        saved = {storage for storage in self.gaps.values() if storage in self.made}
        self.places = self._places(least=math.isqrt(len(saved)))
        # Bytes to recompute up to each place.
        nbytes = np.zeros(len(trace.ops) + 1, np.int64)
        for storage in saved:
            nbytes[self.made[storage] + 1] += trace.storages[storage].nbytes
        self.until = np.cumsum(nbytes)

    def _places(self, *, least: int) -> list[int]:
        """Where the fewest values cross, at least so many places if there are; of places with the same, the first."""
        changes: dict[int, int] = {}
        for storage, op in self.made.items():
            last = self.read.get(storage, -1)
            if last > op:
                changes[op + 1] = changes.get(op + 1, 0) + 1
                changes[last + 1] = changes.get(last + 1, 0) - 1
        crossing, by_count = 0, dict[int, list[int]]()
        for place in sorted(changes):
            crossing += changes[place]
            by_count.setdefault(crossing, []).append(place)
        by_count.pop(0, None)  # where nothing crosses, nothing ties one side to the other: before the first, after all
        places: list[int] = []
        for _, more in sorted(by_count.items()):
            places += more
            if len(places) >= least:
                break
        return sorted(places)

    def divisions(self, segments: int) -> list[tuple[int, ...]]:
        """Borders of equal segments, for each number of them or for the one asked for."""
        most = len(self.places) + 1
        counts = [min(segments, most)] if segments else range(1, most + 1)
        if len(counts) > _MOST_DIVISIONS:
            counts = np.unique(np.geomspace(1, most, _MOST_DIVISIONS).astype(np.int64)).tolist()
        return list(dict.fromkeys(self._borders(count) for count in counts))

    def _borders(self, segments: int) -> tuple[int, ...]:
        if segments > len(self.places):
            return tuple(self.places)
        places = np.array(self.places, np.int64)
        marks = np.arange(1, segments) * (float(self.until[-1]) / segments)
        at = np.searchsorted(self.until[places], marks)
        return tuple(dict.fromkeys(places[np.minimum(at, len(places) - 1)].tolist()))

    def kept(self, borders: tuple[int, ...]) -> set[int]:
        """The storages that cross a border."""
        if not borders:
            return set()
        edges = np.array(borders)
        out = set()
        for storage, op in self.made.items():
            first = int(np.searchsorted(edges, op + 1))  # the first border after it is made
            if first < len(edges) and edges[first] <= self.read.get(storage, -1):
                out.add(storage)
        return out
