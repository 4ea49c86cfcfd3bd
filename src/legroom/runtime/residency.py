"""What autograd saved, where its bytes are now, and how they come back.

An `Entry` is one saved storage. Autograd gets `Handle`s to it, one a saved view. The rule that makes eviction safe:
**a storage is copied or dropped only while nothing but its own handles refers to it.** Then nobody, neither an in-
place op on a sibling view nor a numpy array over the same bytes, can change it between the copy and its use, and
freeing it frees memory. Handles count uses by their own lifetime, never by unpack calls: unpack may come twice, in
any order, or never.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._C import _DisableTorchDispatch as no_dispatch

from legroom.runtime.device import Copy, Device, HostCopy

if TYPE_CHECKING:
    from legroom.runtime.lineage import Node

_use_count: Callable[[int], int] = torch._C._storage_Use_Count  # type: ignore[attr-defined]


def _count_of_sole_owner() -> int:
    """What the use count reads for a storage with one tensor: the call itself may hold one more."""
    alone = torch.empty(1)
    key = storage_key(alone)
    return _use_count(key)


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a storage for as long as somebody holds it."""
    return tensor.untyped_storage()._cdata


_ALONE = _count_of_sole_owner()


def is_sole_owner(tensor: torch.Tensor) -> bool:
    """Whether nothing but this tensor refers to its memory."""
    return _use_count(storage_key(tensor)) == _ALONE


class View:
    """How one saved tensor lies in its storage, and, while it is in memory, the tensor itself."""

    __slots__ = ("entry", "layout", "moved_to", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, entry: Entry) -> None:
        self.entry = entry  # whose `views` it is in
        self.tensor: torch.Tensor | None = tensor.detach()
        self.version: int = tensor._version
        self.moved_to: tuple[int, str] | None = None  # version and type, where it was written in place before it left

    def check(self) -> None:
        """Plain PyTorch's check, which saved-tensor hooks switch off."""
        if self.tensor is not None:
            if self.tensor._version != self.version:
                raise modified_in_place(self.tensor.type(), list(self.tensor.shape), self.tensor._version, self.version)
        elif self.moved_to is not None:
            raise modified_in_place(self.moved_to[1], list(self.layout[1]), self.moved_to[0], self.version)

    def let_go(self) -> None:
        """Remember the layout and release the tensor."""
        tensor = self.tensor
        if tensor is None:
            return
        self.layout = layout_of(tensor)
        if tensor._version != self.version:
            self.moved_to = tensor._version, tensor.type()
        self.tensor = None

    def over(self, held: torch.Tensor) -> torch.Tensor:
        """The same view of bytes that came back.

        Never `held` itself: whoever gets this holds it for as long as it likes, and is known by a tensor of its own.
        """
        tensor = laid_out(self.layout, held)
        return tensor.detach() if tensor is held else tensor


# How a tensor lies in its storage: dtype, size, stride, offset, and whether it is to be conjugated and negated.
Layout = tuple[torch.dtype, torch.Size, tuple[int, ...], Any, bool, bool]


def layout_of(tensor: torch.Tensor) -> Layout:
    dtype = tensor.dtype
    return (
        dtype,
        tensor.size(),
        tensor.stride(),
        tensor.storage_offset(),
        dtype.is_complex and tensor.is_conj(),
        tensor.is_neg(),
    )


def laid_out(layout: Layout, held: torch.Tensor) -> torch.Tensor:
    """A tensor with this layout over the storage of `held`; `held` itself where it lies so already."""
    dtype, size, stride, offset, conj, neg = layout
    if (
        held.dtype is dtype
        and held.size() == size
        and held.stride() == stride
        and held.storage_offset() == offset
        and (dtype.is_complex and held.is_conj()) == conj
        and held.is_neg() == neg
    ):
        return held
    view = torch.empty(0, dtype=dtype, device=held.device)
    view.set_(held.untyped_storage(), offset, size, stride)
    if conj:
        view = torch._C._conj(view) if hasattr(torch._C, "_conj") else view.conj()
    return torch._neg_view(view) if neg else view


class Entry:
    """One saved storage: in memory (views or `base` hold it), on the host (`host`), or to be replayed (`node`)."""

    # What most entries never change stands here: thousands are made in a step.
    base: torch.Tensor | None = None
    host: HostCopy | None = None
    saving: Copy | None = None
    loading: Copy | None = None
    node: Node | None = None
    pins = 0  # dropped entries whose replay reads this one
    settled = False  # back for good: it will not be dropped again in this step
    gap_start = -1

    def __init__(self, ledger: Ledger, number: int, key: int, nbytes: int) -> None:
        self.ledger = ledger
        self.number = number
        self.key = key
        self.nbytes = nbytes
        self.views: list[View] = []
        self.generation = ledger.generation

    @property
    def in_memory(self) -> bool:
        return self.key != 0

    def exclusive(self) -> bool:
        """Whether nothing but this entry refers to its bytes."""
        if self.key == 0 or self.loading is not None:
            return False
        count = _ALONE if self.base is not None else _ALONE - 1
        for view in self.views:
            if view.tensor is not None:
                count += 1
        return _use_count(self.key) == count

    def start_saving(self, *, waits: bool = False) -> None:
        """waits: it is released at once."""
        if self.host is None:
            self.host, self.saving = self.ledger.device.copy_out(self.flat(), waits=waits)

    def release(self) -> None:
        """Free the bytes; they must be on the host or replayable by now."""
        if self.saving is not None:
            saving, self.saving = self.saving, None
            try:
                saving.wait()
            except BaseException:
                if self.host is not None:
                    self.host.drop()
                self.host = None  # the bytes never arrived: the copy in memory is the only one
                raise
        for view in self.views:
            view.let_go()
        self.ledger.by_key.pop(self.key, None)
        self.base = None
        self.key = 0

    def start_loading(self, *, waits: bool = False) -> None:
        """waits: it is read at once."""
        if self.key == 0:
            assert self.host is not None
            base = self.ledger.device.allocate(self.nbytes)
            self.loading = self.ledger.device.copy_in(self.host, base, waits=waits)
            self.adopt(base)

    def finish_loading(self) -> None:
        if self.loading is not None:
            loading, self.loading = self.loading, None
            loading.wait()

    def adopt(self, base: torch.Tensor) -> None:
        """Take bytes that came back, from the host or from a replay: any tensor over all of the storage's life."""
        self.base = base
        self.key = storage_key(base)
        self.ledger.by_key[self.key] = self

    def flat(self) -> torch.Tensor:
        """All bytes as one tensor."""
        base = self.base
        if base is None or base.dtype is not torch.uint8 or base.dim() != 1 or base.numel() != self.nbytes:
            held = self.a_tensor()
            with no_dispatch():
                self.base = base = torch.empty(0, dtype=torch.uint8, device=held.device).set_(held.untyped_storage())
        return base

    def a_tensor(self) -> torch.Tensor:
        """Some tensor over its bytes, which are in memory."""
        return self.base if self.base is not None else next(v.tensor for v in self.views if v.tensor is not None)

    def join(self, other: Entry) -> None:
        """Leave these bytes for those of another entry, which are the same: its handles are the other's from now on.

        Nobody else may refer to either.
        """
        if other.in_memory:
            other.flat()  # which keeps them: the views that they came with may go first
        for view in self.views:
            view.let_go()
            view.entry = other
        other.views += self.views
        self.views = []
        if self.pins:
            self.ledger.pin_instead(self, other)
        self.node = None
        self.die()

    def forget(self, view: View) -> None:
        """A handle is gone. With the last one the storage dies, unless a dropped entry is to be made from it."""
        views = self.views
        if len(views) > 1:
            views.remove(view)
        elif not self.pins:
            self._hand_back(view.tensor)
            views.clear()
            self.die()
        else:
            if self.key != 0:
                self.flat()  # the view is about to go, and with it the last reference to these bytes
            views.clear()
            self._lapse()

    def _hand_back(self, tensor: torch.Tensor | None) -> None:
        """To a leaf that held these bytes when something made from them was dropped, before they were saved as well."""
        node = self.node
        if node is None or node.maker is not None or not node.relied:
            return
        self.start_loading(waits=True)
        self.finish_loading()
        node.hold(tensor if tensor is not None else self.flat())
        node.entry = self.node = None

    def expire(self, waiting: list[Entry]) -> None:
        """Nobody saved it any more, and now nothing that was dropped counts on it either. waiting: see `die`."""
        self._hand_back(None)
        self.die(waiting)

    def _lapse(self) -> None:
        """The program is through with it. What is made from it can be made from its own sources: let the bytes go."""
        if self.in_memory and self.host is None and self.node is not None and self.node.maker is not None:
            sources = self.node.sources()
            if sources is not None:
                self.ledger.unpin(self)
                self.ledger.pin(self, sources)
                self.ledger.by_key.pop(self.key, None)
                self.base = None
                self.key = 0

    def settle(self) -> None:
        """It will not be dropped again, nor read by a replay of what is dropped later: what it was made from may go,
        unless somebody counts on these very bytes. Of a leaf nothing goes, and what was dropped before it was saved has
        it without a pin."""
        self.settled = True
        if not self.pins and self.node is not None and self.node.maker is not None:
            self.node.entry = None
            self.node = None

    def die(self, waiting: list[Entry] | None = None) -> None:
        """waiting: of those in it somebody else will see to what they were made from."""
        in_memory = self.key != 0
        if self.saving is not None or self.loading is not None:
            self._settle()
        self.ledger.by_key.pop(self.key, None)
        self.base = None
        self.key = 0
        if self.host is not None:
            self.host.drop()
            self.host = None
        node, self.node = self.node, None
        ledger = self.ledger
        if node is not None:
            if waiting is None:
                ledger.unpin(self)
            else:
                waiting.append(self)
        ledger.entries -= 1
        if ledger.on_death is not None:
            ledger.on_death(self, in_memory)

    def _settle(self) -> None:
        """A thread may still work on these bytes: wait, and let its error be; nobody wants them any more."""
        for copy in (self.saving, self.loading):
            if copy is not None:
                with contextlib.suppress(Exception):
                    copy.wait()
        self.saving = self.loading = None


class Handle:
    """What autograd holds for one saved tensor."""

    __slots__ = ("view",)

    def __init__(self, view: View) -> None:
        self.view = view

    @property
    def entry(self) -> Entry:
        return self.view.entry

    def __del__(self) -> None:
        view = self.view
        view.entry.forget(view)


class Kept:
    """A saved tensor that stays: too small, not ours to move, or never free to go."""

    __slots__ = ("generation", "number", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, number: int, generation: int) -> None:
        # Not itself where it holds the graph that holds this.
        self.tensor = tensor.detach() if tensor.grad_fn is not None else tensor
        self.version = tensor._version
        self.number = number
        self.generation = generation

    def unpack(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            self.fail()
        return self.tensor

    def fail(self) -> NoReturn:
        raise modified_in_place(self.tensor.type(), list(self.tensor.shape), self.tensor._version, self.version)


def modified_in_place(kind: str, shape: list[int], now: int, expected: int) -> RuntimeError:
    """Plain PyTorch's error, which saved-tensor hooks switch off."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {shape}] is at version {now}; expected version {expected} instead. Hint: enable anomaly detection to "
        "find the operation that failed to compute its gradient, with torch.autograd.set_detect_anomaly(True)."
    )


def number_of(packed: Handle | Kept, generation: int) -> int:
    """The number its step gave to the storage behind a saved tensor; -1 where that was another step."""
    owner: Entry | Kept = packed.entry if isinstance(packed, Handle) else packed
    return owner.number if owner.generation == generation else -1


class Ledger:
    """All entries of a room. Handles may outlive the step that made them, so the ledger belongs to the room."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.by_key: dict[int, Entry] = {}
        self.entries = 0
        self.counted = False  # whether all garbage from before the first step has been collected
        self.generation = 0  # counts steps: numbers of storages mean something within one step only
        self.pinned: dict[int, list[Entry]] = {}
        self.on_death: Callable[[Entry, bool], None] | None = None

    def entry_of(self, storage: torch.UntypedStorage, number: int) -> Entry:
        key = storage._cdata
        entry = self.by_key.get(key)
        if entry is None:
            entry = Entry(self, number, key, storage.nbytes())
            self.by_key[key] = entry
            self.entries += 1
        return entry

    def handle(self, entry: Entry, tensor: torch.Tensor) -> Handle:
        view = View(tensor, entry)
        entry.views.append(view)
        if entry.host is not None:
            # Saved again after it had been copied out: the copy may be old by now.
            entry.finish_loading()
            entry._settle()
            entry.host.drop()
            entry.host = None
        return Handle(view)

    def pin(self, entry: Entry, frontier: list[Entry]) -> None:
        for needed in frontier:
            needed.pins += 1
        self.pinned[id(entry)] = frontier

    def pin_instead(self, entry: Entry, other: Entry) -> None:
        """What counts on an entry counts on another one from now on."""
        for frontier in self.pinned.values():
            for place, needed in enumerate(frontier):
                if needed is entry:
                    frontier[place] = other
                    entry.pins -= 1
                    other.pins += 1

    def unpin(self, entry: Entry) -> None:
        """What it was made from may go. Not by calls within calls: a chain of thousands may go at once."""
        waiting = [entry]
        while waiting:
            for needed in self.pinned.pop(id(waiting.pop()), ()):
                needed.pins -= 1
                if not needed.pins:
                    if not needed.views:
                        needed.expire(waiting)
                    elif needed.settled:
                        needed.settle()


def saved_elsewhere(tensor: Any) -> bool:
    """Tensors whose bytes are not a plain strided storage: kept as they are."""
    return (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor._is_zerotensor()  # zeros that autograd made without memory
    )


def saved_by_python() -> bool:
    """Asked by a hook: whether a `torch.autograd.Function` is saving. Its backward may write to what it has saved, as
    long as that is its own; ops of PyTorch do not."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame.f_code is _APPLY


_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
