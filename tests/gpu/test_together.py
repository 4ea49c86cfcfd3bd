"""An optimizer's state that was made between activations is moved close together, on CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from legroom.runtime.cuda import CudaDevice
from legroom.runtime.together import draw_together

pytestmark = pytest.mark.gpu

MIB = 2**20


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


def lost_bytes() -> int:
    """What no request can have, though nothing of it is used."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def test_pages_become_free_and_the_bits_stay(tmp_path: Path) -> None:
    device = CudaDevice(0, host_budget_bytes=256 * MIB, spill_dir=str(tmp_path))
    try:
        torch.cuda.empty_cache()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(1100, 1100) for _ in range(40))).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        model(torch.randn(64, 1100, device="cuda")).square().mean().backward()
        optimizer.step()
        # Where a step leaves it that has other things to hold beside it.
        between = []
        for state in optimizer.state.values():
            for name, value in state.items():
                if value.nbytes > MIB:
                    between += [torch.empty(13 * MIB, dtype=torch.uint8, device="cuda"), value]
                    state[name] = value.clone()
        del between, state, value
        optimizer.zero_grad()
        before = lost_bytes()
        bits = [value.cpu() for value in state_of(optimizer)]
        objects = state_of(optimizer)

        moved = draw_together(device, optimizer)

        after = lost_bytes()
        assert before > 4 * after and moved > 0, (before, after, moved)
        assert all(a is b for a, b in zip(state_of(optimizer), objects, strict=True))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(objects, bits, strict=True))
    finally:
        device.close()
