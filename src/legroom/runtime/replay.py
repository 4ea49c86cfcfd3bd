"""Making a dropped value again.

Memory follows the walk that `schedule.check_schedule` describes: ops in program order, a value freed right after its
last use in this replay, outputs nobody needs freed right after their op, an in-place op on a copy unless the value it
changes was made here and is not read again.
"""

from __future__ import annotations

from typing import Any

import torch

from legroom.errors import StepError
from legroom.runtime.lineage import Argument, Blank, Made, Node, RandomState, copy_of_bytes


def replay(target: Node) -> torch.Tensor:
    """The bytes of a value, made again; a flat tensor over its storage."""
    order, outputs = _closure(target)
    last_use: dict[int, int] = {}
    for i, made in enumerate(order):
        for node in made.inputs:
            last_use[id(node)] = i
    last_use[id(target)] = len(order)
    at_hand: dict[int, torch.Tensor] = {}
    for i, made in enumerate(order):
        _run(made, i, outputs[id(made)], at_hand, last_use)
        for node in made.inputs:
            if last_use[id(node)] == i:
                at_hand.pop(id(node), None)
    tensor = at_hand.pop(id(target))
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


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
    replaced: dict[int, torch.Tensor] = {}
    if made.written:
        for node in {id(n): n for n in _written_nodes(made)}.values():
            mine = at_hand.get(id(node))
            if mine is not None and last_use[id(node)] == position:
                replaced[id(node)] = mine
            else:
                source = mine if mine is not None else node.bytes_at_hand()
                assert source is not None
                replaced[id(node)] = copy_of_bytes(source)

    args = [_value(argument, replaced, at_hand) for argument in made.args]
    kwargs = {name: _value(argument, replaced, at_hand) for name, argument in made.kwargs.items()}
    written = [args[i] for i in made.written if i < len(args)]
    result = run_as_recorded(made, args, kwargs)
    del args, kwargs
    results = result if isinstance(result, (list, tuple)) else (result,)
    for node in wanted:
        if last_use.get(id(node), -1) > position:
            at_hand[id(node)] = written[-1 - node.output] if node.output < 0 else results[node.output]


def _value(argument: Any, replaced: dict[int, torch.Tensor], at_hand: dict[int, torch.Tensor]) -> Any:
    """An argument with its tensors put back. Not a closure, for the reason given at `lineage._reference`."""
    if isinstance(argument, Argument):
        node = argument.node
        for place in (replaced, at_hand):
            if id(node) in place:
                return argument.layout.over(place[id(node)])
        held = node.bytes_at_hand()
        assert held is not None
        return argument.layout.over(held)
    if isinstance(argument, Blank):
        return torch.zeros(argument.size, dtype=argument.dtype, device=argument.device)
    if isinstance(argument, list):
        return [_value(item, replaced, at_hand) for item in argument]
    return argument


def _written_nodes(made: Made) -> list[Node]:
    return [
        argument.node for i in made.written if i < len(made.args) and isinstance(argument := made.args[i], Argument)
    ]


def run_as_recorded(made: Made, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run one op below autograd and autocast, as it ran the first time, and leave no trace in the generators."""
    threads = torch.get_num_threads()
    before: RandomState | None = None
    if made.rng is not None:
        before = made.rng.now()
        made.rng.restore()
    if threads != made.threads:
        torch.set_num_threads(made.threads)
    grad = torch.is_grad_enabled()
    torch._C._set_grad_enabled(made.grad)
    try:
        with torch._C._AutoDispatchBelowAutograd(), _without_autocast():
            return made.func(*args, **kwargs)
    finally:
        torch._C._set_grad_enabled(grad)
        if threads != made.threads:
            torch.set_num_threads(threads)
        if before is not None:
            before.restore()


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS)


def _autocast_keys() -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return keys | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


_AUTOCAST_KEYS = _autocast_keys()
