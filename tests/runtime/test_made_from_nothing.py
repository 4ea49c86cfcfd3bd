"""Values that begin with an op that reads nothing, noise for example, and are written in place later on."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import Tensor, nn

import legroom
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.plan import Decision, Keep, Plan, Recompute, Swap, signature
from legroom.planners import Planner
from tests.runtime.test_random_plans import admit

WIDTH = 128


class Noisy(nn.Module):
    """Four functions of noise are used, then the noise is changed in place and used itself."""

    def __init__(self, *, held: bool) -> None:
        super().__init__()
        self.held = held  # whether Python holds what was made from the noise until it has changed
        self.weights = nn.ParameterList([nn.Parameter(torch.full((WIDTH, WIDTH), 0.5)) for _ in range(5)])

    def forward(self) -> tuple[Tensor, Tensor]:
        noise = torch.randn(WIDTH, WIDTH)
        made = []
        total = torch.zeros(())
        for function, weight in zip((torch.exp, torch.sin, torch.cos, torch.tanh), self.weights, strict=False):
            value = function(noise)
            if self.held:
                made.append(value)
            total = total + (value * weight).sum()
        noise.mul_(2)
        last = (noise * self.weights[4]).sum()
        return total, last


def planner(other: Decision) -> Planner:
    """Recompute what was made from the noise; `other` for the noise itself."""

    def plan(trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        packed = [t.storage for t in trace.ticks if t.kind == "pack" and trace.storages[t.storage].gaps]
        rest = Plan(tuple(other for _ in trace.gaps), signature(trace), "forced", budget_bytes, 0, 0.0, ())
        recomputed = {i: Recompute() for i, gap in enumerate(trace.gaps) if gap.storage != packed[-1]}
        return admit(trace, rest, hardware, recomputed)

    return plan


def gradients(model: Noisy, room: legroom.Room | None, *, twice: bool) -> list[Tensor]:
    found = []
    for step in range(6):
        torch.manual_seed(step)
        with room.step() if room is not None else contextlib.nullcontext():
            total, last = model()
            if twice:
                total.backward()  # while the noise is still saved
                last.backward()
            else:
                (total + last).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            found.append(parameter.grad)
            parameter.grad = None
    return found


@pytest.mark.parametrize("twice", [True, False], ids=["two backwards", "one backward"])
@pytest.mark.parametrize("held", [True, False], ids=["held", "let go"])
@pytest.mark.parametrize("other", [Keep(), Swap("sync")], ids=["kept", "swapped"])
def test_a_write_to_it_is_seen(other: Decision, held: bool, twice: bool) -> None:
    model = Noisy(held=held)
    plain = gradients(copy.deepcopy(model), None, twice=twice)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with legroom.fit(model, optimizer, budget="1GiB", planner=planner(other)) as room:
        taken = gradients(model, room, twice=twice)
        report = room.report()
    assert all(torch.equal(a, b) for a, b in zip(plain, taken, strict=True))
    assert report.planned_steps >= 3 and report.bytes_recomputed > 0 and not report.fallbacks
