"""Every differentiable op that PyTorch itself tests, replayed: outputs and gradients are those of plain PyTorch.

By default each op is run in a room with its first sample, and in place where it can be, and by itself with a few
more. `LEGROOM_SWEEP=1` runs 40 samples of each in rooms, complex and bfloat16 ones as well, and all by themselves: 20
minutes. What is left out is found by measurement: a sample that raises in plain PyTorch, or gives other bits the
second time, says nothing about a replay.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import types
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import legroom
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.plan import Plan, Recompute, Swap, signature
from legroom.report import Report
from legroom.runtime.device import CpuDevice
from legroom.runtime.lineage import (
    Lineage,
    Made,
    Node,
    hidden_writes,
    never_replayed,
    tensors_in,
    written_arguments,
    written_tensors,
)
from legroom.runtime.replay import replay
from legroom.runtime.residency import Entry, Ledger, View, saved_elsewhere
from tests.harness import Digest, digest
from tests.runtime.test_random_plans import admit

SWEEP = bool(os.environ.get("LEGROOM_SWEEP"))
SHARDS = 48 if SWEEP else 8
BATCH = 100  # samples in one step: a room takes four steps, whatever is in them
MOST_IN_ROOMS = 40 if SWEEP else 1  # of each op; a few have a thousand samples
LARGEST_ELEMENTS = 100_000  # one op has samples of 5 million elements, the others stay below 1,000
PLANNED_STEPS = 2 if SWEEP else 1

pytestmark = pytest.mark.filterwarnings("ignore")


@cache
def operators() -> tuple[Any, ...]:
    """PyTorch's op database: what is differentiable and takes float32 on the CPU."""
    try:
        importlib.import_module("expecttest")
    except ImportError:  # its TestCase is the base class of one that is not used here
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    with pytest.MonkeyPatch.context() as patch:
        # Importing it forbids the whole process to set flags such as torch.backends.mkldnn.enabled.
        patch.setattr(torch.backends, "disable_global_flags", lambda: None)
        database = importlib.import_module("torch.testing._internal.common_methods_invocations").op_db
    found = tuple(op for op in database if op.supports_autograd and torch.float32 in op.supported_dtypes("cpu"))
    # As in conftest.py: 150,000 objects, which every room of all later tests would look at. No test's tensor is alive.
    gc.collect()
    gc.freeze()
    return found


@dataclass(slots=True)
class Sample:
    """One call of one op."""

    op: str
    name: str
    call: Callable[..., Any]
    inputs: tuple[Any, ...]  # tensor, args, kwargs; tensors that take gradients are leaves
    leaves: list[Tensor] = field(default_factory=list)

    def arguments(self) -> Any:
        """The inputs as activations: values made in the step, which it may drop, and ops may write (running means)."""
        return tree_map(activation, self.inputs)

    def forward(self) -> list[Tensor]:
        torch.default_generator.manual_seed(0)  # random ops: the same numbers in every run
        first, args, kwargs = self.arguments()
        return [t for t in tree_leaves(self.call(first, *args, **kwargs)) if isinstance(t, Tensor)]

    def train(self) -> list[Digest]:
        """Forward and backward; digests of all outputs and gradients."""
        for leaf in self.leaves:
            leaf.grad = None
        outputs = self.forward()
        digests = [digest(dense(t)) for t in outputs]
        losses = [loss_of(t) for t in outputs if t.requires_grad]
        del outputs
        if losses:
            sum(losses[1:], losses[0]).backward()
        del losses
        return digests + [digest(dense(leaf.grad)) for leaf in self.leaves]


def dense(tensor: Tensor | None) -> Tensor | None:
    """The tensor with bytes that can be hashed; an error where it has none on the CPU."""
    if tensor is None:
        return None
    if tensor.layout is not torch.strided:
        return tensor.detach().to_dense()
    return tensor.detach().cpu().clone() if tensor.data_ptr() == 0 else tensor


def loss_of(tensor: Tensor) -> Tensor:
    """A scalar whose backward needs the tensor's bytes."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    square = tensor * tensor
    return (torch.view_as_real(square).abs() if square.is_complex() else square).sum().to(torch.float32)


def activation(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value * 1 if value.requires_grad else value.clone()


def leaf(value: Any) -> Any:
    return value.detach().requires_grad_() if isinstance(value, Tensor) and value.requires_grad else value


def samples(op: Any, dtype: torch.dtype, most: int | None) -> Iterator[Sample]:
    """Calls of an op, then of its in-place variant, as PyTorch's own tests make them."""
    torch.default_generator.manual_seed(0)
    variants = [("", op.op), (" in place", op.inplace_variant)]
    for i, drawn in enumerate(islice(op.sample_inputs_func(op, "cpu", dtype, True), most)):
        inputs = (drawn.input, drawn.args, drawn.kwargs)
        tensors = [t for t in tree_leaves(inputs) if isinstance(t, Tensor)]
        if sum(t.numel() for t in tensors) > LARGEST_ELEMENTS:
            continue
        inputs = tree_map(leaf, inputs)
        leaves = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.requires_grad]
        for variant, call in variants:
            if call is not None:
                yield Sample(op.formatted_name, f"{op.formatted_name}[{i}] {dtype}{variant}", call, inputs, leaves)


def candidates(shard: int) -> Iterator[Sample]:
    for op in operators()[shard::SHARDS]:
        yield from samples(op, torch.float32, MOST_IN_ROOMS)
        if SWEEP:
            for dtype in {torch.complex64, torch.bfloat16} & op.supported_backward_dtypes("cpu"):
                yield from samples(op, dtype, 3)


# Leaves some of what it returns unwritten, in blocks that stirring does not always reach.
UNWRITTEN = "aten._ctc_loss."


def stir(byte: int) -> None:
    """Leave other bytes in freed memory: what depends on them does not repeat (lstsq's pivots, ctc_loss)."""
    blocks = [
        torch.full((size,), byte, dtype=torch.uint8)
        for size in (*range(4, 256, 4), *range(256, 1024, 8), *range(1024, 2**16, 1024))
        for _ in range(8)
    ]
    del blocks


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def repeats(sample: Sample) -> list[Digest] | None:
    """What plain PyTorch gives; None where it gives an error, or something else another time or under a mode.

    PyTorch asks whether a mode is on, and takes other formulas then: the residuals of a complex lstsq get other bits.
    """
    try:
        first = sample.train()
        with Nothing():
            outputs = sample.forward()
        if [digest(dense(t)) for t in outputs] != first[: len(outputs)]:
            return None
        return first if is_steady(sample, first) else None
    except Exception:
        return None


def is_steady(sample: Sample, expected: list[Digest]) -> bool:
    for byte in (0x00, 0x01, 0x7F, 0xFF):
        stir(byte)
        if sample.train() != expected:
            return False
    return True


# The whole runtime


def recompute_all(trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
    """Everything that may be replayed is, the rest is swapped."""
    gaps = range(len(trace.gaps))
    plan = Plan(tuple(Swap(when="sync") for _ in gaps), signature(trace), "recompute", budget_bytes, 0, 0.0, ())
    return admit(trace, plan, hardware, {gap: Recompute() for gap in gaps})


def run_in_room(batch: list[Sample]) -> tuple[list[list[list[Digest]]], Report, int]:
    """All samples one after another, step by step, until steps were planned; and how many values these replay."""
    with legroom.fit(budget="1GiB", planner=recompute_all) as room:
        steps: list[list[list[Digest]]] = []
        while room.report().planned_steps < PLANNED_STEPS and len(steps) < 2 + 2 * PLANNED_STEPS:
            with room.step():
                steps.append([sample.train() for sample in batch])
        replayed = sum(isinstance(decision, Recompute) for decision in room.plan.decisions) if room.plan else 0
        return steps, room.report(), replayed


@dataclass(slots=True)
class Tally:
    ops: set[str] = field(default_factory=set)
    samples: int = 0
    replayed: int = 0
    replayed_bytes: int = 0
    wrong: list[str] = field(default_factory=list)

    def check(self, batch: list[Sample], expected: list[list[Digest]]) -> None:
        """Run a batch; where it fails, its halves, down to the sample that does."""
        try:
            steps, report, replayed = run_in_room(batch)
            faults = faults_of(batch, expected, steps, report)
        except Exception as error:
            faults = [f"{batch[0].name}: {type(error).__name__}: {error}"]
            report, replayed = None, 0
        if faults and len(batch) > 1:
            half = len(batch) // 2
            self.check(batch[:half], expected[:half])
            self.check(batch[half:], expected[half:])
            return
        if faults and all(is_steady(batch[0], expected[0]) for _ in range(8)):
            self.wrong += faults
        if faults or report is None:
            return
        self.ops |= {sample.op for sample in batch}
        self.samples += len(batch)
        self.replayed += replayed
        self.replayed_bytes += report.bytes_recomputed


def faults_of(
    batch: list[Sample], expected: list[list[Digest]], steps: list[list[list[Digest]]], report: Report
) -> list[str]:
    faults: list[str] = []
    for i, taken in enumerate(steps):
        for sample, right, mine in zip(batch, expected, taken, strict=True):
            for j, (a, b) in enumerate(zip(right, mine, strict=True)):
                if a != b:
                    faults.append(f"{sample.name}: step {i}, tensor {j} of {len(right)}: {a.what} against {b.what}")
    if report.planned_steps < PLANNED_STEPS or report.fallbacks:
        faults.append(f"{batch[0].name}: {report.planned_steps} steps planned, {report.fallbacks}")
    return faults


@pytest.mark.parametrize("shard", range(SHARDS))
def test_an_op_in_a_room_gives_the_bits_of_plain_pytorch(shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "smallest_swap_bytes", 1)
    tally = Tally()
    found: list[tuple[Sample, list[Digest]]] = []
    for sample in candidates(shard):
        expected = repeats(sample)
        if expected is not None:
            found.append((sample, expected))
        if len(found) == BATCH:
            tally.check(*map(list, zip(*found, strict=True)))
            found = []
    if found:
        tally.check(*map(list, zip(*found, strict=True)))
    assert not tally.wrong, "\n".join(tally.wrong)
    # Of 540 ops one or two do not repeat; a test that checked nothing would pass everything above.
    assert len(tally.ops) >= 0.9 * len(operators()[shard::SHARDS]) >= 9
    assert tally.samples >= (5 if SWEEP else 1) * len(tally.ops)
    assert tally.replayed >= len(tally.ops)
    assert tally.replayed_bytes > 0


# A replay by itself


class Keeper(TorchDispatchMode):
    """Records the lineage of every op, and keeps what it made to compare with."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.lineage = Lineage(ledger)
        self.ops = 0
        self.made: dict[int, tuple[Node, Tensor, str]] = {}  # by storage: the value it shows now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_in((*args, *kwargs.values()))
        made: Made | None = None
        if not never_replayed(func) and not any(map(saved_elsewhere, inputs)):
            self.ops += 1
            made = Made(self.ops, func, args, kwargs, self.lineage.node_of)
        writes = bool(written_arguments(func))
        if writes:
            self.lineage.before_write(written_tensors(func, args, kwargs))
        result = func(*args, **kwargs)
        if writes:
            self.lineage.after_write(func, args, kwargs, made)
        for tensor in hidden_writes(func, args):
            self.lineage.nodes.pop(tensor.untyped_storage()._cdata, None)  # no op makes it
        outputs = tensors_in(result if isinstance(result, (list, tuple)) else (result,))
        if made is not None and not any(map(saved_elsewhere, outputs)):
            self.lineage.made(made, result)
        for tensor in (*inputs, *outputs):
            if saved_elsewhere(tensor):
                continue
            key = tensor.untyped_storage()._cdata
            node = self.lineage.nodes.get(key)
            if node is None or node.maker is None:
                self.made.pop(key, None)
            elif key not in self.made or self.made[key][0] is not node:
                self.made[key] = (node, tensor, str(func))
        return result


def replays(sample: Sample, ledger: Ledger) -> list[tuple[str, Digest, Digest]]:
    """For every value the sample leaves: the op that made it, what is in it, and what a replay makes of it."""
    with torch.no_grad(), Keeper(ledger) as keeper:
        sample.forward()
    found: list[tuple[str, Digest, Digest]] = []
    for node, tensor, name in keeper.made.values():
        view = View(tensor, Entry(ledger, 0, 0, 0))
        view.let_go()
        found.append((name, digest(tensor), digest(view.over(replay(node)))))
    return found


def same_whatever_was_in_memory(sample: Sample, device: CpuDevice, found: list[tuple[str, Digest, Digest]]) -> bool:
    for byte in (0x00, 0x01, 0x7F, 0xFF):
        stir(byte)
        if replays(sample, Ledger(device)) != found:
            return False
    return True


def works(sample: Sample) -> bool:
    try:
        sample.forward()
    except Exception:
        return False
    return True


def test_a_replay_by_itself_gives_the_bits() -> None:
    """Without a room: every value a sample makes, from the first op to the last."""
    checked = Counter[str]()
    wrong: list[str] = []
    values = 0
    device = CpuDevice()
    for sample in (s for op in operators() for s in samples(op, torch.float32, None if SWEEP else 16)):
        try:
            found = replays(sample, Ledger(device))
            differ = [name for name, real, made in found if real != made and not name.startswith(UNWRITTEN)]
            if differ and same_whatever_was_in_memory(sample, device, found):
                wrong.append(f"{sample.name}: {', '.join(differ)}")
        except Exception as error:
            if works(sample):
                wrong.append(f"{sample.name}: {type(error).__name__}: {error}")
            continue
        if not differ:
            checked[sample.op] += 1
            values += len(found)
    device.close()
    assert not wrong, "\n".join(wrong)
    assert len(checked) >= 530
    assert checked.total() >= (12_000 if SWEEP else 5_000)
    assert values >= 2 * checked.total()
