"""What a dropped tensor is made from: only what it reads next is held for it, however long the chain."""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import legroom
from legroom.runtime.residency import Entry, Ledger
from tests.harness import digest
from tests.runtime.test_random_plans import random_planner

LAYERS, STEPS = 24, 5


class Chain(nn.Module):
    """Every activation is made from the one before it, and all are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(LAYERS):
            x = torch.sigmoid(x * self.scale)
        return x.sum()


def trained(around: Callable[[nn.Module, torch.optim.Optimizer], Callable[[], object]]) -> list[str]:
    torch.manual_seed(0)
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_context = around(model, optimizer)
    taken = []
    for number in range(STEPS):
        x = torch.randn(128, 64, generator=torch.Generator().manual_seed(number))
        with step_context():  # type: ignore[attr-defined]
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        taken += [digest(loss.detach()).sha256, digest(model.scale.detach()).sha256]
        del loss
    return taken


@pytest.mark.parametrize("sharing", [0, 1], ids=["alone", "shared"])
def test_a_long_chain_is_not_walked_for_every_link(sharing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    pin = Ledger.pin

    def counted(ledger: Ledger, entry: Entry, frontier: list[Entry]) -> None:
        held.append(len(frontier))
        pin(ledger, entry, frontier)

    monkeypatch.setattr(Ledger, "pin", counted)
    rooms = []

    def around(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        planner = random_planner((0, 0, 1 - sharing, sharing), 0)
        rooms.append(legroom.fit(model, optimizer, budget=1 << 30, planner=planner))
        return rooms[0].step

    plain = trained(lambda *_: contextlib.nullcontext)
    with_plan = trained(around)
    with rooms[0] as room:
        assert room.report().bytes_recomputed > 0 and not room.report().fallbacks
    assert with_plan == plain
    assert len(held) > LAYERS and max(held) <= 2


@contextlib.contextmanager
def few_calls_within_calls(most: int) -> Iterator[None]:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + most)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize("wanted", [True, False], ids=["used", "freed"])
def test_all_of_a_long_chain_goes_at_once(wanted: bool) -> None:
    """A second graph holds the end of the chain, and that all of it, when the first one is through. It goes with the
    second, by more links than there may be calls within calls."""

    def trained(room: legroom.Room | None, scale: nn.Parameter) -> torch.Tensor:
        results = []
        for number in range(5):
            x = torch.randn(128, 64, generator=torch.Generator().manual_seed(number))
            with room.step() if room is not None else contextlib.nullcontext():
                for _ in range(120):
                    x = torch.sigmoid(x * scale)
                second = torch.sigmoid(torch.sigmoid(x.detach() * scale) * scale).sum()
                x = x.sum()
                with few_calls_within_calls(100):
                    x.backward()
                    if wanted:
                        second.backward()
                    del second
            results.append(scale.grad.clone())
            scale.grad = None
        return torch.stack(results)

    plain = trained(None, nn.Parameter(torch.ones(64)))
    model = Chain()
    planner = random_planner((0, 0, 1, 0), 0)
    with legroom.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), budget=1 << 30, planner=planner) as room:
        assert torch.equal(trained(room, model.scale), plain)
        gc.collect()
        assert room.report().bytes_recomputed > 0 and not room.report().fallbacks
        assert not room._setting.ledger.entries and not room._setting.ledger.pinned
