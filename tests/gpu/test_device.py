"""The host side of the CUDA device: same bits by either way out, buffers handed on in order, everything given back."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from legroom.errors import DeviceError
from legroom.probing import probe
from legroom.runtime.cuda import CudaDevice, PinnedMemory, _PinnedCopy, foreign_bytes
from legroom.runtime.device import Copy, FileCopy, HostCopy
from legroom.runtime.pinned import PinnedPool
from legroom.runtime.residency import Ledger

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

KIB, MIB, GIB = 2**10, 2**20, 2**30
PLENTY = 4 * GIB
LONG = 200_000_000  # cycles that the compute stream is kept busy for: about a tenth of a second


@pytest.fixture
def device(tmp_path: Path) -> Iterator[CudaDevice]:
    made = CudaDevice(0, host_budget_bytes=PLENTY, spill_dir=str(tmp_path))
    yield made
    made.close()


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[CudaDevice]:
    """No room in pinned memory for a tensor of a MiB."""
    made = CudaDevice(0, host_budget_bytes=MIB, spill_dir=str(tmp_path))
    yield made
    made.close()


def noise(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda", generator=generator)


def out(device: CudaDevice, bytes_: torch.Tensor) -> HostCopy:
    host, copy = device.copy_out(bytes_)
    copy.wait()
    return host


def back(device: CudaDevice, host: HostCopy, nbytes: int) -> torch.Tensor:
    base = device.allocate(nbytes)
    device.copy_in(host, base).wait()
    return base


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


# the same bits


@pytest.mark.parametrize("budget_bytes", [16 * KIB, MIB, 40 * MIB, PLENTY])
def test_what_leaves_comes_back_the_same(tmp_path: Path, budget_bytes: int) -> None:
    sizes = [1, 511, 4096, 65_537, MIB, 5 * MIB + 3, 33 * MIB]
    device = CudaDevice(0, host_budget_bytes=budget_bytes, spill_dir=str(tmp_path))
    try:
        tensors = [noise(nbytes, seed) for seed, nbytes in enumerate(sizes)]
        copies = [t.clone() for t in tensors]
        hosts = [out(device, t) for t in tensors]
        for tensor in tensors:
            tensor.zero_()
        for host, expected in zip(reversed(hosts), reversed(copies), strict=True):
            assert torch.equal(back(device, host, expected.numel()), expected)
            assert torch.equal(back(device, host, expected.numel()), expected)  # the copy outside stays good
            host.drop()
        kinds = {type(host) for host in hosts}
        match budget_bytes:
            case 16384:
                assert FileCopy in kinds
            case 1048576 | 41943040:
                assert kinds == {FileCopy, _PinnedCopy}
            case _:
                assert kinds == {_PinnedCopy} and device.spilled_bytes == 0
        spilled = sum(t.numel() for t, h in zip(tensors, hosts, strict=True) if isinstance(h, FileCopy))
        assert device.spilled_bytes == spilled
        assert device.pool.total_bytes <= budget_bytes
    finally:
        device.close()


@pytest.mark.parametrize("name", ["device", "narrow"])
def test_a_copy_out_waits_for_compute(name: str, request: pytest.FixtureRequest) -> None:
    device: CudaDevice = request.getfixturevalue(name)
    tensor = noise(4 * MIB, 1)
    expected = tensor ^ 85
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    tensor ^= 85  # not done yet when the copy is asked for
    host, copy = device.copy_out(tensor)
    copy.wait()
    tensor.zero_()  # the compute stream comes here only after the copy
    assert torch.equal(back(device, host, tensor.numel()), expected)
    host.drop()


@pytest.mark.parametrize("name", ["device", "narrow"])
def test_a_reload_waits_for_what_had_its_memory_before(name: str, request: pytest.FixtureRequest) -> None:
    device: CudaDevice = request.getfixturevalue(name)
    tensor = noise(4 * MIB, 1)
    host = out(device, tensor)
    torch.cuda.synchronize()
    base = device.allocate(tensor.numel())
    torch.cuda._sleep(LONG)
    base.zero_()  # asked for before the reload, so it must not come after it
    device.copy_in(host, base).wait()
    assert torch.equal(base, tensor)
    host.drop()


def test_a_buffer_is_handed_on_while_a_copy_still_reads_it(device: CudaDevice) -> None:
    first, second = noise(64 * MIB, 1), noise(64 * MIB, 2)
    host = out(device, first)
    base = device.allocate(first.numel())
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
    device._in.wait_stream(side)  # the reload stands still
    loading = device.copy_in(host, base)
    host.drop()
    again, saving = device.copy_out(second)
    assert isinstance(host, _PinnedCopy) and isinstance(again, _PinnedCopy)
    assert again.buffer is host.buffer
    assert not host.buffer.event.query()  # type: ignore[attr-defined]
    loading.wait()
    saving.wait()
    assert torch.equal(base, first)
    assert torch.equal(back(device, again, second.numel()), second)
    again.drop()


def test_churn_in_a_tiny_pool(tmp_path: Path) -> None:
    """Buffers, slots and device memory change hands all the time, with copies under way in both directions."""
    device = CudaDevice(0, host_budget_bytes=24 * MIB, spill_dir=str(tmp_path))
    try:
        sizes = [MIB, 3 * MIB // 2, 2 * MIB, 4 * MIB]
        away: list[tuple[int, int, HostCopy]] = []
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for number in range(600):
            nbytes = sizes[number * 7 % 4]
            tensor = torch.full((nbytes,), number % 251, dtype=torch.uint8, device="cuda")
            host, copy = device.copy_out(tensor)
            if number % 3 == 0:
                torch.cuda._sleep(200_000)
            copy.wait()
            del tensor
            away.append((number % 251, nbytes, host))
            if len(away) > 8:
                value, nbytes, host = away.pop(number * 5 % len(away))
                base = device.allocate(nbytes)
                loading = device.copy_in(host, base)
                torch.cuda._sleep(50_000)
                loading.wait()
                wrong += (base != value).sum()
                host.drop()
                del base
        for value, nbytes, host in away:
            wrong += (back(device, host, nbytes) != value).sum()
            host.drop()
        assert int(wrong) == 0
        assert device.spilled_bytes > 0
        assert device.pool.total_bytes <= 24 * MIB
    finally:
        device.close()


def test_another_stream_computes(device: CudaDevice) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensor = noise(16 * MIB, 1)
        expected = tensor ^ 85
        torch.cuda._sleep(LONG)
        tensor ^= 85
        host, copy = device.copy_out(tensor)
        assert torch.cuda.current_stream() == side
        copy.wait()
        tensor.zero_()
        base = back(device, host, tensor.numel())
        assert torch.equal(base, expected)
    host.drop()


def test_an_entry_in_the_file_tier_is_free_to_go_while_it_is_copied(narrow: CudaDevice) -> None:
    ledger = Ledger(narrow)
    tensor = noise(64 * MIB, 1)
    expected = tensor.clone()
    entry = ledger.entry_of(tensor.untyped_storage(), 0)
    handle = ledger.handle(entry, tensor)
    del tensor
    torch.cuda._sleep(LONG)
    entry.start_saving()
    assert entry.exclusive()
    before = torch.cuda.memory_allocated()
    entry.release()
    assert torch.cuda.memory_allocated() == before - 64 * MIB  # at this very point, not when some thread lets go
    entry.start_loading()
    entry.finish_loading()
    assert entry.base is not None and torch.equal(entry.base, expected)
    assert handle.entry is entry


# pinned memory


def test_buffers_are_pinned_and_take_what_they_hold(device: CudaDevice) -> None:
    before = resident_bytes()
    buffer = device.pool.take(1100 * MIB)
    assert buffer is not None and buffer.tensor is not None
    assert buffer.tensor.is_pinned()
    assert buffer.nbytes < 1100 * MIB * 17 / 16
    assert resident_bytes() - before < 1200 * MIB  # a power of two would be 2 GiB
    device.pool.give_back(buffer)


def test_a_prepared_plan_gets_no_memory_in_a_step(device: CudaDevice) -> None:
    sizes = [64 * MIB, 64 * MIB, 48 * MIB, 3 * MIB]
    device.prepare(sizes)
    device.pool.settle()
    owned = set(device.pool._owned)
    tensors = [noise(nbytes, nbytes) for nbytes in sizes]
    for _ in range(50):  # the host runs far ahead of the device, and still nothing new is needed
        torch.cuda._sleep(1_000_000)
        hosts = [device.copy_out(t) for t in tensors]
        for _, copy in hosts:
            copy.wait()
        for (host, _), tensor in zip(hosts, tensors, strict=True):
            device.copy_in(host, tensor).wait()
            host.drop()
    assert device.pool.allocated_in_step == 0
    assert device.pool._owned == owned
    assert device.spilled_bytes == 0
    for tensor in tensors:
        assert torch.equal(tensor, noise(tensor.numel(), tensor.numel()))


def test_trim_gives_memory_back(device: CudaDevice) -> None:
    device.prepare([256 * MIB] * 4)
    device.pool.settle()
    before = resident_bytes()
    device.trim([256 * MIB])
    device.pool.settle()
    assert device.pool.total_bytes == 256 * MIB
    assert before - resident_bytes() > 700 * MIB


def test_the_device_works_on_while_memory_is_prepared(device: CudaDevice) -> None:
    """Pinning may hold up a launch for one buffer at a time, not for all of them."""
    x = torch.zeros(1024, device="cuda")
    device.prepare([64 * MIB] * 32)
    longest, began = 0.0, time.perf_counter()
    while device.pool.total_bytes < 2 * GIB and time.perf_counter() - began < 20:
        start = time.perf_counter()
        x.add_(1)
        longest = max(longest, time.perf_counter() - start)
    total = time.perf_counter() - began
    print(f"2 GiB in {total:.3f} s, the longest launch took {longest * 1e3:.1f} ms")  # noqa: T201
    assert longest < max(0.25 * total, 0.05)


def test_a_refusal_goes_to_the_file_and_leaves_no_cuda_error() -> None:
    pool = PinnedPool(PinnedMemory(0), limit_bytes=2**60)
    try:
        assert pool.take(2**55) is None
        assert pool.refusal
        x = torch.zeros(4, device="cuda") + 1
        torch.cuda.synchronize()
        assert x.tolist() == [1.0] * 4
    finally:
        pool.close()


def test_what_the_driver_refuses_leaves_no_cuda_error() -> None:
    """Memory that is pinned already cannot be pinned: the error must stay on the thread that asked."""

    class Twice(PinnedMemory):
        def get(self, nbytes: int) -> torch.Tensor:
            tensor = super().get(nbytes)
            try:
                status = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), nbytes, 0)
                assert int(status) != 0
                raise DeviceError("refused")
            finally:
                self.free(tensor)

    pool = PinnedPool(Twice(0), limit_bytes=MIB)
    try:
        assert pool.take(MIB) is None
        assert pool.refusal == "refused"
        assert (torch.zeros(4, device="cuda") + 1).tolist() == [1.0] * 4
    finally:
        pool.close()


@pytest.mark.parametrize("nbytes", [4 * MIB, 256 * MIB])
def test_copies_run_at_the_speed_of_the_link(device: CudaDevice, nbytes: int) -> None:
    hardware = probe("cuda")
    tensors = [noise(nbytes, seed) for seed in range(8)]
    device.prepare([nbytes] * 8)
    device.pool.settle()
    out_seconds, in_seconds = [], []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        hosts = [device.copy_out(t)[0] for t in tensors]
        torch.cuda.synchronize()
        middle = time.perf_counter()
        copies: list[Copy] = [device.copy_in(h, t) for h, t in zip(hosts, tensors, strict=True)]
        torch.cuda.synchronize()
        out_seconds.append(middle - start)
        in_seconds.append(time.perf_counter() - middle)
        for copy, host in zip(copies, hosts, strict=True):
            copy.wait()
            host.drop()
    out_rate, in_rate = (8 * nbytes / statistics.median(s[1:]) for s in (out_seconds, in_seconds))
    print(  # noqa: T201
        f"{nbytes // MIB} MiB: out {out_rate / 1e9:.1f} of {hardware.out_bytes_per_second / 1e9:.1f} GB/s, "
        f"in {in_rate / 1e9:.1f} of {hardware.in_bytes_per_second / 1e9:.1f}"
    )
    share = 0.85 if nbytes > 64 * MIB else 0.6
    assert out_rate > share * hardware.out_bytes_per_second
    assert in_rate > share * hardware.in_bytes_per_second


def test_asking_for_a_copy_is_cheap(device: CudaDevice) -> None:
    tensor = noise(MIB, 1)
    device.prepare([MIB] * 64)
    device.pool.settle()

    def ask() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        hosts = [device.copy_out(tensor)[0] for _ in range(64)]
        seconds = (time.perf_counter() - start) / 64
        for host in hosts:
            host.drop()
        return seconds

    ask()
    each = statistics.median(ask() for _ in range(9))
    print(f"copy_out: {each * 1e6:.1f} µs of host time")  # noqa: T201
    assert each < 60e-6


# the end


def test_close_leaves_nothing(tmp_path: Path) -> None:
    noise(MIB, 0)  # the context and its kernels take memory too
    gc.collect()
    torch.cuda.synchronize()
    threads, files, before = threading.active_count(), len(os.listdir("/proc/self/fd")), resident_bytes()
    device = CudaDevice(0, host_budget_bytes=GIB, spill_dir=str(tmp_path))
    pinned = noise(512 * MIB, 1)
    kept = out(device, pinned)  # a handle that outlives the room
    spilled = out(device, noise(768 * MIB, 2))
    assert isinstance(kept, _PinnedCopy) and isinstance(spilled, FileCopy)
    assert resident_bytes() - before > 500 * MIB
    device.close()
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= files
    assert os.listdir(tmp_path) == []
    assert resident_bytes() - before < 64 * MIB
    for host in (kept, spilled):
        with pytest.raises(DeviceError, match="closed"):
            device.copy_in(host, pinned)
    with pytest.raises(DeviceError, match="closed"):
        device.copy_out(pinned)
    kept.drop()


def test_a_budget_without_room_for_a_piece_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"16\.0 KiB|256\.0 KiB"):
        CudaDevice(0, host_budget_bytes=4096)


# the cap and what others take


def test_the_cap_is_exact_and_the_one_before_comes_back(device: CudaDevice) -> None:
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.9)
    try:
        reserved = torch.cuda.memory_reserved()
        device.set_cap(reserved + 118 * MIB)  # segments grow by 20 MiB: five of them fit, to the byte, and 18 are lost
        held = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
        del held
        device.set_cap(None)
        assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(0.9, abs=1e-6)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("request_mib", [11, 34, 50, 92])
@pytest.mark.parametrize("room_mib", [100, 117, 139, 260])
def test_pages_that_are_mapped_stay_below_the_cap(device: CudaDevice, room_mib: int, request_mib: int) -> None:
    torch.cuda.empty_cache()
    cap = torch.cuda.memory_reserved() + room_mib * MIB
    held: list[torch.Tensor] = []
    device.set_cap(cap)
    try:
        with contextlib.suppress(torch.OutOfMemoryError):
            while len(held) < 4 * room_mib:
                # Small ones, too, which have pages of 2 MiB: the grid of the large ones moves.
                held += [torch.empty(MIB, dtype=torch.uint8, device="cuda") for _ in range(3)]
                held.append(torch.empty(request_mib * MIB, dtype=torch.uint8, device="cuda"))
        assert len(held) < 4 * room_mib
        assert cap - (request_mib + 48) * MIB < torch.cuda.memory_reserved() <= cap
    finally:
        device.set_cap(None)


HOLDER = "import sys, torch; x = torch.zeros(2**30, device='cuda', dtype=torch.uint8); print('up', flush=True); input()"


def test_memory_of_others_is_seen() -> None:
    mine = torch.zeros(GIB, dtype=torch.uint8, device="cuda")
    before = foreign_bytes(0)
    assert before >= 0
    del mine
    torch.cuda.empty_cache()
    assert abs(foreign_bytes(0) - before) < 64 * MIB  # our own memory is not foreign, held or not
    other = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "up\n"
        assert foreign_bytes(0) - before >= GIB
    finally:
        other.communicate("\n")
