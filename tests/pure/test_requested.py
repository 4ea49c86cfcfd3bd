"""What a replay asks of the allocator, normalisations that wait for what follows among it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from legroom.ir import Op, Storage, Tick, Trace, Value
from legroom.requested import requests
from legroom.schedule import Drop, Replay, Schedule

NORM, RELU, RELU_IN_PLACE = "aten.native_batch_norm.default", "aten.relu.default", "aten.relu_.default"
CONVOLUTION = "aten.convolution.default"
LAYER_NORM, CAST = "aten.native_layer_norm.default", "aten._to_copy.default"
TWIN = "a cast of what was cast before"
X, Y, MEAN, SCALE, POSITIVE, OUT, HALF, SAME, ALIKE = range(9)  # storages
SIZES = {X: 1 << 20, Y: 2 << 20, MEAN: 1, SCALE: 2, POSITIVE: 3 << 20, OUT: 4 << 20, HALF: (1 << 20) + 512}
SIZES |= {SAME: 5 << 20, ALIKE: 6 << 20}  # not those of what they have the bytes of: so it shows if they are asked for
WORKSPACE_BYTES = 7


def op(number: int, name: str, reads: Sequence[Value], writes: Sequence[Value]) -> Op:
    short = name in (NORM, LAYER_NORM)
    workspace = WORKSPACE_BYTES if short else 0
    name, twin = (CAST, True) if name == TWIN else (name, False)
    made = tuple(reads), tuple(writes)
    return Op(number, name, "forward", 1e-3, 1e-6, *made, workspace, "", "", "", short=short, twin=twin)


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
    expected = (target, *also)
    assert set(live) <= set(expected) if {SAME, ALIKE} & set(expected) else sorted(live) == sorted(expected)
    return out


NORM_OF_X = NORM, [(X, 0)], [(Y, 0), (MEAN, 0), (SCALE, 0)]
LAYER_NORM_OF_X = LAYER_NORM, *NORM_OF_X[1:]
RELU_OF_Y = RELU, [(Y, 0)], [(POSITIVE, 0)]
CAST_OF_Y = CAST, [(Y, 0)], [(HALF, 0)]
SAME_AS_HALF, ALIKE_AS_HALF = (TWIN, [(HALF, 0)], [(SAME, 0)]), (TWIN, [(HALF, 0)], [(ALIKE, 0)])


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
            [(CONVOLUTION, [(OUT, 0)], [(X, 0)]), NORM_OF_X, (CONVOLUTION, [(Y, 0)], [(OUT, 1)])],
            [OUT],
            "+0 +1 -0 +5 -1",
            id="its source goes once it is written out",
        ),
        pytest.param(
            [(CONVOLUTION, [(OUT, 0)], [(X, 0)]), NORM_OF_X, (CONVOLUTION, [(Y, 0), (X, 0)], [(OUT, 1)])],
            [OUT],
            "+0 +1 +5 -0 -1",
            id="its source is read by the op, too",
        ),
        pytest.param(
            [(CONVOLUTION, [(OUT, 0)], [(X, 0)]), NORM_OF_X, RELU_OF_Y],
            [Y, POSITIVE],
            "+0 +4 +1 -0",
            id="its source stays until the end",
        ),
        pytest.param(
            [NORM_OF_X, (NORM, [(Y, 0)], [(POSITIVE, 0), (MEAN, 1), (SCALE, 1)])],
            [POSITIVE],
            "+1 +4 -1",
            id="one after another",
        ),
        pytest.param([NORM_OF_X, CAST_OF_Y], [HALF], "+1 +6 -1", id="batch norm and cast: not in one pass"),
        pytest.param([LAYER_NORM_OF_X, CAST_OF_Y], [HALF], "+6", id="layer norm and cast"),
        pytest.param(
            [LAYER_NORM_OF_X, (CAST, [(Y, 0)], [(OUT, 1)])],
            [OUT],
            "+1 +5 -1",
            id="a cast to more bits",
        ),
        pytest.param([LAYER_NORM_OF_X, RELU_OF_Y], [POSITIVE], "+1 +4 -1", id="layer norm and relu: not in one pass"),
        pytest.param([SAME_AS_HALF], [SAME], "", id="the bytes of what is there"),
        pytest.param([LAYER_NORM_OF_X, CAST_OF_Y, SAME_AS_HALF], [SAME], "+6", id="the bytes of what is made first"),
        pytest.param([LAYER_NORM_OF_X, CAST_OF_Y, SAME_AS_HALF], [SAME, HALF], "+6", id="of what stays as well"),
        pytest.param(
            [LAYER_NORM_OF_X, CAST_OF_Y, SAME_AS_HALF, ALIKE_AS_HALF], [SAME, ALIKE], "+6", id="two with the same bytes"
        ),
        pytest.param(
            [SAME_AS_HALF, (CONVOLUTION, [(SAME, 0)], [(OUT, 0)])], [OUT], "+5", id="read by an op, and not asked for"
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
