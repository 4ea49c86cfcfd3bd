from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from legroom import demo
from legroom.cli import run
from legroom.demo import Result, Setup, budget_bytes, check_losses, parse_budgets
from legroom.errors import LegroomError, StepError
from legroom.units import UnitError

PLAIN = Result("plain", 0, 1000, 1100, 1.0, ("0x1p+0", "0x1p-1"), floor_bytes=200)
OURS = Result("legroom in 600 B", 600, 590, 700, 1.2, ("0x1p+0", "0x1p-1"))


def test_budgets_are_shares_of_the_range_or_bytes() -> None:
    wanted = parse_budgets(("50%", "0 %", "100%", "300B"))
    assert [budget_bytes(budget, PLAIN) for budget in wanted] == [600, 200, 1000, 300]
    for bad in ("101%", "-5%", "50", "half", "%", "nan%"):
        with pytest.raises(UnitError):
            parse_budgets((bad,))


def test_a_loss_that_differs_in_one_bit_is_an_error() -> None:
    check_losses([PLAIN, OURS])
    off = Result("legroom in 600 B", 600, 590, 700, 1.2, ("0x1p+0", "0x1.0000000000001p-1"))
    with pytest.raises(StepError, match="step 2"):
        check_losses([PLAIN, off])
    short = Result("legroom in 600 B", 600, 590, 700, 1.2, ("0x1p+0",))
    with pytest.raises(StepError, match="made 1 steps"):
        check_losses([PLAIN, short])


def test_demo_prints_a_table_and_writes_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "_run_worker", lambda setup, budget, *_: OURS if budget else PLAIN)
    assert run(["demo", "--budgets", "50%", "--json", str(tmp_path / "demo.json")]) == 0
    printed = capsys.readouterr()
    assert "590 B" in printed.out
    assert "identical" in printed.out
    assert "2 of 2: legroom in 600 B" in printed.err
    document = json.loads((tmp_path / "demo.json").read_text())
    assert [result["peak_bytes"] for result in document["results"]] == [1000, 590]


def test_the_last_room_of_the_demo_writes_its_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[int, str | None]] = []

    def worker(setup: Setup, budget: int, spill_dir: str | None, html_path: str | None) -> Result:
        asked.append((budget, html_path))
        return OURS if budget else PLAIN

    monkeypatch.setattr(demo, "_run_worker", worker)
    path = str(tmp_path / "report.html")
    assert run(["demo", "--budgets", "75%,50%", "--html", path]) == 0
    assert asked == [(0, None), (800, None), (600, path)]


def test_a_worker_writes_the_page_of_its_room(tmp_path: Path) -> None:
    tiny = Setup(layers=1, width=32, heads=2, context=16, batch=2, vocabulary=64, steps=4)
    answer = demo._work(tiny, 2**30, str(tmp_path), str(tmp_path / "report.html"))
    page = (tmp_path / "report.html").read_text()
    assert "1.0 GiB" in page
    assert f"{answer['peak_bytes']} B" in page


@pytest.mark.parametrize(
    "arguments", ["--json missing/demo.json", "--html missing/report.html", "--budgets , --html a"]
)
def test_a_file_that_cannot_be_written_is_refused_before_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: str
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("trained")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "_run_worker", fail)
    assert run(["demo", *arguments.split()]) == 2
    assert re.search(r"no folder 'missing'|names none", capsys.readouterr().err)


def test_a_run_over_its_budget_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    over = Result("legroom in 600 B", 600, 601, 700, 1.2, PLAIN.losses)
    monkeypatch.setattr(demo, "_run_worker", lambda setup, budget, *_: over if budget else PLAIN)
    assert run(["demo", "--budgets", "50%"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "legroom: over the budget: legroom in 600 B"


@pytest.mark.parametrize("error", [LegroomError("no\nroom"), OSError("no room"), KeyError("no room")])
def test_errors_are_one_line_and_status_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(demo, "run", fail)
    assert run(["demo"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("legroom: ")
    assert "no room" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("arguments", ["demo --budgets 12", "demo --steps x", "demo --unknown", "nope", ""])
def test_wrong_arguments_end_with_status_two(capsys: pytest.CaptureFixture[str], arguments: str) -> None:
    assert run(arguments.split()) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_worker_that_dies_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.sys, "executable", "/bin/false")
    with pytest.raises(StepError, match="status 1"):
        demo.run(Setup(), (), progress=lambda what: None)


def test_doctor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["doctor", "--json", "--spill-dir", str(tmp_path)]) == 0
    found = {row["what"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert found >= {"Python", "torch", "CPU cores", "main memory", "spill folder", "spill speed"}
    assert run(["doctor", "--spill-dir", str(tmp_path / "[missing]")]) == 1
    assert "[missing]" in "".join(capsys.readouterr().out.split())
