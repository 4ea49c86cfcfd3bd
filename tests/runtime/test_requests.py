"""What a trace says a step asks of the allocator, block by block, against what it says the level was: to the byte."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import legroom
from legroom.alloclog import GONE, OP, OWN, TICK, Block, Enter, Event, Leave, ProfilerLog
from legroom.arrange import Piece, find_spacers, small_bytes
from legroom.blocks import _written_in_place, requests_of
from legroom.curve import Curve, Move, RunOp, Segment, read_curve
from legroom.errors import TraceError
from legroom.evaluate import floor_bytes
from legroom.hardware import PRESETS
from legroom.ir import Trace, validate
from legroom.plan import signature
from legroom.planners import PLANNERS
from legroom.requested import requests
from legroom.schedule import Schedule, lower, memory_curve
from legroom.sizes import numbers_of, with_numbers
from legroom.traceio import from_json, to_json
from tests.pure.test_arrange import fits, scaled
from tests.runtime.test_random_plans import MIXTURES, random_planner
from tests.zoo import ZOO

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")]

CPU = PRESETS["cpu"]
MODELS = (
    "mlp", "gpt_manual", "cnn", "unet", "densenet", "lstm", "hf_bert", "custom_function", "inplace_views",
    "accumulation", "retain_graph", "checkpoint", "moe", "hidden_write", "complex_values",
)  # fmt: skip


def captured(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Trace:
    gc.collect()
    return legroom.capture(step, model=model, optimizer=optimizer)


@lru_cache(maxsize=len(MODELS))
def trace_of(name: str) -> Trace:
    case = ZOO[name]()
    model, optimizer = case.build()
    return captured(model, optimizer, lambda: case.step(model, optimizer, case.batch(0)))


def check(trace: Trace, schedule: Schedule) -> None:
    """The requests move as the memory curve does: up to what was alive before the step, which nobody asks for."""
    assert trace.requests
    in_place = _written_in_place(trace)
    curve = memory_curve(trace, schedule)
    levels, peaks = [], []
    live: dict[int, int] = {}
    level = peak = 0
    for key, nbytes in requests(trace, schedule):
        if nbytes < 0:
            levels.append(level)
            peaks.append(peak)
            peak = 0  # from the next request on: what is released here may go first
        elif nbytes > 0:
            assert key not in live, f"{key} is asked for twice"
            live[key] = nbytes
            level += nbytes
            peak = max(peak, level)
        else:
            level -= live.pop(key, 0)
    peaks.append(peak)
    base = trace.ticks[0].level_bytes - levels[0]
    absent = [0, *(tick.level_bytes - now for tick, (_, now, _) in zip(trace.ticks, curve, strict=True))]
    for number, tick in enumerate(trace.ticks):
        assert base + levels[number] == tick.level_bytes - absent[number], f"before tick {number}"
        _, after, most = curve[number]
        peak = max(after, base + peaks[number + 1])
        # What is added in place in a step that nobody looks at takes a tensor less than was recorded.
        assert peak == most or (in_place and peak < most), f"after tick {number}"


@pytest.mark.parametrize("name", MODELS)
def test_requests_follow_the_curve(name: str) -> None:
    trace = trace_of(name)
    check(trace, Schedule((), signature(trace)))


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("name", MODELS)
def test_requests_follow_the_curve_of_a_plan(name: str, mixture: str) -> None:
    trace = trace_of(name)
    plan = random_planner(MIXTURES[mixture], 3)(trace, CPU, trace.peak_bytes)
    check(trace, lower(trace, plan, CPU))


@pytest.mark.parametrize("name", ["mlp", "hf_bert"])
def test_requests_follow_the_curve_of_a_plan_for_a_budget(name: str) -> None:
    trace = trace_of(name)
    floor = floor_bytes(trace)
    plan = PLANNERS["auto"](trace, CPU, floor + (trace.peak_bytes - floor) // 4)
    schedule = lower(trace, plan, CPU)
    assert schedule.instructions
    check(trace, schedule)


class Lost(nn.Module):
    """A branch whose graph is dropped while what it saved is elsewhere, and a result that stays in sight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = None
        lost = self.layers[0](x).sigmoid().tanh()
        self.seen = x = self.layers[1](x).sigmoid()
        x = self.layers[2](x).exp()
        del lost
        return self.layers[3](x).sigmoid()


class Halves(nn.Module):
    """An op that makes two tensors, of which one is never the same."""

    counter = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8192))

    def forward(self, x: Tensor) -> Tensor:
        twice, other = torch.ops.legroom_requests.halves(x.flatten()[:8192])
        return (twice * self.weight).sin() * other.flatten()[0]


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, torch.full((100, 64), float(next(Halves.counter)))


@pytest.mark.parametrize("make", [Lost, Halves])
def test_what_is_lost_held_or_not_repeated(make: Callable[[], nn.Module]) -> None:
    library = torch.library.Library("legroom_requests", "DEF")
    library.define("halves(Tensor x) -> (Tensor, Tensor)")
    library.impl("halves", halves, "CPU")
    try:
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x = torch.randn(512, 48)

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        trace = captured(model, optimizer, step)
    finally:
        library._destroy()
    check(trace, Schedule((), signature(trace)))
    check(trace, lower(trace, random_planner(MIXTURES["swap-all"], 0)(trace, CPU, trace.peak_bytes), CPU))


@pytest.mark.parametrize("name", ["gradient_penalty", "checkpoint_reentrant"])
def test_what_backward_saves_has_no_op_to_be_known_by(name: str) -> None:
    """Then the levels are all there is, as in a trace from a file."""
    trace = trace_of(name)
    assert trace.requests == ()
    assert any(nbytes > 0 for _, nbytes in requests(trace, Schedule((), "")))


def test_who_asked_for_a_block() -> None:
    """A tick's reload is what it leaves there; what it frees again is not, nor what legroom asks for elsewhere."""
    events: list[Event] = [Block(0, 5)]
    events += [enter(OP), Block(1, 5), Block(2, 5), Block(1, 0), Leave(OP), Block(3, 5)]
    events += [enter(TICK), Block(2, 0), Block(4, 5), Block(4, 0), Block(5, 5), Leave(TICK)]
    events += [enter(OWN), Block(6, 5), Leave(OWN), enter(f"{GONE}5"), Leave(f"{GONE}5"), Block(5, 0)]
    curve = read_curve(events, 0)
    head, segment = curve.segments
    assert [(move.what, move.key) for move in head.moves] == [
        ("asked", 0), ("asked", 1), ("asked", 2), ("freed", 1), ("asked", 3),
    ]  # fmt: skip
    assert [move.key for op in curve.ops for move in op.left] == [2]
    assert [(move.what, move.key) for move in segment.moves] == [
        ("evicted", 2), ("reloaded", 4), ("evicted", 4), ("reloaded", 5), ("reloaded", 6), ("gone", -1), ("freed", 5),
    ]  # fmt: skip
    assert [move.key for move in segment.reloads] == [5]


def enter(name: str) -> Enter:
    return Enter(name, 0.0, "", False)


def test_a_log_that_counts_bytes_only_tells_of_no_requests() -> None:
    trace = trace_of("mlp")
    ops = [RunOp(-1, "", "", 0.0, 0) for _ in trace.ops]
    moves = [Move("gone", -1, 5), Move("reloaded", 1, 5), Move("evicted", 1, 0)]
    curve = Curve([Segment(0, 0, 0, 0, list(moves)) for _ in range(len(trace.ticks) + 1)], ops)
    unmoved = replace(trace, storages=tuple(replace(s, gaps=(), gap_version=0) for s in trace.storages))
    assert requests_of(unmoved, curve) == ()


def test_small_requests_are_counted_and_not_guessed() -> None:
    trace = trace_of("mlp")
    level = most = 0
    live: dict[int, int] = {}
    for key, nbytes in itertools.chain.from_iterable(trace.requests):
        live[key], before = nbytes, live.get(key, 0)
        level += nbytes - before
        most = max(most, level)
    assert max(live.values()) <= 2**20  # every one of them is small
    assert small_bytes(trace) == most
    assert small_bytes(replace(trace, requests=())) != most


def grown(trace: Trace, factor: int) -> Trace:
    return replace(
        scaled(trace, factor),
        requests=tuple(tuple((key, nbytes * factor) for key, nbytes in segment) for segment in trace.requests),
    )


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("name", ["gpt_manual", "hf_bert", "unet"])
def test_spacers_are_found_for_them(name: str, share: float) -> None:
    trace = grown(trace_of(name), 1024)
    floor = floor_bytes(trace)
    schedule = lower(trace, PLANNERS["capuchin"](trace, CPU, int(floor + (trace.peak_bytes - floor) * share)), CPU)
    events = list(requests(trace, schedule))
    level = most = 0
    live: dict[int, int] = {}
    for key, nbytes in events:
        if nbytes >= 0:
            live[key], before = nbytes, live.get(key, 0)
            level += nbytes - before
            most = max(most, level)
    assert find_spacers(trace, schedule, [Piece(most * 9 // 10)]) is None
    for pieces in ([Piece(most)], [Piece(most * 21 // 20)], [Piece(most * 5 // 4)]):
        spacers = find_spacers(trace, schedule, pieces)
        if spacers is not None:
            assert fits(events, pieces, spacers)
            break
    assert spacers is not None


def test_they_are_of_one_size_and_one_step() -> None:
    trace = trace_of("mlp")
    assert with_numbers(trace, numbers_of(trace)) == replace(trace, requests=())
    with pytest.raises(TraceError, match=r"trace\.requests: expected those of \d+ segments or none"):
        validate(replace(trace, requests=trace.requests[1:]))
    assert from_json(to_json(trace)).requests == ()


class Heads(nn.Module):
    """Attention whose input lies transposed: `linear` multiplies, then adds the bias, in place where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(3))
        self.heads = nn.ModuleList(nn.MultiheadAttention(64, 4, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, heads in zip(self.norms, self.heads, strict=True):
            y = norm(x)
            x = x + heads(y, y, y, need_weights=False)[0]
        return x


class Sums(nn.Module):
    """Products that stay, or are read again: what is added to them is a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(64, 64) * 0.1), nn.Parameter(torch.randn(64))

    def forward(self, x: Tensor) -> Tensor:
        product = x.flatten(0, 1) @ self.weight
        total = product + self.bias
        return total * product


def _trained(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], Any]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(16, 50, 64, generator=torch.Generator().manual_seed(0))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def _of_the_zoo(name: str) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], Any]]:
    case = ZOO[name]()
    model, optimizer = case.build()
    batch = case.batch(0)
    return model, optimizer, lambda: case.step(model, optimizer, batch)


PLAIN = ("heads", "sums", "mlp", "gpt_manual", "cnn", "unet", "hf_bert", "hf_llama", "lstm", "inplace_views")


@pytest.mark.parametrize("name", PLAIN)
def test_plain_steps_ask_for_the_same_in_the_same_order(name: str) -> None:
    """No mode looks on there, as in most of a planned step: some composite ops then write in place."""
    torch.manual_seed(0)
    make = {"heads": lambda: _trained(Heads()), "sums": lambda: _trained(Sums())}.get(name, lambda: _of_the_zoo(name))
    model, optimizer, step = make()
    step()
    step()
    log = ProfilerLog(blocks=True)
    log.start()
    step()
    blocks = [event for event in log.stop() if isinstance(event, Block)]
    trace = captured(model, optimizer, step)
    assert trace.requests
    assert _large(blocks) == _large([Block(*request) for segment in trace.requests for request in segment])
    assert bool(_written_in_place(trace)) == (name in ("heads", "hf_bert"))


def _large(blocks: list[Block]) -> list[int]:
    """Bytes that are asked for, and, negative, given back; small ones come and go with lists and numbers."""
    live: dict[int, int] = {}
    found: list[int] = []
    for block in blocks:
        if block.nbytes > 0:
            live[block.key] = block.nbytes
            found.append(block.nbytes)
        elif block.key in live:
            found.append(-live.pop(block.key))
    return [nbytes for nbytes in found if abs(nbytes) >= 4096]
