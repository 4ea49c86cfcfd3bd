"""An optimizer's state, moved close together.

It is made in the first step, wherever there was room between what that step had saved. There it stays, one tensor here
and one there, and the allocator can give back only pages of which nothing is used: of a capped budget, all that lies
between is lost to requests that are larger than the holes. Of a T5-base on an H200 these were 615 MiB beside 2,615 in
use. So the state is moved, between two steps and as soon as it is there, to pages of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._C import DisableTorchFunction as no_counting
from torch._C import _DisableTorchDispatch as no_dispatch

from legroom.arrange import LARGE_BYTES
from legroom.runtime.device import Device
from legroom.runtime.residency import is_sole_owner, saved_elsewhere

_LEAST_LOST_BYTES = 32 * 2**20  # fewer are not worth the copies


def draw_together(device: Device, optimizer: torch.optim.Optimizer) -> int:
    """How many bytes were moved. The tensors stay the same objects; only their memory is another."""
    if any(group.get("capturable") for group in optimizer.param_groups):
        return 0  # a captured graph knows its state by address
    device.drain()  # the state may have been written on another stream
    device.merge_free()
    holes = sorted((piece.nbytes for piece in device.free_pieces() if piece.nbytes > LARGE_BYTES), reverse=True)
    if sum(holes) < _LEAST_LOST_BYTES:
        return 0
    moved = 0
    held: list[torch.Tensor] = []
    with torch.no_grad(), no_counting(), no_dispatch():
        try:
            # The largest first: each then goes into the hole that it was measured by.
            held += [device.allocate(nbytes) for nbytes in holes]
            for tensor in sorted(_movable(device, optimizer), key=_nbytes, reverse=True):
                place = device.allocate(_nbytes(tensor))
                held.append(_bytes_of(tensor))  # what it leaves is no place for the others
                place.copy_(held[-1])
                tensor.set_(place.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]
                moved += place.nbytes
        except torch.OutOfMemoryError:
            pass  # what was moved until then is
        held.clear()
    device.merge_free()
    return moved


def _movable(device: Device, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Plain tensors whose memory nobody else refers to. Smaller ones have pages of their own."""
    for state in optimizer.state.values():
        for value in state.values() if isinstance(state, dict) else ():
            if type(value) is not torch.Tensor or saved_elsewhere(value) or value.requires_grad:
                continue
            if value.device.type == device.name and _nbytes(value) > LARGE_BYTES and is_sole_owner(value):
                yield value


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
