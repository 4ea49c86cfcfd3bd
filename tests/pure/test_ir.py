from __future__ import annotations

import dataclasses
import gzip
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom import jsonio
from legroom.errors import TraceError
from legroom.ir import Op, Storage, Tick, Trace, validate
from legroom.traceio import VERSION, from_json, load, save, to_json

WRONG_VALUES: list[Any] = [None, True, -1, 2**63, 0.5, 1e300, "x", [], [[]], {}, 10**400, [0, 0]]


def chain(length: int) -> Trace:
    """A forward chain x -> a0 -> a1 ..., each saved, then a backward that reads them in reverse order."""
    storages = [Storage(0, 64, "input", True, False, (), 0, "x")]
    ops: list[Op] = []
    ticks: list[Tick] = []
    for i in range(length):
        gap = (i, 2 * length - 1 - i) if i < length - 1 else None
        gaps = (gap,) if gap else ()
        storages.append(Storage(i + 1, 1024 + i, "activation", False, False, gaps, 0, f"layers.{i % 7}"))
        read, write = ((i, 0),), ((i + 1, 0),)
        where = (f"layers.{i % 7}", "model.py:12")
        ops.append(Op(i, "aten.mm.default", "forward", 1e-5, 1e-6, read, write, 16, "", *where))
        ticks.append(Tick("pack", i + 1, i + 1, 1024 * i, 1024 * (i + 2)))
    for i in reversed(range(length)):
        index = len(ops)
        ops.append(Op(index, "aten.neg", "backward", 2e-5, 1e-6, ((i + 1, 0),), (), 0, "unproven", "", ""))
        ticks.append(Tick("unpack", i + 1, index, 1024 * i, 1024 * (i + 2)))
    return Trace(tuple(storages), tuple(ops), tuple(ticks), 64, "cpu")


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    rng = random.Random(draw(st.integers(0, 2**32)))
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
    names = draw(st.lists(text, min_size=1, max_size=4))
    versions = [0] * draw(st.integers(1, 4))  # the newest version of each storage; these stand at the start
    leaves, ops = len(versions), []
    for index in range(draw(st.integers(0, 12))):
        read = rng.sample(range(len(versions)), rng.randint(0, len(versions)))
        reads = {(s, rng.randint(0, versions[s])) for s in read}
        writes = set()
        if rng.random() < 0.3:
            target = rng.randrange(len(versions))
            reads.add((target, versions[target]))
            versions[target] += 1
            writes.add((target, versions[target]))
        if rng.random() < 0.7:
            writes.add((len(versions), 0))
            versions.append(0)
        phase = rng.choice(["forward", "backward", "optimizer"])
        seconds = rng.choice([0.0, 1e-7, rng.random()])
        bounds = (seconds, rng.random(), tuple(reads), tuple(writes), rng.randint(0, 2**40))
        ops.append(Op(index, rng.choice(names), phase, *bounds, *rng.choices(names, k=3)))
    positions = sorted(rng.randint(0, len(ops)) for _ in range(draw(st.integers(0, 10))))
    ticks = []
    for position in positions:
        level = rng.randint(0, 2**40)
        kind = rng.choice(["pack", "unpack"])
        ticks.append(Tick(kind, rng.randrange(len(versions)), position, level, level + rng.randint(0, 2**30)))
    born = {value: op.id for op in ops for value in op.writes}
    storages = []
    for s, newest in enumerate(versions):
        version = rng.randint(0, newest)
        cuts = sorted(rng.sample(range(len(ticks)), min(len(ticks), rng.choice([0, 2, 4])) // 2 * 2))
        gaps = tuple(zip(cuts[::2], cuts[1::2], strict=True))
        if gaps and born.get((s, version), -1) >= ticks[gaps[0][0]].op:
            gaps = ()
        kind = rng.choice(["activation", "input", "parameter", "gradient", "managed"])
        held = not gaps and rng.random() < 0.3
        nbytes = rng.choice([0, 512, 2**33])
        storages.append(Storage(s, nbytes, kind, s < leaves, held, gaps, version if gaps else 0, rng.choice(names)))
    return Trace(tuple(storages), tuple(ops), tuple(ticks), rng.randint(0, 2**40), "cpu")


@given(traces())
def test_round_trip(trace: Trace) -> None:
    validate(trace)
    text = to_json(trace)
    assert from_json(text) == trace
    assert to_json(from_json(text)) == text


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_files_round_trip_and_are_reproducible(tmp_path: Path, name: str) -> None:
    trace = chain(20)
    save(trace, tmp_path / name)
    first = (tmp_path / name).read_bytes()
    save(trace, tmp_path / name)
    assert (tmp_path / name).read_bytes() == first
    assert load(tmp_path / name) == trace
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_five_thousand_ops_are_small_and_fast() -> None:
    trace = chain(2500)
    text = to_json(trace)
    assert len(text) < 600_000
    start = time.perf_counter()
    assert from_json(text) == trace
    assert time.perf_counter() - start < 2.0  # takes 0.1 s; the margin is for a busy machine


def edited(path: tuple[str | int, ...], value: Any) -> str:
    raw = json.loads(to_json(chain(4)))
    node = raw
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 3, "this file is version 3, this legroom reads up to 1"),
        (("version",), True, "trace.version: expected an integer"),
        (("version",), 0, "trace.version: expected an integer >= 1"),
        (("kind",), "plan", "this file is of kind 'plan', expected 'trace'"),
        (("extra",), 1, "unknown field 'extra'"),
        (("storages", "nbytes", 3), -5, "trace.storages[3].nbytes: expected an integer >= 0, got -5"),
        (("storages", "nbytes", 3), True, "trace.storages[3].nbytes: expected an integer >= 0, got True"),
        (("storages", "nbytes", 3), 1.5, "trace.storages[3].nbytes: expected an integer >= 0, got 1.5"),
        (("storages", "nbytes", 3), 2**62, "trace.storages[3].nbytes: expected less than 2**62"),
        (("storages", "nbytes", 3), 10**400, "trace.storages[3].nbytes: expected less than 2**62"),
        (("storages", "nbytes"), [2**61] * 5, "trace.storages: all sizes together"),
        (("storages", "nbytes"), [], "trace.storages: kind has 5 rows where nbytes has 0"),
        (("storages", "kind", 1), 10**9, "trace.storages[1].kind: expected an index"),
        (("storages", "persistent", 1), 1, "trace.storages[1].persistent: expected true or false, got 1"),
        (("storages", "persistent", 1), True, "trace.ops[0].writes[0]: allocates storage 1, which is persistent"),
        (("storages", "held", 1), True, "trace.storages[1].gaps: expected none"),
        (("storages", "gaps", 1), [0], "trace.storages[1].gaps: expected pairs"),
        (("storages", "gaps", 1), [2, 2], "trace.storages[1].gaps[0]: expected start < end"),
        (("storages", "gaps", 1), [0, 8], "trace.storages[1].gaps[0]: refers to number 8 of 8 ticks"),
        (("storages", "gaps", 1), [2, 4, 3, 5], "trace.storages[1].gaps[1]: starts at 3, before"),
        (("storages", "gaps", 2), [0, 5], "trace.storages[2].gap_version: version 0 is not written before"),
        (("storages", "gap_version", 1), 1, "trace.storages[1].gap_version: version 1 is not written before"),
        (("storages", "gap_version", 0), 1, "trace.storages[0].gap_version: expected 0 for a storage without gaps"),
        (("ops", "reads", 2), [99, 0], "trace.ops[2].reads[0]: refers to number 99 of 5 storages"),
        (("ops", "reads", 2), [2, 1], "trace.ops[2].reads[0]: version 1 of storage 2 is not written"),
        (("ops", "reads", 2), [2, -1], "trace.ops[2].reads[1]: expected an integer >= 0, got -1"),
        (("ops", "reads", 0), [1, 0], "trace.ops[0].writes[0]: allocates storage 1"),  # a cycle of one op
        (("ops", "reads", 0), [4, 0], "trace.ops[3].writes[0]: allocates storage 4"),  # a longer cycle
        (("ops", "writes", 4), [4, 1], None),
        (("ops", "writes", 4), [3, 1], "trace.ops[4].writes[0]: version 1 is written in place"),
        (("ops", "writes", 4), [4, 2], "trace.ops[4].writes[0]: makes version 2 of storage 4, whose version is 0"),
        (("ops", "writes", 4), [4, 1, 4, 1], "trace.ops[4].writes[1]: makes version 1"),
        (("ops", "seconds", 1), "1", "trace.ops[1].seconds: expected seconds"),
        (("ops", "seconds", 1), -1e-9, "trace.ops[1].seconds: expected seconds"),
        (("ops", "seconds", 1), 10**400, "trace.ops[1].seconds: expected seconds"),
        (("ops", "seconds"), [2e9] * 8, "trace.ops: all ops together"),
        (("ticks", "op", 3), 1, "trace.ticks[3].op: expected 3 (the tick before)"),
        (("ticks", "op", 7), 9, "trace.ticks[7].op: expected 6"),
        (("ticks", "storage", 0), 5, "trace.ticks[0].storage: refers to number 5 of 5 storages"),
        (("ticks", "level_bytes", 0), 10**6, "trace.ticks[0].peak_bytes: expected at least level_bytes"),
        (("head_peak_bytes",), None, "trace.head_peak_bytes: expected an integer"),
        (("device",), 3, "trace.device: expected a text"),
        (("texts", 0), "\ud800", "trace.texts[0]: expected text that UTF-8 can hold"),
        (("texts", 0), "x" * 5000, "trace.texts[0]: expected at most 4096 characters"),
        (("ticks",), [], "trace.ticks: expected an object, got an array"),
    ],
)
def test_the_offending_field_is_named(path: tuple[str | int, ...], value: Any, message: str | None) -> None:
    text = edited(path, value)
    if message is None:
        from_json(text)
        return
    with pytest.raises(TraceError) as caught:
        from_json(text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_missing_field_is_named() -> None:
    raw = json.loads(to_json(chain(2)))
    del raw["ticks"]["op"]
    with pytest.raises(TraceError, match=r"trace.ticks: the field 'op' is missing"):
        from_json(json.dumps(raw))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "NaN",
        "nonsense",
        "[" * 200_000,
        '{"a":' * 100_000,
        '{"kind":"trace","kind":"trace"}',
        '{"kind":"trace","version":' + "9" * 5000 + "}",
        '{"kind":"trace","version":1e999}',
        '{"kind":"trace","version":-Infinity}',
        '{"kind":[[[]]],"version":1}',
        "\ufeff{}",
    ],
    ids=lambda text: repr(text[:20]),
)
def test_what_is_no_trace_is_refused(text: str) -> None:
    with pytest.raises(TraceError):
        from_json(text)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        ("NaN", "NaN is no number that JSON knows"),
        ("-Infinity", "-Infinity is no number that JSON knows"),
        ("1e999", "the number 1e999 is too large"),
        ("9" * 5000, "an integer of more than 4300 digits"),
    ],
    ids=lambda text: text[:9],
)
@pytest.mark.parametrize("place", ["ops.seconds[2]", "storages.gaps[1][0]", "head_peak_bytes"])
def test_a_number_that_cannot_be_read_is_named(place: str, number: str, said: str) -> None:
    raw = json.loads(to_json(chain(3)))
    node, *steps = [raw, *place.replace("]", "").replace("[", ".").split(".")]
    for step in steps[:-1]:
        node = node[int(step) if isinstance(node, list) else step]
    node[int(steps[-1]) if isinstance(node, list) else steps[-1]] = "HERE"
    with pytest.raises(TraceError) as refusal:
        from_json(json.dumps(raw).replace('"HERE"', number))
    assert str(refusal.value) == f"trace.{place}: {said}"


def test_ids_are_indices() -> None:
    trace = chain(3)
    for field in ("storages", "ops"):
        items = getattr(trace, field)
        bad = (*items[:1], dataclasses.replace(items[1], id=7), *items[2:])
        with pytest.raises(TraceError, match=rf"trace.{field}\[1\].id: expected its own index 1, got 7"):
            validate(dataclasses.replace(trace, **{field: bad}))


@given(st.data())
@settings(max_examples=120)
def test_mutated_files_are_read_or_refused(data: st.DataObject) -> None:
    raw = json.loads(to_json(chain(6)))
    node: Any = raw
    while True:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], (dict, list)) or not node[key] or data.draw(st.integers(0, 9)) == 0:
            break
        node = node[key]
    action = data.draw(st.sampled_from(["set", "delete", "repeat"]))
    if action == "set":
        node[key] = data.draw(st.sampled_from(WRONG_VALUES))
    elif action == "delete":
        del node[key]
    elif isinstance(node, list):
        node.extend([node[key]] * 3)
    read_or_refused(json.dumps(raw))


@given(st.data())
def test_damaged_text_is_read_or_refused(data: st.DataObject) -> None:
    text = to_json(chain(3))
    at = data.draw(st.integers(0, len(text)))
    pieces = ["", "0", "-", "9" * 30, "e9", '"', "[", "]", ",", "{", "NaN", "\x00", "\ud800"]
    inserted = data.draw(st.sampled_from(pieces))
    read_or_refused(text[:at] + inserted + text[at + data.draw(st.integers(0, 3)) :])
    read_or_refused(text[:at])


def read_or_refused(text: str) -> None:
    start = time.perf_counter()
    try:
        trace = from_json(text)
    except TraceError as refusal:
        message = str(refusal)
    else:
        message = ""
        assert from_json(to_json(trace)) == trace
    assert len(message) < 400
    assert time.perf_counter() - start < 1.0


def test_many_reads_and_writes_in_one_op_stay_linear() -> None:
    count = 30_000
    storages = tuple(Storage(i, 4, "parameter", True, False, (), 0, "") for i in range(count))
    reads, writes = tuple((i, 0) for i in range(count)), tuple((i, 1) for i in range(count))
    op = Op(0, "aten._foreach_add_", "optimizer", 0.1, 0.1, reads, writes, 0, "", "", "")
    start = time.perf_counter()
    validate(Trace(storages, (op,), (), 0, "cpu"))
    assert time.perf_counter() - start < 3.0


def test_unreadable_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = gzip.compress(to_json(chain(50)).encode())
    monkeypatch.setattr(jsonio, "LARGEST_TEXT_BYTES", 100_000)
    cases = {
        "missing": None,
        "binary": b"\xff\xfe\x00",
        "cut.gz": packed[: len(packed) // 2],
        "flipped.gz": packed[:40] + bytes([packed[40] ^ 0xFF]) + packed[41:],
        "tail.gz": packed + b"more",
        "bomb.gz": gzip.compress(b" " * 10_000_000),
        "large": b" " * 100_001,
    }
    for name, content in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(TraceError, match=name):
            load(tmp_path / name)
    for bad in (tmp_path, "a\0b"):
        with pytest.raises(TraceError):
            load(bad)


@pytest.mark.parametrize("name", ["no/such/folder/t.json", "a\0b", "", "n" * 300])
def test_a_failed_save_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceError, match="cannot be written"):
        save(chain(2), name)
    assert list(tmp_path.iterdir()) == []


def test_an_invalid_trace_is_not_written() -> None:
    with pytest.raises(TraceError, match="head_peak_bytes"):
        to_json(dataclasses.replace(chain(2), head_peak_bytes=-1))


def test_version_is_what_the_file_says() -> None:
    assert json.loads(to_json(chain(1)))["version"] == VERSION


def test_typed_getters_refuse_what_they_do_not_name() -> None:
    def node(value: Any) -> jsonio.Node:
        return jsonio.Node(value, "here", TraceError)

    assert node(3).number() == 3.0
    assert node([1, 2]).integers() == (1, 2)
    assert node([1.5, 2.0]).numbers() == [1.5, 2.0] == node([1.5, 2]).numbers()
    assert node("b").one_of(("a", "b")) == "b"
    assert node({"a": 1}).fields(optional=("a",))["a"].integer() == 1
    refused = [
        lambda: node(10**400).number(),
        lambda: node(True).number(),
        lambda: node(-0.1).number(),
        lambda: node([1, True]).integers(),
        lambda: node([1.0, True]).numbers(),
        lambda: node([1.0, -0.5]).numbers(),
        lambda: node([math.nan]).numbers(),
        lambda: node([math.inf, 1.0]).numbers(),
        lambda: node(["1.0"]).numbers(),
        lambda: node(1).boolean(),
        lambda: node("c").one_of(("a", "b")),
        lambda: node([0] * 3).array(longest=2),
        lambda: node([]).fields(),
        lambda: node(5).integer(most=4),
    ]
    for call in refused:
        with pytest.raises(TraceError, match=r"^here"):
            call()
