"""vDNN: the inputs of convolutions wait in host memory.

M. Rhu, N. Gimelshein, J. Clemons, A. Zulfiqar, S. W. Keckler: "vDNN: Virtualized Deep Neural Networks for Scalable,
Memory-Efficient Neural Network Design", MICRO 2016.

The rule is static. The feature map that a layer reads goes out when the last layer that reads it in the forward pass is
done, and comes back while the backward pass is at the layer before (findPrefetchLayer in the paper: each layer of the
backward pass calls for at most one feature map, the next one that is missing, and looks no further than the next
convolution). Weights and gradients stay. The budget plays no part but for the check at the end: no plan above it is
returned, and the rule has one peak, which is its floor.

Here: a layer is an op. `variant="conv"` takes convolutions only, or, in nets without any, ops that multiply matrices
(attention among them); `variant="all"` takes every op that saves what it read. The layer before, in the order of the
backward pass, is the one whose first saved tensor is unpacked last before the first of this layer is; the fetch starts
at that tick. The first layer of the backward pass is called for where that pass starts.

Deviations. vDNN copies out beside the very layer that reads, and the next layer waits for the copy. Nothing can be done
about a storage here before its layer is issued, so the copy runs beside the layer that follows. Plans know copies that
wait at both ends and copies that wait at neither; so where by the measured times a copy is not done when the next one
starts, that next one is synchronous, and compute waits for both. Memory falls layer by layer as in vDNN, one layer
later. Synchronous copies are not fetched ahead: the step is slower than vDNN's by at most the layers of the backward
pass that these fetches could have run beside, which matters little where copies are much longer, or shorter, than
layers.
Left out: the choice of convolution algorithms (those of the trace stay as they are), and with it vDNN-dyn.
"""

from __future__ import annotations

import dataclasses
import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from legroom.errors import BudgetError, quote
from legroom.hardware import Hardware
from legroom.ir import Gap, Op, Trace
from legroom.plan import Decision, Keep, Plan, Swap, signature
from legroom.schedule import check_schedule, lower
from legroom.simulate import simulate
from legroom.tables import G_OUT, G_START, Tables, reached, tabulate, with_ticks
from legroom.units import format_bytes

_CONVOLUTION = re.compile(r"convolution|conv(_transpose)?[123]d|conv_tbc")
_MATMUL = re.compile(r"(mm|bmm|addmm|baddbmm|addbmm|mv|addmv|matmul|linear|_scaled_mm|_int_mm)|\w*attention\w*")
_JOIN = re.compile(r"add_?|cat|concat|stack")


@dataclass(frozen=True, slots=True)
class Vdnn:
    variant: Literal["conv", "all"] = "conv"

    def __post_init__(self) -> None:
        if self.variant not in ("conv", "all"):
            raise ValueError(f"variant must be 'conv' or 'all', got {quote(self.variant)}")

    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        tables = tabulate(trace, hardware)
        decisions: list[Decision] = [Keep()] * len(trace.gaps)
        swapped = layer_by_layer(tables, offloads(trace, variant=self.variant))
        for gap, swap in swapped.items():
            decisions[gap] = swap
        waiting = sum(swap.when == "sync" for swap in swapped.values())
        notes = (f"{len(decisions) - len(swapped)} gaps kept, {len(swapped)} swapped, {waiting} of these with waiting",)
        draft = Plan(tuple(decisions), signature(trace), "vdnn", budget_bytes, 0, 0.0, notes)
        schedule = lower(trace, draft, hardware)
        peak = check_schedule(trace, schedule)
        if peak > budget_bytes:
            raise above_budget("vdnn", floor=peak, budget_bytes=budget_bytes)
        seconds = simulate(trace, schedule, hardware).seconds
        return dataclasses.replace(draft, predicted_peak_bytes=peak, predicted_seconds=seconds)


def layer_by_layer(tables: Tables, ahead: dict[int, int]) -> dict[int, Swap]:
    """How each gap in `ahead` is swapped so that no copy out lags by more than the layer it runs beside."""
    times = access_times(tables)
    together: dict[int, list[int]] = {}  # tick: the gaps that start there
    for gap in ahead:
        together.setdefault(int(tables.gaps[gap, G_START]), []).append(gap)
    out = {gap: Swap(when="ahead", ahead=ticks) for gap, ticks in ahead.items()}
    stalled = lane_free = 0
    for start, gaps in sorted(together.items()):
        now = times[start] + stalled
        lags = lane_free > now
        lane_free = max(lane_free, now) + sum(int(tables.gaps[gap, G_OUT]) for gap in gaps)
        if lags:
            out[max(gaps)] = Swap(when="sync")  # copied last, so compute waits for all that are under way
            stalled += lane_free - now
    return out


def access_times(tables: Tables) -> list[int]:
    """Nanoseconds at which compute reaches each tick with everything kept, and the hooks at work."""
    return reached(with_ticks(tables)[:-1])


def offloads(trace: Trace, *, variant: Literal["conv", "all"] = "conv") -> dict[int, int]:
    """The gaps of the feature maps that vDNN copies out: gap id to how many ticks before its end the fetch starts."""
    maps = feature_maps(trace)
    unpacked = _first_unpacks(trace, maps)
    if variant == "all":
        layers = [trace.ops[op] for op in sorted(unpacked)]
    else:
        layers = _heaviest(op for op in trace.ops if op.phase == "forward")
    reader = {storage: op for op in layers for storage, _ in op.reads if storage in maps}  # the last one
    gaps = [gap for gap in gaps_into_backward(trace) if gap.storage in reader]
    starts = sorted(unpacked[op.id] for op in layers if op.id in unpacked)
    first = backward_tick(trace)
    out = {}
    for gap in gaps:
        here = min(unpacked.get(reader[gap.storage].id, gap.end), gap.end)
        before = bisect_left(starts, here) - 1
        out[gap.id] = gap.end - (starts[before] if before >= 0 else min(first, here))
    return out


def above_budget(planner: str, *, floor: int, budget_bytes: int) -> BudgetError:
    """For a rule that stops somewhere: what it reaches, which is not what the best plan would."""
    return BudgetError(
        f"{planner}'s rule stops at {format_bytes(floor)} ({floor} bytes), the budget is {format_bytes(budget_bytes)}; "
        "planner auto goes down to the floor of the step",
        budget_bytes=budget_bytes,
        floor_bytes=floor,
    )


def is_convolution(op: Op) -> bool:
    return _CONVOLUTION.search(_short(op)) is not None


def is_matmul(op: Op) -> bool:
    return _MATMUL.fullmatch(_short(op)) is not None


def is_join(op: Op) -> bool:
    """Whether branches can meet in it."""
    return _JOIN.fullmatch(_short(op)) is not None


def _short(op: Op) -> str:
    """ "addmm" of "aten.addmm.default"."""
    return op.name.partition(".")[2].partition(".")[0]


def _heaviest(ops: Iterable[Op]) -> list[Op]:
    ops = list(ops)
    return [op for op in ops if is_convolution(op)] or [op for op in ops if is_matmul(op)]


def feature_maps(trace: Trace) -> frozenset[int]:
    """The storages that layers hand on: all that stand for no parameter and are no copy of one in another type."""
    weights = {storage.id for storage in trace.storages if storage.kind in ("parameter", "buffer")}
    maps = {storage.id for storage in trace.storages if storage.kind == "input"}
    for op in trace.ops:
        if op.phase != "forward":
            continue
        made = [storage for storage, version in op.writes if version == 0]
        if len(op.reads) == 1 and op.reads[0][0] in weights:
            weights.update(made)
        else:
            maps.update(made)
    return frozenset(maps)


def gaps_into_backward(trace: Trace) -> list[Gap]:
    """Those that start in the forward pass. A storage has others where the backward pass uses it more than once."""
    border = _first_backward(trace)
    return [gap for gap in trace.gaps if trace.ticks[gap.start].op <= border]


def backward_tick(trace: Trace) -> int:
    """The first tick of the backward pass."""
    border = _first_backward(trace)
    ticks = (index for index, tick in enumerate(trace.ticks) if tick.op >= border and tick.kind == "unpack")
    return next(ticks, len(trace.ticks))


def _first_backward(trace: Trace) -> int:
    return next((op.id for op in trace.ops if op.phase != "forward"), len(trace.ops))


def _first_unpacks(trace: Trace, maps: frozenset[int]) -> dict[int, int]:
    """For each op that saves a feature map it reads: the tick at which the first thing it saved is unpacked.

    What is saved last is unpacked first, so the packs of one storage are matched with its unpacks from the last on.
    """
    packs: dict[int, list[int]] = {}  # storage: the ops that saved it, in order
    unpacks: dict[int, list[int]] = {}  # storage: ticks
    for index, tick in enumerate(trace.ticks):
        if tick.kind == "unpack":
            unpacks.setdefault(tick.storage, []).append(index)
        else:
            packs.setdefault(tick.storage, []).append(_saver(trace, tick.op, tick.storage))
    out: dict[int, int] = {}
    saves: set[int] = set()
    for storage, savers in packs.items():
        for op, at in zip(reversed(savers), unpacks.get(storage, ()), strict=False):
            if op < 0:
                continue
            out[op] = min(out.get(op, at), at)
            if storage in maps and any(storage == read for read, _ in trace.ops[op].reads):
                saves.add(op)
    return {op: at for op, at in out.items() if op in saves}


def _saver(trace: Trace, issued: int, storage: int) -> int:
    """The op that packs a storage when so many ops are issued, -1 if none.

    Inputs are packed before their op, outputs after it.
    """
    for op in trace.ops[issued : issued + 1] + trace.ops[max(0, issued - 1) : issued]:
        if op.phase == "forward" and any(storage == used for used, _ in op.reads + op.writes):
            return op.id
    return -1
