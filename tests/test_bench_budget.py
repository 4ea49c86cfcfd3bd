"""The budget benchmark: its processes, its files, its verdicts, and a run of it on the CPU."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import budget
from bench.children import run_child
from bench.measure import Job, measure, needed_bytes
from bench.meters import MIB, CpuMeter
from bench.peers import PEERS
from bench.render import draw, page, table
from bench.rows import Results, Row, RowsError, from_json, read, to_json, write
from bench.verdicts import verdicts
from bench.workloads import WORKLOADS

GIB = 2**30
RUN = {"command": "python bench/budget.py", "date": "2026-11-15T00:00:00+00:00", "torch": "2.13.0"}


def row(contender: str, mean_ms: float, **fields: Any) -> Row:
    known: dict[str, Any] = {"median_ms": mean_ms, "steps": 20, "allocated_bytes": 20 * GIB, "reserved_bytes": 20 * GIB}
    return Row("gpt", contender, "ok", **{"mean_ms": mean_ms, **known, **fields})


def ours(what: str, mean_ms: float, **fields: Any) -> Row:
    predicted = {"planned_steps": 6, "predicted_peak_bytes": 20 * GIB, "predicted_step_seconds": mean_ms / 1e3}
    return row(f"legroom@{what}", mean_ms, **{"cap_bytes": 21 * GIB, "report": predicted, **fields})


GOOD = (
    row("plain", 100.0, allocated_bytes=38 * GIB),
    row("checkpoint", 130.0, cap_bytes=21 * GIB),
    ours("above", 101.9),
    ours("checkpoint", 114.9),
    ours("50%", 104.9),
    ours("25%", 111.9),
    ours("smallest", 150.0, allocated_bytes=14 * GIB, reserved_bytes=14 * GIB, cap_bytes=15 * GIB,
         report={"planned_steps": 6, "predicted_peak_bytes": 14 * GIB, "predicted_step_seconds": 0.15}),
)  # fmt: skip


def changed(contender: str, **fields: Any) -> Results:
    rows = tuple(replace(r, **fields) if r.contender == contender else r for r in GOOD)
    return Results((RUN,), rows)


def test_everything_is_met_where_it_is() -> None:
    found = verdicts(Results((RUN,), GOOD))
    assert len(found) == 9 and all(v.met for v in found), "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("contender", "fields", "claim"),
    [
        ("legroom@above", {"mean_ms": 102.1}, "above the plain peak"),
        ("legroom@checkpoint", {"mean_ms": 115.1}, "'checkpoint'"),
        ("legroom@50%", {"mean_ms": 105.1}, "50%"),
        ("legroom@25%", {"mean_ms": 112.1}, "25%"),
        ("legroom@25%", {"status": "error"}, "25%"),
        ("legroom@smallest", {"cap_bytes": 20 * GIB}, "smallest"),
        ("legroom@50%", {"reserved_bytes": 21 * GIB + 1}, "never above"),
        ("legroom@50%", {"status": "oom"}, "never above"),
        ("legroom@50%", {"reserved_bytes": int(21.1 * GIB)}, "reserved"),
        ("legroom@50%", {"allocated_bytes": int(19.7 * GIB)}, "predicted peak"),
        ("legroom@50%", {"report": {"planned_steps": 6, "predicted_peak_bytes": 20 * GIB}}, "predicted step time"),
    ],
)
def test_each_claim_can_be_missed(contender: str, fields: dict[str, Any], claim: str) -> None:
    missed = [v for v in verdicts(changed(contender, **fields)) if not v.met]
    assert any(claim in v.claim and v.met is False for v in missed), "\n".join(map(str, missed))


@pytest.mark.parametrize(
    ("seconds", "told"),
    [((0.1066, 0.1), "no plan is modelled below +6.6%"), ((0.09, 0.1), ""), ((None, 0.1), ""), ((0.1, 0.0), "")],
)
def test_what_is_missed_says_what_no_plan_can_do(seconds: tuple[float | None, float], told: str) -> None:
    report = dict(zip(("lower_bound_seconds", "baseline_seconds"), seconds, strict=True))
    for contender, mean_ms, claim in (("legroom@50%", 108.5, "50%"), ("legroom@checkpoint", 120.0, "'checkpoint'")):
        found = {v.claim: v for v in verdicts(changed(contender, mean_ms=mean_ms, report=report))}
        (verdict,) = (v for name, v in found.items() if claim in name)
        assert verdict.met is False and verdict.figures.endswith(told or "GiB"), verdict


def test_what_did_not_run_is_neither_met_nor_missed() -> None:
    found = verdicts(changed("legroom@above", status="skipped"))
    assert [v.met for v in found if "above the plain" in v.claim] == [None]
    assert [v.met for v in verdicts(changed("plain", status="oom"))] == [None]


def test_a_cap_is_a_little_over_the_peak_or_what_was_reserved() -> None:
    assert needed_bytes(100 * MIB, 0) == 103 * MIB
    assert needed_bytes(100 * MIB, 200 * MIB) == 103 * MIB
    assert needed_bytes(100 * MIB, 102 * MIB) == 102 * MIB
    assert needed_bytes(100 * MIB + 1, 0) == 104 * MIB


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    results = Results((RUN,), GOOD)
    write(tmp_path / "new" / "results.json", results)
    assert read(tmp_path / "new" / "results.json") == results


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "fine"}, "one of ok"),
        ({"cap_bytes": -1}, "cap_bytes"),
        ({"mean_ms": "fast"}, "mean_ms"),
        ({"host_ms": "slow"}, "host_ms"),
        ({"report": []}, "report"),
        ({"run": 1}, "run 1"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_damaged_file_is_refused(change: dict[str, Any], message: str) -> None:
    document = json.loads(to_json(Results((RUN,), GOOD[:1])))
    document["rows"][0] |= change
    with pytest.raises(RowsError, match=message):
        from_json(json.dumps(document))


def test_how_fast_the_host_was_is_kept_and_older_files_do_not_know() -> None:
    results = Results((RUN,), (replace(GOOD[0], host_ms=12.5),))
    assert from_json(to_json(results)) == results
    document = json.loads(to_json(results))
    del document["rows"][0]["host_ms"]
    assert from_json(json.dumps(document)).rows[0].host_ms == 0.0


def test_a_later_file_takes_along_what_it_lacks() -> None:
    """A row that did not come about replaces none that did; runs are numbered on."""
    failed = Row("gpt", "plain", "timeout", "too long")
    new = Row("bert", "plain", "ok", mean_ms=10.0)
    joined = Results((RUN, RUN), (failed, replace(new, run=1))).after(Results((RUN,), GOOD))
    assert joined.runs == (RUN,) * 3
    assert joined.of("gpt") == Results((RUN,), GOOD).of("gpt")
    assert joined.of("bert")["plain"] == replace(new, run=2)


def test_a_new_row_replaces_the_old_one_and_tells_its_run() -> None:
    results = Results((RUN, RUN), GOOD).with_rows([replace(GOOD[1], mean_ms=140.0, median_ms=140.0, run=1)])
    assert [r.contender for r in results.rows] == [r.contender for r in GOOD]
    text = table(results)
    assert "140.0" in text and "130.0" not in text and "run 1" in text and "run 0" in text
    written = page(results, "budget.png")
    assert "](budget.png)" in written and "| checkpoint every block | 140.0 |" in written
    assert "**missed**" not in written and "| met |" in written


# processes

FIRST = json.dumps(asdict(GOOD[0]))
SCRIPT = "import os, sys, time; f = open(sys.argv[1], 'w'); f.write({text!r}); f.flush(); {then}"


def child(tmp_path: Path, then: str, *, text: str = FIRST + "\n", timeout_seconds: float = 30.0) -> Any:
    command = [sys.executable, "-c", SCRIPT.format(text=text, then=then)]
    return run_child(command, tmp_path, timeout_seconds=timeout_seconds)


def test_a_killed_child_leaves_its_finished_rows(tmp_path: Path) -> None:
    ended = child(tmp_path, "os.kill(os.getpid(), 9)", text=FIRST + "\n" + FIRST[:40])
    assert (ended.status, ended.rows) == ("killed", GOOD[:1])
    assert "SIGKILL" in ended.detail


def test_a_child_that_hangs_is_ended(tmp_path: Path) -> None:
    start = time.monotonic()
    ended = child(tmp_path, "time.sleep(60)", timeout_seconds=1.0)
    assert (ended.status, ended.rows) == ("timeout", GOOD[:1])
    assert time.monotonic() - start < 20


def test_a_child_may_take_long_if_rows_keep_coming(tmp_path: Path) -> None:
    then = f"[(time.sleep(0.7), f.write({FIRST + chr(10)!r}), f.flush()) for _ in range(3)]"
    ended = child(tmp_path, then, timeout_seconds=1.8)
    assert (ended.status, len(ended.rows)) == ("ok", 4)


def test_a_child_that_raises_says_why(tmp_path: Path) -> None:
    ended = child(tmp_path, "raise ValueError('out of luck')")
    assert (ended.status, ended.rows) == ("error", GOOD[:1])
    assert "out of luck" in ended.detail and "exit status 1" in ended.detail


def test_a_child_ends_with_the_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    ended = run_child(command, tmp_path, timeout_seconds=60.0, until=time.monotonic() + 0.3)
    assert ended.status == "timeout" and "whole run" in ended.detail


# contenders, on the CPU


def gradients(peer: str) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    torch.manual_seed(0)
    workload = WORKLOADS["tiny"](device="cpu")
    workload.optimizer.step = lambda: None  # type: ignore
    workload.optimizer.zero_grad = lambda: None  # type: ignore
    step = PEERS[peer].make(workload)
    loss = step(0)
    found = [p.grad.clone() for p in workload.model.parameters() if p.grad is not None]
    return loss, found, CpuMeter().peaks(step)[0] - CpuMeter().alive_bytes()


def test_checkpointing_peers_train_the_same_in_less_memory() -> None:
    loss, plain, plain_bytes = gradients("plain")
    peaks = {}
    for name in (name for name, peer in PEERS.items() if peer.checkpointing):
        other, found, peaks[name] = gradients(name)
        assert torch.equal(loss, other)
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert peaks["checkpoint"] < peaks["every-other"] < plain_bytes
    assert peaks["checkpoint"] < peaks["selective"] < plain_bytes


def test_a_job_gives_a_row_for_each_contender() -> None:
    rows: list[Row] = []
    job = Job("tiny", "cpu", ("plain",), steps=2, warmup=1, seconds=5.0, uncapped_only=True)
    measure(job, rows.append)
    measure(replace(job, contenders=("checkpoint",), uncapped_only=False), rows.append)
    measure(replace(job, contenders=("stream-offload",)), rows.append)
    plain, peer, elsewhere = rows
    assert plain.ok and plain.cap_bytes == 0 and plain.steps == 2 and plain.mean_ms > 0
    assert peer.ok and peer.cap_bytes == needed_bytes(peer.uncapped_allocated_bytes, 0) < plain.allocated_bytes
    assert elsewhere.status == "unavailable" and "CUDA" in elsewhere.detail

    rows.clear()
    names = ("legroom@50%", "legroom@checkpoint", "legroom@selective")
    job = replace(job, contenders=names, plain_bytes=plain.allocated_bytes, caps={"checkpoint": MIB})
    measure(job, rows.append)
    half, at_peer, unknown = rows
    assert half.ok and half.reported("planned_steps") >= 6 and half.setup_seconds > 0
    assert half.reported("floor_bytes") < half.allocated_bytes <= half.cap_bytes < plain.allocated_bytes
    assert at_peer.status == "budget" and "the budget is 1.0 MiB" in at_peer.detail
    assert unknown.status == "unavailable" and "--from" in unknown.detail


def test_a_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    common = ["--device", "cpu", "--workloads", "tiny", "--steps", "2", "--warmup", "1", "--commit", "abc"]
    assert budget.main([*common, "--json", str(first), "--contenders", "legroom@1MiB"]) == 0
    rows = read(first).of("tiny")
    assert {name: r.status for name, r in rows.items()} == {
        "plain": "ok",
        "legroom@1MiB": "budget",
    }
    assert rows["plain"].cap_bytes == 0 and rows["plain"].allocated_bytes > MIB
    assert "not measured" in capsys.readouterr().out

    # A child that does not get as far as its first step; plain is taken from the file.
    arguments = ["--from", str(first), "--json", str(second), "--timeout", "0.2", "--contenders", "checkpoint"]
    assert budget.main([*common, *arguments]) == 1
    results = read(second)
    assert [run["commit"] for run in results.runs] == ["abc", "abc"]
    assert {name: (r.status, r.run) for name, r in results.of("tiny").items()} == {
        "plain": ("ok", 0),
        "legroom@1MiB": ("budget", 0),
        "checkpoint": ("timeout", 1),
    }
    assert "Run 1" in second.with_suffix(".md").read_text()


def test_nothing_starts_after_the_limit_or_without_plain(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert budget.main(["--device", "cpu", "--workloads", "tiny", "--json", str(path), "--limit", "-1"]) == 0
    rows = read(path).of("tiny")
    assert len(rows) > 8 and {r.status for r in rows.values()} == {"skipped"}


@pytest.mark.parametrize("wrong", ["nothing", "legroom@", "legroom@plain", "legroom@120%", "legroom@12", "plain,"])
def test_unknown_contenders_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        budget.main(["--contenders", wrong])
    assert wrong.split(",")[-1] in capsys.readouterr().err


@pytest.mark.parametrize("milliseconds", [6.53, 43.84393972260028])
def test_a_panel_with_one_time_alone_is_drawn(tmp_path: Path, milliseconds: float) -> None:
    """On a logarithmic axis matplotlib chose no height for these, and divided by it."""
    plain = Row("tiny", "plain", "ok", mean_ms=milliseconds, allocated_bytes=2**22)
    assert draw(Results(({"command": "x"},), (plain,)), tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 1000
