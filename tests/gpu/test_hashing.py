"""Digests on the GPU, of more than 32 bits can count."""

from __future__ import annotations

import struct

import pytest
import torch

import legroom
from legroom.runtime.hashing import DeviceFingerprint, _hash_reference, hash_bytes, prepare_digests
from tests.runtime.test_random_plans import random_planner

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


def test_answers_are_right_whoever_had_their_places_before() -> None:
    """Places are given back before what was asked for them has arrived, and more are asked for than there are."""
    prepare_digests(torch.device("cuda", torch.cuda.current_device()))
    tensors = [torch.full((1 << 20,), float(i), device="cuda") for i in range(7)]
    right = [hash_bytes(tensor.untyped_storage()) for tensor in tensors]
    for turn in range(20):
        torch.cuda._sleep(5_000_000)
        for tensor in tensors:
            DeviceFingerprint(tensor.untyped_storage())  # nobody waits for this one
        held = [DeviceFingerprint(tensors[i % 7].untyped_storage()) for i in range(40 if turn else 400)]
        assert [fingerprint.value() for fingerprint in held] == [right[i % 7] for i in range(len(held))]


def test_a_planned_step_gets_no_pinned_memory() -> None:
    torch.cuda.empty_cache()  # of what tests before had: it counts against the budget
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(6))
    ).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(2048, 512, device="cuda")
    with legroom.fit(model, optimizer, budget="1GiB", planner=random_planner((0, 0, 1, 0), 1)) as room:
        taken = []
        for _ in range(24):
            with room.step():
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            taken.append(torch.cuda.host_memory_stats()["num_host_alloc"])
        report = room.report()
    assert report.bytes_recomputed and report.planned_steps >= 20, report
    assert len(set(taken[-12:])) == 1, taken
