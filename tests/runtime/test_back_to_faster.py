"""Of two plans, the second made because the host was found slower: the one whose steps took less time stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import legroom
from legroom import room as rooms
from legroom import standing
from legroom.hardware import Hardware, HostCosts
from legroom.ir import Trace
from legroom.plan import Keep, Plan, Swap, signature
from legroom.runtime.device import CpuDevice
from legroom.runtime.pace import Pace
from tests.runtime.test_pressure import built

COSTS = HostCosts(*[1e-3] * 8)
QUICK = Hardware("quick", 2**34, 2**34, 1e12, 1e12, 1e12, 1e12, 0.0, False, 0.0, 64, COSTS)


class Moment:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def seconds_since(self, earlier: Moment) -> float:
        return self.seconds - earlier.seconds


class Timed(CpuDevice):
    """A device on which steps take as long as is said."""

    now = 0.0

    def stamp(self) -> Any:
        return Moment(self.now)


@pytest.mark.parametrize(("second_seconds", "stays"), [(0.9, "first"), (0.2, "second")])
def test_the_faster_one_stays(second_seconds: float, stays: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Timed()
    monkeypatch.setattr(rooms, "open_device", lambda *_: device)
    monkeypatch.setattr(rooms, "probe", lambda *_: QUICK)

    def planner(trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        """On the host as it is thought to be at first everything is swapped, on a slower one a little."""
        first = hardware.host.tick <= COSTS.tick
        gaps = len(trace.gaps)
        decisions = tuple(Swap() if first or gap < gaps // 4 else Keep() for gap in range(gaps))
        return Plan(decisions, signature(trace), "first" if first else "second", budget_bytes, 0, 0.0, ())

    model, optimizer = built()
    names: list[str] = []
    with legroom.fit(model, optimizer, budget="1GiB", planner=planner) as room:
        room._standing.pace = Pace(lambda: device.now)  # the host is as slow as the device, which waits for it
        for number in range(60):
            torch.manual_seed(number)
            with room.step():
                model(torch.randn(512, 128)).backward()
                optimizer.step()
                optimizer.zero_grad()
                assert room.plan is not None or number < 2
                device.now += second_seconds if room.plan is not None and room.plan.planner == "second" else 0.5
            names.append(room.plan.planner if room.plan is not None else "")
            if room.settled:
                break
        assert room.settled
        fallbacks = room.report().fallbacks
        # By the pace of the plan that stays, not of the one that was tried last; steps here take what no step does.
        assert room.timeline is not None
        expected = min(0.5 if stays == "first" else second_seconds, 3.0 * room.timeline.seconds)
        assert not room._standing.pace.timing
        assert room.report().predicted_step_seconds == pytest.approx(expected, rel=0.03)
    assert "second" in names
    assert names[-1] == stays
    assert ("the plan before was faster: back to it" in fallbacks) == (stays == "first")


def test_one_that_does_not_fit_any_more_is_not_taken_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps under the second plan were seen to take more than the recorded one: the first would be above the budget."""
    monkeypatch.setattr(rooms, "probe", lambda *_: QUICK)
    monkeypatch.setattr(standing, "_WORTH_ANOTHER", 1e9)  # which is thought to be faster does not matter

    def planner(trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        first = hardware.host.tick <= COSTS.tick
        decisions = tuple(Swap() if gap < 1 or not first else Keep() for gap in range(len(trace.gaps)))
        return Plan(decisions, signature(trace), "first" if first else "second", budget_bytes, 0, 0.0, ())

    def trained(budget: int | str, more_bytes: int) -> tuple[str, int]:
        device = Timed()
        monkeypatch.setattr(rooms, "open_device", lambda *_: device)
        model, optimizer = built()
        with legroom.fit(model, optimizer, budget=budget, planner=planner) as room:
            room._standing.pace = Pace(lambda: device.now)
            for number in range(60):
                torch.manual_seed(number)
                with room.step():
                    second = room.plan is not None and room.plan.planner == "second"
                    loss = model(torch.randn(512, 128))
                    if second:
                        torch.empty(more_bytes, dtype=torch.uint8)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    device.now += 0.9 if second else 0.5
                if room.settled:
                    break
            assert room.settled and room.plan is not None and room.timeline is not None
            return room.plan.planner, room.timeline.peak_bytes

    planner_name, peak = trained("1GiB", 0)
    assert planner_name == "first"
    assert trained(peak + 4096, 3 * 2**20)[0] == "second"


def test_one_above_the_budget_is_not_taken_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that minds the budget when it is first asked, and not when it is asked again for a slower host."""
    monkeypatch.setattr(rooms, "probe", lambda *_: QUICK)
    device = Timed()
    asked: list[bool] = []

    def planner(trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        first = hardware.host.tick <= COSTS.tick
        asked.append(first)
        decisions = (Swap() if first else Keep(),) * len(trace.gaps)
        return Plan(decisions, signature(trace), "first" if first else "second", budget_bytes, 0, 0.0, ())

    model, optimizer = built()

    def step() -> None:
        model(torch.randn(512, 128)).backward()
        optimizer.step()
        optimizer.zero_grad()
        device.now += 0.5

    trace = legroom.capture(step, model=model, optimizer=optimizer)
    monkeypatch.setattr(rooms, "open_device", lambda *_: device)
    with legroom.fit(model, optimizer, budget=trace.peak_bytes - 1, planner=planner) as room:
        room._standing.pace = Pace(lambda: device.now)
        for _ in range(60):
            with room.step():
                step()
            if room.settled:
                break
        assert room.settled and room.plan is not None
        assert room.plan.planner == "first"
        assert room.report().fallbacks["planned again for the host, above the budget: the plan before stays"] == 1
    assert asked == [True, False]
