"""Searches whose prices are varied: never worse, always the same, and better than what they are there for."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from bench.planners import machine, slower
from legroom import traceio
from legroom.bound import bound_of
from legroom.evaluate import Evaluator, floor_bytes
from legroom.ir import Trace
from legroom.kernels.codes import Codes
from legroom.planners.auto import Auto
from legroom.planners.kinds import kinds_of, kinds_of_ops, numbers
from legroom.planners.local import Search, rounded
from legroom.planners.varied import Programs, vary
from legroom.tables import Floats, Ints

TRACES = Path(__file__).resolve().parents[1] / "traces"


def recorded(name: str) -> Trace:
    return traceio.load(TRACES / f"{name}.json.gz")


def budget_at(trace: Trace, share: float) -> int:
    floor = floor_bytes(trace)
    return int(floor + share * (trace.peak_bytes - floor))


def test_each_gap_and_each_op_is_of_one_kind() -> None:
    trace = recorded("unet")
    for kinds, count in ((kinds_of(trace), len(trace.gaps)), (kinds_of_ops(trace), len(trace.ops))):
        assert sorted(np.concatenate(kinds).tolist()) == list(range(count))
        assert 1 < len(kinds) < count
        of_each = numbers(kinds, count)
        assert all((of_each[members] == number).all() for number, members in enumerate(kinds))
    sizes = [trace.storages[gap.storage].nbytes for gap in trace.gaps]
    assert all(len({sizes[gap] for gap in kind}) == 1 for kind in kinds_of(trace))
    assert all(len({trace.ops[op].name for op in kind}) == 1 for kind in kinds_of_ops(trace))


def varied(trace: Trace, share: float, exchanges: int) -> tuple[int, int, Codes]:
    evaluator = Evaluator(trace, machine("h200").hardware)
    search = Search(evaluator, budget_at(trace, share), 3000)
    search.start_from("the linear program", rounded(bound_of(evaluator.tables, search.budget, most_ticks=50)))
    before_ns = search.best_ns
    with Programs(search) as programs:
        vary(search, programs, exchanges)
    return before_ns, search.best_ns, search.best


@pytest.mark.parametrize("share", [0.5, 0.25, 0.0])
def test_what_is_found_is_within_the_budget_and_no_slower(share: float) -> None:
    trace = recorded("unet")
    before_ns, ns, codes = varied(trace, share, 4000)
    judged_ns, peak, excess = Evaluator(trace, machine("h200").hardware).judge(codes, budget_at(trace, share))
    assert (judged_ns, excess) == (ns, 0)
    assert peak <= budget_at(trace, share)
    assert ns <= before_ns


def test_the_same_plan_is_found_again() -> None:
    trace = recorded("plain20")
    first, second = varied(trace, 0.25, 2000), varied(trace, 0.25, 2000)
    assert first[:2] == second[:2]
    assert (first[2] == second[2]).all()


def test_few_evaluations_are_few_here_too() -> None:
    trace = recorded("unet")
    evaluator = Evaluator(trace, machine("h200").hardware)
    search = Search(evaluator, budget_at(trace, 0.25), 100)
    with Programs(search) as programs:
        vary(search, programs, 300)
    assert search.count < 300 + 4 * evaluator.gaps + 100


@pytest.mark.parametrize("name", ["vgg16", "bert"])
def test_planning_goes_on_where_no_thread_can_be_started_any_more(name: str) -> None:
    """The program's own end has begun, and a thread of it still plans: no more work can be handed to others then."""
    code = f"""
import threading
from legroom import traceio
from legroom.hardware import PRESETS
from legroom.planners.auto import Auto
trace = traceio.load({str(TRACES / f"{name}.json.gz")!r})

def plan():
    threading.main_thread().join()
    print(Auto(evaluations=2000)(trace, PRESETS["h200"], {budget_at(recorded(name), 0.25)}).predicted_seconds)

threading.Thread(target=plan).start()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert not done.stderr
    plan = Auto(evaluations=2000)(recorded(name), machine("h200").hardware, budget_at(recorded(name), 0.25))
    assert float(done.stdout) == plan.predicted_seconds


def test_nothing_is_left_running_where_planning_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = recorded("unet")
    search = Search(Evaluator(trace, machine("h200").hardware), budget_at(trace, 0.25), 100)
    drawn: list[int] = []

    def factors(self: Programs, kinds: Ints, off: float) -> Floats:
        drawn.append(1)
        if len(drawn) == 9:
            raise KeyboardInterrupt
        return np.ones(len(kinds))

    monkeypatch.setattr(Programs, "factors", factors)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), Programs(search):
        pass
    assert threading.active_count() == before
    monkeypatch.undo()
    with pytest.raises(KeyboardInterrupt), Programs(search):
        raise KeyboardInterrupt
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("name", "where", "home_seconds"),
    [("bert", "rtx2080ti-pcie3*7.8", 0.596460427), ("mobilenet", "h200", 0.043847087)],
)
def test_as_good_as_what_home_finds_with_a_hundred_times_the_evaluations(
    name: str, where: str, home_seconds: float
) -> None:
    """Before, 0.20 and 0.26 % slower. Not to the last digit: where a linear program ends depends on the machine. The
    figures are those of `bench/planners.py`."""
    preset = machine(where)
    trace = slower(recorded(name), preset.factor)
    plan = Auto()(trace, preset.hardware, budget_at(trace, 0.25))
    assert plan.predicted_seconds <= home_seconds * 1.0015
