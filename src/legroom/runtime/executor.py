"""A planned step: the schedule's instructions, carried out at the ticks they are written for.

The schedule says when to act; what a tensor is, and how to make it again, is taken from the step itself. Where the
step is not the one that was planned for (another size, another order), the rest of it runs under the reactive policy.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._C import DisableTorchFunction as no_counting
from torch._C import _DisableTorchDispatch as no_dispatch

from legroom.alloclog import TICK, mark, unnoticed
from legroom.arrange import Spacer
from legroom.errors import StepError
from legroom.runtime.again import Again
from legroom.runtime.calls import Gate, Learner, counting_here
from legroom.runtime.census import Census
from legroom.runtime.checking import Checks, refusal
from legroom.runtime.knowncalls import KnownCall
from legroom.runtime.knownsizes import KnownAt
from legroom.runtime.lineage import Lineage
from legroom.runtime.modes import Interception, OpMode
from legroom.runtime.plannedops import MOST_OPS, PlannedOps
from legroom.runtime.program import (
    MOST_LESSONS,
    NO_STORAGE,
    EndSpacer,
    MakeRoom,
    Program,
    Settle,
    TakeSpacer,
    Ticks,
)
from legroom.runtime.replay import overwrite
from legroom.runtime.residency import Entry, Handle, Kept, Ledger, View, saved_elsewhere
from legroom.runtime.shelter import Shelter, bring_back
from legroom.runtime.twins import Twins
from legroom.schedule import Await, Drop, Instruction, Prefetch, Release, Replay, SwapOut

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def _nothing_known(_: int) -> None:
    return None


class Executor:
    """The hooks of one planned step, and what is done at them."""

    def __init__(
        self,
        ledger: Ledger,
        program: Program,
        device_type: str,
        *,
        kept: Callable[[], frozenset[int]],
        checks: frozenset[int],
        wait: bool,
        due: bool,
        measured: bool,
        trial: bool,
        known_at: KnownAt | None,
        fallbacks: Counter[str],
        doubted: set[str],
        others: Callable[[], Sequence[Program]],
    ) -> None:
        """checks: storages whose replays are held against the real bytes; wait, due: see `Checks`. others: what to
        follow where the step turns out to be another one that is known. trial: room for what comes next is made sure
        of, tick by tick. known_at: the input's size, where that varies."""
        self.ledger = ledger
        self.program = program
        self.device_type = device_type
        self.kept = kept  # asked for only when the step drifts: walking a model takes milliseconds
        self.generation = ledger.generation
        self.rounded = ledger.device.rounded
        self.lineage = Lineage(ledger)
        self.tick = 0
        self.entries: dict[int, Entry] = {}
        self.ops = PlannedOps(
            program,
            self.lineage,
            self.entries,
            device_type,
            first=ledger.generation * MOST_OPS,
            kept=kept,
            known_at=known_at,
        )
        self._statistics = self.ops.statistics
        self.late: list[int] = []
        self._to_check = checks
        self.checks = Checks(ledger.device, wait=wait, due=due, doubted=doubted)
        self._tick_of_optimizer: int | None = None  # when the first one began
        self.refusal = ""  # where it failed before it was known that a replay had given other bits
        self.measured = measured
        self.census: Census | None = None  # there in measured steps: frees of what the log does not know go into it
        self.fallbacks = fallbacks
        self.reactive: Shelter | None = None
        self.switched = False  # to the plan for another step
        self._others_known = others
        self._others: list[Program] | None = None
        self._excess_bytes = 0
        self._spaced: dict[Spacer, torch.Tensor] = {}
        self.refused = False  # whether there was no room for a spacer, or for what the program asked for
        self._follow(program.all_ticks)
        self._is_here = operator.attrgetter(f"is_{device_type}")
        self._nodes = self.lineage.nodes
        self._calls: Gate | Learner | None = None
        self._in_backward = False
        self._sees_ops = bool(program.recorded)
        self.at_backward: Callable[[], None] | None = None  # called when it begins
        self._pressure = program.pressure if trial else None
        self._again = Again(
            program,
            self.ops,
            self.checks,
            ledger.device,
            fallbacks,
            to_check=checks,
            told_ops=known_at.told_ops if known_at is not None and checks else frozenset(),
            as_planned=self._pressure is None,
        )
        self._with_twins = program.with_twins
        self._twins = Twins(self.lineage, self.ops, self.checks, self._again, self.entries, checks, fallbacks)
        # Whether every tick has work of its own: it is measured or a trial, drifted, or releases are late.
        self._busy = self._watchful = measured or self._pressure is not None
        ledger.on_death = None

    # hooks

    def _follow(self, ticks: Ticks) -> None:
        self._numbers, self._at, self._expected, self._last_need, self._light = ticks
        self._last = len(ticks.expected)

    def interception(self, depths: tuple[int, int] | None) -> Interception:
        """Hooks, modes and the engine's stand-in for this step."""
        program = self.program
        counts = bool(program.recorded) or self.ledger.device.leaves_hooks_out
        learns = counts and program.calls is None and program.learns and program.countable
        # Which ops run inside a call is learned under a plan without replays as well, whose hooks may be left out.
        self._sees_ops = bool(program.recorded) or learns
        mode = OpMode(self.ops.op) if self._sees_ops else None
        if counts and program.calls is not None:
            if self._watchful and program.few_ticks is not None:
                self.ops.known_at = None  # more hooks run than in other steps, so that calls save more than was learned
            at = self.ops.known_at
            self._calls = Gate(
                program.calls,
                mode,
                number_ops=self.ops.count_in,
                matters=self.lineage.knows_any,
                record=self._record,
                may_write=self.ops.may_write if program.casts_weights else None,
                known=at.call if at is not None else _nothing_known,
                learns=at.learns if at is not None else (),
                learn=self._learn_call if at is not None else None,
            )
        elif learns:
            ticks = program.trace.ticks
            self._calls = Learner(
                lambda: (self.ops.number, self.tick),
                self.ops.witness,
                lambda tick: ticks[tick].storage if tick < len(ticks) else NO_STORAGE,
            )
            self.ops.learn_all()
        pack, unpack = self.hooks()
        if isinstance(self._calls, Gate) and program.few_ticks is not None and not self._watchful:
            self._follow(program.few_ticks)
            self._calls.hooks = pack, unpack
        began, ended = self.backward_begins, self.backward_ended
        return Interception(pack, unpack, mode=mode, calls=self._calls, entered=began, left=ended, depths=depths)

    def hooks(self) -> tuple[Callable[[torch.Tensor], Handle | Kept], Callable[[Any], torch.Tensor]]:
        """Pack and unpack. Guards and marks cost as much as the rest: they are there only where they are needed."""
        if self.measured:
            return self._measured_pack, self._measured_unpack
        # Inside the engine no mode of ours is on, and what unpack does in forward it guards itself.
        if isinstance(self._calls, Gate):
            return self._gated_pack, self._unpack
        return self._guarded_pack if self._sees_ops else self._pack, self._unpack

    def _measured_pack(self, tensor: torch.Tensor) -> Handle | Kept:
        if self._calls is not None:
            self._calls.resume()
        with no_counting(), no_dispatch(), mark(TICK):
            return self._with_statistics(self._pack(tensor))

    def _measured_unpack(self, packed: Handle | Kept) -> torch.Tensor:
        with no_dispatch(), mark(TICK):
            return self._unpack(packed)

    def _guarded_pack(self, tensor: torch.Tensor) -> Handle | Kept:
        if self._calls is not None:
            self._calls.resume()
        with no_counting(), no_dispatch():
            return self._pack(tensor)

    def _gated_pack(self, tensor: torch.Tensor) -> Handle | Kept:
        calls = self._calls
        assert isinstance(calls, Gate)
        if calls.watching or calls.paused or counting_here() or torch._C._len_torch_dispatch_stack():
            return self._guarded_pack(tensor)
        tick = self.tick
        if not self._busy and (light := self._light[tick]):
            # Of the saves of a call that the plan is about, most are others: weights, statistics.
            self.tick = tick + 1
            number = self._expected[tick][1]
            kept = Kept(tensor, number, self.generation)
            if light == 2:
                self._statistics[number] = kept.tensor
            return kept
        return self._with_statistics(self._pack(tensor))

    def _record(self, place: int, known: KnownCall, func: Any, args: Any, kwargs: Any) -> Any:
        return self.ops.record(place, known, func, args, kwargs, partial(self._saved_since, self.tick))

    def _learn_call(self, place: int, func: Any, args: Any, kwargs: Any) -> Any:
        return self.ops.learn_call(place, func, args, kwargs, partial(self._saved_since, self.tick))

    def _saved_since(self, tick: int) -> tuple[int, ...]:
        return tuple([number for _, number, _, _ in self._expected[tick : self.tick]])

    def _with_statistics(self, packed: Handle | Kept) -> Handle | Kept:
        """What was saved in a call that is known, noted where a replay has a use for it."""
        if type(packed) is Kept and packed.number in self.program.statistic_storages:
            self._statistics[packed.number] = packed.tensor
        return packed

    def _pack(self, tensor: torch.Tensor) -> Handle | Kept:
        # The common way through is written out: three quarters of a million hooks run in an epoch of a thousand steps.
        tick = self.tick
        if self._busy or self._at[tick]:
            self._begin_tick(None)
        else:
            self.tick = tick + 1
        if self.reactive is not None or type(tensor) not in _PLAIN or not self._is_here(tensor):
            return self._odd_pack(tick, tensor)
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # another layout than strided
            return self._odd_pack(tick, tensor)
        size = storage.nbytes()
        is_pack, number, nbytes, plain = self._expected[tick]
        if not is_pack or not size or tensor.is_quantized or (nbytes != size and not self._as_good(size, nbytes)):
            return self._odd_pack(tick, tensor)
        if plain:
            return Kept(tensor, number, self.generation)
        ledger = self.ledger
        key = storage._cdata
        entry = ledger.by_key.get(key)
        if entry is None:
            entry = ledger.by_key[key] = Entry(ledger, number, key, size)
            ledger.entries += 1
        elif entry.generation != self.generation:
            entry.number, entry.generation = number, self.generation
        if entry.number != number or entry.host is not None:
            return self._odd_pack(tick, tensor)
        self.entries[number] = entry
        if number in self._with_twins:
            self._twins.saved(number)
        if key in self._nodes:
            self.lineage.saved(entry, tensor)
        view = View(tensor, entry)
        entry.views.append(view)
        return Handle(view)

    def _as_good(self, size: int, nbytes: int) -> bool:
        return nbytes == self.rounded(size) or self._fits(size - nbytes)

    def _odd_pack(self, tick: int, tensor: torch.Tensor) -> Handle | Kept:
        if saved_elsewhere(tensor) or tensor.device.type != self.device_type:
            return Kept(tensor, -1, self.generation)
        while self.reactive is None:
            is_pack, number, nbytes, plain = self._expected[tick]
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if is_pack and (nbytes == size or self._as_good(size, nbytes)):
                if plain:
                    return Kept(tensor, number, self.generation)
                entry = self.ledger.entry_of(storage, number)
                if entry.generation != self.generation:
                    entry.number, entry.generation = number, self.generation
                if entry.number == number:
                    self.entries[number] = entry
                    if number in self._with_twins:
                        self._twins.saved(number)
                    self.lineage.saved(entry, tensor)
                    return self.ledger.handle(entry, tensor)
            if not self._switch(tick):
                self.drift("a tensor of another size was saved")
        assert self.reactive is not None
        return self.reactive.pack_at(tick, tensor)

    def _fits(self, more_bytes: int) -> bool:
        """Whether a tensor of another size than in the trace is one that the plan has room for."""
        reserve = self.program.reserve_bytes
        self._excess_bytes += max(0, more_bytes)
        return reserve is not None and self._excess_bytes <= reserve

    def _unpack(self, packed: Handle | Kept) -> torch.Tensor:
        tick = self.tick
        if type(packed) is Kept:
            if self._busy or self._at[tick]:
                self._begin_tick(None)
            else:
                self.tick = tick + 1
            if self.reactive is None:
                expected = self._expected[tick]
                if expected[0] or expected[1] != packed.number:
                    self._check_way(tick, packed)
            tensor = packed.tensor
            if tensor._version != packed.version:
                packed.fail()
            return tensor
        view = packed.view  # type: ignore[union-attr]
        entry = view.entry
        if self._busy or self._at[tick]:
            self._begin_tick(entry)
        else:
            self.tick = tick + 1
        if self.reactive is None:
            expected = self._expected[tick]
            if expected[0] or expected[1] != entry.number:
                self._check_way(tick, entry)
        if self._twins.owed and entry in self._twins.owed:
            with no_dispatch():
                if not entry.in_memory:
                    self._fetch_in_room(entry)
                self._twins.pay(entry)
        if entry.loading is not None:
            entry.finish_loading()
        if view.tensor is not None:
            if view.tensor._version != view.version:
                view.check()
            return view.tensor
        view.check()
        with no_dispatch():  # a mode of the user's is not to see this
            if entry.key == 0:
                self._fetch_in_room(entry)
            assert entry.base is not None
            return view.over(entry.base)

    def _check_way(self, tick: int, owner: Entry | Kept) -> None:
        while True:
            is_pack, number, _, _ = self._expected[tick]
            if not is_pack and (owner.number in (number, -1) or owner.generation != self.generation):
                return
            if not is_pack and self.entries.get(number) is owner:  # it has joined another
                return
            if not self._switch(tick):
                self.drift("backward went another way")
                return

    def finish(self) -> None:
        """The step is over: it was shorter than planned if ticks are left."""
        self._hear_what_is_due()
        if self.reactive is None and self.tick != self._last:
            self.drift("the step ended early")
        elif self.reactive is None and isinstance(self._calls, Gate) and self._calls.fell_short():
            self.drift("the step made fewer calls")
        self._learn_calls()
        self.lineage.nodes.clear()

    def close(self) -> None:
        """However it ended. Its graph may live on, but takes up no other plan."""
        self._others = []
        self._spaced.clear()
        self.checks.close(self.entries)

    def _learn_calls(self) -> None:
        if self.reactive is not None or self.switched:
            return
        program = self.program
        at = self.ops.known_at
        if at is not None and self.ops.learned and not self.met_other_calls():
            at.learned(self.ops.learned)
        if not isinstance(self._calls, Learner):
            return
        program.lessons += 1
        if not self.ops.strange and self.ops.number > max(program.names, default=-1):
            hooks_out = self.ledger.device.leaves_hooks_out
            program.learn(self._calls.lesson(), self._calls.known, may_leave_hooks_out=hooks_out)
        elif program.lessons >= MOST_LESSONS:
            program.learns = False

    # instructions

    def _begin_tick(self, asked_for: Entry | None) -> int:
        tick = self.tick
        self.tick = tick + 1
        if self.reactive is None and tick >= self._last and not self._switch(tick):
            self.drift("the step went on for longer")
        if self.reactive is not None:
            with no_dispatch():
                self.reactive.evict_idle(tick, asked_for)
            return tick
        if self.census is not None:
            self.census.note_deaths()
        if self.late:
            self._release_late()
        if self._at[tick]:
            with no_dispatch():
                for instruction in self._at[tick]:
                    entry = self.entries.get(instruction.storage)
                    if entry is not None and entry.views:
                        try:
                            self._do(instruction, entry)  # type: ignore[arg-type]
                        except torch.OutOfMemoryError as error:
                            again = partial(self._do, instruction, entry)  # type: ignore[arg-type]
                            self._in_room(again, error, asked_for, entry)
                    elif isinstance(instruction, MakeRoom):
                        with unnoticed():
                            self._make_room(instruction, asked_for)
                    elif instruction.storage == NO_STORAGE:
                        self._space(instruction)  # type: ignore[arg-type]
            if self.census is not None:
                self.census.note_deaths()
        if self._pressure is not None:
            with no_dispatch(), unnoticed():
                watched = self.ops.learning and not self._in_backward  # there no mode looks on
                gone = self._pressure.relieve(self.ledger, tick, asked_for, watched=watched)
            self._made_room(gone)
        return tick

    def _in_room(
        self, work: Callable[[], None], error: torch.OutOfMemoryError, asked_for: Entry | None, entry: Entry
    ) -> None:
        """Work of the plan's own for an entry whose memory was not to be had: again, when something else has gone."""
        relief, tick = self.program.relief, self._numbers[min(self.tick, self._last) - 1]
        stay = list(self.ledger.pinned.get(id(entry), ()))  # what the work reads, and what went and came back for it
        try:
            while gone := relief.evict(self.ledger, tick, asked_for, entry.nbytes, stay):
                stay += gone
                self._made_room(len(gone))
                error.__traceback__ = None  # its frames hold memory
                try:
                    return work()
                except torch.OutOfMemoryError as again:
                    error = again
            raise error
        finally:
            del error  # it holds this frame, which would hold it until garbage is collected

    def _fetch_in_room(self, entry: Entry) -> None:
        try:
            self._bring_back(entry)
        except torch.OutOfMemoryError as error:
            self._in_room(partial(self._fetch, entry), error, entry, entry)

    def _fetch(self, entry: Entry) -> None:
        if not entry.in_memory:  # it may have come back, and something behind that failed
            self._bring_back(entry)

    def _make_room(self, instruction: MakeRoom, asked_for: Entry | None) -> None:
        program, tick = self.program, instruction.tick
        if tick not in program.in_vain:  # to ask in vain stops the device
            gone, free = program.relief.make_room(self.ledger, tick, asked_for, instruction.nbytes)
            self._made_room(gone)
            if not gone and not free:
                program.in_vain.add(tick)

    def _made_room(self, gone: int) -> None:
        if gone:
            self.refused = True
            self._again.goes_beside_plan()
            self.fallbacks["swapped out beside the plan, to make room"] += gone

    def _do(self, instruction: Instruction | Settle, entry: Entry) -> None:
        if entry.number != instruction.storage and not isinstance(instruction, Prefetch | Await | Replay):
            return  # it has joined another, which goes by instructions of its own
        match instruction:
            case SwapOut():
                if entry.exclusive():
                    entry.start_saving()
            case Release():
                if entry.host is not None and entry.exclusive():
                    entry.release()
                elif entry.in_memory:
                    self._be_late(instruction.storage)
            case Drop():
                if self._can_go(entry):
                    twin = self.program.twins.get(entry.number) if not self.switched else None
                    if twin is None:
                        self._drop(entry)
                    else:
                        self._twins.drop(entry, twin)
            case Prefetch():
                if not entry.in_memory and entry.host is not None:
                    entry.start_loading()
            case Await():
                if not entry.in_memory:
                    self._bring_back(entry)
                entry.finish_loading()
            case Replay():
                if not entry.in_memory:
                    tape = self._again.tape(instruction.tick, entry.number) if not self.switched else -1
                    self._bring_back(entry, instruction.also, tape=tape)
            case Settle():
                if entry.in_memory:
                    entry.settle()

    def _space(self, instruction: TakeSpacer | EndSpacer) -> None:
        spacer = instruction.spacer
        if isinstance(instruction, EndSpacer):
            self._spaced.pop(spacer, None)
            return
        if not self.program.spacers:
            return
        try:
            self._spaced[spacer] = self.ledger.device.allocate(spacer.nbytes)
        except torch.OutOfMemoryError:
            # To ask in vain stops the device, so it is not tried again; and those that were taken may be in the way.
            self._spaced.clear()
            self.program.spacers = ()
            self.refused = True
            self.fallbacks["no room for a block that keeps free memory in one piece"] += 1

    def _can_go(self, entry: Entry) -> bool:
        if entry.in_memory and not entry.exclusive():
            self._be_late(entry.number)
            return False
        return entry.in_memory

    def _drop(self, entry: Entry) -> None:
        if entry.host is not None:
            entry.release()
            return
        frontier = self._frontier(entry) if not self.switched else None
        if frontier is None:
            self.fallbacks["swapped instead of recomputed"] += 1
            entry.start_saving()
        elif entry.number in self._to_check:
            if self.checks.begin(entry.number, entry.flat()):
                overwrite(entry.flat())  # a replay may get the same block, and see there what it does not write
            else:
                entry.start_saving()
                frontier = None
        if frontier is not None:
            self.ledger.pin(entry, frontier)
        entry.release()

    def _frontier(self, entry: Entry) -> list[Entry] | None:
        self.ops.trace_back(entry)
        node = entry.node
        if node is None or node.maker is None:
            return None
        return node.sources()

    def _be_late(self, number: int) -> None:
        """Something else still refers to a storage that should go: look again at every tick."""
        self.late.append(number)
        self._busy = True

    def _release_late(self) -> None:
        still: list[int] = []
        for number in self.late:
            entry = self.entries.get(number)
            if entry is None or not entry.views or not entry.in_memory or entry.number != number:
                continue
            if entry.exclusive():
                self.fallbacks["released later than planned"] += 1
                entry.start_saving()
                entry.release()
            else:
                still.append(number)
        self.late = still
        self._busy = self._watchful or bool(still)

    def _bring_back(self, entry: Entry, also: tuple[int, ...] = (), *, tape: int = -1) -> None:
        """From wherever its bytes can be had; `also` names storages to keep if a replay makes them on the way."""
        if entry.host is not None or entry.node is None:
            bring_back(entry)
            self._settle(entry)
            return
        others = [
            other
            for number in also
            if (other := self.entries.get(number)) is not None and other.views and not other.in_memory
            if other.host is None and other.node is not None and other is not entry
        ]
        self._again.make(entry, list(dict.fromkeys(others)), tape, settle=self._settle)

    def _hear_what_is_due(self) -> None:
        """Of replays that were never proven at this size: before what they led to is used."""
        told = self._refusal()
        if told:
            raise StepError(told)

    def hear_after_failure(self) -> None:
        """The step failed for another reason; its gradients may be used all the same."""
        with contextlib.suppress(Exception):  # the device itself may have failed
            self.refusal = self._refusal()

    def _refusal(self) -> str:
        with no_counting(), no_dispatch():  # to read the answers is no op of the program's, and no call
            wrong = self.checks.hear()
        if not wrong:
            return ""
        self.fallbacks["a replay gave other bits at a new size: the step was refused"] += 1
        return refusal(wrong, optimizer_began=self._tick_of_optimizer is not None)

    def met_other_calls(self) -> bool:
        return isinstance(self._calls, Gate) and self._calls.strays > 0

    def went_on_after_optimizer(self) -> bool:
        return self._tick_of_optimizer is not None and self._tick_of_optimizer != self.tick

    def _settle(self, entry: Entry) -> None:
        if self.tick > self._last_need.get(entry.number, -1):
            entry.settle()

    # phases

    def backward_begins(self) -> None:
        self._in_backward = True
        self.lineage.forget_forward()
        if self.at_backward is not None:
            self.at_backward()

    def backward_ended(self) -> None:
        """What another backward may replay must not be written unseen from now on."""
        self._in_backward = False
        if isinstance(self._calls, Gate) and self.lineage.is_read():
            self._calls.stay_open()

    def optimizer_begins(self) -> None:
        self._hear_what_is_due()
        if self._tick_of_optimizer is None:
            self._tick_of_optimizer = -1 if self._in_backward else self.tick
        self.backward_ended()
        if self._calls is not None:
            self._calls.pause()

    # drift

    def drift(self, why: str) -> None:
        self.fallbacks[f"drift: {why}"] += 1
        self._busy = True
        self._spaced.clear()
        if isinstance(self._calls, Gate):
            self._calls.give_up()
        self.reactive = Shelter(self.ledger, self.device_type, recorder=None, census=None, kept=self.kept())
        with no_dispatch():
            self.reactive.evict_idle(self.tick)

    def _switch(self, tick: int) -> bool:
        """Whether there is a plan for another step that went the same way up to this tick, and is followed from now on.

        Nothing is dropped any more: what its ops were proven for was another plan.
        """
        if self.measured or self.program.few_ticks is not None:
            return False
        if self._others is None:
            self._others = list(self._others_known())
        while self._others:
            program = self._others.pop(0)
            away = self._away(program, tick)
            if away is None:
                continue
            self.fallbacks["the step is another one that is known: its plan was taken up on the way"] += 1
            if isinstance(self._calls, Gate):
                self._calls.give_up()
            self.program, self.switched = program, True
            self.ops.note_no_more()
            self._excess_bytes = self._excess_of(program)
            self._spaced.clear()
            self._follow(program.all_ticks)
            with no_dispatch():
                for number in away:
                    self._let_go(number)
            return True
        return False

    def _away(self, program: Program, tick: int) -> list[int] | None:
        """What another plan has moved out by now; None where it does not go together with what was done so far."""
        expected = program.all_ticks.expected
        if len(expected) <= tick or any(a[:2] != b[:2] for a, b in zip(self._expected[:tick], expected, strict=False)):
            return None
        alive = [(number, entry) for number, entry in self.entries.items() if entry.views]
        dropped = {number for number, entry in alive if not entry.in_memory and entry.host is None}
        away = program.away_after(tick)
        if self._excess_of(program) > (program.reserve_bytes or 0) or any(
            not isinstance(away.get(n), Drop) for n in dropped
        ):
            return None
        return list(away) if all(number in self.entries for number in away) else None

    def _excess_of(self, program: Program) -> int:
        storages = program.trace.storages
        return sum(max(0, entry.nbytes - storages[number].nbytes) for number, entry in self.entries.items())

    def _let_go(self, number: int) -> None:
        entry = self.entries[number]
        if not entry.views or not entry.in_memory or entry.number != number:  # it has joined another
            return
        entry.finish_loading()
        if entry.exclusive():
            entry.start_saving()
            entry.release()
        else:
            self._be_late(number)
