"""The reactive policy: stay inside a budget without knowing the future.

Everything autograd saves leaves memory as soon as nothing else refers to it, and comes back when it is asked for. No
step can take less, so whatever budget can be met is met from the first step on; the price is one copy out and back of
what is saved, paid only while a step is not known. A sheltered step that captures also runs the recorder; one that does
not, but may be taken back, keeps what ops write.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import _DisableTorchDispatch as no_dispatch

from legroom.alloclog import GONE, OWN, TICK, mark
from legroom.runtime.census import Census
from legroom.runtime.lineage import hidden_writes, written_tensors
from legroom.runtime.recorder import Recorder
from legroom.runtime.residency import Entry, Handle, Kept, Ledger, number_of, saved_elsewhere
from legroom.runtime.undo import Undo

_NOTHING = contextlib.nullcontext()


class Shelter:
    """The hooks and the op handler of one sheltered step."""

    def __init__(
        self,
        ledger: Ledger,
        device_type: str,
        *,
        recorder: Recorder | None,
        census: Census | None,
        kept: frozenset[int],
        undo: Undo | None = None,
    ) -> None:
        """undo: where nothing is recorded, hears of writes to what the census knows; a recorder tells it by itself."""
        self.ledger = ledger
        self.device_type = device_type
        self.recorder = recorder
        self.census = census
        self.kept = kept  # storages of parameters and buffers: not ours to move
        self.undo = undo
        self.tick = 0
        self.in_engine = 0
        ledger.on_death = self._died if recorder is not None else None

    # hooks

    def pack(self, tensor: torch.Tensor) -> Handle | Kept:
        with no_dispatch(), self._marked(TICK):
            tick = self._begin_tick(None)
            return self.pack_at(tick, tensor)

    def pack_at(self, tick: int, tensor: torch.Tensor) -> Handle | Kept:
        if saved_elsewhere(tensor) or tensor.device.type != self.device_type:
            if self.recorder is not None:
                self.recorder.odd_tick("pack")
            return Kept(tensor, -1, self.ledger.generation)
        storage = tensor.untyped_storage()
        number = -1
        if self.recorder is not None:
            number = self.recorder.number(tensor)
            self.recorder.tick("pack", number)
        if storage._cdata in self.kept or storage.nbytes() < self.ledger.device.smallest_swap_bytes:
            return Kept(tensor, number, self.ledger.generation)
        return self.ledger.handle(self.ledger.entry_of(storage, number), tensor)

    def unpack(self, packed: Handle | Kept) -> torch.Tensor:
        with no_dispatch(), self._marked(TICK):
            entry = packed.entry if isinstance(packed, Handle) else None
            tick = self._begin_tick(entry)
            if self.recorder is not None:
                number = number_of(packed, self.ledger.generation)
                if number >= 0:
                    self.recorder.tick("unpack", number)
                else:
                    self.recorder.odd_tick("unpack")
            if isinstance(packed, Kept):
                return packed.unpack()
            packed.view.check()
            return self._bring_back(packed.entry, packed, tick)

    def _bring_back(self, entry: Entry, packed: Any, tick: int) -> torch.Tensor:
        if not entry.in_memory:
            bring_back(entry)
            if self._recording(entry):
                assert entry.base is not None and self.recorder is not None
                self.recorder.moved(entry.number, entry.base)
                self.recorder.gap(entry, tick)
        elif self._recording(entry) and not entry.exclusive():
            assert self.recorder is not None
            self.recorder.storages[entry.number].held = True
        entry.finish_loading()
        entry.gap_start = -1
        return packed.view.tensor.detach() if packed.view.tensor is not None else packed.view.over(entry.base)

    # eviction

    def _begin_tick(self, asked_for: Entry | None) -> int:
        tick = self.tick
        self.tick += 1
        self.evict_idle(tick, asked_for)
        if self.census is not None:
            self.census.note_deaths()
        return tick

    def evict_idle(self, tick: int, asked_for: Entry | None = None) -> None:
        for entry in list(self.ledger.by_key.values()):
            if entry is asked_for:
                continue
            entry.finish_loading()  # fetched ahead by a plan that the step has left since
            if not entry.exclusive():
                continue
            if self._recording(entry):
                self._bind(entry)
            entry.start_saving(waits=True)
            if self.census is not None:
                self.census.note_move(entry.key)
            entry.release()
            if entry.gap_start < 0:
                entry.gap_start = tick

    def _recording(self, entry: Entry) -> bool:
        return self.recorder is not None and entry.number >= 0 and entry.generation == self.ledger.generation

    def _bind(self, entry: Entry) -> None:
        """Nobody can write these bytes any more: this is the version that will be asked for."""
        assert self.recorder is not None
        seen = self.recorder.storages[entry.number]
        if entry.host is None:
            self.recorder.compare(entry.number, entry.flat().untyped_storage())
            self.recorder.bind_garbage(entry.number)
        seen.gap_version = seen.version

    def _died(self, entry: Entry, in_memory: bool) -> None:
        if entry.gap_start >= 0 and self._recording(entry):
            # Evicted and never asked for again: it has to be back for its death at the latest.
            assert self.recorder is not None
            self.recorder.gap(entry, self.tick - 1)
        if not in_memory:
            with mark(f"{GONE}{self.ledger.device.rounded(entry.nbytes)}"):
                pass

    # ops

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with mark(OWN), no_dispatch():
            self.evict_idle(self.tick)
        if self.census is not None:
            self.census.note_deaths()
        if self.recorder is not None:
            return self.recorder.run(func, args, kwargs)
        if self.undo is not None:
            self._keep_written(self.undo, func, args, kwargs)
        return func(*args, **kwargs)

    def _keep_written(self, undo: Undo, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        written = [*written_tensors(func, args, kwargs), *hidden_writes(func, args)]
        if not written:
            return
        assert self.census is not None
        with mark(OWN), no_dispatch():
            plain = [t for t in written if not saved_elsewhere(t)]
            undo.before_write([t for t in plain if self.census.persistent(t.untyped_storage()._cdata)])

    def _marked(self, name: str) -> Any:
        return mark(name) if self.recorder is not None or self.census is not None else _NOTHING


def bring_back(entry: Entry) -> None:
    """From wherever its bytes can be had."""
    if entry.host is not None:
        entry.start_loading(waits=True)
        entry.finish_loading()
    else:
        replay_entry(entry)


def replay_entry(entry: Entry) -> None:
    from legroom.runtime.replay import replay

    assert entry.node is not None
    entry.adopt(replay(entry.node))
    entry.ledger.unpin(entry)


@contextlib.contextmanager
def module_paths(model: torch.nn.Module | None, recorder: Recorder) -> Iterator[None]:
    """Keep the recorder's module stack while a step runs."""
    names = {id(module): name for name, module in model.named_modules()} if model is not None else {}

    def enter(module: torch.nn.Module, _: Any) -> None:
        recorder.modules.append(names.get(id(module), type(module).__name__) or type(module).__name__)

    def leave(module: torch.nn.Module, _: Any, __: Any) -> None:
        if recorder.modules:
            recorder.modules.pop()

    handles = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def optimizer_phase(before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
    """Hear of every optimizer step, whichever optimizer it is."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    handles = [
        register_optimizer_step_pre_hook(lambda *_: before()),
        register_optimizer_step_post_hook(lambda *_: after()),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
