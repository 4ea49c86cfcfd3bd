"""What ops take is read from both sheltered steps: one of them may have been slow."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import legroom
import legroom.room
from legroom.assembling import less


def test_the_less_of_two_steps_counts() -> None:
    a, b, c = ("aten.mm", "[2, 2]"), ("aten.mm", "[4, 4]"), ("aten.add", "[2]")
    assert less({a: 2.0, b: 3.0}, {a: 1.0, c: 0.0}) == {a: 1.0, b: 3.0}
    assert less({a: 1.0}, {a: 2.0}) == {a: 1.0}


@pytest.mark.parametrize("slow_step", [0, 1])
def test_a_slow_step_does_not_make_ops_slow(slow_step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = legroom.assembling.op_seconds
    taken: list[float] = []

    def timed(recorder: legroom.assembling.Recorder, curve: legroom.assembling.Curve) -> dict[tuple[str, str], float]:
        factor = 1000.0 if min(1, len(taken)) == slow_step else 1.0
        taken.append(sum(op.seconds for op in curve.ops))
        return {key: seconds * factor for key, seconds in real(recorder, curve).items()}

    monkeypatch.setattr(legroom.room, "op_seconds", timed)
    monkeypatch.setattr(legroom.assembling, "op_seconds", timed)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step() -> None:
        net(torch.randn(256, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = legroom.capture(step, model=net, optimizer=optimizer)
    assert len(taken) >= 2 and min(taken) > 0.0
    assert sum(op.seconds for op in trace.ops) < 10 * max(taken)
