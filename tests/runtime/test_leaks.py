"""Hundreds of steps leave nothing behind: memory, tensors, threads, files and the spill file stay as they are."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import legroom
from tests.runtime.test_hidden_writes import swap_all
from tests.runtime.test_opdb import recompute_all

ROWS, WIDTH, LAYERS = 128, 64, 3  # 32 KiB an activation: above the smallest that is moved
WARM_UP, STEPS = 60, 440

pytestmark = pytest.mark.usefixtures("one_thread")


class Boom(Exception):
    pass


def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Sequential, optimizer: torch.optim.Optimizer, *, rows: int = ROWS, fail: str = "") -> Tensor:
    """Returns the last hidden layer, with its graph."""
    x = torch.randn(rows, WIDTH)
    h = model[:6](x)
    if fail == "forward":
        raise Boom
    if fail == "backward":

        def boom(_: Tensor) -> None:
            raise Boom

        h.register_hook(boom)
    loss = F.mse_loss(model[6:](h), x[:, :8])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return h


@cache
def budget() -> int:
    """A quarter of the way from the smallest that works to what the step takes with everything kept."""
    model, optimizer = build()
    trace = legroom.capture(lambda: train(model, optimizer), model=model, optimizer=optimizer)
    floor = legroom.floor_bytes(trace)
    return floor + (trace.peak_bytes - floor) // 4


@pytest.fixture(autouse=True, scope="module")
def _load_code() -> None:
    budget()


@dataclass(frozen=True)
class Held:
    tensors: int
    tensor_bytes: int
    threads: int
    files: int
    spill_bytes: int
    entries: int


def held(room: legroom.Room) -> Held:
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) in (Tensor, nn.Parameter)]
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return Held(
        tensors=len(tensors),
        tensor_bytes=sum(sizes.values()),
        threads=threading.active_count(),
        files=len(os.listdir("/proc/self/fd")),
        spill_bytes=room._device.spill._end,  # type: ignore[attr-defined]
        entries=room._setting.ledger.entries,
    )


def taken_spill_bytes(room: legroom.Room) -> int:
    spill = room._device.spill  # type: ignore[attr-defined]
    return spill._end - sum(nbytes * len(free) for nbytes, free in spill._free.items())


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def room_and_program(request: Any) -> Iterator[tuple[legroom.Room, nn.Sequential, torch.optim.Optimizer]]:
    """With the planner that the test names, or the default."""
    planner = getattr(request, "param", "auto")
    gc.collect()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    model, optimizer = build()
    with legroom.fit(model, optimizer, budget=budget(), planner=planner) as room:
        yield room, model, optimizer
        gc.collect()
        assert room._setting.ledger.entries == 0
        assert room._setting.ledger.by_key == {}
        assert room._setting.ledger.pinned == {}
        assert taken_spill_bytes(room) == 0
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= files


Program = tuple[legroom.Room, nn.Sequential, torch.optim.Optimizer]


def assert_flat(room: legroom.Room, before: Held, resident_before: int) -> None:
    after = held(room)
    assert after == before
    growth = resident_bytes() - resident_before
    assert growth < 4 << 20, f"the resident set grew by {growth >> 10} KiB"


def test_five_hundred_steps(room_and_program: Program) -> None:
    room, model, optimizer = room_and_program
    for _ in range(WARM_UP):
        with room.step():
            train(model, optimizer)
    before, resident = held(room), resident_bytes()
    for _ in range(STEPS):
        with room.step():
            train(model, optimizer)
    report = room.report()
    assert report.planned_steps >= WARM_UP + STEPS - 4, report.fallbacks
    assert report.bytes_swapped or report.bytes_recomputed
    assert report.peak_bytes <= report.budget_bytes
    assert_flat(room, before, resident)


@pytest.mark.parametrize("room_and_program", ["auto", swap_all, recompute_all], indirect=True)
def test_with_exceptions_every_tenth_step(room_and_program: Program) -> None:
    room, model, optimizer = room_and_program
    before, resident = held(room), resident_bytes()
    for number in range(240):
        if number == WARM_UP:
            before, resident = held(room), resident_bytes()
        fail = ("forward", "backward")[number // 10 % 2] if number % 10 == 9 else ""
        try:
            with room.step():
                train(model, optimizer, fail=fail)
            assert not fail
        except Boom:
            optimizer.zero_grad()
    report = room.report()
    assert report.planned_steps >= 200, report.fallbacks
    assert report.peak_bytes <= report.budget_bytes
    assert_flat(room, before, resident)


def test_with_other_shapes_every_seventh_step(room_and_program: Program) -> None:
    room, model, optimizer = room_and_program
    before, resident = held(room), resident_bytes()
    for number in range(84):
        if number == 42:
            before, resident = held(room), resident_bytes()
        with room.step():
            train(model, optimizer, rows=ROWS // 2 if number % 7 == 6 else ROWS)
    report = room.report()
    assert any(name.startswith("drift") for name in report.fallbacks)
    assert report.planned_steps > 0
    assert report.peak_bytes <= report.budget_bytes
    assert_flat(room, before, resident)


def test_with_a_graph_kept_alive(room_and_program: Program) -> None:
    """A hidden layer of each step lives through the next one, with all that autograd saved below it."""
    room, model, optimizer = room_and_program
    before, resident = held(room), resident_bytes()
    kept: Tensor | None = None
    for number in range(120):
        if number == 60:
            kept = None
            before, resident = held(room), resident_bytes()
        with room.step():
            graph = train(model, optimizer)
        kept = graph
        del graph
    assert kept is not None
    kept = None
    assert_flat(room, before, resident)


def test_a_graph_that_is_never_used(room_and_program: Program) -> None:
    """Forward only, every third step: what was swapped out dies on the host."""
    room, model, optimizer = room_and_program
    before, resident = held(room), resident_bytes()
    for number in range(60):
        if number == 30:
            before, resident = held(room), resident_bytes()
        with room.step():
            if number % 3 == 2:
                model(torch.randn(ROWS, WIDTH))
            else:
                train(model, optimizer)
    assert_flat(room, before, resident)


def test_rooms_come_and_go() -> None:
    """Closed or forgotten: neither threads nor files stay."""
    model, optimizer = build()
    gc.collect()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for number in range(10):
        room = legroom.fit(model, optimizer, budget="64MiB")
        for _ in range(3):
            with room.step():
                train(model, optimizer)
        if number % 2:
            room.close()
        del room
    gc.collect()
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= files
