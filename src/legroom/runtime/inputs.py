"""With what a model is called: what tells one step from another before anything is saved."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

Signature = tuple[object, ...]
_VALUES = (int, float, bool, str, type(None))
_DEEPEST = 8  # batches are dictionaries of lists of tensors; what lies deeper is taken to be the same


def signature_of(value: object, depth: int = 0) -> object:
    """Shapes and types of tensors, and plain values, as they lie in the arguments."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.device.type
    if isinstance(value, _VALUES):
        return value
    if depth < _DEEPEST and isinstance(value, dict):
        return tuple((str(name), signature_of(item, depth + 1)) for name, item in value.items())
    if depth < _DEEPEST and isinstance(value, (list, tuple)):
        return tuple(signature_of(item, depth + 1) for item in value)
    return type(value).__name__


def can_be_watched(model: torch.nn.Module | None) -> bool:
    """Not where it is compiled: a hook more would compile it anew."""
    return model is not None and not hasattr(model, "_orig_mod") and getattr(model, "_compiled_call_impl", None) is None


class InputWatch:
    """Sees the calls of a model during a step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.calls: list[Signature] = []
        self.on_call: Callable[[int, Signature], None] | None = None
        self._listens = False
        handle = model.register_forward_pre_hook(_Hook(weakref.ref(self)), with_kwargs=True)
        self.close = weakref.finalize(self, handle.remove)

    def begin(self) -> None:
        self.calls = []
        self._listens = True

    def end(self) -> None:
        self._listens = False
        self.on_call = None

    def hear(self, args: Iterable[Any], kwargs: dict[str, Any]) -> None:
        if self._listens:
            signature = (signature_of(tuple(args)), signature_of(kwargs))
            self.calls.append(signature)
            if self.on_call is not None:
                self.on_call(len(self.calls) - 1, signature)


class _Hook:
    """Lies in the model, which may be copied and saved: copies do not listen."""

    __slots__ = ("_watch",)

    def __init__(self, watch: Callable[[], InputWatch | None]) -> None:
        self._watch = watch

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        watch = self._watch()
        if watch is not None:
            watch.hear(args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nobody,)


def _nobody() -> None:
    return None
