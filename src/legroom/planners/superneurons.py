"""SuperNeurons: swap what convolutions made, recompute what is cheap.

L. Wang, J. Ye, Y. Zhao, W. Wu, A. Li, S. L. Song, Z. Xu, T. Kraska: "SuperNeurons: Dynamic GPU Memory Management for
Training Deep Neural Networks", PPoPP 2018.

The action follows from the kind of layer alone. Outputs of convolutions are checkpoints: they go to the host and are
fetched while the backward pass is at the checkpoint before. So are those of full layers and of layers where branches
meet, additions and concatenations (the paper does not say; `mem_controller_t` of the authors' code does: CONV, FC,
JOIN_L, FORK_L, CONCAT). Layers between two checkpoints (pooling, activation, normalisation) form a segment and are
recomputed from the first of the two. Recomputation is cost-aware: where the outputs of a segment together take no more
than the largest layer does anyway (l_peak), the segment is run once and stays (speed-centric); else each layer is
recomputed alone, again for each use (memory-centric).

The tensor cache: checkpoints stay in memory as long as they fit, and the least recently used goes first. In a training
step the order of uses is known: in the forward pass the oldest checkpoint is always the least recently used, and in the
backward pass nothing has to go that was not needed by then. So the cache is stated here as one number: how many
checkpoints go, the oldest first; the least number with which the exact peak is within the budget, by bisection. The
cache makes room for what is needed, not for what is fetched ahead: where there is none, the fetch waits until it is
needed, and compute for the fetch.

Guarantee: none below its own floor, the peak with an empty cache and no fetch ahead.

Here: a layer is an op; multiplications of matrices and attention are checkpoints as well as convolutions, branches meet
in an op that adds or concatenates two feature maps or more, all other ops are cheap (casts are not in the paper). What
forks is one storage here, and is a checkpoint where branches meet in it. A layer is as large as all it reads and
writes. An autograd engine does not save every output of a convolution: a saved tensor that cannot be recomputed without
running a checkpoint again takes that checkpoint's place, and is swapped. Where a layer makes two tensors (the maxima of
a pooling and where they were), they are made again together, when the first of them is needed. What cannot be
recomputed at all (dropout) is kept, as are copies of weights in another type.

Deviations. When the cache is full SuperNeurons copies out on demand; a plan knows beforehand what will go and copies it
as soon as its layer is done, as vdnn does (the deviations named there hold here). Left out: the pool of preallocated
memory, and the choice of convolution workspaces.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from legroom.evaluate import KEEP, RECOMPUTE, SHARED, Evaluator
from legroom.hardware import Hardware
from legroom.ir import Op, Trace
from legroom.plan import Decision, Keep, Plan, Recompute, signature
from legroom.planners.capuchin import lineage
from legroom.planners.sublinear import recompute_all
from legroom.planners.vdnn import (
    above_budget,
    backward_tick,
    feature_maps,
    gaps_into_backward,
    is_convolution,
    is_join,
    is_matmul,
    layer_by_layer,
)
from legroom.schedule import codes_of


@dataclass(frozen=True, slots=True)
class SuperNeurons:
    cache: bool = True  # without it every checkpoint goes, whatever the budget

    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        evaluator = Evaluator(trace, hardware)
        layers = _by_layer(trace, evaluator)
        checkpoints = layers.checkpoints
        recomputed = _cost_aware(trace, evaluator, layers)
        ahead = _one_ahead(trace, checkpoints)
        ends = [gap.end for gap in trace.gaps]

        def draft(count: int, ahead: dict[int, int]) -> _Draft:
            """With so many checkpoints out of the cache, the least recently used ones."""
            decisions = list(recomputed)
            for gap, swap in layer_by_layer(evaluator.tables, {gap: ahead[gap] for gap in checkpoints[:count]}).items():
                decisions[gap] = swap
            nanoseconds, peak, _ = evaluator.judge_ahead(*codes_of(tuple(decisions)), budget_bytes)
            return _Draft(tuple(decisions), count, nanoseconds, peak)

        def within_budget(count: int) -> _Draft | None:
            """Fetched ahead as far as there is room; None where that is not enough."""
            fetches = dict(ahead)
            while True:
                found = draft(count, fetches)
                short = np.flatnonzero(evaluator.curve() > budget_bytes).tolist()
                early = {gap for gap in checkpoints[:count] if fetches[gap] and _stands(ends[gap], fetches[gap], short)}
                if not short or not early:
                    return None if short else found
                fetches |= dict.fromkeys(early, 0)

        every = len(checkpoints)
        at_once = dict.fromkeys(checkpoints, 0)
        least = draft(every, at_once)
        if least.peak_bytes > budget_bytes and self.cache:
            # Seldom, fewer take less: one that comes back may stand beside something that a kept one would not.
            least = min((draft(count, at_once) for count in range(every + 1)), key=lambda found: found.peak_bytes)
        if least.peak_bytes > budget_bytes:
            if trace.peak_bytes > budget_bytes:
                floor = min(least.peak_bytes, trace.peak_bytes)
                raise above_budget("superneurons", floor=floor, budget_bytes=budget_bytes)
            # Its replays took more than everything does.
            kept = np.full(evaluator.gaps, KEEP, np.int8)
            notes = ("everything is kept",)
            return evaluator.plan(kept, planner="superneurons", budget_bytes=budget_bytes, notes=notes)
        count = (
            bisect_left(range(every), True, key=lambda count: within_budget(count) is not None) if self.cache else every
        )
        found = within_budget(count) or least
        again = sum(isinstance(decision, Recompute) for decision in recomputed)
        return Plan(
            found.decisions,
            signature(trace),
            "superneurons",
            budget_bytes,
            found.peak_bytes,
            found.nanoseconds / 1e9,
            (f"{evaluator.gaps - found.swapped - again} gaps kept, {found.swapped} swapped, {again} recomputed",),
        )


@dataclass(frozen=True, slots=True)
class _Draft:
    decisions: tuple[Decision, ...]
    swapped: int
    nanoseconds: int
    peak_bytes: int


def _stands(end: int, ahead: int, ticks: list[int]) -> bool:
    """Whether what is fetched so many ticks ahead of the end of its gap is back too early at one of these ticks."""
    at = bisect_left(ticks, end - ahead)
    return at < len(ticks) and ticks[at] < end


@dataclass(frozen=True, slots=True)
class _Layers:
    """What the rule says about the gaps of feature maps."""

    checkpoints: tuple[int, ...]  # to swap, the least recently used first
    segments: tuple[tuple[int, ...], ...]  # to recompute, in the order of the forward pass
    together: frozenset[int]  # of these, what comes back only along with something else that its layer made


def _by_layer(trace: Trace, evaluator: Evaluator) -> _Layers:
    maps = feature_maps(trace)
    maker = {storage: op.id for op in reversed(trace.ops) for storage, version in op.writes if version == 0}
    gaps = [gap for gap in gaps_into_backward(trace) if gap.storage in maps and gap.storage in maker]
    # Of all that a layer made, what is needed first.
    first = {maker[gap.storage]: gap.id for gap in sorted(gaps, key=lambda gap: -gap.end)}
    heavy = [op.id for op in trace.ops if op.phase == "forward" and _is_checkpoint(op, maps)]
    checkpoints: list[tuple[int, int]] = []
    segments: dict[int, list[int]] = {}
    together: set[int] = set()
    for gap in gaps:
        op = maker[gap.storage]
        if _is_cheap(lineage(evaluator.tables, gap.id), heavy):
            segments.setdefault(bisect_left(heavy, op), []).append(gap.id)
        elif first[op] != gap.id and _is_cheap(lineage(evaluator.tables, first[op]), heavy):
            segments.setdefault(bisect_left(heavy, op), []).append(gap.id)
            together.add(gap.id)
        elif op in heavy or lineage(evaluator.tables, gap.id) is not None:
            checkpoints.append((gap.start, gap.id))
    swapped = tuple(gap for _, gap in sorted(checkpoints))
    return _Layers(swapped, tuple(tuple(inside) for _, inside in sorted(segments.items())), frozenset(together))


def _is_checkpoint(op: Op, maps: frozenset[int]) -> bool:
    branches = {storage for storage, _ in op.reads if storage in maps}
    return is_convolution(op) or is_matmul(op) or (is_join(op) and len(branches) > 1)


def _is_cheap(found: tuple[list[int], list[int]] | None, heavy: list[int]) -> bool:
    return found is not None and not set(found[0]) & set(heavy)


def _cost_aware(trace: Trace, evaluator: Evaluator, layers: _Layers) -> list[Decision]:
    """Each segment recomputed once, or layer by layer where it would be larger than any layer is."""
    l_peak = max((_layer_bytes(trace, op) for op in trace.ops if op.phase == "forward"), default=0)
    gaps = trace.gaps
    codes = np.full(evaluator.gaps, KEEP, np.int8)
    for inside in layers.segments:
        nbytes = sum(trace.storages[gaps[gap].storage].nbytes for gap in inside)
        alone = [gap for gap in inside if nbytes > l_peak and gap not in layers.together]
        codes = recompute_all(evaluator, codes, alone, RECOMPUTE)
        codes = recompute_all(evaluator, codes, [gap for gap in inside if gap not in alone], SHARED)
    names: dict[int, Decision] = {KEEP: Keep(), RECOMPUTE: Recompute(), SHARED: Recompute(share=True)}
    return [names[code] for code in codes.tolist()]


def _layer_bytes(trace: Trace, op: Op) -> int:
    return op.workspace_bytes + sum(trace.storages[s].nbytes for s in {s for s, _ in op.reads + op.writes})


def _one_ahead(trace: Trace, checkpoints: tuple[int, ...]) -> dict[int, int]:
    """Each is fetched when the backward pass comes to the checkpoint before, the first one when that pass starts."""
    gaps = trace.gaps
    ends = sorted({gaps[gap].end for gap in checkpoints})
    first = backward_tick(trace)
    out = {}
    for gap in checkpoints:
        before = bisect_left(ends, gaps[gap].end) - 1
        out[gap] = gaps[gap].end - (ends[before] if before >= 0 else min(first, gaps[gap].end))
    return out
