"""Digests on the GPU, of more than 32 bits can count."""

from __future__ import annotations

import struct

import pytest
import torch

from legroom.runtime.hashing import _hash_reference, hash_bytes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("nbytes", [2**31 - 8, 2**31, 2**31 + 27, 2**32 + 8])
def test_what_is_larger_than_two_gibibytes(nbytes: int) -> None:
    """The place of what is left behind the last word did not fit into 32 bits, and memory far in front was read."""
    flat = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    words = flat[: nbytes // 8 * 8].view(torch.int64)
    torch.arange(words.numel(), out=words)
    flat[nbytes // 8 * 8 :] = 255
    sums = torch.zeros(2, dtype=torch.int64, device="cuda")
    _hash_reference(words, flat[nbytes // 8 * 8 :], sums)
    digest = hash_bytes(flat.untyped_storage())
    assert digest == struct.pack("<qqq", *sums.tolist(), nbytes)
    flat[-1] += 1
    assert hash_bytes(flat.untyped_storage()) != digest
