"""What a room costs in time, as ratios within one process.

Plain and legroom steps alternate, so that load from elsewhere falls on both; the median ratio of neighbours is taken.
The bounds are loose, for busy machines; on a quiet one the aims are 1.03 above the plain peak and 1.25 at half of the
range.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

import legroom
from legroom import demo

PAIRS = 10
SETUP = demo.Setup(layers=4, width=128, context=64, batch=8, vocabulary=1024)


def seconds_of(step: Callable[[], Any], around: Any) -> float:
    start = time.perf_counter()
    with around:
        step()
    return time.perf_counter() - start


def ratios(share: float, setup: demo.Setup) -> tuple[list[float], legroom.Report]:
    """Times of a step in a room over those of a plain step right beside it, sorted."""
    model, optimizer, step = demo._training(setup)
    trace = legroom.capture(step, model=model, optimizer=optimizer)
    floor = legroom.floor_bytes(trace)
    budget = floor + int(share * (trace.peak_bytes - floor))
    del trace
    gc.collect()
    with legroom.fit(model, optimizer, budget=budget) as room:
        while room.report().planned_steps < 5 or room.report().steps < 8:
            with room.step():
                step()
            assert room.report().steps < 20, room.report().fallbacks
        found = []
        gc.disable()
        try:
            for pair in range(PAIRS):
                if pair % 2:
                    plain = seconds_of(step, nullcontext())
                    ours = seconds_of(step, room.step())
                else:
                    ours = seconds_of(step, room.step())
                    plain = seconds_of(step, nullcontext())
                found.append(ours / plain)
        finally:
            gc.enable()
        return sorted(found), room.report()


@pytest.mark.parametrize(("share", "bound"), [(1.2, 1.25), (0.5, 1.6)], ids=["above the peak", "half of the range"])
def test_the_price_of_a_step(share: float, bound: float, capsys: pytest.CaptureFixture[str]) -> None:
    found, report = ratios(share, SETUP)
    median = statistics.median(found)
    with capsys.disabled():
        spread = f"{found[0]:.3f} to {found[-1]:.3f}"
        sys.stdout.write(f"\nbudget at {share:.0%} of the range: {median:.3f} × plain ({spread})\n")
    assert report.peak_bytes <= report.budget_bytes
    if share > 1:
        assert report.bytes_swapped == report.bytes_recomputed == 0
    else:
        assert report.bytes_swapped + report.bytes_recomputed > 0
    assert median < bound, f"{found}\n{report}"
