"""Small budgets and many steps: the verdicts, bad input, and a run of it on the CPU."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import budget, endurance
from bench.rows import Results, Row, read, write
from legroom.errors import LegroomError

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
RUN = {"command": "python bench/endurance.py", "torch": "2.13.0"}
PEERS = Results(
    (RUN,),
    (
        Row("vit", "plain", "ok", allocated_bytes=10 * GIB, reserved_bytes=10 * GIB),
        Row("vit", "checkpoint", "ok", cap_bytes=4 * GIB, allocated_bytes=3 * GIB),
    ),
)
GOOD = Row(
    "vit", "legroom@smallest", "ok", cap_bytes=2 * GIB, steps=1000, allocated_bytes=GIB, reserved_bytes=2 * GIB
)  # fmt: skip


def words(row: Row) -> list[str]:
    return [verdict.word for verdict in endurance.verdicts(Results((RUN,), (row,)), PEERS)]


def test_everything_is_met_where_it_is() -> None:
    assert words(GOOD) == ["met"] * 3


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"cap_bytes": 3 * GIB}, ["missed", "met", "met"]),
        ({"reserved_bytes": 2 * GIB + 1}, ["met", "missed", "met"]),
        ({"steps": 999}, ["met", "met", "not measured"]),
        ({"status": "oom"}, ["not measured", "not measured", "missed"]),
        ({"status": "timeout"}, ["not measured", "not measured", "not measured"]),
        ({"contender": "legroom@25%"}, ["not measured", "met", "met"]),
        ({"workload": "gpt"}, ["not measured", "met", "met"]),
    ],
)
def test_each_claim_can_be_missed(fields: dict[str, Any], expected: list[str]) -> None:
    row = replace(GOOD, **fields)
    assert words(row) == expected
    assert endurance.page(Results((RUN,), (row,)), PEERS).count("\n") > 10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--only", "nobody"), "no workload 'nobody'"),
        (("--budgets", "half"), "expected smallest or a share such as 25%, got 'half'"),
        (("--budgets", "25%,101%"), "got '101%'"),
        (("--steps", "0"), "expected a whole number of at least 1, got '0'"),
        (("--at-once", "x"), "got 'x'"),
        (("--budget", "nowhere.json"), "cannot be read"),
        (("--render", "nowhere.json"), "cannot be read"),
    ],
)
def test_nonsense_is_refused(arguments: tuple[str, str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, LegroomError)) as refused:
        endurance.main(arguments)
    assert said in f"{refused.value}{capsys.readouterr().err}" and refused.value.args != (0,)


def test_an_error_is_one_line() -> None:
    command = [sys.executable, str(ROOT / "bench" / "endurance.py"), "--render", "nowhere.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "cannot be read" in done.stderr and done.stderr.count("\n") == 1


def test_a_workload_that_was_not_measured_is_named(tmp_path: Path) -> None:
    write(tmp_path / "budget.json", PEERS)
    with pytest.raises(endurance.LegroomError, match="no plain peak of 'gpt'"):
        endurance.main(["--only", "gpt", "--budget", str(tmp_path / "budget.json"), "--json", str(tmp_path / "e.json")])
    assert not (tmp_path / "e.json").exists()


def test_a_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known, found = str(tmp_path / "budget.json"), tmp_path / "endurance.json"
    common = ["--device", "cpu", "--commit", "abc"]
    budget.main(["--workloads", "tiny", "--contenders", "plain", "--steps", "3", "--json", known, *common])
    arguments = ["--only", "tiny", "--budgets", "smallest,50%", "--steps", "6", "--at-once", "2", *common]
    assert endurance.main([*arguments, "--budget", known, "--json", str(found)]) == 0
    rows = read(found).of("tiny")
    assert {name: row.status for name, row in rows.items()} == {"legroom@smallest": "ok", "legroom@50%": "ok"}
    assert all(row.steps == 6 and 0 < row.allocated_bytes <= row.cap_bytes for row in rows.values())
    assert rows["legroom@smallest"].cap_bytes < rows["legroom@50%"].cap_bytes
    assert "all steps ran" in found.with_suffix(".md").read_text()
    assert endurance.main([*arguments, "--limit", "0", "--budget", known, "--json", str(tmp_path / "l.json")]) == 0
    assert {row.status for row in read(tmp_path / "l.json").rows} == {"skipped"}
    assert "all steps ran" in capsys.readouterr().out


def test_what_is_known_stays_where_it_is_told_to_end(tmp_path: Path) -> None:
    write(tmp_path / "budget.json", PEERS)
    workload = PEERS.workloads()[0]
    known = Row(workload, "legroom@smallest", "ok", "", steps=1000)
    found = tmp_path / "endurance.json"
    write(found, Results(({"command": "before"},), (known,)))
    stop = threading.Event()
    stop.set()
    files = ["--budget", str(tmp_path / "budget.json"), "--from", str(found), "--json", str(found)]
    endurance.main(
        ["--only", workload, "--budgets", "smallest,50%", "--device", "cpu", "--commit", "abc", *files], stop
    )
    rows = read(found).of(workload)
    assert rows["legroom@smallest"] == known
    assert (rows["legroom@50%"].status, rows["legroom@50%"].detail) == ("skipped", "told to end")


@pytest.mark.parametrize("held_back", [False, True])
def test_it_ends_when_it_is_told_to(tmp_path: Path, held_back: bool) -> None:
    """And what it started ends with it: those that run, and those that wait for their turn. Also where whoever started
    it holds the signal back.
    """
    known, found = str(tmp_path / "budget.json"), tmp_path / "endurance.json"
    common = ["--device", "cpu", "--commit", "abc"]
    budget.main(["--workloads", "tiny", "--contenders", "plain", "--steps", "3", "--json", known, *common])
    arguments = ["--only", "tiny", "--budgets", "50%,60%,70%", "--steps", "100000", "--at-once", "1", *common]
    command = [
        sys.executable,
        str(ROOT / "bench" / "endurance.py"),
        *arguments,
        "--budget",
        known,
        "--json",
        str(found),
    ]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # by which its children are known
    masked = signal.pthread_sigmask(signal.SIG_BLOCK if held_back else signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
    try:
        deadline = time.monotonic() + 60.0
        while not _children_with(str(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert _children_with(str(tmp_path))
        running.terminate()
        assert running.wait(60.0) == 143
        assert not _children_with(str(tmp_path))
    finally:
        running.kill()
        running.wait()
        for left in _children_with(str(tmp_path)):
            os.kill(left, signal.SIGKILL)


def _children_with(word: str) -> list[int]:
    """The processes that measure, of a run whose files are in the folder `word`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().decode(errors="replace")
            if word in line and "--one" in line:
                found.append(int(path.parent.name))
    return found
