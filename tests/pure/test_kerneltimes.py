"""How long an op keeps the device busy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.kerneltimes import Kernel, busy_seconds

_FIRST_NS = 1_500  # before an op's first kernel

kernels = st.lists(
    st.builds(
        lambda start, length, stream: Kernel(start, start + length, stream),
        st.integers(0, 60_000),
        st.integers(0, 20_000),
        st.integers(0, 2),
    ),
    max_size=8,
)


@pytest.mark.parametrize(
    ("found", "busy_ns"),
    [
        pytest.param([], 0, id="no kernel"),
        pytest.param([(0, 1000, 7)], 2500, id="one"),
        pytest.param([(0, 1000, 7), (90_000, 91_000, 7)], 5000, id="the host was late"),
        pytest.param([(90_000, 91_000, 7), (0, 1000, 7)], 5000, id="in any order"),
        pytest.param([(0, 9000, 7), (1000, 4000, 8), (2000, 10_000, 9)], 11_500, id="side by side"),
        pytest.param([(0, 1000, 7), (3700, 4700, 8)], 6200, id="one stream after another"),
        pytest.param([(0, 1000, 7), (90_000, 91_000, 8)], 8500, id="one stream after another, and the host was late"),
        pytest.param([(0, 9000, 7), (8500, 9500, 7)], 11_000, id="the next begins at the tail of the one before"),
    ],
)
def test_busy(found: list[tuple[int, int, int]], busy_ns: int) -> None:
    assert busy_seconds(Kernel(*each) for each in found) == pytest.approx(busy_ns * 1e-9)


@given(kernels)
def test_no_less_than_what_is_covered_and_no_more_than_all_of_it_in_a_row(found: list[Kernel]) -> None:
    covered_ns = len({ns for kernel in found for ns in range(kernel.start_ns, kernel.end_ns)})
    in_a_row_ns = sum(kernel.end_ns - kernel.start_ns + 5000 for kernel in found)
    busy_ns = busy_seconds(found) * 1e9
    assert covered_ns + _FIRST_NS * bool(found) - 1 <= busy_ns <= in_a_row_ns + 1
