"""Steps of a known op sequence at other sizes: recorded without being proven again, and checked before they count."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import legroom
from legroom.courses import Course
from tests.runtime.test_following import half_way, recomputing

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 64
SIZES = [600, 808, 704, 900, 512, 1000, 640, 760, 904, 808, 900, 997, 640, 1000, 904, 900]


@pytest.fixture(scope="module")
def half_op() -> Iterator[Any]:
    """(x * 2, other bytes every time, again others), as attention kernels that leave their random state unwritten."""
    counter = itertools.count()
    ran: list[int] = []

    def run(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ran.append(len(x))
        return x * 2, torch.full((64,), next(counter)), torch.full((32,), next(counter))

    library = torch.library.Library("aten", "FRAGMENT")
    library.define("legroom_third_repeats(Tensor x) -> (Tensor, Tensor, Tensor)")
    library.impl("legroom_third_repeats", run, "CPU")
    op: Any = torch.ops.aten.legroom_third_repeats.default
    op.ran = ran
    yield op
    del op.ran
    library._destroy()


class Net(nn.Module):
    """odd: at sizes that say so, something is written that PyTorch does not see. deep: larger inputs take a layer more,
    which writes unseen, too."""

    def __init__(self, op: Any = None, *, odd: Callable[[int], bool] | None = None, deep: int = 0) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.op, self.odd, self.deep = op, odd, deep

    def forward(self, x: Tensor) -> Tensor:
        rows = len(x)
        if self.op is not None:
            x = self.op(x)[0]
        mask = torch.ones(x.shape)
        if self.odd is not None:
            mask.numpy()[:, ::2] = 0.5 if self.odd(rows) else 1.0
        x = (self.first(x) * mask).cos() + x
        if self.deep and rows > self.deep:
            more = torch.ones(x.shape)
            more.numpy()[:, 1::2] = 0.25
            x = (self.third(x) * more).sin() + x
        return self.second(x).sin().square().mean()


def train(
    net: Net, optimizer: torch.optim.Optimizer, around: Callable[[], Any], sizes: list[int], *, ahead: bool = False
) -> list[bytes]:
    """The parameters after each step. ahead: in a step, an op runs before the model is called."""
    seen: list[bytes] = []
    for number, rows in enumerate(sizes):
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))
        with around():
            given = x.square() if ahead else x
            net(given).backward()
            optimizer.step()
            optimizer.zero_grad()
        seen.append(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
    return seen


def both(build: Callable[[], Net], sizes: list[int], *, ahead: bool = False) -> tuple[list[Course], legroom.Report]:
    """Train plainly and in a room, and compare."""

    def made() -> tuple[Net, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = build()
        return net, torch.optim.SGD(net.parameters(), 0.01)

    net, optimizer = made()
    expected = train(net, optimizer, nullcontext, sizes, ahead=ahead)
    net, optimizer = made()
    budget = half_way(lambda: train(net, optimizer, nullcontext, [1000], ahead=ahead), net, optimizer)
    net, optimizer = made()
    with legroom.fit(net, optimizer, budget=budget) as room:
        assert train(net, optimizer, room.step, sizes, ahead=ahead) == expected
        assert room._following is not None
        courses = [course for way in room._following._ways for course in way.courses]
        return courses, room.report()


@pytest.mark.parametrize("ahead", [False, True])
def test_the_ops_of_one_step_are_proven_and_those_of_the_next_ones_are_not(half_op: Any, ahead: bool) -> None:
    """ahead: an op runs before the model is called, so that the step that is proven is no sample. Its proofs count."""
    ran: list[int] = []  # in each step
    torch.manual_seed(0)
    net = Net(half_op)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    budget = half_way(lambda: train(net, optimizer, nullcontext, [1000]), net, optimizer)
    half_op.ran.clear()
    with legroom.fit(net, optimizer, budget=budget) as room:
        for rows in SIZES:
            before, x = len(half_op.ran), torch.randn(rows, WIDTH)
            with room.step():
                net(x.square() if ahead else x).backward()
                optimizer.step()
                optimizer.zero_grad()
            ran.append(len(half_op.ran) - before)
        followed = room.report().followed
        assert followed is not None and room._following is not None
        (way,) = room._following._ways
        (course,) = way.courses
    # The first step is not recorded, the second is before it is known that sizes vary.
    assert ran[:2] == [1, 2]
    recorded = [count for count, row in zip(ran[2:], followed.steps, strict=True) if row.course == "sheltered"]
    assert len(recorded) >= 2 and set(recorded) == {1}
    assert len(course.recorded) == (0 if ahead else 1) and course.model.samples > 1
    ops = {op.name: op for op in course.model.template.ops}
    assert ops["aten.legroom_third_repeats.default"].why_not == ""
    assert len(ops["legroom.unrepeated"].writes) == 2


def test_proofs_of_one_way_to_call_the_model_are_none_of_another(half_op: Any) -> None:
    """Its ops may have the same names and do something else."""

    class Either(Net):
        def forward(self, x: Tensor, twice: bool = False) -> Tensor:
            return super().forward(x) * (2 if twice else 1)

    torch.manual_seed(0)
    net = Either(half_op)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    budget = half_way(lambda: train(net, optimizer, nullcontext, [1000]), net, optimizer)
    ran: dict[bool, list[int]] = {False: [], True: []}
    with legroom.fit(net, optimizer, budget=budget) as room:
        for twice, rows in itertools.product((False, True), SIZES[:4]):
            before, x = len(half_op.ran), torch.randn(rows, WIDTH)
            with room.step():
                given = x.square()
                net(given, twice=twice).backward()
                optimizer.step()
                optimizer.zero_grad()
            ran[twice].append(len(half_op.ran) - before)
        assert room._following is not None and len(list(room._following._ways)) == 2
    assert ran[False][:3] == [1, 2, 1]
    assert ran[True][:2] == [2, 1]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("when", ["recorded", "never recorded"])
def test_what_was_not_proven_at_a_size_is_held_against_the_real_bytes(
    when: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first proof is at 808 rows: there, nothing is written unseen."""
    recomputing(monkeypatch)
    odd = (lambda rows: rows == 900) if when == "recorded" else (lambda rows: rows % 8 > 0)
    courses, report = both(lambda: Net(odd=odd), SIZES, ahead=ahead)
    assert all(len(course.recorded) == 1 for course in courses) or ahead
    assert report.fallbacks.get("a replay gave other bits and was not used"), report.fallbacks


def test_where_another_op_comes_proofs_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the longer way writes unseen is found out where it is recorded first."""
    recomputing(monkeypatch)
    courses, report = both(lambda: Net(deep=850), SIZES)
    assert len(courses) == 2
    shorter, longer = sorted(courses, key=lambda course: len(course.model.template.ops))
    assert shorter.outline is not None
    assert longer.outline is None  # so that the next one is proven as well
    (sin,) = (op for op in shorter.model.template.ops if op.name == "aten.sin.default")
    last, first = (op for op in reversed(longer.model.template.ops) if op.name == "aten.sin.default")
    assert sin.why_not == first.why_not == last.why_not == ""
    changed = [op for op in longer.model.template.ops if "changed by something" in op.why_not]
    assert [op.name for op in changed] == ["aten.ones.default", "legroom.unseen_write"]
    assert "a replay gave other bits and was not used" not in report.fallbacks


def test_ops_of_backward_are_timed_together_as_at_the_size_that_was_proven() -> None:
    """Their shapes are written down there alone. One run by itself is noise."""
    (course,), _ = both(Net, SIZES)
    assert course.outline is not None and len(course.model._samples) > 2
    places = [op.id for op in course.model.template.ops if op.phase == "backward"]
    assert [course.model.template.ops[place].name for place in places] == [name for name, _ in course.outline.backward]
    together: dict[tuple[str, str], list[int]] = {}
    for place, signature in zip(places, course.outline.backward, strict=True):
        together.setdefault(signature, []).append(place)
    assert len(together) > 3 and max(map(len, together.values())) > 1
    for sample in course.model._samples.values():
        seconds = sample.numbers.seconds
        for same in together.values():
            assert len(set(seconds[same].tolist())) == 1
        assert len(set(seconds[places].tolist())) > 3
