"""Steps of which nothing is known before the model is called: what is done with them is decided there.

The first call of the model shows the sizes of its inputs before an op of it has run; then the step becomes one that
follows a plan, one that is recorded, one under the reactive policy, or one that is left alone. What is saved before
that, or without any such call, makes it one under the reactive policy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from legroom.curve import Curve
from legroom.runtime.census import Census
from legroom.runtime.inputs import InputWatch, Signature
from legroom.runtime.modes import Interception
from legroom.runtime.shelter import Shelter
from legroom.runtime.stacks import CALLS, OPS
from legroom.runtime.steps import PlannedStep, Setting, ShelteredStep


class ReactiveStep:
    """Everything saved leaves at the next opportunity and comes back when it is asked for. Nothing is recorded."""

    curve: Curve | None = None
    census: Census | None = None

    def __init__(self, setting: Setting) -> None:
        self.shelter = Shelter(setting.ledger, setting.device_type, recorder=None, census=None, kept=setting.kept())
        self._setting = setting
        self._stack = contextlib.ExitStack()

    def begin(self, depths: tuple[int, int] | None = None) -> None:
        self._setting.ledger.generation += 1
        pack, unpack = self.shelter.pack, self.shelter.unpack
        self._stack.enter_context(Interception(pack, unpack, mode=None, entered=_nothing, left=_nothing))

    def end(self, *, failed: bool) -> None:
        self._stack.close()


class LeftAlone:
    """A step that fits as it is."""

    curve: Curve | None = None
    census: Census | None = None

    def begin(self, depths: tuple[int, int] | None = None) -> None:
        pass

    def end(self, *, failed: bool) -> None:
        pass


Decided = PlannedStep | ShelteredStep | ReactiveStep | LeftAlone


class CalledStep:
    """A step that is decided upon at the first call of the model."""

    def __init__(self, setting: Setting, watch: InputWatch, decide: Callable[[Signature, bool], Decided]) -> None:
        self._setting = setting
        self._watch = watch
        self._decide = decide
        self._early: torch.autograd.graph.saved_tensors_hooks | None = None
        self.inner: Decided | None = None

    @property
    def curve(self) -> Curve | None:
        return self.inner.curve if self.inner is not None else None

    def begin(self) -> None:
        self._depths = OPS.depth(), CALLS.depth()
        self._watch.on_call = self._called
        self._early = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._early.__enter__()

    def end(self, *, failed: bool) -> None:
        if self.inner is not None:
            self.inner.end(failed=failed)
        self._take_out()

    def _take_out(self) -> None:
        early, self._early = self._early, None
        if early is not None:
            early.__exit__(None, None, None)

    def _called(self, _: int, signature: Signature) -> None:
        if self.inner is not None:
            return
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None or hooks[0] != self._pack:
            # The program would take ours off the stack in place of its own.
            self._watch.under_hooks = True
            return
        inner = self._decide(signature, bool(_get_current_dispatch_mode_stack()))
        self._take_out()
        self.inner = inner
        inner.begin(self._depths)

    # until the model is called

    def _pack(self, tensor: torch.Tensor) -> Any:
        if self.inner is None:
            self.inner = ReactiveStep(self._setting)
            self._setting.ledger.generation += 1
            self._watch.under_hooks = True  # what saves before the call cannot be decided at the call
        assert isinstance(self.inner, ReactiveStep)
        return self.inner.shelter.pack(tensor)

    def _unpack(self, packed: Any) -> torch.Tensor:
        assert isinstance(self.inner, ReactiveStep)
        return self.inner.shelter.unpack(packed)


def _nothing() -> None:
    pass
