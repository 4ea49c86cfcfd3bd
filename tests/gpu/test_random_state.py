"""Generators of a GPU are set back for a replay, and go on as if nothing had happened."""

from __future__ import annotations

import pytest
import torch

from legroom.runtime.lineage import RandomState

pytestmark = pytest.mark.gpu


def drawn(generator: torch.Generator | None = None) -> list[float]:
    return torch.rand(64, device="cuda", generator=generator).tolist()


@pytest.mark.parametrize("kind", ["default", "own", "device"])
def test_it_draws_the_same_as_often_as_it_is_entered(kind: str) -> None:
    torch.cuda.manual_seed(3)
    own = torch.Generator("cuda").manual_seed(5) if kind == "own" else None
    drawn(own)
    state = RandomState.of_device(torch.device("cuda")) if kind == "device" else RandomState(own)
    first, second = drawn(own), drawn(own)
    state.restore()
    for _ in range(3):
        before = state.enter()
        assert drawn(own) == first and drawn(own) == second
        state.leave(before)
    assert drawn(own) == first
    before = state.enter()
    state.leave(before)
    assert drawn(own) == second


def test_a_captured_graph_goes_on() -> None:
    def sums(*, entered: bool) -> list[float]:
        torch.cuda.manual_seed(7)
        graph, out = torch.cuda.CUDAGraph(), torch.zeros(64, device="cuda")
        with torch.cuda.graph(graph):
            out.copy_(torch.rand(64, device="cuda"))
        found = []
        for _ in range(4):
            graph.replay()
            found.append(out.sum().item())
            if entered:
                state = RandomState.of_device(out.device)
                before = state.enter()
                drawn()
                state.leave(before)
        return found

    plain = sums(entered=False)
    assert len(set(plain)) == 4
    assert sums(entered=True) == plain
