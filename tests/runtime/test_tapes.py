"""Replays from tapes: the walk is taken once, and again wherever a tape does not fit the step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import legroom
from legroom.room import Step
from legroom.runtime.program import Program
from legroom.runtime.replay import Tape
from tests.harness import Snapshot, assert_same, run_plain, run_room
from tests.runtime.test_random_plans import random_planner
from tests.zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def without_its_first_op(tape: Tape) -> Tape:
    return Tape(tape.rows[1:])


def with_an_op_that_was_not_run(tape: Tape) -> Tape:
    return Tape(((10**6, (0,), ()), *tape.rows))


def letting_go_too_early(tape: Tape) -> Tape:
    slots = tuple((number, output) for number, wanted, _ in tape.rows for output in wanted)
    return Tape(tuple((number, wanted, slots) for number, wanted, _ in tape.rows))


FAULTS = (without_its_first_op, with_an_op_that_was_not_run, letting_go_too_early)


@pytest.mark.parametrize("fault", [None, *FAULTS])
@pytest.mark.parametrize("name", ["gpt_manual", "cnn"])
def test_a_tape_that_does_not_fit_changes_no_bit(
    name: str, fault: Callable[[Tape], Tape] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Program] = []
    make = Program.__init__

    def watched(self: Program, *args: object, **options: object) -> None:
        make(self, *args, **options)  # type: ignore[arg-type]
        seen.append(self)

    monkeypatch.setattr(Program, "__init__", watched)
    spoilt = 0

    def fit(*args: object) -> legroom.Room:
        room = legroom.fit(*args, budget=1 << 30, planner=random_planner((0, 0, 1, 0), 0))  # type: ignore[arg-type]
        step = room.step

        def spoiling_step() -> Step:
            nonlocal spoilt
            for tapes in (program.tapes for program in seen):
                for key, tape in tapes.items():
                    if fault is not None and tape is not None:
                        tapes[key] = fault(tape)
                        spoilt += 1
            return step()

        monkeypatch.setattr(room, "step", spoiling_step)
        return room

    taken: list[Snapshot]
    taken, report, _ = run_room(ZOO[name](), fit)
    assert_same(run_plain(ZOO[name](), len(taken)), taken)
    assert report.planned_steps >= 3
    tapes = [tape for program in seen for tape in program.tapes.values()]
    assert len(tapes) > 3
    if fault is None:
        assert all(tape is not None for tape in tapes)
    else:
        assert spoilt > 3
