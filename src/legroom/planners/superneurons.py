"""SuperNeurons: swap what convolutions made, recompute what is cheap.

L. Wang, J. Ye, Y. Zhao, W. Wu, A. Li, S. L. Song, Z. Xu, T. Kraska: "SuperNeurons: Dynamic GPU Memory Management for
Training Deep Neural Networks", PPoPP 2018.

The action follows from the kind of layer alone. Outputs of convolutions are checkpoints: they go to the host and are
fetched while the backward pass is at the checkpoint before. Layers between two checkpoints (pooling, activation,
normalisation) form a segment and are recomputed from the first of the two. Recomputation is cost-aware: where the
outputs of a segment together take no more than the largest layer does anyway (l_peak), the segment is run once and
stays (speed-centric); else each output is recomputed alone, again for each use (memory-centric).

The tensor cache: checkpoints stay in memory as long as they fit, and the least recently used goes first. In a training
step the order of uses is known: in the forward pass the oldest checkpoint is always the least recently used, and in the
backward pass nothing has to go that was not needed by then. So the cache is stated here as one number: how many
checkpoints go, the oldest first; the least number with which the exact peak is within the budget, by bisection.

Guarantee: none below its own floor, the peak with an empty cache.

Here: a layer is an op; multiplications of matrices and attention are checkpoints as well as convolutions, all other ops
are cheap (casts, additions, concatenations are not in the paper). A layer is as large as all it reads and writes. An
autograd engine does not save every output of a convolution: a saved tensor that cannot be recomputed without running a
checkpoint again takes that checkpoint's place, and is swapped. What cannot be recomputed at all (dropout) is kept, as
are copies of weights in another type.

Deviations. When the cache is full SuperNeurons copies out on demand; a plan knows beforehand what will go and copies it
as soon as its layer is done, as vdnn does (the deviations named there hold here). Left out: the pool of preallocated
memory, and the choice of convolution workspaces.
"""

from __future__ import annotations

import dataclasses
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
    is_matmul,
    layer_by_layer,
)
from legroom.schedule import check_schedule, lower
from legroom.simulate import simulate


@dataclass(frozen=True, slots=True)
class SuperNeurons:
    cache: bool = True  # without it every checkpoint goes, whatever the budget

    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        evaluator = Evaluator(trace, hardware)
        checkpoints, segments = _by_layer(trace, evaluator)
        recomputed = _cost_aware(trace, evaluator, segments)
        ahead = _one_ahead(trace, checkpoints)

        def draft(count: int) -> Plan:
            """With so many checkpoints out of the cache, the least recently used ones."""
            decisions = list(recomputed)
            for gap, swap in layer_by_layer(evaluator.tables, {gap: ahead[gap] for gap in checkpoints[:count]}).items():
                decisions[gap] = swap
            again = sum(isinstance(decision, Recompute) for decision in recomputed)
            notes = (f"{len(decisions) - count - again} gaps kept, {count} swapped, {again} recomputed",)
            return Plan(tuple(decisions), signature(trace), "superneurons", budget_bytes, 0, 0.0, notes)

        def peak(count: int) -> int:
            return check_schedule(trace, lower(trace, draft(count), hardware))

        floor = peak(len(checkpoints))
        if floor > budget_bytes:
            raise above_budget("superneurons", floor=floor, budget_bytes=budget_bytes)
        counts = range(len(checkpoints)) if self.cache else ()
        count = bisect_left(counts, True, key=lambda count: peak(count) <= budget_bytes) if counts else len(checkpoints)
        plan = draft(count)
        schedule = lower(trace, plan, hardware)
        return dataclasses.replace(
            plan,
            predicted_peak_bytes=check_schedule(trace, schedule),
            predicted_seconds=simulate(trace, schedule, hardware).seconds,
        )


def _is_checkpoint(op: Op) -> bool:
    return is_convolution(op) or is_matmul(op)


def _by_layer(trace: Trace, evaluator: Evaluator) -> tuple[list[int], dict[int, list[int]]]:
    """Gaps to swap, the least recently used first; and gaps to recompute, by the checkpoint their segment starts at."""
    maker = {storage: op for op in reversed(trace.ops) for storage, version in op.writes if version == 0}
    maps = feature_maps(trace)
    checkpoints: list[tuple[int, int]] = []
    segments: dict[int, list[int]] = {}
    heavy = [op.id for op in trace.ops if op.phase == "forward" and _is_checkpoint(op)]
    for gap in gaps_into_backward(trace):
        if gap.storage not in maps or gap.storage not in maker:
            continue
        found = lineage(evaluator.tables, gap.id)
        ops = [maker[gap.storage].id] if found is None else found[0]
        if any(_is_checkpoint(trace.ops[op]) for op in ops):
            checkpoints.append((gap.start, gap.id))
        elif found is not None:
            segments.setdefault(bisect_left(heavy, maker[gap.storage].id), []).append(gap.id)
    return [gap for _, gap in sorted(checkpoints)], segments


def _cost_aware(trace: Trace, evaluator: Evaluator, segments: dict[int, list[int]]) -> list[Decision]:
    """Each segment recomputed once, or output by output where it would be larger than any layer is."""
    l_peak = max((_layer_bytes(trace, op) for op in trace.ops if op.phase == "forward"), default=0)
    gaps = trace.gaps
    codes = np.full(evaluator.gaps, KEEP, np.int8)
    for _, inside in sorted(segments.items()):
        together = sum(trace.storages[gaps[gap].storage].nbytes for gap in inside)
        codes = recompute_all(evaluator, codes, inside, SHARED if together <= l_peak else RECOMPUTE)
    names: dict[int, Decision] = {KEEP: Keep(), RECOMPUTE: Recompute(), SHARED: Recompute(share=True)}
    return [names[code] for code in codes.tolist()]


def _layer_bytes(trace: Trace, op: Op) -> int:
    return op.workspace_bytes + sum(trace.storages[s].nbytes for s in {s for s, _ in op.reads + op.writes})


def _one_ahead(trace: Trace, checkpoints: list[int]) -> dict[int, int]:
    """Each is fetched when the backward pass comes to the checkpoint before, the first one when that pass starts."""
    gaps = trace.gaps
    ends = sorted({gaps[gap].end for gap in checkpoints})
    first = backward_tick(trace)
    out = {}
    for gap in checkpoints:
        before = bisect_left(ends, gaps[gap].end) - 1
        out[gap] = gaps[gap].end - (ends[before] if before >= 0 else min(first, gaps[gap].end))
    return out
