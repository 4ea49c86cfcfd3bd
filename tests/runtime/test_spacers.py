"""Blocks that keep free memory in one piece: taken and given back when the plan says, whatever becomes of the step."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

import legroom
from legroom import room as rooms
from legroom.arrange import Spacer
from legroom.runtime.device import CpuDevice
from legroom.runtime.executor import Program

pytestmark = pytest.mark.usefixtures("one_thread")

NBYTES = 3 * 2**20 + 512  # as nothing else in these steps


class Noting(CpuDevice):
    """Notes the spacers that it is asked for, and which of them are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0
        self.blocks: list[weakref.ref[Tensor]] = []
        self.refuses = False

    def allocate(self, nbytes: int) -> Tensor:
        if nbytes != NBYTES:
            return super().allocate(nbytes)
        if self.refuses:
            raise torch.OutOfMemoryError("no")
        self.taken += 1
        block = super().allocate(nbytes)
        self.blocks.append(weakref.ref(block))
        return block

    def alive(self) -> int:
        return sum(block() is not None for block in self.blocks)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
        self.look = lambda: None
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = torch.nn.functional.gelu(layer(x))
            if place == 5:
                self.look()
                if self.fail:
                    raise RuntimeError("half-way")
        return x.sum()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Noting:
    made = Noting()
    monkeypatch.setattr(rooms, "open_device", lambda *_: made)
    return made


def built() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=1e-2)


def work(model: Net, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def prepared(device: Noting, model: Net, optimizer: torch.optim.Optimizer) -> legroom.Room:
    """A room whose plan has a spacer, from a tick in the middle of forward to one in backward."""
    room = legroom.fit(model, optimizer, budget="1GiB", planner="vdnn")
    for _ in range(4):
        with room.step():
            work(model, optimizer, torch.ones(16, 32))
    trace = room.trace
    assert trace is not None and room._program is not None
    first_unpack = next(i for i, tick in enumerate(trace.ticks) if tick.kind == "unpack")
    spacers = [Spacer(first_unpack // 2, first_unpack + 3, NBYTES)]
    room._program = Program(trace, room._schedule, spacers=spacers)
    return room


def test_a_spacer_stands_from_its_tick_to_the_other(device: Noting) -> None:
    model, optimizer = built()
    seen: list[int] = []
    with prepared(device, model, optimizer) as room:
        model.look = lambda: seen.append(device.alive())
        for number in range(3):
            with room.step():
                loss = model(torch.ones(16, 32))
                loss.backward()
                assert device.alive() == 0
                optimizer.step()
                optimizer.zero_grad()
            assert device.taken == number + 1
        assert room.report().planned_steps > 3, room.report().fallbacks
    assert seen == [1, 1, 1]


def test_the_same_bits_with_and_without(device: Noting) -> None:
    expected_model, expected_optimizer = built()
    expected = [work(expected_model, expected_optimizer, torch.ones(16, 32)) for _ in range(8)]
    model, optimizer = built()
    with prepared(device, model, optimizer) as room:
        for number in range(4):
            with room.step():
                assert torch.equal(work(model, optimizer, torch.ones(16, 32)), expected[4 + number])
    for parameter, other in zip(model.parameters(), expected_model.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_a_step_that_fails_gives_it_back(device: Noting) -> None:
    model, optimizer = built()
    with prepared(device, model, optimizer) as room:
        model.fail = True
        with pytest.raises(RuntimeError, match="half-way"), room.step():
            work(model, optimizer, torch.ones(16, 32))
        assert device.taken == 1 and device.alive() == 0


def test_a_step_that_drifts_gives_it_back(device: Noting) -> None:
    model, optimizer = built()
    seen: list[int] = []
    with prepared(device, model, optimizer) as room:
        model.layers[4] = nn.Linear(32, 32, bias=False)  # between the spacer's tick and the look
        model.look = lambda: seen.append(device.alive())
        with room.step():
            work(model, optimizer, torch.ones(48, 32))
    assert seen == [0]


def test_where_there_is_no_room_for_it_the_step_goes_on(device: Noting) -> None:
    model, optimizer = built()
    with prepared(device, model, optimizer) as room:
        device.refuses = True
        with room.step():
            work(model, optimizer, torch.ones(16, 32))
        found = room.report().fallbacks
    assert found["no room for a block that keeps free memory in one piece"] == 1, found
