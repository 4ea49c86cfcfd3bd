"""The first steps of a plan make sure of room before the program asks for it."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import legroom
from legroom import room as rooms
from legroom.errors import PlanError
from legroom.hardware import PRESETS
from legroom.ir import Op, Storage, Tick, Trace, validate
from legroom.jsonio import write_text
from legroom.plan import to_json
from legroom.runtime import replay as replays
from legroom.runtime.pressure import Pressure, Relief
from legroom.runtime.program import _MUCH, NO_STORAGE, MakeRoom, _Needs
from legroom.runtime.residency import Handle, Ledger
from tests.runtime.test_cap import Capped

MIB = 2**20

pytestmark = pytest.mark.usefixtures("one_thread")


class Tight(Capped):
    """Refuses requests of at least 1 MiB, once it is told to, until so much has been copied out since."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses_bytes = 0  # until so much is gone
        self.refused = 0
        self.asked: list[int] = []

    def allocate(self, nbytes: int) -> Tensor:
        self.asked.append(nbytes)
        if self.refuses_bytes > 0 and nbytes > MIB:
            self.refused += 1
            self.rearranged += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a little.")
        return super().allocate(nbytes)

    def copy_out(self, bytes_: Tensor, *, waits: bool = False) -> Any:
        self.refuses_bytes -= bytes_.numel()
        return super().copy_out(bytes_, waits=waits)


def trace_of(requests: tuple[tuple[tuple[int, int], ...], ...], storages: int) -> Trace:
    """All storages are saved, one after the other, and read in the other order; `requests` are of the last segment."""
    count = 2 * storages
    ticks = [Tick("pack", i, 1, 0, 0) for i in range(storages)]
    ticks += [Tick("unpack", i, 1, 0, 0) for i in reversed(range(storages))]
    trace = Trace(
        tuple(Storage(i, 2 * MIB, "activation", False, False, (), 0, "") for i in range(storages)),
        (Op(0, "make", "forward", 0.0, 0.0, (), tuple((i, 0) for i in range(storages)), 0, "", "", ""),),
        tuple(ticks),
        0,
        "cpu",
        requests=(*((),) * (count + 1 - len(requests)), *requests),
    )
    validate(trace)
    return trace


@pytest.fixture
def saved() -> tuple[Tight, Ledger, list[Handle]]:
    device = Tight()
    ledger = Ledger(device)
    ledger.generation = 1
    handles = []
    for number in range(4):
        tensor = torch.full((MIB // 2,), float(number))
        handles.append(ledger.handle(ledger.entry_of(tensor.untyped_storage(), number), tensor))
    return device, ledger, handles


def away(handles: list[Handle]) -> list[int]:
    return [number for number, handle in enumerate(handles) if not handle.entry.in_memory]


@pytest.mark.parametrize(("missing", "gone"), [(0, []), (1, [0]), (3 * MIB, [0, 1]), (5 * MIB, [0, 1, 2])])
def test_what_is_read_last_goes_first(missing: int, gone: list[int], saved: tuple[Tight, Ledger, list[Handle]]) -> None:
    device, ledger, handles = saved
    device.refuses_bytes = missing
    pressure = Pressure(trace_of((((9, 2 * MIB),), (), (), ()), 4))  # in backward, before storage 3 is read

    assert pressure.relieve(ledger, 4, handles[3].entry) == len(gone)

    assert away(handles) == gone
    device.refuses_bytes = 0
    for number, handle in enumerate(handles):
        handle.entry.start_loading()
        handle.entry.finish_loading()
        tensor = handle.view.tensor if handle.view.tensor is not None else handle.view.over(handle.entry.a_tensor())
        assert torch.equal(tensor, torch.full((MIB // 2,), float(number)))


def test_what_is_asked_for_or_held_stays(saved: tuple[Tight, Ledger, list[Handle]]) -> None:
    device, ledger, handles = saved
    device.refuses_bytes = 100 * MIB
    held = handles[1].view.tensor
    assert held is not None
    other = held.view(2, -1)
    pressure = Pressure(trace_of((((9, 2 * MIB),), (), (), ()), 4))

    assert pressure.relieve(ledger, 4, handles[3].entry) == 2  # and gives up without an error

    assert away(handles) == [0, 2]
    del other


@pytest.mark.parametrize(
    ("requests", "asked"),
    [
        (((9, 3 * MIB), (9, 0), (8, 2 * MIB)), [3 * MIB, 2 * MIB]),
        (((9, 1000), (8, MIB)), []),  # small ones have pages of their own
        (((3, 0), (9, 2 * MIB), (8, 2 * MIB)), [2 * MIB]),  # the first takes the place of storage 3
        (((3, 0), (9, 3 * MIB)), [3 * MIB]),  # which is too small for this one
        ((), []),
    ],
)
def test_the_requests_of_a_segment_are_made_and_given_back(
    requests: tuple[tuple[int, int], ...], asked: list[int], saved: tuple[Tight, Ledger, list[Handle]]
) -> None:
    device, ledger, handles = saved
    before = ((3, 2 * MIB),)
    pressure = Pressure(trace_of((before, requests, (), (), ()), 4))

    assert pressure.relieve(ledger, 4, None) == 0

    assert device.asked == asked
    assert not away(handles)
    assert pressure.relieve(ledger, 99, None) == 0  # a step that goes on for longer


def test_where_a_mode_looks_on_there_is_one_block_more(saved: tuple[Tight, Ledger, list[Handle]]) -> None:
    device, ledger, _ = saved
    pressure = Pressure(trace_of((((9, 3 * MIB), (9, 0), (8, 2 * MIB)), (), (), ()), 4))

    assert pressure.relieve(ledger, 4, None, watched=True) == 0
    assert device.asked == [3 * MIB, 2 * MIB, 3 * MIB]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.square().mean()


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=1e-2)


def trained(
    room: legroom.Room | None, model: nn.Module, optimizer: torch.optim.Optimizer, device: Any, refused: int = 2
) -> list[Tensor]:
    """refused: the step in which there is too little room; 2 is the first one under a plan."""
    losses = []
    for number in range(9):
        x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(number))

        def work(x: Tensor = x) -> Tensor:
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        if room is None:
            losses.append(work())
            continue
        device.refuses_bytes = 9 * MIB if number == refused else 0
        with room.step():
            losses.append(work())
    return [*losses, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("refused", [2, 3, 8], ids=["first", "measured", "settled"])
def test_a_step_goes_on_where_there_is_no_room_for_it(monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    """Each refusal would have ended it. The bits are the same, and what such a step takes says nothing of the plan."""
    device = Tight()
    monkeypatch.setattr(rooms, "open_device", lambda *_: device)
    model, optimizer = built()
    with legroom.fit(model, optimizer, budget="30MiB") as room:
        mine = trained(room, model, optimizer, device, refused)
        assert room._standing._found is not None and room._standing._found.spacers is None
        report = room.report()
    assert all(map(torch.equal, mine, trained(None, *built(), None)))
    assert device.refused >= 1
    assert report.fallbacks["swapped out beside the plan, to make room"] >= 1
    assert report.planned_steps == 7, report.fallbacks


@pytest.mark.parametrize("refused", [2, 4, 8], ids=["first", "looked at", "settled"])
def test_a_plan_from_a_file_is_made_room_for_as_well_and_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused: int
) -> None:
    devices = [Tight(), Tight()]
    monkeypatch.setattr(rooms, "open_device", lambda *_: devices[-1])
    model, optimizer = built()
    with legroom.fit(model, optimizer, budget="30MiB") as room:
        trained(room, model, optimizer, devices.pop())
        assert room.plan is not None
        plan = room.plan
    path = tmp_path / "plan.json.gz"
    write_text(path, to_json(plan), error=PlanError)
    model, optimizer = built()
    with legroom.fit(model, optimizer, budget="30MiB", plan=path) as room:
        mine = trained(room, model, optimizer, devices[0], refused)
        assert room.plan == plan
        report = room.report()
    assert all(map(torch.equal, mine, trained(None, *built(), None)))
    assert devices[0].refused >= 1
    told = "memory was in pieces, and the given plan stays: plan for less" in report.fallbacks
    assert told is (refused == 4)
    assert report.fallbacks["swapped out beside the plan, to make room"] >= 1
    assert report.planned_steps == 7, report.fallbacks


@pytest.mark.parametrize("arranged", [True, False])
def test_once_a_plan_has_settled_its_steps_are_tried_only_where_nothing_is_arranged(
    monkeypatch: pytest.MonkeyPatch, arranged: bool
) -> None:
    device = Tight()
    monkeypatch.setattr(rooms, "open_device", lambda *_: device)
    model, optimizer = built()
    with legroom.fit(model, optimizer, budget="30MiB") as room:
        trained(room, model, optimizer, device)
        standing = room._standing
        assert standing.brim is not None and standing.brim.settled
        assert standing.program is not None and standing.program.pressure is not None
        assert standing._found is not None and standing._found.spacers is None
        standing._found = replace(standing._found, spacers=() if arranged else None)
        tried: list[int] = []
        relieve = Pressure.relieve

        def noted(self: Pressure, ledger: Ledger, tick: int, *others: Any, **named: Any) -> int:
            tried.append(tick)
            return relieve(self, ledger, tick, *others, **named)

        monkeypatch.setattr(Pressure, "relieve", noted)
        with room.step():
            model(torch.randn(4096, 128)).backward()
    assert bool(tried) is not arranged


def test_a_plan_that_never_finds_its_room_makes_way_for_a_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Tight()
    monkeypatch.setattr(rooms, "open_device", lambda *_: device)
    model, optimizer = built()
    with legroom.fit(model, optimizer, budget="30MiB") as room:
        trained(room, model, optimizer, device, refused=-1)
        standing = room._standing
        assert standing.brim is not None and standing.brim.settled and room.plan is not None
        before = standing.brim.usable_bytes
        for _ in range(4):
            assert standing.brim.usable_bytes == before
            device.refuses_bytes = 9 * MIB
            with room.step():
                model(torch.randn(4096, 128)).backward()
        assert room.plan.predicted_peak_bytes <= standing.brim.usable_bytes < before
        assert room.report().fallbacks["memory was in pieces: planned again for less"] == 1


def test_in_backward_no_mode_looks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Tight()
    monkeypatch.setattr(rooms, "open_device", lambda *_: device)
    slow = replace(PRESETS["cpu"], out_bytes_per_second=1e6, in_bytes_per_second=1e6)  # so that it recomputes
    monkeypatch.setattr(rooms, "probe", lambda *_: slow)
    model, optimizer = built()
    seen: list[tuple[int, bool]] = []
    relieve = Pressure.relieve

    def noted(self: Pressure, ledger: Ledger, tick: int, asked_for: Any, *, watched: bool = False) -> int:
        seen.append((tick, watched))
        return relieve(self, ledger, tick, asked_for, watched=watched)

    monkeypatch.setattr(Pressure, "relieve", noted)
    with legroom.fit(model, optimizer, budget="30MiB") as room:
        # How long ops take decides about the plan: seldom, a replay needs what was moved out beside it, and the step is
        # lost, as it would be on a GPU. What was looked on until then is what this is about.
        with contextlib.suppress(torch.OutOfMemoryError):
            trained(room, model, optimizer, device)
        trace = room.trace
    assert trace is not None
    assert any(watched for _, watched in seen)
    assert {trace.ticks[tick].kind for tick, watched in seen if watched} == {"pack"}
    assert {trace.ticks[tick].kind for tick, _ in seen} == {"pack", "unpack"}


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_room_is_made_for_all_that_takes_much_of_what_is_free(draw: st.DataObject) -> None:
    """At the hooks that there are, for all that is asked for until the next one."""
    count, budget = draw.draw(st.integers(1, 12)), 100 * MIB
    levels = draw.draw(st.lists(st.integers(0, 99 * MIB), min_size=count, max_size=count))
    above = draw.draw(st.lists(st.integers(0, 60 * MIB), min_size=count, max_size=count))
    hooked = sorted(draw.draw(st.sets(st.integers(0, count - 1), min_size=1)) | {0})
    # The trace keeps everything; under the schedule less is alive.
    ticks = tuple(Tick("pack", 0, 0, 200 * MIB, 200 * MIB + more) for more in above)
    trace = replace(trace_of((), 1), ticks=ticks)
    curve = [(number, level, level + more) for number, (level, more) in enumerate(zip(levels, above, strict=True))]

    needs = _Needs(trace, curve, budget)
    made = needs.rooms(hooked)

    tight = [more if more > MIB and more > _MUCH * (budget - at) else 0 for at, more in zip(levels, above, strict=True)]
    assert needs.most_bytes == max(tight)
    for place, first in enumerate(hooked):
        until = hooked[place + 1] if place + 1 < len(hooked) else count
        need = max(tight[first:until])
        assert made.get(first, ()) == ((MakeRoom(first, NO_STORAGE, need),) if need else ())
    assert made.keys() <= set(hooked)


def test_what_takes_much_of_what_is_free_goes_elsewhere_until_it_fits(
    saved: tuple[Tight, Ledger, list[Handle]],
) -> None:
    device, ledger, handles = saved
    device.refuses_bytes = 3 * MIB
    relief = Relief(trace_of((), 4))

    assert relief.make_room(ledger, 4, handles[3].entry, 2 * MIB) == (2, True)
    assert away(handles) == [0, 1]
    device.refuses_bytes = 100 * MIB
    assert relief.make_room(ledger, 4, handles[3].entry, 2 * MIB) == (1, False)  # and gives up without an error
    assert away(handles) == [0, 1, 2]
    assert relief.make_room(ledger, 4, handles[3].entry, 2 * MIB) == (0, False)


def followed(
    device: Tight, sizes: list[int], monkeypatch: pytest.MonkeyPatch, pace: float
) -> Iterator[tuple[legroom.Room, int, Callable[[Callable[[], None]], Tensor]]]:
    """A room in which every step has another size, and for each step its number and what runs it; that calls what it is
    given between forward and backward. pace: of the link, so that plans swap or recompute however long ops take."""
    monkeypatch.setattr(rooms, "open_device", lambda *_: device)
    link = replace(PRESETS["cpu"], out_bytes_per_second=pace, in_bytes_per_second=pace)
    monkeypatch.setattr(rooms, "probe", lambda *_: link)
    model, optimizer = built()
    with legroom.fit(model, optimizer, budget="30MiB") as room:
        for number, rows in enumerate(sizes):
            x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(number))

            def step(between: Callable[[], None], x: Tensor = x) -> Tensor:
                with room.step():
                    loss = model(x)
                    between()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                return loss.detach()

            yield room, number, step
            if room._following is not None:
                room._following.settle()


SWAPS, RECOMPUTES = 1e13, 1e6  # bytes a second
SIZES = [4096, 3100, 3600, 2600, 3300, 2900, 3900, 2700, 3500]


@pytest.mark.parametrize(
    ("refused", "what", "hooks_out"),
    [
        (8, "before a swap", False),
        (14, "before a swap", False),
        (8, "before a replay", False),
        (14, "before a replay", True),
        (8, "at a swap", False),
    ],
)
def test_a_step_whose_plan_follows_its_size_goes_on_as_well(
    refused: int, what: str, hooks_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no room for what the program asks for, or for what the plan brings back. Step 8 has a new size."""
    device = Tight()
    device.leaves_hooks_out = hooks_out
    if what == "at a swap":
        monkeypatch.setattr(Relief, "make_room", lambda *_: (0, True))  # so that it is not looked for before
    model, optimizer = built()
    expected = []
    for number, rows in enumerate([*SIZES, *SIZES[:6]]):
        loss = model(torch.randn(rows, 128, generator=torch.Generator().manual_seed(number)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.detach())
    losses = []

    def refuse() -> None:
        device.refuses_bytes = MIB

    pace = RECOMPUTES if what == "before a replay" else SWAPS
    for room, number, step in followed(device, [*SIZES, *SIZES[:6]], monkeypatch, pace):
        losses.append(step(refuse if number == refused else lambda: None))
        device.refuses_bytes = 0
        if number == refused:
            assert room.report().followed.steps[-1].course == "planned"  # type: ignore[union-attr]
            assert room._following is not None and room._following.rung is not None
            assert (room._following.rung.program.few_ticks is not None) == hooks_out
    report = room.report()
    assert all(map(torch.equal, losses, expected))
    assert device.refused >= 1
    assert report.fallbacks["swapped out beside the plan, to make room"] >= 1
    assert not any("ran out" in name or "drift" in name for name in report.fallbacks), report.fallbacks


def test_a_replay_that_never_fits_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reads comes back for each try, and must not go again for the next one without end."""
    failed, fails, run = 0, False, replays._run

    def no_room(*given: Any) -> None:
        nonlocal failed
        run(*given)
        if fails:
            failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a little.")

    monkeypatch.setattr(replays, "_run", no_room)

    def fail() -> None:
        nonlocal fails
        fails = True

    for _, number, step in followed(Tight(), [*SIZES, *SIZES[:2]], monkeypatch, RECOMPUTES):
        if number == 8:
            with pytest.raises(torch.OutOfMemoryError):
                step(fail)
            fails = False
        else:
            step(lambda: None)
    assert 1 < failed < 40


def test_an_error_that_passes_through_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device, alive = Tight(), []

    def refuse() -> None:
        device.refuses_bytes = 1 << 60

    def last(step: Callable[[Callable[[], None]], Tensor]) -> None:
        local = torch.zeros(10)
        alive.append(weakref.ref(local))
        step(refuse)

    for _, number, step in followed(device, SIZES, monkeypatch, SWAPS):
        if number < 8:
            step(lambda: None)
            continue
        gc.disable()
        try:
            with contextlib.suppress(torch.OutOfMemoryError):
                last(step)
            assert device.refused
            assert alive[0]() is None
        finally:
            gc.enable()
        device.refuses_bytes = 0


def test_plans_that_never_find_their_room_make_way_for_smaller_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Tight()

    def refuse() -> None:
        device.refuses_bytes = MIB

    peaks = []
    for room, number, step in followed(device, [*SIZES, *([4096] * 8)], monkeypatch, RECOMPUTES):
        step(refuse if 9 <= number < 13 else lambda: None)
        device.refuses_bytes = 0
        if room._following is not None and room._following.rung is not None:
            rung = room._following.rung
            peaks.append(rung.peak_bytes)
            assert number < 9 or None not in rung.program.tapes.values()  # one that did not fit once is not given up
    assert room.report().fallbacks["memory was in pieces: planned again for less"] == 1
    assert peaks[-1] < peaks[-8]
