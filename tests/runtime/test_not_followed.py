"""Programs whose steps do not follow from one call of the model: inside the budget all the same, and the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
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


class Routed(Net):
    """Another op sequence whenever it is told so."""

    skip = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body[3 * self.skip :](x))


def never_the_same(
    around: Callable[[], Any], net: Routed, optimizer: torch.optim.Optimizer, steps: int
) -> list[Tensor]:
    """So that it is given up to find a plan."""
    losses = []
    for seed in range(steps):
        net.skip = random.Random(seed).randrange(4)
        with around():
            losses.append(usual(net, optimizer, 600 + 20 * (seed % 20), seed))
    return [*losses, *(t.clone() for t in net.state_dict().values())]


def routed() -> tuple[Routed, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Routed()
    return net, torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)


def routed_floor() -> int:
    net, optimizer = routed()
    return legroom.floor_bytes(legroom.capture(lambda: usual(net, optimizer, 1000, 0), model=net, optimizer=optimizer))


def test_what_is_not_known_is_held_against_the_budget() -> None:
    expected = never_the_same(nullcontext, *routed(), 24)
    limit = routed_floor() + 100_000
    net, optimizer = routed()

    def noisy(count: int) -> None:
        torch.dropout(net(rows(count, 1)), 0.5, True).square().mean().backward()
        optimizer.step()

    with legroom.fit(net, optimizer, budget=limit) as room:
        found = never_the_same(room.step, net, optimizer, 24)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        followed = room.report().followed
        assert followed is not None and followed.steps[-1].course == "reactive"
        measured = [step.measured_bytes for step in followed.steps if step.course == "reactive" and step.measured_bytes]
        assert measured and max(measured) <= limit
        with room.step():
            net(rows(700, 0)).square().mean().backward()  # gradients that the next step would add to
        state = [v for s in optimizer.state.values() for v in s.values() if v is not None]
        lasting = [*net.state_dict().values(), *(p.grad for p in net.parameters() if p.grad is not None), *state]
        before, generator = [t.clone() for t in lasting], torch.get_rng_state()
        for count in (5000, 9000):  # the first is tried, the other is known to be no smaller
            refusal = rf"an input of sizes \({count}, 64\) needs"
            with pytest.raises(legroom.BudgetError, match=refusal), room.step():
                noisy(count)
        assert all(torch.equal(a, b) for a, b in zip(lasting, before, strict=True))
        assert torch.equal(torch.get_rng_state(), generator)
        optimizer.zero_grad()
        before.clear()  # copies are memory like any other
        train(usual, [700], room.step, (net, optimizer))


def test_large_budgets_are_not_watched_at_every_step() -> None:
    """It takes a count of all tensors and a copy of all that is written."""
    net, optimizer = routed()
    with legroom.fit(net, optimizer, budget="1GiB") as room:
        never_the_same(room.step, net, optimizer, 40)
        followed = room.report().followed
        assert followed is not None
        assert sum(step.course == "reactive" for step in followed.steps) > 10
        largest: tuple[int, ...] = ()
        for step in followed.steps:
            if step.course == "reactive":
                assert bool(step.measured_bytes) == (step.features > largest)
            if step.measured_bytes:
                largest = max(largest, step.features)


class Peeking(nn.Module):
    """Looks at something large where nothing has been saved for a while, and much has become idle since."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + 1
        with torch.no_grad():
            seen = torch.ones(2 * len(x), 64).sum()
        return x.mean() + seen


def test_what_no_plan_can_do_is_done_step_by_step() -> None:
    """Below the smallest peak of a plan, which acts where something is saved or asked for, and above that of the
    reactive policy, which acts at every op."""

    def step(net: nn.Module, optimizer: torch.optim.Optimizer, count: int, seed: int) -> Tensor:
        loss = net(rows(count, seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = Peeking()
        return net, torch.optim.SGD(net.parameters(), 0.01)

    other = make()
    with legroom.fit(*other, budget="1GiB") as room:
        for seed in range(2):
            with room.step():
                step(*other, 2000, seed)
        least, floor = room.report().peak_bytes, room.report().floor_bytes
    assert least < floor
    del other
    built = make()
    with legroom.fit(*built, budget=(least + floor) // 2) as room:
        for seed in range(14):
            with room.step():
                step(*built, 1986 + seed, seed)
        assert room.report().followed is not None
        peak = measured_peak(lambda seed: step(*built, 1998 + seed, seed), room.step, 0)
        assert max(peak, room.report().peak_bytes) <= room.budget_bytes


@dataclass
class Wrapped:
    x: Tensor
    note: str


class Opaque:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Choosy(Net):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x = args[0]
        while not isinstance(x, Tensor):
            x = x[0] if isinstance(x, list) else x["x"] if isinstance(x, dict) else x.x
        return super().forward(x)


CALLS: dict[str, tuple[Callable[[nn.Module, Tensor, int], Tensor], str]] = {
    "a counter": (lambda net, x, n: net(x, step=n), "the argument step changes"),
    "a number that falls": (lambda net, x, n: net(x, 1 / (n + 1)), r"the argument args[1] changes"),
    "not a number": (lambda net, x, n: net(x, temperature=float("nan")), "the argument temperature changes"),
    "text": (lambda net, x, n: net(x, captions=[f"step {n}"]), "the argument captions changes"),
    "numbers": (lambda net, x, n: net(x, lengths=list(range(n))), "the argument lengths changes"),
    "a generator": (lambda net, x, n: net(x, generator=torch.Generator()), ""),
    "an iterator": (lambda net, x, n: net(x, more=iter([1])), "the argument more (list_iterator) cannot"),
    "nothing": (lambda net, x, n: net(x, mask=None), ""),
    "a dict in a list": (lambda net, x, n: net([{"x": x, "id": n}]), "the argument args[0][0].id changes"),
    "an object": (lambda net, x, n: net(Wrapped(x, f"note {n}")), "the argument args[0].note changes"),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_that_say_nothing_about_sizes_do_not_prevent_following(name: str) -> None:
    call, remark = CALLS[name]

    def step(net: Net, optimizer: torch.optim.Optimizer, count: int, seed: int) -> Tensor:
        loss = call(net, rows(count, seed), seed).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def made() -> tuple[Net, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = Choosy()
        return net, torch.optim.SGD(net.parameters(), 0.01)

    counts = [700 + 13 * n for n in range(16)]
    expected = train(step, counts, nullcontext, made())
    limit = budget(usual, 0.3)
    built = made()
    with legroom.fit(*built, budget=limit) as room:
        found = train(step, counts, room.step, built)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        report = room.report()
    assert report.followed is not None
    assert [s.course for s in report.followed.steps][-3:] == ["planned"] * 3
    assert report.peak_bytes <= limit
    assert any(said.startswith(remark) for said in report.fallbacks) if remark else not report.fallbacks


def test_what_cannot_be_looked_into_is_named() -> None:
    torch.manual_seed(0)
    net = Choosy()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with legroom.fit(net, optimizer, budget=budget(usual, 0.5)) as room:
        for seed in range(5):
            with room.step():
                net(Opaque(rows(700 + 13 * seed, seed))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert any("the argument args[0] (Opaque) cannot be looked into" in said for said in room.report().fallbacks)
        assert room.report().peak_bytes <= room.budget_bytes


def test_a_refusal_says_nothing_about_sizes_that_are_not_seen() -> None:
    """A batch behind something that cannot be looked into may be a smaller one next time."""
    torch.manual_seed(0)
    net = Choosy()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)

    def step(count: int, seed: int, hidden: int) -> None:
        with room.step():
            net([Opaque(torch.cat([rows(count, seed)] * hidden)), rows(count, seed)]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with legroom.fit(net, optimizer, budget=budget(usual, 0.1)) as room:
        for seed in range(8):
            step(700 + 13 * seed, seed, 1)
        assert room.report().followed is not None
        assert room._following is not None
        for way in room._following._ways:
            way.reactive_until = 10**6  # whatever it knows
        with pytest.raises(legroom.BudgetError, match=r"an input of sizes \(800, 64\) needs"):
            step(800, 0, 8)
        step(800, 0, 1)
        with pytest.raises(legroom.BudgetError, match=r"an input of sizes \(800, 64\) needs"):
            step(800, 0, 8)
