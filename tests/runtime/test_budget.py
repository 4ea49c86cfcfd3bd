"""The budget, held against something other than legroom's own books: the allocator's events read here, and the kernel's
resident set."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import legroom
from legroom.doctor import ALLOCATOR_SETTINGS
from legroom.errors import BudgetError
from legroom.hardware import PRESETS
from legroom.planners import PLANNERS
from tests.harness import digest, live_bytes
from tests.zoo import ZOO, Case

MODELS = ("mlp", "cnn", "unet", "gpt_manual", "accumulation")
MARK = "the step that counts"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True, scope="module")
def _load_code() -> None:
    """Before any test has a model of its own alive."""
    limits(ZOO["mlp"]())


@pytest.fixture(autouse=True)
def _nothing_left_over() -> None:
    gc.collect()


# --- a second opinion -------------------------------------------------------------------------------------------------


def highest(events: list[Any], *, since: int, base: int) -> int:
    """The most bytes alive at once, from the allocator's events alone."""
    level = peak = base
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]" and event.start_ns() >= since:
            level += event.nbytes()
            peak = max(peak, level)
    return peak


@contextmanager
def memory_profile() -> Iterator[Any]:
    with torch.autograd.profiler.profile(use_cpu=True, profile_memory=True, use_kineto=True) as profiler:
        yield profiler


def measured_peak(step: Callable[[int], Any], around: Callable[[], Any], first: int) -> int:
    """The peak of the second of two steps.

    The first one is there because the allocator reports a free only where it has seen the allocation: whatever that
    step leaves and the next one frees has been seen.
    """
    with memory_profile() as profiler:
        with around():
            step(first)
        base = live_bytes()
        with torch.autograd.profiler.record_function(MARK), around():
            step(first + 1)
    events = profiler.kineto_results.events()
    since = next(event.start_ns() for event in events if event.name() == MARK)
    return highest(events, since=since, base=base)


def program(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[int], Any]]:
    model, optimizer = case.build()
    return model, optimizer, lambda number: case.step(model, optimizer, case.batch(number))


def limits(case: Case) -> tuple[int, int]:
    model, optimizer, step = program(case)
    trace = legroom.capture(partial(step, 0), model=model, optimizer=optimizer)
    return legroom.floor_bytes(trace), trace.peak_bytes


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_plain_pytorch(name: str) -> None:
    case = ZOO[name]()
    _, peak = limits(case)
    gc.collect()
    *_, step = program(case)
    step(0)
    step(1)
    assert measured_peak(step, nullcontext, 2) == peak


@pytest.mark.parametrize(
    ("name", "share"), [*((name, 0.2) for name in MODELS), ("mlp", 0.7), ("unet", 0.5), ("autocast_branches", 0.9)]
)
def test_the_peak_of_planned_steps(name: str, share: float) -> None:
    case = ZOO[name]()
    floor, peak = limits(case)
    budget = floor + int(share * (peak - floor))
    gc.collect()
    model, optimizer, step = program(case)
    with legroom.fit(model, optimizer, budget=budget) as room:
        for number in range(6):
            with room.step():
                step(number)
        planned = room.report().planned_steps
        assert planned >= 3
        measured = measured_peak(step, room.step, 6)
        report = room.report()
        assert report.planned_steps == planned + 2, report.fallbacks
        assert measured <= budget
        assert measured == report.predicted_peak_bytes


@pytest.mark.parametrize("early", [True, False], ids=["zero_grad first", "zero_grad last"])
def test_gradients_from_the_step_before_are_counted_once(early: bool) -> None:
    """Six layers' gradients, 1.5 MiB, live into the next step where zero_grad comes first."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(128, 256)

    def step(_: int) -> None:
        if early:
            optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if not early:
            optimizer.zero_grad()

    truth = measured_peak(step, nullcontext, 0)
    trace = legroom.capture(partial(step, 0), model=model, optimizer=optimizer)
    assert trace.peak_bytes == truth
    del trace
    with legroom.fit(model, optimizer, budget="1GiB") as room:
        for _ in range(4):
            with room.step():
                step(0)
        assert room.report().planned_steps == 2
        assert room.report().peak_bytes == truth


# --- the first step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_first_step_is_inside_the_budget(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, by the events of the log that legroom reads; nothing older is freed in a first step."""
    case = ZOO[name]()
    floor, _ = limits(case)
    gc.collect()
    model, optimizer, step = program(case)
    peaks: list[int] = []
    profile = torch.autograd.profiler.profile
    leave = profile.__exit__

    def tapped(self: Any, *error: Any) -> Any:
        result = leave(self, *error)
        peaks.append(highest(self.kineto_results.events(), since=0, base=base))
        return result

    monkeypatch.setattr(profile, "__exit__", tapped)
    with legroom.fit(model, optimizer, budget=floor) as room:
        base = live_bytes()
        with room.step():
            step(0)
        assert len(peaks) == 1
        assert peaks[0] <= floor
        assert room.report().peak_bytes == peaks[0]


@pytest.mark.parametrize("name", MODELS)
def test_the_first_step_is_inside_the_budget_to_its_end(name: str) -> None:
    """The optimizer too, which legroom does not measure in a first step; here with a profiler of the user's running."""
    case = ZOO[name]()
    floor, _ = limits(case)
    gc.collect()
    model, optimizer, step = program(case)
    base = live_bytes()
    with legroom.fit(model, optimizer, budget=floor) as room, memory_profile() as profiler, room.step():
        step(0)
    assert highest(profiler.kineto_results.events(), since=0, base=base) <= floor


# --- budgets that cannot work -----------------------------------------------------------------------------------------


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    found = {name: digest(p) for name, p in model.named_parameters()}
    for i, state in enumerate(optimizer.state.values()):
        found |= {f"{name} {i}": digest(value) for name, value in state.items()}
    return {name: found[name].sha256 for name in found}


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (partial(torch.optim.SGD, lr=0.1), 0),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1),
        (partial(torch.optim.AdamW, lr=0.1), 2),
        (partial(torch.optim.AdamW, lr=0.1, amsgrad=True), 3),
        (partial(torch.optim.RMSprop, lr=0.1, centered=True), 2),
        (partial(torch.optim.Adagrad, lr=0.1), 1),
    ],
    ids=["sgd", "momentum", "adamw", "amsgrad", "rmsprop", "adagrad"],
)
def test_a_budget_below_parameters_gradients_and_state_is_refused_at_once(make: Any, states: int) -> None:
    model = nn.Linear(256, 256, bias=False)
    optimizer = make(model.parameters())
    needed = (2 + states) * 256 * 256 * 4
    with pytest.raises(BudgetError, match=r"parameters .* gradients") as caught:
        legroom.fit(model, optimizer, budget=needed - 1)
    assert needed <= caught.value.floor_bytes <= needed + 64  # step counts are tensors, too
    assert caught.value.budget_bytes == needed - 1
    assert sum(nbytes for _, nbytes in caught.value.breakdown) == caught.value.floor_bytes
    legroom.fit(model, optimizer, budget=caught.value.floor_bytes).close()


def test_frozen_parameters_need_no_gradients() -> None:
    model = nn.Linear(256, 256, bias=False).requires_grad_(False)
    legroom.fit(model, budget=256 * 256 * 4).close()


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt_manual"])
def test_a_budget_that_cannot_work_changes_nothing(name: str) -> None:
    case = ZOO[name]()
    floor, _ = limits(case)
    gc.collect()
    model, optimizer, step = program(case)
    parameters = sum(p.nbytes for p in model.parameters())
    budget = parameters * 2 + (floor - parameters * 2) // 2
    before = bits(model, optimizer)
    room = legroom.fit(model, optimizer, budget=budget) if budget > parameters * 4 else None
    if room is None:
        budget = floor - (floor - parameters * 4) // 2
        room = legroom.fit(model, optimizer, budget=budget)
    with pytest.raises(BudgetError, match="the budget is") as caught, room.step():
        step(0)
    error = caught.value
    assert budget < error.floor_bytes <= floor
    assert error.budget_bytes == budget
    assert sum(nbytes for _, nbytes in error.breakdown) == error.floor_bytes
    assert [*error.breakdown] == sorted(error.breakdown, key=lambda part: -part[1])
    assert bits(model, optimizer) == before
    room.close()


@pytest.mark.parametrize("name", ["mlp", "cnn", "unet"])
def test_the_floor_is_the_smallest_budget_that_works(name: str) -> None:
    case = ZOO[name]()
    floor, _ = limits(case)
    gc.collect()
    model, optimizer, step = program(case)
    with legroom.fit(model, optimizer, budget=floor) as room:
        for number in range(5):
            with room.step():
                step(number)
        report = room.report()
        assert report.floor_bytes == floor
        assert report.peak_bytes <= floor
        assert report.planned_steps >= 2, report.fallbacks
    del room
    gc.collect()
    model, optimizer, step = program(case)
    below = floor - floor // 100
    refused = None
    with legroom.fit(model, optimizer, budget=below) as room:
        try:
            for number in range(5):
                with room.step():
                    step(number)
        except BudgetError as error:
            refused = error.floor_bytes
        if refused is None:
            assert room.report().peak_bytes <= below
        else:
            assert below < refused <= floor


def wide() -> tuple[nn.Module, torch.optim.Optimizer]:
    """1 MiB of parameters in one tensor, next to no activations: the optimizer's work is the peak."""
    torch.manual_seed(0)
    model = nn.Linear(512, 512, bias=False)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("mebibytes", [4.2, 4.6, 5.1, 5.6])
def test_the_optimizers_work_counts_from_the_first_step(mebibytes: float) -> None:
    """Parameters, gradients and state take 4 MiB and fit() lets that pass; the update itself takes one or two more.

    Where they do not fit, the first step must say so before the optimizer has changed anything.
    """
    budget = int(mebibytes * 2**20)
    model, optimizer = wide()
    x = torch.randn(4, 512)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    truth = measured_peak(step, nullcontext, 0)
    optimizer.zero_grad()
    model, optimizer = wide()
    gc.collect()
    before = bits(model, optimizer)
    with legroom.fit(model, optimizer, budget=budget) as room:
        try:
            for number in range(4):
                with room.step():
                    step(number)
        except BudgetError:
            assert truth > budget
            assert bits(model, optimizer) == before
        else:
            assert truth <= budget, f"a step takes {truth} bytes, the budget is {budget}: {room.report()}"


# --- the resident set -------------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
ROWS, WIDTH, LAYERS = 262_144, 16, 20  # 16 MiB an activation, two a layer; narrow, so that a step takes a second


def worker(share: float | None) -> None:
    """Trains in a process of its own and prints what the kernel says about it."""

    def make(rows: int, layers: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], Any]]:
        torch.manual_seed(0)
        hidden = [layer for _ in range(layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.LeakyReLU())]
        model = nn.Sequential(*hidden, nn.Linear(WIDTH, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))

        def step() -> None:
            F.mse_loss(model(x), x[:, :8]).backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    def status(field: str) -> int:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{field}:"))

    def limits(rows: int, layers: int) -> tuple[int, int]:
        model, optimizer, step = make(rows, layers)
        trace = legroom.capture(step, model=model, optimizer=optimizer)
        floor, peak = legroom.floor_bytes(trace), trace.peak_bytes
        PLANNERS["auto"](trace, PRESETS["cpu"], (floor + peak) // 2)  # to compile it takes 40 MiB
        return floor, peak

    # Code is loaded, and the limits are found on a model of an eighth of the rows: all but parameters scale with them.
    small_floor, small_peak = limits(ROWS // 8, LAYERS)
    parameters = sum(p.nbytes for p in make(8, LAYERS)[0].parameters())
    fixed = 2 * parameters
    floor, peak = fixed + 8 * (small_floor - fixed), fixed + 8 * (small_peak - fixed)
    budget = floor + int(share * (peak - floor)) if share is not None else 0
    model, optimizer, step = make(1024, 2)
    with legroom.fit(model, optimizer, budget="1GiB") as room:
        for _ in range(4):
            with room.step():
                step()
    model, optimizer, step = make(ROWS, LAYERS)
    room = legroom.fit(model, optimizer, budget=budget) if budget else None
    gc.collect()
    standing = live_bytes()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    for _ in range(3):  # in a room: two sheltered, one planned
        with room.step() if room is not None else nullcontext():
            step()
    growth = status("VmHWM") - before
    numbers = {"growth": growth, "standing": standing, "budget": budget, "peak": peak, "floor": floor}
    if room is not None:
        numbers |= {"measured": room.report().peak_bytes, "planned": room.report().planned_steps}
    sys.stdout.write(json.dumps(numbers) + "\n")


def measure(share: float | None) -> dict[str, int]:
    code = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("budget", {str(Path(__file__))!r})
module = importlib.util.module_from_spec(spec)
sys.modules["budget"] = module
spec.loader.exec_module(module)
module.worker({share!r})
"""
    environment = {
        **os.environ,
        **ALLOCATOR_SETTINGS,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "KINETO_LOG_LEVEL": "6",
    }
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the high-water mark cannot be set back")
def test_the_resident_set_stays_inside_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    plain = measure(None)
    ours = measure(0.5)
    allowed = ours["budget"] - ours["standing"]
    with capsys.disabled():
        mib = {name: value >> 20 for name, value in {**ours, "allowed": allowed, "plain": plain["growth"]}.items()}
        del mib["planned"]
        sys.stdout.write(f"\nresident growth in MiB: {mib}\n")
    assert plain["growth"] > 500 << 20
    assert ours["planned"] >= 1
    assert ours["measured"] <= ours["budget"]
    assert ours["growth"] <= 1.1 * allowed
    assert plain["growth"] > 1.3 * ours["growth"]
