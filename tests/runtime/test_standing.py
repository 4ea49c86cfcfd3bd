"""The standing plan, where several things happen to it at once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import legroom
from legroom import room as rooms
from legroom.arranging import Found
from legroom.curve import Curve
from legroom.errors import BudgetError
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.plan import Keep, Plan, Recompute, signature
from legroom.runtime.checking import Check
from legroom.runtime.device import CpuDevice
from legroom.runtime.residency import Entry
from legroom.schedule import Replay, lower
from legroom.standing import MOST_CALIBRATIONS, Standing
from tests.runtime.test_cap import Capped
from tests.runtime.test_hidden_writes import turns
from tests.runtime.test_opdb import recompute_all
from tests.runtime.test_pressure import built
from tests.runtime.test_random_plans import admit, random_planner
from tests.zoo import ZOO

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[legroom.Room]:
    """One on a device with a cap, whose plan moves something."""
    monkeypatch.setattr(rooms, "open_device", lambda *_: Capped())
    model, optimizer = built()

    def step() -> None:
        model(torch.randn(4096, 128)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = legroom.capture(step, model=model, optimizer=optimizer)
    floor = legroom.floor_bytes(trace)
    with legroom.fit(model, optimizer, budget=floor + (trace.peak_bytes - floor) // 2) as made:
        for _ in range(4):
            with made.step():
                step()
        assert made._standing.program is not None
        made.train = step  # type: ignore[attr-defined]
        yield made


def planned(standing: Standing) -> Plan:
    assert standing.plan is not None
    return standing.plan


def test_after_running_out_of_memory_the_next_plan_is_smaller(room: legroom.Room) -> None:
    standing = room._standing
    before = planned(standing)
    assert standing.ran_out()
    standing.recover()
    assert standing.program is not None
    assert planned(standing).budget_bytes < before.budget_bytes


def test_nothing_is_planned_from_a_trace_that_is_no_longer_believed(room: legroom.Room) -> None:
    """A step ran out of memory, and only then it was heard that a replay before had given other bits."""
    assert room._standing.ran_out()
    room._record_again()
    room._standing.recover()
    assert room._standing.program is None


def test_a_plan_above_the_budget_leaves_the_one_before_as_it_was(room: legroom.Room) -> None:
    standing = room._standing
    before, program, brim = standing._found, standing.program, standing.brim
    assert before is not None and standing.trace is not None
    too_much = replace(before.plan, decisions=(Keep(),) * len(before.plan.decisions), planner="greedy")
    found = Found(too_much, lower(standing.trace, too_much, before.hardware), before.hardware, None)
    with pytest.raises(BudgetError, match="the plan of 'greedy' needs"):
        standing._adopt(standing.trace, found)
    assert (standing._found, standing.program, standing.brim) == (before, program, brim)


def test_a_step_that_is_recorded_anew_is_calibrated_anew(room: legroom.Room) -> None:
    room._standing.calibrations = MOST_CALIBRATIONS
    room._record_again()
    measured = room.report().measured_steps
    for _ in range(3):  # recorded; tried under a plan; measured
        with room.step():
            room.train()  # type: ignore[attr-defined]
    assert room._standing.calibrations < MOST_CALIBRATIONS
    assert room.report().measured_steps == measured + 2


@pytest.mark.parametrize("later", [False, True], ids=["heard at once", "heard later"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyError])
def test_what_a_step_found_out_about_its_replays_holds_if_it_fails(
    error: type[Exception], later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value is changed through numpy from a step on that then fails: no plan of before is followed after it."""
    monkeypatch.setattr(rooms, "open_device", lambda *_: Capped())
    monkeypatch.setattr(CpuDevice, "answers_later", later)
    _, loss = turns(5, 1)()
    other = torch.randn(4, 4).requires_grad_()

    def step(number: int) -> None:  # with saves after the program's, so that there is a time to be away
        (loss(number) + (other.sin() * other.cos()).sum()).backward()

    with legroom.fit(budget="1GiB", planner=recompute_all) as room:
        for number in range(5):
            with room.step():
                step(number)
        before = room.report()
        assert before.bytes_recomputed > 0
        with pytest.raises(error), room.step():  # noqa: PT012
            step(5)
            raise error("of the program's")
        heard = pytest.warns(RuntimeWarning, match="gave other bits") if later else nullcontext()
        with heard, room.step():
            step(6)
        report = room.report()
    assert report.sheltered_steps == before.sheltered_steps + 1
    assert report.distrusted
    assert report.bytes_recomputed == 0


def test_a_replay_that_is_not_believed_any_more_is_no_reason_to_record_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps replayed the same op, and that it gave other bits is heard of the second when the plan is a new one."""
    monkeypatch.setattr(CpuDevice, "answers_later", True)
    x = torch.randn(64, 64, requires_grad=True)
    with legroom.fit(budget="1GiB", planner=recompute_all) as room:

        def heard(wrong: bool) -> int:
            """So many steps were recorded after an outcome came late."""
            before = room.report().sheltered_steps
            if wrong:
                check = Check(room._device, torch.zeros(4))
                check.compare(torch.ones(4), [torch.ops.aten.tanh.default])
                room._compared.append(check)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                for _ in range(3):
                    with room.step():
                        (x.tanh().sin() * x.cos()).exp().sum().backward()
            return room.report().sheltered_steps - before

        heard(False)
        assert heard(False) == 0
        assert [heard(True), heard(True), heard(False)] == [1, 0, 0]
        assert room.report().fallbacks["a replay gave other bits"] == 2


@pytest.mark.parametrize("seed", range(12))
def test_what_a_replay_brought_back_is_there_for_the_next_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two backwards through one graph: replays of the second read what the first one has brought back. They find it,
    and nothing is held for making it again afterwards."""
    curves: list[tuple[tuple[int, ...], list[int]]] = []
    with_lineage: set[int] = set()
    calibrate, die = Standing._calibrate, Entry.die

    def noted(self: Standing, curve: Curve, *, relieved: bool) -> None:
        curves.append((self.predicted_curve(), [segment.measured_peak_bytes for segment in curve.segments]))
        calibrate(self, curve, relieved=relieved)

    def died(self: Entry, waiting: list[Entry] | None = None) -> None:
        if self.node is not None and self.in_memory:
            with_lineage.add(self.number)
        die(self, waiting)

    monkeypatch.setattr(Standing, "_calibrate", noted)
    monkeypatch.setattr(Entry, "die", died)
    case = ZOO["retain_graph"]()
    model, optimizer = case.build()
    with legroom.fit(model, optimizer, budget="1GiB", planner=random_planner((1, 0, 0, 1), seed)) as room:
        for number in range(3):
            with_lineage.clear()
            with room.step():
                case.step(model, optimizer, case.batch(number))
        replays = [i for i in room._standing._schedule.instructions if isinstance(i, Replay)]
    assert all(m <= p for m, p in zip(*reversed(curves[0]), strict=True))
    assert not with_lineage & {storage for i in replays for storage in (i.storage, *i.also)}


def test_a_replay_finds_a_leaf_that_went_beside_the_plan_and_is_back() -> None:
    """What is made from it was dropped before it was saved itself. Two backwards, so that it stays for both."""
    w = torch.randn(64, 128).requires_grad_()

    def planner(trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        """Recompute the first storage that can be, and keep the others."""
        kept = Plan((Keep(),) * len(trace.gaps), signature(trace), "first", budget_bytes, 0, 0.0, ())
        plans = (admit(trace, kept, hardware, {gap.id: Recompute()}) for gap in trace.gaps)
        return next(plan for plan in plans if plan != kept)

    def step(room: legroom.Room, *, makes_room: bool) -> torch.Tensor:
        w.grad = None
        with room.step():
            scale = torch.ones(64, 128)
            scale.numpy()[0] = 3.0  # so that it cannot be made again
            key = scale.untyped_storage()._cdata
            product = w * (scale + 1)
            z = product.sin() * scale
            del product, scale
            out = z.cos()
            del z

            def leave(_: torch.Tensor) -> None:
                entry = room._setting.ledger.by_key.get(key)
                if entry is not None and makes_room:
                    assert entry.exclusive() and entry.node is not None and entry.node.relied
                    entry.start_saving()
                    entry.release()
                    gone.append(entry)

            out.register_hook(leave)
            out.sum().backward(retain_graph=True)
            out.sum().backward()
        assert w.grad is not None
        return w.grad

    gone: list[Entry] = []
    with legroom.fit(budget="1GiB", planner=planner) as room:
        expected = [step(room, makes_room=False) for _ in range(4)]
        assert room.report().bytes_recomputed > 0
        assert torch.equal(step(room, makes_room=True), expected[0])
        assert gone


def test_a_given_plan_that_ran_out_of_memory_stays_and_that_is_said(room: legroom.Room) -> None:
    room._standing._given = given = planned(room._standing)
    error = torch.OutOfMemoryError("Tried to allocate 2 GiB.")
    with pytest.raises(torch.OutOfMemoryError), room.step():
        raise error
    with room.step():
        room.train()  # type: ignore[attr-defined]
    assert planned(room._standing) is given
    assert "The plan that was given did not fit, and stays" in error.__notes__[0]
    assert room.report().fallbacks["a planned step ran out of memory: the given plan stays"] == 1


def test_a_given_plan_whose_replay_gave_other_bits_makes_way_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "answers_later", False)
    _, loss = turns(5, 1)()
    other = torch.randn(4, 4).requires_grad_()

    def step(room: legroom.Room, index: int) -> None:
        with room.step():
            (loss(index) + (other.sin() * other.cos()).sum()).backward()

    with legroom.fit(budget="1GiB", planner=recompute_all) as room:
        for index in range(4):
            step(room, index)
        plan = planned(room._standing)
    with legroom.fit(budget="1GiB", plan=plan) as room:
        for index in range(9):
            step(room, index)
        report = room.report()
    assert report.distrusted
    assert report.fallbacks["the given plan relies on a replay that gave other bits: planned anew"] == 1
    assert report.planned_steps == 5  # of nine: two of them after it
