"""Planned steps look into a few calls only, and still nothing about the result depends on that."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import legroom
from legroom.ir import Tick
from legroom.runtime import calls as calls_module
from legroom.runtime.calls import Called, needed_ticks
from legroom.runtime.device import CpuDevice
from tests.harness import assert_same, run_plain, run_room
from tests.runtime.test_random_plans import BUDGET_BYTES, MODELS, random_planner
from tests.zoo import ZOO

# Three of four are kept, so that most of what is saved needs no hook.
FEW = (6, 1, 1, 1)


@pytest.fixture
def few_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "leaves_hooks_out", True)


@pytest.mark.parametrize("name", [*MODELS, "gradient_penalty", "gru", "moe", "stochastic_depth"])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_hooks_on_inside_some_calls_only(name: str, few_hooks: None) -> None:
    fit = partial(legroom.fit, budget=BUDGET_BYTES, planner=random_planner(FEW, seed=0))

    taken, report, _ = run_room(ZOO[name](), fit, planned_steps=6, most_steps=14)

    assert_same(run_plain(ZOO[name](), len(taken)), taken)
    if name not in ("moe", "stochastic_depth"):  # which are another program at every step
        assert report.planned_steps >= 4, f"{report.planned_steps} of {report.steps} planned: {report.fallbacks}"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(128, 128), nn.GELU())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def built() -> tuple[Model, torch.optim.Optimizer]:
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(number: int) -> torch.Tensor:
    return torch.randn(256, 128, generator=torch.Generator().manual_seed(number))


@pytest.fixture
def room(few_hooks: None) -> Iterator[tuple[Any, Model, torch.optim.Optimizer]]:
    model, optimizer = built()
    with legroom.fit(model, optimizer, budget="1GiB", planner=random_planner((8, 1, 1, 1), seed=3)) as room:
        for number in range(6):
            with room.step():
                model(batch(number)).backward()
                optimizer.step()
                optimizer.zero_grad()
        yield room, model, optimizer


def caught_up(steps: int) -> tuple[Model, torch.optim.Optimizer]:
    model, optimizer = built()
    for number in range(steps):
        model(batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def nothing_left() -> bool:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return not _get_current_function_mode_stack() and not _get_current_dispatch_mode_stack() and hooks is None


def test_most_ticks_are_left_out(room: tuple[Any, Model, torch.optim.Optimizer]) -> None:
    program = room[0]._standing.program

    assert program.calls is not None and program.few_ticks is not None
    assert 0 < len(program.few_ticks.expected) < len(program.all_ticks.expected)
    assert 0 < sum(program.calls.watched) < len(program.calls.calls) / 2


def test_more_calls_than_before_are_let_pass(room: tuple[Any, Model, torch.optim.Optimizer]) -> None:
    """A line that logs now and then is no other program."""
    taken, model, optimizer = room
    other, others = caught_up(6)
    for number in range(6, 10):
        losses = []
        for context, one, its in ((taken.step(), model, optimizer), (None, other, others)):
            if context is not None:
                context.__enter__()
            x = batch(number)
            for layer in one.layers:
                x = layer(x)
                if number % 2:
                    assert x.detach().abs().max().item() < 1e6
            loss = x.square().mean()
            loss.backward()
            its.step()
            its.zero_grad()
            if context is not None:
                context.__exit__(None, None, None)
            losses.append(loss.item())
        assert losses[0] == losses[1]
    assert not [name for name in taken.report().fallbacks if name.startswith("drift")]
    assert nothing_left()


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_nothing_is_left_after_an_error(where: str, room: tuple[Any, Model, torch.optim.Optimizer]) -> None:
    taken, model, optimizer = room

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle: Any
    if where == "forward":
        handle = model.layers[5].register_forward_pre_hook(fail)
    elif where == "backward":
        handle = model.layers[2].register_full_backward_hook(fail)
    else:
        handle = optimizer.register_step_pre_hook(fail)

    def step() -> None:
        with taken.step():
            model(batch(9)).backward()
            optimizer.step()

    with pytest.raises(ZeroDivisionError):
        step()
    handle.remove()

    assert nothing_left()
    optimizer.zero_grad()
    with taken.step():
        model(batch(10)).backward()
    assert nothing_left()


class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.linear = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.linear += func is torch.nn.functional.linear
        return func(*args, **(kwargs or {}))


def test_a_function_mode_of_the_program_sees_what_it_saw(room: tuple[Any, Model, torch.optim.Optimizer]) -> None:
    taken, model, optimizer = room
    other, others = caught_up(6)
    for number in range(6, 9):
        with taken.step(), Counting() as inside:
            loss = model(batch(number))
            loss.backward()
            optimizer.step()
        expected = other(batch(number))
        expected.backward()
        others.step()
        optimizer.zero_grad()
        others.zero_grad()
        assert inside.linear == 12
        assert loss.item() == expected.item()
    assert nothing_left()


def test_hooks_of_the_program_are_asked_as_before(room: tuple[Any, Model, torch.optim.Optimizer]) -> None:
    taken, model, optimizer = room
    other, others = caught_up(6)

    def loss_of(one: Model, x: torch.Tensor, seen: list[int]) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(1), t)[1], lambda t: t):
            x = one.layers[1](one.layers[0](x))
        return one.layers[2:](x).square().mean()

    for number in range(6, 12):
        seen: list[int] = []
        with taken.step():
            loss = loss_of(model, batch(number), seen)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        expected_seen: list[int] = []
        expected = loss_of(other, batch(number), expected_seen)
        expected.backward()
        others.step()
        others.zero_grad()
        assert loss.item() == expected.item()
        assert len(seen) == len(expected_seen)
    assert nothing_left()


def test_an_evaluation_in_the_step_takes_the_way_it_would_take(few_hooks: None) -> None:
    """Attention has a fast way of its own that it takes only where no function mode is on, with other bits."""
    torch.manual_seed(0)
    teacher = nn.TransformerEncoderLayer(128, 4, 64, batch_first=True).eval()

    def losses(around: Any) -> list[float]:
        model, optimizer = built()
        taken = []
        with around(model, optimizer) as room:
            for number in range(8):
                with room.step():
                    x = batch(number)
                    with torch.no_grad():
                        target = teacher(x.view(4, 64, 128)).reshape(256, 128)
                    loss = (model.layers(x) - target).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                taken.append(loss.item())
        return taken

    class Plain:
        def __init__(self, *_: Any) -> None: ...

        def __enter__(self) -> Plain:
            return self

        def __exit__(self, *_: object) -> None: ...

        def step(self) -> Plain:
            return self

    fit = partial(legroom.fit, budget="1GiB", planner=random_planner((1, 1, 2, 2), seed=1))
    assert losses(fit) == losses(Plain)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.TransformerEncoderLayer(16, 2, 8),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 8, batch_first=True), 1),
        lambda: nn.MultiheadAttention(16, 2),
    ],
)
def test_modules_with_ways_of_their_own_are_seen_when_they_come_and_go(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def look(*types: type) -> list[Any]:
        looks.append(len(types))
        return gc.get_referrers(*types)

    monkeypatch.setattr(calls_module, "gc", SimpleNamespace(get_referrers=look))
    gc.collect()
    ways = calls_module._FastWays()
    before = make().train()
    assert not ways.open() and not ways.open()
    assert len(looks) == 1  # nothing came or went
    after = make().train()
    assert not ways.open()
    after.eval()
    assert ways.open()
    after.train()
    before.eval()
    assert ways.open()
    assert len(looks) == 2
    del before
    gc.collect()
    assert not ways.open()


def test_a_storage_is_hooked_everywhere_or_nowhere() -> None:
    packed, unpacked = [0, 1, 1, 2, 3, 4], [4, 3, 2, 1, 1, 0]  # two in each of three calls, then backward in one
    ticks = [Tick("pack", storage, 0, 0, 0) for storage in packed]
    ticks += [Tick("unpack", storage, 0, 0, 0) for storage in unpacked]
    calls = [Called(None, range(0), inside) for inside in (range(2), range(2, 4), range(4, 6), range(6, 12))]

    assert needed_ticks(calls, ticks, {0}) == {0, 1, 2, 3, 8, 9, 10, 11}
    assert needed_ticks(calls, ticks, {4}) == {4, 5, 6, 7}
    assert needed_ticks(calls, ticks, set()) == set()
