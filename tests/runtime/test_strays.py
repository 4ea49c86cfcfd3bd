"""Op sequences that come now and then: learned where sizes tell them, and no harm done where they do not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import legroom
from tests.runtime.test_following import Routed, assert_equal, half_way

pytestmark = pytest.mark.usefixtures("one_thread")

Around = Callable[[], Any]
SWITCHED = "the step is another one that is known: its plan was taken up on the way"


class Aligned(Routed):
    """Its layers share factors, as layers of attention do a mask; each has a padded copy where the length is not one of
    these multiples."""

    multiples: Sequence[int] = (8,)

    def forward(self, x: Tensor) -> Tensor:
        rows = len(x)
        factors = [torch.sigmoid(self.layers[0](x) + multiple) for multiple in self.multiples]
        for layer in self.layers[1:]:
            x = F.gelu(layer(x))
            for factor, multiple in zip(factors, self.multiples, strict=True):
                x = x * (F.pad(factor, (0, 0, 0, -rows % multiple)) if rows % multiple else factor)[:rows]
        return x.mean()


class Switched(Routed):
    """Wide at the end, or not; there is another way of calling it."""

    wide = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 1024), nn.Linear(1024, 64)

    def forward(self, x: Tensor, *, other: bool = False) -> Tensor:
        x = torch.tanh(x) if other else x
        for layer in self.layers:
            x = F.gelu(layer(x))
        return (self.down(F.gelu(self.up(x))) if self.wide and not other else x).square().mean()


class Odd(Routed):
    """Now and then with something in front."""

    odd = 0

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.odd):
            x = torch.tanh(x + self.layers[0](x))
        return super().forward(x)


def built(kind: type[nn.Module]) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = kind()
    return net, torch.optim.SGD(net.parameters(), 0.01)


def step(net: nn.Module, optimizer: torch.optim.Optimizer, rows: int, number: int, **more: bool) -> Tensor:
    loss: Tensor = net(torch.randn(rows, 64, generator=torch.Generator().manual_seed(number)), **more)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def drifts(room: legroom.Room) -> int:
    return sum(count for name, count in room.report().fallbacks.items() if name.startswith("drift"))


@pytest.mark.parametrize("multiples", [(8,), (8, 16)])
def test_sizes_at_which_the_step_is_another_one_are_learned(multiples: Sequence[int]) -> None:
    """They are rare, and hardly ever come twice in a row. Multiples of sixteen are multiples of eight as well, and seen
    when those are known."""
    draw = random.Random(0)
    rows = [n + (n % 8 == 0) for n in (draw.randint(200, 1000) for _ in range(200))]
    for place in range(14, len(rows), 5):
        rows[place] += 8 - rows[place] % 16
    if len(multiples) > 1:
        for place in range(62, len(rows), 10):
            rows[place] -= rows[place] % 16

    def run(around: Around, net: Aligned, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        net.multiples = multiples
        losses = []
        for number, count in enumerate(rows):
            with around():
                losses.append(step(net, optimizer, count, number))
        return [*losses, *(p.detach().clone() for p in net.parameters())]

    expected = run(nullcontext, *built(Aligned))
    net, optimizer = built(Aligned)
    net.multiples = multiples
    budget = half_way(lambda: net(torch.randn(1000, 64)).backward(), net, optimizer)
    net, optimizer = built(Aligned)
    with legroom.fit(net, optimizer, budget=budget + 400_000) as room:
        assert_equal(run(room.step, net, optimizer), expected)
        report = room.report()
        assert report.followed is not None and report.followed.structures == 1 + len(multiples)
        assert report.peak_bytes <= room.budget_bytes
        courses = [row.course for row in report.followed.steps]
        assert set(courses[-40:]) == {"planned"}
        assert courses.count("sheltered") <= 10 * report.followed.structures
        assert drifts(room) <= 2 * len(multiples), report.fallbacks


def test_nothing_is_refused_for_a_guess() -> None:
    """What takes more than the budget came at multiples of sixteen by chance; usual steps at such sizes fit."""
    net, optimizer = built(Switched)
    draw = random.Random(1)
    with legroom.fit(net, optimizer, budget="4900KiB") as room:

        def train(rows: int, *, wide: bool = False) -> None:
            net.wide = wide
            with room.step():
                step(net, optimizer, rows, rows)

        for _ in range(30):
            rows = draw.randint(200, 900)
            train(rows + (rows % 8 == 0))
        for number, rows in enumerate((208, 240, 224, 256, 272, 288, 304)):
            train(rows, wide=True)
            for usual in (301, 303, 305):
                train(usual + 40 * number)
        assert room.report().followed.structures == 2  # type: ignore[union-attr]
        for rows in (400, 432, 448, 480, 432):
            train(rows)
            assert room.report().peak_bytes <= room.budget_bytes


def test_a_way_of_calling_between_others_changes_for_good() -> None:
    net, optimizer = built(Switched)
    with legroom.fit(net, optimizer, budget="14MiB") as room:

        def train(number: int, *, wide: bool = False, other: bool = False) -> None:
            net.wide = wide
            with room.step():
                step(net, optimizer, 1000 + number % 7, number, **({"other": True} if other else {}))

        for wide in (False, True, False):
            for number in range(10):
                train(number, wide=wide)
        before = room.report().fallbacks.get(SWITCHED, 0), drifts(room)
        for number in range(20):
            train(number, wide=True)
            train(number, other=True)
        assert room.report().fallbacks.get(SWITCHED, 0) - before[0] + drifts(room) - before[1] <= 3


def test_plans_stay_where_a_step_strayed_by_chance() -> None:
    net, optimizer = built(Odd)
    left = []
    with legroom.fit(net, optimizer, budget="1500KiB") as room:
        for number in range(160):
            net.odd = number // 12 if number % 12 == 11 and number > 20 else 0
            with room.step():
                step(net, optimizer, 500 + 37 * number % 90, number)
            if number > 30 and room.report().followed.steps[-1].course == "sheltered":  # type: ignore[union-attr]
                (way,) = room._following._ways  # type: ignore[union-attr]
                left.append(len(way.course.ladder))  # type: ignore[union-attr]
        assert left and all(left)
