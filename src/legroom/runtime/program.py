"""A schedule laid out for running: what to do and to expect at every tick, and which calls to look into.

Made once for each plan and used by every step; what steps learn about the program's calls is kept here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Container, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from legroom.arrange import LARGE_BYTES, Spacer
from legroom.ir import Storage, Trace
from legroom.runtime.calls import Called, Calls, Lesson, countable, needed_ticks
from legroom.runtime.fused import STATISTICS
from legroom.runtime.knowncalls import KnownCall
from legroom.runtime.knownsizes import KnownAt, KnownSizes, Variant
from legroom.runtime.pressure import Pressure, Relief
from legroom.runtime.replay import Tape
from legroom.schedule import Drop, Instruction, Level, Release, Replay, Schedule, SwapOut
from legroom.tables import Ints

NO_STORAGE = -2  # the number of none
_SMALL_BYTES = 2**14  # not worth an entry unless a plan moves it
MOST_LESSONS = 4  # steps that could not be learned from
# Of what is free at a tick: room is made sure of for more. 752 of 921 MiB were in pieces when a step of T5-base found
# none for 192.
_MUCH = 1 / 10

_numbers = itertools.count()


class TakeSpacer(NamedTuple):
    tick: int
    storage: int  # of none
    spacer: Spacer


class EndSpacer(NamedTuple):
    tick: int
    storage: int
    spacer: Spacer


class MakeRoom(NamedTuple):
    """Before the program asks for it: so much in one piece, which may be one request."""

    tick: int
    storage: int
    nbytes: int


class Settle(NamedTuple):
    """What a replay brought back was read by another for the last time, and is not dropped any more."""

    tick: int
    storage: int


Command = Instruction | TakeSpacer | EndSpacer | MakeRoom | Settle


class Twin(NamedTuple):
    """A storage that has the bytes of another one, which was made before."""

    first: int  # that other one
    made_again: bool  # whether a replay makes the first one, too
    last: bool  # of those that the first one stands for, to be dropped


class Recipe(NamedTuple):
    """How a storage is made again."""

    ops: tuple[int, ...]  # up to the one that makes it
    output: int  # which of what that one writes it is
    short: tuple[int, ...]  # those of them that need not all of their work


class Ticks(NamedTuple):
    """What to do and what to expect, tick by tick."""

    numbers: Sequence[int]  # of the ticks, in the trace
    at: list[tuple[Command, ...]]
    # (whether it is a pack, storage, bytes, whether it needs no entry). What could never be moved needs none. All
    # else gets one, kept by the plan or not: if the step drifts it must be able to go. Where hooks are left out, only
    # what is moved or read by a replay: the rest has no hook as it is.
    expected: list[tuple[bool, int, int, bool]]
    last_need: dict[int, int]  # by storage that is dropped: when that is, or when a replay reads it
    light: list[int]  # packs at which nothing is to be done, of what needs no entry: 1; 2: replays have a use for it


# Ops whose results are as large as what is in their arguments has it, or that tell the program what that is.
_BY_CONTENT = frozenset(
    """
    _local_scalar_dense _unique _unique2 argwhere bincount equal histc index is_nonzero item masked_select nonzero
    nonzero_numpy nonzero_static repeat_interleave unique_consecutive unique_dim
    """.split()  # noqa: SIM905
)


def _opname(name: str) -> str:
    return name.split(".")[1] if "." in name else name


def _may_have_to_go(storage: Storage) -> bool:
    """What is read again at once has no gap, but stays for longer where the step goes another way than planned."""
    return bool(storage.gaps) or (storage.kind == "activation" and storage.nbytes >= _SMALL_BYTES)


def also_of(instruction: Command) -> tuple[int, ...]:
    return instruction.also if isinstance(instruction, Replay) else ()


class _Needs:
    """What a step asks for between two ticks, where that is much of what is free."""

    def __init__(self, trace: Trace, curve: Sequence[Level], budget_bytes: int) -> None:
        levels = np.array([level for _, level, _ in curve], np.int64)
        # What the tick's own work takes on the way is over by then.
        above = np.array([tick.peak_bytes - tick.level_bytes for tick in trace.ticks], np.int64)
        tight = (above > LARGE_BYTES) & (above > _MUCH * (budget_bytes - levels))
        self._nbytes: Ints = np.where(tight, above, 0)

    @property
    def most_bytes(self) -> int:
        return int(self._nbytes.max(initial=0))

    def rooms(self, hooked: Sequence[int]) -> dict[int, tuple[MakeRoom]]:
        """By tick, for all until the next of those at which there are hooks."""
        if not hooked:
            return {}
        needs = np.maximum.reduceat(self._nbytes, np.array(hooked)).tolist()
        return {tick: (MakeRoom(tick, NO_STORAGE, need),) for tick, need in zip(hooked, needs, strict=True) if need}


class Program:
    """A schedule laid out for running: made once for each plan, used by every step.

    reserve_bytes: where it is given, smaller tensors than the trace has are as good, and larger ones as long as they
    are together larger by no more than this. sizes_fit: whether sizes were those of the trace wherever it was looked.
    spacers: blocks that keep the free memory in one piece. room: the step's memory curve, and the bytes that its cap
    leaves for it, where nobody has worked out that its requests find room.
    """

    def __init__(
        self,
        trace: Trace,
        schedule: Schedule,
        *,
        reserve_bytes: int | None = None,
        sizes_fit: bool = True,
        spacers: Sequence[Spacer] = (),
        room: tuple[Sequence[Level], int] | None = None,
    ) -> None:
        self.trace = trace
        self._needs = _Needs(trace, *room) if room is not None else None
        self.in_vain: set[int] = set()  # ticks at which there was no room, and nothing that could go for it
        self.reserve_bytes = reserve_bytes
        self._sizes_fit = sizes_fit
        self.idle = not schedule.instructions
        self.spacers = tuple(spacers)
        self._instructions: dict[int, list[Command]] = {}
        for spacer in spacers:  # those that end go first: what they leave may be what the others are to take
            if spacer.until >= len(trace.ticks):
                continue  # it ends with the step
            self._instructions.setdefault(spacer.until, []).append(EndSpacer(spacer.until, NO_STORAGE, spacer))
        for spacer in spacers:
            self._instructions.setdefault(spacer.tick, []).append(TakeSpacer(spacer.tick, NO_STORAGE, spacer))
        for instruction in schedule.instructions:
            self._instructions.setdefault(instruction.tick, []).append(instruction)
        self._replays = replays = [i for i in schedule.instructions if isinstance(i, Replay)]
        dropped = {i.storage: i.tick for i in schedule.instructions if isinstance(i, Drop)}
        read = {storage: i.tick for i in replays for storage in self._read_by(i)}
        for storage in sorted(dropped.keys() & read.keys()):
            if read[storage] > dropped[storage]:
                self._instructions[read[storage]].append(Settle(read[storage], storage))
        replayed = {op for i in replays for op in i.ops}
        self.twins = self._twins_among(replayed)
        firsts = {twin.first for twin in self.twins.values()}
        self.with_twins = frozenset(firsts | self.twins.keys())
        # Which shows only where the op that made the first one is recorded, too.
        replayed |= {op.id for op in trace.ops if firsts and any(s in firsts and not v for s, v in op.writes)}
        in_mode = [op for op in trace.ops if op.phase != "backward" and not op.name.startswith("legroom.")]
        # Of normalisations that need not all of their work again, by number: the storages of their statistics.
        self.statistics: dict[int, tuple[int, int]] = {}
        moved = {storage for i in schedule.instructions for storage in (i.storage, *also_of(i))}
        for i, op in enumerate(in_mode):
            places = STATISTICS.get(op.name)
            if places is not None and op.id in replayed and op.short and len(op.writes) == 3:
                first, second = (op.writes[place][0] for place in places)
                if first not in moved and second not in moved:  # what goes is not to be held
                    self.statistics[i] = first, second
        self.statistic_storages = frozenset(itertools.chain(*self.statistics.values()))
        self._short = frozenset(in_mode[i].id for i in self.statistics)
        self.all_ticks = self._ticks(range(len(trace.ticks)))
        self.few_ticks: Ticks | None = None  # where hooks are on inside some calls only
        self._in_mode, self._replayed = in_mode, replayed
        self.recorded: dict[int, Any] = {i: op.name for i, op in enumerate(in_mode) if op.id in replayed}
        self.calls: Calls | None = None  # learned by the first step that goes as planned
        self.casts_weights = False  # whether calls are known that make autocast's copies of weights
        self.learns = not self.idle
        self.learns_itself = False  # what was learned under another plan does not hold here
        self.lesson: Lesson | None = None
        self.lessons = 0
        self._hooked: Container[int] = ()
        self._variants: Sequence[Variant] = ()
        self.lesson_number = next(_numbers)  # of no other program, and of no lesson before
        self.tapes: dict[int, Tape | None] = {}  # by storage and tick, from the first time that each replay ran
        self.replayed_storages = sorted({storage for i in replays for storage in (i.storage, *i.also)})

    def _twins_among(self, replayed: Set[int]) -> dict[int, Twin]:
        """By storage, those that have the bytes of another one and are dropped."""
        ops = [self.trace.ops[op] for op in replayed]
        first_of = {op.writes[0][0]: op.reads[0][0] for op in ops if op.twin}
        if not first_of:
            return {}
        made = {storage for op in ops for storage, _ in op.writes}
        drops = [i.storage for here in self._instructions.values() for i in here if isinstance(i, Drop)]
        order = [storage for storage in dict.fromkeys(drops) if storage in first_of]
        last = {first_of[storage]: storage for storage in order}
        return {
            storage: Twin(first := first_of[storage], made_again=first in made, last=last[first] == storage)
            for storage in order
        }

    def _read_by(self, again: Replay) -> set[int]:
        """What a replay reads that it does not make itself."""
        ops = [self.trace.ops[op] for op in again.ops]
        made = {value for op in ops for value in op.writes}
        return {storage for op in ops for storage, version in op.reads if (storage, version) not in made}

    @functools.cached_property
    def recipes(self) -> dict[int, tuple[Recipe, ...]]:
        """How each storage is made again, once for each time."""
        found: dict[int, list[Recipe]] = {}
        ops = self.trace.ops
        for again in self._replays:
            for storage in (again.storage, *again.also):
                makes = [i for i, op in enumerate(again.ops) if any(s == storage for s, _ in ops[op].writes)]
                written = [s for s, _ in ops[again.ops[makes[-1]]].writes]
                run = again.ops[: makes[-1] + 1]
                short = tuple(op for op in run if op in self._short)
                found.setdefault(storage, []).append(Recipe(run, written.index(storage), short))
        return {storage: tuple(times) for storage, times in found.items()}

    def spaced_bytes(self, tick: int) -> int:
        """What spacers take in the segment after a tick."""
        return sum(spacer.nbytes for spacer in self.spacers if spacer.tick <= tick < spacer.until)

    @functools.cached_property
    def pressure(self) -> Pressure | None:
        return Pressure(self.trace) if self.trace.requests else None

    @functools.cached_property
    def relief(self) -> Relief:
        return Relief(self.trace)

    # For learning, and not before: plans that follow an input are made between two steps.

    @functools.cached_property
    def names(self) -> dict[int, str]:
        """Of the ops whose numbers must be right; a profiler's marks come and go."""
        forward = ((i, op.name) for i, op in enumerate(self._in_mode) if op.phase == "forward")
        return {i: name for i, name in forward if not name.startswith("profiler.")}

    @functools.cached_property
    def watched(self) -> frozenset[int]:
        """Ops that must be seen: those that are replayed, and those that write to something that replays read or make.

        While an optimizer runs, everything is seen if anything may be replayed afterwards.
        """
        touched = self._touched
        forward = ((i, op) for i, op in enumerate(self._in_mode) if op.phase == "forward")
        return frozenset(self.recorded) | {i for i, op in forward if any(v and s in touched for s, v in op.writes)}

    @functools.cached_property
    def _touched(self) -> frozenset[int]:
        """Storages that replays read or make."""
        replayed = (op for op in self._in_mode if op.id in self._replayed)
        return frozenset(storage for op in replayed for storage, _ in (*op.reads, *op.writes))

    @functools.cached_property
    def writing(self) -> frozenset[int]:
        """Ops that write at all: the same calls may write to something else in another step. What gives a tensor
        another shape in place is counted as a write by PyTorch."""
        forward = ((i, op) for i, op in enumerate(self._in_mode) if op.phase == "forward")
        return frozenset(i for i, op in forward if op.name.split(".")[1].endswith("_") or any(v for _, v in op.writes))

    @functools.cached_property
    def countable(self) -> bool:
        return countable(self.trace)

    def _ticks(self, hooked: Sequence[int], needed: Container[int] | None = None) -> Ticks:
        """needed: storages that need an entry; None: all that might have to go."""
        trace = self.trace
        kept = self.statistic_storages
        sure = needed is not None  # else no hook is left out
        rooms = self._needs.rooms(hooked) if self._needs is not None else {}
        at = [(*self._instructions.get(tick, ()), *rooms.get(tick, ())) for tick in hooked]
        expected = []
        for tick in hooked:
            storage = trace.storages[trace.ticks[tick].storage]
            plain = not _may_have_to_go(storage) or (needed is not None and storage.id not in needed)
            expected.append((trace.ticks[tick].kind == "pack", storage.id, storage.nbytes, plain))
        return Ticks(
            numbers=hooked,
            # One more than there are ticks, and not empty: a step that goes on for longer is noticed there.
            at=[*at, (Drop(-1, -1),)],
            expected=expected,
            last_need={i.storage: place for place, here in enumerate(at) for i in here if isinstance(i, Drop | Settle)},
            light=[
                (2 if number in kept else 1)
                if is_pack and plain and not at[i] and (sure or self._is_sure(number))
                else 0
                for i, (is_pack, number, _, plain) in enumerate(expected)
            ]
            + [0],
        )

    def away_after(self, tick: int) -> dict[int, Command]:
        """The storages that it has moved out by then, with the last instruction that did so."""
        away: dict[int, Command] = {}
        for here in self.all_ticks.at[: tick + 1]:
            for instruction in here:
                if isinstance(instruction, SwapOut | Release | Drop):
                    away[instruction.storage] = instruction
                elif not isinstance(instruction, Settle):
                    for number in (instruction.storage, *also_of(instruction)):
                        away.pop(number, None)
        return away

    def _is_sure(self, storage: int) -> bool:
        """Whether a save of it need not be looked at. Where sizes follow the input, what is computed may be larger than
        planned for."""
        return self.reserve_bytes is None or self.trace.storages[storage].persistent

    @functools.cached_property
    def sizes_are_sure(self) -> bool:
        """Whether nothing that is saved can depend on what is in the inputs, beside their sizes."""
        if self.reserve_bytes is None:
            return True
        last = max((tick.op for tick in self.trace.ticks if tick.kind == "pack"), default=0)
        return self._sizes_fit and not any(_opname(op.name) in _BY_CONTENT for op in self.trace.ops[:last])

    def learn_anew(self) -> None:
        """The calls were others than those that were learned."""
        self.lessons += 1
        if self.lessons < MOST_LESSONS and self.calls is not None:
            self.calls = self.few_ticks = self.lesson = None
            self.learns = self.learns_itself = True

    def learn(self, lesson: Lesson, known: Mapping[int, KnownCall], *, may_leave_hooks_out: bool) -> None:
        """Which calls to look into, from a step that went as planned. known: those that follow from their arguments, by
        place."""
        self.learns = False
        self.lesson = lesson
        vars(self).pop("_places", None)
        self.few_ticks = None
        self.lesson_number = next(_numbers)
        ticks = self.trace.ticks
        packs = [i for i, tick in enumerate(ticks) if tick.kind == "pack"]
        if not lesson.all_inside(self.watched | self.writing, ()):
            return
        hooked = set(range(len(ticks)))
        # Where sizes are not sure, all that is saved is looked at.
        may_leave_hooks_out &= self.sizes_are_sure and lesson.all_inside(frozenset(), packs)
        if may_leave_hooks_out and not lesson.saves_in_backward(ticks):
            moved = {i.storage for here in self._instructions.values() for i in here}
            moved |= {storage for here in self._instructions.values() for i in here for storage in also_of(i)}
            moved |= {twin.first for twin in self.twins.values()}
            moved |= self._spare(moved)
            # What shares a hook with them and is not read by a replay stays where it is, if the step drifts as well.
            needed = moved | self._touched
            moved |= {ticks[tick].storage for tick in self._instructions}
            moved |= self.statistic_storages
            moved |= self._read_inside(lesson.calls)
            hooked = needed_ticks(lesson.calls, ticks, moved)
            self.few_ticks = self._ticks(sorted(hooked), needed)
        self._hooked = hooked
        self.calls = Calls(
            lesson.calls,
            ticks,
            watched_ops=self.watched,
            writing_ops=self.writing,
            hooked=hooked,
            known={i: self.with_statistics(call) for i, call in known.items() if self._may_go_unseen(i, call)},
        )
        self._variants = [self._variant(place, lesson.calls[place]) for place in self.calls.looked_at()]
        self.casts_weights = any(way.known is not None and way.known.casts_weights for way in self.calls.ways)

    def _spare(self, moved: set[int]) -> set[int]:
        """Of what stays, as much as may have to go to make room, that first which is read last."""
        missing = self._needs.most_bytes if self._needs is not None else 0
        if not missing:
            return set()
        read = {tick.storage: None for tick in reversed(self.trace.ticks) if tick.kind == "unpack"}
        spare: set[int] = set()
        for storage in map(self.trace.storages.__getitem__, read):
            if missing > 0 and storage.id not in moved and storage.gaps and storage.nbytes > LARGE_BYTES:
                spare.add(storage.id)
                missing -= storage.nbytes
        return spare

    def _read_inside(self, calls: Sequence[Called]) -> set[int]:
        """What calls save that replayed ops in them read, and other ops in them make, such as autocast's copies: only
        their hooks show it where ops are not looked at, and to look at those of a call takes longer than its hooks."""
        shown: set[int] = set()
        for call in calls:
            recorded = [self._in_mode[op] for op in call.ops if op in self.recorded]
            if recorded:
                others = [self._in_mode[op] for op in call.ops if op not in self.recorded and op < len(self._in_mode)]
                made = {value for op in others for value in op.writes}
                read = {value for op in recorded for value in op.reads}
                shown |= {storage for storage, _ in read & made} & {
                    self.trace.ticks[tick].storage for tick in call.packs(self.trace.ticks)
                }
        return shown

    def _variant(self, place: int, call: Called) -> Variant:
        recorded = tuple(op for op in call.ops if op in self.recorded)
        hooked = tuple(tick for tick in call.packs(self.trace.ticks) if tick in self._hooked)
        return Variant(place, recorded, hooked, tuple(map(self.statistics.get, recorded)))

    def known_at(self, known: KnownSizes, sizes: tuple[int, ...]) -> KnownAt | None:
        """What is known of its calls at a size of the input. None: it has not learned which calls there are."""
        if self.calls is None:
            return None
        assert self.lesson is not None
        at = known.at(self.lesson, self.lesson_number, self._variants, sizes, self._may_go_unseen)
        self.casts_weights |= at.casts_weights
        return at

    def told_by(self, storage: int, at: KnownAt) -> tuple[int, ...]:
        """Numbers for what tells the calls by which a storage is made again, of those that are told."""
        return at.told_by(self._places[storage]) if at.told else ()

    @functools.cached_property
    def _places(self) -> dict[int, list[int]]:
        """Of each storage that is made again, the places of the calls whose ops are run."""
        assert self.lesson is not None
        numbers = {op.id: number for number, op in enumerate(self._in_mode)}
        place_of = {op: place for place, call in enumerate(self.lesson.calls) for op in call.ops}
        return {
            storage: sorted({place_of[numbers[op]] for recipe in recipes for op in recipe.ops if op in numbers})
            for storage, recipes in self.recipes.items()
        }

    def prepare_proofs(self) -> None:
        """Work out ahead what says how things are made again, which takes milliseconds."""
        _ = self.recipes
        if self.calls is not None:
            _ = self._places

    def with_statistics(self, known: KnownCall) -> KnownCall:
        ops = (op._replace(statistics=self.statistics.get(op.number)) for op in known.ops)
        return known._replace(ops=tuple(ops)) if self.statistics else known

    def _may_go_unseen(self, place: int, known: KnownCall) -> bool:
        """Not where something that its ops read is not shown."""
        if not known.needs:
            return True
        assert self.lesson is not None
        hooked = self._hooked
        ticks = (self.trace.ticks[tick] for tick in self.lesson.calls[place].ticks if tick in hooked)
        storages = (self.trace.storages[tick.storage] for tick in ticks)
        return known.needs <= {storage.id for storage in storages if _may_have_to_go(storage)}

    def one_replayed(self, number: int) -> frozenset[int]:
        """One of the storages that are replayed, another with every number; none where none is."""
        count = len(self.replayed_storages)
        return frozenset((self.replayed_storages[number % count],)) if count else frozenset()
