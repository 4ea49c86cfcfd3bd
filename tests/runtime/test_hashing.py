"""The digest of bytes: it tells bytes apart, and kernel and reference agree."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import legroom
from legroom.runtime import hashing
from legroom.runtime.hashing import MOST_DUE, DueFingerprint, hash_bytes, hash_host_bytes

SIZES = [0, 1, 7, 8, 9, 4095 * 8, 4096 * 8, 4096 * 8 + 3, 100_003]


def storage_of(data: bytes) -> torch.UntypedStorage:
    return torch.tensor(list(data), dtype=torch.uint8).untyped_storage()


@given(st.binary(min_size=1, max_size=100), st.data())
@settings(max_examples=200, deadline=None)
def test_one_changed_bit_changes_it(data: bytes, draw: st.DataObject) -> None:
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    other = bytearray(data)
    other[bit // 8] ^= 1 << bit % 8
    assert hash_bytes(storage_of(data)) == hash_bytes(storage_of(data))
    assert hash_bytes(storage_of(data)) != hash_bytes(storage_of(bytes(other)))
    assert hash_bytes(storage_of(data)) != hash_bytes(storage_of(data + b"\0"))


@given(st.binary(min_size=9, max_size=60))
@settings(max_examples=100, deadline=None)
def test_order_counts(data: bytes) -> None:
    turned = data[8:] + data[:8]
    assert (hash_bytes(storage_of(data)) == hash_bytes(storage_of(turned))) == (data == turned)


@given(st.binary(min_size=1, max_size=300), st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_the_host_agrees_with_the_reference(data: bytes, begin: int) -> None:
    """Wherever the bytes begin."""
    around = bytearray(b"*" * begin + data + b"more")
    placed = torch.frombuffer(around, dtype=torch.uint8, offset=begin, count=len(data)).untyped_storage()
    assert placed.nbytes() == len(data)
    assert hash_host_bytes(placed) == hash_bytes(storage_of(data))


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("nbytes", [*SIZES, 3 * (1 << 20) + 5])
def test_the_host_agrees_with_the_reference_on_more(
    nbytes: int, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where numba compiles nothing, for debugging, the compiled one is not asked: it would take an hour."""
    if not compiles and nbytes:
        monkeypatch.setattr(hashing, "_COMPILES", False)
        monkeypatch.setattr(hashing, "sums_at", None)
    flat = torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))
    assert hash_host_bytes(flat.untyped_storage()) == hash_bytes(flat.untyped_storage())


def test_what_has_no_bytes_anywhere_is_not_read() -> None:
    """Tensors of the meta device come up in recorded steps: where modules are made without filling them, say."""
    meta = torch.empty(1000, device="meta").untyped_storage()
    assert meta.nbytes() == 4000
    assert hash_host_bytes(meta) == hash_host_bytes(torch.empty(1000, device="meta").untyped_storage())
    model = torch.nn.Linear(4, 4)

    def step() -> None:
        torch.nn.utils.skip_init(torch.nn.Linear, 4, 4)
        model(torch.ones(2, 4) + (torch.empty(10, device="meta") + 1).numel()).sum().backward()

    assert legroom.capture(step, model=model).peak_bytes > 0


def test_many_that_are_read_together() -> None:
    """More than there are places, asked for before places are used again."""
    storages = [storage_of(bytes([n % 251, n // 251, 7])) for n in range(40)]
    expected = [hash_bytes(storage) for storage in storages]
    asked = 0
    while asked <= 5 * MOST_DUE:
        count = min(MOST_DUE, 700 + asked % 1301)
        prints = [DueFingerprint(storages[(asked + n) % 40]) for n in range(count)]
        for n in (0, 1, count // 2, count - 1):
            assert prints[n].value() == expected[(asked + n) % 40]
        assert [p.value() for p in prints] == [expected[(asked + n) % 40] for n in range(count)]
        asked += count


_INTERPRETED = """
import torch, triton
from legroom.runtime import hashing
for nbytes in {sizes}:
    flat = torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))
    whole = nbytes // 8
    sums = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    words = flat[: whole * 8].view(torch.int64)
    hashing._hash_reference(words, flat[whole * 8 :], sums[0])
    grid = (triton.cdiv(whole + 1, 4096),)
    hashing._hash_kernel[grid](words, flat, sums[1], whole, whole * 8, nbytes, *hashing._signed(), BLOCK=4096)
    assert torch.equal(*sums), (nbytes, sums)
print("same")
"""


def test_the_kernel_agrees_with_the_reference() -> None:
    pytest.importorskip("triton")
    code = _INTERPRETED.format(sizes=SIZES[1:])
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout.strip().startswith("same"), done.stderr
