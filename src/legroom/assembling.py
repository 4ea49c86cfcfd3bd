"""A sheltered step's record and its allocator log, put together into a `Trace`."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from legroom.blocks import requests_of
from legroom.curve import Curve
from legroom.errors import TraceError
from legroom.ir import Kind, Op, Storage, Tick, Trace, validate
from legroom.runtime.census import Census
from legroom.runtime.recorder import Recorder, SeenStorage

# What Python and the dispatcher spend on an op before it runs, on the machines this was measured on, modules and
# autocast included: ResNet-152 and BERT issue one in 24 and 18 microseconds. It only matters where ops are small.
_ISSUE_SECONDS = {"cuda": 18e-6, "cpu": 8e-6}


OpSeconds = Mapping[tuple[str, str], float]  # by name and shapes


def assemble(
    recorder: Recorder, census: Census, curve: Curve, device: str, earlier: OpSeconds = MappingProxyType({})
) -> Trace:
    """The trace of the step, everything kept. earlier: what ops took in steps before; the less of both counts."""
    if len(curve.segments) != len(recorder.ticks) + 1:
        raise TraceError(f"the allocator's log has {len(curve.segments) - 1} ticks, the step had {len(recorder.ticks)}")
    seen_ops = sum(op.seen >= 0 for op in curve.ops)
    if seen_ops != len(recorder.ops):
        raise TraceError(f"the allocator's log has {seen_ops} ops, the step had {len(recorder.ops)}")
    storages = [_storage(i, seen, census) for i, seen in enumerate(recorder.storages)]
    nowhere = len(storages)  # stands for tensors that have no plain storage on this device
    storages.append(Storage(nowhere, 0, "temporary", False, False, (), 0, "not on this device"))
    ticks = [
        Tick(
            tick.kind,
            tick.storage if tick.storage >= 0 else nowhere,
            segment.ops,
            segment.level_bytes,
            segment.peak_bytes,
        )
        for tick, segment in zip(recorder.ticks, curve.segments[1:], strict=True)
    ]
    trace = Trace(
        tuple(storages),
        tuple(_ops(recorder, curve, device, earlier)),
        tuple(ticks),
        curve.segments[0].peak_bytes,
        device,
    )
    trace = replace(trace, requests=requests_of(trace, curve))
    validate(trace)
    return trace


def _storage(number: int, seen: SeenStorage, census: Census) -> Storage:
    kind: Kind = "activation" if seen.packed else "temporary"
    if seen.lasting:
        kind = census.kinds[seen.first_key]
    gaps = tuple(seen.gaps or ())
    return Storage(
        id=number,
        nbytes=seen.nbytes,
        kind=kind,
        persistent=seen.lasting and not seen.ref.expired(),
        held=seen.held and not gaps,
        gaps=gaps,
        gap_version=seen.gap_version if gaps else 0,
        name=seen.name,
    )


def _ops(recorder: Recorder, curve: Curve, device: str, earlier: OpSeconds) -> list[Op]:
    issue_seconds = _ISSUE_SECONDS[device]
    seconds = less(op_seconds(recorder, curve), earlier)
    safe = _safe_from_writes(recorder)
    ops: list[Op] = []
    for run, key in zip(curve.ops, _signatures(recorder, curve), strict=True):
        if run.seen < 0:
            ops.append(
                Op(
                    len(ops),
                    run.name,
                    "backward",
                    seconds[key],
                    issue_seconds,
                    (),
                    (),
                    run.growth_bytes,
                    "not in forward",
                    "",
                    "",
                )
            )
            continue
        seen = recorder.ops[run.seen]
        twin = seen.first >= 0 and {seen.first, seen.writes[0][0]} <= safe
        workspace = max(0, run.growth_bytes - seen.output_bytes)
        ops.append(
            Op(
                len(ops),
                seen.name,
                seen.phase,
                seconds[key],
                issue_seconds,
                ((seen.first, 0),) if twin else tuple(seen.reads),
                tuple(seen.writes),
                workspace,
                seen.why_not,
                seen.module,
                seen.line,
                replay_seconds=0.0 if twin else None,
                twin=twin,
            )
        )
    return ops


def _safe_from_writes(recorder: Recorder) -> set[int]:
    """Storages that nothing has written since they were made, saved by ops of PyTorch alone: each just before it runs,
    and reads them. What other functions save they may write to in backward."""
    packs = Counter((tick.storage, tick.op) for tick in recorder.ticks if tick.kind == "pack")
    safe = {number for number, _ in packs if number >= 0}
    for (number, place), times in packs.items():
        op = recorder.ops[place] if place < len(recorder.ops) else None
        reads = op is not None and op.name.startswith("aten.") and any(storage == number for storage, _ in op.reads)
        if times > 1 or not reads:
            safe.discard(number)
    return {number for number in safe if recorder.storages[number].version == 0}


def _signatures(recorder: Recorder, curve: Curve) -> list[tuple[str, str]]:
    """Of each op, its name and what those have in common that take the same time."""
    # What had the same shapes at another size has the same here, but not those.
    other = "at another size: " if recorder.follows else ""
    forward = [(seen.name, seen.shapes) for seen in recorder.ops]
    backward = iter([(name, other + shapes) for name, shapes in backward_of(recorder, curve)])
    return [forward[run.seen] if run.seen >= 0 else next(backward) for run in curve.ops]


def backward_of(recorder: Recorder, curve: Curve) -> Sequence[tuple[str, str]]:
    """Names and shapes of the ops in backward. In a step that followed others, the shapes that they had there; where it
    went another way each op stands for itself."""
    runs = [run for run in curve.ops if run.seen < 0]
    if not recorder.follows:
        return [(run.name, run.shapes) for run in runs]
    names = [run.name for run in runs]
    for outline in recorder.followed():
        if [name for name, _ in outline.backward] == names:
            return outline.backward
    return [(name, f"run {number}") for number, name in enumerate(names)]


def op_seconds(recorder: Recorder, curve: Curve) -> dict[tuple[str, str], float]:
    """The median of all runs of the same op on the same shapes: one run alone is noise. None where the log does not
    have the ops of the step."""
    runs: dict[tuple[str, str], list[float]] = defaultdict(list)
    if sum(op.seen >= 0 for op in curve.ops) == len(recorder.ops):
        for run, signature in zip(curve.ops, _signatures(recorder, curve), strict=True):
            runs[signature].append(run.seconds)
    return {key: statistics.median(values) for key, values in runs.items()}


def less(now: OpSeconds, earlier: OpSeconds) -> dict[tuple[str, str], float]:
    """What ops take at most, as far as steps have shown. Some kernels of a recorded step take far longer than they do
    later on: a step of SqueezeNet on an H200 was taken for 88 ms in place of 52."""
    return {key: min(seconds, earlier.get(key) or seconds) for key, seconds in now.items()}


def correct(trace: Trace, predicted: Sequence[int], curve: Curve) -> Trace:
    """The trace with its peaks moved to where a measured step shows them, the plan's changes taken out again.

    Done after the first planned steps: what runs then, without the recorder and perhaps without a mode, may allocate
    a little differently from the sheltered step.
    """
    ticks = []
    for i, tick in enumerate(trace.ticks):
        off = curve.segments[i + 1].measured_peak_bytes - predicted[i]
        ticks.append(replace(tick, peak_bytes=max(tick.level_bytes, tick.peak_bytes + off)))
    return replace(trace, ticks=tuple(ticks), head_peak_bytes=curve.segments[0].measured_peak_bytes)
