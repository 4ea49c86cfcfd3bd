"""Steps on CUDA when everything goes wrong that can: slow copies, tiny pools, churn, many steps, no memory left."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import legroom
from legroom.runtime.cuda import CudaDevice
from legroom.runtime.hashing import prepare_digests
from tests.runtime.test_random_plans import random_planner

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

MIB = 2**20


class Net(nn.Module):
    """Dropout, norms, attention, an in-place op and a residual stream, with activations of a few MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(256) for _ in range(4))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(4))
        self.head = nn.Linear(256, 1000)

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
            x = F.relu_(x * 1.5)
        return self.head(x)


class Recurrent(nn.Module):
    """cuDNN's LSTM: what it reserves for backward is saved as a row of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(256, 256, batch_first=True) for _ in range(3))
        self.head = nn.Linear(256, 1000)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(layer(x)[0], 0.1)
        return self.head(x)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 128, 256, generator=generator)
    return x.cuda(), torch.randint(1000, (8, 128), generator=generator).cuda()


def train(
    steps: int, fit: Callable[[nn.Module, torch.optim.Optimizer], legroom.Room] | None, *, churn: bool = False
) -> tuple[list[Tensor], legroom.Report | None]:
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    room = fit(model, optimizer) if fit is not None else None
    junk: list[Tensor] = []
    losses = []
    for step in range(steps):
        x, y = batch(step)

        def work(x: Tensor = x, y: Tensor = y) -> Tensor:
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        if room is None:
            losses.append(work())
        else:
            with room.step():
                losses.append(work())
        if churn:
            junk = [torch.empty((step * 7919 + i) % 97 * 65536 + 1, device="cuda") for i in range(step % 5)]
    report = room.report() if room is not None else None
    if room is not None:
        room.close()
    del junk
    torch.cuda.synchronize()
    return [torch.stack(losses).cpu(), *(p.detach().cpu() for p in model.parameters())], report


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    prepare_digests(torch.device("cuda", torch.cuda.current_device()))  # stays: no leak, and in no step's peak
    gc.collect()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def plain() -> dict[int, list[Tensor]]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    return {steps: train(steps, None)[0] for steps in (12, 200)}


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def fitted(seed: int, **options: Any) -> Callable[[nn.Module, torch.optim.Optimizer], legroom.Room]:
    planner = random_planner((1, 3, 2, 2), seed)
    return lambda model, optimizer: legroom.fit(model, optimizer, budget="4GiB", planner=planner, **options)


@pytest.mark.parametrize("seed", range(3))
def test_slow_copies_are_waited_for(plain: dict[int, list[Tensor]], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy starts 0.3 ms late on its stream: whoever does not wait for it reads or frees too early."""
    real = CudaDevice._copy

    def slow(self: CudaDevice, stream: torch.cuda.Stream, *rest: Any) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(500_000)
        real(self, stream, *rest)

    monkeypatch.setattr(CudaDevice, "_copy", slow)
    taken, report = train(12, fitted(seed))
    assert report is not None and report.planned_steps >= 8, report
    assert report.bytes_swapped > 0
    assert same(taken, plain[12])


@pytest.mark.parametrize("host_budget", ["16MiB", "48MiB"])
def test_tiny_pools_spill_to_the_file(plain: dict[int, list[Tensor]], host_budget: str) -> None:
    taken, report = train(12, fitted(4, host_budget=host_budget))
    assert report is not None and report.planned_steps >= 8
    assert same(taken, plain[12])


def test_churn_beside_the_steps(plain: dict[int, list[Tensor]]) -> None:
    taken, report = train(12, fitted(5), churn=True)
    assert report is not None and report.bytes_recomputed + report.bytes_swapped > 0
    assert same(taken, plain[12])


def test_many_steps_stay_the_same_and_leak_nothing(plain: dict[int, list[Tensor]]) -> None:
    before = torch.cuda.memory_allocated()
    for seed in (6, 7):
        taken, report = train(200, fitted(seed))
        assert report is not None and report.planned_steps >= 190
        assert same(taken, plain[200])
        del taken
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + MIB


def test_memory_and_pool_are_flat_over_a_thousand_steps() -> None:
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    x, y = batch(0)
    with legroom.fit(model, optimizer, budget="4GiB", planner=random_planner((1, 3, 2, 2), 8)) as room:
        seen = []
        for step in range(1000):
            with room.step():
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if step in (50, 999):
                torch.cuda.synchronize()
                pool = room._device.pool  # type: ignore[attr-defined]
                pool.settle()
                seen.append((torch.cuda.memory_allocated(), pool.total_bytes, pool.allocated_in_step))
        assert seen[0] == seen[1]
        assert room.report().planned_steps >= 990, room.report().fallbacks


def test_a_budget_that_is_too_small_is_refused_and_changes_nothing() -> None:
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = [p.detach().clone() for p in model.parameters()]
    parameters = sum(p.nbytes for p in model.parameters())
    x = torch.randn(256, 512, 256, device="cuda")
    with legroom.fit(model, optimizer, budget=torch.cuda.memory_allocated() + 2 * parameters + 256 * MIB) as room:
        with pytest.raises(legroom.BudgetError, match="budget"):  # noqa: PT012, SIM117
            with room.step():
                F.relu(model(x)).sum().backward()
                optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(state, model.parameters(), strict=True))
        assert not optimizer.state
        optimizer.zero_grad()
        del x
        gc.collect()
        small = torch.randn(2, 16, 256, device="cuda")
        with room.step():
            F.relu(model(small)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def halfway_bytes() -> int:
    """A budget between the floor and the plain peak."""
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = batch(0)

    def step() -> None:
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = legroom.capture(step, model=model, optimizer=optimizer)
    return (legroom.floor_bytes(trace) + trace.peak_bytes) // 2 + 96 * MIB  # pages of 20 MiB weigh here


def test_a_real_budget_holds(plain: dict[int, list[Tensor]]) -> None:
    """auto, under a cap between floor and plain peak: the same bits, and the allocator never holds more."""
    torch.cuda.empty_cache()
    budget = halfway_bytes()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    taken, report = train(12, lambda model, optimizer: legroom.fit(model, optimizer, budget=budget))
    assert same(taken, plain[12])
    assert report is not None and report.planned_steps >= 6, report
    assert torch.cuda.max_memory_reserved() <= budget


@pytest.mark.parametrize("make", [Net, Recurrent])
def test_the_recorded_peak_is_that_of_a_plain_step(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = batch(0)

    def step() -> None:
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    step()
    plain = torch.cuda.max_memory_allocated()
    assert legroom.capture(step, model=model, optimizer=optimizer).peak_bytes == plain


def test_predicted_seconds_follow_what_steps_take() -> None:
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x, y = (torch.cat([part] * 16) for part in batch(0))
    with legroom.fit(model, optimizer, budget="8GiB") as room:
        for count in (40, 20):
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(count):
                with room.step():
                    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            end.record()
        torch.cuda.synchronize()
        assert room.report().predicted_step_seconds == pytest.approx(start.elapsed_time(end) / 20 * 1e-3, rel=0.1)
