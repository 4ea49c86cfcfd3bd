"""Files from strangers: whatever is in them, the answer is a value or an error that names the place, and soon.

What single fields are refused with stands beside each format's own tests. Here documents of all formats are damaged at
random, and what is still readable goes all the way through: tables, lowering, proof, simulation and a planner.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import itertools
import json
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from legroom import hardware, jsonio, schedule, timeline, traceio
from legroom.errors import BudgetError, LegroomError, PlanError, TraceError
from legroom.evaluate import floor_bytes
from legroom.hardware import PRESETS
from legroom.ir import Trace
from legroom.plan import from_json as plan_from_json
from legroom.plan import to_json as plan_to_json
from legroom.planners import PLANNERS, quick
from legroom.simulate import simulate
from tests.pure.strategies import make_plan, make_trace, random_decision
from tests.pure.test_schedule import lower_what_is_possible

LONGEST_MESSAGE = 600
MOST_SECONDS = 3.0  # of the processor, so that others on the machine do not count; these documents take milliseconds
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2**31, 2**53, 2**61, 2**62 - 1, 2**62, 2**63, 2**64, 10**400, -(2**63), 0.5, -0.0,
    1e-320, 1e9, 1e300, "", "x", "\ud800", "\x00", "é" * 5000, [], [[]], [0, 0], [0] * 50, {}, {"do": "keep"},
    [[[[[[[[]]]]]]]],
]  # fmt: skip
FEW = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def _trace() -> Trace:
    return make_trace(11, forward=9)


def _documents() -> dict[str, tuple[str, Callable[[str], Any], type[LegroomError]]]:
    """A valid document of each format, its reader, and the error it may raise."""
    trace = _trace()
    rng = random.Random(5)
    drawn = make_plan(trace, tuple(random_decision(rng) for _ in trace.gaps))
    kept, some = lower_what_is_possible(trace, drawn, PRESETS["h200"])
    return {
        "trace": (traceio.to_json(trace), traceio.from_json, TraceError),
        "plan": (plan_to_json(kept), plan_from_json, PlanError),
        "schedule": (schedule.to_json(some), schedule.from_json, PlanError),
        "hardware": (hardware.to_json(PRESETS["cpu"]), hardware.from_json, PlanError),
        "timeline": (timeline.to_json(simulate(trace, some, PRESETS["h200"])), timeline.from_json, PlanError),
    }


DOCUMENTS = _documents()


@contextlib.contextmanager
def soon() -> Iterator[None]:
    start = time.process_time()
    yield
    assert time.process_time() - start < MOST_SECONDS


def refused_or_read(kind: str, text: str) -> Any:
    """The value, or None where the text is refused as it should be: by a path from the root, in one short line."""
    _, reader, error = DOCUMENTS[kind]
    with soon():
        try:
            return reader(text)
        except error as refusal:
            message = str(refusal)
    assert message.startswith(kind), message
    assert len(message) < LONGEST_MESSAGE and "\n" not in message
    return None


def mutated(raw: Any, rng: random.Random) -> Any:
    """One place of the document changed, anywhere in it."""
    node = raw
    while True:
        key = rng.choice(sorted(node)) if isinstance(node, dict) else rng.randrange(len(node))
        if not isinstance(node[key], (dict, list)) or not node[key] or rng.random() < 0.1:
            break
        node = node[key]
    match rng.randrange(6):
        case 0:
            del node[key]
        case 1 if isinstance(node, list):
            node.insert(rng.randrange(len(node) + 1), copy.deepcopy(node[key]))
        case 2 if isinstance(node, list):
            other = rng.randrange(len(node))
            node[key], node[other] = node[other], node[key]
        case 3 if type(node[key]) is int:
            node[key] += rng.choice((-1, 1))
        case 4 if type(node[key]) is int:
            node[key] = rng.randrange(0, 30)
        case _:
            node[key] = copy.deepcopy(rng.choice(VALUES))  # the next change may be inside it
    return raw


def damaged(kind: str, seed: int) -> str:
    rng = random.Random(seed)
    raw = json.loads(DOCUMENTS[kind][0])
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        raw = mutated(raw, rng)
        if not isinstance(raw, dict) or not raw:
            break
    return json.dumps(raw)


seeds = st.integers(0, 2**32)


@pytest.mark.parametrize("kind", list(DOCUMENTS))
@given(seed=seeds)
@FEW
def test_damaged_documents_are_read_or_refused_by_place(kind: str, seed: int) -> None:
    refused_or_read(kind, damaged(kind, seed))


@pytest.mark.parametrize("kind", list(DOCUMENTS))
def test_no_field_takes_another_type_in_silence(kind: str) -> None:
    """Every top-level field in turn; what is read in spite of it must be what the field says."""
    raw = json.loads(DOCUMENTS[kind][0])
    for name, value in itertools.product(raw, VALUES):
        found = refused_or_read(kind, json.dumps({**raw, name: value}))
        if found is not None and name != "version":
            taken = getattr(found, name)
            assert (taken, value) == ((), []) or taken == (float(value) if isinstance(taken, float) else value)
            assert type(taken) is not bool or type(value) is bool


@pytest.mark.parametrize("kind", list(DOCUMENTS))
@given(seed=seeds)
@FEW
def test_damaged_text_is_refused_by_format(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    text = DOCUMENTS[kind][0]
    at = rng.randrange(len(text))
    piece = rng.choice(
        ("", "0", "-", "9" * 30, "e9", "e999", '"', "[", "]", ",", "{", "NaN", "Infinity", "\x00", "\ud800")
    )
    refused_or_read(kind, text[:at] + piece + text[at + rng.randrange(4) :])
    refused_or_read(kind, text[:at])


@pytest.mark.parametrize("kind", list(DOCUMENTS))
@pytest.mark.parametrize("depth", [100, 5_000, 200_000])
@pytest.mark.parametrize("pair", ["[]", ('{"a":', "}")], ids=["arrays", "objects"])
def test_deep_nesting_is_refused(kind: str, depth: int, pair: tuple[str, str]) -> None:
    deep = pair[0] * depth + "0" + pair[1] * depth
    assert refused_or_read(kind, deep) is None
    text = DOCUMENTS[kind][0].rstrip().removesuffix("}")
    assert refused_or_read(kind, f'{text},"extra":{deep}}}') is None


@given(seed=seeds)
@settings(FEW, max_examples=20)
def test_a_damaged_trace_that_is_read_can_be_planned(seed: int) -> None:
    """Sizes near 2**62, seconds of decades, values without a maker: valid, so nothing after it may break."""
    trace = refused_or_read("trace", damaged("trace", seed))
    if trace is not None:
        with soon():
            floor = floor_bytes(trace)
            for name, budget in (("auto", floor), ("capuchin", floor), ("dtr", trace.peak_bytes // 2)):
                with contextlib.suppress(BudgetError):
                    made = quick(PLANNERS[name])(trace, PRESETS["h200"], budget)
                    lowered = schedule.lower(trace, made, PRESETS["h200"])
                    assert schedule.check_schedule(trace, lowered) <= budget


@given(seed=seeds)
@settings(FEW, max_examples=75)
def test_a_damaged_plan_that_is_read_is_lowered_or_refused(seed: int) -> None:
    made = refused_or_read("plan", damaged("plan", seed))
    if made is not None:
        trace = _trace()
        with soon(), contextlib.suppress(PlanError):
            lowered = schedule.lower(trace, made, PRESETS["h200"])
            assert schedule.check_schedule(trace, lowered) == simulate(trace, lowered, PRESETS["h200"]).peak_bytes


@given(seed=seeds)
@settings(FEW, max_examples=75)
def test_a_damaged_schedule_that_is_read_is_proven_or_refused(seed: int) -> None:
    read = refused_or_read("schedule", damaged("schedule", seed))
    if read is not None:
        trace = _trace()
        with soon(), contextlib.suppress(PlanError):
            peak = schedule.check_schedule(trace, read)
            assert peak == simulate(trace, read, PRESETS["h200"]).peak_bytes


@given(seed=seeds)
@settings(FEW, max_examples=10)
def test_damaged_hardware_that_is_read_can_be_planned_for(seed: int) -> None:
    machine = refused_or_read("hardware", damaged("hardware", seed))
    if machine is not None:
        trace = _trace()
        with soon():
            made = quick(PLANNERS["auto"])(trace, machine, floor_bytes(trace))
            assert simulate(trace, made, machine).seconds >= 0


PACKED = gzip.compress(DOCUMENTS["trace"][0].encode(), mtime=0)


@given(cut=st.integers(0, len(PACKED) - 1))
@example(cut=0)
@example(cut=1)
@example(cut=2)
@example(cut=len(PACKED) - 1)
@settings(FEW, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_cut_archive_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "cut.json.gz"
    path.write_bytes(PACKED[:cut])
    with pytest.raises(TraceError):
        traceio.load(path)


@given(at=st.integers(0, len(PACKED) - 1), bit=st.integers(0, 7))
@settings(FEW, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path: Path, at: int, bit: int) -> None:
    path = tmp_path / "flipped.json.gz"
    path.write_bytes(PACKED[:at] + bytes([PACKED[at] ^ (1 << bit)]) + PACKED[at + 1 :])
    with soon():
        try:
            found = traceio.load(path)
        except TraceError:
            return
    assert found == _trace()  # flags and times in the head of the archive


@pytest.mark.parametrize("tail", [b"\x00", PACKED, b"\x1f\x8b"], ids=["zero", "a second member", "half a head"])
def test_an_archive_with_more_behind_it_is_refused(tmp_path: Path, tail: bytes) -> None:
    (tmp_path / "more.gz").write_bytes(PACKED + tail)
    with pytest.raises(TraceError, match="more follows"):
        traceio.load(tmp_path / "more.gz")


def test_a_bomb_is_unpacked_no_further_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 2**20
    monkeypatch.setattr(jsonio, "LARGEST_TEXT_BYTES", limit)
    bomb = tmp_path / "bomb.json.gz"
    bomb.write_bytes(gzip.compress(b'{"kind":"trace","texts":[' + b" " * (16 * limit), mtime=0))
    assert bomb.stat().st_size < limit / 10
    tracemalloc.start()
    try:
        with soon(), pytest.raises(TraceError, match="larger than"):
            traceio.load(bomb)
        assert tracemalloc.get_traced_memory()[1] < 4 * limit
    finally:
        tracemalloc.stop()
    bomb.write_bytes(gzip.compress(bomb.read_bytes()))  # an archive in an archive is binary, not text
    with pytest.raises(TraceError, match="UTF-8"):
        traceio.load(bomb)


@pytest.mark.parametrize("kind", list(DOCUMENTS))
def test_huge_counts_cost_little(kind: str) -> None:
    """Tens of thousands of entries where a few are meant."""
    raw = json.loads(DOCUMENTS[kind][0])
    for name, value in raw.items():
        if isinstance(value, list):
            refused_or_read(kind, json.dumps({**raw, name: [0] * 60_000}))
        if isinstance(value, dict):
            columns = {column: [0] * 6000 for column in value}
            assert refused_or_read(kind, json.dumps({**raw, name: columns})) is None or kind == "timeline"
