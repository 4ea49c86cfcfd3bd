"""The allocator's history of a recorded step: what it tells of blocks agrees with what the counters say."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

import legroom
from legroom.arrange import requests
from legroom.plan import signature
from legroom.runtime.hashing import prepare_digests
from legroom.schedule import Schedule
from tests.gpu.test_steps import MIB, Net, batch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _nothing_left_over() -> Iterator[None]:
    prepare_digests(torch.device("cuda", torch.cuda.current_device()))
    gc.collect()
    yield
    torch.cuda.memory._record_memory_history(None)


def trained(steps: int) -> legroom.Room:
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with legroom.fit(model, optimizer, budget="4GiB") as room:
        for step in range(steps):
            x, y = batch(step)
            with room.step():
                F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
    return room


def test_blocks_add_up_to_what_the_counters_say() -> None:
    trace = trained(6).trace
    assert trace is not None and trace.requests
    assert not torch._C._cuda_isHistoryEnabled()
    levels = []
    live: dict[int, int] = {}
    level = 0
    for key, nbytes in requests(trace, Schedule((), signature(trace))):
        if nbytes < 0:
            levels.append(level)
        else:
            level += nbytes - live.pop(key, 0)
            live[key] = nbytes
    off = [tick.level_bytes - level for tick, level in zip(trace.ticks, levels, strict=True)]
    assert max(levels) > 32 * MIB
    # What was there before the step goes at some point of it, and libraries keep a workspace that they have asked for.
    assert max(off) - min(off) <= MIB, off


def test_somebody_elses_history_is_left_alone() -> None:
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python")
    room = trained(3)
    assert room.trace is not None and room.trace.requests == ()
    assert torch._C._cuda_isHistoryEnabled()
    assert torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
