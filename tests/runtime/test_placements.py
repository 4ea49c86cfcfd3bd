"""Best fit as we have it against where PyTorch's allocator put the tensors of a real step.

data/placements.json.gz: the large segments before a planned step of a vision transformer in 3.17 GiB on an H200 (torch
2.11, expandable segments), as `torch.cuda.memory_snapshot()` gives them, and what the step asked for and gave back up
to where memory had to be mapped anew: [bytes, address], 0 bytes where the block goes.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from legroom.arrange import UNBOUNDED, Arena, Piece
from legroom.runtime.cuda import pieces_of

DATA = json.loads(gzip.decompress((Path(__file__).parent / "data" / "placements.json.gz").read_bytes()))


def in_order(segments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    growing = sorted((s for s in segments if s["is_expandable"]), key=lambda s: s["address"])
    return [*growing, *(s for s in segments if not s["is_expandable"])]


def test_every_tensor_falls_where_it_fell() -> None:
    pieces = [piece for piece in pieces_of(DATA["segments"]) if piece.nbytes]
    free = [block for segment in in_order(DATA["segments"]) for block in segment["blocks"]]
    free = [block for block in free if block["state"] == "inactive"]
    assert [piece.nbytes for piece in pieces] == [block["size"] for block in free]
    arena, start, places = Arena(pieces), 0, []
    for piece, block in zip(pieces, free, strict=True):
        places.append((start, start + piece.nbytes, block["address"] - start))
        start += piece.nbytes + 1
    live: dict[int, tuple[int, int]] = {}
    for number, (nbytes, address) in enumerate(DATA["events"]):
        if nbytes == 0:
            arena.give_back(*live.pop(address))
            continue
        rounded = -(-nbytes // 512) * 512
        got = arena.take(rounded)
        assert got is not None, f"no hole for request {number}"
        shift = next(shift for first, end, shift in places if first <= got[0] < end)
        assert got[0] + shift == address, f"request {number} of {nbytes} bytes fell elsewhere"
        live[address] = got[0], rounded
    assert len(DATA["events"]) > 400


@pytest.mark.parametrize("order", [1, -1])
def test_what_lies_behind_a_piece(order: int) -> None:
    def segment(address: int, sizes: list[tuple[int, str]], *, growing: bool) -> dict[str, Any]:
        total = sum(size for size, _ in sizes)
        return {
            "address": address,
            "total_size": total,
            "is_expandable": growing,
            "blocks": [{"size": size, "state": state} for size, state in sizes],
        }

    segments = [
        segment(1000, [(10, "inactive"), (5, "active_allocated"), (20, "inactive")], growing=True),
        segment(1100, [(30, "active_allocated")], growing=True),
        segment(1200, [(40, "inactive")], growing=True),
        segment(50, [(7, "active_pending_free"), (60, "inactive")], growing=False),
    ]
    behind = [Piece(10), Piece(20, 1100 - 1035), Piece(0, 1200 - 1130), Piece(40, UNBOUNDED), Piece(60)]
    assert pieces_of(segments[::order]) == behind
    assert pieces_of([]) == []
