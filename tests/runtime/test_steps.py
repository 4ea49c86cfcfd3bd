"""What a step may look like, and what a room says about it."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import legroom
import legroom.room
from legroom.hardware import PRESETS
from legroom.plan import Recompute, Swap, from_json, to_json
from tests.harness import digest

ROWS, WIDTH, LAYERS = 256, 128, 5

pytestmark = pytest.mark.usefixtures("one_thread")

Train = Callable[[nn.Module, torch.optim.Optimizer, int], float]


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(number: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(100 + number)
    return torch.randn(ROWS, WIDTH, generator=g), torch.randint(8, (ROWS,), generator=g)


def usual(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    x, y = batch(number)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """Three backward passes, one update."""
    total = 0.0
    for part in range(3):
        x, y = batch(3 * number + part)
        loss = F.cross_entropy(model(x), y) / 3
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def accumulate_across(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """A step is one backward pass; every third one updates. No two steps of a round are alike."""
    x, y = batch(number)
    loss = F.cross_entropy(model(x), y) / 3
    loss.backward()
    if number % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def retain(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """The graph is walked three times, the last time for the gradient of one input alone."""
    x, y = batch(number)
    x.requires_grad_()
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    (g,) = torch.autograd.grad(loss, x)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item() + g.sum().item()


def twice(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """Gradients of gradients."""
    x, y = batch(number)
    x.requires_grad_()
    loss = F.cross_entropy(model(x), y)
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + g.square().sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def with_evaluation(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """A forward pass without gradients in the middle of the step."""
    x, y = batch(number)
    loss = F.cross_entropy(model(x), y)
    with torch.no_grad():
        aside = model(x).mean().item()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item() + aside


def closure(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """Forward and backward are called by the optimizer."""
    x, y = batch(number)

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    loss = optimizer.step(evaluate)
    optimizer.zero_grad()
    return loss.item()


@cache
def limits(train: Train, steps: int = 1) -> tuple[int, int]:
    floor = peak = 0
    model, optimizer = build()
    for number in range(steps):
        trace = legroom.capture(partial(train, model, optimizer, number), model=model, optimizer=optimizer)
        floor, peak = max(floor, legroom.floor_bytes(trace)), max(peak, trace.peak_bytes)
    return floor, peak


@pytest.fixture(autouse=True, scope="module")
def _load_code() -> None:
    """Before any test has a model of its own alive."""
    gc.collect()
    limits(usual)


@pytest.fixture(autouse=True)
def _nothing_left_over() -> None:
    gc.collect()


def run(
    train: Train, around: Callable[[], Any], model: nn.Module, optimizer: torch.optim.Optimizer, count: int
) -> list[Any]:
    seen: list[Any] = []
    for number in range(count):
        with around():
            seen.append(train(model, optimizer, number))
        seen.append([digest(p).sha256 for p in model.parameters()])
    return seen


@pytest.mark.parametrize("share", [0.2, 0.6])
@pytest.mark.parametrize("train", [usual, accumulate, retain, twice, with_evaluation, closure])
def test_steps_of_many_kinds(train: Train, share: float) -> None:
    floor, peak = limits(train)
    model, optimizer = build()
    expected = run(train, nullcontext, model, optimizer, 5)
    model, optimizer = build()
    with legroom.fit(model, optimizer, budget=floor + int(share * (peak - floor))) as room:
        assert run(train, room.step, model, optimizer, 5) == expected
        report = room.report()
        assert report.planned_steps >= 2, report.fallbacks
        assert report.peak_bytes <= report.budget_bytes
        assert room._setting.ledger.entries == 0


def test_an_update_every_third_step() -> None:
    """Steps that differ in turn: correct, inside the budget, and the report says how it went."""
    model, optimizer = build()
    expected = run(accumulate_across, nullcontext, model, optimizer, 12)
    floor, peak = limits(accumulate_across, 3)
    model, optimizer = build()
    with legroom.fit(model, optimizer, budget=floor + (peak - floor) // 2) as room:
        assert run(accumulate_across, room.step, model, optimizer, 12) == expected
        assert room.report().steps == 12
        assert room.report().peak_bytes <= room.report().budget_bytes


def test_two_rooms_one_after_the_other() -> None:
    """The second finds everything as plain PyTorch would: same model, another budget."""
    model, optimizer = build()
    expected = run(usual, nullcontext, model, optimizer, 8)
    floor, peak = limits(usual)
    model, optimizer = build()
    with legroom.fit(model, optimizer, budget=floor + (peak - floor) // 4) as room:
        first = run(usual, room.step, model, optimizer, 4)
    plain = usual(model, optimizer, 4)
    with legroom.fit(model, optimizer, budget=floor + (peak - floor) // 2) as room:
        second = []
        for number in range(5, 8):
            with room.step():
                second.append(usual(model, optimizer, number))
            second.append([digest(p).sha256 for p in model.parameters()])
        assert room.report().planned_steps >= 1
    assert first == expected[:8]
    assert plain == expected[8]
    assert second == expected[10:]


def test_a_program_without_model_and_optimizer() -> None:
    """Gradient descent by hand on tensors that nobody named."""

    def fit_line(around: Callable[[], Any], count: int) -> list[str]:
        g = torch.Generator().manual_seed(0)
        x, y = torch.randn(512, 64, generator=g), torch.randn(512, 64, generator=g)
        w = [(torch.randn(64, 64, generator=g) / 8).requires_grad_() for _ in range(6)]
        seen = []
        for _ in range(count):
            with around():
                h = x
                for weight in w:
                    h = torch.tanh(h @ weight)
                loss = (h - y).square().mean()
                gradients = torch.autograd.grad(loss, w)
                with torch.no_grad():
                    for weight, gradient in zip(w, gradients, strict=True):
                        weight -= 0.1 * gradient
                del h, gradients, weight, gradient
            seen += [digest(loss.detach()).sha256, *(digest(weight).sha256 for weight in w)]
            del loss
        return seen

    expected = fit_line(nullcontext, 6)
    gc.collect()
    with legroom.fit(budget="64MiB") as probe:
        fit_line(probe.step, 3)
        assert probe.trace is not None
        floor, peak = legroom.floor_bytes(probe.trace), probe.trace.peak_bytes
    gc.collect()
    with legroom.fit(budget=floor + (peak - floor) // 4) as room:
        assert fit_line(room.step, 6) == expected
        report = room.report()
        assert report.planned_steps >= 3, report.fallbacks
        assert report.bytes_swapped + report.bytes_recomputed > 0
        assert report.peak_bytes <= report.budget_bytes


def test_an_optimizer_without_a_model() -> None:
    floor, peak = limits(usual)
    model, optimizer = build()
    expected = run(usual, nullcontext, model, optimizer, 4)
    model, optimizer = build()
    with legroom.fit(optimizer=optimizer, budget=floor + (peak - floor) // 2) as room:
        assert run(usual, room.step, model, optimizer, 4) == expected
        assert room.report().planned_steps >= 2


def test_nothing_is_left_in_pytorch() -> None:
    from torch.nn.modules import module
    from torch.optim import optimizer as optim
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    def state() -> tuple[Any, ...]:
        return (
            torch.autograd.Variable._execution_engine,
            torch._C._autograd._top_saved_tensors_default_hooks(False),
            torch._C._autograd._profiler_enabled(),
            tuple(_get_current_dispatch_mode_stack()),
            len(module._global_forward_hooks),
            len(module._global_forward_pre_hooks),
            len(optim._global_optimizer_pre_hooks),
            len(optim._global_optimizer_post_hooks),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_default_dtype(),
        )

    before = state()
    model, optimizer = build()
    own = len(model._forward_hooks), len(optimizer._optimizer_step_pre_hooks)
    with legroom.fit(model, optimizer, budget=limits(usual)[0] * 2) as room:
        for number in range(5):
            with room.step():
                usual(model, optimizer, number)
            assert state() == before
    assert state() == before
    assert own == (len(model._forward_hooks), len(optimizer._optimizer_step_pre_hooks))


def test_the_report() -> None:
    floor, peak = limits(usual)
    budget = floor + (peak - floor) // 4
    model, optimizer = build()
    with legroom.fit(model, optimizer, budget=budget) as room:
        empty = room.report()
        assert (empty.steps, empty.peak_bytes, empty.predicted_peak_bytes, empty.bytes_swapped) == (0, 0, 0, 0)
        assert str(empty)
        json.loads(empty.to_json())
        run(usual, room.step, model, optimizer, 6)
        report = room.report()
        assert room.trace is not None and room.plan is not None and room.timeline is not None
        saved = sum(room.trace.storages[gap.storage].nbytes for gap in room.trace.gaps)
    assert report.steps == 6 and report.sheltered_steps == 2 and report.planned_steps == 4
    assert 2 <= report.measured_steps <= 6
    assert report.budget_bytes == budget
    assert 0 < report.peak_bytes <= budget
    assert report.planned_peak_bytes == report.predicted_peak_bytes <= budget
    assert report.floor_bytes == floor
    assert report.step_seconds > 0 and report.predicted_step_seconds >= report.baseline_seconds > 0
    assert report.bytes_kept + report.bytes_swapped + report.bytes_recomputed == saved
    assert report.bytes_swapped + report.bytes_recomputed > 0
    assert report.breakdown.computation_seconds > 0
    read = json.loads(report.to_json())
    assert set(read) == {field.name for field in fields(report)} | {"kind", "version"}
    assert read["peak_bytes"] == report.peak_bytes
    text = str(report)
    for word in ("budget", "peak", "predicted", "smallest that works", "swapped", "recomputed"):
        assert word in text


def test_a_plan_from_a_file_gives_the_same_decisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # So that it recomputes: when a swap comes back, and what is alive then, depends on what ops were measured to take.
    slow = replace(PRESETS["cpu"], out_bytes_per_second=1e6, in_bytes_per_second=1e6)
    monkeypatch.setattr(legroom.room, "probe", lambda *_: slow)
    floor, peak = limits(usual)
    budget = floor + (peak - floor) // 4
    model, optimizer = build()
    expected = run(usual, nullcontext, model, optimizer, 5)
    file = tmp_path / "plan.json"
    model, optimizer = build()
    gc.collect()
    with legroom.fit(model, optimizer, budget=budget) as room:
        run(usual, room.step, model, optimizer, 5)
        assert room.plan is not None
        plan = room.plan
        predicted = room.report().predicted_peak_bytes
    assert any(isinstance(decision, (Swap, Recompute)) for decision in plan.decisions)
    file.write_text(to_json(plan))
    assert from_json(file.read_text()) == plan

    def refuse(*_: Any) -> Any:
        raise AssertionError("planned again")

    for given in (plan, file, str(file)):
        del room, model, optimizer  # what is alive before a step counts against the budget, and a plan may fill that
        model, optimizer = build()
        gc.collect()
        with legroom.fit(model, optimizer, budget=budget, plan=given, planner=refuse) as room:
            assert run(usual, room.step, model, optimizer, 5) == expected
            assert room.plan == plan
            report = room.report()
            assert report.planned_steps == 3, report.fallbacks
            assert report.predicted_peak_bytes == predicted
            assert report.peak_bytes <= budget


def test_capture_leaves_the_random_state_to_the_step() -> None:
    """capture() trains two steps for real, and does nothing else."""
    model, optimizer = build()
    expected = [usual(model, optimizer, 0), usual(model, optimizer, 0), digest(torch.get_rng_state()).sha256]
    model, optimizer = build()
    seen: list[Any] = []
    trace = legroom.capture(lambda: seen.append(usual(model, optimizer, 0)), model=model, optimizer=optimizer)
    assert [*seen, digest(torch.get_rng_state()).sha256] == expected
    assert legroom.floor_bytes(trace) <= trace.peak_bytes
