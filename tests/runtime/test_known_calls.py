"""Calls that are recorded without a look at their ops: only while they are the calls that were learned."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import legroom
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.plan import Keep, Plan, Recompute
from legroom.planners import Planner
from legroom.runtime import plannedops
from legroom.runtime.device import CpuDevice
from legroom.runtime.knowncalls import KnownCall, Recording
from tests.runtime.test_calls import nothing_left
from tests.runtime.test_random_plans import random_planner

EVERYTHING = random_planner((0, 0, 1, 0), seed=0)  # is made again
TURN, STEPS = 6, 9  # from TURN on something is another; the calls are known by then
CHANNELS, PIXELS, BATCH = 16, 12, 16

Knobs = dict[str, Any]


class Net(nn.Module):
    """What real networks do: statistics, in-place activations and sums, lists of tensors, noise, casts, views."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(CHANNELS) for _ in range(3))
        self.narrow = nn.Conv2d(2 * CHANNELS, CHANNELS, 1)
        self.wide, self.back = nn.Linear(CHANNELS, 4 * CHANNELS), nn.Linear(4 * CHANNELS, CHANNELS)
        self.norm = nn.LayerNorm(CHANNELS)

    def forward(self, x: torch.Tensor, knobs: Knobs) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = norm(conv(x))
            y += x
            y = F.relu(y, inplace=True)
            x = self.narrow(torch.cat([x, y * knobs["scale"]], 1))
        x = x.flatten(2).transpose(1, 2)
        noise, _ = torch.native_dropout(x, knobs["rate"], True)
        x = F.layer_norm(x + noise, (CHANNELS,), self.norm.weight, self.norm.bias, eps=knobs["eps"])
        x = torch.add(x, self.back(F.gelu(self.wide(x), approximate=knobs["gelu"])), alpha=knobs["alpha"])
        return x.float().square().mean()


def built() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def batch(number: int) -> torch.Tensor:
    return torch.randn(BATCH, CHANNELS, PIXELS, PIXELS, generator=torch.Generator().manual_seed(number))


PLAIN: Knobs = {"scale": 0.5, "rate": 0.1, "eps": 1e-5, "gelu": "none", "alpha": 1}


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if str(func) == "aten.gelu.default" else result


# What is done from TURN on: other knobs, another input, or something around the call.

Change = tuple[Knobs, Callable[[torch.Tensor], torch.Tensor], Callable[[], Any]]


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _moved(x: torch.Tensor) -> torch.Tensor:
    room = torch.empty(x.numel() + 7)
    return room[7:].view(x.shape).copy_(x)


NOTHING = contextlib.nullcontext
CHANGES: dict[str, Change] = {
    "nothing": ({}, _same, NOTHING),
    "another factor": ({"scale": 0.25}, _same, NOTHING),
    "an integer": ({"scale": 1}, _same, NOTHING),
    "a zero of the other sign": ({"scale": -0.0}, _same, NOTHING),
    "a tensor in place of a number": ({"scale": torch.tensor(0.3)}, _same, NOTHING),
    "another rate": ({"rate": 0.3}, _same, NOTHING),
    "another epsilon": ({"eps": 1e-2}, _same, NOTHING),
    "another formula": ({"gelu": "tanh"}, _same, NOTHING),
    "another alpha": ({"alpha": 2}, _same, NOTHING),
    "an alpha of another type": ({"alpha": 1.0}, _same, NOTHING),
    "channels last": ({}, lambda x: x.to(memory_format=torch.channels_last), NOTHING),
    "elsewhere in a storage": ({}, _moved, NOTHING),
    "that needs a gradient": ({}, lambda x: x.requires_grad_(), NOTHING),
    "autocast": ({}, _same, lambda: torch.autocast("cpu", torch.bfloat16)),
    "a mode of the program": ({}, _same, Watching),
}


def trained(
    net: Net, optimizer: torch.optim.Optimizer, around: Callable[[], Any], change: Change, before: Knobs | None = None
) -> list[Any]:
    other, given, inside = change
    torch.manual_seed(1)
    taken: list[Any] = []
    for number in range(STEPS):
        turned = number >= TURN
        x = given(batch(number)) if turned else batch(number)
        knobs = {**PLAIN, **(before or {}), **(other if turned else {})}
        with around(), inside() if turned else contextlib.nullcontext():
            loss = net(x, knobs)
            loss.backward()
            taken += [loss.item(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
    return [*taken, *(t.clone() for t in (*net.parameters(), *net.buffers()))]


def same_bits(mine: list[Any], plain: list[Any]) -> bool:
    return len(mine) == len(plain) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(mine, plain, strict=True)
    )


@pytest.fixture(autouse=True)
def other_kernels() -> Iterator[None]:
    """Where the processor has no bfloat16, the first product of that type switches some kernels off for good."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a call was recorded without a look at its ops, before the turn and after."""
    counts: Counter[str] = Counter()

    class Counted(Recording):
        def __init__(self, known: KnownCall, *args: Any, told: bool) -> None:
            counts["all"] += 1
            counts["attention"] += known.switches is not None
            super().__init__(known, *args, told=told)

        def is_saved(self, entry: Any, packs: tuple[int, ...]) -> bool:
            assert packs and not super().is_saved(entry, (-1, *packs[1:])), "after a save that was not learned"
            found = super().is_saved(entry, packs)
            assert all(made.grad is self._known.surroundings[0] for made in self.made), "the grad mode of the hook"
            counts["on the way"] += found
            return found

    monkeypatch.setattr(plannedops, "Recording", Counted)
    return counts


@pytest.mark.parametrize("few_hooks", [False, True], ids=["all hooks", "few hooks"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_call_that_changes(
    name: str, few_hooks: bool, recorded: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "leaves_hooks_out", few_hooks)
    before = {"scale": 0.0} if "zero" in name else {}
    net, optimizer = built()
    with legroom.fit(net, optimizer, budget="1GiB", planner=random_planner((0, 0, 1, 0), seed=0)) as room:
        mine = trained(net, optimizer, room.step, CHANGES[name], before)
        assert room.report().planned_steps >= 4
        assert "a replay gave other bits and was not used" not in room.report().fallbacks

    assert same_bits(mine, trained(*built(), contextlib.nullcontext, CHANGES[name], before))
    assert recorded["all"] > 20
    assert nothing_left()


def test_what_is_known_holds_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "leaves_hooks_out", True)
    net, optimizer = built()
    with legroom.fit(net, optimizer, budget="1GiB", planner=random_planner((0, 0, 1, 0), seed=0)) as room:
        trained(net, optimizer, room.step, CHANGES["nothing"])
        program = room._standing.program
        assert program is not None and program.calls is not None
        known = [way.known for way in program.calls.ways if way.known is not None]
        assert len(known) > 20
        found, reached = list(known), set()
        while found:
            thing = found.pop()
            if id(thing) not in reached and not isinstance(thing, type) and not callable(thing):
                reached.add(id(thing))
                assert not isinstance(thing, (torch.Tensor, torch.UntypedStorage))
                found += gc.get_referents(thing)


def test_a_call_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program catches the error and goes on with the same step."""
    monkeypatch.setattr(CpuDevice, "leaves_hooks_out", True)

    def training(around: Callable[[], Any]) -> list[Any]:
        net, optimizer = built()
        torch.manual_seed(1)
        out: list[Any] = []
        room = legroom.fit(net, optimizer, budget="1GiB", planner=random_planner((0, 0, 1, 0), seed=0))
        for number in range(STEPS):
            with room.step() if around is None else around():
                if number >= TURN:
                    with contextlib.suppress(RuntimeError):
                        net.convs[0](torch.randn(1, 3, 4, 4))  # as many channels as the weights do not have
                loss = net(batch(number), PLAIN)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            out.append(loss.item())
        room.close()
        return [*out, *(p.clone() for p in net.parameters())]

    assert same_bits(training(None), training(contextlib.nullcontext))  # type: ignore[arg-type]
    assert nothing_left()


@pytest.mark.parametrize("saved", ["weight", "activation"])
def test_a_saved_tensor_written_before_backward_is_an_error(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in plain PyTorch, wherever the tensor is and however lightly it is kept."""
    monkeypatch.setattr(CpuDevice, "leaves_hooks_out", True)
    net, optimizer = built()
    with legroom.fit(net, optimizer, budget="1GiB", planner=random_planner((0, 0, 1, 0), seed=0)) as room:
        trained(net, optimizer, room.step, CHANGES["nothing"])
        seen: list[torch.Tensor] = []
        net.narrow.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))

        def spoiled() -> None:
            with room.step():
                loss = net(batch(0), PLAIN)
                with torch.no_grad():
                    (net.norms[0].weight if saved == "weight" else seen[0]).mul_(2)
                loss.backward()

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            spoiled()


# Steps of a smaller model that go another way from TURN on.

SIZE = (256, 128)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))
        self.shift = nn.Parameter(torch.randn(*SIZE) * 0.1)


def _rows(number: int) -> torch.Tensor:
    return torch.randn(*SIZE, generator=torch.Generator().manual_seed(number))


def _finished(x: torch.Tensor) -> torch.Tensor:
    loss = x.square().mean()
    loss.backward()
    return loss


def _pair(net: Layers, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    first = net.layers[0](_rows(number)).sin()
    return first, first if number < TURN else net.layers[1](_rows(number)).sin()


def one_tensor_then_two(net: Layers, number: int) -> torch.Tensor:
    return _finished(net.layers[2](torch.add(*_pair(net, number)).sin().exp().sin()))


def one_tensor_then_two_in_a_list(net: Layers, number: int) -> torch.Tensor:
    return _finished(net.layers[2](torch.cat(_pair(net, number)).sin().exp().sin()))


def another_save_in_between(net: Layers, number: int) -> torch.Tensor:
    """As large as the one that was learned, so that it passes for it."""
    beside = torch.sigmoid(net.shift.detach().requires_grad_()) if number >= TURN else None
    x = torch.tanh(net.shift)
    del beside
    for _ in range(5):
        x = torch.tanh(x * 1.5)
    return _finished(net.layers[0](x))


def a_stale_copy_of_autocast(net: Layers, number: int) -> torch.Tensor:
    """Of a weight that is written between two uses, in one region where there were two."""
    weight, x = net.layers[0].weight, _rows(number)

    def region(*, here: bool) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if here else contextlib.nullcontext()

    with region(here=number >= TURN):
        with region(here=number < TURN):
            first = torch.matmul(x, weight)
        first = first.float().sin().exp()
        with torch.no_grad():
            weight.mul_(0.5)
        with region(here=number < TURN):
            second = torch.matmul(x, weight)
        y = first + second.float().sin().exp().sin()
    loss = _finished(y)
    with torch.no_grad():
        weight.mul_(2)
    return loss


def longer_while_it_is_learned(net: Layers, number: int) -> torch.Tensor:
    x = _rows(number)
    for layer in net.layers:
        x = layer(x).tanh()
    loss = _finished(x)
    if 2 <= number < 5:
        _finished(net.layers[0](_rows(number)).tanh().sin())
    return loss


def graphs_of_gradients(net: Layers, number: int) -> torch.Tensor:
    x = net.shift
    for layer in net.layers:
        x = layer(x).tanh()
    loss = x.square().mean()
    if number >= TURN:
        for _ in range(2):
            (gradient,) = torch.autograd.grad(loss, net.shift, create_graph=True)
            loss = loss + gradient.square().sum()
    loss.backward()
    return loss


def mapped(net: Layers, number: int) -> torch.Tensor:
    rows = torch.vmap(lambda row: net.layers[0](row).tanh())(_rows(number))
    return _finished(net.layers[1](rows.sin().exp()))


def _attended(net: Layers, number: int, rate: float = 0.0) -> torch.Tensor:
    query, key, value = (layer(_rows(number)).view(4, 64, 4, 32).transpose(1, 2) for layer in net.layers)
    x = F.scaled_dot_product_attention(query, key, value, dropout_p=rate)
    return _finished(x.sin().exp().sin())


def _with_a_bias(net: Layers, number: int, *, learned: bool = True) -> torch.Tensor:
    """Attention with a mask that needs a gradient, which is made of matrix products."""
    query, key, value = (layer(_rows(number)).view(4, 64, 4, 32).transpose(1, 2) for layer in net.layers)
    bias = net.layers[0].weight[:64, :64] * 0.5
    x = F.scaled_dot_product_attention(query, key, value, bias if learned else bias.detach())
    return _finished(x.sin().exp().sin())


def attention_whose_mask_needs_no_gradient_any_more(net: Layers, number: int) -> torch.Tensor:
    return _with_a_bias(net, number, learned=number < TURN)


def attention_by_other_kernels(net: Layers, number: int) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH) if number >= TURN else contextlib.nullcontext():
        return _attended(net, number)


def attention_that_draws(net: Layers, number: int) -> torch.Tensor:
    return _attended(net, number, 0.1 if number >= TURN else 0.2)


def _many_headed(net: Layers, x: torch.Tensor, *, weights: bool = False) -> torch.Tensor:
    """One call of many ops: what it casts is saved, and may go, before the call is through."""
    first, second, third = net.layers
    packed = torch.cat([first.weight, second.weight, third.weight])
    bias = torch.cat([first.bias, second.bias, third.bias])
    given = x.view(4, 64, 128)
    y, _ = F.multi_head_attention_forward(
        given,
        given,
        given,
        128,
        4,
        packed,
        bias,
        None,
        None,
        False,
        0.0,
        first.weight,
        first.bias,
        need_weights=weights,
    )
    return y


def many_heads(net: Layers, number: int) -> torch.Tensor:
    x = net.layers[0](_rows(number)).sin()
    with torch.autocast("cpu", torch.bfloat16):
        y = _many_headed(net, x)
    return _finished(y.float().sin().exp().sin())


def many_heads_and_their_weights(net: Layers, number: int) -> torch.Tensor:
    x = net.layers[0](_rows(number)).sin()
    with torch.autocast("cpu", torch.bfloat16):
        y = _many_headed(net, x, weights=number >= TURN)
    return _finished(y.float().sin().exp().sin())


def many_heads_after_another_save(net: Layers, number: int) -> torch.Tensor:
    """As large as what the call saves first, so that it passes for it, and all that comes later for something else."""
    x = net.layers[0](_rows(number)).sin()
    beside = torch.sigmoid(x.detach().requires_grad_()) if number >= TURN else None
    with torch.autocast("cpu", torch.bfloat16):
        y = _many_headed(net, x)
    del beside
    return _finished(y.float().sin().exp().sin())


WAYS = (
    attention_by_other_kernels,
    attention_whose_mask_needs_no_gradient_any_more,
    attention_that_draws,
    many_heads,
    many_heads_and_their_weights,
    many_heads_after_another_save,
    one_tensor_then_two,
    one_tensor_then_two_in_a_list,
    another_save_in_between,
    a_stale_copy_of_autocast,
    longer_while_it_is_learned,
    graphs_of_gradients,
    mapped,
)


def walked(step: Callable[[Layers, int], torch.Tensor], *, inside: bool, planner: Planner = EVERYTHING) -> list[Any]:
    torch.manual_seed(0)
    net = Layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    taken: list[Any] = []
    with contextlib.ExitStack() as stack:
        room: Any = None
        if inside:
            room = stack.enter_context(legroom.fit(net, optimizer, budget="1GiB", planner=planner))
        for number in range(STEPS):
            with room.step() if inside else contextlib.nullcontext():
                taken.append(step(net, number).item())
            taken += [p.grad.clone() for p in net.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    return taken


@pytest.mark.parametrize("few_hooks", [False, True], ids=["all hooks", "few hooks"])
@pytest.mark.parametrize("step", WAYS, ids=lambda step: step.__name__)
def test_steps_that_go_another_way(step: Any, few_hooks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "leaves_hooks_out", few_hooks)

    assert same_bits(walked(step, inside=True), walked(step, inside=False))
    assert nothing_left()


@pytest.mark.parametrize("few_hooks", [False, True], ids=["all hooks", "few hooks"])
def test_what_goes_before_the_call_is_through(
    few_hooks: bool, recorded: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "leaves_hooks_out", few_hooks)

    assert same_bits(walked(many_heads, inside=True), walked(many_heads, inside=False))
    assert recorded["on the way"] > 0


@pytest.mark.parametrize("attended", [_attended, _with_a_bias])
def test_attention_is_looked_at_once_a_switch_is_turned(attended: Any, recorded: Counter[str]) -> None:
    """Whether it makes a difference or not: which kernel runs is PyTorch's to choose."""
    before = torch._C._get_cudnn_sdp_enabled()

    def step(net: Layers, number: int) -> torch.Tensor:
        torch._C._set_sdp_use_cudnn(before is not (number >= TURN))
        if number == TURN:
            assert recorded.pop("attention") >= 2
        return attended(net, number)

    try:
        mine = walked(step, inside=True)
    finally:
        torch._C._set_sdp_use_cudnn(before)
    assert not recorded["attention"]
    assert same_bits(mine, walked(attended, inside=False))


@pytest.mark.parametrize("few_hooks", [False, True], ids=["all hooks", "few hooks"])
def test_copies_of_autocast_that_stay_are_shown(
    few_hooks: bool, recorded: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products are made again from copies that their calls make and save, and that no plan moves."""
    monkeypatch.setattr(CpuDevice, "leaves_hooks_out", few_hooks)
    products = "aten.addmm.default", "aten.mm.default"

    def only_products(trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        plan = EVERYTHING(trace, hardware, budget_bytes)
        made_by = {storage: op.name for op in trace.ops for storage, version in op.writes if version == 0}
        kept = [
            decision if isinstance(decision, Recompute) and made_by.get(gap.storage) in products else Keep()
            for gap, decision in zip(trace.gaps, plan.decisions, strict=True)
        ]
        return replace(plan, decisions=tuple(kept))

    def step(net: Layers, number: int) -> torch.Tensor:
        if number == TURN:
            recorded.clear()
        with torch.autocast("cpu", torch.bfloat16):
            x = _rows(number)
            for layer in net.layers:
                x = layer(x).sin()
        return _finished(x.float())

    mine = walked(step, inside=True, planner=only_products)
    assert recorded["all"] >= 3 * (STEPS - TURN)
    assert same_bits(mine, walked(step, inside=False))


class Growing(TorchFunctionMode):
    """A program's own mode, with a state that the arguments of no call show."""

    factor = 1.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * self.factor if func is torch.exp else result


def test_a_mode_of_the_program_around_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "leaves_hooks_out", True)
    taken = []
    for inside in (True, False):
        mode = Growing()

        def step(net: Layers, number: int, mode: Growing = mode) -> torch.Tensor:
            mode.factor = 1.0 + 0.1 * number
            x = net.layers[0](_rows(number))
            for _ in range(3):
                x = torch.exp(x.sin()).sin()
            return _finished(net.layers[1](x))

        with mode:
            taken.append(walked(step, inside=inside))
    assert same_bits(*taken)
