from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from legroom import doctor
from legroom.doctor import examine, file_system
from legroom.errors import DeviceError
from legroom.probing import memory_bytes, probe


def test_probe_measures_once_and_leaves_the_random_state_alone(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    hardware = probe("cpu", str(tmp_path))
    assert torch.equal(torch.get_rng_state(), state)
    assert hardware.synchronous
    assert 0 < hardware.duplex_out_bytes_per_second <= hardware.out_bytes_per_second
    assert 0 < hardware.duplex_in_bytes_per_second <= hardware.in_bytes_per_second
    assert 0 < hardware.latency_seconds < 1
    assert 0 <= hardware.copy_compute_share <= 1
    assert list(tmp_path.iterdir()) == []
    start = time.perf_counter()
    assert probe("cpu", str(tmp_path)) is hardware
    assert time.perf_counter() - start < 0.05


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_a_missing_gpu_is_refused() -> None:
    with pytest.raises(DeviceError, match="no CUDA device"):
        probe("cuda")


def test_what_cannot_be_probed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="meta"):
        probe("meta")
    with pytest.raises(DeviceError, match="spill"):
        probe("cpu", str(tmp_path / "missing"))


@pytest.mark.gpu
def test_probe_cuda() -> None:
    hardware = probe("cuda")
    assert not hardware.synchronous
    assert hardware.duplex_out_bytes_per_second <= hardware.out_bytes_per_second
    assert hardware.out_bytes_per_second > 1e9
    assert hardware.in_bytes_per_second > 1e9


def test_memory_is_what_the_machine_has() -> None:
    total, available = memory_bytes()
    assert 2**28 < available <= total


def test_a_folder_in_memory_is_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "file_system", lambda folder: "tmpfs")
    row = next(row for row in examine(str(tmp_path)) if row.what == "spill folder")
    assert row.state == "warn"
    assert "spill_dir" in row.advice


def test_file_system_of_known_mounts() -> None:
    assert file_system("/proc") == "proc"
    assert file_system("a\0b") == "unknown"


@pytest.mark.parametrize("folder", ["/no/such/folder", "a\0b", "/proc"])
def test_the_doctor_never_raises(folder: str) -> None:
    rows = examine(folder)
    assert doctor.worst(rows) == "bad"
    assert all(row.advice for row in rows if row.state != "ok")


@pytest.mark.parametrize(
    ("mimalloc", "missing"), [(True, "MIMALLOC_PURGE_DELAY=0"), (False, "MALLOC_MMAP_THRESHOLD_=1048576")]
)
def test_missing_allocator_settings_are_named(
    mimalloc: bool, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_embeds_mimalloc", lambda: mimalloc)
    for name, value in doctor.ALLOCATOR_SETTINGS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing.partition("=")[0])
    row = next(row for row in examine(str(tmp_path)) if row.what == "CPU allocator")
    assert row.state == "warn"
    assert f"set {missing} before" in row.advice
    monkeypatch.setenv(*missing.split("="))
    row = next(row for row in examine(str(tmp_path)) if row.what == "CPU allocator")
    assert row.state == "ok"
