"""An op of which one output repeats and another does not: the one that does can be recomputed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import legroom
from tests.runtime.test_random_plans import random_planner


@pytest.fixture(scope="module")
def half_op() -> Iterator[torch._ops.OpOverload]:
    """(x * 2, other bytes every time), as attention kernels that leave their random state unwritten."""
    counter = itertools.count()
    library = torch.library.Library("aten", "FRAGMENT")
    library.define("legroom_half_repeats(Tensor x) -> (Tensor, Tensor)")
    library.impl("legroom_half_repeats", lambda x: (x * 2, torch.full((64,), next(counter))), "CPU")
    yield torch.ops.aten.legroom_half_repeats.default
    library._destroy()


class Net(nn.Module):
    def __init__(self, op: torch._ops.OpOverload) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8192))
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        twice, _ = self.op(x)
        return (twice * self.weight).sin().sum()


def train(op: torch._ops.OpOverload, planned: bool) -> tuple[list[Tensor], legroom.Room | None]:
    net = Net(op)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    planner = random_planner((0, 0, 1, 0), 0)
    room = legroom.fit(net, optimizer, budget="64MiB", planner=planner) if planned else None
    out = []
    for step in range(5):
        x = torch.linspace(0, 1 + step, 8192)

        def work(x: Tensor = x) -> Tensor:
            loss = net(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        if room is None:
            out.append(work())
        else:
            with room.step():
                out.append(work())
    return [*out, net.weight.detach()], room


def test_the_output_that_repeats_is_recomputed(half_op: torch._ops.OpOverload) -> None:
    plain, _ = train(half_op, False)
    taken, room = train(half_op, True)
    assert room is not None and room.trace is not None
    with room:
        assert all(torch.equal(a, b) for a, b in zip(plain, taken, strict=True))
        ops = {op.name: op for op in room.trace.ops}
        half, rest = ops["aten.legroom_half_repeats.default"], ops["legroom.unrepeated"]
        assert half.why_not == "" and len(half.writes) == 1
        assert rest.why_not == "two runs gave different bits" and len(rest.writes) == 1
        assert room.report().bytes_recomputed >= 8192 * 4
        program = room._standing.program
        assert program is not None
        assert "aten.legroom_half_repeats.default" in map(str, program.recorded.values())
