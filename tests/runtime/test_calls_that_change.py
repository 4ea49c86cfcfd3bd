"""Steps whose calls do something else than when they were learned: the bits are plain PyTorch's all the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import legroom
from legroom.runtime.device import CpuDevice
from tests.runtime.test_calls import nothing_left
from tests.runtime.test_random_plans import random_planner

TURN, STEPS = 6, 9  # from TURN on it is another one; the calls are known by then
SIZE = (256, 128)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(128, 128) for _ in range(3))
        self.register_buffer("read", torch.randn(*SIZE))
        self.register_buffer("spare", torch.randn(*SIZE))
        self.shift = nn.Parameter(torch.randn(*SIZE))
        self.norm = nn.BatchNorm1d(128)

    def forward(self, x: torch.Tensor, number: int, change: Callable[[Any, int], Any]) -> torch.Tensor:
        x = (self.first(x) + self.read).sin()
        x = (self.second(x) + self.shift).sin()
        self.norm.eval()
        x = self.norm(x).sigmoid()
        x = change(self, number) or x
        return self.last(x).square().mean()


@torch.no_grad()
def relu_in_place(net: Net, number: int) -> None:
    F.relu(net.read.data, inplace=number >= TURN)


@torch.no_grad()
def into_a_given_tensor(net: Net, number: int) -> None:
    if number >= TURN:
        torch.mul(net.read.data, 0.9, out=net.read.data)
    else:
        torch.mul(net.read.data, 0.9)


@torch.no_grad()
def another_target(net: Net, number: int) -> None:
    (net.read if number >= TURN else net.spare).data.mul_(0.9)


@torch.no_grad()
def another_target_in_a_list(net: Net, number: int) -> None:
    torch._foreach_mul_([(net.read if number >= TURN else net.spare).data], 0.9)


class Odd(torch.Tensor):
    pass


@torch.no_grad()
def another_target_by_a_subclass(net: Net, number: int) -> None:
    (net.read if number >= TURN else net.spare).data.as_subclass(Odd).mul_(0.9)


@torch.no_grad()
def statistics_move(net: Net, number: int) -> None:
    net.norm.train(number >= TURN)
    net.norm(net.spare)


def another_parameter(net: Net, number: int) -> None:
    with torch.no_grad():
        net.shift.data = net.shift.data.clone()
        if number >= TURN:
            net.shift.sub_(0.1)


@torch.no_grad()
def one_more_op_after_the_last(net: Net, number: int) -> None:
    if number >= 2:  # where calls are learned, but not where the step was recorded
        float(net.spare.abs().max())
    (net.read if number >= TURN else net.spare).data.mul_(0.9)


def more_ops_in_a_call(net: Net, number: int) -> None:
    with torch.no_grad():
        weights = [net.first.weight] * (2 if number >= TURN else 1)
        formula = "ij,jk,kl->il" if number >= TURN else "ij,jk->ik"
        torch.einsum(formula, net.spare, *weights)


def losses(net: Net, around: Callable[[], Any], change: Callable[[Any, int], Any]) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    out = []
    for number in range(STEPS):
        x = torch.randn(*SIZE, generator=torch.Generator().manual_seed(number))
        with around():
            loss = net(x, number, change)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        out.append(loss.item())
    return [*out, *(p.double().sum().item() for p in net.parameters())]


CHANGES = (
    relu_in_place,
    into_a_given_tensor,
    another_target,
    another_target_in_a_list,
    another_target_by_a_subclass,
    statistics_move,
    another_parameter,
    one_more_op_after_the_last,
    more_ops_in_a_call,
)


def built() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("few_hooks", [False, True], ids=["all hooks", "few hooks"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_changes_later(change: Any, few_hooks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "leaves_hooks_out", few_hooks)
    net = built()
    with legroom.fit(net, budget="1GiB", planner=random_planner((0, 0, 1, 0), seed=0)) as room:
        mine = losses(net, room.step, change)
        assert room.report().planned_steps >= 4

    assert mine == losses(built(), contextlib.nullcontext, change)
    assert nothing_left()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "leaves_hooks_out", True)


def compared(step: Callable[[nn.Module, torch.optim.Optimizer, int], Any], weights: tuple[int, int, int, int]) -> None:
    """Trains in a room and without, and compares what each step returns."""
    taken: list[list[Any]] = []
    for inside in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.GELU())])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        room = legroom.fit(model, optimizer, budget="1GiB", planner=random_planner(weights, seed=1)) if inside else None
        taken.append([])
        for number in range(STEPS):
            with room.step() if room is not None else contextlib.nullcontext():
                taken[-1].append(step(model, optimizer, number))
            assert nothing_left()
        if room is not None:
            room.close()
    assert taken[0] == taken[1]


def batch(number: int) -> torch.Tensor:
    return torch.randn(*SIZE, generator=torch.Generator().manual_seed(number))


def test_hooks_are_left_out_under_a_plan_that_only_swaps(few: None) -> None:
    """Which calls save what is to be learned there as well, though no op is replayed."""

    def step(model: Any, optimizer: Any, number: int) -> Any:
        loss = model(batch(number)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.GELU())])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with legroom.fit(model, optimizer, budget="1GiB", planner=random_planner((1, 1, 0, 0), seed=1)) as room:
        for number in range(STEPS):
            with room.step():
                step(model, optimizer, number)
        program, report = room._standing.program, room.report()
    assert program is not None and not program.recorded and report.bytes_swapped
    assert program.few_ticks is not None
    assert 0 < len(program.few_ticks.expected) < len(program.all_ticks.expected)
    compared(step, (1, 1, 0, 0))


def test_hooks_of_the_program_with_calls_that_were_not_there(few: None) -> None:
    def step(model: Any, optimizer: Any, number: int) -> Any:
        asked: list[int] = []

        def half(tensor: torch.Tensor) -> torch.Tensor:
            asked.append(1)
            return tensor.half()

        x = model[:4](batch(number))
        with torch.autograd.graph.saved_tensors_hooks(half, lambda tensor: tensor.float()):
            x = model[4:6](x)
            if number >= TURN:
                float(x.detach().abs().max())
        loss = model[6:](x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), len(asked)

    compared(step, (16, 1, 1, 0))


class Graph(torch.autograd.Function):
    """Builds a graph in forward, and runs it in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = ctx.x.sin().exp()
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(ctx.y, ctx.x, gradient, retain_graph=True)[0]


@pytest.mark.parametrize("weights", [(0, 0, 1, 0), (8, 1, 1, 0)])
def test_the_engine_called_inside_itself(weights: tuple[int, int, int, int], few: None) -> None:
    table = torch.ones(*SIZE)

    def step(model: Any, optimizer: Any, number: int) -> Any:
        loss = model[6:](Graph.apply(model[:6](batch(number)) + table)).square().mean()
        loss.backward(retain_graph=True)
        table.data.mul_(0.999)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), [p.double().sum().item() for p in model.parameters()]

    def fresh(model: Any, optimizer: Any, number: int) -> Any:
        if number == 0:
            table.fill_(1.0)
        return step(model, optimizer, number)

    compared(fresh, weights)


def test_backward_that_goes_another_way_with_hooks_off(few: None) -> None:
    def step(model: Any, optimizer: Any, number: int) -> Any:
        trunk = model[:6](batch(number))
        one, other = model[6:8](trunk).square().mean(), model[8:](trunk).square().mean()
        (other if number == TURN else one + other).backward()
        optimizer.step()
        optimizer.zero_grad()
        return other.item()

    for weights in ((16, 1, 1, 0), (6, 1, 1, 0)):
        compared(step, weights)


def test_tensors_of_inference_mode_are_read_by_what_is_replayed(few: None) -> None:
    def step(model: Any, optimizer: Any, number: int) -> Any:
        with torch.inference_mode():
            target = batch(number).sin()
        loss = (model(batch(number)) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    compared(step, (0, 0, 1, 0))


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2.0 + 0.0 * x


def test_a_device_context_after_the_optimizer(few: None) -> None:
    """It lies on the same stack as the counting of calls, which goes on after the optimizer."""

    def step(model: Any, optimizer: Any, number: int) -> Any:
        loss = model(batch(number)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.device("cpu"):
            again = model(Saves.apply(batch(number).requires_grad_())).square().mean()
        again.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), again.item()

    compared(step, (3, 1, 1, 1))
