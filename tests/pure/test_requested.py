"""What a replay asks of the allocator, normalisations that wait for what follows among it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from legroom.ir import Op, Storage, Tick, Trace, Value
from legroom.requested import requests
from legroom.schedule import Drop, Replay, Schedule

NORM, RELU, RELU_IN_PLACE = "aten.native_batch_norm.default", "aten.relu.default", "aten.relu_.default"
CONVOLUTION = "aten.convolution.default"
X, Y, MEAN, SCALE, POSITIVE, OUT = range(6)  # storages
SIZES = {X: 100, Y: 200, MEAN: 1, SCALE: 2, POSITIVE: 300, OUT: 400}
WORKSPACE_BYTES = 7


def op(number: int, name: str, reads: Sequence[Value], writes: Sequence[Value]) -> Op:
    workspace = WORKSPACE_BYTES if name == NORM else 0
    return Op(
        number, name, "forward", 1e-3, 1e-6, tuple(reads), tuple(writes), workspace, "", "", "", short=name == NORM
    )


def replayed(ops: Sequence[tuple[str, Sequence[Value], Sequence[Value]]], target: int, *also: int) -> list[str]:
    """The requests of a replay of all these ops, as text: what comes, and what goes."""
    trace = Trace(
        tuple(Storage(n, size, "activation", False, False, ((0, 1),), 0, "") for n, size in SIZES.items()),
        tuple(op(n, *each) for n, each in enumerate(ops)),
        (Tick("pack", target, len(ops), 0, 0), Tick("unpack", target, len(ops), 0, 0)),
        0,
        "cuda",
        requests=((), (), ()),
    )
    schedule = Schedule((Drop(0, target), Replay(1, target, tuple(range(len(ops))), also)), "")
    names = {size: str(number) for number, size in SIZES.items()} | {WORKSPACE_BYTES: "w"}
    live: dict[int, str] = {}
    out: list[str] = []
    begun = False
    for key, nbytes in requests(trace, schedule):
        if nbytes < 0:
            begun = key == 1
        elif begun and nbytes > 0:
            assert key not in live
            live[key] = names[nbytes]
            out.append(f"+{live[key]}")
            if key >= 0:
                assert key in (target, *also), "only what is asked for stays under its own name"
        elif begun:
            out.append(f"-{live.pop(key)}")
    assert sorted(live) == sorted((target, *also)), "what stays is what was asked for"
    return out


NORM_OF_X = NORM, [(X, 0)], [(Y, 0), (MEAN, 0), (SCALE, 0)]
RELU_OF_Y = RELU, [(Y, 0)], [(POSITIVE, 0)]


@pytest.mark.parametrize(
    ("ops", "targets", "asked"),
    [
        pytest.param([NORM_OF_X, RELU_OF_Y], [POSITIVE], "+4", id="in one pass with what follows"),
        pytest.param([NORM_OF_X], [Y], "+1", id="alone"),
        pytest.param([NORM_OF_X, RELU_OF_Y], [POSITIVE, Y], "+4 +1", id="both"),
        pytest.param([NORM_OF_X, (CONVOLUTION, [(Y, 0)], [(OUT, 0)])], [OUT], "+1 +5 -1", id="written out for another"),
        pytest.param(
            [NORM_OF_X, (CONVOLUTION, [(X, 0), (Y, 0)], [(OUT, 0)])],
            [OUT],
            "+1 +5 -1",
            id="written out for another that reads it second",
        ),
        pytest.param(
            [NORM_OF_X, RELU_OF_Y, (CONVOLUTION, [(Y, 0), (POSITIVE, 0)], [(OUT, 0)])],
            [OUT],
            "+4 +1 +5 -4 -1",
            id="written out after what runs in the same pass",
        ),
        pytest.param(
            [(CONVOLUTION, [(OUT, 0)], [(X, 0)]), NORM_OF_X, RELU_OF_Y], [POSITIVE], "+0 +4 -0", id="its source stays"
        ),
        pytest.param(
            [NORM_OF_X, (RELU_IN_PLACE, [(Y, 0)], [(Y, 1)])], [Y], "+1", id="what follows writes in place of it"
        ),
        pytest.param(
            [NORM_OF_X, RELU_OF_Y],
            [POSITIVE, MEAN],
            "+1 +2 +3 +w -w -3 +4 -1",
            id="in full where its statistics are to come back",
        ),
        pytest.param(
            [(CONVOLUTION, [(OUT, 0)], [(X, 0)]), (RELU, [(X, 0)], [(POSITIVE, 0)])], [POSITIVE], "+0 +4 -0", id="none"
        ),
    ],
)
def test_a_replay(ops: list[tuple[str, Sequence[Value], Sequence[Value]]], targets: list[int], asked: str) -> None:
    assert " ".join(replayed(ops, *targets)) == asked
