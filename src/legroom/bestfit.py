"""Best fit over a step's requests, compiled: thousands of arrangements are tried before a plan is used."""

from __future__ import annotations

from legroom.kernels.compiling import compiled
from legroom.tables import Ints


@compiled
def _next(starts: Ints, sizes: Ints, count: int, nbytes: int, after: int) -> int:
    """Which hole is the smallest that is large enough, the lowest among equals, of those behind hole `after` in that
    order, where that is not -1; -1 where none is."""
    best = -1
    for hole in range(count):
        size, start = sizes[hole], starts[hole]
        if size < nbytes:
            continue
        if after >= 0 and (size < sizes[after] or (size == sizes[after] and start <= starts[after])):
            continue
        if best < 0 or size < sizes[best] or (size == sizes[best] and start < starts[best]):
            best = hole
    return best


@compiled
def _beyond(edges: Ints, end: int) -> int:
    """What a hole that ends there could grow by. edges: addresses, each with that many bytes."""
    for row in range(len(edges) // 2):
        if edges[2 * row] == end:
            return int(edges[2 * row + 1])
    return 0


@compiled
def _smallest(starts: Ints, sizes: Ints, count: int, nbytes: int, edges: Ints) -> int:
    """The hole that is taken, as arrange.Arena.take has it; -1 where none is large enough."""
    hole = _next(starts, sizes, count, nbytes, -1)
    while hole >= 0:
        more = _beyond(edges, starts[hole] + sizes[hole])
        if more == 0:
            break
        other = _next(starts, sizes, count, nbytes, hole)
        if other < 0 or sizes[other] + _beyond(edges, starts[other] + sizes[other]) >= sizes[hole] + more:
            break
        hole = other
    return hole


@compiled
def _take(starts: Ints, sizes: Ints, count: int, hole: int, nbytes: int) -> int:
    """Take the first bytes of a hole. How many holes there are then."""
    starts[hole] += nbytes
    sizes[hole] -= nbytes
    if sizes[hole] > 0:
        return count
    starts[hole], sizes[hole] = starts[count - 1], sizes[count - 1]
    return count - 1


@compiled
def _give_back(starts: Ints, sizes: Ints, count: int, start: int, nbytes: int) -> int:
    """Make a hole, one with those that it touches. How many holes there are then."""
    hole = 0
    while hole < count:
        if starts[hole] == start + nbytes or starts[hole] + sizes[hole] == start:
            start = min(start, starts[hole])
            nbytes += sizes[hole]
            count -= 1
            starts[hole], sizes[hole] = starts[count], sizes[count]
        else:
            hole += 1
    starts[count], sizes[count] = start, nbytes
    return count + 1


@compiled
def _largest(sizes: Ints, count: int) -> int:
    largest = 0
    for hole in range(count):
        largest = max(largest, sizes[hole])
    return largest


@compiled
def how_far(
    keys: Ints, requests: Ints, first: int, end: int, spacers: Ints, starts: Ints, sizes: Ints, count: int,
    blocks: Ints, least_bytes: int, edges: Ints,
) -> tuple[int, int, int]:  # fmt: skip
    """Up to which of a step's events, from `first` on and before `end`, all go well; the largest hole at the first that
    does not, and how many holes there are.

    keys, requests: as arrange.Event, keys counted from 0. spacers: rows of tick, until, bytes, and room for an address.
    starts, sizes: holes, `count` of them before the first event, with room for one more than there are events. blocks:
    room for an address and a size for each key. least_bytes: smaller requests are passed over. edges: as for
    `_beyond`.
    """
    rows = len(spacers) // 4
    for place in range(first, end):
        key, nbytes = keys[place], requests[place]
        if nbytes < 0:
            for row in range(rows):
                if spacers[4 * row + 1] == key:
                    count = _give_back(starts, sizes, count, spacers[4 * row + 3], spacers[4 * row + 2])
            for row in range(rows):
                if spacers[4 * row] == key:
                    hole = _smallest(starts, sizes, count, spacers[4 * row + 2], edges)
                    if hole < 0:
                        return place, _largest(sizes, count), count
                    spacers[4 * row + 3] = starts[hole]
                    count = _take(starts, sizes, count, hole, spacers[4 * row + 2])
        elif nbytes > least_bytes:
            hole = _smallest(starts, sizes, count, nbytes, edges)
            if hole < 0:
                return place, _largest(sizes, count), count
            blocks[2 * key], blocks[2 * key + 1] = starts[hole], nbytes
            count = _take(starts, sizes, count, hole, nbytes)
        elif nbytes == 0 and blocks[2 * key + 1] > 0:
            count = _give_back(starts, sizes, count, blocks[2 * key], blocks[2 * key + 1])
            blocks[2 * key + 1] = 0
    return end, 0, count
