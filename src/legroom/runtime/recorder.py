"""What one sheltered step did, op by op, and the proof that its ops can be replayed.

The proof is made where everything is at hand. A functional op is run, its result digested and freed, and run again
from the same generator state; an in-place op is run, its target put back from the host, and run again. Equal digests
prove the op. Then every input of every op is digested again where it is read, and every saved storage where it is
evicted: bytes that changed in between were changed by something PyTorch cannot see, and no replay is trusted across
that. Neither takes more memory than the op itself, so the proof holds under any budget.

A step whose ops are those of a proven one, at another size of the input, is recorded without proofs for as long as they
are (`Outline`): no replay counts at a size before it was held against the real bytes there, proven elsewhere or not.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._C import _DisableTorchDispatch as no_dispatch
from torch.multiprocessing.reductions import StorageWeakRef

from legroom.alloclog import OP, OWN, PROOF, STANDS, mark
from legroom.ir import Phase, Value
from legroom.runtime.census import Census
from legroom.runtime.device import Device
from legroom.runtime.fused import CAST, proven
from legroom.runtime.lineage import (
    SHAPE_ONLY,
    RandomState,
    hidden_writes,
    is_uninitialised,
    never_replayed,
    tensors_in,
    written_tensors,
)
from legroom.runtime.residency import Entry, layout_of, saved_elsewhere
from legroom.runtime.undo import Undo

_OUTSIDE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)


CHANGED = "its result was changed by something PyTorch cannot see"
NOT_REPEATED = "two runs gave different bits"
SOURCE_CHANGED = "it reads a tensor that was changed by something PyTorch cannot see"


@dataclass(slots=True)
class SeenStorage:
    nbytes: int
    key: int
    first_key: int
    lasting: bool  # from before the step
    ref: StorageWeakRef
    name: str
    version: int = 0
    digest: bytes | None = None
    packed: bool = False
    held: bool = False
    gap_version: int = 0
    gaps: list[tuple[int, int]] | None = None


@dataclass(slots=True)
class SeenOp:
    name: str
    phase: Phase
    shapes: str
    reads: list[Value]
    writes: list[Value]
    output_bytes: int
    why_not: str
    module: str
    line: str
    short: bool = False  # a replay needs not all of its work: see `fused`
    first: int = -1  # a storage that an op before made from the same, with the same arguments


@dataclass(slots=True)
class SeenTick:
    kind: Literal["pack", "unpack"]
    storage: int
    op: int  # the next one


@dataclass(frozen=True, slots=True)
class Outline:
    """What was proven of each op of a step, in their order. backward: names and shapes of the ops that ran there."""

    names: tuple[str, ...]
    why_not: tuple[str, ...]
    short: tuple[bool, ...]
    unrepeated: Mapping[int, tuple[int, ...]]  # by op, which of its outputs
    backward: tuple[tuple[str, str], ...]

    def without_first(self, count: int) -> Outline:
        """Of a step that begins after so many ops of this one."""
        unrepeated = {op - count: outputs for op, outputs in self.unrepeated.items() if op >= count}
        return Outline(self.names[count:], self.why_not[count:], self.short[count:], unrepeated, self.backward)


class Recorder:
    """Storages, ops and ticks of one step."""

    def __init__(
        self,
        device: Device,
        census: Census,
        *,
        proving: bool,
        distrusted: frozenset[str],
        undo: Undo,
        outlines: Sequence[Outline] = (),
    ) -> None:
        """outlines: of steps that this one may be like, at another size. Where it is not, proofs begin."""
        self.device = device
        self.census = census
        self.proving = proving
        self.follows = bool(outlines)  # so that not all of it is proven at this size
        self._outlines = list(outlines) if proving else []
        self._surprised = False  # bytes were changed by something PyTorch cannot see
        self._unrepeated_at: dict[int, tuple[int, ...]] = {}
        self.undo = undo
        self.distrusted = distrusted  # ops whose replay once gave other bits, whatever a proof says
        self.storages: list[SeenStorage] = []
        self.ops: list[SeenOp] = []
        self.ticks: list[SeenTick] = []
        self.makers: dict[Value, int] = {}
        self.phase: Phase = "forward"
        self.modules: list[str] = []
        self._by_key: dict[int, int] = {}
        self._lasting: set[int] = set()  # storages from before the step
        self._unrepeated: set[int] = set()  # storages of this op's outputs that its proof did not give again
        self._short = False  # whether this op's proof found a shorter way
        self._fresh: dict[int, bytes] = {}  # digests of what the op that runs has just made
        self._casts: dict[Any, int] = {}  # by what was cast and how: the first storage that was made of it
        self._garbage: dict[int, int] = {}  # storages nobody has written yet, and the op that made them

    # storages

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage in this step."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._by_key.get(key)
        if known is not None and (self.storages[known].key == key and not self.storages[known].ref.expired()):
            return known
        number = len(self.storages)
        lasting = key in self.census.kinds and not self.census.refs[key].expired()
        name = self.census.names[key] if lasting else self.module()
        nbytes = self.device.rounded(storage.nbytes())
        self.storages.append(SeenStorage(nbytes, key, key, lasting, StorageWeakRef(storage), name))
        self._by_key[key] = number
        if lasting:
            self._lasting.add(number)
        return number

    def moved(self, number: int, tensor: torch.Tensor) -> None:
        """A storage came back from the host at another address."""
        storage = tensor.untyped_storage()
        seen = self.storages[number]
        self._by_key.pop(seen.key, None)
        seen.key, seen.ref = storage._cdata, StorageWeakRef(storage)
        self._by_key[seen.key] = number

    def module(self) -> str:
        return self.modules[-1] if self.modules else ""

    # ops

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = self._like_before(name := str(func))
        with no_dispatch():
            inputs = tensors_in((*args, *kwargs.values()))
            plain = [t for t in inputs if not saved_elsewhere(t)]
            odd = len(plain) < len(inputs)
            self._check_unchanged(plain)
            reads = list(dict.fromkeys((n, self.storages[n].version) for n in map(self.number, plain)))
            if func.__name__.split(".")[0] in SHAPE_ONLY:
                reads = []
            statistics = hidden_writes(func, args)
            moved = {self.number(t) for t in statistics}
            reads = [value for value in reads if value[0] not in moved]
            written = [t for t in written_tensors(func, args, kwargs) if not saved_elsewhere(t)]
            garbage = [n for n, version in reads if version == 0 and n in self._garbage]
        why_not = "a tensor subclass or a layout that is not strided" if odd else never_replayed(func)
        if name in self.distrusted:
            why_not = "a replay of it gave other bits"
        if self.phase != "forward" and not why_not:
            why_not = "not in forward"
        if not why_not and any(self.number(t) in self._lasting for t in written):
            why_not = "writes a tensor that lives across steps"
        if written or statistics:
            with mark(OWN), no_dispatch():
                self.undo.before_write([t for t in (*written, *statistics) if self.number(t) in self._lasting])
        if why_not or not self.proving:
            with mark(OP):
                result = func(*args, **kwargs)
            why_not = why_not or "not proven yet"
        elif known:
            with mark(OP):
                result = func(*args, **kwargs)
            why_not = self._as_before(known, result)
        elif is_uninitialised(func):
            with mark(OP):
                result = func(*args, **kwargs)
        elif written:
            result, why_not = self._prove_in_place(func, args, kwargs, written)
        else:
            result, why_not = self._prove(func, args, kwargs, plain)
        with no_dispatch():
            self._note(func, result, plain, written, reads, why_not)
            self._note_garbage(func, garbage, why_not)
            if func is CAST and not odd:
                self._note_twin(args, kwargs)
            if self._unrepeated:
                self._note_unrepeated(result)
            self._fresh.clear()
            for tensor in statistics:
                self._unseen_write(self.number(tensor))
                self._learn(self.number(tensor), tensor)
        return result

    def _note_twin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A cast of what was cast before has the same bytes, as long as nobody writes to either."""
        op = self.ops[-1]
        if len(args) == len(op.reads) == len(op.writes) == 1 and op.writes[0][1] == 0 and op.phase == "forward":
            made = op.reads[0], layout_of(args[0]), frozenset(kwargs.items())
            first = self._casts.setdefault(made, op.writes[0][0])
            op.first = first if first != op.writes[0][0] else -1

    def _like_before(self, name: str) -> list[Outline]:
        """Those of which this op, too, is the next."""
        if self._outlines:
            place = len(self.ops)
            self._outlines = [o for o in self._outlines if place < len(o.names) and o.names[place] == name]
        return self._outlines

    def _as_before(self, known: list[Outline], result: Any) -> str:
        """What the proof of this op said where there was one."""
        place = len(self.ops)
        self._short = all(outline.short[place] for outline in known)
        positions = known[0].unrepeated.get(place, ())
        if positions:
            keys = list(_by_storage(result))
            self._unrepeated = {keys[position] for position in positions if position < len(keys)}
        return next((outline.why_not[place] for outline in known if outline.why_not[place]), "")

    @property
    def _looks(self) -> bool:
        """Whether bytes are held against what they were."""
        return self.proving and not self._outlines

    def followed(self) -> list[Outline]:
        """The steps that this one was like from its first op to its last."""
        return [outline for outline in self._outlines if len(outline.names) == len(self.ops)]

    def outline(self, backward: Sequence[tuple[str, str]]) -> Outline | None:
        """For steps at other sizes; None where they have to be proven, too."""
        if not self.proving or self._surprised:
            return None
        return Outline(
            tuple(op.name for op in self.ops),
            tuple(op.why_not for op in self.ops),
            tuple(op.short for op in self.ops),
            self._unrepeated_at,
            tuple(backward),
        )

    def _note_unrepeated(self, result: Any) -> None:
        """Outputs that two runs gave differently, beside others that repeat: attention leaves a random state unwritten
        where it draws nothing. They get an op of their own that cannot be replayed, so that the rest can."""
        with mark(OP):
            pass
        outputs = _by_storage(result)
        # In the order of the outputs: in another one, the same step would look like another.
        positions = tuple(i for i, key in enumerate(outputs) if key in self._unrepeated)
        self._unrepeated_at[len(self.ops) - 1] = positions
        writes = [(self.number(tensor), 0) for key, tensor in outputs.items() if key in self._unrepeated]
        self._unrepeated = set()
        for value in writes:
            self.makers[value] = len(self.ops)
            self._learn(value[0], outputs[self.storages[value[0]].key])
        self.ops.append(
            SeenOp("legroom.unrepeated", self.phase, "", [], writes, 0, NOT_REPEATED, self.module(), _user_line())
        )

    def _note_garbage(self, func: Any, garbage: list[int], why_not: str) -> None:
        """Uninitialised memory is replayable only while all that reads it is a write proven not to depend on it."""
        op = self.ops[-1]
        for number in garbage:
            overwritten = (number, 1) in op.writes
            if op.writes and (not overwritten or why_not):
                self.ops[self._garbage[number]].why_not = "uninitialised memory"
        if is_uninitialised(func):
            self._garbage.update((number, len(self.ops) - 1) for number, version in op.writes if version == 0)

    def _prove(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]
    ) -> tuple[Any, str]:
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        generator = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)), None)
        with mark(OWN):
            rng = RandomState(generator) if seeded else None
            keys = {t.untyped_storage()._cdata for t in inputs}
            before = [self.storages[self.number(t)].digest for t in _once(inputs)]  # looked at a moment ago
        with mark(PROOF):
            result = func(*args, **kwargs)
            outputs = tensors_in(result if isinstance(result, (list, tuple)) else (result,))
            why_not = self._why_not_twice(args, func, outputs, keys, before, inputs)
            first: list[bytes] = []
            short = False
            if not why_not:
                first = _digests_of(self.device, outputs)
                with no_dispatch():
                    short = proven(func, args, result) and first[:1] == _digests_of(self.device, outputs[:1])
                _scramble(outputs)
                del result, outputs
        if why_not:
            with mark(STANDS):
                pass
            return result, why_not if why_not != "view" else ""
        with mark(OWN), no_dispatch():
            # Other statistics than the first run had: they may not enter the result.
            again = [torch.zeros_like(a) if any(a is s for s in hidden_writes(func, args)) else a for a in args]
            if rng is not None:
                rng.restore()
        with mark(OP):
            result = func(*again, **kwargs)
        with mark(OWN):
            again.clear()
        outputs = tensors_in(result if isinstance(result, (list, tuple)) else (result,))
        second = _digests_of(self.device, outputs)
        self._fresh = {t.untyped_storage()._cdata: digest for t, digest in zip(outputs, second, strict=True)}
        other = {t.untyped_storage()._cdata for t, a, b in zip(outputs, first, second, strict=True) if a != b}
        if len(other) == len({t.untyped_storage()._cdata for t in outputs}):
            return result, NOT_REPEATED
        self._unrepeated = other
        self._short = short and not other
        return result, ""

    def _why_not_twice(
        self,
        args: tuple[Any, ...],
        func: Any,
        outputs: list[torch.Tensor],
        keys: set[int],
        before: list[bytes | None],
        inputs: list[torch.Tensor],
    ) -> str:
        if any(saved_elsewhere(t) for t in outputs):
            return "makes a tensor that is not strided"
        over_inputs = [t.untyped_storage()._cdata in keys for t in outputs]
        if outputs and all(over_inputs):
            return "view"
        if any(over_inputs):
            return "returns views beside new tensors"
        if not outputs:
            return "makes no tensor"
        if not hidden_writes(func, args) and before != _digests_of(self.device, _once(inputs)):
            return "writes its inputs without saying so"
        return ""

    def _prove_in_place(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor]
    ) -> tuple[Any, str]:
        generator = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)), None)
        whole = [t for t in {t.untyped_storage()._cdata: t for t in written}.values() if t.untyped_storage().nbytes()]
        with mark(OWN), no_dispatch():
            rng = RandomState(generator) if torch.Tag.nondeterministic_seeded in func.tags else None
            flats = _flats(whole)
            garbage = [(n := self.number(t)) in self._garbage and self.storages[n].version == 0 for t in whole]
            copies = {i: self.device.copy_out(flat, waits=True) for i, flat in enumerate(flats) if not garbage[i]}
            for _, copy in copies.values():
                copy.wait()
        before = [_shape(t) for t in written]
        try:
            with mark(PROOF):
                result = func(*args, **kwargs)
                first = _digests_of(self.device, whole)
        except BaseException:
            for host, _ in copies.values():
                host.drop()
            raise
        outputs = tensors_in(result if isinstance(result, (list, tuple)) else (result,))
        fresh = [t for t in outputs if t.untyped_storage()._cdata not in {f.untyped_storage()._cdata for f in flats}]
        reshaped = before != [_shape(t) for t in written]
        if fresh or reshaped:
            with mark(STANDS):
                pass
            for host, _ in copies.values():
                host.drop()
            return result, "changes the size of what it writes" if reshaped else "writes in place and makes new tensors"
        with mark(OWN), no_dispatch():
            for i, flat in enumerate(flats):
                if garbage[i]:
                    # Other bytes than before: only an op that overwrites all of them gives the same result again.
                    flat.bitwise_not_()
                else:
                    host, _ = copies[i]
                    self.device.copy_in(host, flat, waits=True).wait()
                    host.drop()
            if rng is not None:
                rng.restore()
        with mark(OP):
            result = func(*args, **kwargs)
        second = _digests_of(self.device, whole)
        self._fresh = {t.untyped_storage()._cdata: digest for t, digest in zip(whole, second, strict=True)}
        return result, "" if first == second else NOT_REPEATED

    def _note(
        self,
        func: Any,
        result: Any,
        inputs: list[torch.Tensor],
        written: list[torch.Tensor],
        reads: list[Value],
        why_not: str,
    ) -> None:
        op = len(self.ops)
        writes: list[Value] = []
        for tensor in {t.untyped_storage()._cdata: t for t in written}.values():
            seen = self.storages[number := self.number(tensor)]
            seen.version += 1
            writes.append((number, seen.version))
            self._learn(number, tensor)
        keys = {t.untyped_storage()._cdata for t in inputs}
        output_bytes = 0
        for tensor in tensors_in(result if isinstance(result, (list, tuple)) else (result,)):
            if saved_elsewhere(tensor):
                continue
            if (key := tensor.untyped_storage()._cdata) in keys or key in self._unrepeated:
                continue
            number = self.number(tensor)
            if (number, 0) not in writes:
                writes.append((number, 0))
                output_bytes += self.device.rounded(tensor.untyped_storage().nbytes())
                self._learn(number, tensor)
        for value in writes:
            self.makers[value] = op
        shapes = ",".join(str(list(t.shape)) for t in inputs)
        self.ops.append(
            SeenOp(str(func), self.phase, shapes, reads, writes, output_bytes, why_not, self.module(), _user_line())
        )
        self.ops[-1].short, self._short = self._short, False

    # what PyTorch cannot see

    def _learn(self, number: int, tensor: torch.Tensor) -> None:
        if self._looks:
            # Optimizers write much and are not replayed: what they leave is learned when it is read again.
            digest = None
            if self.phase == "forward":
                storage = tensor.untyped_storage()
                digest = self._fresh.pop(storage._cdata, None) or self.device.digest(storage)
            self.storages[number].digest = digest

    def _check_unchanged(self, tensors: list[torch.Tensor]) -> None:
        if self._looks and self.phase == "forward":
            for tensor in _once(tensors):
                self.compare(self.number(tensor), tensor.untyped_storage())

    def compare(self, number: int, storage: torch.UntypedStorage) -> None:
        """Bytes that differ from what the last op left are a new version that nothing can replay."""
        seen = self.storages[number]
        if not self._looks:
            return
        now = self.device.digest(storage)
        if seen.digest is not None and seen.digest != now:
            self._surprised = True
            maker = self.makers.get((number, seen.version))
            if maker is not None:
                self.ops[maker].why_not = CHANGED
            self._unseen_write(number)
        seen.digest = now

    def _unseen_write(self, number: int) -> None:
        """A version that no op of the program made, so that none can make it again."""
        with mark(OP):
            pass
        seen = self.storages[number]
        before, after = (number, seen.version), (number, seen.version + 1)
        seen.version += 1
        self.ops.append(
            SeenOp("legroom.unseen_write", self.phase, "", [before], [after], 0, CHANGED, self.module(), "")
        )

    def compare_lasting(self) -> None:
        """Backward is over: were the lasting tensors that ops read left alone? If not, those ops cannot be replayed."""
        if not self.proving:
            return
        changed: set[int] = set()
        for number in self._lasting:
            seen = self.storages[number]
            storage = torch.UntypedStorage._new_with_weak_ptr(seen.ref.cdata) if seen.digest is not None else None
            if storage is not None and seen.digest != self.device.digest(storage):
                changed.add(number)
        self._surprised |= bool(changed)
        for op in self.ops if changed else ():
            if not op.why_not and any(number in changed for number, _ in op.reads):
                op.why_not = SOURCE_CHANGED

    # ticks

    def tick(self, kind: Literal["pack", "unpack"], number: int) -> None:
        self.ticks.append(SeenTick(kind, number, len(self.ops)))
        if kind == "pack":
            self.storages[number].packed = True

    def odd_tick(self, kind: Literal["pack", "unpack"]) -> None:
        """A tensor without a plain storage on this device; it stands for nothing in the trace."""
        self.ticks.append(SeenTick(kind, -1, len(self.ops)))

    def bind_garbage(self, number: int) -> None:
        if self.storages[number].version == 0 and number in self._garbage:
            self.ops[self._garbage[number]].why_not = "uninitialised memory"

    def gap(self, entry: Entry, end: int) -> None:
        seen = self.storages[entry.number]
        if entry.gap_start >= 0 and entry.gap_start < end:
            if seen.gaps is None:
                seen.gaps = []
            seen.gaps.append((entry.gap_start, end))


def _by_storage(tensors: Iterable[Any]) -> dict[int, torch.Tensor]:
    """One tensor a storage, of those that are."""
    return {t.untyped_storage()._cdata: t for t in tensors_in(tensors)}


def _once(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor a storage."""
    return list(_by_storage(tensors).values())


def _flats(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """All bytes behind each tensor; once where several share a storage."""
    whole = [t for t in _once(tensors) if t.untyped_storage().nbytes()]
    return [torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage()) for t in whole]


def _shape(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.size(), tensor.stride(), tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()


def _scramble(tensors: list[torch.Tensor]) -> None:
    """The next run may get the same memory: bytes that an op leaves unwritten must not look the same by chance."""
    with no_dispatch():
        for flat in _flats(tensors):
            flat.bitwise_not_()


def _digests_of(device: Device, tensors: list[torch.Tensor]) -> list[bytes]:
    return [device.digest(t.untyped_storage()) for t in tensors]


def _user_line() -> str:
    """Where in the user's code an op was called."""
    frame = sys._getframe(2)
    while frame is not None:
        name = _user_file(frame.f_code.co_filename)
        if name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@functools.lru_cache(4096)
def _user_file(path: str) -> str:
    """Its name, where it is not PyTorch's, ours or none at all."""
    return "" if path.startswith(_OUTSIDE) or path.startswith("<") else os.path.basename(path)
