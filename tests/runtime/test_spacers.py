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
from legroom.runtime.program import Program
from tests.runtime.test_random_plans import random_planner

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
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
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
    return model, torch.optim.SGD(model.parameters(), lr=1e-5)


def work(model: Net, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def prepared(device: Noting, model: Net, optimizer: torch.optim.Optimizer, *, to_the_end: bool = False) -> legroom.Room:
    """A room whose plan has a spacer, from a tick in the middle of forward to one in backward, or to the end."""
    room = legroom.fit(model, optimizer, budget="1GiB", planner=random_planner((1, 3, 2, 2), 1))
    for _ in range(4):
        with room.step():
            work(model, optimizer, torch.ones(256, 64))
    trace = room.trace
    assert trace is not None and room._standing.program is not None
    first_unpack = next(i for i, tick in enumerate(trace.ticks) if tick.kind == "unpack")
    spacers = [Spacer(first_unpack // 2, len(trace.ticks) if to_the_end else first_unpack + 3, NBYTES)]
    room._standing.program = Program(trace, room._standing._schedule, spacers=spacers)
    assert not room._standing.program.idle
    return room


def test_a_spacer_stands_from_its_tick_to_the_other(device: Noting) -> None:
    model, optimizer = built()
    seen: list[int] = []
    with prepared(device, model, optimizer) as room:
        model.look = lambda: seen.append(device.alive())
        for number in range(3):
            with room.step():
                loss = model(torch.ones(256, 64))
                loss.backward()
                assert device.alive() == 0
                optimizer.step()
                optimizer.zero_grad()
            assert device.taken == number + 1
        assert room.report().planned_steps > 3, room.report().fallbacks
    assert seen == [1, 1, 1]


def test_the_same_bits_with_and_without(device: Noting) -> None:
    expected_model, expected_optimizer = built()
    expected = [work(expected_model, expected_optimizer, torch.ones(256, 64)) for _ in range(8)]
    model, optimizer = built()
    with prepared(device, model, optimizer) as room:
        for number in range(4):
            with room.step():
                assert torch.equal(work(model, optimizer, torch.ones(256, 64)), expected[4 + number])
    for parameter, other in zip(model.parameters(), expected_model.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_a_step_that_fails_gives_it_back(device: Noting) -> None:
    model, optimizer = built()
    with prepared(device, model, optimizer) as room:
        model.fail = True
        with pytest.raises(RuntimeError, match="half-way"), room.step():
            work(model, optimizer, torch.ones(256, 64))
        assert device.taken == 1 and device.alive() == 0


def test_a_step_that_drifts_gives_it_back(device: Noting) -> None:
    model, optimizer = built()
    seen: list[int] = []
    with prepared(device, model, optimizer) as room:
        model.layers[4] = nn.Linear(64, 64, bias=False)  # between the spacer's tick and the look
        model.look = lambda: seen.append(device.alive())
        with room.step():
            work(model, optimizer, torch.ones(300, 64))
    assert seen == [0]


def test_where_there_is_no_room_for_it_the_step_goes_on(device: Noting) -> None:
    model, optimizer = built()
    with prepared(device, model, optimizer) as room:
        device.refuses = True
        with room.step():
            work(model, optimizer, torch.ones(256, 64))
        found = room.report().fallbacks
        device.refuses = False
        with room.step():
            work(model, optimizer, torch.ones(256, 64))
    assert found["no room for a block that keeps free memory in one piece"] == 1, found
    assert device.taken == 0, "to ask again stops a GPU in every step"


@pytest.mark.parametrize("leaves_hooks_out", [False, True])
def test_one_that_stands_to_the_end_goes_with_the_step(device: Noting, leaves_hooks_out: bool) -> None:
    device.leaves_hooks_out = leaves_hooks_out
    model, optimizer = built()
    with prepared(device, model, optimizer, to_the_end=True) as room:
        for number in range(3):
            with room.step():
                work(model, optimizer, torch.ones(256, 64))
            assert device.taken == number + 1 and device.alive() == 0
        program = room._standing.program
        assert program is not None and (program.few_ticks is not None) is leaves_hooks_out


def test_the_report_s_curve_has_it_in(device: Noting) -> None:
    model, optimizer = built()
    with prepared(device, model, optimizer) as room:
        room._standing.calibrations, room._standing._calibrated = 0, False  # measure once more
        for _ in range(3):  # the first may put right what the plan's own measured steps did not see
            with room.step():
                work(model, optimizer, torch.ones(256, 64))
        report = room.report()
    assert report.predicted_peak_bytes == max(report.predicted_curve) == max(report.measured_curve) > NBYTES
    assert room._standing._calibrated


def test_a_refused_one_is_not_taken_for_a_smaller_step(device: Noting) -> None:
    model, optimizer = built()
    with prepared(device, model, optimizer) as room:
        room._standing.calibrations, room._standing._calibrated = 0, False
        before, with_it = room.trace, room._standing.predicted_curve()
        device.refuses = True
        with room.step():
            work(model, optimizer, torch.ones(256, 64))
        assert room.trace == before and not room._standing._calibrated, "this was not the step that the plan is for"
        without = room._standing.predicted_curve()
    assert max(a - b for a, b in zip(with_it, without, strict=True)) == NBYTES, "it is in no curve any more"
