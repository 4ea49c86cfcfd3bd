"""What a program may do in the middle of a step whose plan was found when its model was called: put modes of its own
around the call, take another way, go through an older graph, be refused, catch an error."""

from __future__ import annotations

import copy
import enum
import gc
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import legroom
import legroom.room
from legroom.errors import BudgetError
from legroom.hardware import PRESETS
from legroom.runtime.device import CpuDevice
from legroom.runtime.inputs import PlainValues, call_of, signature_of
from legroom.runtime.undo import Undo
from legroom.units import parse_bytes

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

Around = Callable[[], AbstractContextManager[Any]]


@pytest.fixture
def slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that plans recompute."""
    link = replace(PRESETS["cpu"], out_bytes_per_second=1e6, in_bytes_per_second=1e6)
    monkeypatch.setattr(legroom.room, "probe", lambda *_: link)


@pytest.fixture
def fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that they swap, whatever the machine does beside: one that has dropped what another keeps is not taken up."""
    rates = {f"{name}_bytes_per_second": 1e12 for name in ("out", "in", "duplex_out", "duplex_in")}
    link = replace(PRESETS["cpu"], latency_seconds=0.0, copy_compute_share=0.0, **rates)
    monkeypatch.setattr(legroom.room, "probe", lambda *_: link)


class Rounding(TorchDispatchMode):
    """Gives other results: it must see what it is put around, and nothing else."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.bfloat16().float() if func is torch.ops.aten.addmm.default else result


class Counting(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("mode", "when", "budget"),
    [
        (Rounding, (8, 10, 15), "64MiB"),
        (Rounding, (8, 10, 15), "1MiB"),
        (Counting, range(20), "1MiB"),
        (lambda: torch.device("cpu"), range(20), "1MiB"),
    ],
    ids=["rounding", "rounding in little", "counting", "device"],
)
@pytest.mark.usefixtures("slow_link")
def test_modes_around_the_call_are_the_programs_own(mode: Any, when: Any, budget: str, others_bytes: int) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layers = (nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 64))
        net = nn.Sequential(*layers)
        return net, torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)

    def run(around: Around, net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch.manual_seed(1)
        losses = []
        for number in range(20):
            with around():
                x = torch.randn(300 + number % 5 * 16, 64)
                with mode() if number in when else nullcontext():
                    loss = net(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            assert not _get_current_dispatch_mode_stack() and not _get_current_function_mode_stack()
        return [*losses, *(p.detach().clone() for p in net.parameters())]

    expected = run(nullcontext, *build())
    net, optimizer = build()
    with legroom.fit(net, optimizer, budget=parse_bytes(budget) + others_bytes) as room:
        assert_same(run(room.step, net, optimizer), expected)
        followed = room.report().followed
        assert followed is not None and any(step.course == "planned" for step in followed.steps)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 64) * 0.1)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))
        self.early = False

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.table
        for i, layer in enumerate(self.layers):
            x = F.gelu(layer(x))
            if self.early and i == 2:
                return (x @ self.table.t()).square().mean()
        return x.square().mean()


@pytest.mark.usefixtures("slow_link")
def test_a_weight_is_saved_where_something_larger_was_expected(others_bytes: int) -> None:
    """What was dropped before is made from that weight, and its entry dies earlier than those."""

    def build() -> tuple[Tied, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = Tied()
        return net, torch.optim.SGD(net.parameters(), 0.01)

    def run(around: Around, net: Tied, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        losses = []
        for number in range(14):
            net.early = number in (9, 12)
            rows, generator = 500 + number * 37 % 120, torch.Generator().manual_seed(number)
            with around():
                loss = net(torch.randn(rows, 64, generator=generator))
                loss.backward()
                losses.append(loss.detach())
                optimizer.step()
                optimizer.zero_grad()
        return [*losses, *(p.detach().clone() for p in net.parameters())]

    expected = run(nullcontext, *build())
    net, optimizer = build()
    with legroom.fit(net, optimizer, budget=1_536_000 + others_bytes) as room:
        assert_same(run(room.step, net, optimizer), expected)
        assert room.report().bytes_recomputed > 0


class Ways(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.wide, self.other = nn.Linear(64, 64), nn.Linear(64, 128), nn.Linear(64, 96)
        self.way = 0

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = F.gelu(self.layer(x))
        if self.way == 1:
            x = torch.tanh(self.wide(x))
        if self.way == 2:
            x = torch.sigmoid(self.other(x)) * 2
        return x.square().mean()


@pytest.mark.usefixtures("fast_link")
@pytest.mark.parametrize("budget", ["64MiB", "6MiB"])
def test_an_older_graph_is_gone_through_after_a_switch(budget: str, others_bytes: int) -> None:
    kept, again = 1, 2
    ways = [(0, 0)] * 8 + [(1, 0)] * 10 + [(2, 0)] * 10 + [(0, 0)] * 6
    ways += [(0, kept), (1, again), (0, 0), (0, 0), (0, kept), (2, again), (0, 0), (0, kept), (0, again), (0, 0)]

    def build() -> Ways:
        torch.manual_seed(0)
        return Ways()

    def run(around: Around, net: Ways) -> list[Tensor]:
        found: list[Tensor] = []
        old: Tensor | None = None
        for number, (way, what) in enumerate(ways):
            net.way = way
            # Never the same twice, where it is another op sequence: it would be foreseen by that.
            rows = {kept: 600, again: 1200 - number}.get(what, 600 + number * 137 % 600)
            with around():
                loss = net(torch.randn(rows, 64, generator=torch.Generator().manual_seed(number)))
                loss.backward(retain_graph=what == kept)
                if what == again:
                    assert old is not None
                    old.backward()
                    old = None
                found += [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
                net.zero_grad()
            if what == kept:
                old = loss
        return found

    expected = run(nullcontext, build())
    net = build()
    with legroom.fit(net, torch.optim.SGD(net.parameters(), 0.0), budget=parse_bytes(budget) + others_bytes) as room:
        assert_same(run(room.step, net), expected)
        taken = "the step is another one that is known: its plan was taken up on the way"
        assert room.report().fallbacks[taken] > 1


def test_a_refused_step_gives_gradients_back_that_it_let_go_of(others_bytes: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    refused = 0
    with legroom.fit(net, optimizer, budget=3_000_000 + others_bytes) as room:
        for number, rows in enumerate([1000, 1000, 1100, 1100, 1200, 1200, 900, 900, 1000, 9000]):
            before = [p.grad.clone() if p.grad is not None else None for p in net.parameters()]
            try:
                with room.step():
                    net(torch.randn(rows, 64)).square().mean().backward()
                    if number % 2:
                        optimizer.step()
                        optimizer.zero_grad()
            except BudgetError:
                refused += 1
                assert any(grad is not None for grad in before)
                for grad, p in zip(before, net.parameters(), strict=True):
                    assert grad is not None and p.grad is not None and torch.equal(grad, p.grad)
    assert refused == 1


def test_state_on_another_device_is_given_back() -> None:
    """As Adam's count of steps, which lies on the host where parameters are on a GPU."""
    device = CpuDevice()
    device.name = "elsewhere"
    net = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        net(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()

    step()
    before = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    undo = Undo(device, optimizer)
    step()
    assert float(next(iter(optimizer.state.values()))["step"]) == 2
    undo.restore()
    device.close()
    torch.testing.assert_close((net.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)


def test_an_op_in_place_that_fails_and_is_caught_leaves_no_copy() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            x = F.gelu(self.layer(x))
            y = x * 2
            with pytest.raises((IndexError, RuntimeError)):
                y.index_add_(0, torch.tensor([10**6]), torch.ones(1, 64))
            return (y * x).square().mean()

    net = Failing()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with legroom.fit(net, optimizer, budget="8MiB") as room:
        for number in range(8):
            with room.step():
                net(torch.randn(500 + number % 4 * 20, 64)).backward()
                optimizer.step()
                optimizer.zero_grad()
        gc.collect()
        spill = room._device.spill  # type: ignore[attr-defined]
        assert spill._end == sum(nbytes * len(free) for nbytes, free in spill._free.items())
    assert gc.isenabled()


class Odd(enum.Enum):
    __hash__ = None  # type: ignore[assignment]
    ONE = 1


def itself() -> list[Any]:
    found: list[Any] = [torch.ones(2)]
    found += [found] * 6
    return found


ODD: dict[str, Callable[[], object]] = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged),
    "an enumeration that is no key": lambda: Odd.ONE,
    "a list in itself": itself,
    "many lists": lambda: [[random.random()] * 3 for _ in range(10_000)],
}


@pytest.mark.parametrize("name", ODD)
def test_arguments_that_are_not_looked_into(name: str) -> None:
    value, values = ODD[name](), PlainValues()
    for _ in range(3):
        call = call_of((signature_of({"x": torch.ones(5, 7), "odd": value}, "", values),), "cpu")
        assert call.features[:2] == (5, 7) and not call.tells_all
        hash(call.kind)


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected)
    assert [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if not torch.equal(a, b)] == []
