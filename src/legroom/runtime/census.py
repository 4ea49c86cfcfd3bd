"""What is alive on the device before a step, what each storage is, and which of it goes away during the step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from legroom.alloclog import FREED, MOVED, mark
from legroom.ir import Kind
from legroom.runtime.device import Device
from legroom.runtime.residency import saved_elsewhere


class _Watch(weakref.ref[torch.UntypedStorage]):
    """Tells when a storage dies, whoever held it last: its Python object lives as long as it does."""

    __slots__ = ("key",)
    key: int


class Census:
    """What is alive at the start of a step: one count of all tensors."""

    def __init__(
        self,
        device: Device,
        model: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        *,
        thorough: bool,
        what: bool,
    ) -> None:
        """thorough: look for garbage among objects that have been there for long, too. what: not only how much it is,
        for which a device that counts needs no look at every object of the program."""
        # Garbage still counted now would be freed at a moment nobody can predict.
        gc.collect(2 if thorough else 1)
        self.kinds: dict[int, Kind] = {}
        self.names: dict[int, str] = {}
        self.refs: dict[int, StorageWeakRef] = {}
        self.nbytes: dict[int, int] = {}
        # To ask every storage at every tick and op takes a time that grows with the square of a model's depth: 0.9 of
        # 5 s for a recorded step of T5 with 12 layers. So they are heard of when they die.
        self._watches: list[_Watch] = []
        self._watched: dict[int, int] = {}  # bytes by storage
        self._dead: list[Any] = []  # watches, not noted yet
        alive = device.alive_bytes()
        if what or alive is None:
            for name, tensor, kind in _known(model, optimizer):
                self._add(tensor, device.name, kind, name)
            for tensor in _all_tensors():
                self._add(tensor, device.name, "input", "")
        self.base_bytes = alive if alive is not None else sum(self.nbytes.values())
        if alive is not None:
            return  # such a log reports every free
        for key, nbytes in self.nbytes.items():
            if nbytes and self.kinds[key] not in ("parameter", "buffer"):
                self._watch(key, nbytes)

    def _watch(self, key: int, nbytes: int) -> None:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.refs[key].cdata)
        if storage is not None:
            watch = _Watch(storage, self._dead.append)
            watch.key = key
            self._watches.append(watch)
            self._watched[key] = nbytes

    def _add(self, tensor: torch.Tensor, device: str, kind: Kind, name: str) -> None:
        if saved_elsewhere(tensor) or tensor.device.type != device:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.kinds:
            self.kinds[key] = kind
            self.names[key] = name
            self.refs[key] = StorageWeakRef(storage)
            self.nbytes[key] = storage.nbytes()

    def persistent(self, key: int) -> bool:
        ref = self.refs.get(key)
        return ref is not None and not ref.expired()

    def note_move(self, key: int) -> None:
        """A storage is about to be evicted: the log would not report that free either, and it is no death."""
        nbytes = self._watched.pop(key, 0)
        if nbytes:
            with mark(f"{MOVED}{nbytes}"):
                pass

    def note_deaths(self) -> None:
        """The log does not report frees of what was allocated before it began: write them into it."""
        while self._dead:
            nbytes = self._watched.pop(self._dead.pop().key, 0)
            if nbytes:
                with mark(f"{FREED}{nbytes}"):
                    pass


def _known(
    model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None
) -> Iterable[tuple[str, torch.Tensor, Kind]]:
    if model is not None:
        for name, parameter in model.named_parameters():
            yield name, parameter, "parameter"
            if parameter.grad is not None:
                yield f"{name}.grad", parameter.grad, "gradient"
        for name, buffer in model.named_buffers():
            yield name, buffer, "buffer"
    if optimizer is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield "", parameter, "parameter"
                if parameter.grad is not None:
                    yield "", parameter.grad, "gradient"
        for state in optimizer.state.values():
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    yield name, value, "optimizer-state"


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _all_tensors() -> list[torch.Tensor]:
    """All plain tensors that the interpreter knows: what refers to their types, as each object does to its own.

    Not gc.get_objects(): that takes five times as long, and hands out tuples that another thread is still filling,
    whose `tuple(generator)` then fails. By type(), not isinstance(): the latter asks the object, and lazy proxies
    answer with side effects.
    """
    return [o for o in gc.get_referrers(*_PLAIN) if type(o) in _PLAIN]


class Lasting:
    """What gradients and the optimizer's state take, told at every step before it begins."""

    def __init__(self, model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None) -> None:
        self._model, self._optimizer = model, optimizer
        # Which state was counted, how many tensors and numbers were in it, and one of the tensors. It is not to be kept
        # alive: a program may load another.
        self._counted: tuple[int, int, weakref.ref[torch.Tensor] | None] = 0, 0, None
        self._state_bytes = 0

    def nbytes(self) -> int:
        groups = self._optimizer.param_groups if self._optimizer is not None else ()
        gradients = [p.grad for group in groups for p in group["params"]] if groups else []
        if not gradients and self._model is not None:
            gradients = [p.grad for p in self._model.parameters()]
        return self._of_state() + sum(gradient.nbytes for gradient in gradients if gradient is not None)

    def _of_state(self) -> int:
        """Counted anew where there is more of it or less, or where it was loaded. To look at each tensor of Adam's took
        0.6 ms of every step of a T5 with 12 layers."""
        if self._optimizer is None:
            return 0
        state = self._optimizer.state
        before, count, one = self._counted
        entries = sum(map(len, state.values()))
        if id(state) != before or entries != count or (one is not None and one() is None):
            tensors = [v for values in state.values() for v in values.values() if isinstance(v, torch.Tensor)]
            self._counted = id(state), entries, weakref.ref(tensors[0]) if tensors else None
            self._state_bytes = sum(tensor.nbytes for tensor in tensors)
        return self._state_bytes


def state_bytes(
    model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None, device: str
) -> list[tuple[str, int]]:
    """What parameters, gradients and the optimizer's state take, the last two also where they are not made yet."""
    seen: set[int] = set()
    sizes: dict[str, int] = {"parameters": 0, "gradients": 0, "optimizer state": 0, "buffers": 0}
    trained: dict[int, torch.Tensor] = {}
    for _, tensor, kind in _known(model, optimizer):
        if saved_elsewhere(tensor) or tensor.device.type != device:
            continue
        key = tensor.untyped_storage()._cdata
        if key in seen:
            continue
        seen.add(key)
        nbytes = tensor.untyped_storage().nbytes()
        match kind:
            case "parameter":
                sizes["parameters"] += nbytes
                if tensor.requires_grad:
                    sizes["gradients"] += nbytes
                    trained[id(tensor)] = tensor
            case "buffer":
                sizes["buffers"] += nbytes
            case "optimizer-state":
                sizes["optimizer state"] += nbytes
    if optimizer is not None:
        fresh = [t for g in optimizer.param_groups for t in g["params"] if t.requires_grad and t not in optimizer.state]
        sizes["optimizer state"] += sum(t.untyped_storage().nbytes() * _states_per_parameter(optimizer) for t in fresh)
    return [(name, nbytes) for name, nbytes in sizes.items() if nbytes]


def _states_per_parameter(optimizer: Any) -> int:
    """Tensors of a parameter's size that PyTorch's own optimizers make at their first step; 0 for unknown ones."""
    options = optimizer.defaults
    match type(optimizer).__name__:
        case "Adam" | "AdamW" | "NAdam" | "RAdam" | "Adamax":
            return 3 if options.get("amsgrad") else 2
        case "SGD":
            return 1 if options.get("momentum") else 0
        case "RMSprop":
            return 1 + bool(options.get("momentum")) + bool(options.get("centered"))
        case "Adagrad":
            return 1
        case "Adadelta":
            return 2
        case _:
            return 0
