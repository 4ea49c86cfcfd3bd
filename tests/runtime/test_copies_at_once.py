"""Copies on the CPU that whoever asks for them waits for at once."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from legroom.errors import DeviceError
from legroom.runtime.device import CpuDevice, FileCopy

NBYTES = 3 * 4096 + 7


@pytest.fixture
def device(tmp_path: Path) -> Iterator[CpuDevice]:
    device = CpuDevice(str(tmp_path))
    yield device
    device.close()


def noise(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("out_waits", [False, True])
@pytest.mark.parametrize("in_waits", [False, True])
def test_the_same_bytes_come_back(device: CpuDevice, out_waits: bool, in_waits: bool) -> None:
    sources = [noise(seed) for seed in range(4)]
    moved = [device.copy_out(source, waits=out_waits) for source in sources]
    for _, copy in moved:
        copy.wait()
    hosts = [host for host, _ in moved]
    for host, source in zip(reversed(hosts), reversed(sources), strict=True):
        target = torch.zeros(NBYTES, dtype=torch.uint8)
        device.copy_in(host, target, waits=in_waits).wait()
        assert torch.equal(target, source)
        host.drop()
    again, copy = device.copy_out(noise(9), waits=True)
    copy.wait()
    assert isinstance(again, FileCopy)
    assert again.slot.offset == 0  # a place that was given back


def test_no_thread_is_asked(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> Any:
        raise AssertionError("a copy went to a thread")

    monkeypatch.setattr(device.spill, "outward", refuses)
    monkeypatch.setattr(device.spill, "inward", refuses)
    host, _ = device.copy_out(noise(0), waits=True)
    device.copy_in(host, torch.empty(NBYTES, dtype=torch.uint8), waits=True)


def test_a_full_disk_keeps_no_place(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(DeviceError, match="is full"):
            device.copy_out(noise(0), waits=True)
    host, _ = device.copy_out(noise(1), waits=True)
    assert isinstance(host, FileCopy)
    assert host.slot.offset == 0


def test_a_closed_device_refuses(device: CpuDevice) -> None:
    host, _ = device.copy_out(noise(0), waits=True)
    device.close()
    for copy in (
        lambda: device.copy_out(noise(1), waits=True),
        lambda: device.copy_in(host, torch.empty(NBYTES, dtype=torch.uint8), waits=True),
    ):
        with pytest.raises(DeviceError, match="closed"):
            copy()
