"""Calls that are known at some sizes of the input, told for another size.

Where an input changes size, a program's calls run the same ops, with other numbers in their arguments: sizes, strides,
offsets. Each of these is as a rule a multiple of one size of the input or of a product of two, or lies on a line; a few
sizes show which. A number of which they do not show that, or show more than one thing, is not told, and neither is the
call that it is in.

What is told may be wrong all the same. So the arguments of a call are compared with it when the call is made. What its
ops are given beside that must be a multiple: how far something is padded, to a length that suits a kernel, may lie on a
line for a while. And what is replayed by it is held against the real bytes once at every size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from legroom.runtime.knowncalls import Inner, KnownCall, Likeness
from legroom.runtime.lineage import Blank

Sizes = tuple[int, ...]
_SEQUENCES = frozenset((tuple, list, torch.Size))
_LEAST_ON_A_LINE = 3  # different sizes: two lie on one in any case


class Unsure(Exception):
    """A number, or a part of a call, that cannot be told."""


class _Column(NamedTuple):
    """What a number may be a multiple of: at the sizes that were seen, and at the one that is asked for."""

    seen: Sizes
    asked: int

    def has_multiple(self, seen: Sizes) -> bool:
        return all(value * self.seen[0] == seen[0] * of for value, of in zip(seen, self.seen, strict=True))


class Numbers:
    """What numbers that were seen at some sizes are at another one."""

    def __init__(self, seen: Sequence[Sizes], asked: Sizes) -> None:
        columns = {_Column(values[:-1], values[-1]) for values in zip(*seen, asked, strict=True)}
        varying = [column for column in columns if len(set(column.seen)) > 1]
        if any(column.asked != column.seen[0] for column in columns if len(set(column.seen)) == 1):
            raise Unsure  # in that direction nothing was seen
        self._lines = [column for column in varying if len(set(column.seen)) >= _LEAST_ON_A_LINE]
        products = (
            _Column(tuple(a * b for a, b in zip(one.seen, other.seen, strict=True)), one.asked * other.asked)
            for one, other in itertools.combinations_with_replacement(varying, 2)
        )
        self._multiples = [column for column in (*varying, *products) if 0 not in column.seen]
        self._told: dict[tuple[Sizes, bool], int | None] = {}

    def tell(self, seen: Sizes, *, lines: bool = True) -> int:
        """lines: whether it may lie on one."""
        if (seen, lines) not in self._told:
            self._told[seen, lines] = self._tell(seen, lines)
        told = self._told[seen, lines]
        if told is None:
            raise Unsure
        return told

    def _tell(self, seen: Sizes, lines: bool) -> int | None:
        first = seen[0]
        if all(value == first for value in seen):
            return first
        multiples = [column for column in self._multiples if column.has_multiple(seen)]
        found = {_divided(first * column.asked, column.seen[0]) for column in multiples}
        for column in self._lines if multiples or lines else ():
            begin = column.seen[0]
            run, rise = next((x - begin, y - first) for x, y in zip(column.seen, seen, strict=True) if x != begin)
            points = zip(column.seen, seen, strict=True)
            if all((value - first) * run == rise * (x - begin) for x, value in points):
                more = _divided(rise * (column.asked - begin), run)
                found.add(None if more is None else first + more)
        return found.pop() if len(found) == 1 else None


def _divided(value: int, by: int) -> int | None:
    quotient, rest = divmod(value, by)
    return quotient if not rest else None


class _Fixed(NamedTuple):
    """A value that is the same at all sizes."""

    value: Any


class _Number(NamedTuple):
    """One that was another at each."""

    seen: Sizes


class _Parts(NamedTuple):
    """A sequence with such numbers in it."""

    kind: type
    parts: tuple[Any, ...]


_Part = _Fixed | _Number | _Parts


class Finder:
    """What values that were seen at several sizes have in common."""

    def __init__(self) -> None:
        # By the identities of the values, which are held: layouts of a layer are those of the next one.
        self._known: dict[tuple[int, ...], tuple[tuple[Any, ...], _Part]] = {}

    def common(self, values: tuple[Any, ...]) -> _Part:
        key = tuple(map(id, values))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = values, self._common(values)
        return known[1]

    def _common(self, values: tuple[Any, ...]) -> _Part:
        first = values[0]
        kind = type(first)
        if any(type(value) is not kind for value in values):
            raise Unsure
        if kind in _SEQUENCES:
            if any(len(value) != len(first) for value in values):
                raise Unsure
            parts = tuple(self.common(each) for each in zip(*values, strict=True))
            return _Fixed(first) if all(type(part) is _Fixed for part in parts) else _Parts(kind, parts)
        if kind is int:
            return _Fixed(first) if values.count(first) == len(values) else _Number(values)
        if kind is Blank:
            alike = all((v.size, v.dtype, v.device) == (first.size, first.dtype, first.device) for v in values)
        elif kind is float:
            alike = len({value.hex() for value in values}) == 1  # zeros of both signs are equal
        else:
            alike = all(value is first or value == first for value in values)
        if not alike:
            raise Unsure
        return _Fixed(first)


def _numbers_in(part: _Part) -> frozenset[Sizes]:
    if type(part) is _Number:
        return frozenset((part.seen,))
    return frozenset().union(*map(_numbers_in, part.parts)) if type(part) is _Parts else frozenset()


class _Teller:
    """Values at one size; each part that calls share is made once."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._made: dict[int, tuple[_Part, Any]] = {}  # by the identity of the part, which is held

    def check(self, seen: Iterable[Sizes]) -> None:
        for numbers in seen:
            self._numbers.tell(numbers, lines=False)

    def value(self, part: _Part) -> Any:
        if type(part) is _Fixed:
            return part.value
        made = self._made.get(id(part))
        if made is None:
            if type(part) is _Number:
                value = self._numbers.tell(part.seen)
            else:
                assert type(part) is _Parts
                value = part.kind(map(self.value, part.parts))
            made = self._made[id(part)] = part, value
        return made[1]


class Tellers:
    """At one size, by the sizes that were seen."""

    def __init__(self, asked: Sizes) -> None:
        self._asked = asked
        self._tellers: dict[tuple[Sizes, ...], _Teller | None] = {}

    def from_sizes(self, seen: tuple[Sizes, ...]) -> _Teller:
        if seen not in self._tellers:
            try:
                self._tellers[seen] = _Teller(Numbers(seen, self._asked))
            except Unsure:
                self._tellers[seen] = None
        teller = self._tellers[seen]
        if teller is None:
            raise Unsure
        return teller


def _sized(known: KnownCall) -> tuple[Any, ...]:
    """All of a call that may depend on the size of the input."""
    ops = tuple((op.args, tuple(place[3] for place in op.places), tuple(op.kwargs.values())) for op in known.ops)
    return known.args, tuple(known.kwargs.values()), ops


def _fixed(known: KnownCall) -> tuple[Any, ...]:
    """The rest of it."""
    ops = (
        (op._replace(args=(), places=(), kwargs={}), [place[:3] for place in op.places], list(op.kwargs))
        for op in known.ops
    )
    return known._replace(args=(), kwargs={}, ops=()), list(known.kwargs), list(ops)


class LiftedCall:
    """A call that is known at several sizes, for all others."""

    def __init__(self, samples: Mapping[Sizes, KnownCall], finder: Finder) -> None:
        calls = list(samples.values())
        rest = _fixed(calls[0])
        if any(_fixed(call) != rest for call in calls[1:]):
            raise Unsure
        self._seen = tuple(samples)
        self._first = calls[0]
        self._args, self._kwargs, ops = _parts_of(finder.common(tuple(map(_sized, calls))))
        self._ops = [_parts_of(op) for op in _parts_of(ops)]
        self._not_compared = _numbers_in(ops) - _numbers_in(self._args) - _numbers_in(self._kwargs)

    def at(self, tellers: Tellers) -> KnownCall:
        teller = tellers.from_sizes(self._seen)
        teller.check(self._not_compared)
        first = self._first
        ops = [_op_at(op, parts, teller) for op, parts in zip(first.ops, self._ops, strict=True)]
        kwargs = dict(zip(first.kwargs, teller.value(self._kwargs), strict=True))
        args = teller.value(self._args)
        return first._replace(args=args, kwargs=kwargs, ops=tuple(ops), likeness=Likeness())


def _op_at(op: Inner, parts: Sequence[_Part], teller: _Teller) -> Inner:
    if all(type(part) is _Fixed for part in parts):
        return op
    args, layouts, kwargs = map(teller.value, parts)
    places = tuple((*place[:3], layout) for place, layout in zip(op.places, layouts, strict=True))
    return op._replace(args=args, places=places, kwargs=dict(zip(op.kwargs, kwargs, strict=True)))


def _parts_of(part: _Part) -> Sequence[_Part]:
    if type(part) is _Fixed:
        return [_Fixed(value) for value in part.value]
    assert type(part) is _Parts
    return part.parts
