"""Planning beside a program that trains, in a process of its own.

A planner is Python code. In a thread it takes turns with the program's own code, which on a fast device is what the
device waits for: on an H200, steps of a BERT-base took 102 ms in place of 53 while plans were made in the background.
The process loads no torch. It is asked by lines of JSON and answers in the same way, with the plan and its schedule; it
ends when its input does, or when the program is gone. Questions about one step at many sizes carry the step once: to
write a trace down takes the program's own time, and to read it a quarter of that of a quick plan.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from typing import IO, Any

from legroom import hardware as machines
from legroom import numbersio, traceio
from legroom import schedule as schedules
from legroom.errors import BudgetError, LegroomError, PlanError
from legroom.hardware import Hardware
from legroom.ir import Trace, validate
from legroom.jsonio import LARGEST_TEXT_BYTES, Node, parse
from legroom.plan import Plan
from legroom.plan import from_json as plan_from_json
from legroom.plan import to_json as plan_to_json
from legroom.planners import PLANNERS
from legroom.schedule import Schedule, lower
from legroom.sizes import Numbers, with_numbers

VERSION = 3  # 1 had no `replays`, 2 no `numbers`
Planner = Callable[[Trace, Hardware, int], Plan]
HELLO = "legroom plans"  # before the first answer; whatever an installation prints when Python starts comes before it
START_SECONDS = 60.0  # until then
ANSWER_SECONDS = 600.0  # for one plan
_END_SECONDS = 2.0  # for a process that was killed
_LOOK_SECONDS = 5.0  # between two looks at whether the program is still there
_NICE = 5  # the program that trains comes first


class ProcessError(LegroomError):
    """There is no such process, or it does not answer as it should: plan in another way."""


def can_be_sent(planner: Planner) -> bool:
    """Whether the process would know it: one of ours, with knobs that are plain values."""
    if _name_of(planner) is None:
        return False
    knobs = asdict(planner)  # type: ignore[call-overload]
    try:
        return bool(json.loads(json.dumps(knobs)) == knobs)
    except (TypeError, ValueError):
        return False


def _name_of(planner: Planner) -> str | None:
    kind: Any = type(planner)
    return next((name for name, known in PLANNERS.items() if type(known) is kind), None)


class _Child:
    """The process, and a thread that reads what it says: nothing else can wait for a pipe, and not for too long."""

    def __init__(self) -> None:
        # What the program found its packages by, and not the folder it happens to be in.
        path = os.pathsep.join(part for part in sys.path if isinstance(part, str) and part)
        # Frozen into one file, a program is its own interpreter, and would be started once more.
        if not sys.executable or getattr(sys, "frozen", False):
            raise ProcessError("there is no Python to start")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "legroom.planprocess"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            # An interrupt from the terminal is the program's to answer.
            process_group=0 if os.name == "posix" else None,
        )
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.ended = threading.Event()  # it will say no more than what is in `lines`
        assert self.process.stdout is not None
        threading.Thread(target=_read, args=(self.process.stdout, self.lines, self.ended), daemon=True).start()

    def said(self, until: float) -> str:
        """The next line; ProcessError where none comes."""
        try:
            line = self.lines.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise ProcessError("the planning process does not answer") from None
        if not line.endswith("\n"):
            raise ProcessError("the planning process ended without an answer")
        return line

    def end(self) -> None:
        _end(self.process)


def _read(pipe: IO[str], lines: queue.SimpleQueue[str], ended: threading.Event) -> None:
    with contextlib.suppress(OSError, ValueError), pipe:
        while line := pipe.readline(LARGEST_TEXT_BYTES):
            lines.put(line)
    ended.set()
    lines.put("")


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
    with contextlib.suppress(OSError):  # what it did not read cannot be written any more
        assert process.stdin is not None
        process.stdin.close()


class PlanProcess:
    """Started when first asked. Used by one thread; any other may close it."""

    def __init__(self) -> None:
        self._child: _Child | None = None
        self._closed = False
        self._starting = threading.Lock()
        self._questions = 0
        self._known: Trace | None = None  # to the process

    def plan(
        self,
        planner: Planner,
        trace: Trace,
        hardware: Hardware,
        budget_bytes: int,
        *,
        like: tuple[Trace, Numbers] | None = None,
    ) -> tuple[Plan, Schedule]:
        """Raises BudgetError where there is none, PlanError where planning fails, ProcessError without an answer.

        like: another trace, and the numbers with which it is this one."""
        child = self._started()
        # The end is told once. One that ends may still take questions for a moment, and one that reads no more would be
        # written to without end.
        if child.ended.is_set():
            raise ProcessError("the planning process has ended")
        self._questions += 1
        template, numbers = like or (trace, None)
        known, self._known = self._known, None  # until it has answered
        question = {
            "kind": "plan question",
            "version": VERSION,
            "number": self._questions,
            "planner": _name_of(planner),
            "knobs": asdict(planner),  # type: ignore[call-overload]
            "trace": None,
            "replays": None,
            "numbers": numbersio.to_fields(numbers) if numbers is not None else None,
            "hardware": machines.to_json(hardware),
            "budget_bytes": max(0, budget_bytes),
        }
        if template is not known:
            question["trace"] = traceio.to_json(template)
            # Not in files: ops whose replays take another time than they do, and what they take.
            question["replays"] = [[op.id, op.replay_seconds] for op in template.ops if op.replay_seconds is not None]
        try:
            assert child.process.stdin is not None
            child.process.stdin.write(json.dumps(question) + "\n")
            child.process.stdin.flush()
        except (OSError, ValueError) as error:  # ValueError: a pipe that was closed meanwhile
            raise ProcessError(f"the planning process cannot be asked: {error}") from None
        try:
            answer = read_answer(child.said(time.monotonic() + ANSWER_SECONDS), self._questions)
        except BudgetError:
            self._known = template
            raise
        self._known = template
        return answer

    def close(self) -> None:
        with self._starting:
            self._closed, child = True, self._child
        if child is not None:
            child.end()

    def _started(self) -> _Child:
        with self._starting:
            if self._closed:
                raise ProcessError("the planning process was ended")
            if self._child is not None:
                return self._child
            try:
                child = self._child = _Child()
            except OSError as error:
                raise ProcessError(f"no planning process can be started: {error}") from None
            weakref.finalize(self, _end, child.process)  # nobody may have closed it
        until = time.monotonic() + START_SECONDS
        while child.said(until) != HELLO + "\n":
            pass
        return child


def read_answer(line: str, number: int) -> tuple[Plan, Schedule]:
    try:
        node = parse(line, kind="plan answer", version=VERSION, error=ProcessError)
        found = node.fields("number", "error", "is_budget", "budget_bytes", "floor_bytes", "plan", "schedule")
        if found["number"].integer() != number:
            raise ProcessError("the planning process answers another question")
        error, is_budget = found["error"].text(), found["is_budget"].boolean()
        budget, floor = found["budget_bytes"].integer(), found["floor_bytes"].integer()
        texts = [found[name].text(longest=LARGEST_TEXT_BYTES) for name in ("plan", "schedule")]
    except LegroomError as cause:
        raise ProcessError(f"the planning process cannot be understood: {cause}") from None
    if is_budget:
        raise BudgetError(error, budget_bytes=budget, floor_bytes=floor)
    if error:
        raise PlanError(error)
    return plan_from_json(texts[0]), schedules.from_json(texts[1])


# in the process


class _Desk:
    """Answers one question after the other."""

    def __init__(self) -> None:
        self._trace: Trace | None = None  # the last one that came

    def planned(self, found: dict[str, Node]) -> tuple[Plan, Schedule]:
        kind: Any = type(PLANNERS[found["planner"].one_of(tuple(PLANNERS))])
        knobs = found["knobs"].fields(*(field.name for field in fields(kind)))
        trace = self._taken(found)
        if found["numbers"].value is not None:
            trace = with_numbers(trace, numbersio.from_node(found["numbers"], trace))
        hardware = machines.from_json(found["hardware"].text(longest=LARGEST_TEXT_BYTES))
        planner = kind(**{name: knob.value for name, knob in knobs.items()})
        plan = planner(trace, hardware, found["budget_bytes"].integer())
        return plan, lower(trace, plan, hardware)

    def _taken(self, found: dict[str, Node]) -> Trace:
        """The trace that came with the question, or with one before."""
        known, self._trace = self._trace, None
        if found["trace"].value is not None:
            known = _priced(traceio.from_json(found["trace"].text(longest=LARGEST_TEXT_BYTES)), found["replays"])
        elif known is None:
            found["trace"].fail("there is none, and none came before")
        self._trace = known
        return known


def _answer(line: str, desk: _Desk) -> dict[str, Any]:
    said: dict[str, Any] = {"number": 0, "error": "", "is_budget": False, "budget_bytes": 0, "floor_bytes": 0}
    try:
        question = parse(line, kind="plan question", version=VERSION, error=PlanError)
        names = ("number", "planner", "knobs", "trace", "replays", "numbers", "hardware", "budget_bytes")
        found = question.fields(*names)
        said["number"] = found["number"].integer()
        plan, schedule = desk.planned(found)
        return said | {"plan": plan_to_json(plan), "schedule": schedules.to_json(schedule)}
    except BudgetError as error:
        said |= {"is_budget": True, "budget_bytes": error.budget_bytes, "floor_bytes": error.floor_bytes}
        return said | {"error": str(error)[:4000], "plan": "", "schedule": ""}
    except Exception as error:  # whatever it is, the program is to hear of it
        return said | {"error": f"{type(error).__name__}: {error}"[:4000], "plan": "", "schedule": ""}


def _priced(trace: Trace, replays: Node) -> Trace:
    """With what replays take. Not looked at once more where they take what ops do."""
    ops = list(trace.ops)
    rows = list(replays.items(longest=len(ops)))
    for row in rows:
        pair = list(row.items())
        if len(pair) != 2:
            row.fail("expected an op and its seconds")
        op = pair[0].integer(most=len(ops) - 1)
        ops[op] = replace(ops[op], replay_seconds=pair[1].number())
    if not rows:
        return trace
    priced = replace(trace, ops=tuple(ops))
    validate(priced)
    return priced


def serve(questions: IO[str], answers: IO[str]) -> None:
    """Until there are no more questions."""
    desk = _Desk()
    answers.write(HELLO + "\n")
    answers.flush()
    while line := questions.readline(LARGEST_TEXT_BYTES):
        answers.write(json.dumps({"kind": "plan answer", "version": VERSION, **_answer(line, desk)}) + "\n")
        answers.flush()


def _end_with(program: int) -> None:
    """A process that the program forked may hold on to the pipe, and no end comes."""
    while os.getppid() == program:
        time.sleep(_LOOK_SECONDS)
    os._exit(0)


def main() -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with contextlib.suppress(OSError, AttributeError):  # not on every system
        os.nice(_NICE)
    # Whoever prints does not answer; nor does a solver that writes to the descriptor itself.
    answers = open(os.dup(1), "w", encoding="utf-8")  # noqa: SIM115
    with contextlib.suppress(OSError):  # there is no standard error
        os.dup2(2, 1)
    sys.stdout = sys.stderr
    with contextlib.suppress(BrokenPipeError):
        serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
