"""An optimizer's state is moved close together, and nobody notices."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import legroom
from legroom import room as rooms
from legroom.arrange import Piece
from legroom.runtime.together import draw_together
from tests.runtime.test_cap import Capped

MIB = 2**20

pytestmark = pytest.mark.usefixtures("one_thread")


class InPieces(Capped):
    """Has holes between what is in use; refuses requests from some number on."""

    gives = 1 << 60  # requests

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def free_pieces(self) -> list[Piece]:
        return [Piece(3 * MIB, 5 * MIB), Piece(40 * MIB), Piece(0, 2**60), Piece(1000), Piece(9 * MIB)]

    def allocate(self, nbytes: int) -> Tensor:
        self.asked.append(nbytes)
        if len(self.asked) > self.gives:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a little.")
        return super().allocate(nbytes)


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 600), nn.GELU(), nn.Linear(600, 700), nn.GELU(), nn.Linear(700, 3))
    return model, torch.optim.Adam(model.parameters(), 1e-3)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, around: Any = None) -> list[Tensor]:
    losses = []
    for number in steps:
        x = torch.randn(64, 600, generator=torch.Generator().manual_seed(number))

        def work(x: Tensor = x) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        if around is None:
            losses.append(work())
        else:
            with around():
                losses.append(work())
    states = [value.clone() for state in optimizer.state.values() for value in state.values()]
    return [*losses, *(p.detach().clone() for p in model.parameters()), *states]


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


def test_objects_and_bits_stay_and_training_goes_on() -> None:
    model, optimizer = built()
    trained(model, optimizer, range(2))
    device, before = InPieces(), state_of(optimizer)
    bits, places = [value.clone() for value in before], [value.data_ptr() for value in before]
    large = [i for i, value in enumerate(before) if value.nbytes > MIB]

    assert draw_together(device, optimizer) == sum(before[i].nbytes for i in large) > 0

    assert all(a is b for a, b in zip(state_of(optimizer), before, strict=True))
    assert all(map(torch.equal, before, bits))
    assert [i for i, value in enumerate(before) if value.data_ptr() != places[i]] == large
    assert device.merged == 2
    plain = built()
    expected = [trained(*plain, range(2)), trained(*plain, range(2, 5))]
    assert all(map(torch.equal, trained(model, optimizer, range(2, 5)), expected[1]))


def test_what_others_refer_to_stays_where_it_is() -> None:
    model, optimizer = built()
    trained(model, optimizer, range(1))
    large = [value for value in state_of(optimizer) if value.nbytes > MIB]
    view, array, shared = large[0][3:], large[1].numpy(), np.from_dlpack(large[2])
    places = [value.data_ptr() for value in large[:3]]

    assert draw_together(InPieces(), optimizer) == sum(value.nbytes for value in large[3:]) > 0

    assert [value.data_ptr() for value in large[:3]] == places
    for value in large[:3]:
        value.add_(1)
    assert torch.equal(view, large[0][3:]) and (array == large[1].numpy()).all() and (shared == large[2].numpy()).all()


def test_a_graph_that_has_saved_state_goes_on() -> None:
    model, optimizer = built()
    trained(model, optimizer, range(1))
    state = next(value for value in state_of(optimizer) if value.nbytes > MIB)
    weights = torch.ones_like(state, requires_grad=True)
    penalty = (weights * state).sum()
    expected = state.clone()
    draw_together(InPieces(), optimizer)
    penalty.backward()
    assert weights.grad is not None and torch.equal(weights.grad, expected)


def test_state_made_under_inference_mode_stays() -> None:
    model, optimizer = built()
    model(torch.randn(64, 600)).square().mean().backward()
    with torch.inference_mode():
        optimizer.step()
    assert draw_together(InPieces(), optimizer) == 0


@pytest.mark.parametrize("gives", [0, 2, 3, 4])
def test_as_many_are_moved_as_there_is_room_for(gives: int) -> None:
    model, optimizer = built()
    trained(model, optimizer, range(1))
    before = [value.clone() for value in state_of(optimizer)]
    device = InPieces()
    device.gives = gives

    moved = draw_together(device, optimizer)

    assert device.asked[:3] == [40 * MIB, 9 * MIB, 3 * MIB][: gives + 1]  # the holes, the largest first
    assert moved == sum(device.asked[3:gives])
    assert all(map(torch.equal, state_of(optimizer), before))


def test_where_little_is_lost_nothing_is_moved() -> None:
    model, optimizer = built()
    trained(model, optimizer, range(1))
    places = [value.data_ptr() for value in state_of(optimizer)]
    assert draw_together(Capped(), optimizer) == 0
    assert [value.data_ptr() for value in state_of(optimizer)] == places


@pytest.mark.parametrize("told", ["by an option", "by the device"])
def test_state_that_a_graph_may_have_captured_stays(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = built()
    trained(model, optimizer, range(1))
    if told == "by an option":
        optimizer.param_groups[0]["capturable"] = True
    else:  # SGD has no such option, and can be captured
        monkeypatch.setattr(InPieces, "has_captured", lambda _: True)
    assert draw_together(InPieces(), optimizer) == 0


def test_state_that_is_made_anew_in_every_step_is_not_moved_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    monkeypatch.setattr(rooms, "open_device", lambda *_: InPieces())
    monkeypatch.setattr(rooms, "draw_together", lambda *given: moved.append(1) or draw_together(*given))
    model, optimizer = built()
    with legroom.fit(model, optimizer, budget="80MiB") as room:
        for number in range(9):
            trained(model, optimizer, range(number, number + 1), room.step)
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert len(moved) == rooms.MOST_DRAWS


def test_a_room_moves_state_when_it_is_there_and_when_it_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    device = InPieces()
    moved: list[int] = []
    monkeypatch.setattr(rooms, "open_device", lambda *_: device)

    def noted(*arguments: Any) -> int:
        moved.append(draw_together(*arguments))
        return moved[-1]

    monkeypatch.setattr(rooms, "draw_together", noted)
    model, optimizer = built()
    with legroom.fit(model, optimizer, budget="80MiB") as room:
        trained(model, optimizer, range(4), room.step)
        assert len(moved) == 1 and moved[0] > 0  # before the second step
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        mine = trained(model, optimizer, range(4, 8), room.step)
        assert len(moved) == 2
        assert room.report().planned_steps >= 5, room.report().fallbacks
    plain = built()
    assert all(map(torch.equal, mine, [trained(*plain, range(4)), trained(*plain, range(4, 8))][1]))
