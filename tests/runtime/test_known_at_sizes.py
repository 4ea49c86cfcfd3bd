"""Where inputs change size, calls are recorded without a look at their ops once a size comes back."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import legroom
from legroom.runtime.device import CpuDevice
from legroom.runtime.executor import Executor
from legroom.runtime.knownsizes import KnownSizes
from legroom.runtime.program import Program
from legroom.runtime.steps import PlannedStep
from tests.runtime.test_calls import nothing_left
from tests.runtime.test_known_calls import (
    CHANGES,
    CHANNELS,
    PIXELS,
    PLAIN,
    Change,
    Net,
    built,
    other_kernels,
    recorded,
    same_bits,
)
from tests.runtime.test_random_plans import random_planner

__all__ = ["other_kernels", "recorded"]  # fixtures
pytestmark = pytest.mark.usefixtures("one_thread")

FIRST = [16, 9, 12, 14, 10, 15, 11, 13]
BACK = 13, 15
SIZES = [*FIRST, *BACK * 5]
TURN = len(FIRST) + 6  # from there on something is another; at both sizes the calls are known by then


def batch(number: int) -> torch.Tensor:
    shape = SIZES[number], CHANNELS, PIXELS, PIXELS
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


@cache
def budget() -> int:
    """So small that none of the sizes that come back fits as it is: plans that keep everything are not made better."""
    net, optimizer = built()
    x = torch.randn(min(BACK), CHANNELS, PIXELS, PIXELS)

    def step() -> None:
        net(x, PLAIN).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    peak = legroom.capture(step, model=net, optimizer=optimizer).peak_bytes
    x = torch.randn(max(SIZES), CHANNELS, PIXELS, PIXELS)
    floor = legroom.floor_bytes(legroom.capture(step, model=net, optimizer=optimizer))
    assert floor < peak
    return (floor + 3 * peak) // 4


def trained(
    net: Net,
    optimizer: torch.optim.Optimizer,
    around: Callable[[], Any],
    change: Change,
    before: dict[str, Any],
    ended: Callable[[int], None] = lambda _: None,
) -> list[Any]:
    other, given, inside = change
    torch.manual_seed(1)
    taken: list[Any] = []
    for number in range(len(SIZES)):
        turned = number >= TURN
        x = given(batch(number)) if turned else batch(number)
        with around(), inside() if turned else contextlib.nullcontext():
            loss = net(x, {**PLAIN, **before, **(other if turned else {})})
            loss.backward()
            taken += [loss.item(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
        ended(number)
    return [*taken, *(t.clone() for t in (*net.parameters(), *net.buffers()))]


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many ops were."""
    counts: Counter[str] = Counter()
    real = Executor.op

    def op(self: Executor, *args: Any) -> Any:
        counts["ops"] += 1
        return real(self, *args)

    monkeypatch.setattr(Executor, "op", op)
    return counts


@pytest.mark.parametrize(
    ("name", "few_hooks"),
    [
        ("nothing", False),
        ("nothing", True),
        ("another factor", True),
        ("an integer", False),
        ("a zero of the other sign", True),
        ("channels last", True),
        ("elsewhere in a storage", True),
        ("that needs a gradient", True),
        ("autocast", True),
        ("a mode of the program", True),
    ],
)
def test_a_size_that_comes_back(
    name: str,
    few_hooks: bool,
    recorded: Counter[str],
    looked_at: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CpuDevice, "leaves_hooks_out", few_hooks)
    before = {"scale": 0.0} if "zero" in name else {}
    net, optimizer = built()
    ops: list[int] = []
    measured: list[bool] = []
    with legroom.fit(net, optimizer, budget=budget(), planner=random_planner((0, 0, 1, 0), seed=0)) as room:

        def ended(number: int) -> None:
            assert room._following is not None or number < 3
            if room._following is not None:
                room._following.settle()
                run = room._following.report().steps
                measured.append(bool(run and run[-1].measured_bytes))
            ops.append(looked_at.pop("ops", 0))

        mine = trained(net, optimizer, room.step, CHANGES[name], before, ended)
        fallbacks = room.report().fallbacks
        assert room.report().planned_steps >= 6
        assert "a replay gave other bits and was not used" not in fallbacks
        assert name != "nothing" or "swapped instead of recomputed" not in fallbacks

    assert same_bits(mine, trained(*built(), contextlib.nullcontext, CHANGES[name], before))
    usual = [count for count, seen in zip(ops[-len(measured) :], measured, strict=True) if not seen]
    assert min(usual[:-4]) == 0 < max(usual), usual  # both sizes were met for the third time before the turn
    if name == "nothing":
        assert usual[-4:] == [0, 0, 0, 0]
    assert recorded["all"] > 20
    assert nothing_left()


def test_sizes_that_do_not_come_back_are_not_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are calls that the plan itself has learned at another size."""
    monkeypatch.setattr(KnownSizes, "come_back", lambda _: False)
    net, optimizer = built()
    with legroom.fit(net, optimizer, budget=budget(), planner=random_planner((0, 0, 1, 0), seed=0)) as room:
        for size in (16, 9, 12, 10, 11, 15, 15, 15, 15, 15, 14):
            with room.step():
                net(torch.randn(size, CHANNELS, PIXELS, PIXELS), PLAIN).backward()
                optimizer.step()
                optimizer.zero_grad()
            if room._following is not None:
                room._following.settle()
        assert any(way.known is not None for way in planned_program(room).calls.ways)  # type: ignore[union-attr]
        assert room._following is not None
        assert all(sizes[0] == 15 for _, sizes in room._following._known_sizes._held)


def planned_program(room: Any) -> Program:
    assert room._following is not None and room._following.rung is not None
    return room._following.rung.program


class Turned(Net):
    """What is another in some steps does not show in the arguments."""

    factor = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, {**PLAIN, "scale": self.factor})


def test_one_step_of_another_kind_at_a_size(looked_at: Counter[str]) -> None:
    """What was learned before still holds after it, and what it was itself is known when it comes back."""
    sizes = [*FIRST, *[13] * 9]
    odd = len(FIRST) + 4, len(FIRST) + 7, len(FIRST) + 8
    torch.manual_seed(0)
    net = Turned()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    ops: list[int] = []
    with legroom.fit(net, optimizer, budget=budget(), planner=random_planner((0, 0, 1, 0), seed=0)) as room:
        for number, size in enumerate(sizes):
            x = torch.randn(size, CHANNELS, PIXELS, PIXELS, generator=torch.Generator().manual_seed(number))
            looked_at.clear()
            net.factor = 0.25 if number in odd else 0.5
            with room.step():
                net(x).backward()
                optimizer.step()
                optimizer.zero_grad()
            ops.append(looked_at["ops"])
            if room._following is not None:
                room._following.settle()
    before, odd_one, *after = ops[len(FIRST) + 3 :]
    assert before == 0 and 0 < odd_one <= 6, ops  # one call in each of three layers; the rest is known
    assert not any(after), ops


def known(*places: int) -> dict[int, Any]:
    return {place: f"call {place}" for place in places}


def test_what_is_known_is_bounded() -> None:
    """What was not used for the longest time goes, whichever plan it is of."""
    sizes = KnownSizes(most=2)
    first, second, third = (sizes.at((size,), met=False) for size in (1, 2, 3))
    first.learned(0, known(1))
    second.learned(7, known(2))
    assert first.calls(0) == (known(1), False)
    assert first.calls(7)[0] is None  # of another plan
    third.learned(0, known(3))
    assert len(sizes) == 2
    assert second.calls(7)[0] is None
    assert first.calls(0)[0] == known(1) and third.calls(0)[0] == known(3)


def test_what_is_learned_later_is_added() -> None:
    at = KnownSizes().at((5,), met=False)
    at.learned(0, known(1, 2))
    at.learned(0, {2: "another", 3: "new"})  # type: ignore[dict-item]
    assert at.calls(0) == ({1: "call 1", 2: "another", 3: "new"}, False)


@pytest.mark.parametrize("every", [2, 8])
def test_where_sizes_hardly_ever_come_back_they_are_learned_later(every: int) -> None:
    sizes = KnownSizes()
    for size in range(64):
        at = sizes.at((size,), met=False)
        assert at.calls(0)[1] or (every == 8 and size >= 32)
        at.learned(0, {})
        if size % every == 0:
            assert at.calls(0) == ({}, False)
    assert sizes.at((64,), met=False).calls(0)[1] is (every == 2)
    assert sizes.at((64,), met=True).calls(0)[1]


def test_steps_in_which_more_hooks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured ones: there a call saves more than was learned where few hooks run, and its ops are looked at again."""
    monkeypatch.setattr(CpuDevice, "leaves_hooks_out", True)
    real = PlannedStep.__init__
    planned = 0

    def measuring(self: PlannedStep, *args: Any, **kwargs: Any) -> None:
        nonlocal planned
        planned += 1
        real(self, *args, **{**kwargs, "measure": planned % 3 == 0})

    monkeypatch.setattr(PlannedStep, "__init__", measuring)
    net, optimizer = built()
    with legroom.fit(net, optimizer, budget=budget(), planner=random_planner((1, 0, 2, 0), seed=0)) as room:

        def ended(_: int) -> None:
            if room._following is not None:
                room._following.settle()

        mine = trained(net, optimizer, room.step, CHANGES["nothing"], {}, ended)
        fallbacks = room.report().fallbacks
        assert planned_program(room).few_ticks is not None and room._following is not None
        assert len(room._following._known_sizes)
    assert "swapped instead of recomputed" not in fallbacks, fallbacks
    assert same_bits(mine, trained(*built(), contextlib.nullcontext, CHANGES["nothing"], {}))
