"""A digest of bytes in the host's memory: the two sums that `runtime/hashing.py` tells of."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from legroom.kernels.compiling import compiled, inner

_FIRST_SEED, _SECOND_SEED = np.uint64(0x5851F42D4C957F2D), np.uint64(0x14057B7EF767814F)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_30, _27, _31, _8 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(8)


def _at(unsigned: Any) -> Any:
    """What an array of unsigned integers at an address has at an index, wherever it begins. To wrap the bytes of a
    small tensor in a real array takes several times as long as its sums."""

    def typed(typing: Any, address: Any, index: Any) -> Any:
        def load(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            first = builder.inttoptr(arguments[0], context.get_value_type(unsigned).as_pointer())
            return builder.load(builder.gep(first, [arguments[1]]), align=1)

        return unsigned(types.uint64, types.int64), load

    return intrinsic(typed)


_word_at, _byte_at = _at(types.uint64), _at(types.uint8)


@inner
def _mix(x: Any) -> Any:
    x = (x ^ (x >> _30)) * _M1
    x = (x ^ (x >> _27)) * _M2
    return x ^ (x >> _31)


@compiled
def sums_at(address: int, nbytes: int) -> tuple[int, int]:
    """Of the bytes from an address on. Unsigned, so that it wraps: the compiler works on several words at once."""
    start, whole = np.uint64(address), nbytes // 8
    first = second = np.uint64(0)
    for i in range(whole):
        word, place = _word_at(start, i), np.uint64(i) * _GOLDEN
        first += _mix(word ^ (place + _FIRST_SEED))
        second += _mix(word ^ (place + _SECOND_SEED))
    # What is left behind the last whole word makes a word of its own, filled up with zeros.
    rest = np.uint64(0)
    for i in range(8 * whole, nbytes):
        rest |= np.uint64(_byte_at(start, i)) << (np.uint64(i) % _8 * _8)
    place = np.uint64(whole) * _GOLDEN
    return first + _mix(rest ^ (place + _FIRST_SEED)), second + _mix(rest ^ (place + _SECOND_SEED))
