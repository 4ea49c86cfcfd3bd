"""Replays at sizes of the input at which they were never proven, as on a GPU: outcomes are heard late, hooks are few.

The programs here write to a tensor in a way that PyTorch cannot see, at some sizes and in some layers only: recomputed,
that tensor is another one.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import legroom
import legroom.room
from legroom.errors import StepError
from legroom.runtime.device import CpuDevice
from legroom.runtime.lineage import Made, Node
from legroom.runtime.replay import Action, play
from legroom.runtime.residency import Entry
from tests.runtime.test_budget import measured_peak
from tests.runtime.test_cap import Capped
from tests.runtime.test_following import assert_equal, half_way, recomputing

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = 6
_draw = random.Random(0)
SIZES = [8 * _draw.randint(50, 125) for _ in range(9)] + [8 * _draw.randint(50, 120) + 3 for _ in range(9)]
FIRST_ODD = 9


class Masked(nn.Module):
    def __init__(self, odd: frozenset[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(LAYERS))
        self.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            mask = torch.ones(x.shape)
            if len(x) % 8 and number in self.odd:
                mask.numpy()[:, ::2] = 0.5
            x = (layer(x) * mask).cos() + x
        return x


Work = Callable[[nn.Module, torch.optim.Optimizer, int], None]


def batch(number: int) -> Tensor:
    return torch.randn(SIZES[number], 64, generator=torch.Generator().manual_seed(number))


def usual(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    net(batch(number)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def closure(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    def loss() -> Tensor:
        optimizer.zero_grad()
        out = net(batch(number)).square().mean()
        out.backward()
        return out

    optimizer.step(loss)  # type: ignore[arg-type]
    optimizer.zero_grad()


def twice(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Two passes, each with a step of the optimizer."""
    x = batch(number)
    for part in (x, x.flip(0)):
        net(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def in_backward(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    net(batch(number)).square().mean().backward()


def built(odd: frozenset[int], *, each: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Masked(odd)
    if each:
        for p in net.parameters():
            own = torch.optim.SGD([p], 0.01)

            def stepped(_: Tensor, own: torch.optim.Optimizer = own) -> None:
                own.step()
                own.zero_grad()

            p.register_post_accumulate_grad_hook(stepped)
    return net, torch.optim.SGD(net.parameters(), 0.01)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    recomputing(monkeypatch)
    monkeypatch.setattr(CpuDevice, "answers_later", True)
    monkeypatch.setattr(CpuDevice, "leaves_hooks_out", True)


def budget_for(each: bool = False) -> int:
    net, optimizer = built(frozenset(), each=each)

    def longest() -> None:
        net(torch.randn(1000, 64)).square().mean().backward()
        optimizer.zero_grad()

    return half_way(longest, net, optimizer) - 200_000


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_one_wrong_replay_refuses_the_step(layer: int, settled: bool) -> None:
    """Parameters are as they were, and the batch can be run again."""
    plain, plains = built(frozenset((layer,)))
    budget = budget_for()
    net, optimizer = built(frozenset((layer,)))
    refused = []
    with legroom.fit(net, optimizer, budget=budget) as room:
        for number in range(len(SIZES)):
            before = [p.detach().clone() for p in net.parameters()]
            try:
                with room.step():
                    usual(net, optimizer, number)
            except StepError as error:
                refused.append((number, str(error)))
                assert_equal([p.detach() for p in net.parameters()], before)
                optimizer.zero_grad()
                with room.step():
                    usual(net, optimizer, number)
            usual(plain, plains, number)
            assert_equal([p.detach() for p in net.parameters()], [p.detach() for p in plain.parameters()])
            if settled and room._following is not None:
                room._following.settle()
        report = room.report()
    assert len(refused) <= 1  # where the mask of that layer is kept, there is nothing to refuse
    for number, message in refused:
        assert number >= FIRST_ODD
        assert "Parameters were not changed" in message
        assert report.fallbacks["a replay gave other bits at a new size: the step was refused"] == 1


@pytest.mark.parametrize("work", [closure, twice, in_backward])
def test_where_an_optimizer_has_begun_replays_are_waited_for(work: Work) -> None:
    """Nothing could be refused any more, so nothing wrong is used in the first place."""
    odd, each = frozenset(range(LAYERS)), work is in_backward
    plain, plains = built(odd, each=each)
    budget = budget_for(each)
    net, optimizer = built(odd, each=each)
    with legroom.fit(net, optimizer, budget=budget) as room:
        for number in range(len(SIZES)):
            with room.step():
                work(net, optimizer, number)
            work(plain, plains, number)
            assert_equal([p.detach() for p in net.parameters()], [p.detach() for p in plain.parameters()])
        report = room.report()
    assert any("was not used" in name for name in report.fallbacks), report.fallbacks


def test_a_program_that_fails_hears_of_it_too() -> None:
    budget = budget_for()
    net, optimizer = built(frozenset(range(LAYERS)))
    with legroom.fit(net, optimizer, budget=budget) as room:
        for number in range(FIRST_ODD):
            with room.step():
                usual(net, optimizer, number)

        def failing() -> None:
            with room.step():
                net(batch(FIRST_ODD)).square().mean().backward()
                raise KeyError("of the program's")

        with pytest.warns(RuntimeWarning, match="gave other bits than"), pytest.raises(KeyError) as caught:
            failing()
        assert "must not be used" in caught.value.__notes__[0]
        assert room.report().distrusted


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "is called with another size"])
def test_a_wrong_replay_is_remembered_however_the_step_ends(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was waited for, and not used; but what was learned took it for replayable."""
    monkeypatch.setattr(CpuDevice, "answers_later", False)
    budget = budget_for()
    net, optimizer = built(frozenset(range(LAYERS)))

    def odd() -> None:
        with room.step():
            net(batch(FIRST_ODD)).square().mean().backward()
            if fails:
                raise KeyError("of the program's")
            net(batch(0))

    with legroom.fit(net, optimizer, budget=budget) as room:
        for number in range(FIRST_ODD):
            with room.step():
                usual(net, optimizer, number)
        following = room._following
        assert following is not None and following.report().structures > 0
        with pytest.raises(KeyError) if fails else nullcontext():
            odd()
        assert room.report().fallbacks["a replay gave other bits and was not used"] > 0
        assert room.report().distrusted
        assert following.report().structures == 0


def test_what_was_recorded_before_a_wrong_replay_is_not_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found out while there was one size. When another one comes, nothing counts as proven at the first."""
    monkeypatch.setattr(CpuDevice, "answers_later", False)
    net, optimizer = built(frozenset())
    with legroom.fit(net, optimizer, budget=budget_for()) as room:

        def step(size: int) -> None:
            x = torch.randn(size, 64)
            with room.step():
                net(x).square().mean().backward()
                optimizer.zero_grad()

        for _ in range(4):
            step(1003)
        net.odd = frozenset(range(LAYERS))
        while not room.report().distrusted:
            assert room.report().steps < 40
            step(1003)
        step(803)
        assert room._following is not None
        courses = [course for way in room._following._ways for course in way.courses]
        assert not any((1003, 64) in course.recorded for course in courses)


@pytest.mark.parametrize("when", ["before the call", "after a save before the call", "after the call"])
def test_plans_become_smaller_only_where_one_ran_out(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the model is called, nothing is planned: what has no room there has none under another plan."""
    budget = budget_for()
    monkeypatch.setattr(legroom.room, "open_device", lambda *_: Capped())
    net, optimizer = built(frozenset())
    weight = torch.randn(64, 64).requires_grad_()
    with legroom.fit(net, optimizer, budget=int(1.5 * budget)) as room:
        for number in range(FIRST_ODD):
            with room.step():
                usual(net, optimizer, number)
        brim = room._standing.brim
        assert brim is not None and room._following is not None
        before = brim.usable_bytes
        with pytest.raises(torch.OutOfMemoryError), room.step():  # noqa: PT012
            if when == "after a save before the call":
                weight.exp()
            if when == "after the call":
                net(batch(0))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. More words")
        planned = when == "after the call"
        assert (brim.usable_bytes < before) == planned
        assert ("a planned step ran out of memory: planned again for less" in room.report().fallbacks) == planned


def test_a_plan_under_which_a_step_ran_out_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the floor plans leave nothing in reserve. At last there is none, and the step is taken as it comes."""
    net, optimizer = built(frozenset())

    def longest() -> None:
        net(torch.randn(1000, 64)).square().mean().backward()
        optimizer.zero_grad()

    floor = legroom.floor_bytes(legroom.capture(longest, model=net, optimizer=optimizer))
    monkeypatch.setattr(legroom.room, "open_device", lambda *_: Capped())
    net, optimizer = built(frozenset())
    peaks: list[int] = []
    with legroom.fit(net, optimizer, budget=int(floor / 0.88)) as room:
        for rows in (1000, 700, 900, 600, 800, 1000, 1000):
            with room.step():
                net(torch.randn(rows, 64)).square().mean().backward()
                optimizer.zero_grad()
        following, brim = room._following, room._standing.brim
        assert following is not None and brim is not None and following.rung is not None
        assert following.rung.peak_bytes > brim.usable_bytes
        while following._rows[-1].course == "planned" and len(peaks) < 20:
            peaks.append(following.rung.peak_bytes)
            with pytest.raises(torch.OutOfMemoryError), room.step():  # noqa: PT012
                net(torch.randn(1000, 64))
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. More words")
            optimizer.zero_grad()
            with room.step():
                net(torch.randn(1000, 64)).square().mean().backward()
                optimizer.zero_grad()
    assert 0 < len(peaks) < 20
    assert all(after <= 0.97 * before for before, after in itertools.pairwise(peaks))


def test_calls_behind_backward_may_come_or_not() -> None:
    """Gradients accumulated over two steps of one size, clipped in every second one."""

    def work(net: nn.Module, optimizer: torch.optim.Optimizer, number: int, around: Callable[[], Any]) -> None:
        with around():
            net(batch(0)).square().mean().backward()
            if number % 2:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    plain, plains = built(frozenset())
    budget = budget_for() + 400_000
    net, optimizer = built(frozenset())
    with legroom.fit(net, optimizer, budget=budget) as room:
        for number in range(20):
            work(net, optimizer, number, room.step)
            work(plain, plains, number, nullcontext)
        report = room.report()
    assert_equal([p.detach() for p in net.parameters()], [p.detach() for p in plain.parameters()])
    assert not any("drift" in name for name in report.fallbacks), report.fallbacks
    assert report.sheltered_steps <= 4


class Picking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).cos()
        picked = x[mask]
        for _ in range(6):
            picked = picked.sigmoid()
        return x.square().mean() + picked.mean()


@pytest.mark.parametrize("most", [100, 20], ids=["large", "small"])
def test_sizes_that_depend_on_the_content_are_looked_at(most: int) -> None:
    """They were the same in all steps that were learned from; later they are fifty times as large."""
    net = Picking()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)

    def work(rows: int, picked: int) -> None:
        mask = torch.zeros(rows, dtype=torch.bool)
        mask[:picked] = True
        net(torch.randn(rows, 64), mask).backward()
        optimizer.step()
        optimizer.zero_grad()

    budget = half_way(lambda: work(1000, most), net, optimizer)
    with legroom.fit(net, optimizer, budget=budget) as room:
        for rows in [1000, 800, 600, 900, 700, 940, 860, 650, 720, 990, 810]:
            with room.step():
                work(rows, most)
            if room._following is not None:
                room._following.settle()
        for _ in range(3):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert measured_peak(lambda _: work(1000, 1000), room.step, 0) <= budget


def test_what_is_left_alone_counts_as_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that come once must not push out what serves every step."""
    monkeypatch.setattr(legroom.room, "open_device", lambda *_: Capped())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

        def forward(self, x: Tensor, extra: Any = None) -> Tensor:
            for layer in self.layers:
                x = torch.nn.functional.gelu(layer(x))
            return x.sum()

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    draw = random.Random(0)
    with legroom.fit(net, optimizer, budget="64MiB") as room:

        def step(rows: int, extra: Any = None) -> None:
            with room.step():
                net(torch.randn(rows, 64), extra).backward()
                optimizer.step()
                optimizer.zero_grad()

        for _ in range(40):
            step(draw.randint(500, 1000))
        for number in range(17):
            step(100, tuple(torch.zeros(1) for _ in range(number + 1)))
        for _ in range(3):
            step(draw.randint(500, 1000))
        followed = room.report().followed
    assert followed is not None
    assert [step.course for step in followed.steps][-3:] == ["left alone"] * 3


@pytest.mark.parametrize("fails", [False, True], ids=["outside", "after a failure"])
@pytest.mark.parametrize("answers_later", [False, True])
def test_what_is_made_again_after_the_step_is_checked_too(
    answers_later: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the real bytes are at hand they are used; where only their digest is, the backward pass is refused."""
    monkeypatch.setattr(CpuDevice, "answers_later", answers_later)
    odd = frozenset(range(LAYERS))
    plain, plains = built(odd)
    budget = budget_for()
    net, optimizer = built(odd)
    refused: list[str] = []
    with legroom.fit(net, optimizer, budget=budget) as room:
        for number in range(len(SIZES)):
            if number < FIRST_ODD:
                with room.step():
                    usual(net, optimizer, number)
            else:
                with contextlib.suppress(KeyError), room.step():
                    loss = net(batch(number)).square().mean()
                    if fails:
                        raise KeyError("of the program's")
                try:
                    loss.backward()
                except StepError as error:
                    refused.append(str(error))
                    optimizer.zero_grad()
                    net(batch(number)).square().mean().backward()  # outside: plainly
                optimizer.step()
                optimizer.zero_grad()
            usual(plain, plains, number)
            assert_equal([p.detach() for p in net.parameters()], [p.detach() for p in plain.parameters()])
        report = room.report()
    assert len(refused) == answers_later
    assert all("found out after the step" in message for message in refused)
    assert bool(report.distrusted) is answers_later  # from then on it is not replayed


def test_a_checked_replay_does_not_find_its_answer_in_memory_that_was_freed() -> None:
    """What it does not write is written over: the block may be the one that held the real bytes."""
    made = Made(0, torch.ops.aten.empty.memory_format, ([3, 5],), {"dtype": torch.float32}, lambda *_: None)  # type: ignore[arg-type,return-value]
    node = Node.unseen(made, 0)
    again: list[Tensor] = []
    for _ in range(3):
        (tensor,) = play([Action(made, (0,), ())], (node,), checked=True)
        assert tensor is not None
        again.append(tensor)
    assert all(set(tensor.view(torch.uint8).flatten().tolist()) == {0xA5} for tensor in again)


def test_what_is_dropped_and_checked_is_no_longer_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """At sizes where nothing was proven yet; elsewhere it is left as it is."""
    dropped: list[set[int]] = []
    release = Entry.release

    def looked_at(entry: Entry) -> None:
        if entry.in_memory and entry.host is None:
            dropped.append(set(entry.flat().tolist()))
        release(entry)

    monkeypatch.setattr(Entry, "release", looked_at)
    budget = budget_for()
    net, optimizer = built(frozenset())
    with legroom.fit(net, optimizer, budget=budget) as room:
        for number in (*range(len(SIZES)), FIRST_ODD):
            dropped.clear()
            with room.step():
                usual(net, optimizer, number)
            if number == FIRST_ODD and room._following is not None:
                assert dropped
                new = all(values == {0xA5} for values in dropped)
                known = sum(values == {0xA5} for values in dropped) <= 1  # one is checked in every step
                assert known if room._steps > len(SIZES) else new, dropped
