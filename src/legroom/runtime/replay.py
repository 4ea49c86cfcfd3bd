"""Making a dropped value again.

Memory follows the walk that `schedule.check_schedule` describes: ops in program order, a value freed right after its
last use in this replay, outputs nobody needs freed right after their op, an in-place op on a copy unless the value it
changes was made here and is not read again.

What to run is found by walking back from the target. A tape remembers the outcome by the numbers of the ops, so that
the next step need not walk: it runs the ops of its own step, and where one of them needs a value that is not at hand,
the walk is taken after all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import torch

from legroom.errors import StepError
from legroom.runtime.fused import FOLLOWERS, Normalised, normalised
from legroom.runtime.lineage import (
    Argument,
    Blank,
    Made,
    Node,
    Slot,
    copy_of_bytes,
    filled,
    is_uninitialised,
)
from legroom.runtime.residency import Layout, laid_out


class Action(NamedTuple):
    """One op of a replay."""

    made: Made
    wanted: tuple[int, ...]  # which of its outputs somebody needs
    last: tuple[Slot, ...]  # values of this replay that nobody needs afterwards


@dataclass(frozen=True, slots=True)
class Tape:
    """The same with numbers in place of ops."""

    rows: tuple[tuple[int, tuple[int, ...], tuple[Slot, ...]], ...]


Held = torch.Tensor | Normalised  # a value of a replay

_NOISE = 0xA5

_GONE = "an activation was dropped and a value it is recomputed from is gone; this is a defect in legroom"


class NotAtHand(Exception):
    """A tape does not fit this step."""


def replay(target: Node) -> torch.Tensor:
    """The bytes of a value, made again: a tensor over its storage."""
    (tensor,) = replay_by(actions_for(target), (target,))
    assert tensor is not None
    return tensor


def replay_by(actions: list[Action], targets: Sequence[Node], *, checked: bool = False) -> list[torch.Tensor | None]:
    """The same for several; those after the first only where they are made on the way (None where they are not)."""
    try:
        return play(actions, targets, checked=checked)
    except NotAtHand:
        raise StepError(_GONE) from None


def actions_for(target: Node, also: Sequence[Node] = ()) -> list[Action]:
    """What to run for a value, in program order, found by walking back from it."""
    order, outputs = _closure(target)
    for node in also:
        wanted = outputs.get(id(node.maker))
        if wanted is not None and node not in wanted:
            wanted.append(node)
    last_use: dict[Slot, int] = {}
    for i, made in enumerate(order):
        for node in made.inputs:
            if node.slot is not None:
                last_use[node.slot] = i
    for node in (target, *also):
        if node.slot is not None:
            last_use[node.slot] = len(order)
    last_at: list[list[Slot]] = [[] for _ in range(len(order) + 1)]
    for slot, i in last_use.items():
        last_at[i].append(slot)
    actions: list[Action] = []
    for i, made in enumerate(order):
        wanted_here = [n.output for n in outputs[id(made)] if n.slot is not None and last_use.get(n.slot, -1) > i]
        actions.append(Action(made, tuple(dict.fromkeys(wanted_here)), tuple(last_at[i])))  # twins have one slot
    return actions


def remember(actions: list[Action], first: int) -> Tape | None:
    """Of actions that are all of one step, whose ops are numbered from `first`; None where they are not."""
    rows = []
    for action in actions:
        slots = tuple((order - first, output) for order, output in action.last if order >= first)
        if action.made.order < first or len(slots) != len(action.last):
            return None
        rows.append((action.made.order - first, action.wanted, slots))
    return Tape(tuple(rows))


def recall(tape: Tape, made: Mapping[int, ref[Made]], first: int) -> list[Action] | None:
    """The ops of another step by the same numbers; None where that step does not have them."""
    actions: list[Action] = []
    for number, wanted, last in tape.rows:
        found = made.get(number)
        op = found() if found is not None else None
        if op is None:
            return None
        actions.append(Action(op, wanted, tuple([(order + first, output) for order, output in last]) if last else ()))
    return actions


def play(actions: list[Action], targets: Sequence[Node], *, checked: bool = False) -> list[torch.Tensor | None]:
    """Run them. Raises NotAtHand where the first target is not among what they make, or something is missing.

    checked: the outcome is held against the real bytes. Memory that is asked for may be the very block that held them:
    what nobody writes must not look right by that.
    """
    at_hand: dict[Slot, Held] = {}
    grad = before = torch.is_grad_enabled()
    try:
        with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
            for action in actions:
                if action.made.grad is not grad:
                    grad = action.made.grad
                    torch._C._set_grad_enabled(grad)
                _run(action, at_hand)
                if checked and is_uninitialised(action.made.func):
                    for output in action.wanted:
                        held = at_hand[action.made.order, output]
                        assert isinstance(held, torch.Tensor)
                        overwrite(held)
                for slot in action.last:
                    at_hand.pop(slot, None)
    finally:
        if grad is not before:
            torch._C._set_grad_enabled(before)
    made = [_written_out(node.slot, at_hand) for node in targets]
    if made[0] is None:
        raise NotAtHand
    return made


def overwrite(tensor: torch.Tensor) -> None:
    """All bytes behind it, with some that mean nothing."""
    torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).fill_(_NOISE)


def _written_out(slot: Slot | None, at_hand: dict[Slot, Held]) -> torch.Tensor | None:
    """A value of this replay as a tensor; it may not have been written yet."""
    held = at_hand.get(slot) if slot is not None else None
    if type(held) is Normalised:
        assert slot is not None
        held = at_hand[slot] = held.into(held.source.dtype)
    return held  # type: ignore[return-value]


def _closure(target: Node) -> tuple[list[Made], dict[int, list[Node]]]:
    """The ops to run, in program order, and the wanted outputs of each. Iterative: chains are as deep as models."""
    outputs: dict[int, list[Node]] = {}
    ops: dict[int, Made] = {}
    seen = {id(target)}
    stack = [target]
    while stack:
        node = stack.pop()
        if node is not target:
            if node.bytes_at_hand() is not None:
                continue
            entry = node.on_host()
            if entry is not None:
                entry.start_loading()
                continue
        made = node.maker
        if made is None:
            raise StepError(_GONE)
        ops[id(made)] = made
        outputs.setdefault(id(made), []).append(node)
        for source in made.inputs:
            if id(source) not in seen:
                seen.add(id(source))
                stack.append(source)
    return sorted(ops.values(), key=lambda made: made.order), outputs


def _run(action: Action, at_hand: dict[Slot, Held]) -> None:
    made = action.made
    if (made.statistics is not None or made.func in FOLLOWERS) and _run_short(action, at_hand):
        return
    replaced = _to_write(action, at_hand) if made.written else None
    if replaced is None:
        args = _arguments(made, at_hand)
        if made.form.has_statistics:
            args = [_value(argument, None, at_hand) if type(argument) is Blank else argument for argument in args]
    else:
        args = [_value(argument, replaced, at_hand) for argument in made.args]
    kwargs = made.kwargs
    if kwargs and made.pattern is None:  # else there are no tensors in it
        kwargs = {name: _value(a, replaced, at_hand) for name, a in kwargs.items()}
    written = [args[i] for i in made.written if i < len(args)] if made.written else ()
    stateless = made.rng is None and made.threads is None
    result = made.func(*args, **kwargs) if stateless else _run_in_state(made, args, kwargs)
    del args, kwargs
    results = result if isinstance(result, (list, tuple)) else (result,)
    for output in action.wanted:
        at_hand[made.order, output] = written[-1 - output] if output < 0 else results[output]


def _arguments(made: Made, at_hand: dict[Slot, Held]) -> list[Any]:
    """Of an op that writes none of them; statistics whose bytes do not matter are left as they are."""
    pattern = made.pattern
    if pattern is None:
        return [_value(value, None, at_hand) if type(value) in _WITH_TENSORS else value for value in made.args]
    tensors: list[torch.Tensor] = []
    for (_, _, _, layout), node in zip(pattern.places, made.inputs, strict=True):
        held = at_hand.get(node.slot) if node.slot is not None else None
        if held is None:
            held = node.bytes_at_hand()
            if held is None:
                raise NotAtHand
        elif type(held) is Normalised:
            held = _written_out(node.slot, at_hand)
        tensors.append(_laid_out(layout, held))  # type: ignore[arg-type]
    return filled(pattern, tensors)


def _run_short(action: Action, at_hand: dict[Slot, Held]) -> bool:
    """Whether it could be done without the op: a normalisation waits for what follows, which runs in the same pass."""
    made = action.made
    if made.statistics is not None:
        if action.wanted != (0,):
            return False
        if not made.statistics.unchanged():
            return False
        value = normalised(made.func, _arguments(made, at_hand), made.statistics.mean, made.statistics.scale)
        if value is None:
            return False
        at_hand[made.order, 0] = value
        return True
    if len(action.wanted) != 1:
        return False
    node = made.inputs[0]  # it has no other
    held = at_hand.get(node.slot) if node.slot is not None else None
    if type(held) is not Normalised:
        return False
    layout = made.pattern.places[0][3] if made.pattern is not None else made.args[0].layout
    if not _lies_as(layout, held.source):
        return False
    if made.written and node.slot not in action.last:
        return False  # it is read again as it was
    result = held.after(made.func, made.kwargs)
    if result is None:
        return False
    at_hand[made.order, action.wanted[0]] = result
    return True


def _lies_as(layout: Layout, tensor: torch.Tensor) -> bool:
    dtype, size, stride, offset, conj, neg = layout
    same = dtype is tensor.dtype and size == tensor.size() and stride == tensor.stride()
    return same and offset == 0 and not conj and not neg


def _to_write(action: Action, at_hand: dict[Slot, Held]) -> dict[int, torch.Tensor]:
    """What an in-place op may write: a copy, unless the value was made here and is not read again."""
    replaced: dict[int, torch.Tensor] = {}
    for node in {id(n): n for n in _written_nodes(action.made)}.values():
        mine = _written_out(node.slot, at_hand)
        if mine is not None and node.slot in action.last:
            for slot in [slot for slot, held in at_hand.items() if type(held) is Normalised and held.reads(mine)]:
                _written_out(slot, at_hand)  # while its source is what it was
            replaced[id(node)] = mine
        else:
            source = mine if mine is not None else node.bytes_at_hand()
            if source is None:
                raise NotAtHand
            replaced[id(node)] = copy_of_bytes(source)
    return replaced


_WITH_TENSORS = frozenset({Argument, list})


def _value(argument: Any, replaced: dict[int, torch.Tensor] | None, at_hand: dict[Slot, Held]) -> Any:
    """An argument with its tensors put back. Not a closure, for the reason given at `lineage._reference`."""
    if type(argument) is Argument:
        node = argument.node
        held = replaced.get(id(node)) if replaced is not None else None
        if held is None and node.slot is not None:
            held = _written_out(node.slot, at_hand)
        if held is None:
            held = node.bytes_at_hand()
        if held is None:
            raise NotAtHand
        return _laid_out(argument.layout, held)
    if type(argument) is Blank:
        return torch.empty(argument.size, dtype=argument.dtype, device=argument.device)
    if type(argument) is list:
        return [_value(item, replaced, at_hand) for item in argument]
    return argument


def _laid_out(layout: Layout, held: torch.Tensor) -> torch.Tensor:
    """As `residency.laid_out`, by one op in place of two; below autograd a view does not share its base's version."""
    dtype, size, stride, offset, conj, neg = layout
    if held.dtype is dtype and not (conj or neg or dtype.is_complex or held.is_neg()):
        if held.size() == size and held.stride() == stride and held.storage_offset() == offset:
            return held
        return held.as_strided(size, stride, offset)
    return laid_out(layout, held)


def _written_nodes(made: Made) -> list[Node]:
    return [
        argument.node for i in made.written if i < len(made.args) and isinstance(argument := made.args[i], Argument)
    ]


def _run_in_state(made: Made, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """With the thread count and the generators of the first run, and no trace of it left in them."""
    threads = torch.get_num_threads()
    rng = made.rng
    before = rng.enter() if rng is not None else None
    if made.threads is not None and threads != made.threads:
        torch.set_num_threads(made.threads)
    try:
        return made.func(*args, **kwargs)
    finally:
        if made.threads is not None and threads != made.threads:
            torch.set_num_threads(threads)
        if rng is not None and before is not None:
            rng.leave(before)


def _autocast_keys() -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return keys | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


_AUTOCAST_KEYS = _autocast_keys()
