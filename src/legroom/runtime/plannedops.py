"""The ops of a planned step that its plan replays: how each was made, noted while the program runs.

They are seen one by one by a dispatch mode, or written down from calls of which all is known (see `knowncalls`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch._C import _DisableTorchDispatch as no_dispatch

from legroom.runtime.knowncalls import KnownCall, Recording, Witness
from legroom.runtime.knownsizes import KnownAt
from legroom.runtime.lineage import Lineage, Made, Statistics, form_of, hidden_writes, written_tensors
from legroom.runtime.program import Program
from legroom.runtime.residency import Entry, saved_elsewhere

MOST_OPS = 10**9  # of a step
Saved = Callable[[], tuple[int, ...]]  # the storages that were saved in a call until now


class PlannedOps:
    """The op handler of one planned step."""

    def __init__(
        self,
        program: Program,
        lineage: Lineage,
        entries: dict[int, Entry],
        device_type: str,
        *,
        first: int,
        kept: Callable[[], frozenset[int]],
        known_at: KnownAt | None,
    ) -> None:
        """entries: of this step, by storage. first: ops are numbered from there on, so that those of steps whose graphs
        live on are others. kept: the storages of the model and the optimizer; takes milliseconds. known_at: the input's
        size, where that varies."""
        self.first = first
        self.number = 0  # of the next op, in the step
        self.made: dict[int, ref[Made]] = {}  # by number
        self.statistics: dict[int, torch.Tensor] = {}  # of the call that is being made, by storage
        self.known_at = known_at
        self.learned: dict[int, KnownCall | None] = {}  # at this size, by place
        self.witness = Witness(device_type, lineage, entries)
        self.learning = False  # all calls of the step
        self.strange = 0  # ops that were not those of the trace, where calls are learned
        self._program = program
        self._lineage = lineage
        self._entries = entries
        self._device_type = device_type
        self._kept = kept
        self._recorded = program.recorded
        self._recording: tuple[Recording, Saved] | None = None  # of the call that is being made
        self._witnessing = False
        self._stop = MOST_OPS
        self._weights_written = False  # whether the program may have written to one in this step
        self._kept_keys: frozenset[int] | None = None

    def count_in(self, numbers: range) -> None:
        """The ops that come now are these, or others."""
        self.number, self._stop = numbers.start, numbers.stop

    def learn_all(self) -> None:
        self.learning = self._witnessing = True

    def note_no_more(self) -> None:
        """The step is another one than was planned for."""
        self._recorded = {}
        self.learning = self._witnessing = False

    # one by one

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = self.number
        self.number = number + 1
        # A call may run more ops than before: they must not pass for those of the next one.
        expected = self._recorded.get(number) if number < self._stop else None
        if self.learning:
            self.strange += self._program.names.get(number, name := str(func)) != name
        if expected is not func:
            if type(expected) is not str or expected != str(func):
                return self._unplanned(number, func, args, kwargs)
            self._recorded[number] = func  # from now on known by itself, not by its name
        if torch._C._len_torch_dispatch_stack():  # a mode of the user's is not to see what is done here
            with no_dispatch():
                made = self._noted(number, func, args, kwargs)
            result = self._write(func, args, kwargs, made) if made.form.written else func(*args, **kwargs)
            with no_dispatch():
                if number in self._program.statistics:
                    made.statistics = Statistics.of(result[1], result[2])
                self._lineage.made(made, result)
            return result
        made = self._noted(number, func, args, kwargs)
        result = self._write(func, args, kwargs, made) if made.form.written else func(*args, **kwargs)
        if number in self._program.statistics:
            made.statistics = Statistics.of(result[1], result[2])
        self._lineage.made(made, result)
        return result

    def _unplanned(self, number: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Not planned to be replayed; or not the op that was, hence not one whose replay was proven: what needed it is
        swapped instead."""
        if self._witnessing:
            self.witness.saw(number, func, args, None, [])
        form = form_of(func)
        if form.written and self._lineage.is_read():
            return self._write(func, args, kwargs, None)
        if form.has_statistics:
            with no_dispatch():
                self._lineage.before_write(hidden_writes(func, args))
        if form.reshapes and not saved_elsewhere(args[0]):
            with no_dispatch():
                self._lineage.reshaped(args[0])
        return func(*args, **kwargs)

    def _noted(self, number: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Made:
        made = Made(self.first + number, func, args, kwargs, self._lineage.node_of)
        self.made[number] = ref(made)
        if self._witnessing:
            self.witness.saw(number, func, args, made, list(made.keys))
        return made

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Made | None) -> Any:
        with no_dispatch():
            self._lineage.before_write(written_tensors(func, args, kwargs))
        result = func(*args, **kwargs)
        with no_dispatch():
            self._lineage.after_write(func, args, kwargs, made)
        return result

    # by the calls that make them

    def record(self, place: int, known: KnownCall, func: Any, args: Any, kwargs: Any, saved: Saved) -> Any:
        """Make a call whose ops are known. NotImplemented where it is another than the one that was learned. place:
        among the calls that are known at this size."""
        tensors = known.tensors(args, kwargs, self._device_type)
        if tensors is None or (known.casts_weights and self._weights_written):
            return NotImplemented
        self.statistics.clear()  # of a call that failed
        told = self.known_at is not None and place in self.known_at.told
        recording = Recording(known, tensors, self._lineage, self._entries, self.first, self._saved_as, told=told)
        within, self._recording = self._recording, (recording, saved)
        try:
            result = func(*args, **kwargs)
        finally:
            self._recording = within
        recording.ended(result, saved())
        for inner, op in zip(known.ops, recording.made, strict=False):
            self.made[inner.number] = ref(op)
        return result

    def trace_back(self, entry: Entry) -> None:
        """An entry is to go before the call that made it is through: note by what, if that is known."""
        if entry.node is None and self._recording is not None:
            recording, saved = self._recording
            recording.is_saved(entry, saved())

    def learn_call(self, place: int, func: Any, args: Any, kwargs: Any, saved: Saved) -> Any:
        """Make a call whose ops are looked at, to know it from now on."""
        self.witness.begin(func, args, kwargs)
        self._witnessing = True
        result = None
        try:
            result = func(*args, **kwargs)
        finally:
            self._witnessing = False
            known = self.witness.told(result, saved())
        self.learned[place] = self._program.with_statistics(known) if known is not None else None
        return result

    def _saved_as(self, number: int) -> torch.Tensor | None:
        """A tensor over a storage that was saved in the call that was just made."""
        tensor = self.statistics.pop(number, None)
        if tensor is None:
            entry = self._entries.get(number)
            if entry is not None and entry.views and entry.in_memory:
                tensor = entry.a_tensor()
        return tensor

    def may_write(self, arguments: Iterable[Any]) -> None:
        """Note whether one of these is a weight: autocast goes on handing out the copy that it made of it before, and a
        call does not show whether it made one."""
        for value in arguments:
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                # What has been computed is no weight, and most of what is written in place has been.
                is_weight = isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.is_leaf
                if is_weight and (tensor.requires_grad or self._is_kept(tensor)):
                    self._weights_written = True

    def _is_kept(self, tensor: torch.Tensor) -> bool:
        if self._kept_keys is None:
            self._kept_keys = self._kept()
        try:
            return tensor.untyped_storage()._cdata in self._kept_keys
        except (NotImplementedError, RuntimeError):  # no storage of its own
            return False
