"""Planning beside a program that trains, in a process of its own.

A planner is Python code. In a thread it takes turns with the program's own code, which on a fast device is what the
device waits for: on an H200, steps of a BERT-base took 102 ms in place of 53 while plans were made in the background.
The process loads no torch. It is asked by lines of JSON and answers in the same way, with the plan and its schedule; it
ends when its input does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import IO, Any

from legroom import hardware as machines
from legroom import schedule as schedules
from legroom import traceio
from legroom.errors import BudgetError, LegroomError, PlanError
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.jsonio import LARGEST_TEXT_BYTES, Node, parse
from legroom.plan import Plan
from legroom.plan import from_json as plan_from_json
from legroom.plan import to_json as plan_to_json
from legroom.planners import PLANNERS
from legroom.schedule import Schedule, lower

VERSION = 1
Planner = Callable[[Trace, Hardware, int], Plan]
_END_SECONDS = 2.0  # for a process whose input has ended
_NICE = 5  # the program that trains comes first


class ProcessError(LegroomError):
    """There is no such process, or it ended: plan in another way."""


def can_be_sent(planner: Planner) -> bool:
    """Whether the process would know it: one of ours, whatever its knobs."""
    return _name_of(planner) is not None


def _name_of(planner: Planner) -> str | None:
    kind: Any = type(planner)
    return next((name for name, known in PLANNERS.items() if type(known) is kind), None)


class PlanProcess:
    """Started when first asked. Used by one thread; any other may close it."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._closed = False
        self._starting = threading.Lock()
        self._asking = threading.Lock()  # while the pipes are in use

    def plan(self, planner: Planner, trace: Trace, hardware: Hardware, budget_bytes: int) -> tuple[Plan, Schedule]:
        """Raises BudgetError where there is none, PlanError where planning fails, ProcessError without an answer."""
        question = {
            "kind": "plan question",
            "version": VERSION,
            "planner": _name_of(planner),
            "knobs": asdict(planner),  # type: ignore[call-overload]
            "trace": traceio.to_json(trace),
            "hardware": machines.to_json(hardware),
            "budget_bytes": budget_bytes,
        }
        try:
            with self._asking:
                child = self._started()
                assert child.stdin is not None and child.stdout is not None
                child.stdin.write(json.dumps(question) + "\n")
                child.stdin.flush()
                line = child.stdout.readline(LARGEST_TEXT_BYTES)
        except (OSError, ValueError) as error:  # ValueError: a pipe that was closed meanwhile
            raise ProcessError(f"the planning process cannot be asked: {error}") from None
        if not line.endswith("\n"):
            raise ProcessError("the planning process ended without an answer")
        return _read_answer(line)

    def close(self) -> None:
        with self._starting:
            self._closed, child = True, self._child
        if child is None:
            return
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_END_SECONDS)
        if self._asking.acquire(timeout=_END_SECONDS):  # whoever waits for an answer has read the end of it by now
            for pipe in (child.stdin, child.stdout):
                with contextlib.suppress(OSError):  # what it did not read cannot be written any more
                    assert pipe is not None
                    pipe.close()
            self._asking.release()

    def _started(self) -> subprocess.Popen[str]:
        with self._starting:
            if self._closed or not sys.executable:
                raise ProcessError("there is no planning process")
            if self._child is None:
                # What the program found its packages by, and not the folder it happens to be in.
                path = os.pathsep.join(part for part in sys.path if isinstance(part, str) and part)
                self._child = subprocess.Popen(
                    [sys.executable, "-m", "legroom.planprocess"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    encoding="utf-8",
                    env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
                )
            return self._child


def _read_answer(line: str) -> tuple[Plan, Schedule]:
    node = parse(line, kind="plan answer", version=VERSION, error=PlanError)
    found = node.fields("error", "is_budget", "budget_bytes", "floor_bytes", "plan", "schedule")
    error = found["error"].text()
    if found["is_budget"].boolean():
        budget, floor = found["budget_bytes"].integer(), found["floor_bytes"].integer()
        raise BudgetError(error, budget_bytes=budget, floor_bytes=floor)
    if error:
        raise PlanError(error)
    plan = plan_from_json(found["plan"].text(longest=LARGEST_TEXT_BYTES))
    return plan, schedules.from_json(found["schedule"].text(longest=LARGEST_TEXT_BYTES))


# in the process


def _answer(line: str) -> dict[str, Any]:
    said: dict[str, Any] = {"error": "", "is_budget": False, "budget_bytes": 0, "floor_bytes": 0}
    try:
        plan, schedule = _planned(parse(line, kind="plan question", version=VERSION, error=PlanError))
        return said | {"plan": plan_to_json(plan), "schedule": schedules.to_json(schedule)}
    except BudgetError as error:
        said |= {"is_budget": True, "budget_bytes": error.budget_bytes, "floor_bytes": error.floor_bytes}
        return said | {"error": str(error)[:4000], "plan": "", "schedule": ""}
    except Exception as error:  # whatever it is, the program is to hear of it
        return said | {"error": f"{type(error).__name__}: {error}"[:4000], "plan": "", "schedule": ""}


def _planned(question: Node) -> tuple[Plan, Schedule]:
    found = question.fields("planner", "knobs", "trace", "hardware", "budget_bytes")
    kind: Any = type(PLANNERS[found["planner"].one_of(tuple(PLANNERS))])
    knobs = found["knobs"].fields(*(field.name for field in fields(kind)))
    trace = traceio.from_json(found["trace"].text(longest=LARGEST_TEXT_BYTES))
    hardware = machines.from_json(found["hardware"].text(longest=LARGEST_TEXT_BYTES))
    planner = kind(**{name: knob.value for name, knob in knobs.items()})
    plan = planner(trace, hardware, found["budget_bytes"].integer())
    return plan, lower(trace, plan, hardware)


def serve(questions: IO[str], answers: IO[str]) -> None:
    """Until there are no more questions."""
    while line := questions.readline(LARGEST_TEXT_BYTES):
        answers.write(json.dumps({"kind": "plan answer", "version": VERSION, **_answer(line)}) + "\n")
        answers.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the program's to answer
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    answers, sys.stdout = sys.stdout, sys.stderr  # whoever prints does not answer
    with contextlib.suppress(BrokenPipeError):
        serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
