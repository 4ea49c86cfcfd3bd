"""Programs whose steps do not follow from one call of the model: inside the budget all the same, and the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import legroom
from tests.runtime.test_budget import measured_peak

pytestmark = pytest.mark.usefixtures("one_thread")

Step = Callable[["Net", torch.optim.Optimizer, int, int], Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[m for _ in range(5) for m in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU())])
        self.head = nn.Linear(64, 4)
        self.before = nn.Sequential(*[m for _ in range(5) for m in (nn.Linear(64, 64), nn.GELU())])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def rows(count: int, seed: int) -> Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))


def usual(net: Net, optimizer: torch.optim.Optimizer, count: int, seed: int) -> Tensor:
    loss = net(rows(count, seed)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def encoder_first(net: Net, optimizer: torch.optim.Optimizer, count: int, seed: int) -> Tensor:
    """What saves most is called before the model."""
    loss = net(net.before(rows(count, seed))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def parts_of_the_model(net: Net, optimizer: torch.optim.Optimizer, count: int, seed: int) -> Tensor:
    """From the ninth step on the model is not called as a whole."""
    loss = (net.head(net.body(rows(count, seed))) if seed > 8 else net(rows(count, seed))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def several_sizes(net: Net, optimizer: torch.optim.Optimizer, count: int, seed: int) -> Tensor:
    """Three calls in a step, each with a size of its own."""
    total = torch.zeros(())
    for part in range(3):
        loss = net(rows(count // (1 + (part + seed) % 3), seed + part)).square().mean()
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


def build() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.SGD(net.parameters(), 0.01)


def train(step: Step, counts: list[int], around: Callable[[], Any], built: Any) -> list[Tensor]:
    net, optimizer = built
    losses = []
    for seed, count in enumerate(counts):
        with around():
            losses.append(step(net, optimizer, count, seed))
    return [*losses, *(t.clone() for t in net.state_dict().values())]


def budget(step: Step, share: float) -> int:
    net, optimizer = build()
    trace = legroom.capture(lambda: step(net, optimizer, 1024, 0), model=net, optimizer=optimizer)
    floor = legroom.floor_bytes(trace)
    return int(floor + share * (trace.peak_bytes - floor))


@pytest.mark.parametrize("step", [encoder_first, parts_of_the_model, several_sizes])
def test_the_budget_holds_where_the_first_call_tells_too_little(step: Step) -> None:
    counts = [random.Random(number).randint(700, 1024) for number in range(14)]
    expected = train(step, counts, nullcontext, build())
    limit = budget(step, 0.3)
    net, optimizer = build()
    with legroom.fit(net, optimizer, budget=limit) as room:
        found = train(step, counts, room.step, (net, optimizer))
        assert room.report().followed is None
        peak = measured_peak(lambda seed: step(net, optimizer, 1000 + seed, seed), room.step, 20)
        assert max(peak, room.report().peak_bytes) <= limit
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_refused_step_leaves_statistics_and_gradients_as_they_were() -> None:
    limit = budget(usual, 0.2)
    net, optimizer = build()
    with legroom.fit(net, optimizer, budget=limit) as room:
        train(usual, [700, 800, 900, 1000, 1024, 750], room.step, (net, optimizer))
        with room.step():
            net(rows(700, 0)).square().mean().backward()  # gradients that the next step would add to
        before = [*net.state_dict().values(), *(p.grad for p in net.parameters() if p.grad is not None)]
        before = [t.clone() for t in before]
        for count in range(5000, 65000, 5000):  # the first is tried, the others are known to be no smaller
            with pytest.raises(legroom.BudgetError, match=rf"an input of sizes \({count}, 64\) needs"), room.step():
                net(rows(count, 1)).square().mean().backward()
        after = [*net.state_dict().values(), *(p.grad for p in net.parameters() if p.grad is not None)]
        assert len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        planned = room.report().planned_steps
        optimizer.zero_grad()
        train(usual, [800, 900], room.step, (net, optimizer))
        assert room.report().planned_steps == planned + 2


def test_a_price_is_paid_for_inputs_that_vary_too() -> None:
    net, optimizer = build()
    with legroom.fit(net, optimizer, max_slowdown=1.0) as room:
        train(usual, [1000 + 2 * number for number in range(8)], room.step, (net, optimizer))
        assert room._following is not None
        room._following.settle()
        train(usual, [1014], room.step, (net, optimizer))
        report = room.report()
    assert report.bytes_swapped + report.bytes_recomputed > 0


class Filled(nn.Module):
    """Up to a fixed number of rows with rows of its own: the fewer come in, the more it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        with torch.no_grad():
            fill = torch.zeros(4 * (2048 - len(x)), 64).sum()
        return x.square().mean() + fill


def test_memory_that_falls_as_the_input_grows() -> None:
    torch.manual_seed(0)
    net = Filled()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)

    def step(seed: int, count: int = 0) -> None:
        net(rows(count or 100 + 37 * seed, seed)).backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = legroom.capture(lambda: step(0, 2000), model=net, optimizer=optimizer)
    small = legroom.capture(lambda: step(0, 100), model=net, optimizer=optimizer)
    limit = max(legroom.floor_bytes(trace), legroom.floor_bytes(small)) * 11 // 10
    with legroom.fit(net, optimizer, budget=limit) as room:
        for number, count in enumerate([1900, 300, 1000, 1500, 700, 2000, 1200, 1990, 400, 200, 1700, 100, 1950, 150]):
            with room.step():
                step(number, count)
        for count in (150, 1900):
            assert measured_peak(lambda seed, count=count: step(seed, count), room.step, 0) <= limit  # type: ignore[misc]
        assert room.report().peak_bytes <= limit
