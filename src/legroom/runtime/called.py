"""Steps of which nothing is known before the model is called: what is done with them is decided there.

Nothing is put in when such a step begins. The first call of the model shows the sizes of its inputs before an op has
run; then the step becomes one that follows a plan, one that is recorded, one under the reactive policy, or one that is
left alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from legroom.curve import Curve
from legroom.runtime.census import Census
from legroom.runtime.inputs import InputWatch, Signature
from legroom.runtime.modes import Interception
from legroom.runtime.shelter import Shelter
from legroom.runtime.steps import PlannedStep, Setting, ShelteredStep


class ReactiveStep:
    """Everything saved leaves at the next opportunity and comes back when it is asked for. Nothing is recorded."""

    curve: Curve | None = None
    census: Census | None = None

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._stack = contextlib.ExitStack()

    def begin(self) -> None:
        setting = self._setting
        setting.ledger.generation += 1
        shelter = Shelter(setting.ledger, setting.device_type, recorder=None, census=None, kept=setting.kept())
        self._stack.enter_context(
            Interception(shelter.pack, shelter.unpack, handler=None, entered=_nothing, left=_nothing)
        )

    def end(self, *, failed: bool) -> None:
        self._stack.close()


class LeftAlone:
    """A step that fits as it is."""

    curve: Curve | None = None
    census: Census | None = None

    def begin(self) -> None:
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
        self.inner: Decided | None = None

    @property
    def curve(self) -> Curve | None:
        return self.inner.curve if self.inner is not None else None

    def begin(self) -> None:
        self._watch.on_call = self._called

    def end(self, *, failed: bool) -> None:
        if self.inner is not None:
            self.inner.end(failed=failed)

    def _called(self, number: int, signature: Signature) -> None:
        if self.inner is not None:
            return
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            # The program would take ours off the stack in place of its own.
            self._watch.under_hooks = True
            inner: Decided = LeftAlone()
        else:
            inner = self._decide(signature, bool(_get_current_dispatch_mode_stack()))
        self.inner = inner
        inner.begin()


def _nothing() -> None:
    pass
