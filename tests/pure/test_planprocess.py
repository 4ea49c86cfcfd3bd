"""The planning process: real ones, asked what is right and what is not."""

from __future__ import annotations

import gc
import io
import json
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom import hardware, numbersio, planprocess, traceio
from legroom.errors import BudgetError, LegroomError, PlanError
from legroom.evaluate import floor_bytes
from legroom.hardware import PRESETS
from legroom.ir import Trace
from legroom.plan import Plan
from legroom.planners import PLANNERS, quick
from legroom.planners.auto import Auto
from legroom.planners.capuchin import Capuchin
from legroom.planners.home import Home
from legroom.planprocess import HELLO, PlanProcess, ProcessError, can_be_sent, read_answer, serve
from legroom.schedule import check_schedule, lower
from legroom.sizes import numbers_of, with_numbers

H200 = PRESETS["h200"]
WAIT_SECONDS = 60.0


def load(name: str) -> Trace:
    return traceio.load(Path(__file__).parents[1] / "traces" / f"{name}.json.gz")


def half_way(trace: Trace) -> int:
    return (floor_bytes(trace) + trace.peak_bytes) // 2


@pytest.fixture(scope="module")
def process() -> Iterator[PlanProcess]:
    process = PlanProcess()
    yield process
    process.close()


@pytest.mark.parametrize("name", ["squeezenet", "lstm"])
@pytest.mark.parametrize("planner", [quick(Auto()), replace(Auto(), evaluations=500, bound=False), Capuchin()])
def test_the_same_plan_as_without_a_process(process: PlanProcess, name: str, planner: Any) -> None:
    trace = load(name)
    budget = half_way(trace)
    plan, schedule = process.plan(planner, trace, H200, budget)
    assert plan == planner(trace, H200, budget)
    assert schedule == lower(trace, plan, H200)
    assert check_schedule(trace, schedule) <= budget


def test_what_replays_take_arrives(process: PlanProcess) -> None:
    """It is not in files."""
    trace = load("vgg16")
    free = replace(trace, ops=tuple(replace(op, replay_seconds=0.0) for op in trace.ops))
    budget = half_way(trace)
    plans = [process.plan(quick(Auto()), each, H200, budget)[0] for each in (trace, free)]
    assert plans[1] == quick(Auto())(free, H200, budget)
    assert plans[1].predicted_seconds < plans[0].predicted_seconds


def test_one_step_at_many_sizes_is_written_down_once(process: PlanProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    to_json = traceio.to_json
    monkeypatch.setattr(traceio, "to_json", lambda trace: written.append(trace) or to_json(trace))
    other, template = load("squeezenet"), load("vgg16")
    ops = (replace(op, replay_seconds=op.seconds / 3 if op.id % 2 else None) for op in template.ops)
    template = replace(template, ops=tuple(ops))
    for scale in (1, 2, 3):
        numbers = numbers_of(template)
        numbers = replace(numbers, nbytes=numbers.nbytes // scale, seconds=numbers.seconds / (7 * scale))
        trace = with_numbers(template, numbers)
        plan, schedule = process.plan(quick(Auto()), trace, H200, half_way(trace), like=(template, numbers))
        assert plan == quick(Auto())(trace, H200, half_way(trace))
        assert schedule == lower(trace, plan, H200)
        if scale == 2:
            with pytest.raises(BudgetError):
                process.plan(quick(Auto()), trace, H200, 1000, like=(template, numbers))
    assert written == [template]
    # Another step comes whole, as does the first one after it; and one after a question that was none.
    process.plan(quick(Auto()), other, H200, half_way(other))
    process.plan(quick(Auto()), other, H200, half_way(other))
    process.plan(quick(Auto()), template, H200, half_way(template))
    assert written[1:] == [other, template]
    with pytest.raises(PlanError):
        process.plan(Auto(evaluations="many"), template, H200, half_way(template))  # type: ignore[arg-type]
    process.plan(quick(Auto()), template, H200, half_way(template))
    assert written[3:] == [template]


def test_knobs_arrive(process: PlanProcess) -> None:
    trace = load("vgg16")
    notes = [process.plan(Auto(evaluations=n, bound=False), trace, H200, half_way(trace))[0].notes for n in (60, 900)]
    assert notes[0] != notes[1]


def test_a_budget_below_the_floor_is_told_with_its_numbers(process: PlanProcess) -> None:
    trace = load("squeezenet")
    with pytest.raises(BudgetError) as caught:
        process.plan(quick(Auto()), trace, H200, 1000)
    assert (caught.value.budget_bytes, caught.value.floor_bytes) == (1000, floor_bytes(trace))
    assert process.plan(quick(Auto()), trace, H200, half_way(trace))  # and it goes on


def test_a_planner_that_fails_says_why(process: PlanProcess) -> None:
    with pytest.raises(PlanError, match="TypeError"):
        process.plan(Auto(evaluations="many"), load("lstm"), H200, half_way(load("lstm")))  # type: ignore[arg-type]


def test_which_planners_can_be_sent() -> None:
    assert all(map(can_be_sent, PLANNERS.values()))
    assert not can_be_sent(lambda *_: None)  # type: ignore[arg-type,return-value]

    class Mine(Auto):
        def __call__(self, *_: Any) -> Plan:
            raise AssertionError

    assert not can_be_sent(Mine())
    assert not can_be_sent(Home(progress=print))
    assert not can_be_sent(Auto(evaluations=np.int64(50)))  # type: ignore[arg-type]


def test_a_process_that_was_killed_is_told() -> None:
    process, trace = PlanProcess(), load("lstm")
    process.plan(quick(Auto()), trace, H200, half_way(trace))
    assert process._child is not None
    process._child.process.kill()
    for _ in range(2):
        with pytest.raises(ProcessError):
            process.plan(quick(Auto()), trace, H200, half_way(trace))
    process.close()


def test_a_process_that_says_no_more_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that ends, the system may close what it says before what it is told: a question then finds a taker."""
    deaf = tmp_path / "python"
    deaf.write_text(f"#!/bin/sh\necho {HELLO}\nexec >&-\nexec cat >/dev/null\n")
    deaf.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(deaf))
    process, trace = PlanProcess(), load("lstm")
    began = time.monotonic()
    for _ in range(3):
        with pytest.raises(ProcessError, match="ended"):
            process.plan(quick(Auto()), trace, H200, half_way(trace))
    process.close()
    assert time.monotonic() - began < WAIT_SECONDS


def test_a_process_that_neither_says_nor_reads_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question larger than a pipe holds would wait for a reader."""
    deaf = tmp_path / "python"
    deaf.write_text(f"#!/bin/sh\necho {HELLO}\nexec >&-\nexec sleep 100\n")
    deaf.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(deaf))
    process = PlanProcess()
    assert process._started().ended.wait(WAIT_SECONDS)
    with pytest.raises(ProcessError, match="ended"):
        process.plan(quick(Auto()), load("bert"), H200, half_way(load("bert")))
    process.close()


def test_a_python_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for executable in ("", "/nowhere/python", "/bin/false"):
        monkeypatch.setattr(sys, "executable", executable)
        process = PlanProcess()
        with pytest.raises(ProcessError):
            process.plan(quick(Auto()), load("lstm"), H200, 2**30)
        process.close()


def test_closing_does_not_wait_for_a_plan() -> None:
    process, trace, caught = PlanProcess(), load("gpt"), []

    def ask() -> None:
        try:
            process.plan(Auto(evaluations=10**7), trace, H200, half_way(trace))
        except ProcessError as error:
            caught.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while process._child is None:
        time.sleep(0.01)
    time.sleep(0.2)
    child, began = process._child.process, time.monotonic()
    process.close()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive() and caught
    assert child.poll() is not None and time.monotonic() - began < 5.0
    with pytest.raises(ProcessError):  # and none is started again
        process.plan(quick(Auto()), trace, H200, half_way(trace))


def test_it_ends_with_the_program() -> None:
    """Which may be killed, and then closes nothing."""
    code = """
        import os, sys
        from legroom import traceio
        from legroom.hardware import PRESETS
        from legroom.planners.auto import Auto
        from legroom.planprocess import PlanProcess
        trace, process = traceio.load(sys.argv[1]), PlanProcess()
        process.plan(Auto(evaluations=50, bound=False), trace, PRESETS["h200"], trace.peak_bytes * 9 // 10)
        print(process._child.process.pid, flush=True)
        os._exit(0)
    """
    trace = str(Path(__file__).parents[1] / "traces" / "lstm.json.gz")
    run = [sys.executable, "-c", textwrap.dedent(code), trace]
    pid = int(subprocess.run(run, capture_output=True, text=True, timeout=WAIT_SECONDS, check=True).stdout)
    deadline = time.monotonic() + WAIT_SECONDS
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_it_loads_no_torch() -> None:
    code = "import sys, legroom.planprocess; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert done.stdout.strip() == "False", done.stderr


def asked(process: PlanProcess, name: str = "lstm") -> Plan:
    trace = load(name)
    try:
        return process.plan(quick(Auto()), trace, H200, half_way(trace))[0]
    finally:
        process.close()


def test_modules_nearby_are_not_taken_for_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [part for part in sys.path if part])
    assert asked(PlanProcess()).planner == "auto"


def test_what_python_prints_when_it_starts_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('welcome')\nprint('to this machine')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert asked(PlanProcess()).planner == "auto"


def test_a_program_that_is_its_own_interpreter_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    process = PlanProcess()
    with pytest.raises(ProcessError, match="no Python"):
        asked(process)
    assert process._child is None


def test_a_python_that_says_nothing_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(600)")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(planprocess, "START_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(ProcessError, match="does not answer"):
        asked(PlanProcess())
    assert time.monotonic() - began < 10.0


def test_an_answer_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planprocess, "ANSWER_SECONDS", 0.3)
    process, trace = PlanProcess(), load("gpt")
    with pytest.raises(ProcessError, match="does not answer"):
        process.plan(Auto(evaluations=10**7), trace, H200, half_way(trace))
    process.close()


def test_one_that_nobody_closed_ends_with_its_owner() -> None:
    process, trace = PlanProcess(), load("lstm")
    process.plan(quick(Auto()), trace, H200, half_way(trace))
    assert process._child is not None
    child = process._child.process
    del process
    gc.collect()
    assert child.poll() is not None


def answers_to(*lines: str) -> list[dict[str, Any]]:
    out = io.StringIO()
    serve(io.StringIO("".join(line + "\n" for line in lines)), out)
    hello, *answers = out.getvalue().splitlines()
    assert hello == HELLO
    return [json.loads(line) for line in answers]


QUESTION = {
    "kind": "plan question",
    "version": 3,
    "number": 7,
    "planner": "none",
    "knobs": {},
    "replays": [],
    "numbers": None,
    "budget_bytes": 2**40,
}


NUMBERS = numbersio.to_fields(numbers_of(load("lstm")))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"planner": "nobody"}, "planner: expected one of"),
        ({"planner": 3}, "planner: expected one of"),
        ({"knobs": {"speed": 1}}, "speed"),
        ({"knobs": None}, "knobs"),
        ({"budget_bytes": -1}, "budget_bytes"),
        ({"budget_bytes": "all"}, "budget_bytes"),
        ({"trace": "{}"}, "trace"),
        ({"trace": "not JSON"}, "not readable as JSON"),
        ({"hardware": "[]"}, "hardware"),
        ({"version": 4}, "version 4"),
        ({"kind": "plan"}, "kind"),
        ({"more": 1}, "more"),
        ({"replays": None}, "replays"),
        ({"replays": [3]}, "replays[0]"),
        ({"replays": [[3]]}, "replays[0]: expected an op and its seconds"),
        ({"replays": [[3, 1.0, 2.0]]}, "replays[0]: expected an op and its seconds"),
        ({"replays": [[-1, 1.0]]}, "replays[0][0]"),
        ({"replays": [[10**9, 1.0]]}, "replays[0][0]"),
        ({"replays": [[0, -1.0]]}, "replays[0][1]"),
        ({"replays": [[0, 1e300]]}, "replay_seconds"),
        ({"replays": [[0, 2.0**31]]}, "replay_seconds"),
        ({"replays": [[0, "soon"]]}, "replays[0][1]"),
        ({"replays": [[0, 0.0]] * 10**4}, "replays"),
        ({"number": "first"}, "number"),
        ({"trace": None}, "trace: there is none, and none came before"),
        ({"numbers": 3}, "numbers"),
        ({"numbers": {}}, "numbers"),
        ({"numbers": {**NUMBERS, "more": 1}}, "numbers"),
        ({"numbers": {**NUMBERS, "nbytes": [1]}}, "numbers.nbytes: expected"),
        ({"numbers": {**NUMBERS, "nbytes": [-1] * len(NUMBERS["nbytes"])}}, "numbers.nbytes[0]"),
        ({"numbers": {**NUMBERS, "nbytes": [2**61] * len(NUMBERS["nbytes"])}}, "numbers.nbytes: all sizes"),
        ({"numbers": {**NUMBERS, "level_bytes": [0.5] * len(NUMBERS["level_bytes"])}}, "numbers.level_bytes[0]"),
        ({"numbers": {**NUMBERS, "peak_bytes": NUMBERS["peak_bytes"][1:]}}, "numbers.peak_bytes: expected"),
        ({"numbers": {**NUMBERS, "workspace_bytes": None}}, "numbers.workspace_bytes"),
        ({"numbers": {**NUMBERS, "seconds": [-1.0] * len(NUMBERS["seconds"])}}, "numbers.seconds[0]"),
        ({"numbers": {**NUMBERS, "seconds": [2.0**30] * len(NUMBERS["seconds"])}}, "numbers.seconds: all ops"),
        ({"numbers": {**NUMBERS, "head_peak_bytes": -1}}, "numbers.head_peak_bytes"),
    ],
)
def test_nonsense_is_answered_with_what_is_wrong(changed: dict[str, Any], said: str) -> None:
    good = {**QUESTION, "trace": traceio.to_json(load("lstm")), "hardware": hardware.to_json(H200)}
    bad, fine = answers_to(json.dumps(good | changed), json.dumps(good))
    assert said in bad["error"] and not bad["plan"] and not bad["schedule"]
    assert fine["error"] == "" and fine["plan"] and fine["number"] == 7


def test_lines_that_are_no_questions() -> None:
    for line in ("", "{", "null", "[1]", "{}", "\x00", '{"kind":"plan question","version":3}'):
        (answer,) = answers_to(line)
        assert answer["error"]


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ANSWER = ("number", "error", "is_budget", "budget_bytes", "floor_bytes", "plan", "schedule")


@given(st.dictionaries(st.sampled_from(ANSWER), json_values) | json_values)
@settings(max_examples=200, deadline=None)
def test_answers_that_are_none(value: Any) -> None:
    """Whatever the process says, it is a plan or one of our errors."""
    if isinstance(value, dict):
        base = {
            "number": 1,
            "error": "",
            "is_budget": False,
            "budget_bytes": 0,
            "floor_bytes": 0,
            "plan": "",
            "schedule": "",
        }
        value = {"kind": "plan answer", "version": 3, **base, **value}
    with pytest.raises(LegroomError):
        read_answer(json.dumps(value), 1)


def test_an_answer_to_another_question_is_none() -> None:
    good = {**QUESTION, "trace": traceio.to_json(load("lstm")), "hardware": hardware.to_json(H200)}
    (answer,) = answers_to(json.dumps(good))
    assert read_answer(json.dumps(answer), 7)[0].planner == "none"
    with pytest.raises(ProcessError, match="another question"):
        read_answer(json.dumps(answer), 8)


def test_what_a_solver_writes_to_the_descriptor_is_no_answer() -> None:
    code = """
        import os
        from legroom import planprocess
        answer = planprocess._answer
        def noisy(line, desk):
            os.write(1, b"a solver says something" + bytes([10]))
            return answer(line, desk)
        planprocess._answer = noisy
        planprocess.main()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, input="{}\n", capture_output=True, text=True, timeout=WAIT_SECONDS)
    hello, answered = done.stdout.splitlines()
    assert hello == HELLO and json.loads(answered)["kind"] == "plan answer"
    assert "a solver says something" in done.stderr
