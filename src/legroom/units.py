"""Bytes and seconds as people write them: "12GiB" <-> 12884901888.

`KiB MiB GiB TiB PiB` count in 1024s, `kB MB GB TB PB` in 1000s, `B` in ones; case does not matter. A string without a
unit is refused: "12" may mean bytes or gibibytes, and a guess that is wrong by 2**30 is worse than an error.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

from legroom.errors import LegroomError, quote

LARGEST_BYTES = 2**62  # sums of a few sizes still fit 64-bit signed integers

_BINARY = ("KiB", "MiB", "GiB", "TiB", "PiB")
_FACTORS = {
    "b": 1,
    **{name.lower(): 1024 ** (power + 1) for power, name in enumerate(_BINARY)},
    **{name: 1000 ** (power + 1) for power, name in enumerate(("kb", "mb", "gb", "tb", "pb"))},
}
# ASCII only, and bounded in length before it is tried: Decimal on a megabyte of digits takes seconds.
_PATTERN = re.compile(r"([0-9](?:_?[0-9])*(?:\.[0-9](?:_?[0-9])*)?)\s*([A-Za-z]+)", re.ASCII)
_LONGEST = 64


class UnitError(LegroomError, ValueError):
    """A number of bytes could not be read."""


def parse_bytes(value: int | str) -> int:
    """A number of bytes from an int or a string such as "12GiB", "1.5 GB", "750_000_000 B"."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise UnitError(f'expected bytes as an int or a string such as "12GiB", got {quote(value)}')
    if isinstance(value, str):
        nbytes = _parse_string(value)
    else:
        nbytes = int(value)
    if nbytes < 1:
        raise UnitError(f"expected at least 1 byte, got {quote(value)}")
    if nbytes >= LARGEST_BYTES:
        raise UnitError(f"expected fewer than {format_bytes(LARGEST_BYTES)}, got {quote(value)}")
    return nbytes


def format_bytes(nbytes: int) -> str:
    """ "1.5 GiB", "600.0 MiB", "17 B": what a person reads, rounded to one place."""
    if nbytes < 0:
        return "-" + format_bytes(-nbytes)
    if nbytes < 1024:
        return f"{nbytes} B"
    scaled = float(nbytes)
    for unit in _BINARY:
        scaled /= 1024
        # 1023.96 would print as "1024.0 KiB"; the next unit says the same in fewer digits.
        if scaled < 1023.95 or unit == _BINARY[-1]:
            return f"{scaled:.1f} {unit}"
    raise AssertionError("the last unit always returns")


def format_seconds(seconds: float) -> str:
    """ "1.23 s", "45.6 ms", "7.8 µs", "2 min 05 s": three digits or so."""
    if math.isnan(seconds):
        return "nan"
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    if math.isinf(seconds):
        return "inf"
    if seconds == 0:
        return "0 s"
    if seconds >= 99.95:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    # Thresholds lie where rounding would print 1000: 999.6 ms is shown as 1.00 s.
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= 0.9995 * scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds * 1e9)} ns"


def _parse_string(text: str) -> int:
    if len(text) > _LONGEST:
        raise UnitError(f"expected a number of bytes such as 12GiB, got {len(text)} characters: {quote(text)}")
    stripped = text.strip()
    match = _PATTERN.fullmatch(stripped)
    if match is None:
        if re.fullmatch(r"[0-9][0-9_.]*", stripped, re.ASCII):
            raise UnitError(f'{quote(text)} has no unit; write "{stripped}GiB", "{stripped}MB" or "{stripped}B"')
        raise UnitError(f"cannot read {quote(text)} as a number of bytes; write it as 12GiB, 600MiB, 1.5GB or 4096B")
    number, unit = match.groups()
    factor = _FACTORS.get(unit.lower())
    if factor is None:
        known = ", ".join(("B", *_BINARY, "kB", "MB", "GB", "TB", "PB"))
        raise UnitError(f"unknown unit {quote(unit)} in {quote(text)}; known are {known}")
    # Decimal, since 0.1 GB must be 100000000 and not a float's idea of it; a fraction of a byte is dropped, as a budget
    # must never round up.
    return int(Decimal(number.replace("_", "")) * factor)


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
