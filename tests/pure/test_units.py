from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.errors import LegroomError
from legroom.units import LARGEST_BYTES, UnitError, format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("12GiB", 12 * 2**30),
        ("600MiB", 600 * 2**20),
        ("1.5 GB", 1_500_000_000),
        ("750_000_000 B", 750_000_000),
        ("0.1GB", 100_000_000),
        (" 3 kib ", 3072),
        ("4096b", 4096),
        ("0.5KiB", 512),
        ("1.9999B", 1),
        (1, 1),
        (2**40, 2**40),
    ],
)
def test_reads(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "value",
    [
        "12",
        "1_000",
        "-1GiB",
        "+1GiB",
        "12 bananas",
        "nan",
        "nanGiB",
        "inf",
        "infGiB",
        "1e9B",
        "0B",
        "0.4B",
        "",
        "   ",
        "GiB",
        "1..5GB",
        "1__0B",
        "_1B",
        "1.GB",
        ".5GB",
        "١GiB",  # a digit, but no ASCII one
        "9" * 60 + "GiB",
        "9" * 1_000_000 + "GiB",
        "1 GiB\x00",
        0,
        -1,
        True,
        False,
        1.5,
        math.nan,
        math.inf,
        None,
        b"12GiB",
        2**62,
        10**6000,
        -(10**6000),
    ],
    ids=lambda value: "huge" if isinstance(value, int) and abs(value) > 2**64 else repr(value)[:12],
)
def test_refuses(value: object) -> None:
    with pytest.raises(UnitError) as caught:
        parse_bytes(value)  # type: ignore[arg-type]
    assert isinstance(caught.value, LegroomError)
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 400


def test_a_missing_unit_is_named() -> None:
    with pytest.raises(UnitError, match="no unit"):
        parse_bytes("12")


@given(st.integers(1, LARGEST_BYTES - 1))
def test_bytes_round_trip_exactly(nbytes: int) -> None:
    assert parse_bytes(nbytes) == parse_bytes(f"{nbytes}B") == parse_bytes(f"{nbytes:_} B") == nbytes


@given(st.integers(1, LARGEST_BYTES // 2))
def test_what_is_printed_is_read_back_within_its_rounding(nbytes: int) -> None:
    again = parse_bytes(format_bytes(nbytes))
    assert abs(again - nbytes) <= max(0.0501 * again, 0.5)
    assert format_bytes(again) == format_bytes(nbytes)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        nbytes = parse_bytes(text)
    except UnitError:
        return
    assert 1 <= nbytes < LARGEST_BYTES


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**20 - 1, "1.0 MiB"),
        (-2048, "-2.0 KiB"),
        (2**61, "2048.0 PiB"),
    ],
)
def test_format_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1.234, "1.23 s"),
        (0.9996, "1.00 s"),
        (0.0456, "45.6 ms"),
        (0.5, "500 ms"),
        (7.8e-6, "7.80 µs"),
        (3e-9, "3.00 ns"),
        (125, "2 min 05 s"),
        (99.96, "1 min 40 s"),
        (-0.5, "-500 ms"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
