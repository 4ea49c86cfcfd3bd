"""Counting all tensors, beside threads that do not stop for it."""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import nullcontext

import pytest
import torch

import legroom
from legroom.runtime.census import Lasting, _all_tensors
from tests.runtime.test_budget import measured_peak, memory_profile


def test_every_tensor_is_found() -> None:
    made = [
        torch.ones(1),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(3).sum(),
        torch.ones(4, requires_grad=True) * 2,
    ]
    assert {id(tensor) for tensor in made} <= {id(tensor) for tensor in _all_tensors()}


def test_only_plain_tensors_are_found() -> None:
    class Other(torch.Tensor):
        pass

    other = torch.ones(2).as_subclass(Other)
    assert id(other) not in {id(tensor) for tensor in _all_tensors()}


def test_threads_that_fill_tuples_are_not_disturbed() -> None:
    stop = threading.Event()
    failures: list[SystemError] = []

    def fill() -> None:
        try:
            while not stop.is_set():
                tuple(number for number in range(20_000))
        except SystemError as error:
            failures.append(error)

    thread = threading.Thread(target=fill)
    thread.start()
    until = time.monotonic() + 1.0
    while time.monotonic() < until and not failures:
        _all_tensors()
    stop.set()
    thread.join()
    assert not failures


@pytest.mark.usefixtures("one_thread")
def test_an_input_that_the_program_lets_go_of_is_alive_as_long_as_it_is_saved() -> None:
    """It was there before the step, so the allocator's log does not know it; evicted it is away, not gone."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    boxes = [[torch.randn(4096, 64)] for _ in range(8)]

    def step(number: int = 0) -> None:
        net(boxes.pop().pop()).square().sum().backward()
        net.zero_grad()

    trace = legroom.capture(step, model=net)
    assert trace.peak_bytes - measured_peak(step, nullcontext, 0) == sum(box[0].nbytes for box in boxes[:2])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("held_by", "rows"), [("python", 4096), ("autograd", 48)])
def test_an_input_that_goes_makes_room_for_what_comes_after(held_by: str, rows: int) -> None:
    """Also where PyTorch is the last to hold it, so that no Python object goes at that moment (a small one: what is
    larger is moved out)."""
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 64)
    # Under a profiler, so that it knows their sizes when they go: it may remember others by the same addresses.
    with memory_profile():
        boxes = [[torch.randn(rows, 64)] for _ in range(8)]

    def step(number: int = 0) -> None:
        box = boxes.pop()
        if held_by == "python":
            x = box[0].mean(0)
            box.clear()
            loss = net(x).sum()
        else:
            loss = net(box.pop()).sum()
        loss.backward()
        with torch.no_grad():
            net.weight.grad = (torch.ones(3 * rows, 64).t() @ torch.ones(3 * rows, 64)) * 1e-9
        net.zero_grad()

    trace = legroom.capture(step, model=net)
    # Two steps later two boxes fewer are there.
    assert trace.peak_bytes - measured_peak(step, nullcontext, 0) == 2 * boxes[0][0].nbytes


def test_what_lasts_is_counted_anew_where_it_changes() -> None:
    net = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(net.parameters())
    lasting = Lasting(net, optimizer)
    weights = 4 * (64 * 64 + 64)
    assert lasting.nbytes() == 0
    net(torch.ones(1, 64)).sum().backward()
    assert lasting.nbytes() == weights
    optimizer.step()
    assert lasting.nbytes() == 3 * weights + 2 * 4  # Adam counts steps in a tensor each
    optimizer.zero_grad()
    assert lasting.nbytes() == 2 * weights + 2 * 4
    loaded = optimizer.state_dict()
    loaded["state"] = {0: {name: value.double() for name, value in loaded["state"][0].items()}, 1: loaded["state"][1]}
    net.weight.data = net.weight.data.double()
    old = [weakref.ref(value) for value in optimizer.state[net.weight].values()]
    optimizer.load_state_dict(loaded)  # as many tensors as before, and one of them is larger
    del loaded["state"]
    assert all(tensor() is None for tensor in old)
    state = [v for values in optimizer.state.values() for v in values.values()]
    assert lasting.nbytes() == sum(v.nbytes for v in state) > 2 * weights + 2 * 4
    optimizer.state.clear()
    assert lasting.nbytes() == 0
    assert Lasting(net, None).nbytes() == 0
