"""Normalisations that replays make from their statistics, in one pass with what follows: the wiring, on the CPU.

The kernels are Triton's and run in `tests/gpu`. Here the op itself stands in for them, and says whether it was handed
the statistics that belong to its source.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import legroom
from legroom.hardware import Hardware
from legroom.ir import Op, Storage, Tick, Trace
from legroom.plan import Keep, Plan, Recompute, Swap, signature
from legroom.replayprice import with_short_replays
from legroom.runtime import fused, replay
from legroom.runtime.calls import Gate
from legroom.runtime.device import CpuDevice
from legroom.runtime.executor import Executor
from legroom.runtime.program import Program
from legroom.schedule import Await, Drop, Release, Replay, Schedule, SwapOut
from tests.harness import assert_same, run_plain, run_room
from tests.runtime.test_random_plans import BUDGET_BYTES, MIXTURES, admit, random_planner
from tests.zoo import Case, built, sgd

EPS = 1e-5


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Runs on the CPU; counts what was written, by dtype and kind."""
    counts: Counter[str] = Counter()

    def launch(value: fused.Normalised, out: torch.Tensor, relu: bool) -> None:
        weight, bias = value.weight, value.bias
        if value.by_column:
            blank = torch.zeros_like(weight), torch.ones_like(weight)
            made = torch.ops.aten.native_batch_norm.default(value.source, weight, bias, *blank, True, 0.1, EPS)
        else:
            shape = list(weight.shape)
            made = torch.ops.aten.native_layer_norm.default(value.source, shape, weight, bias, EPS)
        # A proof's are of this very op; those of a replay have been carried along.
        assert torch.equal(made[1].flatten(), value.mean.flatten()), "the mean of something else"
        assert torch.equal(made[2].flatten(), value.scale.flatten()), "the deviation of something else"
        result = made[0].relu() if relu else made[0]
        if value.by_column:
            result = result.permute(0, 2, 3, 1)
            lying = out.permute(0, 2, 3, 1) if out.dim() == 4 else out
            lying.copy_(result.reshape(-1, value.columns)[: out.numel() // value.columns].view(lying.shape))
        else:
            out.copy_(result.reshape(-1)[: out.numel()].view(out.shape))
        if out.shape == value.source.shape:
            counts[f"{str(out.dtype)[6:]}{' relu' if relu else ''}"] += 1

    monkeypatch.setattr(fused, "_runs_on", lambda device: True)
    monkeypatch.setattr(fused, "_launch", launch)
    return counts


class Layers(nn.Module):
    """Before and after a block, a result that goes into several casts, one that is read as it is as well."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                y = self.first(x)
                x = x + torch.tanh(self.q(y) * self.k(y)) + self.v(y)
                y = self.second(x)
                x = y + self.down(F.gelu(self.up(y)))
        return self.last(x.float()).square().mean()


class Images(nn.Module):
    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(x))
            if place == 1:
                y += x  # the normalisation's result is written before anything else is made of it
            x = F.relu(y, inplace=place != 2)
        return x.square().mean()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    loss = model(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _layers(rows: int) -> Case:
    def batch(step: int) -> torch.Tensor:
        return torch.randn(rows, 64, 8, generator=torch.Generator().manual_seed(step))

    return Case("layers", built(Layers, sgd), batch, _step)


def _images() -> Case:
    def batch(step: int) -> torch.Tensor:
        images = torch.randn(8, 16, 12, 12, generator=torch.Generator().manual_seed(step))
        return images.to(memory_format=torch.channels_last)

    return Case("images", built(lambda: Images().to(memory_format=torch.channels_last), sgd), batch, _step)


# The statistics of more rows are large enough to be kept track of by themselves.
CASES = {"few rows": partial(_layers, 16), "many rows": partial(_layers, 64), "images": _images}
EXPECTED = {
    "few rows": ("bfloat16", "float32"),
    "many rows": ("bfloat16", "float32"),
    "images": ("float32", "float32 relu"),
}


def _keeping(planner: Any, nbytes: int) -> Any:
    """The same plan, but storages of that size stay."""

    def keeps(trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        plan = planner(trace, hardware, budget_bytes)
        stays = [trace.storages[gap.storage].nbytes == nbytes for gap in trace.gaps]
        decisions = tuple(Keep() if stay else d for d, stay in zip(plan.decisions, stays, strict=True))
        return replace(plan, decisions=decisions)

    return keeps


@pytest.mark.parametrize("few_hooks", [False, True], ids=["all hooks", "few hooks"])
@pytest.mark.parametrize("mixture", ["recompute-all", "share-all", "even", "mostly-recompute"])
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_plain_steps(
    name: str, mixture: str, few_hooks: bool, written: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "leaves_hooks_out", few_hooks)
    planner = random_planner(MIXTURES[mixture], seed=1)
    if name == "many rows":  # a GPU's are too small to be moved
        planner = _keeping(planner, 64 * 64 * 4)
    fit = partial(legroom.fit, budget=BUDGET_BYTES, planner=planner)
    proofs: list[Counter[str]] = []

    def fit_and_note(*args: Any) -> Any:
        room = fit(*args)
        plan_for = room._standing.plan_for

        def planned(trace: Any, base_bytes: int) -> None:
            proofs.append(Counter(written))
            plan_for(trace, base_bytes)

        monkeypatch.setattr(room._standing, "plan_for", planned)
        return room

    taken, report, _ = run_room(CASES[name](), fit_and_note, planned_steps=6)

    assert_same(run_plain(CASES[name](), len(taken)), taken)
    assert not report.distrusted and not any("other bits" in why for why in report.fallbacks), report.fallbacks
    replayed = written - proofs[-1]
    if mixture in ("recompute-all", "share-all"):
        assert all(replayed[kind] > 0 for kind in EXPECTED[name]), replayed


def test_a_replay_reads_the_statistics_of_its_own_step(written: Counter[str]) -> None:
    """Every step has other data: a replay with statistics of another one fails in the stand-in above."""
    planner = random_planner(MIXTURES["recompute-all"], seed=0)
    value = fused.normalised(
        torch.ops.aten.native_layer_norm.default,
        (torch.randn(4, 32), [32], torch.ones(32), torch.zeros(32), EPS),
        torch.zeros(4, 1),
        torch.ones(4, 1),
    )
    assert value is not None
    with pytest.raises(AssertionError, match="of something else"):
        value.into(torch.float32)
    run_room(_layers(16), partial(legroom.fit, budget=BUDGET_BYTES, planner=planner), planned_steps=6)
    assert written


@pytest.mark.parametrize("wrong", ["value", "cast"])
def test_another_result_in_the_proof_is_not_used(
    wrong: str, written: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = fused._launch

    def off(value: fused.Normalised, out: torch.Tensor, relu: bool) -> None:
        launch(value, out, relu)
        if wrong == "value" or out.dtype is torch.bfloat16:
            out.view(-1)[-1] += 1

    monkeypatch.setattr(fused, "_launch", off)
    planner = random_planner(MIXTURES["recompute-all"], seed=0)
    rooms: list[Any] = []

    def fit(*args: Any) -> Any:
        rooms.append(legroom.fit(*args, budget=BUDGET_BYTES, planner=planner))
        return rooms[-1]

    taken, report, _ = run_room(_layers(16), fit, planned_steps=3)

    assert_same(run_plain(_layers(16), len(taken)), taken)
    assert not any("other bits" in why for why in report.fallbacks)
    assert all(op.replay_seconds is None for op in rooms[0].trace.ops if not op.twin)


ODD = {
    "not contiguous": lambda x, w, b: (x.t().contiguous().t(), [32], w, b),
    "no weight": lambda x, w, b: (x, [32], None, b),
    "another dtype": lambda x, w, b: (x.double(), [32], w.double(), b.double()),
    "empty": lambda x, w, b: (x[:0], [32], w, b),
    "a weight that is a view": lambda x, w, b: (x, [32], w.repeat_interleave(2)[::2], b),
}


@pytest.mark.parametrize("odd", ODD)
def test_what_is_not_known_is_left_to_the_op(odd: str, written: Counter[str]) -> None:
    args = (*ODD[odd](torch.randn(8, 32), torch.randn(32), torch.randn(32)), EPS)
    result = torch.ops.aten.native_layer_norm.default(*args)

    assert fused.normalised(torch.ops.aten.native_layer_norm.default, args, result[1], result[2]) is None
    assert not fused.proven(torch.ops.aten.native_layer_norm.default, args, result)


def test_nothing_is_done_without_kernels() -> None:
    args = torch.randn(8, 32), [32], torch.randn(32), torch.randn(32), EPS
    result = torch.ops.aten.native_layer_norm.default(*args)
    assert not fused.proven(torch.ops.aten.native_layer_norm.default, args, result)


# Programs that meddle with what a replay in one pass is made from.

WIDTH = 64


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def headed(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(torch.tanh(self.embed(features))))).square().mean()


class SourceWritten(Trunk):
    """A residual stream in place: the norm's source is written, in the replay, before the norm is written out."""

    def __init__(self, *, grad: bool) -> None:
        super().__init__()
        self.grad = grad

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.grad):
            h = x * 1.5
            y = self.norm(h)
            h.mul_(2)
            features = (torch.sin(y) + h).detach()
        return self.headed(features)


class StatisticsWritten(SourceWritten):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.grad):
            y, mean, _ = torch.native_layer_norm(x * 1.5, [WIDTH], self.norm.weight, self.norm.bias, EPS)
            mean.mul_(2)
            features = torch.sin(y).detach()
        return self.headed(features)


class NormOfNorm(nn.Module):
    """The second is not proven; that it reads the first, which is, does not make it so."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        self.first, self.second = nn.LayerNorm(32), nn.LayerNorm((2, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(self.a(x.view(-1, 2, 32)))
        z = torch.sin(self.second(y)) + torch.sin(y.bfloat16()).float()
        return self.b(torch.tanh(self.a(z))).square().mean()


class CastOfBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
        self.norm = nn.BatchNorm2d(16)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = x.view(-1, 16, 8, 8).to(memory_format=torch.channels_last)
        y = torch.sin(self.norm(self.first(images)).bfloat16()).float()
        return self.second(torch.tanh(y)).square().mean()


MEDDLING: dict[str, Any] = {
    "a source that is written, frozen": lambda: SourceWritten(grad=False),
    "a source that is written, detached": lambda: SourceWritten(grad=True),
    "statistics that are written, frozen": lambda: StatisticsWritten(grad=False),
    "statistics that are written, detached": lambda: StatisticsWritten(grad=True),
    "a norm of a norm": NormOfNorm,
    "a cast of a batch norm": CastOfBatchNorm,
}


@pytest.mark.parametrize("few_hooks", [False, True], ids=["all hooks", "few hooks"])
@pytest.mark.parametrize("name", MEDDLING)
def test_whatever_the_program_does_the_bits_stay(
    name: str, few_hooks: bool, written: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "leaves_hooks_out", few_hooks)
    launch = fused._launch

    def off(value: fused.Normalised, out: torch.Tensor, relu: bool) -> None:
        """Wrong where it cannot be proven."""
        launch(value, out, relu)
        if (name == "a norm of a norm" and value.columns == 64) or (value.by_column and out.dtype is torch.bfloat16):
            out.view(-1)[-1] += 1

    monkeypatch.setattr(fused, "_launch", off)

    def batch(step: int) -> torch.Tensor:
        return torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(step))

    case = Case(name, built(MEDDLING[name], sgd), batch, _step)
    planner = random_planner(MIXTURES["recompute-all"], seed=0)
    taken, report, _ = run_room(case, partial(legroom.fit, budget=BUDGET_BYTES, planner=planner), planned_steps=5)

    assert_same(run_plain(case, len(taken)), taken)
    assert not any("other bits" in why for why in report.fallbacks), report.fallbacks


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_kernels_that_cannot_be_launched(
    error: type[Exception], written: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Counter[str]()

    def fails(*_: Any) -> None:
        calls["launch"] += 1
        raise error("Failed to find C compiler")

    monkeypatch.setattr(fused, "_launch", fails)
    monkeypatch.setattr(fused, "_broken", False)
    monkeypatch.setattr(fused, "_runs_on", lambda device: not fused._broken)
    planner = random_planner(MIXTURES["recompute-all"], seed=0)

    taken, _, _ = run_room(_layers(16), partial(legroom.fit, budget=BUDGET_BYTES, planner=planner))

    assert_same(run_plain(_layers(16), len(taken)), taken)
    assert fused._broken is not issubclass(error, torch.OutOfMemoryError)
    assert (calls["launch"] == 1) is fused._broken


def test_statistics_that_the_plan_moves_are_not_held(written: Counter[str]) -> None:
    """What goes must be free to go: their norms are made again as a whole."""
    rows = 64 * 64

    def planner(trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        drawn = [Swap("sync") if trace.storages[gap.storage].nbytes == rows * 4 else Recompute() for gap in trace.gaps]
        plan = Plan(tuple(Swap("sync") for _ in drawn), signature(trace), "moves", budget_bytes, 0, 0.0, ())
        return admit(trace, plan, hardware, {i: d for i, d in enumerate(drawn) if isinstance(d, Recompute)})

    rooms: list[Any] = []

    def fit(*args: Any) -> Any:
        rooms.append(legroom.fit(*args, budget=BUDGET_BYTES, planner=planner))
        return rooms[-1]

    taken, report, _ = run_room(_layers(64), fit, planned_steps=4)

    assert_same(run_plain(_layers(64), len(taken)), taken)
    swapped = {
        gap.storage for gap, d in zip(rooms[0].trace.gaps, rooms[0].plan.decisions, strict=True) if d == Swap("sync")
    }
    assert any(rooms[0].trace.storages[storage].nbytes == rows * 4 for storage in swapped)
    assert not rooms[0]._standing.program.statistics
    assert "released later than planned" not in report.fallbacks


@pytest.mark.parametrize("mixture", ["recompute-all", "mostly-recompute"])
@pytest.mark.parametrize("few_hooks", [False, True])
def test_every_step_has_a_use_for_the_same_statistics(
    written: Counter[str], monkeypatch: pytest.MonkeyPatch, few_hooks: bool, mixture: str
) -> None:
    """One that is measured too, and where something else is to be done when they are saved."""
    monkeypatch.setattr(CpuDevice, "leaves_hooks_out", few_hooks)
    short: Counter[int] = Counter()  # by step
    known: dict[int, bool] = {}  # whether its calls were
    measured: set[int] = set()
    normalised, finish = replay.normalised, Executor.finish

    def counted(*args: Any) -> fused.Normalised | None:
        found = normalised(*args)
        short[len(known)] += found is not None
        return found

    def finished(self: Executor) -> None:
        finish(self)
        if self.measured:
            measured.add(len(known))
        known[len(known)] = isinstance(self._calls, Gate)

    monkeypatch.setattr(replay, "normalised", counted)
    monkeypatch.setattr(Executor, "finish", finished)
    planner = random_planner(MIXTURES[mixture], seed=3)
    run_room(CASES["images"](), partial(legroom.fit, budget=BUDGET_BYTES, planner=planner), planned_steps=8)
    assert any(known[step] for step in measured) and not all(known.values())
    assert len({short[step] for step in known}) == 1 and short[0] > 0, (short, known, measured)


@pytest.mark.parametrize("few_hooks", [False, True])
def test_plans_that_follow_the_input_have_a_use_for_statistics(
    written: Counter[str], monkeypatch: pytest.MonkeyPatch, few_hooks: bool
) -> None:
    monkeypatch.setattr(CpuDevice, "leaves_hooks_out", few_hooks)
    sizes = [28, *(random.Random(5).choices(range(12, 28), k=30))]

    def batch(number: int) -> torch.Tensor:
        chance = torch.Generator().manual_seed(number)
        images = torch.randn(8, 16, sizes[number], sizes[number], generator=chance)
        return images.to(memory_format=torch.channels_last)

    def training() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Images().to(memory_format=torch.channels_last)
        return model, sgd(model.parameters())

    plain = training()
    losses = [_step(*plain, batch(number)) for number in range(len(sizes))]
    trace = legroom.capture(partial(_step, *plain, batch(0)), model=plain[0], optimizer=plain[1])
    budget = (legroom.floor_bytes(trace) + trace.peak_bytes) // 2
    model, optimizer = training()
    made: Counter[bool] = Counter()  # by whether the step followed a plan with statistics
    planner = random_planner(MIXTURES["recompute-all"], seed=1)
    with legroom.fit(model, optimizer, budget=budget, planner=planner) as room:
        for number, loss in enumerate(losses):
            if room._following is not None:
                room._following.settle()  # the first plans go by how long ops take
            before = written.total()
            with room.step():
                assert torch.equal(_step(model, optimizer, batch(number)), loss), number
            followed = room.report().followed
            if followed is not None and followed.steps and followed.steps[-1].course == "planned":
                assert room._following is not None and room._following.rung is not None
                made[bool(room._following.rung.program.statistics)] += written.total() - before
    assert made[True] > 0 and not made[False], (made, room.report().followed)
    assert not room.report().distrusted


def test_the_short_way_is_another_recipe() -> None:
    """At a size that was never recorded, a replay of one kind proves nothing about the other."""
    norm, cast = "aten.native_layer_norm.default", "aten._to_copy.default"
    storages = tuple(Storage(i, 2**18, "activation", False, False, (), 0, "") for i in range(5))
    ops = (
        Op(0, norm, "forward", 1e-3, 1e-5, ((0, 0),), ((1, 0), (2, 0), (3, 0)), 0, "", "", ""),
        Op(1, cast, "forward", 1e-3, 1e-5, ((1, 0),), ((4, 0),), 0, "", "", ""),
    )
    ticks = tuple(Tick("pack", s, 1, 0, 0) for s in (0, 2, 3, 4)) + tuple(
        Tick("unpack", s, 1, 0, 0) for s in (4, 3, 2, 0)
    )
    trace = with_short_replays(Trace(storages, ops, ticks, 0, "cpu"), [True, False])
    kept = Schedule((Drop(3, 4), Replay(4, 4, (0, 1))), "")
    moved = Schedule((SwapOut(3, 2), Drop(3, 4), Release(3, 2), Replay(4, 4, (0, 1)), Await(6, 2)), "")
    short, whole = (Program(trace, schedule, reserve_bytes=0) for schedule in (kept, moved))
    assert short.statistics and not whole.statistics
    assert short.recipes != whole.recipes
    assert short.recipes[4][0][:2] == whole.recipes[4][0][:2]
