"""Planners side by side, in real processes: those that answer, and those that refuse, dawdle, lie or die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from legroom.compare import Comparison, Judged, Row, compare, front, judge, to_json
from legroom.errors import BudgetError
from legroom.evaluate import floor_bytes
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.plan import Keep, Plan, Recompute, Swap
from legroom.planners import Planner
from legroom.planners.auto import Auto
from legroom.planners.none import KeepAll
from legroom.simulate import simulate
from tests.pure.strategies import make_plan
from tests.pure.test_schedule import LINK, chain

TRACE = chain(8)
FLOOR, PEAK = floor_bytes(TRACE), TRACE.peak_bytes


def keep_all(trace: Trace) -> Plan:
    return make_plan(trace, (Keep(),) * len(trace.gaps))


@dataclass(frozen=True)
class Sleepy:
    """Sleeps below the plain peak, with a child that would outlive it."""

    pid_file: str

    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        if budget_bytes < PEAK:
            child = subprocess.Popen(["sleep", "1000"])
            Path(self.pid_file).write_text(f"{os.getpid()} {child.pid}")
            time.sleep(1000)
        return keep_all(trace)


@dataclass(frozen=True)
class Refuses:
    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        raise BudgetError("its rule stops at 7 KB", budget_bytes=budget_bytes, floor_bytes=7000)


@dataclass(frozen=True)
class Odd:
    """Does one of several things a planner must not do."""

    how: str

    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        match self.how:
            case "over":
                return keep_all(trace)
            case "other trace":
                return replace(keep_all(trace), trace_signature="0" * 16)
            case "no plan":
                return None  # type: ignore[return-value]
            case "raises":
                raise KeyError("lost")
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def ask(planners: dict[str, Planner], *budgets: int, limit: float = 60.0) -> Comparison:
    return compare(TRACE, LINK, budgets, planners, time_limit_seconds=limit, watch=lambda *_: None)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def assert_dead_soon(pids: list[int]) -> None:
    until = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert [pid for pid in pids if is_alive(pid)] == []


def test_rows_say_what_the_simulator_says() -> None:
    seen: list[tuple[str, int, bool]] = []

    def watch(name: str, budget: int, row: Row | None) -> None:
        seen.append((name, budget, row is not None))

    found = compare(
        TRACE, LINK, (PEAK, FLOOR), {"auto": Auto(), "none": KeepAll()}, time_limit_seconds=60.0, watch=watch
    )
    assert [(row.planner, row.budget_bytes, row.outcome) for row in found.rows] == [
        ("auto", PEAK, "plan"),
        ("auto", FLOOR, "plan"),
        ("none", PEAK, "plan"),
        ("none", FLOOR, "infeasible"),
    ]
    assert seen == [(row.planner, row.budget_bytes, done) for row in found.rows for done in (False, True)]
    assert (found.plain_peak_bytes, found.floor_bytes) == (PEAK, FLOOR)
    assert found.plain_seconds == simulate(TRACE, keep_all(TRACE), LINK).seconds
    tight = found.rows[1].judged
    assert tight is not None
    assert tight.peak_bytes <= FLOOR
    assert tight == judge(TRACE, LINK, Auto()(TRACE, LINK, FLOOR))
    assert tight.overhead == pytest.approx(tight.seconds / found.plain_seconds - 1)
    assert tight.overhead > 0
    assert found.rows[1].solve_seconds > 0
    assert found.rows[2].judged is not None and found.rows[2].judged.overhead == 0.0


def test_bytes_and_stalls_are_those_of_the_plan() -> None:
    decisions = (Swap(when="sync"), Swap(when="sync"), Recompute(), Keep(), Keep(), Keep(), Keep())
    judged = judge(TRACE, LINK, make_plan(TRACE, decisions))
    assert (judged.swapped_bytes, judged.recomputed_bytes, judged.kept_bytes) == (2000, 1000, 4000)
    assert judged.stalls == 4
    assert judged.stalled_seconds == pytest.approx(4e-6)
    assert judged.lower_bound_seconds is None and judged.gap is None


def test_a_planner_that_takes_too_long_is_stopped_with_all_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pids"
    start = time.monotonic()
    found = ask({"sleepy": Sleepy(str(pid_file))}, 4000, PEAK, limit=2.0)
    assert time.monotonic() - start < 60
    assert [row.outcome for row in found.rows] == ["late", "plan"]
    assert found.rows[0].message == "no answer within 2 s"
    assert found.rows[0].solve_seconds == 2.0
    assert_dead_soon([int(pid) for pid in pid_file.read_text().split()])


def test_an_interrupted_comparison_leaves_nobody_behind(tmp_path: Path) -> None:
    pid_file = tmp_path / "pids"
    script = (
        "from tests.test_compare import ask, Sleepy\n"
        f"if __name__ == '__main__': ask({{'sleepy': Sleepy({str(pid_file)!r})}}, 4000)\n"
    )
    (tmp_path / "script.py").write_text(script)
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([root, f"{root}/src", os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen([sys.executable, str(tmp_path / "script.py")], env={**os.environ, "PYTHONPATH": path})
    until = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text().count(" ")) and time.monotonic() < until:
        time.sleep(0.05)
    pids = [int(pid) for pid in pid_file.read_text().split()]
    assert all(map(is_alive, pids))
    process.kill()  # not even a chance to clean up
    process.wait()
    assert_dead_soon(pids)


def test_a_planner_that_fails_is_a_row_and_the_next_goes_on() -> None:
    messages = {
        "over": "its plan needs 7.8 KiB, above the budget of 3.9 KiB",
        "other trace": "not sound: the plan is for trace 0000",
        "no plan": "expected a plan, got a NoneType",
        "raises": "KeyError: 'lost'",
        "dies": "ended with status",
    }
    *rows, last = ask({**{how: Odd(how) for how in messages}, "refuses": Refuses()}, 4000).rows
    assert [row.outcome for row in rows] == ["failed"] * len(messages)
    for row in rows:
        assert messages[row.planner] in row.message
    assert (last.outcome, last.floor_bytes, last.message) == ("infeasible", 7000, "its rule stops at 7 KB")


def row(name: str, peak: int, seconds: float) -> Row:
    judged = Judged(seconds, 0.0, peak, 0, 0, 0, 0, 0.0, None, None)
    return Row(name, peak, "plan", 0.0, judged, 0, "")


def test_the_front_has_what_nothing_beats() -> None:
    rows = [row("a", 10, 1.0), row("b", 5, 2.0), row("c", 7, 2.0), row("d", 5, 3.0), row("e", 10, 1.0)]
    rows.append(Row("f", 1, "late", 9.0, None, 0, "no answer within 9 s"))
    assert [found.planner for found in front(rows)] == ["b", "a"]
    assert front([]) == ()


def test_a_comparison_as_json() -> None:
    found = Comparison("abc", "h200", 1.0, 10, 2, 60.0, (row("a", 10, 1.0),))
    document = json.loads(to_json(found))
    assert document["kind"] == "comparison"
    assert document["rows"][0]["judged"]["peak_bytes"] == 10
