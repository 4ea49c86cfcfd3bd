"""From the blocks of a sheltered step to what the step asks of the allocator when everything is kept.

In a sheltered step a storage may live in several blocks, one after another: the one that its op asked for, and one for
each time that it came back. Kept, it has the first one until the program lets go of the last. Which block is which
storage is told by who asked for it, an op that makes the storage or a tick that brings it back, and by its size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from legroom.curve import Curve, Move
from legroom.ir import Op, Trace

_UNREPEATED = "legroom.unrepeated"  # stands behind an op, and makes some of its outputs


def requests_of(trace: Trace, curve: Curve) -> tuple[tuple[tuple[int, int], ...], ...]:
    """`Trace.requests` of a trace that was made from this curve; nothing where it cannot be told."""
    if not any(move.what == "asked" for segment in curve.segments for move in segment.moves):
        return ()  # the log does not tell of blocks
    owners = _made(trace, curve)
    made = set(owners.values())
    if any(s.gaps and s.kind == "activation" and s.id not in made for s in trace.storages):
        return ()  # a plan may move it, and what it then leaves behind would be counted twice
    owners |= _reloaded(trace, curve)
    kept = _Kept(trace, owners)
    into = _written_in_place(trace)
    return tuple(
        tuple(_seen_by_nobody(into, (request for move in segment.moves for request in kept.requests(move, number))))
        for number, segment in enumerate(curve.segments, start=-1)
    )


_PRODUCTS = ("aten.mm.default", "aten.bmm.default", "aten.baddbmm.default")


def _written_in_place(trace: Trace) -> dict[int, int]:
    """Products to which something is added at once, and the sums.

    Inside `linear` and attention PyTorch adds in place, unless a mode looks on: then the sum is a tensor of its own, in
    the step that is recorded and in no other. The product is not read again, and both come from one line.
    """
    made: dict[int, Op] = {}
    readers: Counter[int] = Counter()
    for op in trace.ops:
        readers.update({storage for storage, _ in op.reads})
        made.update((storage, op) for storage, version in op.writes if version == 0)
    found: dict[int, int] = {}
    for op in trace.ops:
        if op.name != "aten.add.Tensor" or op.phase != "forward" or len(op.writes) != 1 or not op.reads:
            continue
        product, total = op.reads[0][0], op.writes[0][0]
        maker, storage = made.get(product), trace.storages[product]
        if maker is None or maker.name not in _PRODUCTS or (maker.line, maker.module) != (op.line, op.module):
            continue
        between = trace.ops[maker.id + 1 : op.id]
        views = sum(bool(step.reads) and not step.writes and step.reads[0][0] == product for step in between)
        once = readers[product] == 1 + views and not storage.gaps and storage.kind == "temporary"
        if once and storage.nbytes == trace.storages[total].nbytes and not any(step.writes for step in between):
            found[product] = total
    return found


def _seen_by_nobody(into: dict[int, int], requests: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The requests of a step without a mode: what is added in place has the block of what it is added to."""
    sums = set(into.values())
    for key, nbytes in requests:
        if key in into:
            if nbytes > 0:
                yield into[key], nbytes
        elif key not in sums or nbytes == 0:
            yield key, nbytes


def _made(trace: Trace, curve: Curve) -> dict[int, int]:
    """Storages by the keys of the blocks that their ops asked for. What backward makes and saves has no op."""
    owners: dict[int, int] = {}
    left: list[Move] = []
    for op, run in zip(trace.ops, curve.ops, strict=True):
        if op.name != _UNREPEATED:
            left = list(run.left)
        for storage, version in op.writes:
            if version == 0:
                _claim(owners, left, storage, trace)
    return owners


def _reloaded(trace: Trace, curve: Curve) -> dict[int, int]:
    """Storages by the keys of the blocks in which they came back."""
    owners: dict[int, int] = {}
    for tick, segment in zip(trace.ticks, curve.segments[1:], strict=True):
        if tick.kind == "unpack":
            _claim(owners, segment.reloads[::-1], tick.storage, trace)
    return owners


def _claim(owners: dict[int, int], moves: list[Move], storage: int, trace: Trace) -> None:
    for place, move in enumerate(moves):
        if move.nbytes == trace.storages[storage].nbytes:
            owners[move.key] = storage
            del moves[place]
            return


class _Kept:
    """Leaves out of a step's moves what legroom did."""

    def __init__(self, trace: Trace, owners: dict[int, int]) -> None:
        self._trace = trace
        self._owners = owners
        self._saved = {tick.storage for tick in trace.ticks}
        self._asked: set[int] = set()  # blocks of the program that are not known to be a storage's
        self._away: dict[int, None] = {}  # storages that were evicted

    def requests(self, move: Move, tick: int) -> list[tuple[int, int]]:
        """What the program did there, as far as it is its own doing."""
        if move.what == "gone":
            dead = self._dead(move.nbytes, tick)
            self._away.pop(dead, None)
            return [(dead, 0)] if dead >= 0 else []
        storage = self._owners.get(move.key)
        if storage is None:
            return self._of_no_storage(move)
        match move.what:
            case "asked":
                return [(storage, move.nbytes)]
            case "freed":
                return [(storage, 0)]
            case "reloaded":
                self._away.pop(storage, None)
            case "evicted" if storage in self._saved:
                self._away[storage] = None
            case "evicted":
                return [(storage, 0)]  # the program let go of it before, and we were the last to hold it
        return []

    def _of_no_storage(self, move: Move) -> list[tuple[int, int]]:
        key = len(self._trace.storages) + move.key
        if move.what == "asked":
            self._asked.add(key)
            return [(key, move.nbytes)]
        if key not in self._asked:
            return []  # legroom's own
        self._asked.remove(key)
        return [(key, 0)]

    def _dead(self, nbytes: int, tick: int) -> int:
        """Which one it was that died elsewhere: of this size, and with a gap that ends there; -1 if none."""
        storages = self._trace.storages
        found = [storage for storage in self._away if storages[storage].nbytes == nbytes]
        return min(found, key=lambda s: not storages[s].gaps or storages[s].gaps[-1][1] != tick, default=-1)
