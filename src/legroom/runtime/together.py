"""An optimizer's state, moved close together.

It is made in the first step, wherever there was room between what that step had saved. There it stays, one tensor here
and one there, and the allocator can give back only pages of which nothing is used: of a capped budget, all that lies
between is lost to requests that are larger than the holes. So the state is moved, between two steps and as soon as it
is there: each tensor into the smallest hole that it fits into, where that lies below the place that it has.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._C import DisableTorchFunction as no_counting
from torch._C import _DisableTorchDispatch as no_dispatch

from legroom.arrange import LARGE_BYTES
from legroom.runtime.device import Device
from legroom.runtime.residency import is_sole_owner, saved_elsewhere


def draw_together(device: Device, optimizer: torch.optim.Optimizer) -> int:
    """How many bytes were moved. The tensors stay the same objects; only their memory is another."""
    if any(group.get("capturable") for group in optimizer.param_groups):
        return 0  # a captured graph knows its state by address
    device.drain()  # the state may have been written on another stream
    device.merge_free()
    moved = 0
    with torch.no_grad(), no_counting(), no_dispatch():
        for tensor in sorted(_movable(device, optimizer), key=torch.Tensor.data_ptr, reverse=True):
            try:
                place = device.allocate(tensor.untyped_storage().nbytes())
            except torch.OutOfMemoryError:
                break
            if _is_below(place, tensor):
                _move(tensor, place)
                moved += place.nbytes
    if moved:
        device.merge_free()
    return moved


def _movable(device: Device, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Plain tensors whose memory nobody else refers to. Smaller ones have pages of their own."""
    for state in optimizer.state.values():
        for value in state.values() if isinstance(state, dict) else ():
            if type(value) is not torch.Tensor or saved_elsewhere(value) or value.requires_grad:
                continue
            if value.device.type == device.name and value.nbytes > LARGE_BYTES and is_sole_owner(value):
                yield value


def _is_below(place: torch.Tensor, tensor: torch.Tensor) -> bool:
    return place.data_ptr() < tensor.data_ptr()


def _move(tensor: torch.Tensor, place: torch.Tensor) -> None:
    layout = tensor.storage_offset(), tensor.size(), tensor.stride()
    place.copy_(torch.empty(0, dtype=torch.uint8, device=place.device).set_(tensor.untyped_storage()))
    tensor.set_(place.untyped_storage(), *layout)  # type: ignore[call-overload]
