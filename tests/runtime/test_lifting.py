"""Numbers and calls that were seen at some sizes of the input, told for another."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from legroom.runtime.knowncalls import Inner, KnownCall, Likeness, Origin
from legroom.runtime.lifting import Finder, LiftedCall, Numbers, Sizes, Tellers, Unsure
from legroom.runtime.lineage import Blank, form_of

SEEN = (4, 80), (4, 50), (4, 62)


def told(numbers: Any, asked: Sizes, seen: tuple[Sizes, ...] = SEEN) -> int:
    return Numbers(seen, asked).tell(tuple(numbers(*sizes) for sizes in seen))


RULES = {
    "constant": lambda batch, length: 12,
    "a size": lambda batch, length: length,
    "a size that was always the same": lambda batch, length: 64 * batch,
    "a multiple": lambda batch, length: 768 * length,
    "a half": lambda batch, length: length // 2,  # of sizes that are all even
    "a product": lambda batch, length: 12 * batch * length,
    "a square": lambda batch, length: 12 * batch * length * length,
    "a line": lambda batch, length: 768 * (length - 1),
    "a falling line": lambda batch, length: 512 - length,
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("length", [2, 48, 64, 512])
def test_numbers(name: str, length: int) -> None:
    assert told(RULES[name], (4, length)) == RULES[name](4, length)


@pytest.mark.parametrize(
    ("rule", "asked", "why"),
    [
        (lambda batch, length: length // 2, (4, 63), "it would be no whole number"),
        (lambda batch, length: -length % 8, (4, 64), "it is no rule that is known"),
        (lambda batch, length: length, (5, 80), "the batch never changed"),
        (lambda batch, length: length**3, (4, 64), "it is no rule that is known"),
    ],
)
def test_numbers_that_are_not_told(rule: Any, asked: Sizes, why: str) -> None:
    with pytest.raises(Unsure):
        told(rule, asked)


def test_two_rules_that_disagree() -> None:
    """Both sizes grew alike: which of them it is does not show, unless it makes no difference."""
    seen = (2, 20), (3, 30), (5, 50)
    assert told(lambda a, b: b, (4, 40), seen) == 40
    with pytest.raises(Unsure):
        told(lambda a, b: b, (4, 50), seen)


# Powers of both sizes, and what is added, which is told only where the rest is a line.
PARTS = [(a, b, more) for a in range(3) for b in range(3 - a) for more in range(4 if a + b == 1 else 1)]
COLUMN = st.lists(st.integers(1, 40), min_size=3, max_size=3, unique=True)  # with two alike a line is none
SEEN = st.tuples(COLUMN, COLUMN, st.lists(st.tuples(*[st.integers(1, 40)] * 2), max_size=3)).map(
    lambda drawn: tuple(dict.fromkeys([*zip(drawn[0], drawn[1], strict=True), *drawn[2]]))
)


@given(seen=SEEN, asked=st.tuples(*[st.integers(1, 40)] * 2), factor=st.integers(0, 3), parts=st.sampled_from(PARTS))
def test_what_follows_a_rule_is_told_right_or_not_at_all(
    seen: tuple[Sizes, ...], asked: Sizes, factor: int, parts: tuple[int, int, int]
) -> None:
    first, second, more = parts

    def value(a: int, b: int) -> int:
        return int(factor * a**first * b**second + more)

    with contextlib.suppress(Unsure):
        assert told(value, asked, seen) == value(*asked)


def test_a_line_is_one_only_where_it_may_be() -> None:
    seen = (4, 20), (4, 50), (4, 32)
    numbers = Numbers(seen, (4, 41))
    assert numbers.tell((19, 49, 31)) == 40
    with pytest.raises(Unsure):
        numbers.tell((19, 49, 31), lines=False)
    assert numbers.tell((40, 100, 64), lines=False) == 82
    assert numbers.tell((7, 7, 7), lines=False) == 7


# calls

VIEW = torch.ops.aten.view.default


def call(length: int, **changes: Any) -> KnownCall:
    """view(x, (4 * length, 64)), of x as long as that."""
    layout = torch.float32, torch.Size((4, length, 64)), (64 * length, 64, 1), 0, False, False
    form = torch.Tensor, True, torch.device("cpu"), layout
    inner = Inner(
        number=7,
        func=VIEW,
        args=changes.pop("inner_args", (None, [4 * length, 64])),
        places=((0, -1, Origin(position=0), layout),),
        kwargs={},
        form=form_of(VIEW),
        written=(),
    )
    fields = {
        "surroundings": (True, False, True),
        "args": (form, (list, ((int, 4 * length), (int, 64)))),
        "kwargs": {},
        "ops": (inner,),
        "read": (0,),
        "results": ((-1, 0, 0),),
        "saved": (),
        "written": -1,
        "moved": (),
        "seeded": False,
        "shared": (),
        "packs": (),
        "needs": frozenset(),
        "casts_weights": False,
        "switches": None,
        "on_cpu": True,
        "likeness": Likeness(),
    }
    return KnownCall(**{**fields, **changes})


def lifted(calls: dict[int, KnownCall], asked: int) -> KnownCall:
    return LiftedCall({(4, length): known for length, known in calls.items()}, Finder()).at(Tellers((4, asked)))


LENGTHS = 20, 50, 32


def test_a_call() -> None:
    found = lifted({length: call(length) for length in LENGTHS}, 41)
    assert found == call(41)
    assert type(found.args[0][3][1]) is torch.Size and type(found.ops[0].args[1]) is list


def test_what_is_not_compared_lies_on_no_line() -> None:
    """Such as how far a mask is padded: 64 - length, for lengths from 48 on."""
    with pytest.raises(Unsure):
        lifted({length: call(length, inner_args=(None, [0, 64 - length])) for length in LENGTHS}, 41)
    given = {
        length: call(length, inner_args=(None, [0, 64 - length]), args=(*call(length).args, (int, 64 - length)))
        for length in LENGTHS
    }
    assert lifted(given, 41).ops[0].args == (None, [0, 23])  # the call is given it as well


@pytest.mark.parametrize(
    ("fields", "others"),
    [
        ({"seeded": False}, {"seeded": True}),
        ({"packs": (1,)}, {"packs": (2,)}),
        ({"surroundings": (True, False, True)}, {"surroundings": (False, False, True)}),
    ],
)
def test_calls_that_differ_in_more_than_arguments(fields: dict[str, Any], others: dict[str, Any]) -> None:
    with pytest.raises(Unsure):
        lifted({20: call(20, **fields), 50: call(50, **others), 32: call(32, **fields)}, 41)


@pytest.mark.parametrize(("value", "other"), [(0.0, -0.0), (1, True), ("a", "b"), ([1], [1, 1]), ([1], (1,))])
def test_arguments_that_differ_in_more_than_sizes(value: Any, other: Any) -> None:
    def calls(at_50: Any) -> dict[int, KnownCall]:
        more = {20: value, 50: at_50, 32: value}
        return {length: call(length, inner_args=(None, [4 * length, 64], more[length])) for length in LENGTHS}

    assert lifted(calls(value), 41).ops[0].args == (None, [164, 64], value)
    with pytest.raises(Unsure):
        lifted(calls(other), 41)


def test_what_is_the_same_at_all_sizes_may_be_of_any_kind() -> None:
    blank = (Blank(torch.empty(3)) for _ in LENGTHS)
    calls = {
        length: call(length, inner_args=(None, [4 * length, 64], math.nan, None, torch.float16, each))
        for length, each in zip(LENGTHS, blank, strict=True)
    }
    found = lifted(calls, 41).ops[0].args
    assert found[1] == [164, 64] and math.isnan(found[2]) and found[3:5] == (None, torch.float16)
    with pytest.raises(Unsure):
        LiftedCall(
            {
                (4, length): call(length, inner_args=(None, [4 * length, 64], Blank(torch.empty(length))))
                for length in LENGTHS
            },
            Finder(),
        )
