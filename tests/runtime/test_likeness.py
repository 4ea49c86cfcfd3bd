"""The one comparison of a call's arguments says yes to nothing that the comparison one by one refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from legroom.runtime import knowncalls
from legroom.runtime.knowncalls import Likeness, _all_alike, _form_of

SHAPE = (3, 4)
AXES = (4,)


class Odd(torch.Tensor):
    """A class of the program's own."""


def _complex() -> torch.Tensor:
    return torch.ones(SHAPE, dtype=torch.complex64)


KINDS: dict[str, Callable[[], Any]] = {
    "plain": lambda: torch.ones(SHAPE),
    "grad": lambda: torch.ones(SHAPE, requires_grad=True),
    "computed": lambda: torch.ones(SHAPE, requires_grad=True) * 2,
    "parameter": lambda: nn.Parameter(torch.ones(SHAPE)),
    "frozen": lambda: nn.Parameter(torch.ones(SHAPE), requires_grad=False),
    "half": lambda: torch.ones(SHAPE, dtype=torch.bfloat16),
    "whole": lambda: torch.ones(SHAPE, dtype=torch.int32),
    "turned": lambda: torch.ones(4, 3).t(),
    "wide": lambda: torch.ones(3, 8)[:, ::2],
    "offset": lambda: torch.ones(4, 4)[1:],
    "longer": lambda: torch.ones(5, 4),
    "flat": lambda: torch.ones(12),
    "subclass": lambda: torch.ones(SHAPE).as_subclass(Odd),
    "sparse": lambda: torch.ones(SHAPE).to_sparse(),
    "meta": lambda: torch.ones(SHAPE, device="meta"),
    "complex": _complex,
    "conjugate": lambda: _complex().conj(),
    "imaginary": lambda: _complex().imag,
    "negative": lambda: _complex().conj().imag,
    "none": lambda: None,
    "one": lambda: 1,
    "true": lambda: True,
    "float": lambda: 1.0,
    "zero": lambda: 0.0,
    "minus zero": lambda: -0.0,
    "axes": lambda: AXES,
    "list": lambda: [4],
    "tensors": lambda: (torch.ones(SHAPE), torch.ones(SHAPE)),
    "text": lambda: "tanh",
    "dtype": lambda: torch.float32,
}
SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "as it was": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
}
kinds = st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3)


def made(names: list[str]) -> tuple[Any, ...]:
    return tuple(KINDS[name]() for name in names)


def known(values: tuple[Any, ...]) -> tuple[Likeness, tuple[Any, ...]]:
    forms = tuple(map(_form_of, values))
    likeness = Likeness()
    if all(form is not knowncalls._NEVER for form in forms):
        likeness.learn(values)
    return likeness, forms


@given(learned=kinds, asked=kinds, around=st.sampled_from(sorted(SURROUNDINGS)))
def test_it_passes_no_more_than_the_other(learned: list[str], asked: list[str], around: str) -> None:
    likeness, forms = known(made(learned))
    asked = (asked * 3)[: len(learned)]  # as many arguments: that is compared before
    values = made(asked)
    with SURROUNDINGS[around]():
        found = likeness.tensors(values)
        if found is not None:
            one_by_one: list[torch.Tensor] = []
            assert _all_alike(values, forms, one_by_one)
            assert list(map(id, found)) == list(map(id, one_by_one))


@pytest.mark.parametrize("name", ["plain", "grad", "computed", "parameter", "half", "turned", "offset", "negative"])
def test_it_passes_what_is_alike(name: str) -> None:
    likeness, _ = known((KINDS[name](), None, AXES))
    again = KINDS[name]()
    found = likeness.tensors((again, None, AXES))
    assert found is not None and found[0] is again


@pytest.mark.parametrize(
    ("learned", "asked"),
    [("plain", other) for other in sorted(KINDS) if other not in ("plain",)]
    + [("zero", "minus zero"), ("one", "true")],
)
def test_others_are_compared_one_by_one(learned: str, asked: str) -> None:
    likeness, _ = known((KINDS["plain"](), KINDS[learned]()))
    assert likeness.tensors((KINDS["plain"](), KINDS[asked]())) is None


def test_a_list_may_hold_something_else_the_next_time() -> None:
    axes = [4]
    likeness, _ = known((torch.ones(SHAPE), axes))
    axes[0] = 3
    assert likeness.tensors((torch.ones(SHAPE), axes)) is None


@pytest.mark.parametrize("learns", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("asks", [torch.no_grad, torch.enable_grad])
def test_what_requires_gradients_is_told_apart(learns: Callable[[], Any], asks: Callable[[], Any]) -> None:
    """Not all that PyTorch compares depends on whether gradients are computed; autocast depends on this."""
    with learns():
        likeness, _ = known((torch.ones(SHAPE, requires_grad=True),))
    with asks():
        assert likeness.tensors((torch.ones(SHAPE),)) is None


def test_without_pytorchs_comparison_all_goes_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knowncalls, "_Guards", None)
    likeness, _ = known((torch.ones(SHAPE),))
    assert likeness.tensors((torch.ones(SHAPE),)) is None
