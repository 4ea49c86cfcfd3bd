"""Where inputs change size, calls are recorded without a look at their ops, as known from sizes met before."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import legroom
from legroom.hardware import PRESETS
from legroom.ladder import MOST_RUNGS
from legroom.runtime import lifting
from legroom.runtime.calls import Called, Lesson
from legroom.runtime.device import CpuDevice
from legroom.runtime.knowncalls import Inner, KnownCall
from legroom.runtime.knownsizes import (
    MOST_EXACT,
    MOST_LESSONS,
    MOST_MISSES,
    MOST_PLANS,
    MOST_SIZES,
    MOST_STEPS,
    KnownAt,
    KnownSizes,
    Variant,
    _Known,
)
from legroom.runtime.lifting import LiftedCall
from legroom.runtime.plannedops import PlannedOps
from legroom.runtime.program import Program
from legroom.runtime.steps import PlannedStep
from tests.runtime.test_calls import nothing_left
from tests.runtime.test_known_calls import (
    CHANGES,
    CHANNELS,
    PIXELS,
    PLAIN,
    Change,
    Net,
    built,
    other_kernels,
    recorded,
    same_bits,
)
from tests.runtime.test_lifting import call
from tests.runtime.test_random_plans import random_planner

__all__ = ["other_kernels", "recorded"]  # fixtures
pytestmark = pytest.mark.usefixtures("one_thread")

FIRST = [16, 9, 12, 14, 10, 15, 11, 13]
BACK = 13, 15
SIZES = [*FIRST, *BACK * 5]
TURN = len(FIRST) + 6  # from there on something is another; at both sizes the calls are known by then


def batch(number: int) -> torch.Tensor:
    shape = SIZES[number], CHANNELS, PIXELS, PIXELS
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


@pytest.fixture(autouse=True)
def _nothing_left_over() -> None:
    """Tensors of the last test in a reference cycle would count as memory of this one."""
    gc.collect()


@cache
def budget() -> int:
    """So small that none of the sizes that come back fits as it is: plans that keep everything are not made better."""
    net, optimizer = built()
    x = torch.randn(min(BACK), CHANNELS, PIXELS, PIXELS)

    def step() -> None:
        net(x, PLAIN).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    peak = legroom.capture(step, model=net, optimizer=optimizer).peak_bytes
    x = torch.randn(max(SIZES), CHANNELS, PIXELS, PIXELS)
    floor = legroom.floor_bytes(legroom.capture(step, model=net, optimizer=optimizer))
    assert floor < peak
    return (floor + 3 * peak) // 4


def trained(
    net: Net,
    optimizer: torch.optim.Optimizer,
    around: Callable[[], Any],
    change: Change,
    before: dict[str, Any],
    ended: Callable[[int], None] = lambda _: None,
) -> list[Any]:
    other, given, inside = change
    torch.manual_seed(1)
    taken: list[Any] = []
    for number in range(len(SIZES)):
        turned = number >= TURN
        x = given(batch(number)) if turned else batch(number)
        with around(), inside() if turned else contextlib.nullcontext():
            loss = net(x, {**PLAIN, **before, **(other if turned else {})})
            loss.backward()
            taken += [loss.item(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
        ended(number)
    return [*taken, *(t.clone() for t in (*net.parameters(), *net.buffers()))]


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many ops were."""
    counts: Counter[str] = Counter()
    real = PlannedOps.op

    def op(self: PlannedOps, *args: Any) -> Any:
        counts["ops"] += 1
        return real(self, *args)

    monkeypatch.setattr(PlannedOps, "op", op)
    return counts


@pytest.mark.parametrize(
    ("name", "few_hooks"),
    [
        ("nothing", False),
        ("nothing", True),
        ("another factor", True),
        ("an integer", False),
        ("a zero of the other sign", True),
        ("channels last", True),
        ("elsewhere in a storage", True),
        ("that needs a gradient", True),
        ("autocast", True),
        ("a mode of the program", True),
    ],
)
def test_a_size_that_comes_back(
    name: str,
    few_hooks: bool,
    recorded: Counter[str],
    looked_at: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CpuDevice, "leaves_hooks_out", few_hooks)
    before = {"scale": 0.0} if "zero" in name else {}
    net, optimizer = built()
    ops: list[int] = []
    measured: list[bool] = []
    with legroom.fit(net, optimizer, budget=budget(), planner=random_planner((0, 0, 1, 0), seed=0)) as room:

        def ended(number: int) -> None:
            assert room._following is not None or number < 3
            if room._following is not None:
                room._following.settle()
                run = room._following.report().steps
                measured.append(bool(run and run[-1].measured_bytes))
            ops.append(looked_at.pop("ops", 0))

        mine = trained(net, optimizer, room.step, CHANGES[name], before, ended)
        fallbacks = room.report().fallbacks
        assert room.report().planned_steps >= 6
        assert "a replay gave other bits and was not used" not in fallbacks
        assert name != "nothing" or "swapped instead of recomputed" not in fallbacks

    assert same_bits(mine, trained(*built(), contextlib.nullcontext, CHANGES[name], before))
    usual = [count for count, seen in zip(ops[-len(measured) :], measured, strict=True) if not seen]
    assert min(usual[:-4]) == 0 < max(usual), usual  # both sizes were met for the third time before the turn
    if name == "nothing":
        assert usual[-4:] == [0, 0, 0, 0]
    assert recorded["all"] > 20
    assert nothing_left()


NEW = [24, 14, 18, 22, 16, 20, 24, 14, 18, 22, 16, 20, 24, 15, 21, 17, 23, 19, 13, 15]


def follow(
    room: Any, net: Net, optimizer: torch.optim.Optimizer, sizes: list[int], after: Callable[[int], None]
) -> list[Any]:
    """room: a function that gives what is around a step. after: called behind each."""
    torch.manual_seed(1)
    taken: list[Any] = []
    for number, size in enumerate(sizes):
        x = torch.randn(size, CHANNELS, PIXELS, PIXELS, generator=torch.Generator().manual_seed(number))
        with room():
            loss = net(x, PLAIN)
            loss.backward()
            # Bytes, not tensors: those would count.
            taken += [loss.item(), *(p.grad.numpy().tobytes() for p in net.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
        after(number)
    return [*taken, *(t.detach().numpy().tobytes() for t in (*net.parameters(), *net.buffers()))]


@pytest.fixture
def little_budget() -> int:
    """In which no size of NEW fits as it is."""
    gc.collect()
    net, optimizer = built()

    def captured(size: int) -> Any:
        def step() -> None:
            net(torch.randn(size, CHANNELS, PIXELS, PIXELS), PLAIN).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        return legroom.capture(step, model=net, optimizer=optimizer)

    floor, peak = legroom.floor_bytes(captured(max(NEW))), captured(min(NEW)).peak_bytes
    assert floor < peak
    return (floor + 4 * peak) // 5


@pytest.mark.parametrize("few_hooks", [False, True])
def test_sizes_that_were_never_met(
    few_hooks: bool, little_budget: int, looked_at: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their calls are told from those of others, under any plan."""
    monkeypatch.setattr(CpuDevice, "leaves_hooks_out", few_hooks)
    net, optimizer = built()
    ops: list[int] = []
    programs: list[Program | None] = []
    with legroom.fit(net, optimizer, budget=little_budget, planner=random_planner((0, 0, 1, 0), seed=0)) as room:

        def after(_: int) -> None:
            following = room._following
            ops.append(looked_at.pop("ops", 0))
            if following is not None:
                following.settle()
            programs.append(following.rung.program if following is not None and following.rung is not None else None)

        mine = follow(room.step, net, optimizer, NEW, after)
        steps = room.report().followed.steps[-6:]  # type: ignore[union-attr]
        fallbacks = room.report().fallbacks
    assert [step.course for step in steps] == ["planned"] * 6
    assert not set(fallbacks) & {"a replay gave other bits and was not used", "swapped instead of recomputed"}
    assert len(set(programs[-6:])) > 1  # plans
    assert not any(ops[-6:]), ops
    assert mine == follow(contextlib.nullcontext, *built(), NEW, lambda _: None)
    assert nothing_left()


@pytest.mark.parametrize("before", ["nothing", "met before it was told", "looked at when it was told"])
def test_what_is_told_wrong_is_not_used(
    before: str, little_budget: int, recorded: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not at a size at which the same replay was seen to give the same bits before, without being told."""
    last = 19
    sizes = [size for size in NEW if size != last]
    sizes = [*sizes[:9], *[last] * 3 * before.startswith("met"), *sizes[9:], last, last]
    turned = False
    tell, add, planned = lifting._op_at, _Known.add, PlannedStep.__init__

    def looked_at_once(self: PlannedStep, *args: Any, **kwargs: Any) -> None:
        nonlocal seen
        planned(self, *args, **{**kwargs, "measure": turned and not seen})
        seen |= turned

    seen = False
    if before.startswith("looked"):
        monkeypatch.setattr(CpuDevice, "leaves_hooks_out", True)
        monkeypatch.setattr(PlannedStep, "__init__", looked_at_once)

    def wrong(op: Inner, *rest: Any) -> Inner:
        told = tell(op, *rest)
        return told._replace(args=(*told.args[:1], 0.25)) if turned and op.func._opname == "mul" else told

    def no_sample(self: _Known, sizes: tuple[int, ...], call: KnownCall | None, *, was_told: bool) -> bool:
        return sizes[0] != last and add(self, sizes, call, was_told=was_told)

    monkeypatch.setattr(lifting, "_op_at", wrong)
    monkeypatch.setattr(_Known, "add", no_sample)
    net, optimizer = built()
    with legroom.fit(net, optimizer, budget=little_budget, planner=random_planner((0, 0, 1, 0), seed=0)) as room:

        def after(number: int) -> None:
            nonlocal turned
            if room._following is not None:
                room._following.settle()
            if number == len(sizes) - 3:
                turned = True
                for lesson in room._following._known_sizes._lessons.values():  # type: ignore[union-attr]
                    lesson.steps.clear()  # what was told at the last size before

        mine = follow(room.step, net, optimizer, sizes, after)
        fallbacks = room.report().fallbacks
    assert fallbacks["a replay gave other bits and was not used"] > 0, fallbacks
    assert mine == follow(contextlib.nullcontext, *built(), sizes, lambda _: None)


def planned_program(room: Any) -> Program:
    assert room._following is not None and room._following.rung is not None
    return room._following.rung.program


class Turned(Net):
    """What is another in some steps does not show in the arguments."""

    factor = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, {**PLAIN, "scale": self.factor})


def test_one_step_of_another_kind_at_a_size(looked_at: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was learned before still holds after it, and what it was itself is known when it comes back."""
    # So fast that the first plan only swaps, however long ops take: the next one then learns its calls for itself.
    link = replace(PRESETS["cpu"], out_bytes_per_second=1e12, in_bytes_per_second=1e12, latency_seconds=0.0)
    monkeypatch.setattr("legroom.room.probe", lambda *_: link)
    sizes = [*FIRST, *[13] * 9]
    odd = len(FIRST) + 4, len(FIRST) + 7, len(FIRST) + 8
    torch.manual_seed(0)
    net = Turned()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    ops: list[int] = []
    with legroom.fit(net, optimizer, budget=budget(), planner=random_planner((0, 0, 1, 0), seed=0)) as room:
        for number, size in enumerate(sizes):
            x = torch.randn(size, CHANNELS, PIXELS, PIXELS, generator=torch.Generator().manual_seed(number))
            looked_at.clear()
            net.factor = 0.25 if number in odd else 0.5
            with room.step():
                net(x).backward()
                optimizer.step()
                optimizer.zero_grad()
            ops.append(looked_at["ops"])
            if room._following is not None:
                room._following.settle()
    before, odd_one, *after = ops[len(FIRST) + 3 :]
    assert before == 0 and 0 < odd_one <= 6, ops  # one call in each of three layers; the rest is known
    assert not any(after), ops


LESSON = Lesson((), frozenset(), frozenset())
PLACES = 1, 2, 3
VARIANTS = [Variant(place, (10 + place,), (), (None,)) for place in PLACES]


def at(known: KnownSizes, size: int, variants: list[Variant] = VARIANTS, number: int = 0) -> KnownAt:
    return known.at(LESSON, number, variants, (4, size), lambda place, call: True)


def calls_of(step: KnownAt) -> dict[int, KnownCall]:
    return {place: known for place in PLACES if (known := step.call(place)) is not None}


def learned_at(known: KnownSizes, *sizes: int, variants: list[Variant] = VARIANTS, number: int = 0) -> None:
    for size in sizes:
        step = at(known, size, variants, number)
        assert step.learns == {variant.place for variant in variants}
        step.learned({variant.place: call(size) for variant in variants})


def test_a_call_is_learned_at_three_sizes() -> None:
    known = KnownSizes()
    learned_at(known, 20, 50, 32)
    for size in (20, 41, 20, 41, 41):
        step = at(known, size)
        assert not step.learns and calls_of(step) == dict.fromkeys(PLACES, call(size))
        assert bool(step.told) is (size == 41)
    assert step.told_ops == {11, 12, 13}
    assert step is at(known, 41)


def test_plans_share_what_they_need_alike() -> None:
    known = KnownSizes()
    learned_at(known, 20, 50, 32)
    other = [VARIANTS[0], Variant(2, (12, 99), (), (None, None)), VARIANTS[2]]
    step = at(known, 41, other, number=1)
    assert step.learns == {2} and calls_of(step).keys() == {1, 3}
    assert step.told_by([1, 2]) == (step.told[1],) and step.told_by([2]) == ()
    learned_at(known, 20, 50, 32, variants=other[1:2], number=2)
    assert calls_of(at(known, 41, other, number=1)).keys() == {1, 2, 3}


def test_what_is_learned_alike_is_one_lesson() -> None:
    known = KnownSizes()
    learned_at(known, 20, 50, 32)
    for number in range(1, 50):
        lesson = Lesson((), frozenset(), frozenset())
        assert lesson is not LESSON
        assert not known.at(lesson, number, VARIANTS, (4, 41), lambda place, call: True).learns
    assert known.at(Lesson((), frozenset((1,)), frozenset()), 0, VARIANTS, (4, 41), lambda place, call: True).learns


def test_a_function_that_cannot_be_compared() -> None:
    class Odd:
        __hash__ = None  # type: ignore[assignment]

    lesson = Lesson((Called(Odd(), range(1), range(0)),), frozenset(), frozenset())
    known = KnownSizes()
    for size in (20, 50, 32):
        known.at(lesson, 0, VARIANTS, (4, size), lambda place, call: True).learned({1: call(size)})
    assert known.at(lesson, 0, VARIANTS, (4, 41), lambda place, call: True).call(1) == call(41)


def test_what_another_sample_tells_is_told_anew() -> None:
    """Proofs of what was told before do not count for it."""
    known = KnownSizes()
    learned_at(known, 20, 50, 32)
    before = at(known, 41)
    other = known.at(LESSON, 0, VARIANTS, (5, 41), lambda place, call: True)
    assert other.call(1) is None and 1 in other.learns and 1 not in other.told  # in that direction nothing was seen
    other.learned({1: call(41)})
    after = at(known, 41)
    assert before.told[1] != after.told[1] and before.told[2] == after.told[2]
    assert before.told_by(PLACES) != after.told_by(PLACES)


def test_what_is_not_told_after_all_counts_as_looked_at() -> None:
    known = KnownSizes()
    learned_at(known, 20, 50, 32)
    step = known.at(LESSON, 0, VARIANTS, (5, 41), lambda place, call: True)
    assert step.told_by(PLACES) == tuple(step.told.values()) and step.told_ops == {11, 12, 13}
    step.proofs = {0: (0, step.told_by(PLACES))}
    assert step.call(2) is None
    assert len(step.told_by(PLACES)) == 2 and step.told_ops == {11, 13} and step.proofs is None


def test_what_holds_at_one_new_size_holds_at_the_next() -> None:
    """As long as nothing is learned, and each size finds out for itself what cannot be told there."""
    known = KnownSizes()
    learned_at(known, 20, 50, 32)
    first = at(known, 41)
    first.proofs = {0: (0, first.told_by(PLACES))}
    assert calls_of(first) == dict.fromkeys(PLACES, call(41))
    other, odd = at(known, 43), known.at(LESSON, 0, VARIANTS, (5, 41), lambda place, call: True)
    assert other.proofs is odd.proofs is first.proofs
    assert calls_of(other) == dict.fromkeys(PLACES, call(43))
    assert odd.call(1) is None and odd.learns == {1} and odd.proofs is None
    assert first.told == other.told and first.told.keys() == set(PLACES) and not first.learns and other.proofs
    after = at(known, 47)
    assert after.proofs is None and after.told == first.told
    after.proofs = first.proofs
    after.learned({1: call(47, seeded=True)})
    assert at(known, 53).proofs is None
    assert at(known, 47).told.keys() == {2, 3}
    (lesson,) = known._lessons.values()
    lesson.steps.clear()  # as after many other sizes
    lesson.met.clear()
    at(known, 61)
    exact = at(known, 20)
    assert not exact.told and calls_of(exact) == dict.fromkeys(PLACES, call(20))


@pytest.mark.parametrize("size", [20, 41])
def test_what_was_not_as_it_was_known_tells_nothing(size: int) -> None:
    known = KnownSizes()
    learned_at(known, 20, 50, 32)
    odd = call(size, seeded=True)
    at(known, size).learned({1: odd, 99: odd})  # 99: nothing was to be known of that one
    assert calls_of(at(known, size)) == {1: odd, 2: call(size), 3: call(size)}
    assert at(known, 47).call(1) == call(47)


def test_what_is_often_not_as_it_was_told_is_told_no_more() -> None:
    known = KnownSizes()
    learned_at(known, 20, 50, 32)
    for size in range(100, 100 + MOST_MISSES):
        assert 1 in at(known, size).told
        at(known, size).learned({1: call(size, seeded=True), 2: None})
    step = at(known, 200)
    assert step.told.keys() == {3} and not calls_of(step).keys() & {1, 2}


def test_other_sizes_are_not_told_anew_without_need() -> None:
    known = KnownSizes()
    learned_at(known, 20, 50, 32)
    steps = {size: at(known, size) for size in (41, 43, 41, 43)}
    at(known, 41).learned({1: call(41, seeded=True)})
    assert at(known, 43) is steps[43] and at(known, 41) is not steps[41]


@pytest.mark.parametrize("odd", [lambda _: None, lambda size: call(size, seeded=size % 2 == 0)])
def test_learning_ends(odd: Callable[[int], KnownCall | None]) -> None:
    """Where a call cannot be known, or cannot be told."""
    known = KnownSizes()
    for size in range(2, 40):
        step = at(known, size)
        step.call(1)
        assert (1 in step.learns) is (size < 2 + MOST_SIZES)
        step.learned({place: odd(size) if place == 1 else call(size) for place in step.learns})
    assert calls_of(at(known, 50)).keys() == {2, 3}


def test_that_a_call_cannot_be_told_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as no other sample has come."""
    tried = 0
    real = LiftedCall.__init__

    def counted(self: LiftedCall, *args: Any) -> None:
        nonlocal tried
        tried += 1
        real(self, *args)

    monkeypatch.setattr(LiftedCall, "__init__", counted)
    known = KnownSizes()
    for size in range(2, 30):
        step = at(known, size)
        assert step.call(1) is None
        step.learned({1: call(size, seeded=size % 2 == 0)} if 1 in step.learns else {})
    assert tried == 1 + MOST_SIZES - 3


def test_a_size_that_comes_back_is_learned_where_it_is_not_told() -> None:
    known = KnownSizes()
    for turn in range(4):
        for size in range(2, 20):
            step = at(known, size)
            found = step.call(1)
            assert (found is None) is (turn == 0 or (turn == 1 and size >= 2 + MOST_SIZES))
            assert (1 in step.learns) is (found is None and (turn == 1 or size < 2 + MOST_SIZES))
            step.learned({place: call(size, seeded=size % 2 == 0) for place in step.learns})


def test_what_is_not_fit_for_a_plan_is_neither_known_nor_learned() -> None:
    known = KnownSizes()
    learned_at(known, 20, 50, 32)
    step = known.at(LESSON, 1, VARIANTS, (4, 41), lambda place, call: place != 2)
    assert calls_of(step).keys() == step.told.keys() == {1, 3} and not step.learns


def test_what_is_known_outlasts_the_plans_of_a_course() -> None:
    """Used in turn, each needing something else."""
    known = KnownSizes()
    plans = [[Variant(place, (number, place), (), (None, None)) for place in range(3)] for number in range(MOST_RUNGS)]
    for turn in range(3):
        for number, plan in enumerate(plans):
            step = at(known, 41, plan, number)
            assert (step.call(1) is None) is (turn == 0)
            step.learned({place: call(41) for place in step.learns})


def test_what_is_known_is_bounded() -> None:
    known = KnownSizes()
    learned_at(known, 20, 50, 32)
    for size in range(60, 60 + 3 * MOST_STEPS):
        at(known, size)
    (lesson,) = known._lessons.values()
    assert len(lesson.steps) == MOST_STEPS
    for size in range(1000, 1000 + 3 * MOST_EXACT):  # not what was told
        at(known, size).learned({1: call(size, seeded=True)})
    assert len(lesson.variants[VARIANTS[0]].exact) == MOST_EXACT
    for number in range(1, 3 * MOST_PLANS):
        plan = [Variant(place, (number, place), (), (None, None)) for place in range(10)]
        last = at(known, 41, plan, number)
    lesson.steps.clear()
    assert len(lesson.plans) == MOST_PLANS and len(lesson.variants) == 10 * MOST_PLANS
    last.learned({1: call(41)})
    for number in range(100):
        known.at(Lesson((), frozenset((number,)), frozenset()), number, VARIANTS, (4, 41), lambda place, call: True)
    assert len(known._lessons) == MOST_LESSONS and len(known._found) <= MOST_PLANS
    known.clear()
    learned_at(known, 20, 50, 32)


def test_steps_in_which_more_hooks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured ones: there a call saves more than was learned where few hooks run, and its ops are looked at again."""
    monkeypatch.setattr(CpuDevice, "leaves_hooks_out", True)
    real = PlannedStep.__init__
    planned = 0

    def measuring(self: PlannedStep, *args: Any, **kwargs: Any) -> None:
        nonlocal planned
        planned += 1
        real(self, *args, **{**kwargs, "measure": planned % 3 == 0})

    monkeypatch.setattr(PlannedStep, "__init__", measuring)
    net, optimizer = built()
    learned = False
    with legroom.fit(net, optimizer, budget=budget(), planner=random_planner((1, 0, 2, 0), seed=0)) as room:

        def ended(_: int) -> None:
            nonlocal learned
            if room._following is not None:
                room._following.settle()
                lessons = room._following._known_sizes._lessons.values()
                learned |= any(variant.exact for lesson in lessons for variant in lesson.variants.values())

        mine = trained(net, optimizer, room.step, CHANGES["nothing"], {}, ended)
        fallbacks = room.report().fallbacks
        assert planned_program(room).few_ticks is not None and learned
    assert "swapped instead of recomputed" not in fallbacks, fallbacks
    assert same_bits(mine, trained(*built(), contextlib.nullcontext, CHANGES["nothing"], {}))
