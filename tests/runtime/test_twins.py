"""Saved tensors that have the bytes of others: dropped for nothing where that shows, and otherwise left alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import legroom
from legroom.errors import StepError
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.plan import Keep, Plan, Recompute, Swap, signature
from legroom.runtime import replay
from legroom.runtime.device import CpuDevice
from legroom.runtime.lineage import Lineage, Made
from legroom.runtime.residency import Ledger
from legroom.runtime.twins import Twins, same_value
from legroom.sizes import numbers_of, structure_of, with_numbers
from tests.zoo import ZOO

KEEP = Keep()
WIDTH, ROWS = 16, 4096  # a cast takes 128 KiB
STEPS = 7


class Casts(nn.Module):
    """Casts its input twice, as layers under autocast do, and does something to it or to the casts on the way."""

    def __init__(self, between: Callable[[Tensor, Tensor, int], Any] | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.between = between
        self.step = 0
        self.held: list[Tensor] = []
        self.holds = ""

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        a = x.bfloat16()
        left = a.sin()
        if self.between is not None:
            self.between(x, a, self.step)
        if "a" in self.holds:
            self.held = [a]
        del a
        b = x.bfloat16()
        right = b.cos()
        if "b" in self.holds:
            self.held = [b]
        del b, x
        return (left * 2 + right.float()).square().mean()


def drop_twins(others: Any) -> Callable[[Trace, Hardware, int], Plan]:
    """A plan that makes again what has the bytes of another storage, and does something else to all the rest."""

    def planner(trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        twins = {op.writes[0][0] for op in trace.ops if op.twin and not op.why_not}
        decisions = tuple(Recompute() if gap.storage in twins else others for gap in trace.gaps)
        return Plan(decisions, signature(trace), "twins", budget_bytes, 0, 0.0, ())

    return planner


def twins_of(trace: Trace) -> set[int]:
    return {op.writes[0][0] for op in trace.ops if op.twin}


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each twin that was to be dropped, whether it went to the first one."""
    found: list[bool] = []
    drop = Twins.drop

    def counted(self: Twins, entry: Any, twin: Any) -> None:
        number = entry.number
        drop(self, entry, twin)
        found.append(self._entries[number] is self._entries.get(twin.first))

    monkeypatch.setattr(Twins, "drop", counted)
    return found


def data(step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def train(model: Casts, around: Callable[[], Any], *, after: Callable[[Casts], None] | None = None) -> list[Tensor]:
    """Losses, gradients and weights of some steps."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    out: list[Tensor] = []
    for step in range(STEPS):
        model.step = step
        x = data(step)
        with around():
            loss = model(x)
            if after is not None:
                after(model)
            loss.backward()
            model.held = []
            out += [loss.detach(), model.scale.grad.clone()]  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        out.append(model.scale.detach().clone())
    return out


def both(make: Callable[[], Casts], others: Any = KEEP, **options: Any) -> tuple[legroom.Report, Trace]:
    """Bits are those of plain steps."""
    expected = train(make(), nullcontext, **options)
    model = make()
    with legroom.fit(model, budget="1GiB", planner=drop_twins(others)) as room:
        found = train(model, room.step, **options)
        report, trace = room.report(), room.trace
    assert trace is not None and report.planned_steps >= 3
    assert len(expected) == len(found)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    return report, trace


@pytest.mark.parametrize("others", [Keep(), Swap(), Swap("sync"), Recompute()], ids=str)
def test_the_later_copy_joins_the_first(others: Any, joined: list[bool]) -> None:
    report, trace = both(Casts, others)
    assert len(twins_of(trace)) == 1
    assert joined and all(joined)
    assert not report.fallbacks, report.fallbacks


def test_nothing_runs_again_for_it(joined: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even in the steps in which its bytes are compared."""
    ran: list[str] = []
    play = replay.play

    def noted(actions: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(str(actions))
        return play(actions, *args, **kwargs)

    monkeypatch.setattr("legroom.runtime.again.play", noted)
    monkeypatch.setattr(replay, "play", noted)
    report, trace = both(Casts)
    assert all(joined) and not ran
    (twin,) = twins_of(trace)
    assert report.bytes_recomputed == trace.storages[twin].nbytes


def test_its_bytes_are_free() -> None:
    """Held against what autograd's own graph keeps: the storage is gone, though its handle is there."""
    model = Casts()
    gone: list[bool] = []
    seen: list[Any] = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            gone.append([ref.expired() for ref in seen[-2:]])  # type: ignore[arg-type]
            return grad

    from torch.multiprocessing.reductions import StorageWeakRef

    cast = Tensor.bfloat16

    def noted(tensor: Tensor) -> Tensor:
        out = cast(tensor)
        seen.append(StorageWeakRef(out.untyped_storage()))
        return out

    def forward(x: Tensor) -> Tensor:
        x = x * model.scale
        left = noted(x).sin()
        right = noted(x).cos()
        del x
        return Watch.apply((left * 2 + right.float()).square().mean())

    with legroom.fit(model, budget="1GiB", planner=drop_twins(Keep())) as room:
        for step in range(STEPS):
            with room.step():
                forward(data(step)).backward()
            model.scale.grad = None
        assert room.report().planned_steps >= 3
    assert gone[-1] == [False, True]


def test_written_in_between_they_are_two(joined: list[bool]) -> None:
    def write(x: Tensor, a: Tensor, step: int) -> None:
        with torch.no_grad():
            x.add_(1.0)

    model = Casts(write)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        model(data(0)).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert not twins_of(legroom.capture(step, model=model, optimizer=optimizer))


def test_written_in_between_in_some_steps_only(joined: list[bool]) -> None:
    def write(x: Tensor, a: Tensor, step: int) -> None:
        with torch.no_grad():
            (x if step in (4, 5) else torch.zeros(2)).add_(1.0)

    report, _ = both(lambda: Casts(write))
    assert False in joined, "nothing was declined"
    assert report.fallbacks


def test_written_unseen_in_between(joined: list[bool]) -> None:
    """By numpy, of which PyTorch does not know. Its bytes are compared now and then; here it is the only one to be."""

    def write(x: Tensor, a: Tensor, step: int) -> None:
        if step >= 4:
            x.detach().numpy()[:] += 1.0

    report, _ = both(lambda: Casts(write))
    assert report.fallbacks.get("a replay gave other bits and was not used")


def test_written_unseen_while_the_first_is_away(joined: list[bool]) -> None:
    """A replay may have read it before that is known, so the step is refused."""

    def write(x: Tensor, a: Tensor, step: int) -> None:
        if step == 4:
            x.detach().numpy()[:] += 1.0

    model = Casts(write)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with legroom.fit(model, budget="1GiB", planner=drop_twins(Swap("sync"))) as room:
        for step in range(8):
            model.step = step
            before = model.scale.detach().clone()
            with pytest.raises(StepError, match="other bits") if step == 4 else nullcontext(), room.step():
                model(data(step)).backward()
                optimizer.step()
            assert torch.equal(model.scale, before) == (step == 4)
            optimizer.zero_grad()
        assert room.report().planned_steps >= 4
    assert joined[-1] is False or len(joined) < 6, "the cast is trusted still"


def test_refused_once_it_is_refused_again() -> None:
    def write(x: Tensor, a: Tensor, step: int) -> None:
        if step == 4:
            x.detach().numpy()[:] += 1.0

    model = Casts(write)
    with legroom.fit(model, budget="1GiB", planner=drop_twins(Swap("sync"))) as room:
        for step in range(4):
            with room.step():
                model(data(step)).backward()
        model.step = 4
        with room.step():
            loss = model(data(4))
            for _ in range(3):
                with pytest.raises(StepError, match="other bits"):
                    loss.backward(retain_graph=True)


class Spoils(torch.autograd.Function):
    """Writes to what it has saved, which is nobody else's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * x.cos_()


@pytest.mark.parametrize("now_and_then", [False, True])
@pytest.mark.parametrize("others", [Keep(), Swap("sync"), Recompute()], ids=str)
def test_a_backward_that_writes_to_what_it_saved(others: Any, now_and_then: bool) -> None:
    class Spoiled(Casts):
        def forward(self, x: Tensor) -> Tensor:
            x = x * self.scale
            a = x.bfloat16()
            left = a.sin()
            del a
            b = x.bfloat16()
            # Of the same size, at the same place; and read first in backward.
            right = b.sin() if now_and_then and self.step < 4 else Spoils.apply(b)
            del b, x
            return (left * 2 + right.float()).square().mean()

    _, trace = both(Spoiled, others)
    assert bool(twins_of(trace)) == now_and_then


@pytest.mark.parametrize("few_hooks", [False, True])
def test_a_source_that_others_are_made_from(few_hooks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written when the copies have joined, and a replay reads it as it was."""
    monkeypatch.setattr(CpuDevice, "leaves_hooks_out", few_hooks)

    class Shared(Casts):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.full((WIDTH,), 1.0 + n / 8) for n in range(4))

        def forward(self, x: Tensor) -> Tensor:
            u, v, w, t = self.weights
            y = x * 2
            out = y * u
            del y
            a = x.bfloat16()
            left = a * w
            del a
            b = x.bfloat16()
            right = b * v
            del b
            out = out.sin() + left + right
            c = x * 3
            d = c * t
            del c
            out = (out + d).sin()
            (x.data if self.step >= 4 else torch.zeros(2)).add_(1.0)
            return (out * out.detach() * self.scale).square().mean()

    def planner(trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        muls = [op for op in trace.ops if op.name == "aten.mul.Tensor" and len(op.reads) == 1 and not op.why_not]
        again = twins_of(trace) | {op.writes[0][0] for op in muls}
        decisions = tuple(Recompute() if gap.storage in again else Keep() for gap in trace.gaps)
        return Plan(decisions, signature(trace), "twins", budget_bytes, 0, 0.0, ())

    expected = train(Shared(), nullcontext)
    model = Shared()
    with legroom.fit(model, budget="1GiB", planner=planner) as room:
        found = train(model, room.step)
        assert room.report().planned_steps >= 3
        assert room.plan is not None and sum(isinstance(d, Recompute) for d in room.plan.decisions) >= 3
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("which", ["a", "b"])
def test_what_the_program_holds_stays_apart(which: str, joined: list[bool]) -> None:
    def make() -> Casts:
        model = Casts()
        model.holds = which
        return model

    both(make)
    assert not any(joined)

    def spoil(model: Casts) -> None:
        model.held[0].add_(1)

    model = make()
    with legroom.fit(model, budget="1GiB", planner=drop_twins(Keep())) as room:
        train(model, room.step)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            train(model, room.step, after=spoil)


@pytest.mark.parametrize("others", [Keep(), Swap(), Recompute()], ids=str)
def test_backward_twice_late_and_not_at_all(others: Any, joined: list[bool]) -> None:
    def run(around: Callable[[], Any]) -> list[Tensor]:
        model = Casts()
        out: list[Tensor] = []
        for step in range(12):
            model.scale.grad = None
            try:
                with around():
                    loss = model(data(step))
                    if step == 7:
                        loss.backward(retain_graph=True)
                    if step == 8:
                        raise KeyError("half-way")
                    if step not in (9, 10):
                        loss.backward()
            except KeyError:
                pass
            if step in (9,):
                loss.backward()
            out += [loss.detach().clone(), torch.zeros(1) if model.scale.grad is None else model.scale.grad.clone()]
            del loss
        return out

    expected = run(nullcontext)
    with legroom.fit(Casts(), budget="1GiB", planner=drop_twins(others)) as room:
        found = run(room.step)
        ledger = room._setting.ledger
        assert not ledger.by_key and not ledger.entries and not ledger.pinned
    assert any(joined)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


# --- what shows that two are the same ---------------------------------------------------------------------------------


def made(lineage: Lineage, x: Tensor, func: Any = torch.ops.aten._to_copy.default, **kwargs: Any) -> tuple[Any, Tensor]:
    op = Made(1, func, (x,), kwargs, lineage.node_of)
    result = func(x, **kwargs)
    lineage.made(op, result)
    return lineage.nodes[result.untyped_storage()._cdata], result


def test_same_op_same_arguments_same_value() -> None:
    lineage = Lineage(Ledger(CpuDevice()))
    x = torch.randn(8, 8)
    first, _a = made(lineage, x, dtype=torch.bfloat16)
    second, _b = made(lineage, x, dtype=torch.bfloat16)
    assert same_value(second, first)
    other: dict[str, Tensor] = {}
    nodes = {}
    for name, given, func, kwargs in (
        ("another type", x, None, {"dtype": torch.float16}),
        ("another tensor", x.clone(), None, {"dtype": torch.bfloat16}),
        ("another part", x[1:], None, {"dtype": torch.bfloat16}),
        ("transposed", x.t(), None, {"dtype": torch.bfloat16}),
        ("another op", x, torch.ops.aten.sin.default, {}),
    ):
        nodes[name], other[name] = made(lineage, given, *([func] if func is not None else []), **kwargs)
    assert [name for name, node in nodes.items() if same_value(node, first)] == []
    x.add_(1)
    later, _c = made(lineage, x, dtype=torch.bfloat16)
    assert not same_value(later, first)
    x = torch.rand(8, 8)
    noise, _d = made(lineage, x, torch.ops.aten.bernoulli.default)
    again, _e = made(lineage, x, torch.ops.aten.bernoulli.default)
    assert not same_value(again, noise)
    sine, _f = made(lineage, x, torch.ops.aten.sin.default)
    cosine, _g = made(lineage, x, torch.ops.aten.cos.default)
    assert not same_value(cosine, sine)


def test_a_trace_at_another_size_has_the_same_twins() -> None:
    case = ZOO["autocast_branches"]()
    model, optimizer = case.build()
    trace = legroom.capture(lambda: case.step(model, optimizer, case.batch(0)), model=model, optimizer=optimizer)
    twins = twins_of(trace)
    assert len(twins) == 3 * 3 + 2  # k, v and up in each of three rounds; the second of a pair, twice
    for op in trace.ops:
        if op.twin:
            assert op.again_seconds == 0.0
            assert trace.storages[op.reads[0][0]].nbytes == trace.storages[op.writes[0][0]].nbytes
    numbers = numbers_of(trace)
    larger = with_numbers(trace, replace(numbers, seconds=numbers.seconds * 2))
    assert twins_of(larger) == twins and all(op.again_seconds == 0.0 for op in larger.ops if op.twin)
    assert structure_of(larger) == structure_of(trace)


@pytest.mark.parametrize("few_hooks", [False, True])
def test_inputs_of_other_sizes(few_hooks: bool, joined: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told from other sizes is compared at each new one, when the first copy is back if it is away."""
    monkeypatch.setattr(CpuDevice, "leaves_hooks_out", few_hooks)
    rows = [4096, 2048, 3072, 3584, 2560, 2304, 3328, 2816, *[4096, 3072, 2560, 2048] * 2, 3840, 2200, 3900, 3840, 2200]
    case = ZOO["autocast_branches"]()

    def batch(number: int, count: int) -> Any:
        x, y = case.batch(number)
        return x[:count].clone(), y[:count]

    def run(model: nn.Module, optimizer: Any, around: Callable[[], Any], after: Callable[[], None]) -> list[Tensor]:
        torch.manual_seed(2)
        out = []
        for number, count in enumerate(rows):
            with around():
                out.append(case.step(model, optimizer, batch(number, count)))
            after()
        return [*out, *(p.detach().clone() for p in model.parameters())]

    expected = run(*case.build(), nullcontext, lambda: None)
    model, optimizer = case.build()
    trace = legroom.capture(lambda: case.step(model, optimizer, batch(0, 4096)), model=model, optimizer=optimizer)
    floor = legroom.floor_bytes(trace)
    model, optimizer = case.build()
    budget = floor + (trace.peak_bytes - floor) // 4
    with legroom.fit(model, optimizer, budget=budget, planner=drop_twins(Swap())) as room:

        def settle() -> None:
            if room._following is not None:
                room._following.settle()

        found = run(model, optimizer, room.step, settle)
        report = room.report()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert report.planned_steps >= 10 and report.peak_bytes <= report.budget_bytes
    assert len(joined) > 20 and all(joined)
    assert not report.fallbacks, report.fallbacks
