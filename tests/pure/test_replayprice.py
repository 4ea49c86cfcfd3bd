"""What replays are said to take where a normalisation is written out in one pass."""

from __future__ import annotations

import pytest

from legroom.hardware import PRESETS
from legroom.ir import Op, Storage, Tick, Trace, validate
from legroom.plan import Keep, Plan, Recompute, signature
from legroom.replayprice import with_short_replays
from legroom.schedule import lower
from legroom.simulate import simulate
from legroom.traceio import from_json, to_json

NORM, CAST, ADD = "aten.native_layer_norm.default", "aten._to_copy.default", "aten.add.Tensor"
NORM_SECONDS, CAST_SECONDS, ADD_SECONDS = 8e-5, 4e-5, 3e-5


def trace_of(*followers: str) -> Trace:
    """A source that is kept, its norm with two statistics, and what reads it: each result is saved and read once."""
    count = len(followers)
    storages = [Storage(0, 4096, "input", True, False, (), 0, "x")]
    storages += [Storage(i, 4096 if i == 1 else 64, "temporary", False, False, (), 0, "") for i in (1, 2, 3)]
    storages += [
        Storage(4 + i, 2048, "activation", False, False, ((i, 2 * count - 1 - i),), 0, "") for i in range(count)
    ]
    ops = [Op(0, NORM, "forward", NORM_SECONDS, 1e-6, ((0, 0),), ((1, 0), (2, 0), (3, 0)), 0, "", "", "")]
    for i, name in enumerate(followers):
        seconds = CAST_SECONDS if name == CAST else ADD_SECONDS
        ops.append(Op(1 + i, name, "forward", seconds, 1e-6, ((1, 0),), ((4 + i, 0),), 0, "", "", ""))
    ops.append(Op(len(ops), "backward", "backward", 1e-4, 1e-6, (), (), 0, "not in forward", "", ""))
    ticks = [Tick("pack", 4 + i, 2 + i, 10000, 10000) for i in range(count)]
    ticks += [Tick("unpack", 4 + i, 1 + count, 10000, 10000) for i in reversed(range(count))]
    trace = Trace(tuple(storages), tuple(ops), tuple(ticks), 10000, "cuda")
    validate(trace)
    return trace


def again(trace: Trace) -> list[float | None]:
    return [op.replay_seconds for op in trace.ops]


@pytest.mark.parametrize(
    ("followers", "expected"),
    [
        ((CAST,), [0.0, None]),
        ((CAST, CAST), [0.0, None, None]),
        # What reads the result itself waits for a pass that writes it out.
        ((CAST, ADD), [0.0, None, ADD_SECONDS + 0.6 * NORM_SECONDS]),
        ((ADD,), [0.6 * NORM_SECONDS, None]),
        (("aten.relu.default",), [0.6 * NORM_SECONDS, None]),  # that of a layer norm is not made in the same pass
        ((), [0.6 * NORM_SECONDS]),
    ],
)
def test_prices(followers: tuple[str, ...], expected: list[float | None]) -> None:
    priced = with_short_replays(trace_of(*followers), [True] + [False] * len(followers))
    validate(priced)

    assert again(priced)[:-1] == pytest.approx(expected)
    assert [op.short for op in priced.ops] == [True] + [False] * (len(priced.ops) - 1)
    assert [op.seconds for op in priced.ops] == [op.seconds for op in trace_of(*followers).ops]


def test_nothing_changes_where_nothing_was_proven() -> None:
    trace = trace_of(CAST)
    assert with_short_replays(trace, [False, False]) is trace
    assert with_short_replays(trace, [False, True]) is trace  # a cast is no normalisation
    assert with_short_replays(trace, []) is trace


@pytest.mark.parametrize("short", [False, True])
def test_simulated_replays_take_that_long(short: bool) -> None:
    trace = with_short_replays(trace_of(CAST, ADD), [short, False, False])
    hardware = PRESETS["h200"]
    decisions = tuple(Recompute() if gap.storage == 4 else Keep() for gap in trace.gaps)
    plan = Plan(decisions, signature(trace), "by hand", 10**6, 0, 0.0, ())

    timeline = simulate(trace, lower(trace, plan, hardware), hardware)

    took = timeline.breakdown.recomputation_seconds
    assert took == pytest.approx(CAST_SECONDS + (0 if short else NORM_SECONDS), rel=1e-3)


def test_files_do_not_have_them() -> None:
    trace = trace_of(CAST)
    assert from_json(to_json(with_short_replays(trace, [True, False]))) == trace
