"""Planners side by side: the same trace, the same budgets, the same judge.

Every planner works in a process of its own, so that one that takes too long can be stopped, and one that dies takes
nothing with it. What counts is what check_schedule() and simulate() say about a plan, not what its planner says; only
the bound below which no plan can be is the planner's own word.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from typing import Literal

import numpy as np

from legroom.errors import BudgetError, LegroomError
from legroom.evaluate import KEEP, Evaluator, floor_bytes
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.plan import Keep, Plan, Recompute, Swap, signature
from legroom.planners import Planner
from legroom.schedule import Schedule, check_schedule, lower
from legroom.simulate import simulate
from legroom.units import format_bytes

VERSION = 1
START_SECONDS = 300.0  # to load torch and the compiled kernels, or to compile them: 30 s on two slow cores

Outcome = Literal["plan", "infeasible", "late", "failed"]


@dataclass(frozen=True, slots=True)
class Judged:
    """A plan, as the simulator and the proof see it."""

    seconds: float
    overhead: float  # over keeping everything, as a share
    peak_bytes: int
    kept_bytes: int
    swapped_bytes: int
    recomputed_bytes: int
    stalls: int
    stalled_seconds: float
    lower_bound_seconds: float | None  # as the planner states it; None where it states none
    gap: float | None  # how far the plan lies above that bound, as a share of it


@dataclass(frozen=True, slots=True)
class Row:
    planner: str
    budget_bytes: int
    outcome: Outcome
    solve_seconds: float  # until the planner answered, or was stopped
    judged: Judged | None  # of the outcome "plan"
    floor_bytes: int  # of the outcome "infeasible": the smallest budget of this planner's rule; 0 where it names none
    message: str  # why there is no plan


@dataclass(frozen=True, slots=True)
class Comparison:
    trace_signature: str
    hardware: str
    plain_seconds: float  # keeping everything
    plain_peak_bytes: int
    floor_bytes: int
    time_limit_seconds: float
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class _NoPlan:
    outcome: Outcome
    message: str


_Answer = Plan | BudgetError | _NoPlan
Watch = Callable[[str, int, Row | None], None]  # planner, budget, its row once it has answered


def to_json(comparison: Comparison) -> str:
    return json.dumps({"kind": "comparison", "version": VERSION, **asdict(comparison)}, indent=1) + "\n"


def judge(trace: Trace, hardware: Hardware, plan: Plan) -> Judged:
    schedule = lower(trace, plan, hardware)
    peak = check_schedule(trace, schedule)
    timeline = simulate(trace, schedule, hardware)
    plain = plain_seconds(trace, hardware)
    nbytes = {Keep: 0, Swap: 0, Recompute: 0}
    for gap, decision in zip(trace.gaps, plan.decisions, strict=True):
        nbytes[type(decision)] += trace.storages[gap.storage].nbytes
    bound = plan.lower_bound_seconds
    return Judged(
        seconds=timeline.seconds,
        overhead=timeline.seconds / plain - 1 if plain else 0.0,
        peak_bytes=peak,
        kept_bytes=nbytes[Keep],
        swapped_bytes=nbytes[Swap],
        recomputed_bytes=nbytes[Recompute],
        stalls=len(timeline.stalls),
        stalled_seconds=timeline.breakdown.stalled_copy_seconds,
        lower_bound_seconds=bound,
        gap=timeline.seconds / bound - 1 if bound else None,
    )


def plain_seconds(trace: Trace, hardware: Hardware) -> float:
    return simulate(trace, Schedule((), signature(trace)), hardware).seconds


def front(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows that no other row beats in both peak and seconds, by rising peak."""
    plans = [(row.judged.peak_bytes, row.judged.seconds, row.planner, row) for row in rows if row.judged is not None]
    out: list[Row] = []
    fastest = float("inf")
    for _, seconds, _, row in sorted(plans, key=lambda plan: plan[:3]):
        if seconds < fastest:
            fastest = seconds
            out.append(row)
    return tuple(out)


def compare(
    trace: Trace,
    hardware: Hardware,
    budgets: Sequence[int],
    planners: Mapping[str, Planner],
    *,
    time_limit_seconds: float,
    watch: Watch,
) -> Comparison:
    """Ask every planner for every budget, one after the other: solve times are compared too, and cores are shared.

    time_limit_seconds: for one answer. Planners travel to their process by pickle, so a lambda cannot be one.
    """
    rows: list[Row] = []
    for name, planner in planners.items():
        rows += _rows(name, planner, trace, hardware, budgets, time_limit_seconds, watch)
    return Comparison(
        trace_signature=signature(trace),
        hardware=hardware.name,
        plain_seconds=plain_seconds(trace, hardware),
        plain_peak_bytes=trace.peak_bytes,
        floor_bytes=floor_bytes(trace),
        time_limit_seconds=time_limit_seconds,
        rows=tuple(rows),
    )


def _rows(
    name: str,
    planner: Planner,
    trace: Trace,
    hardware: Hardware,
    budgets: Sequence[int],
    time_limit_seconds: float,
    watch: Watch,
) -> Iterator[Row]:
    with contextlib.ExitStack() as stack:
        worker: _Worker | None = None
        for budget in budgets:
            watch(name, budget, None)
            if worker is None:
                worker = stack.enter_context(contextlib.closing(_Worker(trace, hardware, planner)))
            answer, seconds = worker.ask(budget, time_limit_seconds)
            row = _row(name, budget, answer, seconds, trace, hardware)
            if row.outcome in ("late", "failed"):  # the next budget may fare better, but not in this process
                worker.close()
                worker = None
            watch(name, budget, row)
            yield row


def _row(name: str, budget: int, answer: _Answer, seconds: float, trace: Trace, hardware: Hardware) -> Row:
    match answer:
        case BudgetError():
            return Row(name, budget, "infeasible", seconds, None, answer.floor_bytes, str(answer))
        case _NoPlan():
            return Row(name, budget, answer.outcome, seconds, None, 0, answer.message)
    try:
        judged = judge(trace, hardware, answer)
    except LegroomError as error:
        return Row(name, budget, "failed", seconds, None, 0, f"its plan is not sound: {error}")
    if judged.peak_bytes > budget:
        over = f"its plan needs {format_bytes(judged.peak_bytes)}, above the budget of {format_bytes(budget)}"
        return Row(name, budget, "failed", seconds, None, 0, over)
    return Row(name, budget, "plan", seconds, judged, 0, "")


class _Worker:
    """A process that plans one budget after the other, and can be stopped in the middle of one."""

    def __init__(self, trace: Trace, hardware: Hardware, planner: Planner) -> None:
        # Neither fork, which copies locks that other threads hold (progress bars, OpenMP), nor spawn, which loads torch
        # anew for each planner, three seconds every time.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, trace, hardware, planner))
        self._process.start()
        theirs.close()
        self._ready = False

    def ask(self, budget: int, time_limit_seconds: float) -> tuple[_Answer, float]:
        """The answer, and how long it took."""
        try:
            if not self._ready:
                if not self._pipe.poll(START_SECONDS):
                    return _NoPlan("failed", f"its process was not ready after {START_SECONDS:g} s"), 0.0
                self._pipe.recv()
                self._ready = True
            self._pipe.send(budget)
            if not self._pipe.poll(time_limit_seconds):
                return _NoPlan("late", f"no answer within {time_limit_seconds:g} s"), time_limit_seconds
            answer, seconds = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(1.0)
            return _NoPlan("failed", f"its process ended with status {self._process.exitcode}"), 0.0
        return answer, seconds

    def close(self) -> None:
        """Stop it, and whatever processes its planner has started. Closing twice is fine."""
        if self._pipe.closed:
            return
        self._pipe.close()
        pid = self._process.pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        self._process.kill()  # in case it had not come so far as to lead a group
        self._process.join()


def _work(pipe: Connection, trace: Trace, hardware: Hardware, planner: Planner) -> None:
    os.setsid()
    with contextlib.suppress(OSError):  # there is no standard error
        os.dup2(2, 1)  # a solver may write there, where the table or the JSON goes
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Loads the compiled code, which is no part of what planning takes.
    evaluator = Evaluator(trace, hardware)
    evaluator.evaluate(np.full(evaluator.gaps, KEEP, np.int8))
    with contextlib.suppress(EOFError, ConnectionError):
        pipe.send(None)
        while True:
            budget = pipe.recv()
            start = time.perf_counter()
            answer = _answer(planner, trace, hardware, budget)
            pipe.send((answer, time.perf_counter() - start))


def _answer(planner: Planner, trace: Trace, hardware: Hardware, budget: int) -> _Answer:
    try:
        answer = planner(trace, hardware, budget)
    except BudgetError as error:
        return error
    except Exception as error:  # as text: not every error can be pickled, or is known over there
        return _NoPlan("failed", f"{type(error).__name__}: {error}")
    if not isinstance(answer, Plan):
        return _NoPlan("failed", f"expected a plan, got a {type(answer).__name__}")
    return answer


def _end_with_parent() -> None:
    """A parent that is killed can stop nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)
