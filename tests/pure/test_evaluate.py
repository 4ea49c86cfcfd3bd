"""The compiled evaluator must be the simulator and the proof, to the nanosecond and the byte."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom import kernels
from legroom.errors import PlanError
from legroom.evaluate import IMPOSSIBLE, KEEP, OVERLAP, RECOMPUTE, SHARED, SYNC, Evaluator, floor_bytes
from legroom.hardware import PRESETS, Hardware, HostCosts
from legroom.ir import Tick
from legroom.kernels import compiling
from legroom.plan import Keep, Recompute, Swap
from legroom.planners import PLANNERS
from legroom.schedule import check_schedule, codes_of, lower
from legroom.simulate import simulate
from tests.pure.strategies import hardwares, host_costs, make_plan, make_trace, plans_for, traces
from tests.pure.test_schedule import LINK, chain, lower_what_is_possible

DECISIONS = {
    KEEP: Keep(),
    OVERLAP: Swap(),
    SYNC: Swap(when="sync"),
    RECOMPUTE: Recompute(),
    SHARED: Recompute(share=True),
}


@given(st.data())
@settings(max_examples=60)
def test_the_evaluator_is_the_simulator(data: st.DataObject) -> None:
    _assert_the_same(data, data.draw(hardwares()))


@given(st.data(), st.booleans())
@settings(max_examples=60)
def test_the_evaluator_is_the_simulator_of_a_host_that_has_much_to_do(data: st.DataObject, waits: bool) -> None:
    hardware = data.draw(hardwares())
    host = data.draw(host_costs().filter(lambda costs: costs != HostCosts()))
    _assert_the_same(data, dataclasses.replace(hardware, host=host, synchronous=waits))


def _assert_the_same(data: st.DataObject, hardware: Hardware) -> None:
    trace = data.draw(traces())
    plan, schedule = lower_what_is_possible(trace, data.draw(plans_for(trace)), hardware)
    codes, ahead = codes_of(plan.decisions)
    timeline, peak = simulate(trace, schedule, hardware), check_schedule(trace, schedule)
    evaluator = Evaluator(trace, hardware)
    assert evaluator.judge_ahead(codes, ahead, peak) == (round(timeline.seconds * 1e9), peak, 0)
    assert evaluator.curve().tolist() == [memory.peak_bytes for memory in timeline.memory]
    codes = np.minimum(codes, SHARED)  # all its other vectors have no "ahead"
    plan = make_plan(trace, tuple(DECISIONS[code] for code in codes.tolist()))
    plan, schedule = lower_what_is_possible(trace, plan, hardware)
    codes = codes_of(plan.decisions)[0]
    timeline = simulate(trace, schedule, hardware)
    expected = round(timeline.seconds * 1e9), check_schedule(trace, schedule)
    assert evaluator.evaluate(codes) == expected
    assert evaluator.curve().tolist() == [memory.peak_bytes for memory in timeline.memory]
    program = evaluator.lowered(codes)
    evaluator.evaluate(np.full(evaluator.gaps, SYNC, np.int8))  # scratch memory must not leak into a program
    assert evaluator.run(program) == evaluator.run(program) == expected


def test_hooks_are_paid_for_by_the_first_change_only() -> None:
    trace = chain(4)
    hardware = dataclasses.replace(LINK, host=HostCosts(tick=3e-6))
    for waits, expected in ((False, 28_000), (True, 36_000)):  # nine ticks and nine ops of 1 µs
        evaluator = Evaluator(trace, dataclasses.replace(hardware, synchronous=waits))
        kept, swapped = np.zeros(3, np.int8), np.array([OVERLAP, KEEP, KEEP], np.int8)
        assert evaluator.judge(kept, 0)[0] == 9_000
        assert evaluator.judge(swapped, 0)[0] == evaluator.judge_as_start(kept, 0)[0] == expected
        assert evaluator.judge_as_start(swapped, 0) == evaluator.judge(swapped, 0)
        assert evaluator.judge_as_start(kept, 0)[1:] == evaluator.judge(kept, 0)[1:]


def test_a_swap_that_comes_to_nothing_has_no_hooks() -> None:
    """Its copy out would not be done before its storage must be back."""
    hardware = dataclasses.replace(
        LINK, out_bytes_per_second=1e3, duplex_out_bytes_per_second=1e3, host=HostCosts(tick=3e-6)
    )
    codes = np.array([OVERLAP, KEEP, KEEP], np.int8)
    evaluator = Evaluator(chain(4), hardware)
    assert lower(chain(4), make_plan(chain(4), (Swap(), Keep(), Keep())), hardware).instructions == ()
    assert evaluator.evaluate(codes)[0] == 9_000
    assert evaluator.run(evaluator.lowered(codes))[0] == 9_000


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_the_evaluator_says_impossible_where_lower_refuses(data: st.DataObject) -> None:
    trace = data.draw(traces())
    hardware = PRESETS["h200"]
    codes = np.array(
        data.draw(st.lists(st.integers(0, 4), min_size=len(trace.gaps), max_size=len(trace.gaps))), np.int8
    )
    evaluator = Evaluator(trace, hardware)
    try:
        lower(trace, make_plan(trace, tuple(DECISIONS[code] for code in codes.tolist())), hardware)
    except PlanError:
        assert evaluator.judge(codes, 0) == IMPOSSIBLE
    else:
        assert evaluator.judge(codes, 0) != IMPOSSIBLE


def test_the_excess_is_what_stands_above_the_budget() -> None:
    trace = chain(4)  # levels of 1 KB to 4 KB and back
    evaluator = Evaluator(trace, PRESETS["h200"])
    levels = [tick.peak_bytes for tick in trace.ticks]
    for budget in (0, 1500, 4000, 5000):
        _, peak, excess = evaluator.judge(np.zeros(3, np.int8), budget)
        assert (peak, excess) == (max(levels), sum(max(0, level - budget) for level in levels))


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_no_plan_is_below_the_floor(data: st.DataObject) -> None:
    trace = data.draw(traces())
    hardware = data.draw(hardwares())
    _, schedule = lower_what_is_possible(trace, data.draw(plans_for(trace)), hardware)
    assert check_schedule(trace, schedule) >= floor_bytes(trace)
    every = make_plan(trace, (Swap(when="sync"),) * len(trace.gaps))
    assert check_schedule(trace, lower(trace, every, hardware)) == floor_bytes(trace)


@given(st.data())
@settings(max_examples=20)
def test_what_an_evaluator_remembers_changes_nothing(data: st.DataObject) -> None:
    trace = data.draw(traces(most_ops=30))
    hardware = data.draw(hardwares())
    evaluator = Evaluator(trace, hardware)
    codes = np.zeros(evaluator.gaps, np.int8)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    for _ in range(30):  # as planners do: one gap changes, the others stay
        if evaluator.gaps:
            gap = rng.integers(evaluator.gaps)
            likely = (RECOMPUTE, RECOMPUTE, SHARED, SHARED, SHARED)
            before, codes[gap] = codes[gap], rng.choice((KEEP, OVERLAP, SYNC, *likely))
            if rng.random() < 0.2:  # something else in between, from the same scratch memory
                other = rng.choice((KEEP, OVERLAP, RECOMPUTE, SHARED), evaluator.gaps).astype(np.int8)
                evaluator.run(evaluator.lowered(other))
            if evaluator.judge(codes, 5000) == IMPOSSIBLE:
                codes[gap] = before
        fresh = Evaluator(trace, hardware)
        assert evaluator.judge(codes, 5000) == fresh.judge(codes, 5000)
        assert evaluator.curve().tolist() == fresh.curve().tolist()


def test_compiled_code_counts_no_references() -> None:
    """Where numba drops or renames the option, results stay right, and lowering takes twice as long."""
    assert "_nrt" in compiling._OPTIONS


def test_compiled_code_depends_on_no_constant_of_another_file() -> None:
    """The cache of a compiled function sees the files of one folder change, and the tables."""
    folder = Path(kernels.__file__).parent
    modules = [importlib.import_module(f"legroom.kernels.{path.stem}") for path in sorted(folder.glob("[a-z]*.py"))]
    functions = {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, numba.core.dispatcher.Dispatcher)
    }
    assert {"lower_and_run", "run_walk", "reach"} <= set(functions)
    assigned = set()
    for path in (*folder.glob("*.py"), folder.parent / "tables.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        assigned |= {node.id for node in names}
    for function in functions.values():
        used = set(function.py_func.__code__.co_names) - {"np", "int64", "uint64", "math", "isnan", "exp", "shape"}
        assert used - set(dir(builtins)) <= assigned | set(functions)
        assert Path(function.py_func.__code__.co_filename).parent == folder


@pytest.mark.parametrize("ticks", [0, 2])
def test_a_trace_without_gaps_is_evaluated(ticks: int) -> None:
    trace = dataclasses.replace(chain(2), storages=(), ops=(), ticks=(Tick("pack", 0, 0, 70, 80),) * ticks)
    trace = dataclasses.replace(trace, head_peak_bytes=75)
    peak = 80 if ticks else 75
    schedule = lower(trace, make_plan(trace, ()), PRESETS["h200"])
    assert Evaluator(trace, PRESETS["h200"]).evaluate(np.zeros(0, np.int8)) == (0, peak)
    assert check_schedule(trace, schedule) == floor_bytes(trace) == peak
    assert simulate(trace, schedule, PRESETS["h200"]).peak_bytes == peak
    assert PLANNERS["auto"](trace, PRESETS["h200"], peak).decisions == ()


def test_codes_are_left_as_they_were() -> None:
    trace = make_trace(3, forward=10)
    evaluator = Evaluator(trace, PRESETS["cpu"])
    codes = np.full(evaluator.gaps, OVERLAP, np.int8)
    before = codes.copy()
    assert evaluator.evaluate(codes) == evaluator.evaluate(codes)
    assert (codes == before).all()


def test_a_place_without_a_cache_still_compiles(tmp_path: Path) -> None:
    target = tmp_path / "legroom"
    _copy_kernels(target)
    (target / "kernels" / "__pycache__").write_text("a file where the folder should be stops even root")
    code = "from legroom.kernels.lanes import advance; assert advance(1, 2, 3, 4, 5) == (6, 7)"
    nowhere = {"HOME": "/proc/none", "XDG_CACHE_HOME": "/proc/none", "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"], **nowhere}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)


def test_what_is_compiled_is_compiled_again_when_a_file_beside_it_changes(tmp_path: Path) -> None:
    """numba looks at the file of the function alone; it would go on with what was frozen into it."""
    target = tmp_path / "legroom"
    _copy_kernels(target)
    (target / "kernels" / "one.py").write_text("NUMBER = 1\n")
    (target / "kernels" / "two.py").write_text(
        "from legroom.kernels.compiling import compiled, inner\nfrom legroom.kernels.one import NUMBER\n\n"
        "@inner\ndef _number() -> int:\n    return NUMBER\n\n@compiled\ndef number() -> int:\n    return _number()\n"
    )
    code = "from legroom.kernels.two import number; print(number(), sum(number.stats.cache_hits.values()))"
    environment = {"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}

    def told() -> str:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, check=True, env=environment, timeout=120, capture_output=True, text=True).stdout

    assert [told(), told()] == ["1 0\n", "1 1\n"]
    (target / "kernels" / "one.py").write_text("NUMBER = 2\n")
    assert [told(), told()] == ["2 0\n", "2 1\n"]


def _copy_kernels(target: Path) -> None:
    """All that the kernels need, as a package of its own."""
    source = Path(kernels.__file__).parent
    shutil.copytree(source, target / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tables", "packing", "hardware", "ir", "errors", "jsonio", "units"):
        (target / f"{name}.py").write_bytes((source.parent / f"{name}.py").read_bytes())
    (target / "__init__.py").write_text("")
