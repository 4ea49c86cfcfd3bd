"""The allocator's history of a recorded step: what it tells of blocks agrees with what the counters say."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

import legroom
from legroom.plan import signature
from legroom.requested import requests
from legroom.runtime.hashing import prepare_digests
from legroom.schedule import Replay, Schedule
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


class Norms(torch.nn.Module):
    """Normalisations with what may run in one pass with them, and something that swaps and replays reach into."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, 64, 3, padding=1)
        self.convolutions = torch.nn.ModuleList(torch.nn.Conv2d(64, 64, 3, padding=1) for _ in range(6))
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(64) for _ in range(6))
        self.head = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.relu(norm(convolution(x)))
        return self.head(F.max_pool2d(x, 2).mean((2, 3)))


def large_requests(history: list[dict[str, int]]) -> list[int]:
    """Sizes of what is asked for; negative where it goes."""
    live: dict[int, int] = {}
    found = []
    for entry in history:
        if entry["action"] == "alloc" and entry["size"] > MIB:
            live[entry["addr"]] = -(-entry["size"] // 512) * 512
            found.append(live[entry["addr"]])
        elif entry["action"] == "free_completed" and entry["addr"] in live:
            found.append(-live.pop(entry["addr"]))
    return found


class Attentions(torch.nn.Module):
    """Queries, keys and values that autocast makes from copies of their own, which have the same bytes."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(4))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(16))
        self.first, self.head = torch.nn.Linear(48, width), torch.nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.flatten(2).transpose(1, 2).reshape(x.shape[0], -1, 48))
        for number, norm in enumerate(self.norms):
            q, k, v, out = self.layers[4 * number : 4 * number + 4]
            h = norm(x)
            parts = [part(h).unflatten(-1, (8, 64)).transpose(1, 2) for part in (q, k, v)]
            x = x + out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        return self.head(x.mean(1))


@pytest.mark.parametrize(
    ("make", "share"), [*((Norms, share) for share in (0.35, 0.55, 0.75)), (Attentions, 0.35), (Attentions, 0.55)]
)
def test_a_planned_step_asks_for_what_was_foretold(make: type[torch.nn.Module], share: float) -> None:
    torch.manual_seed(0)
    model = make().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(64, 3, 64, 64, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(10, (64,), device="cuda")

    def work() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = legroom.capture(work, model=model, optimizer=optimizer)
    floor = legroom.floor_bytes(trace)
    budget = int(floor + share * (trace.peak_bytes - floor)) + 160 * MIB  # some is kept free under a cap
    with legroom.fit(model, optimizer, budget=budget) as room:
        for _ in range(24):
            with room.step():
                work()
        standing = room._standing
        assert room.trace is not None and room.trace.requests and standing._found is not None
        torch.cuda.synchronize()
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python")
        with room.step():
            work()
        torch.cuda.synchronize()
        history = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        torch.cuda.memory._record_memory_history(None)
        found = standing._found
    foretold: list[int] = []
    live: dict[int, int] = {}
    for key, nbytes in requests(room.trace, found.schedule):
        if nbytes < 0:
            foretold += [-spacer.nbytes for spacer in found.spacers or () if spacer.until == key]
            foretold += [spacer.nbytes for spacer in found.spacers or () if spacer.tick == key]
        elif nbytes > MIB:
            live[key] = nbytes
            foretold.append(nbytes)
        elif nbytes == 0 and key in live:
            foretold.append(-live.pop(key))
    replays = [i for i in found.schedule.instructions if isinstance(i, Replay)]
    assert replays and (make is Norms or any(room.trace.ops[op].twin for i in replays for op in i.ops))
    assert large_requests(history) == foretold
