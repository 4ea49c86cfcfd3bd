"""Every differentiable op that PyTorch itself tests, replayed: outputs and gradients are those of plain PyTorch, bit for bit.

By default each op is run with its first sample; `LEGROOM_SWEEP=1` runs every sample, the in-place variants, and complex and
bfloat16 samples. What is left out is found by measurement: a sample that raises in plain PyTorch, or gives other bits the
second time, says nothing about a replay.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
import unittest
import warnings
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
from legroom.runtime.lineage import Lineage, Made, Node, never_replayed, tensors_in, written_arguments
from legroom.runtime.replay import replay
from legroom.runtime.residency import Ledger, saved_elsewhere
from tests.harness import Digest, digest
from tests.runtime.test_random_plans import admit

SWEEP = bool(os.environ.get("LEGROOM_SWEEP"))
SHARDS = 8
BATCH = 40  # samples in one step: a room takes four steps, whatever is in them
LARGEST_ELEMENTS = 100_000  # one op has samples of 5 million elements, the others stay below 1,000
PLANNED_STEPS = 2

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
    return tuple(op for op in database if op.supports_autograd and torch.float32 in op.supported_dtypes("cpu"))


@dataclass(slots=True)
class Sample:
    """One call of one op."""

    name: str
    call: Callable[..., Any]
    inputs: tuple[Any, ...]  # tensor, args, kwargs; tensors that take gradients are leaves
    leaves: list[Tensor] = field(default_factory=list)

    def arguments(self) -> Any:
        """The inputs as activations: values made in the step, which it may drop."""
        return tree_map(lambda v: v * 1 if isinstance(v, Tensor) and v.requires_grad else v, self.inputs)

    def forward(self) -> list[Tensor]:
        torch.manual_seed(0)
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
    return tensor.detach().to_dense() if tensor is not None and tensor.layout is not torch.strided else tensor


def loss_of(tensor: Tensor) -> Tensor:
    """A scalar whose backward needs the tensor's bytes."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    square = tensor * tensor
    return (torch.view_as_real(square).abs() if square.is_complex() else square).sum().to(torch.float32)


def samples(op: Any, dtype: torch.dtype, most: int | None) -> Iterator[Sample]:
    """Calls of an op, then of its in-place variant, as PyTorch's own tests make them."""
    torch.manual_seed(0)
    variants = [("", op.op), (" in place", op.inplace_variant)]
    for i, drawn in enumerate(islice(op.sample_inputs("cpu", dtype, requires_grad=True), most)):
        inputs = (drawn.input, drawn.args, drawn.kwargs)
        tensors = [t for t in tree_leaves(inputs) if isinstance(t, Tensor)]
        if sum(t.numel() for t in tensors) > LARGEST_ELEMENTS:
            continue
        inputs = tree_map(lambda v: v.detach().requires_grad_() if isinstance(v, Tensor) and v.requires_grad else v, inputs)
        leaves = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.requires_grad]
        for variant, call in variants:
            if call is not None:
                yield Sample(f"{op.formatted_name}[{i}] {dtype}{variant}", call, inputs, leaves)


def candidates(shard: int) -> Iterator[Sample]:
    for op in operators()[shard::SHARDS]:
        yield from samples(op, torch.float32, None if SWEEP else 1)
        if SWEEP:
            for dtype in {torch.complex64, torch.bfloat16} & op.supported_backward_dtypes("cpu"):
                yield from samples(op, dtype, 3)


def repeats(sample: Sample) -> list[Digest] | None:
    """What plain PyTorch gives; None where it gives an error, or something else the second time."""
    try:
        first = sample.train()
        return first if first == sample.train() else None
    except Exception:
        return None


# The whole runtime


def recompute_all(trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
    """Everything that may be replayed is, the rest is swapped."""
    gaps = range(len(trace.gaps))
    plan = Plan(tuple(Swap(when="sync") for _ in gaps), signature(trace), "recompute", budget_bytes, 0, 0.0, ())
    return admit(trace, plan, hardware, list(gaps))


def run_in_room(batch: list[Sample]) -> tuple[list[list[list[Digest]]], Report, int]:
    """All samples one after another, step by step, until enough steps were planned; and how many values were replayed."""
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
        """Run a batch; where it fails as a whole, its halves."""
        try:
            steps, report, replayed = run_in_room(batch)
            faults = faults_of(batch, expected, steps, report)
        except Exception as error:
            faults = [f"{batch[0].name}: {type(error).__name__}: {error}"]
        if faults and len(batch) > 1:
            half = len(batch) // 2
            self.check(batch[:half], expected[:half])
            self.check(batch[half:], expected[half:])
            return
        if faults:
            self.wrong += faults
            return
        self.ops |= {sample.name.split("[")[0] for sample in batch}
        self.samples += len(batch)
        self.replayed += replayed
        self.replayed_bytes += report.bytes_recomputed


def faults_of(batch: list[Sample], expected: list[list[Digest]], steps: list[list[list[Digest]]], report: Report) -> list[str]:
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
            tally.check(*map(list, zip(*found, strict=True)))  # type: ignore[arg-type]
            found = []
    if found:
        tally.check(*map(list, zip(*found, strict=True)))  # type: ignore[arg-type]
    sys.__stderr__.write(f"{len(tally.ops)} ops, {tally.samples} samples, {tally.replayed} replayed, {tally.replayed_bytes} B\n")
    assert not tally.wrong, "\n".join(tally.wrong)
