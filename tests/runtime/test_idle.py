"""A plan that keeps everything leaves the program alone, until it is called with something else."""

from __future__ import annotations

import copy
import gc
import io
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import legroom
from legroom import room as rooms
from legroom.runtime.inputs import signature_of
from tests.runtime.test_cap import Capped


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.hooked: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.hooked.append(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.sum()


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Net:
    monkeypatch.setattr(rooms, "open_device", lambda *_: Capped())
    torch.manual_seed(0)
    return Net()


def train(
    net: Net,
    rows: list[int],
    room: legroom.Room | None,
    optimizer: torch.optim.Optimizer,
    around: AbstractContextManager[object] | None = None,
) -> list[Tensor]:
    losses = []
    for number, count in enumerate(rows):
        with room.step() if room is not None else nullcontext():
            with around or nullcontext():
                loss = net(torch.linspace(-1, number, count * 64).view(count, 64))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in net.parameters())]


def both(net: Net, rows: list[int], around: AbstractContextManager[object] | None = None) -> legroom.Report:
    """Train plainly and in a room with plenty of memory; the same bits, and what the room says."""
    other = copy.deepcopy(net)
    plain = train(other, rows, None, torch.optim.SGD(other.parameters(), lr=0.01), around)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with legroom.fit(net, optimizer, budget="1GiB") as room:
        taken = train(net, rows, room, optimizer, around)
        assert all(torch.equal(a, b) for a, b in zip(plain, taken, strict=True))
        return room.report()


def test_nothing_is_put_in_once_a_plan_keeps_everything(net: Net) -> None:
    report = both(net, [32] * 10)
    assert report.planned_steps == 8 and report.bytes_swapped == report.bytes_recomputed == 0
    assert all(net.hooked[:3]) and not any(net.hooked[-4:])
    assert not report.fallbacks


def test_another_shape_is_seen_before_anything_is_saved(net: Net) -> None:
    report = both(net, [32] * 8 + [48] + [48] * 6)
    assert not any(net.hooked[6:8]) and all(net.hooked[8:11])
    assert report.fallbacks == {"drift: the model was called with something else": 1}


def test_hooks_of_the_programs_own_stay_where_they_are(net: Net) -> None:
    report = both(net, [32] * 8 + [48] * 4, torch.autograd.graph.save_on_cpu())
    assert not report.fallbacks  # not ours to see, and not counted; but learned anew
    assert report.sheltered_steps > 2


def test_a_little_less_room_than_that_and_hooks_stay(net: Net) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with legroom.fit(net, optimizer, budget="1GiB") as room:
        train(net, [32] * 8, room, optimizer)
        assert room.timeline is not None
        room.budget_bytes = int(room.timeline.peak_bytes / 0.97)
        train(net, [32], room, optimizer)
    assert not net.hooked[7] and net.hooked[8]


def test_the_model_can_be_copied_saved_and_left_behind(net: Net) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    room = legroom.fit(net, optimizer, budget="1GiB")
    train(net, [32] * 6, room, optimizer)
    assert len(net._forward_pre_hooks) == 1
    twin = copy.deepcopy(net)
    torch.save(net, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x = torch.ones(4, 64)
    assert torch.equal(twin(x), net(x)) and torch.equal(loaded(x), net(x))
    room.close()
    assert not net._forward_pre_hooks

    room = legroom.fit(net, optimizer, budget="1GiB")
    train(net, [32] * 6, room, optimizer)
    assert net._forward_pre_hooks
    del room
    gc.collect()
    assert not net._forward_pre_hooks


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((torch.ones(2),), (torch.ones(3),)),
        ((torch.ones(2),), (torch.ones(2, dtype=torch.float64),)),
        (({"x": [torch.ones(2)]},), ({"x": [torch.ones(2), torch.ones(2)]},)),
        ((1, None), (2, None)),
        (({"x": 1},), ({"y": 1},)),
    ],
)
def test_signatures_tell_calls_apart(a: object, b: object) -> None:
    assert signature_of(a) == signature_of(copy.deepcopy(a)) != signature_of(b)
