"""Counting all tensors, beside threads that do not stop for it."""

from __future__ import annotations

import threading
import time

import torch

from legroom.runtime.census import _all_tensors


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
