"""With what a model is called: what tells one step from another before anything is saved."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

Signature = tuple[object, ...]
_VALUES = (int, float, bool, str, type(None))
_DEEPEST = 8  # batches are dictionaries of lists of tensors
_trained = attrgetter("requires_grad")


class Shape(NamedTuple):
    """What of a tensor decides which ops run, and on how many bytes."""

    size: tuple[int, ...]
    dtype: torch.dtype
    device: str
    trained: bool


class _Unknown:
    """Equal to nothing but itself."""


class Call(NamedTuple):
    """A call of the model, taken apart: what may change from step to step, and all the rest."""

    kind: object  # equal where nothing but sizes differs
    features: tuple[int, ...]  # the sizes of all tensors, one after the other
    input_bytes: int  # of those tensors, on the device that trains


def signature_of(value: object, depth: int = 0) -> object:
    """Shapes and types of tensors, and plain values, as they lie in the arguments. What is none of these is equal to
    nothing: whether it has changed cannot be told."""
    if isinstance(value, torch.Tensor):
        return Shape(tuple(value.shape), value.dtype, value.device.type, value.requires_grad)
    if isinstance(value, _VALUES):
        return value
    if depth < _DEEPEST and type(value) is dict:
        return tuple((str(name), signature_of(item, depth + 1)) for name, item in value.items())
    if depth < _DEEPEST and type(value) in (list, tuple):
        return tuple(signature_of(item, depth + 1) for item in value)  # type: ignore[attr-defined]
    return _Unknown()


def call_of(signature: Signature, device_type: str) -> Call | None:
    """None where the signature holds what cannot be told from something else."""
    features: list[int] = []
    nbytes = 0

    def without_sizes(item: object) -> object:
        nonlocal nbytes
        if isinstance(item, Shape):
            features.extend(item.size)
            if item.device == device_type:
                nbytes += math.prod(item.size) * item.dtype.itemsize
            return len(item.size), item.dtype, item.device, item.trained
        if isinstance(item, _Unknown):
            raise LookupError
        return tuple(map(without_sizes, item)) if isinstance(item, tuple) else item

    try:
        kind = without_sizes(signature)
    except LookupError:
        return None
    return Call(kind, tuple(features), nbytes)


def can_be_watched(model: torch.nn.Module | None) -> bool:
    """Not where it is compiled: a hook more would compile it anew."""
    return model is not None and not hasattr(model, "_orig_mod") and getattr(model, "_compiled_call_impl", None) is None


class InputWatch:
    """Sees the calls of a model during a step. Between steps there is nothing in the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.calls: list[Signature] = []
        self.elsewhere = False  # called in another thread, where hooks of this one do not reach
        self.under_hooks = False  # of the program's own: ours could not be put in at the call
        self.on_call: Callable[[int, Signature], None] | None = None
        self._model = model
        self._parameters = list(model.parameters())
        self._thread = 0
        self._handle: RemovableHandle | None = None

    def begin(self) -> None:
        self.end()
        self.calls = []
        self._thread = threading.get_ident()
        self._handle = self._model.register_forward_pre_hook(_Hook(self), with_kwargs=True)

    def end(self) -> None:
        self.on_call = None
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def hear(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread:
            self.elsewhere = True
            return
        with torch._C.DisableTorchFunction():  # what is asked here is not a call of the program's
            state = (
                self._model.training,
                torch.is_grad_enabled(),
                torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
                sum(map(_trained, self._parameters)),
            )
            signature = (state, signature_of(args), signature_of(kwargs))
        self.calls.append(signature)
        if self.on_call is not None:
            self.on_call(len(self.calls) - 1, signature)


class _Hook:
    """Lies in the model, which may be copied and saved inside a step: copies do not listen."""

    __slots__ = ("_watch",)

    def __init__(self, watch: InputWatch | None = None) -> None:
        self._watch = watch

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._watch is not None and not torch.compiler.is_compiling():
            self._watch.hear(args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()
