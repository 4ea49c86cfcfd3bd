"""Calls that are told from other sizes of the input, in programs that change: never relied upon unproven."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import legroom
from legroom.runtime import lifting
from legroom.runtime.knowncalls import Inner
from tests.runtime.test_calls import nothing_left
from tests.runtime.test_known_at_sizes import looked_at
from tests.runtime.test_random_plans import random_planner

__all__ = ["looked_at"]  # a fixture
pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, BATCH = 64, 8


class Deep(nn.Module):
    """calls_more: one that changes nothing, but makes plans learn their calls for themselves."""

    factor = 0.5
    calls_more = False

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls_more:
            x.dim()
        for layer in self.deep:
            x = F.gelu(layer(x) * self.factor)
        return x.square().mean()


class Branched(Deep):
    """in_place: of a function that otherwise needs no look."""

    in_place = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        squared = (first + self.shift).square()
        if self.calls_more:
            x.dim()
        branch = F.relu(first, inplace=self.in_place)
        for layer in self.deep[:6]:
            squared = F.gelu(layer(squared))
        return (self.one(squared) + self.other(branch)).square().mean()


def train(
    kind: type[Deep],
    lengths: list[int],
    prepare: Callable[[int, Any], None],
    room_for: Any = None,
    fallbacks: dict[str, int] | None = None,
) -> list[Any]:
    """fallbacks: those of the room are put there."""
    torch.manual_seed(0)
    net = kind()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    taken: list[Any] = []
    with room_for(net, optimizer) if room_for is not None else contextlib.nullcontext() as room:
        for number, length in enumerate(lengths):
            prepare(number, net)
            x = torch.randn(BATCH, length, WIDTH, generator=torch.Generator().manual_seed(number))
            with room.step() if room is not None else contextlib.nullcontext():
                loss = net(x)
                loss.backward()
                # Bytes, not tensors: those would count.
                taken += [loss.item(), *(p.grad.numpy().tobytes() for p in net.parameters() if p.grad is not None)]
                optimizer.step()
                optimizer.zero_grad()
            if room is not None and room._following is not None:
                room._following.settle()
        if room is not None and fallbacks is not None:
            fallbacks.update(room.report().fallbacks)
    return [*taken, *(p.detach().numpy().tobytes() for p in net.parameters())]


def test_a_call_that_the_plan_learned_itself_proves_nothing_of_what_is_told(
    monkeypatch: pytest.MonkeyPatch, others_bytes: int
) -> None:
    """A plan knows a call from its own size with one factor, and tells it for that size, wrong, with another. A step
    with the first factor is recorded as the plan knows it, so that the next one with the other is not proven by it."""
    lengths = [20, 24, 30, 22, 26, 21, 29, 25, 23, 27, 28, 27, 30, 29, 28, 28, 28]
    tell = lifting._op_at

    def wrong(op: Inner, *rest: Any) -> Inner:
        told = tell(op, *rest)
        return told._replace(args=(*told.args[:1], 0.125)) if op.func._opname == "mul" else told

    def prepare(number: int, net: Deep) -> None:
        net.calls_more = number >= 9
        net.factor = 0.25 if number in (10, 14) else 0.5

    def room(net: Deep, optimizer: torch.optim.Optimizer) -> Any:
        return legroom.fit(net, optimizer, budget=760_000 + others_bytes, planner=random_planner((0, 0, 1, 0), seed=0))

    monkeypatch.setattr(lifting, "_op_at", wrong)
    fallbacks: dict[str, int] = {}
    mine = train(Deep, lengths, prepare, room, fallbacks)
    assert fallbacks["a replay gave other bits and was not used"] > 5, fallbacks
    assert mine == train(Deep, lengths, prepare)
    assert nothing_left()


@pytest.mark.parametrize("seed", range(6, 10))
def test_a_call_that_needed_no_look_writes_in_place_from_now_on(seed: int, others_bytes: int) -> None:
    lengths = [20, 28, 24, 30, 22, 26, 21, 29, 25, *[28, 30] * 10]

    def prepare(number: int, net: Any) -> None:
        net.in_place = number >= 22
        net.calls_more = number >= 11

    def room(net: Deep, optimizer: torch.optim.Optimizer) -> Any:
        return legroom.fit(
            net, optimizer, budget=1_000_000 + others_bytes, planner=random_planner((0, 1, 1, 0), seed=seed)
        )

    mine = train(Branched, lengths, prepare, room)
    assert mine == train(Branched, lengths, prepare)
    assert nothing_left()


def test_one_step_of_another_kind_does_not_end_telling(looked_at: Counter[str], others_bytes: int) -> None:
    lengths = [24, 32, 28, 34, 26, 30, 25, 33, 29, 27, 31, 24, 32, 36, 23, 35, 22, 36, 21, 20, 19, 37, 24, 32]
    odd = 14
    ops: list[int] = []  # before each step, of those of the last one

    def room(net: Deep, optimizer: torch.optim.Optimizer) -> Any:
        return legroom.fit(net, optimizer, budget=850_000 + others_bytes, planner=random_planner((0, 0, 1, 0), seed=0))

    def prepare(number: int, net: Deep) -> None:
        net.factor = 0.25 if number == odd else 0.5
        ops.append(looked_at.pop("ops", 0))

    mine = train(Deep, lengths, prepare, room)
    assert any(ops[:odd]) and ops[odd + 1] == len(Deep().deep) and not any(ops[odd + 2 :]), ops
    assert mine == train(Deep, lengths, prepare)
