"""Plans beside the program: in several processes at once, in none, and where one of them dies."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from legroom import beside, planprocess
from legroom.beside import MOST_PROCESSES, Beside
from legroom.errors import BudgetError
from legroom.evaluate import floor_bytes
from legroom.hardware import PRESETS, Hardware
from legroom.ir import Trace
from legroom.plan import Plan
from legroom.planners import quick
from legroom.planners.auto import Auto
from tests.pure.test_traces import read

H200 = PRESETS["h200"]
QUICK = quick(Auto())
TRACE = read("lstm")
WAIT_SECONDS = 60.0


def budgets(many: int) -> list[int]:
    floor = floor_bytes(TRACE)
    return [floor + (TRACE.peak_bytes - floor) * part // (many + 1) for part in range(1, many + 1)]


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Of all processes that were started. None is left at the end."""
    started: list[int] = []
    made = planprocess._Child.__init__

    def start(self: Any) -> None:
        made(self)
        started.append(self.process.pid)

    monkeypatch.setattr(planprocess._Child, "__init__", start)
    yield started
    assert gone(started)


def gone(pids: list[int]) -> bool:
    """Whether all of them have ended, soon."""
    until = time.monotonic() + WAIT_SECONDS
    while any(alive(pid) for pid in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def asked(plans: Beside, budget: int, found: dict[int, Plan]) -> Callable[[], None]:
    def work() -> None:
        plan, _ = plans.plan(TRACE, H200, budget)
        found[budget] = plan

    return work


@pytest.mark.parametrize("processes", [1, 3])
def test_the_same_plans_in_several_processes(processes: int, pids: list[int]) -> None:
    fallbacks: Counter[str] = Counter()
    plans, found = Beside(QUICK, fallbacks, apart=True, processes=processes), dict[int, Plan]()
    for budget in budgets(6):
        plans.ask(asked(plans, budget, found))
    plans.settle()
    assert found == {budget: QUICK(TRACE, H200, budget) for budget in budgets(6)}
    assert len(pids) == processes and not fallbacks
    # One is kept for the next plan: the others hold memory of the host for nothing.
    (kept,) = plans._processes
    assert kept._child is not None
    assert gone([pid for pid in pids if pid != kept._child.process.pid])
    plans.ask(asked(plans, budgets(1)[0], found))
    plans.settle()
    assert len(found) == 7 and len(pids) == processes
    plans.close()


def test_no_more_processes_than_there_is_work_for(pids: list[int]) -> None:
    plans, found = Beside(QUICK, Counter(), apart=True, processes=3), dict[int, Plan]()
    for budget in budgets(3):
        plans.ask(asked(plans, budget, found))
        plans.settle()
    assert len(found) == 3 and len(pids) == 1
    plans.close()


def test_where_one_dies_the_rest_is_planned_in_a_thread(pids: list[int]) -> None:
    fallbacks: Counter[str] = Counter()
    plans, found = Beside(QUICK, fallbacks, apart=True, processes=2), dict[int, Plan]()
    plans.ask(asked(plans, budgets(6)[0], found))
    plans.settle()
    (process,) = plans._processes
    assert process._child is not None
    process._child.process.kill()
    for budget in budgets(6):
        plans.ask(asked(plans, budget, found))
    plans.settle()
    assert found == {budget: QUICK(TRACE, H200, budget) for budget in budgets(6)}
    ((reason, times),) = fallbacks.items()
    assert reason.startswith("planned in a thread: ") and times == 1
    assert gone(pids)  # nobody would ask them again
    plans.close()


def test_what_waits_for_something_else_keeps_no_process(pids: list[int]) -> None:
    """Not all work is a plan in the end."""
    plans, found = Beside(QUICK, Counter(), apart=True, processes=3), dict[int, Plan]()
    for budget in budgets(3):
        plans.ask(asked(plans, budget, found))
    for _ in range(30):
        plans.ask(lambda: time.sleep(0.2))
    plans.settle()
    assert len(found) == 3 and len(plans._processes) == 1
    plans.close()


def test_once_ended_no_plan_is_begun_in_a_thread() -> None:
    """Those that wait for each other there would be waited for, one by one."""
    begun, going_on = threading.Event(), threading.Event()
    made: list[int] = []

    def planner(trace: Trace, hardware: Hardware, budget: int) -> Plan:
        made.append(budget)
        begun.set()
        assert going_on.wait(WAIT_SECONDS)
        return QUICK(trace, hardware, budget)

    plans, found = Beside(QUICK, Counter(), apart=True, processes=3), dict[int, Plan]()
    plans._apart, plans._planner = False, planner  # as after a process that died, when others were at work
    for budget in budgets(3):
        plans.ask(asked(plans, budget, found))
    assert begun.wait(WAIT_SECONDS)
    ending = threading.Thread(target=plans.close)
    ending.start()
    while not plans._closed:
        time.sleep(0.01)
    going_on.set()
    ending.join(WAIT_SECONDS)
    assert not ending.is_alive() and len(made) == len(found) == 1


def test_it_can_be_ended_while_plans_are_made(pids: list[int]) -> None:
    plans, found = Beside(QUICK, Counter(), apart=True, processes=3), dict[int, Plan]()
    for budget in budgets(40):
        plans.ask(asked(plans, budget, found))
    until = time.monotonic() + WAIT_SECONDS
    while not found and time.monotonic() < until:
        time.sleep(0.01)
    began = time.monotonic()
    plans.close()
    assert time.monotonic() - began < WAIT_SECONDS / 2
    assert 0 < len(found) < 40


def test_a_budget_below_the_floor_leaves_the_process_to_the_next_plan(pids: list[int]) -> None:
    fallbacks: Counter[str] = Counter()
    plans, found = Beside(QUICK, fallbacks, apart=True, processes=1), dict[int, Plan]()
    for budget in (0, budgets(1)[0]):
        plans.ask(asked(plans, budget, found))
    plans.settle()
    assert len(found) == 1 and len(pids) == 1
    ((reason, times),) = fallbacks.items()
    assert BudgetError.__name__ in reason and times == 1
    plans.close()


def test_in_threads_one_plan_is_made_after_the_other(pids: list[int]) -> None:
    """A planner of the user's own cannot be sent to another process."""
    at_once, most = 0, 0
    counting = threading.Lock()

    def planner(*args: Any) -> Plan:
        nonlocal at_once, most
        with counting:
            at_once, most = at_once + 1, max(most, at_once + 1)
        plan = QUICK(*args)
        with counting:
            at_once -= 1
        return plan

    plans, found = Beside(planner, Counter(), apart=True, processes=3), dict[int, Plan]()
    for budget in budgets(4):
        plans.ask(asked(plans, budget, found))
    plans.settle()
    plans.close()
    assert len(found) == 4 and most == 1 and not pids


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (7, 1), (8, 2), (16, 4), (192, MOST_PROCESSES)])
def test_a_part_of_the_cores_is_left_to_the_program(
    cores: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert beside._processes() == processes
