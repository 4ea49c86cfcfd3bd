"""Two things that make these tests quick: plans that are found at once, and few objects to look at.

A step that is measured collects garbage and looks at all objects: half a second each time with transformers loaded. So
what the tests need is imported here, and taken out of the garbage collector's sight once all tests are collected, while
no tensor is alive. Done later, this would also hide the tensors of other tests, and with them change what counts as
alive.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from transformers import BertForSequenceClassification, GPT2LMHeadModel, LlamaForCausalLM, T5ForConditionalGeneration
from transformers import ViTForImageClassification as _ViT

import legroom
from legroom.evaluate import floor_bytes
from legroom.hardware import PRESETS
from legroom.planners import PLANNERS, quick
from legroom.planners.auto import Auto
from tests.harness import live_bytes
from tests.pure.strategies import make_trace

USED = (
    torch,
    legroom,
    BertForSequenceClassification,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
    _ViT,
)


def pytest_collection_finish() -> None:
    trace = make_trace(0, forward=4)
    quick(Auto())(trace, PRESETS["cpu"], floor_bytes(trace))  # the first call of compiled code loads half of numba
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _quick_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` without its thorough search, which takes seconds: a plan is a means here, and most are used for few steps.

    Tests that are about what users get ask for `default_planner`.
    """
    monkeypatch.setitem(PLANNERS, "auto", quick(Auto()))


@pytest.fixture
def default_planner(_quick_plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANNERS, "auto", Auto())


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For modules with small ops, whose time is mostly that of waking threads. Where bits are compared for many models,
    ops have the threads that users' have: what a replay does with them is part of the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def others_bytes() -> int:
    """What other tests of this process have kept: it counts in a step, and goes on top of a budget of few bytes."""
    return live_bytes()
