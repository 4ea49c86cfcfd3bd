"""A plan that keeps everything leaves the program alone, until it is called with something else."""

from __future__ import annotations

import copy
import io
from concurrent.futures import ThreadPoolExecutor
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

    def forward(self, x: Tensor, extra: object = None) -> Tensor:
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
    report = both(net, [32] * 9 + [48] * 7)
    assert not any(net.hooked[7:9]) and net.hooked[9]
    assert report.fallbacks == {"drift: the model was called with something else": 1}
    assert not any(net.hooked[-2:])  # known by then


def test_hooks_of_the_programs_own_stay_where_they_are(net: Net) -> None:
    report = both(net, [32] * 9 + [48] * 4, torch.autograd.graph.save_on_cpu())
    assert report.fallbacks == {"drift: the model was called with something else, under other hooks": 1}
    assert report.sheltered_steps > 2


def settled(net: Net) -> tuple[legroom.Room, torch.optim.Optimizer]:
    """A room whose steps are left alone."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    room = legroom.fit(net, optimizer, budget="1GiB")
    train(net, [32] * 9, room, optimizer)
    assert not net.hooked[-1]
    return room, optimizer


def test_a_little_less_room_than_that_and_hooks_stay(net: Net) -> None:
    room, optimizer = settled(net)
    with room:
        assert room.timeline is not None
        room._standing._budget_bytes = int(room.timeline.peak_bytes / 0.97)
        train(net, [32], room, optimizer)
    assert net.hooked[-1]


@pytest.mark.parametrize("change", ["unfrozen", "evaluated", "not called"])
def test_what_else_makes_it_another_step(net: Net, change: str) -> None:
    if change == "unfrozen":
        net.layers[0].requires_grad_(False)
    room, optimizer = settled(net)
    with room:
        if change == "unfrozen":
            net.layers[0].requires_grad_(True)
            train(net, [32], room, optimizer)
        elif change == "evaluated":
            net.eval()
            train(net, [32], room, optimizer)
        else:
            with room.step():
                pass
        assert sum(room.report().fallbacks.values()) == 1
        assert any(name.startswith("drift") for name in room.report().fallbacks)


def test_a_call_in_another_thread_is_not_ours(net: Net) -> None:
    room, optimizer = settled(net)
    with room:
        with room.step():
            with ThreadPoolExecutor(1) as pool:
                pool.submit(net, torch.ones(5, 64)).result()
            net(torch.ones(32, 64)).backward()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        optimizer.zero_grad()
        train(net, [32], room, optimizer)
    assert net.hooked[-1]


def test_after_running_out_of_memory_nothing_is_left_alone(net: Net) -> None:
    room, optimizer = settled(net)
    with room:
        with pytest.raises(torch.OutOfMemoryError), room.step():
            raise torch.OutOfMemoryError("no memory")
        train(net, [32] * 4, room, optimizer)
    assert all(net.hooked[-4:])


def test_what_cannot_be_told_apart_is_not_left_alone(net: Net) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with legroom.fit(net, optimizer, budget="1GiB") as room:
        for _ in range(9):
            with room.step():
                net(torch.ones(32, 64), extra=object()).backward()
            optimizer.zero_grad()
    assert all(net.hooked)


def test_a_device_that_fails_between_steps_leaves_nothing_behind(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    room, optimizer = settled(net)
    with room:
        for moment in ("begin", "end"):
            with monkeypatch.context() as patch:
                patch.setattr(room._standing.pace, moment, lambda _: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    train(net, [32], room, optimizer)
            optimizer.zero_grad()
            assert not net._forward_pre_hooks
            train(net, [32], room, optimizer)


def test_the_model_can_be_copied_and_saved(net: Net) -> None:
    room, optimizer = settled(net)
    assert not net._forward_pre_hooks
    x = torch.ones(4, 64)
    with room:
        with room.step():
            twin = copy.deepcopy(net)
            torch.save(net, file := io.BytesIO())
            net(torch.ones(32, 64)).backward()
        optimizer.zero_grad()
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert torch.equal(twin(x), net(x)) and torch.equal(loaded(x), net(x))
    assert not net._forward_pre_hooks


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((torch.ones(2),), (torch.ones(3),)),
        ((torch.ones(2),), (torch.ones(2, dtype=torch.float64),)),
        (({"x": [torch.ones(2)]},), ({"x": [torch.ones(2), torch.ones(2)]},)),
        ((1, None), (2, None)),
        ((torch.ones(2),), (torch.ones(2, requires_grad=True),)),
        (({"x": 1},), ({"y": 1},)),
    ],
)
def test_signatures_tell_calls_apart(a: object, b: object) -> None:
    assert signature_of(a) == signature_of(copy.deepcopy(a)) != signature_of(b)
    unknown = object()
    assert signature_of((a, unknown)) != signature_of((a, unknown))
