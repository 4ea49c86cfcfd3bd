"""Saved tensors that have the very bytes of others.

Under autocast every linear layer casts its input for itself: the queries, keys and values of an attention save three
copies of one tensor. A plan takes the later ones for made from the first, at no cost. Here such a copy is dropped: its
handles go over to the entry of the first, and its own bytes are free for good.

It is done only where the step itself shows that it may be: both were made by the same op, with the same arguments, from
one value that nothing has written in between; and nothing but their handles refers to either, so that neither can be
written from now on.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from legroom.errors import StepError
from legroom.runtime.again import NOT_USED, Again
from legroom.runtime.checking import Checks, refusal
from legroom.runtime.device import HostCopy
from legroom.runtime.lineage import Argument, Lineage, Made, Node
from legroom.runtime.plannedops import PlannedOps
from legroom.runtime.program import Twin
from legroom.runtime.residency import Entry, Layout, saved_by_python


class Owed(NamedTuple):
    """A comparison that waits until the bytes of the first one are back."""

    number: int  # the storage whose check has begun
    funcs: frozenset[Any]  # what made both
    proves: bool  # something about other steps


class Twins:
    """Those of one planned step."""

    def __init__(
        self,
        lineage: Lineage,
        ops: PlannedOps,
        checks: Checks,
        again: Again,
        entries: dict[int, Entry],
        to_check: frozenset[int],
        fallbacks: Counter[str],
    ) -> None:
        """entries: of this step, by storage. to_check: storages."""
        self._lineage, self._ops, self._checks, self._again = lineage, ops, checks, again
        self._entries, self._to_check, self._fallbacks = entries, to_check, fallbacks
        self.owed: dict[Entry, list[Owed]] = {}  # of what has joined these while they were away
        self._wrong: dict[Entry, str] = {}  # those with other bytes than what has joined them
        self._exposed: set[int] = set()  # storages that a function in Python has saved

    def saved(self, number: int) -> None:
        """One of them, or the first of some, is being saved."""
        if saved_by_python():
            self._exposed.add(number)

    def drop(self, entry: Entry, twin: Twin) -> None:
        """One that nothing else refers to: it joins the first, or goes to the host where it may not."""
        first = self._entries.get(twin.first)
        exposed = not self._exposed.isdisjoint((entry.number, twin.first))
        if first is not None and first.views and not exposed and self._may_join(entry, first):
            node = entry.node
            assert node is not None and first.node is not None
            self._entries[entry.number] = first
            entry.join(first)
            node.follow(first.node)
            if not twin.made_again:
                self._lineage.forget_origin(node)
        else:
            if entry.host is None:
                self._fallbacks["swapped instead of recomputed"] += 1
                entry.start_saving()
            entry.release()
            if entry.node is not None:
                self._lineage.forget_origin(entry.node)
        if twin.last and not twin.made_again and first is not None and first.node is not None:
            self._lineage.forget_origin(first.node)

    def _may_join(self, entry: Entry, first: Entry) -> bool:
        self._ops.trace_back(entry)
        if entry.node is None or first.node is None or not same_value(entry.node, first.node):
            return False
        if first.in_memory and not first.exclusive():
            return False
        number = entry.number
        if number not in self._to_check:
            return True
        if not self._checks.begin(number, entry.flat()):
            return False
        makers = [made for made in (entry.node.maker, first.node.maker) if made is not None]
        owed = Owed(number, frozenset(made.func for made in makers), self._again.proves(makers))
        if not first.in_memory:
            self.owed.setdefault(first, []).append(owed)
            return True
        entry.host = self._compare(owed, first)
        return entry.host is None

    def pay(self, first: Entry) -> None:
        """Its bytes are back: compare what has joined it. A replay may have read them for those by now, so it is too
        late to go on with others; and whoever asks again is told again."""
        first.finish_loading()
        debts = self.owed[first]
        while debts and first not in self._wrong:
            try:
                real = self._compare(debts[0], first)
            except StepError as error:  # found out after the step
                self._wrong[first] = str(error)
                break
            if real is not None:
                real.drop()
                self._wrong[first] = refusal(sorted(map(str, debts[0].funcs)), optimizer_began=False)
                break
            debts.pop(0)
        if debts:
            raise StepError(self._wrong[first])
        del self.owed[first]

    def _compare(self, owed: Owed, first: Entry) -> HostCopy | None:
        """Where it is known that the bytes are not the same: the real ones."""
        real = self._checks.end(owed.number, first.flat(), owed.funcs, proves=owed.proves)
        if real is not None:
            self._fallbacks[NOT_USED] += 1
        return real


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
