"""What a room does with nonsense, with misuse and with programs that fail half way: a clear error, nothing left."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import legroom
from legroom.errors import BudgetError, DeviceError, LegroomError, PlanError, StepError
from legroom.plan import Keep, Plan, Recompute, signature, to_json
from legroom.schedule import lower
from legroom.units import UnitError
from tests.harness import digest

ROWS, WIDTH, LAYERS = 256, 128, 5  # 128 KiB an activation, three of them a layer

pytestmark = pytest.mark.usefixtures("one_thread")


# --- a small program that can fail ------------------------------------------------------------------------------------


class Boom(Exception):
    pass


def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(100 + step)
    return torch.randn(ROWS, WIDTH, generator=g), torch.randint(8, (ROWS,), generator=g)


def raise_boom(*_: Any) -> None:
    raise Boom


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def train(model: nn.Sequential, optimizer: torch.optim.Optimizer, step: int, *, fail: str = "") -> float:
    x, y = batch(step)
    optimizer.zero_grad()
    h = model[:6](x)
    if fail == "forward":
        raise Boom
    if fail == "backward":
        h.register_hook(raise_boom)
    loss = F.cross_entropy(model[6:](h), y)
    loss.backward()
    remove = optimizer.register_step_post_hook(raise_boom) if fail == "optimizer" else None
    try:
        optimizer.step()
    finally:
        if remove is not None:
            remove.remove()
    return loss.item()


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    found = {name: digest(p) for name, p in model.named_parameters()}
    found |= {f"{name}.grad": digest(p.grad) for name, p in model.named_parameters()}
    for i, state in enumerate(optimizer.state.values()):
        found |= {f"{name} {i}": digest(value) for name, value in state.items()}
    found["random"] = digest(torch.get_rng_state())
    return {name: found[name].sha256 for name in found}


@cache
def limits() -> tuple[int, int]:
    """The smallest budget that works, and the peak with everything kept."""
    model, optimizer = build()
    trace = legroom.capture(partial(train, model, optimizer, 0), model=model, optimizer=optimizer)
    return legroom.floor_bytes(trace), trace.peak_bytes


@pytest.fixture(autouse=True, scope="module")
def _load_code() -> None:
    """Before any test has a model of its own alive."""
    gc.collect()
    limits()


def budget_at(share: float) -> int:
    floor, peak = limits()
    return floor + int(share * (peak - floor))


@pytest.fixture(autouse=True)
def _nothing_left_over() -> Iterator[None]:
    """Tensors of the last test in a cycle would count as memory of this one. What is left in PyTorch is this test's."""
    gc.collect()
    before = surroundings()
    yield
    gc.collect()
    after = surroundings()
    assert after == replace(before, threads=after.threads)


@dataclass(frozen=True)
class Surroundings:
    """What a step puts into PyTorch or finds there."""

    engine: int
    modes: tuple[Any, ...]
    hooks: Any
    profiler: bool
    module_hooks: int
    optimizer_hooks: int
    grad: bool
    torch_threads: int
    threads: int


def surroundings() -> Surroundings:
    from torch.nn.modules import module
    from torch.optim import optimizer

    return Surroundings(
        engine=id(torch.autograd.Variable._execution_engine),
        modes=tuple(_get_current_dispatch_mode_stack()),
        hooks=torch._C._autograd._top_saved_tensors_default_hooks(False),
        profiler=torch._C._autograd._profiler_enabled(),
        module_hooks=len(module._global_forward_hooks) + len(module._global_forward_pre_hooks),
        optimizer_hooks=len(optimizer._global_optimizer_pre_hooks) + len(optimizer._global_optimizer_post_hooks),
        grad=torch.is_grad_enabled(),
        torch_threads=torch.get_num_threads(),
        threads=threading.active_count(),
    )


def spilled_bytes(room: legroom.Room) -> int:
    """Bytes of the spill file that some slot still takes."""
    spill = room._device.spill  # type: ignore[attr-defined]
    return spill._end - sum(nbytes * len(free) for nbytes, free in spill._free.items())


def assert_empty(room: legroom.Room) -> None:
    gc.collect()
    assert room._setting.ledger.entries == 0
    assert room._setting.ledger.by_key == {}
    assert room._setting.ledger.pinned == {}
    assert spilled_bytes(room) == 0


def steps(room: legroom.Room, model: nn.Sequential, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        with room.step():
            losses.append(train(model, optimizer, number))
    return losses


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "match"),
    [
        ("12", "no unit"),
        ("-1GiB", "cannot read"),
        ("12 bananas", "unknown unit"),
        ("", "cannot read"),
        ("1" * 1000 + "GiB", "1003 characters"),
        (0, "at least 1 byte"),
        (-5, "at least 1 byte"),
        (float("nan"), "expected bytes"),
        (1.5e9, "expected bytes"),
        (True, "expected bytes"),
        (2**80, "fewer than"),
        (torch.tensor(5), "expected bytes"),
    ],
)
def test_a_nonsense_budget_is_refused(budget: Any, match: str) -> None:
    model, optimizer = build()
    with pytest.raises(UnitError, match=match) as caught:
        legroom.fit(model, optimizer, budget=budget)
    assert isinstance(caught.value, LegroomError) and isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_budget_above_the_machine_is_refused() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with pytest.raises(BudgetError, match=r"has .* name at most"):
        legroom.fit(budget=total + 1)
    legroom.fit(budget=total).close()


def test_what_is_no_model_is_refused() -> None:
    model, optimizer = build()
    for wrong in (5, "model", nn.Linear, [model], model.parameters()):
        with pytest.raises(LegroomError, match=r"must be a torch\.nn\.Module"):
            legroom.fit(wrong, optimizer, budget="1GiB")  # type: ignore[arg-type]
    with pytest.raises(LegroomError, match=r"must be a torch\.optim\.Optimizer"):
        legroom.fit(model, model, budget="1GiB")  # type: ignore[arg-type]
    with pytest.raises(LegroomError, match="name a budget"):
        legroom.fit(model, optimizer)
    with pytest.raises(TypeError, match="banana"):
        legroom.fit(model, optimizer, budget="1GiB", banana=1)  # type: ignore[call-arg]


def test_a_model_on_the_wrong_device_is_refused() -> None:
    model, optimizer = build()
    with pytest.raises(DeviceError, match=r"'cuda' was asked for, but the model lies on 'cpu'"):
        legroom.fit(model, optimizer, budget="1GiB", device="cuda")
    with pytest.raises(DeviceError, match="'meta'"):
        legroom.fit(nn.Linear(3, 3, device="meta"), budget="1GiB")
    apart = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
    with pytest.raises(DeviceError, match=r"several devices \(cpu, meta\)"):
        legroom.fit(apart, budget="1GiB")
    elsewhere = torch.optim.SGD([torch.zeros(3, device="meta", requires_grad=True)], lr=0.1)
    with pytest.raises(DeviceError, match="several devices"):
        legroom.fit(model, elsewhere, budget="1GiB")


@pytest.mark.parametrize("planner", ["best", "", None, 5])
def test_an_unknown_planner_is_refused(planner: Any) -> None:
    with pytest.raises(PlanError, match=r"unknown planner.*auto"):
        legroom.fit(budget="1GiB", planner=planner)


@pytest.mark.parametrize(
    ("where", "match"),
    [("missing/folder", "No such file"), ("a-file", "Not a directory"), ("/proc/self", "spill file")],
)
def test_a_spill_folder_that_cannot_be_used_is_refused(tmp_path: Path, where: str, match: str) -> None:
    (tmp_path / "a-file").write_text("")
    with pytest.raises(DeviceError, match=match) as caught:
        legroom.fit(budget="1GiB", spill_dir=tmp_path / where)
    assert "spill_dir" in str(caught.value)
    assert (tmp_path / "a-file").read_text() == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_spill_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DeviceError, match="Permission denied"):
        legroom.fit(budget="1GiB", spill_dir=tmp_path)


# --- plans ------------------------------------------------------------------------------------------------------------


@cache
def a_plan() -> Plan:
    """A good plan for the program above, within half of the range."""
    model, optimizer = build()
    with legroom.fit(model, optimizer, budget=budget_at(0.5)) as room:
        steps(room, model, optimizer, range(3))
        assert room.plan is not None
        return room.plan


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe\x00garbage",
        b"[" * 200_000,
        b'{"kind": "plan", "version": 1}',
        b'{"kind": "trace", "version": 1}',
        b'{"kind": "plan", "version": 99}',
        b"1" * 100_000,
        b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    ],
    ids=range(12),
)
def test_a_corrupt_plan_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(content)
    with pytest.raises(PlanError, match=re.escape(str(file))) as caught:
        legroom.fit(budget="1GiB", plan=file)
    assert len(str(caught.value)) < 500 + len(str(file))


def test_a_plan_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(PlanError, match="cannot be read"):
            legroom.fit(budget="1GiB", plan=path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"do": "keep"', '"do": "explode"'),
        ('"do": "keep"', '"do": "swap", "when": "ahead", "ahead": -1'),
        ('"do": "keep"', '"do": "swap", "when": "ahead", "ahead": 1e300'),
        ('"do": "keep"', '"do": "keep", "extra": 1'),
        ('"budget_bytes": ', '"budget_bytes": -'),
        ('"predicted_seconds": ', '"predicted_seconds": NaN, "x": '),
        ('"decisions": [', '"decisions": [[], '),
    ],
)
def test_a_hostile_plan_file_is_refused(tmp_path: Path, old: str, new: str) -> None:
    text = to_json(replace(a_plan(), decisions=(Keep(), *a_plan().decisions[1:])))
    text = text if old in text else text.replace('":', '": ')  # written without spaces
    assert old in text
    file = tmp_path / "plan.json"
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(PlanError):
        legroom.fit(budget="1GiB", plan=file)


def test_a_plan_for_another_trace_is_refused(tmp_path: Path) -> None:
    """After the step in which the trace is known; the step itself is done, and right."""
    file = tmp_path / "plan.json"
    file.write_text(to_json(replace(a_plan(), trace_signature="0123456789abcdef")))
    expected = losses_of_plain(2)
    model, optimizer = build()
    with legroom.fit(model, optimizer, budget=budget_at(0.5), plan=file) as room:
        losses = steps(room, model, optimizer, range(1))
        with pytest.raises(PlanError, match=r"is for trace 0123456789abcdef.*plan it again"), room.step():
            losses.append(train(model, optimizer, 1))
        assert losses == expected
        assert_empty(room)


def test_a_plan_with_too_few_decisions_is_refused() -> None:
    plan = replace(a_plan(), decisions=a_plan().decisions[:-1])
    model, optimizer = build()
    with legroom.fit(model, optimizer, budget=budget_at(0.5), plan=plan) as room:
        steps(room, model, optimizer, range(1))
        with pytest.raises(PlanError, match="decisions"), room.step():
            train(model, optimizer, 1)


def keep_everything(trace: legroom.Trace, hardware: legroom.Hardware, budget_bytes: int) -> Plan:
    return Plan((Keep(),) * len(trace.gaps), signature(trace), "keep", budget_bytes, 0, 0.0, ())


def test_a_plan_above_the_budget_is_not_followed() -> None:
    """The budget is a promise; a plan is advice, wherever it comes from."""
    model, optimizer = build()
    trace = legroom.capture(partial(train, model, optimizer, 0), model=model, optimizer=optimizer)
    plan = Plan((Keep(),) * len(trace.gaps), signature(trace), "keep", 1, 0, 0.0, ())
    del trace
    for options in ({"plan": plan}, {"planner": keep_everything}):
        model, optimizer = build()
        gc.collect()
        with legroom.fit(model, optimizer, budget=budget_at(0.25), **options) as room:  # type: ignore[arg-type]
            try:
                steps(room, model, optimizer, range(4))
            except (BudgetError, PlanError):
                continue
            assert room.report().peak_bytes <= room.budget_bytes, f"{next(iter(options))}: {room.report()}"


@pytest.mark.parametrize("wrong", [None, 5, "plan", {}])
def test_a_planner_that_returns_no_plan_is_named(wrong: Any) -> None:
    model, optimizer = build()
    with legroom.fit(model, optimizer, budget=budget_at(0.5), planner=lambda *_: wrong) as room:
        steps(room, model, optimizer, range(1))
        with pytest.raises((PlanError, TypeError), match=r"[Pp]lan"), room.step():
            train(model, optimizer, 1)


def test_an_error_in_a_planner_comes_through() -> None:
    model, optimizer = build()
    with legroom.fit(model, optimizer, budget=budget_at(0.5), planner=raise_boom) as room:  # type: ignore[arg-type]
        steps(room, model, optimizer, range(1))
        with pytest.raises(Boom), room.step():
            train(model, optimizer, 1)
        assert_empty(room)


# --- steps used in ways that cannot work ------------------------------------------------------------------------------


@cache
def losses_of_plain(count: int) -> list[float]:
    model, optimizer = build()
    return [train(model, optimizer, number) for number in range(count)]


def test_nested_steps_are_refused_and_the_outer_one_goes_on() -> None:
    expected = losses_of_plain(4)
    model, optimizer = build()
    with legroom.fit(model, optimizer, budget=budget_at(0.5)) as room, legroom.fit(budget="1GiB") as other:
        losses = []
        for number in range(4):
            with room.step() as outer:
                for inner in (room.step(), other.step(), outer):
                    with pytest.raises(StepError, match="nested"):
                        inner.__enter__()
                losses.append(train(model, optimizer, number))
        assert losses == expected
        assert room.report().planned_steps == 2
        assert_empty(room)


def test_a_step_in_another_thread_is_refused_meanwhile() -> None:
    model, optimizer = build()
    caught: list[BaseException] = []

    def enter(room: legroom.Room) -> None:
        try:
            with room.step():
                pass
        except StepError as error:
            caught.append(error)

    with legroom.fit(model, optimizer, budget="1GiB") as room:
        with room.step():
            thread = threading.Thread(target=enter, args=(room,))
            thread.start()
            thread.join()
            train(model, optimizer, 0)
        assert len(caught) == 1


def test_a_closed_room_is_closed() -> None:
    model, optimizer = build()
    room = legroom.fit(model, optimizer, budget="1GiB")
    steps(room, model, optimizer, range(1))
    room.close()
    room.close()
    with pytest.raises(StepError, match="closed"), room.step():
        pass
    assert room.report().steps == 1
    with legroom.fit(model, optimizer, budget="1GiB") as room:
        steps(room, model, optimizer, range(1))


def test_close_inside_a_step_is_refused() -> None:
    expected = losses_of_plain(3)
    model, optimizer = build()
    with legroom.fit(model, optimizer, budget="1GiB") as room, legroom.fit(budget="1GiB") as other:
        losses = []
        for number in range(3):
            with room.step():
                losses.append(train(model, optimizer, number))
                other.close()
                with pytest.raises(StepError, match="leave the step first"):
                    room.close()
        assert losses == expected


@pytest.mark.parametrize("before", [0, 1, 3], ids=["first", "proving", "planned"])
def test_a_step_without_backward(before: int) -> None:
    """Evaluation inside a step: saved tensors die unused."""
    model, optimizer = build()
    expected = [train(model, optimizer, number) for number in range(before)]
    expected.append(model(batch(50)[0]).sum().item())
    expected += [train(model, optimizer, number) for number in range(before, before + 3)]
    plain = bits(model, optimizer)

    model, optimizer = build()
    with legroom.fit(model, optimizer, budget=budget_at(0.25)) as room:
        losses = steps(room, model, optimizer, range(before))
        x = batch(50)[0]
        with room.step():
            losses.append(model(x).sum().item())
        assert_empty(room)
        with room.step():
            pass
        losses += steps(room, model, optimizer, range(before, before + 3))
        assert losses == expected
        assert bits(model, optimizer) == plain


@pytest.mark.parametrize(("before", "share"), [(0, 0.25), (1, 0.25), (4, 0.25), (4, 0.75)])
def test_backward_after_the_step(before: int, share: float) -> None:
    def split(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, around: Callable[[], Any]) -> float:
        x, y = batch(number)
        optimizer.zero_grad()
        with around():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    numbers = range(before, before + 3)
    model, optimizer = build()
    expected = [train(model, optimizer, number) for number in range(before)]
    expected += [split(model, optimizer, number, nullcontext) for number in numbers]
    plain = bits(model, optimizer)

    model, optimizer = build()
    with legroom.fit(model, optimizer, budget=budget_at(share)) as room:
        losses = steps(room, model, optimizer, range(before))
        for number in numbers:
            losses.append(split(model, optimizer, number, room.step))
            assert_empty(room)
        assert losses == expected
        assert bits(model, optimizer) == plain


@pytest.mark.parametrize("before", [0, 3], ids=["first", "planned"])
def test_backward_inside_the_next_step(before: int) -> None:
    """Losses one step late: handles of one step are asked for in the next."""

    def late(model: nn.Sequential, optimizer: torch.optim.Optimizer, around: Callable[[], Any]) -> list[float]:
        losses, waiting = [], None
        for number in numbers:
            x, y = batch(number)
            with around():
                loss = F.cross_entropy(model(x), y)
                if waiting is not None:
                    waiting.backward()
                waiting = loss
            losses.append(loss.item())
        optimizer.step()
        return losses

    numbers = range(before, before + 4)
    model, optimizer = build()
    expected = [train(model, optimizer, number) for number in range(before)] + late(model, optimizer, nullcontext)
    plain = bits(model, optimizer)

    model, optimizer = build()
    with legroom.fit(model, optimizer, budget="1GiB") as room:
        losses = steps(room, model, optimizer, range(before)) + late(model, optimizer, room.step)
        assert losses == expected
        assert bits(model, optimizer) == plain
        assert_empty(room)


def test_backward_after_close_is_refused_where_bytes_are_gone() -> None:
    model, optimizer = build()
    x, y = batch(0)
    with legroom.fit(model, optimizer, budget=budget_at(0.25)) as room, room.step():
        loss = F.cross_entropy(model(x), y)
    with pytest.raises(DeviceError, match="room is closed"):
        loss.backward()


@pytest.mark.parametrize("before", [0, 1, 3], ids=["first", "proving", "planned"])
def test_functional_transforms_are_refused(before: int) -> None:
    expected = losses_of_plain(before + 2)
    model, optimizer = build()
    with legroom.fit(model, optimizer, budget=budget_at(0.5)) as room:
        losses = steps(room, model, optimizer, range(before))
        with pytest.raises(StepError, match=r"torch\.func") as caught, room.step():
            torch.func.grad(lambda x: (x * x).sum())(torch.ones(3))
        assert isinstance(caught.value.__cause__, RuntimeError)
        losses += steps(room, model, optimizer, range(before, before + 2))
        assert losses == expected
        assert torch.func.grad(lambda x: (x * x).sum())(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]


# --- programs that fail -----------------------------------------------------------------------------------------------


def train_with(
    model: nn.Sequential,
    optimizer: torch.optim.Optimizer,
    around: Callable[[], Any],
    failures: dict[int, str],
    count: int,
) -> tuple[list[float], list[dict[str, str]]]:
    """Steps of which some fail, and the bits after each."""
    losses, seen = [], []
    for number in range(count):
        fail = failures.get(number, "")
        try:
            with around():
                losses.append(train(model, optimizer, number, fail=fail))
            assert not fail
        except Boom:
            assert fail
        seen.append(bits(model, optimizer))
    return losses, seen


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize(
    ("at", "share"), [(0, 0.25), (1, 0.25), (2, 0.75), (4, 0.25)], ids=["first", "proving", "first-planned", "planned"]
)
def test_a_step_that_raises(at: int, where: str, share: float) -> None:
    count = at + 5
    model, optimizer = build()
    expected = train_with(model, optimizer, nullcontext, {at: where, at + 1: where}, count)

    model, optimizer = build()
    gc.collect()
    before = surroundings()
    with legroom.fit(model, optimizer, budget=budget_at(share)) as room:

        def around() -> Any:
            assert_empty(room)
            assert surroundings() == replace(before, threads=threading.active_count())
            return room.step()

        taken = train_with(model, optimizer, around, {at: where, at + 1: where}, count)
        assert_empty(room)
        assert taken[0] == expected[0]
        for number, (ours, theirs) in enumerate(zip(taken[1], expected[1], strict=True)):
            differing = [name for name in theirs if ours[name] != theirs[name]]
            assert not differing, f"step {number}: {differing[0]} and {len(differing) - 1} more differ"
        report = room.report()
        assert report.planned_steps >= 1
        assert report.steps == count - 2
        assert report.peak_bytes <= report.budget_bytes
    assert surroundings().threads <= before.threads


def test_a_keyboard_interrupt_is_like_any_error() -> None:
    expected = losses_of_plain(4)
    model, optimizer = build()
    with legroom.fit(model, optimizer, budget=budget_at(0.5)) as room:
        losses = steps(room, model, optimizer, range(3))
        state = torch.get_rng_state()
        with pytest.raises(KeyboardInterrupt), room.step():
            interrupt(model(batch(3)[0]))
        torch.set_rng_state(state)
        assert_empty(room)
        losses += steps(room, model, optimizer, range(3, 4))
        assert losses == expected


# --- a full disk ------------------------------------------------------------------------------------------------------


class Disk:
    """Takes the place of os.pwrite; `left` bytes may still be written, None: any number."""

    def __init__(self, number: int = errno.ENOSPC) -> None:
        self.left: int | None = None
        self.number = number
        self.real = os.pwrite

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        if self.left is not None:
            if self.left <= 0:
                raise OSError(self.number, os.strerror(self.number))
            data = data[: self.left]
            self.left -= len(data)
        return self.real(fd, data, offset)


@pytest.mark.parametrize(
    ("before", "number"),
    [(0, errno.ENOSPC), (0, errno.EDQUOT), (0, errno.EFBIG), (1, errno.ENOSPC), (4, errno.ENOSPC)],
    ids=["first", "quota", "limit", "proving", "planned"],
)
def test_a_full_disk_is_named_and_survived(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: int, number: int
) -> None:
    expected = losses_of_plain(before + 3)
    disk = Disk(number)
    monkeypatch.setattr(os, "pwrite", disk.pwrite)
    model, optimizer = build()
    # A little above the floor: the random state that is put aside below is a tensor, and counts.
    with legroom.fit(model, optimizer, budget=budget_at(0.1), spill_dir=tmp_path) as room:
        losses = steps(room, model, optimizer, range(before))
        for left in (0, 300_000):
            state, parameters = torch.get_rng_state(), bits(model, optimizer)
            disk.left = left
            with pytest.raises(DeviceError, match="full") as caught, room.step():
                train(model, optimizer, before)
            assert "spill_dir" in str(caught.value) and str(tmp_path) in str(caught.value)
            disk.left = None
            del caught
            torch.set_rng_state(state)
            after = bits(model, optimizer)
            assert {n for n in after if after[n] != parameters.get(n)} <= {n for n in after if n.endswith(".grad")}
            assert_empty(room)
        losses += steps(room, model, optimizer, range(before, before + 3))
        assert losses == expected
        assert_empty(room)


def test_a_file_size_limit_is_named() -> None:
    """The same, with a limit that the kernel enforces."""
    out = in_subprocess(
        f"""
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        model, optimizer = build()
        room = legroom.fit(model, optimizer, budget={budget_at(0.1)})
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
        state = torch.get_rng_state()
        try:
            steps(room, model, optimizer, range(1))
        except legroom.DeviceError as error:
            print("refused:", "is full" in str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        torch.set_rng_state(state)
        print("same:", steps(room, model, optimizer, range(4)) == losses_of_plain(4))
        """
    )
    assert out.splitlines() == ["refused: True", "same: True"]


def in_subprocess(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(code)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


ROOT = Path(__file__).resolve().parents[2]
PREAMBLE = f"""
import importlib.util, os, sys, torch, legroom
spec = importlib.util.spec_from_file_location("bad_input", {str(Path(__file__))!r})
module = importlib.util.module_from_spec(spec)
sys.modules["bad_input"] = module
spec.loader.exec_module(module)
from bad_input import *
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}


# --- the spill file ---------------------------------------------------------------------------------------------------


def test_the_spill_file_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    real = os.pwrite

    def pwrite(*args: Any) -> int:
        seen.append(os.listdir(tmp_path))
        return real(*args)

    monkeypatch.setattr(os, "pwrite", pwrite)
    model, optimizer = build()
    with legroom.fit(model, optimizer, budget=budget_at(0.0), spill_dir=tmp_path) as room:
        assert "(deleted)" in os.readlink(f"/proc/self/fd/{room._device.spill._fd}")  # type: ignore[attr-defined]
        steps(room, model, optimizer, range(4))
    assert len(seen) > 10 and not any(seen)
    assert os.listdir(tmp_path) == []


def test_the_spill_file_has_no_name_on_old_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def without_tmpfile(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not here")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", without_tmpfile)
    model, optimizer = build()
    with legroom.fit(model, optimizer, budget=budget_at(0.0), spill_dir=tmp_path) as room:
        assert os.listdir(tmp_path) == []
        assert steps(room, model, optimizer, range(3)) == losses_of_plain(3)
        assert os.listdir(tmp_path) == []


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    code = f"""
    model, optimizer = build()
    room = legroom.fit(model, optimizer, budget={budget_at(0.05)}, spill_dir={str(tmp_path)!r})
    steps(room, model, optimizer, range(3))
    x, y = batch(0)
    with room.step():
        loss = F.cross_entropy(model(x), y)
        print("in the step", spilled_bytes(room), flush=True)
        sys.stdin.read()
    """
    child = subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(code)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None and child.stdin is not None
        line = child.stdout.readline()
        assert line.startswith("in the step") and int(line.split()[-1]) > 0
        assert os.listdir(tmp_path) == []
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        for pipe in (child.stdout, child.stdin):
            if pipe is not None:
                pipe.close()
    assert os.listdir(tmp_path) == []


# --- company ----------------------------------------------------------------------------------------------------------


def test_a_profiler_around_the_steps_is_left_alone() -> None:
    expected = losses_of_plain(6)
    model, optimizer = build()
    with legroom.fit(model, optimizer, budget=budget_at(0.25)) as room:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            losses = steps(room, model, optimizer, range(2))
            assert torch._C._autograd._profiler_enabled()
        assert room.report().planned_steps == 0
        assert any("profiler" in name for name in room.report().fallbacks)
        losses += steps(room, model, optimizer, range(2, 4))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as second:
            losses += steps(room, model, optimizer, range(4, 6))
            assert torch._C._autograd._profiler_enabled()
        assert room.report().planned_steps >= 2
        for names in ({event.name for event in p.events()} for p in (profiler, second)):
            assert {"aten::addmm", "aten::gelu_backward"} <= names
    assert losses == expected


@pytest.mark.parametrize("before", [0, 1, 3], ids=["first", "proving", "planned"])
def test_a_profiler_that_ends_inside_a_step(before: int) -> None:
    expected = losses_of_plain(before + 4)
    model, optimizer = build()
    with legroom.fit(model, optimizer, budget=budget_at(0.25)) as room:
        losses = steps(room, model, optimizer, range(before))
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        profiler.start()
        with room.step():
            losses.append(train(model, optimizer, before))
            profiler.stop()
        assert len(profiler.events() or ()) > 10
        losses += steps(room, model, optimizer, range(before + 1, before + 4))
        assert losses == expected
        assert room.report().planned_steps >= 2


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("order", ["around the step", "inside the step"])
@pytest.mark.parametrize("share", [0.25, 0.75])
def test_a_dispatch_mode_of_the_user(order: str, share: float) -> None:
    """It sees the program's ops, backward included; no bit changes."""

    def go(around: Callable[[], Any], model: nn.Sequential, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        losses, ops = [], []
        for number in range(5):
            mode = Counting()
            first, second = (mode, around()) if order == "around the step" else (around(), mode)
            with first, second:
                losses.append(train(model, optimizer, number))
            ops.append(mode.ops)
        return losses, ops

    plain_losses, plain_ops = go(nullcontext, *build())
    model, optimizer = build()
    with legroom.fit(model, optimizer, budget=budget_at(share)) as room:
        losses, ops = go(room.step, model, optimizer)
        assert losses == plain_losses
        assert room.report().planned_steps >= 2
        assert_empty(room)
    for ours, theirs in zip(ops[3:], plain_ops[3:], strict=True):
        assert [op for op in ours if "backward" in op] == [op for op in theirs if "backward" in op]
        if order == "inside the step":
            # Autograd detaches what it hands to hooks.
            assert [op for op in ours if "detach" not in op] == [op for op in theirs if "detach" not in op]


def recompute_what_may_be(trace: legroom.Trace, hardware: legroom.Hardware, budget_bytes: int) -> Plan:
    plan = keep_everything(trace, hardware, budget_bytes)
    for gap in range(len(plan.decisions)):
        decisions = (*plan.decisions[:gap], Recompute(), *plan.decisions[gap + 1 :])
        try:
            lower(trace, replace(plan, decisions=decisions), hardware)
        except PlanError:
            continue
        plan = replace(plan, decisions=decisions)
    return plan


class Doubling(TorchDispatchMode):
    """Changes what an op gives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.gelu.default else result


@pytest.mark.parametrize("order", ["around the step", "inside the step"])
def test_a_dispatch_mode_that_changes_results(order: str) -> None:
    """A replay must not go through the user's mode a second time: what was recorded is what the mode made of the op."""

    def go(around: Callable[[], Any], model: nn.Sequential, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for number in range(6):
            first, second = (Doubling(), around()) if order == "around the step" else (around(), Doubling())
            with first, second:
                losses.append(train(model, optimizer, number))
        return losses

    expected = go(nullcontext, *build())
    model, optimizer = build()
    with legroom.fit(model, optimizer, budget="1GiB", planner=recompute_what_may_be) as room:
        assert go(room.step, model, optimizer) == expected
        assert room.report().planned_steps >= 2


def test_two_rooms_do_not_disturb_each_other() -> None:
    """Their steps alternate; one gets to a plan, the other fails every time. All tensors count in both."""
    expected = losses_of_plain(4)
    other_model, other_optimizer = build()
    model, optimizer = build()
    other = legroom.fit(other_model, other_optimizer, budget="1GiB")
    with other, legroom.fit(model, optimizer, budget="1GiB") as room:
        losses = []
        for number in range(4):
            state = torch.get_rng_state()
            with pytest.raises(Boom), other.step():
                train(other_model, other_optimizer, number, fail="backward")
            torch.set_rng_state(state)
            losses += steps(room, model, optimizer, range(number, number + 1))
        assert losses == expected
        assert room.report().planned_steps == 2
        assert_empty(room)
        assert_empty(other)
