"""With what a model is called: what tells one step from another before anything is saved."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import math
import threading
from collections.abc import Callable, Iterable, Sized
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

Signature = tuple[object, ...]
_PLAIN = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, Enum)
_DEEPEST = 8  # batches are dictionaries of lists of tensors
_MOST_ITEMS = 4096  # of all lists, dictionaries and objects in one call: what has more is no batch
MOST_VALUES = 4  # of one plain argument; one with more changes from call to call, and says nothing about the step
_trained = attrgetter("requires_grad")


class Shape(NamedTuple):
    """What of a tensor decides which ops run, and on how many bytes."""

    size: tuple[int, ...]
    dtype: torch.dtype
    device: str
    trained: bool


class Free(NamedTuple):
    """A plain argument that changes from call to call. Equal to itself: what it does to a step is seen in the step."""

    name: str


class _Unknown:
    """Equal to nothing but itself."""

    __slots__ = ("kind", "name")

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self.kind = kind


class Call(NamedTuple):
    """A call of the model, taken apart: what may change from step to step, and all the rest."""

    kind: object  # equal where nothing but sizes differs, as far as can be told
    features: tuple[int, ...]  # the sizes of all tensors, one after the other
    input_bytes: int  # of those tensors, on the device that trains
    free: tuple[str, ...] = ()  # arguments that change from call to call and are no sizes
    unknown: tuple[str, ...] = ()  # arguments that cannot be looked into

    @property
    def tells_all(self) -> bool:
        """Whether nothing else among the arguments may be a size."""
        return bool(self.features) and not self.free and not self.unknown


class PlainValues:
    """What each plain argument has been, over all calls of a model."""

    def __init__(self) -> None:
        self._seen: dict[str, set[object]] = {}

    @property
    def some_free(self) -> bool:
        return any(len(seen) > MOST_VALUES for seen in self._seen.values())

    def look(self, name: str, value: object) -> object:
        seen = self._seen.setdefault(name, set())
        if len(seen) <= MOST_VALUES:
            try:
                seen.add(value)
            except TypeError:  # an enumeration may have members that are no keys
                return _Unknown(name, type(value).__name__)
        return value if len(seen) <= MOST_VALUES else Free(name)


class _Reader:
    """One look at the arguments of a call."""

    def __init__(self, values: PlainValues | None) -> None:
        self._values = values
        self._items = _MOST_ITEMS

    def read(self, name: str, value: object, depth: int = 0) -> object:
        if isinstance(value, torch.Tensor):
            return _shape_of(value) or _Unknown(name, type(value).__name__)
        if isinstance(value, _PLAIN):
            return self._plain(name, value)
        if isinstance(value, torch.Generator):
            return type(value)  # which numbers it draws says nothing about sizes
        if depth >= _DEEPEST:
            return _Unknown(name, type(value).__name__)
        if isinstance(value, tuple | list):
            if value and all(isinstance(item, _PLAIN) for item in value):
                return self._plain(name, tuple(value))
            if not self._may_read(value):
                return _Unknown(name, type(value).__name__)
            return tuple(self.read(f"{name}[{i}]", item, depth + 1) for i, item in enumerate(value))
        if isinstance(value, collections.UserDict):
            value = value.data
        if isinstance(value, dict):
            if not self._may_read(value):
                return _Unknown(name, type(value).__name__)
            return self._named(name, dict.items(value), depth)
        attributes = _attributes(value)
        if attributes is None or not self._may_read(attributes):
            return _Unknown(name, type(value).__name__)
        return type(value), self._named(name, attributes.items(), depth)

    def _may_read(self, items: Sized) -> bool:
        """Whether so many more may be looked at in this call; a list may hold itself, several times over."""
        self._items -= len(items)
        return self._items >= 0

    def _named(self, name: str, items: Iterable[tuple[object, object]], depth: int) -> object:
        return tuple(
            (str(key), self.read(f"{name}.{key}" if name else str(key), item, depth + 1)) for key, item in items
        )

    def _plain(self, name: str, value: object) -> object:
        return value if self._values is None else self._values.look(name, value)


def _shape_of(tensor: torch.Tensor) -> Shape | None:
    """None where it has none that is plain numbers, as tensors of tensors have."""
    if tensor.is_nested:
        return None
    return Shape(tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.requires_grad)


def _attributes(value: object) -> dict[str, object] | None:
    """Of a batch that is an object; None for what is none, and may do something when it is looked at."""
    if callable(value) or inspect.ismodule(value) or hasattr(type(value), "__next__"):
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    try:
        return dict(vars(value)) or None
    except TypeError:  # it has none
        return None


def signature_of(value: object, name: str = "", values: PlainValues | None = None) -> object:
    """Shapes and types of tensors, and plain values, as they lie in the arguments. What is none of these is equal to
    nothing: whether it has changed cannot be told. values: tells those that change all the time from the others."""
    return _Reader(values).read(name, value)


def call_of(signature: Signature, device_type: str) -> Call:
    """What cannot be looked into counts by its type alone."""
    features: list[int] = []
    free: list[str] = []
    unknown: list[str] = []
    nbytes = 0

    def without_sizes(item: object) -> object:
        nonlocal nbytes
        if type(item) is Shape:
            features.extend(item.size)
            if item.device == device_type:
                nbytes += math.prod(item.size) * item.dtype.itemsize
            return len(item.size), item.dtype, item.device, item.trained
        if type(item) is Free:
            free.append(item.name)
            return item
        if type(item) is _Unknown:
            unknown.append(f"{item.name} ({item.kind})")
            return item.name, item.kind
        return tuple(map(without_sizes, item)) if type(item) is tuple else item

    kind = without_sizes(signature)
    return Call(kind, tuple(features), nbytes, tuple(free), tuple(unknown))


def remarks(call: Call) -> list[str]:
    """What of a call plans cannot follow, for the report."""
    free = [f"the argument {name} changes from call to call: plans do not follow it" for name in call.free]
    return free + [f"the argument {name} cannot be looked into: plans do not follow it" for name in call.unknown]


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
        self._values = PlainValues()
        self._names = _argument_names(model)
        self._thread = 0
        self._handle: RemovableHandle | None = None

    @property
    def some_free(self) -> bool:
        """Whether calls that compare equal may still differ in a plain argument."""
        return self._values.some_free

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
            named = {**dict(zip(self._names, args, strict=False)), **kwargs}
            others = args[len(self._names) :]
            signature = (state, signature_of(named, "", self._values), signature_of(others, "args", self._values))
        self.calls.append(signature)
        if self.on_call is not None:
            self.on_call(len(self.calls) - 1, signature)


def _argument_names(model: torch.nn.Module) -> list[str]:
    """Of those that may be given by their place."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


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
