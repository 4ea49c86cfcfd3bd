"""One step of a room, from entering to leaving: what is intercepted, what is measured, and how it is all undone."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch._C import _DisableTorchDispatch as no_dispatch

from legroom.alloclog import OPTIMIZER, Log, mark, profiler_is_free
from legroom.curve import Curve, read_curve
from legroom.runtime.census import Census, Lasting
from legroom.runtime.executor import Executor
from legroom.runtime.inputs import InputWatch, Signature
from legroom.runtime.knownsizes import KnownAt
from legroom.runtime.modes import Interception, OpMode
from legroom.runtime.program import Program
from legroom.runtime.recorder import Outline, Recorder
from legroom.runtime.residency import Ledger
from legroom.runtime.shelter import Shelter, module_paths, optimizer_phase
from legroom.runtime.undo import Undo


@dataclass(slots=True)
class Habits:
    """What steps of a program were seen to do."""

    # A closure, an optimizer inside backward, several of them: once one has begun, there is no time left to refuse.
    goes_on_after_optimizer: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """What steps of one room share."""

    ledger: Ledger
    device_type: str
    model: torch.nn.Module | None
    optimizer: torch.optim.Optimizer | None
    fallbacks: Counter[str]
    distrusted: set[str]  # names of ops whose replay gave other bits
    habits: Habits
    lasting: Lasting
    doubted: set[str]  # ops to be distrusted from the next step on: a replay after the end of a step gave other bits

    def kept(self) -> frozenset[int]:
        """Storages of parameters and buffers, which come through the hooks too and are not ours to move."""
        tensors: list[torch.Tensor] = []
        if self.model is not None:
            tensors += [*self.model.parameters(), *self.model.buffers()]
        if self.optimizer is not None:
            tensors += [p for group in self.optimizer.param_groups for p in group["params"]]
        return frozenset(t.untyped_storage()._cdata for t in tensors if t.layout is torch.strided)

    def executor(
        self,
        program: Program,
        *,
        checks: frozenset[int],
        measured: bool,
        wait: bool = False,
        due: bool = False,
        trial: bool = False,
        known_at: KnownAt | None = None,
        others: Callable[[], Sequence[Program]] = tuple,
    ) -> Executor:
        return Executor(
            self.ledger,
            program,
            self.device_type,
            kept=self.kept,
            checks=checks,
            wait=wait,
            due=due,
            measured=measured,
            trial=trial,
            known_at=known_at,
            fallbacks=self.fallbacks,
            doubted=self.doubted,
            others=others,
        )

    def census(self, *, what: bool) -> Census:
        """Only the first one looks for garbage among old objects: what steps leave behind is young, as nothing grows
        old while one runs. In a large program a full collection takes a quarter of a second.
        """
        thorough = not self.ledger.counted
        self.ledger.counted = True
        return Census(self.ledger.device, self.model, self.optimizer, thorough=thorough, what=what)

    def alive_bytes(self) -> int:
        """What is alive between steps, as far as it can be told quickly: all of it, or gradients and state."""
        alive = self.ledger.device.alive_bytes()
        return alive if alive is not None else self.lasting.nbytes()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Without the garbage collector, if it runs at all."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _curve_of(log: Log, census: Census) -> Curve:
    """Events are made by the ten thousand, and all stay: passes over them take a tenth of the time of reading."""
    with no_collection():
        return read_curve(log.stop(), census.base_bytes)


class ShelteredStep:
    """A step under the reactive policy, recorded where the profiler is free."""

    def __init__(
        self,
        setting: Setting,
        *,
        proving: bool,
        trusting: bool,
        recording: bool = True,
        refusable: bool = True,
        blocks: bool = True,
        outlines: Sequence[Outline] = (),
    ) -> None:
        """recording: so that it can be planned for. refusable: held against the budget, and taken back if over it.
        blocks: with what it asks of the allocator, block by block. outlines: of steps whose ops were proven, which need
        not be proven again."""
        self._setting = setting
        self.recording = recording
        self.refusable = refusable
        self.undo = Undo(setting.ledger.device, setting.optimizer if refusable else None)
        self._trusting = trusting
        self._stack = contextlib.ExitStack()
        self._log: Log | None = None
        self.recorder: Recorder | None = None
        self.census: Census | None = None
        self.curve: Curve | None = None
        self.alive_bytes = 0  # when it began
        self.ops_before_call = 0  # that ran before the model was called
        self.called_in_optimizer = False  # from a closure
        self._ticks_before_optimizer: int | None = None
        self._proving = proving
        self._blocks = blocks
        self._outlines = outlines

    def called(self, watch: InputWatch, number: int) -> None:
        """The model was called."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None or hooks[0] != self.shelter.pack:
            watch.under_hooks = True
        if number == 0 and self.recorder is not None:
            self.ops_before_call = len(self.recorder.ops)
            self.called_in_optimizer = self.recorder.phase == "optimizer"
            if self.recorder.ticks:
                watch.under_hooks = True  # what saves before the call cannot be decided at the call

    def begin(self, depths: tuple[int, int] | None = None) -> None:
        setting = self._setting
        setting.ledger.generation += 1
        self.alive_bytes = setting.alive_bytes()
        self._stack.enter_context(no_collection())
        measured = (self.recording or self.refusable) and profiler_is_free()
        if measured:
            self.census = setting.census(what=True)
        elif self.recording:
            setting.fallbacks["another profiler runs: the step was not recorded"] += 1
        elif self.refusable:
            setting.fallbacks["another profiler runs: the step was not held against the budget"] += 1
        if measured and self.recording:
            assert self.census is not None
            self.recorder = Recorder(
                setting.ledger.device,
                self.census,
                proving=self._proving and self._trusting,
                distrusted=frozenset(setting.distrusted),
                undo=self.undo,
                outlines=self._outlines,
            )
        self.shelter = Shelter(
            setting.ledger,
            setting.device_type,
            recorder=self.recorder,
            census=self.census,
            kept=setting.kept(),
            undo=self.undo if measured else None,
        )
        if self.recorder is not None:
            self._stack.enter_context(module_paths(setting.model, self.recorder))
        if measured:
            self._stack.enter_context(optimizer_phase(self._optimizer_begins, self._optimizer_ends))
            device, recording = setting.ledger.device, self.recording
            self._log = device.log(ops=recording, shapes=not self._outlines, blocks=recording and self._blocks)
            self._log.start()
        shelter = self.shelter
        self._stack.enter_context(
            Interception(
                shelter.pack,
                shelter.unpack,
                mode=OpMode(shelter.op),
                entered=_nothing,
                left=_nothing,
                depths=depths,
            )
        )

    def _optimizer_begins(self) -> None:
        if self.recorder is not None:
            if self._ticks_before_optimizer is None:
                self._ticks_before_optimizer = len(self.recorder.ticks)
            with no_dispatch():
                self.recorder.compare_lasting()
            self.recorder.phase = "optimizer"
        with mark(OPTIMIZER):
            pass

    def _optimizer_ends(self) -> None:
        if self.recorder is not None:
            self.recorder.phase = "forward"

    def end(self, *, failed: bool) -> None:
        self._setting.ledger.on_death = None
        try:
            if self.census is not None and not failed:
                self.census.note_deaths()
            self._stack.close()
            before = self._ticks_before_optimizer
            if self.recorder is not None and before is not None and len(self.recorder.ticks) > before:
                self._setting.habits.goes_on_after_optimizer = True
            if self.recorder is not None and not failed:
                self.recorder.compare_lasting()
        finally:
            if self._log is not None:
                if failed:
                    self._log.cancel()
                else:
                    assert self.census is not None
                    self.curve = _curve_of(self._log, self.census)

    def needed_bytes(self) -> int:
        """What such a step takes: its peak, or what it took before the optimizer beside the state made since."""
        assert self.curve is not None
        return max(self.curve.measured_peak_bytes, self.curve.before_optimizer_bytes + self.undo.new_state_bytes())


class PlannedStep:
    """A step that follows a schedule."""

    def __init__(
        self,
        setting: Setting,
        program: Program,
        *,
        checks: frozenset[int],
        measure: bool,
        trial: bool = False,
        wait: bool = False,
        due: bool = False,
        known_at: KnownAt | None = None,
        others: Callable[[], Sequence[Program]] = tuple,
        at_backward: Callable[[], None] | None = None,
    ) -> None:
        """checks: storages whose replays are held against the real bytes. wait: before they are used. due: before the
        optimizer runs. others: what may be followed instead, where the step turns out to be another one that is known.
        trial: see `pressure`. known_at: the input's size, where that varies. at_backward: called when it begins."""
        self._setting = setting
        self._others = others
        self._at_backward = at_backward
        self._program = program
        self._checks = checks
        self._wait, self._due = wait, due
        self._trial = trial
        self.known_at = known_at
        self._measure = measure and profiler_is_free()
        self._stack = contextlib.ExitStack()
        self._log: Log | None = None
        self.census: Census | None = None
        self.curve: Curve | None = None

    def begin(self, depths: tuple[int, int] | None = None) -> None:
        setting = self._setting
        setting.ledger.generation += 1
        self.executor = executor = setting.executor(
            self._program,
            checks=self._checks,
            wait=self._wait,
            due=self._due,
            measured=self._measure,
            trial=self._trial,
            known_at=self.known_at,
            others=self._others,
        )
        executor.at_backward = self._at_backward
        if self._measure:
            self.census = executor.census = setting.census(what=False)
            self._log = setting.ledger.device.log(ops=False)
            self._log.start()
        # What a step makes for itself dies with it; passes over it meanwhile took 5 to 9 ms of 165 on a GPU's host.
        self._stack.enter_context(no_collection())
        self._stack.enter_context(optimizer_phase(executor.optimizer_begins, _nothing))
        self._stack.enter_context(executor.interception(depths))

    @property
    def drifted(self) -> bool:
        return self.executor.reactive is not None

    def end(self, *, failed: bool) -> None:
        try:
            if self.census is not None:
                self.census.note_deaths()
            self._stack.close()
            if self.executor.went_on_after_optimizer():
                self._setting.habits.goes_on_after_optimizer = True
            if failed:
                self.executor.hear_after_failure()
            else:
                self.executor.finish()
        finally:
            self.executor.close()
            if self._log is not None:
                if failed:
                    self._log.cancel()
                else:
                    assert self.census is not None
                    self.curve = _curve_of(self._log, self.census)


class IdleStep:
    """A step whose plan keeps everything: nothing is intercepted unless the model is called with something else.

    Hooks that do nothing cost a few microseconds a saved tensor, twice: where the host is the bottleneck, that is a
    tenth of the step.
    """

    curve: Curve | None = None
    census: Census | None = None

    def __init__(self, setting: Setting, program: Program, watch: InputWatch, expected: tuple[Signature, ...]) -> None:
        self._setting = setting
        self._program = program
        self._watch = watch
        self._expected = expected
        self._stack = contextlib.ExitStack()
        self.executor: Executor | None = None  # from the moment that the step is another one
        self.drifted = False

    def begin(self) -> None:
        self._setting.ledger.generation += 1
        self._watch.on_call = self._called

    def end(self, *, failed: bool) -> None:
        self._stack.close()
        if not failed and not self.drifted and len(self._watch.calls) != len(self._expected):
            self.drifted = True
            self._setting.fallbacks["drift: the model was called more or less often"] += 1
        if self.executor is not None and not failed:
            self.executor.finish()

    def _called(self, number: int, signature: Signature) -> None:
        if self.drifted or self._expected[number : number + 1] == (signature,):
            return
        self.drifted = True
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            # The program would take ours off the stack in place of its own.
            self._setting.fallbacks["drift: the model was called with something else, under other hooks"] += 1
            return
        setting = self._setting
        self.executor = executor = setting.executor(self._program, checks=frozenset(), measured=False)
        executor.drift("the model was called with something else")
        self._stack.enter_context(
            Interception(*executor.hooks(), mode=None, entered=executor.backward_begins, left=_nothing)
        )


def _nothing() -> None:
    pass
