"""Making a dropped value again.

Memory follows the walk that `schedule.check_schedule` describes: ops in program order, a value freed right after its
last use in this replay, outputs nobody needs freed right after their op, an in-place op on a copy unless the value it
changes was made here and is not read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from legroom.errors import StepError
from legroom.runtime.lineage import Argument, Blank, Made, Node, RandomState, copy_of_bytes
from legroom.runtime.residency import laid_out


def replay(target: Node, also: Sequence[Node] = ()) -> list[torch.Tensor | None]:
    """The bytes of a value, made again: a tensor over its storage; and those of other values, where they are made on
    the way (None where they are not)."""
    order, outputs = _closure(target)
    for node in also:
        wanted = outputs.get(id(node.maker))
        if wanted is not None and node not in wanted:
            wanted.append(node)
    last_use: dict[int, int] = {}
    for i, made in enumerate(order):
        for node in made.inputs:
            last_use[id(node)] = i
    targets = (target, *also)
    for node in targets:
        last_use[id(node)] = len(order)
    at_hand: dict[int, torch.Tensor] = {}
    grad = torch.is_grad_enabled()
    try:
        with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
            for i, made in enumerate(order):
                torch._C._set_grad_enabled(made.grad)
                _run(made, i, outputs[id(made)], at_hand, last_use)
                for node in made.inputs:
                    if last_use[id(node)] == i:
                        at_hand.pop(id(node), None)
    finally:
        torch._C._set_grad_enabled(grad)
    return [at_hand.pop(id(node), None) for node in targets]


def replayed_ops(target: Node) -> list[str]:
    """The names of the ops that a replay of this value would run."""
    return [str(made.func) for made in _closure(target)[0]]


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
            raise StepError(
                "an activation was dropped and a value it is recomputed from is gone; this is a defect in legroom"
            )
        ops[id(made)] = made
        outputs.setdefault(id(made), []).append(node)
        for source in made.inputs:
            if id(source) not in seen:
                seen.add(id(source))
                stack.append(source)
    return sorted(ops.values(), key=lambda made: made.order), outputs


def _run(
    made: Made, position: int, wanted: list[Node], at_hand: dict[int, torch.Tensor], last_use: dict[int, int]
) -> None:
    replaced = _to_write(made, position, at_hand, last_use) if made.written else {}
    args: list[Any] = [_value(a, replaced, at_hand) if type(a) in _WITH_TENSORS else a for a in made.args]
    kwargs = {name: _value(a, replaced, at_hand) for name, a in made.kwargs.items()} if made.kwargs else {}
    written = [args[i] for i in made.written if i < len(args)]
    stateless = made.rng is None and made.threads is None
    result = made.func(*args, **kwargs) if stateless else _run_in_state(made, args, kwargs)
    del args, kwargs
    results = result if isinstance(result, (list, tuple)) else (result,)
    for node in wanted:
        if last_use.get(id(node), -1) > position:
            at_hand[id(node)] = written[-1 - node.output] if node.output < 0 else results[node.output]


def _to_write(
    made: Made, position: int, at_hand: dict[int, torch.Tensor], last_use: dict[int, int]
) -> dict[int, torch.Tensor]:
    """What an in-place op may write: a copy, unless the value was made here and is not read again."""
    replaced: dict[int, torch.Tensor] = {}
    for node in {id(n): n for n in _written_nodes(made)}.values():
        mine = at_hand.get(id(node))
        if mine is not None and last_use[id(node)] == position:
            replaced[id(node)] = mine
        else:
            source = mine if mine is not None else node.bytes_at_hand()
            assert source is not None
            replaced[id(node)] = copy_of_bytes(source)
    return replaced


_WITH_TENSORS = frozenset({Argument, Blank, list})


def _value(argument: Any, replaced: dict[int, torch.Tensor], at_hand: dict[int, torch.Tensor]) -> Any:
    """An argument with its tensors put back. Not a closure, for the reason given at `lineage._reference`."""
    if type(argument) is Argument:
        node = argument.node
        held = replaced.get(id(node))
        if held is None:
            held = at_hand.get(id(node))
        if held is None:
            held = node.bytes_at_hand()
        assert held is not None
        return laid_out(argument.layout, held)
    if type(argument) is Blank:
        return torch.zeros(argument.size, dtype=argument.dtype, device=argument.device)
    if type(argument) is list:
        return [_value(item, replaced, at_hand) for item in argument]
    return argument


def _written_nodes(made: Made) -> list[Node]:
    return [
        argument.node for i in made.written if i < len(made.args) and isinstance(argument := made.args[i], Argument)
    ]


def _run_in_state(made: Made, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """With the thread count and the generators of the first run, and no trace of it left in them."""
    threads = torch.get_num_threads()
    before: RandomState | None = None
    if made.rng is not None:
        before = made.rng.now()
        made.rng.restore()
    if made.threads is not None and threads != made.threads:
        torch.set_num_threads(made.threads)
    try:
        return made.func(*args, **kwargs)
    finally:
        if made.threads is not None and threads != made.threads:
            torch.set_num_threads(threads)
        if before is not None:
            before.restore()


def _autocast_keys() -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return keys | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


_AUTOCAST_KEYS = _autocast_keys()
