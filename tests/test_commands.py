"""`legroom plan`, `compare`, `simulate` and `capture`: what they do, and what they make of bad input."""

from __future__ import annotations

import functools
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from legroom import traceio
from legroom.cli import run
from legroom.commands import planning, scatter
from legroom.commands.arguments import budgets_in, check_targets, hardware_of, slowdown_of
from legroom.compare import Comparison, Judged, Row
from legroom.errors import LegroomError
from legroom.evaluate import floor_bytes
from legroom.hardware import PRESETS, Hardware
from legroom.hardware import to_json as hardware_to_json
from legroom.ir import Trace
from legroom.plan import Keep, Plan, Swap
from legroom.plan import from_json as plan_from_json
from legroom.plan import to_json as plan_to_json
from legroom.planners import PLANNERS
from legroom.planners.auto import Auto
from legroom.schedule import check_schedule, lower
from legroom.simulate import simulate
from legroom.timeline import from_json as timeline_from_json
from tests.pure.strategies import make_plan, make_trace
from tests.pure.test_schedule import LINK, chain

TRACE = make_trace(11, forward=12)
FLOOR, PEAK = floor_bytes(TRACE), TRACE.peak_bytes
HALF = (FLOOR + PEAK) // 2
SCRIPT = """
import sys
import torch

torch.manual_seed(0)
width = int(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.GELU(), torch.nn.Linear(width, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step():
    model(torch.randn(256, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    raise SystemExit("the training loop ran")
"""

Printed = pytest.CaptureFixture[str]


@functools.cache
def half_plan() -> Plan:
    return PLANNERS["auto"](TRACE, PRESETS["h200"], HALF)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a trace, a plan for it, and a machine."""
    monkeypatch.chdir(tmp_path)
    traceio.save(TRACE, "trace.json.gz")
    Path("plan.json").write_text(plan_to_json(half_plan()))
    Path("machine.json").write_text(hardware_to_json(replace(PRESETS["h200"], name="mine")))
    return tmp_path


def legroom(arguments: str) -> int:
    return run(arguments.split())


def complaint(printed: Printed, arguments: str, *, status: int = 2) -> str:
    """The one line that a command says when it fails, having written nothing."""
    before = sorted(Path().iterdir())
    assert legroom(arguments) == status
    out, err = printed.readouterr()
    assert out == ""
    assert err.startswith("legroom: ")
    assert err.count("\n") == 1
    assert "bug" not in err
    assert sorted(Path().iterdir()) == before
    return err


# --- plan -------------------------------------------------------------------------------------------------------------


def test_a_plan_goes_to_standard_output_and_its_summary_to_standard_error(files: Path, capsys: Printed) -> None:
    assert run(["plan", "trace.json.gz", "--budget", f"{HALF}B"]) == 0
    printed = capsys.readouterr()
    plan = plan_from_json(printed.out)
    assert check_schedule(TRACE, lower(TRACE, plan, PRESETS["h200"])) == plan.predicted_peak_bytes <= HALF
    assert "auto on h200" in printed.err
    assert plan.notes[0] in printed.err


def test_a_plan_goes_into_a_file_and_can_be_simulated(files: Path, capsys: Printed) -> None:
    arguments = "plan trace.json.gz --budget 50% --planner auto --hardware machine.json --output out.json"
    assert legroom(arguments) == 0
    assert capsys.readouterr().out == ""
    plan = plan_from_json(Path("out.json").read_text())
    assert plan.budget_bytes == pytest.approx(HALF, abs=1)
    assert legroom("simulate trace.json.gz out.json --hardware machine.json --json t.json --perfetto p.json") == 0
    said = capsys.readouterr().out
    timeline = timeline_from_json(Path("t.json").read_text())
    assert timeline == simulate(TRACE, plan, PRESETS["h200"])
    assert timeline.seconds == plan.predicted_seconds
    assert json.loads(Path("p.json").read_text())["traceEvents"]
    assert "on mine" in said
    assert "the plan itself predicts" not in said


def test_a_stall_is_a_mark_for_perfetto_and_a_line_on_the_terminal(files: Path, capsys: Printed) -> None:
    trace = chain(5)
    plan = replace(make_plan(trace, (Swap(when="sync"), Keep(), Keep(), Keep())), budget_bytes=trace.peak_bytes)
    traceio.save(trace, "chain.json")
    Path("plan.json").write_text(plan_to_json(plan))
    assert legroom("simulate chain.json plan.json --hardware v100-16g --perfetto p.json") == 0
    stalls = simulate(trace, plan, PRESETS["v100-16g"]).stalls
    marks = [event for event in json.loads(Path("p.json").read_text())["traceEvents"] if event["ph"] == "i"]
    assert [(mark["ts"], mark["args"]["seconds"]) for mark in marks] == [(s.tick, s.seconds) for s in stalls]
    said = capsys.readouterr().out
    assert len(stalls) == 2
    assert "at tick 1 for storage 1 to be copied out" in said
    assert "at tick 9 for storage 1 to be back" in said


def test_the_least_peak_at_a_slowdown(files: Path, capsys: Printed) -> None:
    assert legroom("plan trace.json.gz --max-slowdown 1000000% --output out.json") == 2
    assert "slowdown" in capsys.readouterr().err
    assert legroom("plan trace.json.gz --max-slowdown 999999% --output out.json") == 0
    assert plan_from_json(Path("out.json").read_text()).predicted_peak_bytes == FLOOR
    assert "least peak" in capsys.readouterr().err


def test_a_budget_below_the_floor_is_status_one(files: Path, capsys: Printed) -> None:
    assert f"({FLOOR} bytes)" in complaint(capsys, f"plan trace.json.gz --budget {FLOOR - 1}B --output o", status=1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("plan trace.json.gz", "either --budget 12GiB or --max-slowdown 5%"),
        ("plan trace.json.gz --budget 1GiB --max-slowdown 5%", "either --budget"),
        ("plan trace.json.gz --budget 12", "'12' has no unit"),
        ("plan trace.json.gz --budget lots", "cannot read 'lots'"),
        ("plan trace.json.gz --budget 101%", "101%"),
        ("plan trace.json.gz --max-slowdown 5", "cannot read '5' as a slowdown"),
        ("plan trace.json.gz --max-slowdown nan%", "nan%"),
        ("plan trace.json.gz --budget 1GiB --planner best", "unknown planner 'best'; there are auto"),
        ("plan trace.json.gz --budget 1GiB --hardware abacus", "unknown hardware 'abacus'; there are h200"),
        ("plan trace.json.gz --budget 1GiB --hardware ./none.json", "none.json: cannot be read"),
        ("plan trace.json.gz --budget 1GiB --hardware plan.json", "kind 'plan', expected 'hardware'"),
        ("plan trace.json.gz --budget 1GiB --output none/o.json", "there is no folder 'none'"),
        ("plan trace.json.gz --budget 1GiB --output .", "not the name of a file"),
        ("plan trace.json.gz --budget 1GiB --output /dev/null", "it is there and not a file"),
        ("plan trace.json.gz --budget 1GiB --output ./trace.json.gz", "uses 'trace.json.gz' for something else"),
        ("plan none.json --budget 1GiB", "none.json: cannot be read (No such file"),
        ("plan . --budget 1GiB", "cannot be read"),
        ("plan plan.json --budget 1GiB", "kind 'plan', expected 'trace'"),
        ("compare trace.json.gz --budget 1GiB --planners auto,best", "unknown planner 'best'"),
        ("compare trace.json.gz --budget 1GiB --planners ,", "no planner in ','"),
        ("compare trace.json.gz --budget 1GiB --budget x", "cannot read 'x'"),
        ("compare trace.json.gz --budget 1GiB --json a --plot a", "uses 'a' for something else"),
        ("compare none.json --budget 1GiB", "none.json: cannot be read"),
        ("simulate trace.json.gz none.json", "none.json: cannot be read"),
        ("simulate trace.json.gz trace.json.gz", "kind 'trace', expected 'plan'"),
        ("simulate trace.json.gz plan.json --json plan.json", "uses 'plan.json' for something else"),
        ("simulate trace.json.gz plan.json --perfetto none/p.json", "no folder 'none'"),
    ],
)
def test_bad_input_is_one_line_that_names_it(files: Path, capsys: Printed, arguments: str, said: str) -> None:
    assert said in complaint(capsys, arguments)


@pytest.mark.parametrize("arguments", ["compare trace.json.gz", "plan", "compare t --budget 1B --time-limit 0"])
def test_the_parser_complains_about_the_rest(files: Path, capsys: Printed, arguments: str) -> None:
    assert legroom(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(files: Path, capsys: Printed) -> None:
    (files / "locked").mkdir(mode=0o500)
    assert "not writable" in complaint(capsys, "plan trace.json.gz --budget 50% --output locked/o.json")


def test_a_plan_for_another_trace_is_refused(files: Path, capsys: Printed) -> None:
    traceio.save(chain(8), "other.json")
    assert "plan it again" in complaint(capsys, "simulate other.json plan.json --json t.json")


def test_a_plan_that_breaks_its_budget_on_another_machine_is_status_one(files: Path, capsys: Printed) -> None:
    plan = replace(plan_from_json(Path("plan.json").read_text()), budget_bytes=FLOOR)
    Path("plan.json").write_text(plan_to_json(plan))
    assert run(["simulate", "trace.json.gz", "plan.json"]) == 1
    assert "plan again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("version", 99, "version 99"),
        ("version", None, "trace.version"),
        ("head_peak_bytes", -1, "trace.head_peak_bytes"),
        ("device", ["cuda"], "trace.device"),
        ("storages", {}, "trace.storages"),
        ("extra", 1, "unknown field 'extra'"),
    ],
)
def test_a_trace_that_is_wrong_in_one_field_is_refused_with_its_name(
    files: Path, capsys: Printed, field: str, value: Any, said: str
) -> None:
    document = json.loads(traceio.to_json(TRACE))
    document[field] = value
    Path("bad.json").write_text(json.dumps(document))
    assert said in complaint(capsys, "plan bad.json --budget 1GiB --output o.json")


def test_a_bomb_and_a_nest_are_refused(files: Path, capsys: Printed) -> None:
    Path("bomb.gz").write_bytes(gzip.compress(b" " * (200 << 20)))
    assert "larger than" in complaint(capsys, "plan bomb.gz --budget 1GiB")
    Path("nest.json").write_text("[" * 100_000)
    assert "nested too deeply" in complaint(capsys, "plan nest.json --budget 1GiB")


def mutate(document: Any, data: st.DataObject) -> None:
    """Put something else at a random place of a parsed file."""
    strange = st.sampled_from(
        (None, True, -1, 0, 1, 2**31, 2**62, 2**70, 1e308, -0.5, "", "\ud800", "x" * 5000, [], {})
    )
    node = document
    while True:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        key = data.draw(st.sampled_from(keys))
        if isinstance(node[key], (dict, list)) and node[key] and data.draw(st.integers(0, 9)):
            node = node[key]
            continue
        match data.draw(st.sampled_from(("replace", "delete", "twice"))):
            case "replace":
                node[key] = data.draw(strange)
            case "delete":
                del node[key]
            case "twice" if isinstance(node, list):
                node.append(node[key])
        return


FUZZ = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def assert_no_crash(capsys: Printed, command: str, *more: str) -> None:
    status = run([*command.split(), *more, "--planner", "none", "--output", "out.json"])
    err = capsys.readouterr().err
    assert status in (0, 1, 2)
    assert "Traceback" not in err
    assert "bug" not in err, err
    if status:
        assert err.startswith("legroom: ") and err.count("\n") == 1
        assert not Path("out.json").exists()
    else:
        Path("out.json").unlink()


@FUZZ
@given(st.data())
def test_a_trace_file_that_was_tampered_with_never_crashes(files: Path, capsys: Printed, data: st.DataObject) -> None:
    document = json.loads(traceio.to_json(TRACE))
    mutate(document, data)
    Path("bad.json").write_text(json.dumps(document))
    assert_no_crash(capsys, "plan bad.json --budget 1PiB")


@FUZZ
@given(st.data())
def test_a_plan_file_that_was_tampered_with_never_crashes(files: Path, capsys: Printed, data: st.DataObject) -> None:
    document = json.loads(Path("plan.json").read_text())
    mutate(document, data)
    Path("bad.json").write_text(json.dumps(document))
    # A plan may be legal and yet above its budget: then the timeline was written.
    status = legroom("simulate trace.json.gz bad.json --json out.json")
    err = capsys.readouterr().err
    assert status in (0, 1, 2)
    assert "bug" not in err, err
    assert Path("out.json").exists() == (status < 2)
    Path("out.json").unlink(missing_ok=True)


@FUZZ
@given(st.binary(max_size=300), st.sampled_from(("", "gzip", "cut")))
def test_a_file_of_any_bytes_never_crashes(files: Path, capsys: Printed, data: bytes, how: str) -> None:
    whole = Path("trace.json.gz").read_bytes()
    Path("bad").write_bytes({"": data, "gzip": gzip.compress(data), "cut": whole[: -1 - len(data)] + data}[how])
    assert_no_crash(capsys, "plan bad --budget 1PiB")
    assert_no_crash(capsys, "plan trace.json.gz --budget 1PiB --hardware bad")


@FUZZ
@given(st.text(max_size=20))
def test_any_budget_and_slowdown_is_read_or_refused(files: Path, capsys: Printed, text: str) -> None:
    for option in ("--budget", "--max-slowdown"):
        assert_no_crash(capsys, "plan trace.json.gz", f"{option}={text}")


def test_budgets_are_bytes_or_shares_of_the_range() -> None:
    assert budgets_in(TRACE, ["0%", "100%", "7B", "100 %"]) == tuple(sorted({FLOOR, PEAK, 7}, reverse=True))
    assert slowdown_of(" 2.5 % ") == 0.025


def test_the_machine_goes_with_the_trace() -> None:
    assert hardware_of(None, TRACE) is PRESETS["h200"]
    assert hardware_of(None, replace(TRACE, device="cpu")) is PRESETS["cpu"]
    assert hardware_of("rtx4090", TRACE) is PRESETS["rtx4090"]


def test_targets_are_told_apart_through_links(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(LegroomError, match="something else"):
        check_targets([tmp_path / "b"], sources=[tmp_path / "a"])
    check_targets([tmp_path / "c", None, tmp_path / "d"], sources=[tmp_path / "a"])


# --- compare ----------------------------------------------------------------------------------------------------------


def test_compare_prints_a_table_a_plot_and_why_there_is_no_plan(files: Path, capsys: Printed) -> None:
    arguments = "compare trace.json.gz --budget 50% --budget 100% --planners none,auto --json c.json"
    assert legroom(arguments) == 0
    printed = capsys.readouterr()
    rows = json.loads(Path("c.json").read_text())["rows"]
    assert [(row["planner"], row["outcome"]) for row in rows] == [
        ("none", "plan"),
        ("none", "infeasible"),
        ("auto", "plan"),
        ("auto", "plan"),
    ]
    assert printed.out.count("\nauto ") == 2
    assert printed.out.count("within ") == 2
    assert "none: none's rule stops at" in printed.out
    assert "a none  b auto" in printed.out
    assert "4 of 4: auto within" in printed.err


def test_compare_without_any_plan_is_status_one(files: Path, capsys: Printed) -> None:
    assert run(["compare", "trace.json.gz", "--budget", f"{FLOOR - 1}B", "--planners", "none"]) == 1
    said = capsys.readouterr()
    assert "the smallest that works is" in said.err.splitlines()[-1]
    assert "none: none's rule stops at" in said.out


def comparison(*plans: tuple[str, int, float]) -> Comparison:
    rows = tuple(
        Row(name, peak, "plan", 0.1, Judged(1 + overhead, overhead, peak, 0, 0, 0, 0, 0.0, None, None), 0, "")
        for name, peak, overhead in plans
    )
    return Comparison("abc", "h200", 1.0, 2000, 100, 60.0, rows)


def test_the_plot_shows_the_front_in_capitals() -> None:
    lines = scatter.as_text(comparison(("fast", 2000, 0.0), ("fast", 1000, 0.1), ("slow", 1500, 1.0)))
    plot = [line.partition("│")[2] for line in lines if "│" in line]
    assert len(plot) == scatter.LINES
    # From the top: the slow one in the middle, then the frugal one on the left, then the free one on the right.
    found = [(line.strip(), line.index(line.strip())) for line in plot if line.strip()]
    assert [(letter, round(at / (scatter.COLUMNS - 1), 1)) for letter, at in found] == [("b", 0.5), ("A", 0), ("A", 1)]
    assert lines[-1] == "a fast  b slow"
    assert scatter.as_text(comparison()) == []
    assert len(scatter.as_text(comparison(("one", 5, 0.0)))) == scatter.LINES + 4


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is an extra")
def test_the_plot_as_a_picture(tmp_path: Path) -> None:
    for plans in ([("a$b", 2000, 0.0), ("a$b", 1000, 0.1), ("slow", 1500, 9.0)], []):
        scatter.write_png(comparison(*plans), tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]
    with pytest.raises(LegroomError, match="cannot be written"):
        scatter.write_png(comparison(), tmp_path / "none" / "plot.png")


def test_without_matplotlib_a_plot_is_refused_before_the_work(
    files: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what Python has for a module that cannot be imported
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    said = complaint(capsys, "compare trace.json.gz --budget 50% --plot plot.png")
    assert "pip install 'legroom[plot]'" in said


def test_ctrl_c_is_one_line_and_leaves_nothing(files: Path) -> None:
    # A budget in the middle of a search that takes minutes; the planner needs no help to be slow.
    traceio.save(make_trace(3, forward=400), "long.json")
    arguments = "compare long.json --budget 30% --planners none,auto --json out.json --time-limit 999"
    code = (
        "import signal, sys\nfrom legroom import cli, planners\nfrom legroom.planners.auto import Auto\n"
        "if __name__ == '__main__':\n"
        # Whoever runs the tests in the background of a shell has told them, and all they start, not to listen.
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "    planners.PLANNERS['auto'] = Auto(evaluations=10**9)\n"
        f"    sys.exit(cli.run({arguments.split()}))\n"
    )
    Path("slow.py").write_text(code)
    source = str(Path(__file__).parents[1] / "src")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        [sys.executable, "slow.py"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stderr is not None
    assert "1 of 2: none" in process.stderr.readline()  # so auto is next
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert (out, err) == ("", "legroom: interrupted\n")
    assert not Path("out.json").exists()


# --- capture ----------------------------------------------------------------------------------------------------------


def test_a_script_becomes_a_trace(files: Path, capsys: Printed) -> None:
    Path("script.py").write_text(SCRIPT)
    argv, folders = sys.argv, list(sys.path)
    assert legroom("capture script.py 128 --lr 3 --output made.json.gz") == 0
    assert (sys.argv, sys.path) == (argv, folders)
    trace = traceio.load("made.json.gz")
    assert trace.device == "cpu"
    assert any(storage.nbytes >= 256 * 128 * 4 for storage in trace.storages)
    assert {storage.name for storage in trace.storages} >= {"0.weight", "2.weight"}
    assert "made.json.gz: " in capsys.readouterr().err
    assert legroom("plan made.json.gz --budget 50% --output o.json") == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "defines no step()"),
        ("step = 3", "step must be a function, got a int"),
        ("def step(batch): pass", "step() is called without arguments"),
        ("def step(): yield", "must be a plain function"),
        ("def step(): pass", "saved nothing"),
        ("\n\nx = 1 / 0", "the script raised ZeroDivisionError in line 3: division by zero"),
        ("def step():\n    raise KeyError('batch')", "step() raised KeyError in line 2: 'batch'"),
        ("x = (", "the script raised SyntaxError in line 1"),
        ("import sys; sys.exit(3)", "the script ended the process (exit status 3)"),
        ("import no_such_module", "ModuleNotFoundError"),
        ("model = 3\ndef step(): pass", "model must be a torch.nn.Module, got int"),
    ],
)
def test_a_script_that_does_not_do_is_refused(files: Path, capsys: Printed, text: str, said: str) -> None:
    Path("script.py").write_text(text)
    os.makedirs("__pycache__", exist_ok=True)  # where Python may leave what it compiled
    assert said in complaint(capsys, "capture script.py --output made.json")


def test_a_script_that_is_none_is_refused(files: Path, capsys: Printed) -> None:
    assert "no such file" in complaint(capsys, "capture none.py")
    Path("script.txt").write_text(SCRIPT)
    assert "must end in .py" in complaint(capsys, "capture script.txt")
    assert "something else" in complaint(capsys, "capture script.txt --output script.txt")


def test_what_a_solver_writes_does_not_get_into_the_plan(capfd: pytest.CaptureFixture[str]) -> None:
    def noisy(trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        os.write(1, b"a solver says something\n")
        return Auto()(trace, hardware, budget_bytes)

    trace = chain(6)
    made = planning.make_plan(trace, LINK, noisy, budget_bytes=trace.peak_bytes, max_slowdown=None)
    sys.stdout.write(f"{made.planner}\n")
    told = capfd.readouterr()
    assert told.out == "auto\n" and "a solver says something" in told.err
