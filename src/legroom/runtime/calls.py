"""The program's calls into PyTorch, and the few of them that a planned step must look into.

A dispatch mode costs about 20 microseconds an op and a hook 15 a saved tensor, for all of the step, and a plan is about
a few ops and tensors only. So the first planned step counts the calls of PyTorch's functions as Python makes them, and
notes which ops and hooks ran inside each. From then on the mode is on inside the calls whose ops are replayed, unless
they follow from its arguments (see `knowncalls`), and the hooks are on inside those that save what the plan moves.
Where a step makes other calls than the one that was learned, everything is on for the rest of it.
"""

from __future__ import annotations

import gc
import sys
import sysconfig
import time
import types
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from legroom.ir import Tick, Trace
from legroom.runtime.knowncalls import KnownCall, Witness
from legroom.runtime.stacks import CALLS, OPS

# Ops that PyTorch chooses only where nobody counts calls: there, counting would change the bits.
_UNCOUNTED = ("aten._native_multi_head_attention", "aten._transformer_encoder_layer_fwd")
_WITH_FAST_WAYS = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer)
# Others may let go of a type between two looks, and a module made meanwhile goes unnoticed; and in builds where threads
# count references for themselves, nothing is known of how many there are.
_LOOK_EVERY_SECONDS = 10.0 if sysconfig.get_config_var("Py_GIL_DISABLED") else 60.0
# Functions that write to running statistics when they train, without their schema saying so.
_WITH_STATISTICS = frozenset(("batch_norm", "instance_norm", "native_batch_norm", "_batch_norm_impl_index"))
_MOST_EXTRA = 64  # calls in a row that were not there before, such as those of a line that logs now and then
_MOST_LEFT_OUT = 32
_NO_OPS = range(-(10**9), -(10**9))  # numbers of ops that are none of the plan's

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def countable(trace: Trace) -> bool:
    """Whether calls may be counted: not where that would change what is called, or compiled code would notice."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if getattr(frames, "FRAME_COUNTER", 0) or any(op.name.startswith(_UNCOUNTED) for op in trace.ops):
        return False
    return not _fast_ways.open()


class _FastWays:
    """Modules that take ways of their own, called already or not, which counting calls would take from them.

    To find them takes a look at all objects: 50 ms in a large program. So it is taken when their number may have
    changed: each object counts as a reference to its type, and so does what else there is of them.
    """

    def __init__(self) -> None:
        self._seen: tuple[int, ...] = ()
        self._until = -1.0
        self._modules: list[weakref.ref[torch.nn.Module]] = []

    def open(self) -> bool:
        """Whether there is one that is not training."""
        modules: list[Any] = [module() for module in self._modules]
        now = tuple(map(sys.getrefcount, _WITH_FAST_WAYS))
        if now != self._seen or None in modules or time.monotonic() >= self._until:
            del modules
            modules = [found for found in gc.get_referrers(*_WITH_FAST_WAYS) if isinstance(found, _WITH_FAST_WAYS)]
            self._modules = [weakref.ref(module) for module in modules]
            self._seen, self._until = now, time.monotonic() + _LOOK_EVERY_SECONDS
        return any(not module.training for module in modules if module is not None)


_fast_ways = _FastWays()


class Called(NamedTuple):
    """One call, and the numbers of the ops and ticks inside."""

    func: Any
    ops: range
    ticks: range

    def packs(self, ticks: Sequence[Tick]) -> list[int]:
        return [tick for tick in self.ticks if ticks[tick].kind == "pack"]


class Way(NamedTuple):
    """What to do about one call."""

    func: Any
    hooked: bool | None  # None: it saves nothing, as far as is known
    need: int
    known: KnownCall | None
    ops: range
    writes: bool
    written: slice | None  # of its arguments; None: any of them, by name as well
    place: int  # among the calls; -1: none


# What a call needs: nothing; to be looked into if it writes to something that matters, or moves running statistics that
# do; to be looked into.
_NOTHING, _IF_IT_WRITES, _IF_IT_TRAINS, _LOOKING = range(4)
_NO_WAY = Way(None, None, _LOOKING, None, _NO_OPS, False, None, -1)


def _written_by(func: Any) -> slice | None:
    """Which of its arguments a function may write, where they are given by place and no `out` is; None: any."""
    name = getattr(func, "__name__", "")
    if func is torch.nn.functional.batch_norm:
        return slice(1, 3)  # the running statistics
    # Methods in place, and functions with an argument `inplace`.
    in_place = isinstance(func, types.MethodDescriptorType) and name.endswith("_") and not name.endswith("__")
    if in_place or func is torch.nn.functional.relu:
        return slice(0, 1)
    return None


class Calls:
    """What was learned: all calls of a step, and what to do about each."""

    def __init__(
        self,
        calls: Sequence[Called],
        ticks: Sequence[Tick],
        *,
        watched_ops: Container[int],
        writing_ops: Container[int],
        hooked: Container[int],
        known: Mapping[int, KnownCall],
    ) -> None:
        """watched_ops: always. writing_ops: if called with something that matters. hooked: ticks that are needed.
        known: calls that can be recorded without a look at their ops, by place."""
        self.calls = calls
        self.watched = [any(op in watched_ops for op in call.ops) for call in calls]
        self.ways: list[Way] = []
        for place, (call, watched) in enumerate(zip(calls, self.watched, strict=True)):
            packs = call.packs(ticks)
            hooks = any(tick in hooked for tick in packs) if packs else None
            writes = any(op in writing_ops for op in call.ops)
            need = _LOOKING if watched else _IF_IT_WRITES if writes else _NOTHING
            if need == _NOTHING and getattr(call.func, "__name__", "") in _WITH_STATISTICS:
                need = _IF_IT_TRAINS
            written = _written_by(call.func)
            self.ways.append(Way(call.func, hooks, need, known.get(place), call.ops, writes, written, place))
        # Those that need nothing at all.
        self.passed = {i for i, way in enumerate(self.ways) if way.need == _NOTHING and way.hooked is None}

    def looked_at(self) -> list[int]:
        """Places of those whose ops may have to be known."""
        return [way.place for way in self.ways if way.need != _NOTHING]


class CallMode(TorchFunctionMode):
    """In force from the beginning of a step, but not inside the engine and the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = False
        self._depth = 0  # where it lay

    def pause(self) -> None:
        """Until resume(): an optimizer asks every parameter for its gradient, and each would be a call."""
        modes = CALLS.modes()
        if modes and modes[-1] is self:  # not where the program has put its own above
            self.paused, self._depth = True, CALLS.take_out(self)

    def resume(self) -> None:
        """Where it was before: under what the program has put on since, and will take off."""
        if self.paused:
            self.paused = False
            CALLS.put_in(self, self._depth)


class Lesson(NamedTuple):
    """All calls of a step. It holds for any plan, and for any size of the input, as long as the ops are the same."""

    calls: tuple[Called, ...]
    outside: frozenset[int]  # ops that ran in none of them: a compiled function, or C++ code, made them
    ticked: frozenset[int]  # ticks inside

    def saves_in_backward(self, ticks: Sequence[Tick]) -> bool:
        """Whether a call both saves and brings back: then what it saves depends on what was saved before."""
        return any(0 < len(call.packs(ticks)) < len(call.ticks) for call in self.calls)

    def all_inside(self, ops: Set[int], packs: Iterable[int]) -> bool:
        """Whether all of these ran inside of a call."""
        return self.outside.isdisjoint(ops) and self.ticked.issuperset(packs)


class Learner(CallMode):
    """Notes every call while the mode and the hooks are on for all of the step."""

    def __init__(self, now: Callable[[], tuple[int, int]], witness: Witness, saved_at: Callable[[int], int]) -> None:
        """now: the numbers of the next op and of the next tick. saved_at: the storage that is saved at a tick."""
        super().__init__()
        self._now = now
        self._witness = witness
        self._saved_at = saved_at
        self.calls: list[Called] = []
        self.known: dict[int, KnownCall] = {}  # by place

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op, tick = self._now()
        place = len(self.calls)
        self.calls.append(Called(func, range(0), range(0)))
        self._witness.begin(func, args, kwargs or {})
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        finally:
            next_op, next_tick = self._now()
            self.calls[place] = Called(func, range(op, next_op), range(tick, next_tick))
        if next_op > op:
            known = self._witness.told(result, map(self._saved_at, range(tick, next_tick)))
            if known is not None:
                self.known[place] = known
        return result

    def lesson(self) -> Lesson:
        last_op = max((call.ops.stop for call in self.calls), default=0)
        inside = {op for call in self.calls for op in call.ops}
        outside = frozenset(range(max(last_op, self._now()[0]))) - inside
        return Lesson(tuple(self.calls), outside, frozenset(tick for call in self.calls for tick in call.ticks))


class Gate(CallMode):
    """Has a dispatch mode and the hooks on inside the calls that need them."""

    def __init__(
        self,
        calls: Calls,
        mode: Any,  # None: no op has to be seen
        *,
        number_ops: Callable[[range], None],
        matters: Callable[[Iterable[Any]], bool],
        record: Callable[[int, KnownCall, Any, Any, Any], Any],
        may_write: Callable[[Iterable[Any]], None] | None,
        known: Callable[[int], KnownCall | None],
        learns: Container[int],
        learn: Callable[[int, Any, Any, Any], Any] | None,
    ) -> None:
        """number_ops: the numbers of the ops that come now. matters: whether one of these tensors is of a replay.
        record: makes a call that is known, or says NotImplemented; with its place if it is known at this size of the
        input, else -1. may_write: hears of what may be written. known: at this size, by place. learn: makes a call to
        know it from now on: those at the places in `learns`, and those that were others when they were learned."""
        super().__init__()
        self._calls = calls
        self._ways = [*calls.ways, _NO_WAY]
        self._passed = calls.passed
        self._mode = mode
        self.hooks: tuple[Any, Any] | None = None  # to be switched; None: they stay on
        self._hooks_on = True
        self._beneath: Any = None  # hooks that were under ours
        self._number_ops = number_ops
        self._matters = matters
        self._record = record
        self._may_write = may_write
        self._known = known
        self._learns, self._learn = learns, learn
        self._number = 0
        self._extra = 0
        self.strays = 0  # calls that were not known
        self.open = False  # for good
        self.watching = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = self._number
        way = self._ways[number]
        known, hooked, need, _, _, _, _, _ = way
        if known is not func and known != func:  # getters of properties are equal and never the same
            return self._look(number, func, args, kwargs or {})
        self._number, self._extra = number + 1, 0
        if hooked is not None and hooked is not self._hooks_on:
            self._switch_hooks(on=hooked)
        if need != _NOTHING or self.open:
            return self._go(way, func, args, kwargs or {})
        if kwargs:
            return self._go(way, func, args, kwargs) if _told_to_write(kwargs) else func(*args, **kwargs)
        return func(*args)

    def _look(self, number: int, func: Any, args: Any, kwargs: Any) -> Any:
        found = self._find(number, func)
        if found is None:  # it is one more
            self._extra += 1
            self.strays += 1
            if self._may_write is not None:
                self._may_write((*args, *kwargs.values()))
            self._switch_hooks(on=True)
            if self._extra > _MOST_EXTRA:
                self.stay_open()
            return self._watched(_NO_WAY, func, args, kwargs)
        self._number, self._extra = found + 1, 0
        way = self._ways[found]
        if way.hooked is not None and way.hooked is not self._hooks_on:
            self._switch_hooks(on=way.hooked)
        return self._go(way, func, args, kwargs)

    def _find(self, number: int, func: Any) -> int | None:
        """Which of the calls that are known comes now; some that need nothing may have been left out."""
        ways = self._ways
        for place in range(number, min(number + _MOST_LEFT_OUT + 1, len(ways) - 1)):
            if ways[place].func == func:
                return place
            if place not in self._passed:
                break
        return None

    def _go(self, way: Way, func: Any, args: Any, kwargs: Any) -> Any:
        need = way.need
        # The same function may have written to something else before, or not at all.
        writes = way.writes or (kwargs and _told_to_write(kwargs))
        written = way.written
        if written is not None and len(args) >= written.stop and not (kwargs and "out" in kwargs):
            touched = args[written]
        else:
            given = args if writes else args[1:]  # what is normalised is not written
            touched = (*given, *kwargs.values()) if kwargs else given
        if writes and self._may_write is not None:
            self._may_write(touched)
        if need != _LOOKING and not self.open and not ((writes or need == _IF_IT_TRAINS) and self._matters(touched)):
            return func(*args, **kwargs)
        declined = False
        if not self.open:
            for place, known in ((way.place, self._known(way.place)), (-1, way.known)):
                if known is not None:
                    result = self._record(place, known, func, args, kwargs)
                    if result is not NotImplemented:
                        return result
                    declined = True
        return self._watched(way, func, args, kwargs, learns=declined or way.place in self._learns)

    def _watched(self, way: Way, func: Any, args: Any, kwargs: Any, *, learns: bool = False) -> Any:
        self._number_ops(way.ops)
        if self._mode is None or self.open:
            return func(*args, **kwargs)
        self.watching = True
        OPS.put_in(self._mode, 0)  # under the program's own, as if it had been on from the beginning of the step
        try:
            if learns and self._learn is not None:
                return self._learn(way.place, func, args, kwargs)
            return func(*args, **kwargs)
        finally:
            OPS.take_out(self._mode)
            self.watching = False

    def _switch_hooks(self, *, on: bool) -> None:
        if self.hooks is None or on is self._hooks_on:
            return
        # Where the program has put on hooks of its own since, ours are not asked, and not ours to switch.
        top = _top_hooks(True)
        if on:
            if not _same_hooks(top, self._beneath):
                return
            _push_hooks(*self.hooks)
        else:
            if not _same_hooks(top, self.hooks):
                return
            _pop_hooks()
            self._beneath = _top_hooks(True)
        self._hooks_on = on

    def give_up(self) -> None:
        """The step is another one: from the next call on everything is seen. Here, inside an op, nothing can be put
        on: what is put on inside the engine is gone with the node that runs."""
        self._passed = set()
        self._extra = _MOST_EXTRA
        self._number = len(self._calls.calls)

    def stay_open(self) -> None:
        """See every op for the rest of the step. Not inside an op: it is entered with the mode, or it is not."""
        if not self.open:
            self._passed = set()
            self._switch_hooks(on=True)
            self.open = self.watching = True
            if self._mode is not None:
                OPS.put_in(self._mode, 0)

    def fell_short(self) -> bool:
        """Whether calls were left out that save something: where hooks are, too, such a step may look the same. Others,
        such as those behind backward, may come or not."""
        if self.hooks is None or self.open:
            return False
        return any(way.hooked is not None for way in self._calls.ways[self._number :])

    def close(self) -> None:
        if self.hooks is not None and not self._hooks_on:
            _push_hooks(*self.hooks)  # whoever put them on takes them off
            self._hooks_on = True
        if self.open and self._mode in OPS.modes():
            OPS.take_out(self._mode)


def _same_hooks(top: Any, others: Any) -> bool:
    return top is others if top is None or others is None else top[0] is others[0]


def _told_to_write(kwargs: Mapping[str, Any]) -> bool:
    """Whether a function is called in a way in which it writes to something that otherwise it does not."""
    in_place = kwargs.get("inplace")
    return kwargs.get("out") is not None or (in_place is not None and in_place is not False)


counting_here: Callable[[], int] = CALLS.depth  # whether the next call would be counted: not inside one that is


def needed_ticks(calls: Iterable[Called], ticks: Sequence[Tick], moved: set[int]) -> set[int]:
    """The ticks at which hooks must run: those of the storages in `moved`, and whatever is saved in one call with one.

    A storage is hooked wherever it is saved or nowhere, so that what comes back in backward is known.
    """
    by_storage: dict[int, list[set[int]]] = {}
    for call in calls:
        together = {ticks[tick].storage for tick in call.packs(ticks)}
        for storage in together:
            by_storage.setdefault(storage, []).append(together)
    hooked: set[int] = set()
    found = list(moved)
    while found:
        storage = found.pop()
        if storage not in hooked:
            hooked.add(storage)
            for together in by_storage.get(storage, ()):
                found += together - hooked
    return {number for number, tick in enumerate(ticks) if tick.storage in hooked}
