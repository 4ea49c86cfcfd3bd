"""What a step in a room costs on the CPU, as a ratio to plain steps right beside it in one process.

    python bench/price.py [--pairs 30] [--small]

Plain and legroom steps alternate, so that load from elsewhere falls on both; the median ratio of neighbours counts. The
aims: 1.03 with a budget above the plain peak, 1.25 at half of the range between the smallest budget and that peak.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

import legroom
from legroom import demo

SMALL = demo.Setup(layers=4, width=128, context=64, batch=8, vocabulary=1024)
ABOVE, HALF = 1.2, 0.5


def ratios(share: float, setup: demo.Setup, *, pairs: int) -> tuple[list[float], legroom.Report]:
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
            if room.report().steps >= 20:
                raise RuntimeError(f"no steady plan after 20 steps: {room.report().fallbacks}")
        found = []
        gc.disable()
        try:
            for pair in range(pairs):
                if pair % 2:
                    plain = _seconds(step, nullcontext())
                    ours = _seconds(step, room.step())
                else:
                    ours = _seconds(step, room.step())
                    plain = _seconds(step, nullcontext())
                found.append(ours / plain)
        finally:
            gc.enable()
        return sorted(found), room.report()


def _seconds(step: Callable[[], Any], around: Any) -> float:
    start = time.perf_counter()
    with around:
        step()
    return time.perf_counter() - start


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--pairs", type=int, default=30)
    options.add_argument("--small", action="store_true", help="the small model of the tests, not the demo's")
    chosen = options.parse_args()
    today = datetime.datetime.now(datetime.UTC).date()
    print(f"{today}, torch {torch.__version__}, {torch.get_num_threads()} threads, {chosen.pairs} pairs of steps")
    for share, name in ((ABOVE, "above the plain peak"), (HALF, "half of the range")):
        found, report = ratios(share, SMALL if chosen.small else demo.Setup(), pairs=chosen.pairs)
        quarter = max(1, len(found) // 4)
        print(
            f"{name:22s} {statistics.median(found):.3f} x plain (middle half {found[quarter]:.3f} to "
            f"{found[-quarter - 1]:.3f}), budget {report.budget_bytes:,} bytes, peak {report.peak_bytes:,}"
        )


if __name__ == "__main__":
    main()
