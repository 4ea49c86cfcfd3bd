"""Mimose: checkpoint whole layers, chosen by their sizes, fast enough to choose anew for every input size.

Jianjin Liao, Mingzhen Li, Hailong Yang, Qingxiao Sun, Biao Sun, Jiwei Hao, Tianyu Feng, Fengwei Yu, Shengdong Chen, Ye
Tao, Zicheng Zhang, Zhongzhi Luan and Depei Qian, "Exploiting Input Tensor Dynamics in Activation Checkpointing for
Efficient Training on GPU", IPDPS 2023.

In two parts. `layers_of()` is done once for a trace: what is inside each layer. `choose()` is algorithm 1 from line 2
on. It knows nothing but the size of each layer and the excess, so it can be asked again for other sizes or another
budget. Layers fall into buckets of sizes within 10 %. While there is excess, the bucket nearest above it gives a layer,
or the bucket of the largest layers if none covers it. Within a bucket the earliest in the forward pass goes first: a
late one is restored while all others still stand.

A layer is the innermost numbered module that contains others ("blocks.3", "layer1.0"). Where there is none it is the
numbered module ("features.4"), else the module that contains the one that runs ("embeddings"), else that itself. Inside
it are the storages that its ops make and no other op of the forward pass reads; these are recomputed and shared. What
goes in and what comes out is kept.

Guarantee: a plan within the budget, or BudgetError with the peak at which every layer is checkpointed, which the paper
calls the lower bound. Nothing about time.

Deviations. Sizes are known from the trace, where the paper predicts them by a quadratic in the input size. Line 15 with
line 19 takes the largest layers of all that cover the excess; the text says the nearest, and that is done. The paper
stops when the sizes add up; here the exact peak is asked for then, and while it is above the budget the choice goes on
among the layers left, with what is missing as the excess. What cannot be replayed bit for bit is kept. A storage that
was recomputed stays, so only its gap between forward and backward pass counts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from legroom import tables as t
from legroom.errors import BudgetError
from legroom.evaluate import IMPOSSIBLE, KEEP, SHARED, Evaluator
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.kernels.codes import Codes
from legroom.plan import Plan
from legroom.planners.floors import descended
from legroom.units import format_bytes

SIMILAR = 0.9  # of the largest in the bucket: line 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Mimose:
    descends: bool = True  # where the budget is missed, come as low as can be; else as with all layers checkpointed

    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        evaluator = Evaluator(trace, hardware)
        layers = layers_of(evaluator)
        taken, peak = self._until_it_fits(evaluator, layers, budget_bytes)
        if peak > budget_bytes:
            every = layers, evaluator.evaluate(_checkpointed(evaluator, layers))[1]
            nothing: tuple[tuple[Layer, ...], int] = (), trace.peak_bytes
            taken, peak = min(every, nothing, key=lambda found: found[1])
            if self.descends:
                lower = partial(self._until_it_fits, evaluator, layers)
                taken, peak = descended(lower, (taken, peak), budget_bytes)
            if peak > budget_bytes:
                raise BudgetError(
                    f"mimose's rule stops at {format_bytes(peak)} ({peak} bytes) with {len(taken)} of {len(layers)} "
                    f"layers checkpointed, the budget is {format_bytes(budget_bytes)}; raise the budget, or use "
                    "planner auto, which also swaps",
                    budget_bytes=budget_bytes,
                    floor_bytes=peak,
                )
        names = ", ".join(layer.name for layer in taken) or "none"
        notes = (f"{len(taken)} of {len(layers)} layers checkpointed", f"in the order chosen: {names}")
        codes = _checkpointed(evaluator, taken)
        return evaluator.plan(codes, planner="mimose", budget_bytes=budget_bytes, notes=notes)

    def _until_it_fits(
        self, evaluator: Evaluator, layers: tuple[Layer, ...], budget_bytes: int
    ) -> tuple[tuple[Layer, ...], int]:
        """The layers chosen, and the exact peak with them."""
        taken: tuple[Layer, ...] = ()
        left = layers
        peak = evaluator.evaluate(_checkpointed(evaluator, taken))[1]
        while peak > budget_bytes and left:
            chosen = choose([layer.nbytes for layer in left], peak - budget_bytes)
            taken += tuple(left[index] for index in chosen)
            left = tuple(layer for index, layer in enumerate(left) if index not in chosen)
            peak = evaluator.evaluate(_checkpointed(evaluator, taken))[1]
        return taken, peak


def choose(sizes: Sequence[int], excess_bytes: int) -> list[int]:
    """Which layers to checkpoint, in the order in which they are taken. `sizes` are in forward order.

    For 30 layers it takes 0.06 to 0.2 ms on an ARM server core.
    """
    buckets: list[list[int]] = []  # of falling sizes
    largest = 0.0
    for layer in sorted(range(len(sizes)), key=lambda layer: -sizes[layer]):
        if not buckets or sizes[layer] <= largest * SIMILAR:
            buckets.append([])
            largest = sizes[layer]
        buckets[-1].append(layer)
    for bucket in buckets:
        bucket.sort()
    chosen = []
    while excess_bytes > 0 and buckets:
        covering = [bucket for bucket in buckets if max(sizes[layer] for layer in bucket) >= excess_bytes]
        bucket = covering[-1] if covering else buckets[0]
        layer = bucket.pop(0)
        if not bucket:
            buckets.remove(bucket)
        chosen.append(layer)
        excess_bytes -= sizes[layer]
    return chosen


@dataclass(frozen=True, slots=True)
class Layer:
    name: str
    nbytes: int  # of what is inside
    gaps: tuple[int, ...]  # to be recomputed


def layers_of(evaluator: Evaluator) -> tuple[Layer, ...]:
    """The layers that have something inside, in the order of the forward pass."""
    trace, gaps = evaluator.trace, evaluator.tables.gaps
    forward = [op for op in trace.ops if op.phase == "forward"]
    modules = {op.module for op in forward}
    parts = [module.split(".") for module in modules]
    containers = {".".join(path[:depth]) for path in parts for depth in range(1, len(path))}
    names = {module: layer_name(module, containers) for module in modules}
    around: dict[int, set[str]] = {}  # storage: layers that write or read it
    made: dict[int, int] = {}  # storage: the op that made it
    for op in forward:
        for storage, _ in (*op.reads, *op.writes):
            around.setdefault(storage, set()).add(names[op.module])
        for storage, _ in op.writes:
            made.setdefault(storage, op.id)
    border = next((op.id for op in trace.ops if op.phase == "backward"), len(trace.ops))
    inside: dict[str, list[int]] = {}
    since: dict[str, int] = {}  # layer: the first op that makes something inside it
    for gap, (index, start, end) in enumerate(gaps[:, [t.G_STORAGE, t.G_START, t.G_END]].tolist()):
        crosses = start < end and trace.ticks[start].op <= border <= trace.ticks[end].op
        owners = around.get(index, set())
        if crosses and len(owners) == 1 and "" not in owners and index in made:
            (name,) = owners
            inside.setdefault(name, []).append(gap)
            since[name] = min(since.get(name, made[index]), made[index])
    out = []
    for name in sorted(inside, key=since.__getitem__):
        possible = _possible(evaluator, inside[name])
        nbytes = sum({int(gaps[gap, t.G_STORAGE]): int(gaps[gap, t.G_BYTES]) for gap in possible}.values())
        if nbytes:
            out.append(Layer(name, nbytes, possible))
    return tuple(out)


def layer_name(module: str, containers: Collection[str]) -> str:
    """The layer that a module path belongs to, "" for no module."""
    parts = module.split(".")
    numbered = [".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()]
    for prefix in reversed(numbered):
        if prefix in containers:
            return prefix
    return numbered[-1] if numbered else ".".join(parts[:-1]) or module


def _possible(evaluator: Evaluator, inside: list[int]) -> tuple[int, ...]:
    """Those of these gaps that can be recomputed together, everything else kept."""
    codes: Codes = np.full(evaluator.gaps, KEEP, np.int8)
    for gap in inside:
        codes[gap] = SHARED
        if evaluator.judge(codes, t.NEVER) == IMPOSSIBLE:
            codes[gap] = KEEP
    return tuple(np.flatnonzero(codes == SHARED).tolist())


def _checkpointed(evaluator: Evaluator, layers: tuple[Layer, ...]) -> Codes:
    """Codes with these layers checkpointed, but for those that cannot be with the ones before them."""
    codes: Codes = np.full(evaluator.gaps, KEEP, np.int8)
    for layer in layers:
        codes[list(layer.gaps)] = SHARED
    if evaluator.judge(codes, t.NEVER) != IMPOSSIBLE:
        return codes
    codes[:] = KEEP
    for layer in layers:
        codes[list(layer.gaps)] = SHARED
        if evaluator.judge(codes, t.NEVER) == IMPOSSIBLE:
            codes[list(layer.gaps)] = KEEP
    return codes
