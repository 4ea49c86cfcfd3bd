"""Saved tensors that have the very bytes of others.

Under autocast every linear layer casts its input for itself: the queries, keys and values of an attention save three
copies of one tensor. A plan takes the later ones for made from the first, at no cost. Here such a copy is dropped: its
handles go over to the entry of the first, and its own bytes are free for good.

It is done only where the step itself shows that it may be: both were made by the same op, with the same arguments, from
one value that nothing has written in between; and nothing but their handles refers to either, so that neither can be
written from now on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from legroom.runtime.lineage import Argument, Made, Node
from legroom.runtime.residency import Entry, Layout


class Owed(NamedTuple):
    """A comparison that waits until the bytes of the first one are back."""

    number: int  # the storage whose check has begun
    funcs: frozenset[Any]  # what made both
    proves: bool  # something about other steps


def same_value(one: Node, other: Node) -> bool:
    """Whether two values are known to have the same bytes: made in the same way from a single value."""
    a, b = one.maker, other.maker
    if a is None or b is None or a.func is not b.func or one.output != other.output:
        return False
    if len(a.inputs) != 1 or len(b.inputs) != 1 or a.inputs[0] is not b.inputs[0]:
        return False
    if a.written or b.written or a.rng is not None or b.rng is not None:
        return False
    layout = _only_layout(a)
    return layout is not None and layout == _only_layout(b) and a.kwargs == b.kwargs


def _only_layout(made: Made) -> Layout | None:
    """How the tensor lies that is the only argument by place."""
    if made.pattern is not None:
        return made.pattern.places[0][3] if len(made.pattern.args) == 1 else None
    argument = made.args[0] if len(made.args) == 1 else None
    return argument.layout if type(argument) is Argument else None


def join(entry: Entry, first: Entry) -> None:
    """Drop an entry whose bytes another one has."""
    node, kept = entry.node, first.node
    assert node is not None and kept is not None
    entry.join(first)
    node.follow(kept)
