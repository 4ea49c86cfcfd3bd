"""What a room costs in time; the figures come from `bench/price.py`.

The bounds are loose, for busy machines; on a quiet one the aims are 1.03 above the plain peak and 1.25 at half of the
range.
"""

from __future__ import annotations

import statistics
import sys

import pytest

from bench.price import ABOVE, HALF, SMALL, ratios


@pytest.mark.usefixtures("default_planner")
@pytest.mark.parametrize(("share", "bound"), [(ABOVE, 1.25), (HALF, 1.6)], ids=["above the peak", "half of the range"])
def test_the_price_of_a_step(share: float, bound: float, capsys: pytest.CaptureFixture[str]) -> None:
    found, report = ratios(share, SMALL, pairs=10)
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
