"""Runs a case of the zoo with or without something around its steps, and compares the two bit for bit.

A snapshot holds digests, not tensors: it adds nothing to the memory that a budget counts.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.zoo import Case

StepContext = Callable[[], AbstractContextManager[Any]]  # called once for each step
StepContextFactory = Callable[[nn.Module, Optimizer], StepContext]  # called once, when the model is built


@dataclass(frozen=True, slots=True)
class Digest:
    sha256: str
    what: str  # dtype and shape, and the value of a scalar: for the message only


@dataclass(frozen=True, slots=True)
class Snapshot:
    step: int
    digests: dict[str, Digest]  # in the order in which a fault spreads: the first that differs is the nearest to it


def digest(tensor: Tensor | None) -> Digest:
    """Hashes memory in place, without an op or a copy, so that it may run inside a step that is being watched."""
    if tensor is None:
        return Digest("none", "no tensor")
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    nbytes = tensor.numel() * tensor.element_size()
    raw = (ctypes.c_char * nbytes).from_address(tensor.data_ptr()) if nbytes else b""
    what = f"{tensor.dtype} {tuple(tensor.shape)}"
    sha256 = hashlib.sha256(what.encode() + b"\0")
    sha256.update(raw)
    return Digest(sha256.hexdigest(), what if tensor.numel() != 1 else f"{what} = {tensor.item()!r}")


def state_digests(optimizer: Optimizer, names: dict[int, str]) -> Iterator[tuple[str, Digest]]:
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            name = f"optimizer state {key} of {names[id(parameter)]}"
            if isinstance(value, Tensor):
                yield name, digest(value)
            else:
                yield name, Digest(repr(value), repr(value))


def gradients(model: nn.Module, when: str) -> dict[str, Digest]:
    return {f"gradient {when} of {name}": digest(p.grad) for name, p in model.named_parameters()}


def random_digests() -> dict[str, Digest]:
    python = hashlib.sha256(repr(random.getstate()).encode()).hexdigest()
    return {"torch random state": digest(torch.get_rng_state()), "python random state": Digest(python, "state")}


def snapshots(case: Case, step_context_factory: StepContextFactory) -> Iterator[Snapshot]:
    """Trains without end; yields after each step. The model lives as long as the iterator."""
    random.seed(7)
    model, optimizer = case.build()
    names = {id(p): name for name, p in model.named_parameters()}
    seen: dict[str, Digest] = {}
    optimizer.register_step_pre_hook(lambda *_: seen.update(gradients(model, "before the optimizer step")))
    # Not seeded again after this: drawing random numbers in the factory is a fault, too.
    step_context = step_context_factory(model, optimizer)
    step = 0
    while True:
        batch = case.batch(step)
        seen.clear()
        with step_context():
            loss = case.step(model, optimizer, batch)
        digests = {"loss": digest(loss)} | seen
        del loss, batch
        digests |= gradients(model, "after the step")
        digests |= {f"parameter {name}": digest(p) for name, p in model.named_parameters()}
        digests |= {f"buffer {name}": digest(b) for name, b in model.named_buffers()}
        digests |= dict(state_digests(optimizer, names))
        digests |= random_digests()
        yield Snapshot(step, digests)
        step += 1


def run_with(case: Case, steps: int, step_context_factory: StepContextFactory) -> list[Snapshot]:
    return list(islice(snapshots(case, step_context_factory), steps))


def run_room(
    case: Case, fit: Callable[[nn.Module, Optimizer], Any], *, planned_steps: int = 3, most_steps: int = 10
) -> tuple[list[Snapshot], Any, Any]:
    """Trains in the room that `fit` makes until so many planned steps are done; returns its report and plan, too."""
    rooms: list[Any] = []

    def enter(model: nn.Module, optimizer: Optimizer) -> StepContext:
        rooms.append(fit(model, optimizer))
        return rooms[0].step

    taken: list[Snapshot] = []
    run = snapshots(case, enter)  # named, so that the model outlives the room
    try:
        for snapshot in islice(run, most_steps):
            taken.append(snapshot)
            if rooms[0].report().planned_steps >= planned_steps:
                break
        return taken, rooms[0].report(), rooms[0].plan
    finally:
        for room in rooms:
            room.close()


def run_plain(case: Case, steps: int) -> list[Snapshot]:
    return run_with(case, steps, lambda model, optimizer: nullcontext)


def assert_same(a: Sequence[Snapshot], b: Sequence[Snapshot]) -> None:
    """Both runs, step by step; names the first tensor that differs."""
    assert len(a) == len(b), f"{len(a)} steps on one side, {len(b)} on the other"
    for left, right in zip(a, b, strict=True):
        missing = left.digests.keys() ^ right.digests.keys()
        assert not missing, f"step {left.step}: on one side only: {', '.join(sorted(missing))}"
        wrong = [name for name in left.digests if left.digests[name].sha256 != right.digests[name].sha256]
        if wrong:
            first, last = left.digests[wrong[0]], right.digests[wrong[0]]
            raise AssertionError(
                f"step {left.step}: {wrong[0]} differs: {first.what} ({first.sha256[:12]}) against "
                f"{last.what} ({last.sha256[:12]}); {len(wrong)} of {len(left.digests)} differ in this step"
            )


def live_bytes() -> int:
    """Bytes of all tensors there are, each storage once."""
    gc.collect()
    sizes: dict[int, int] = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, nn.Parameter):
            for tensor in (found, found.grad if found.is_leaf else None):
                if tensor is not None and tensor.layout is torch.strided and tensor.device.type == "cpu":
                    sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(sizes.values())
