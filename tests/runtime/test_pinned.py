"""The pool of host memory and the way to the file, with plain memory in place of pinned and real threads and files."""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import os
import random
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from legroom.errors import DeviceError
from legroom.runtime.device import Copy, CpuDevice, FileCopy, FutureCopy, HostCopy
from legroom.runtime.pinned import Buffer, PinnedPool, StagedFile, pages, size_class
from legroom.runtime.residency import Ledger
from legroom.runtime.spill import SpillFile

MIB = 2**20
KIB = 2**10


class Event:
    """torch.cuda.Event's interface; there is none without a GPU. Pending from record() until somebody waits."""

    def __init__(self) -> None:
        self.pending = False

    def record(self, stream: object = None) -> None:
        self.pending = True

    def wait(self, stream: object = None) -> None:
        raise AssertionError("the pool puts nothing on a stream")

    def synchronize(self) -> None:
        self.pending = False


class PlainMemory:
    """Memory that refuses beyond `most_bytes`, holds on while `gate` is shut, and knows what it has given out."""

    def __init__(self, *, most_bytes: int = 2**40) -> None:
        self.most_bytes = most_bytes
        self.given: dict[int, tuple[int, Event]] = {}  # address -> bytes, event
        self.gate = threading.Event()
        self.gate.set()
        self.asked: list[int] = []
        self._event: Event | None = None

    @property
    def given_bytes(self) -> int:
        return sum(nbytes for nbytes, _ in list(self.given.values()))

    def get(self, nbytes: int) -> torch.Tensor:
        self.asked.append(nbytes)
        assert self.gate.wait(10)
        if self.given_bytes + nbytes > self.most_bytes:
            raise DeviceError(f"no {nbytes} bytes left")
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        self._event = Event()
        self.given[tensor.data_ptr()] = nbytes, self._event
        return tensor

    def event(self) -> Event:
        assert self._event is not None
        return self._event

    def free(self, tensor: torch.Tensor) -> None:
        _, event = self.given.pop(tensor.data_ptr())
        assert not event.pending, "freed while a copy was under way"


@pytest.fixture
def memory() -> PlainMemory:
    return PlainMemory()


@contextlib.contextmanager
def pool_of(memory: PlainMemory, limit_bytes: int) -> Iterator[PinnedPool]:
    pool = PinnedPool(memory, limit_bytes=limit_bytes)
    try:
        yield pool
    finally:
        memory.gate.set()
        pool.close()


def taken(pool: PinnedPool, nbytes: int) -> Buffer:
    buffer = pool.take(nbytes)
    assert buffer is not None
    return buffer


# sizes

# Saved tensors of the five benchmark models, bytes (batch × length × width × bytes an element and the like).
GPT = [24 * 1024 * n for n in (2048, 6144, 8192, 4096, 1024, 100_608, 201_216)]
RESNET = [192 * c * s * s * 2 for c, s in ((64, 112), (64, 56), (256, 56), (128, 28), (512, 28), (1024, 14), (2048, 7))]
BERT = [64 * s * n for s in range(32, 513, 60) for n in (1536, 6144, 3072, 768, 24 * s)]
VIT = [128 * 197 * n for n in (2048, 8192, 6144, 4096)]
LLAMA = [8 * 2048 * n for n in (4096, 11264, 8192)]


@pytest.mark.parametrize("sizes", [GPT, RESNET, BERT, VIT, LLAMA], ids=["gpt", "resnet", "bert", "vit", "llama"])
def test_classes_waste_little_on_real_sizes(sizes: list[int]) -> None:
    assert sum(map(size_class, sizes)) <= 1.05 * sum(sizes)


@given(st.integers(1, 2**40))
def test_a_class_holds_its_sizes_and_wastes_at_most_a_sixteenth(nbytes: int) -> None:
    size = size_class(nbytes)
    assert nbytes <= size <= nbytes + max(mmap.PAGESIZE, nbytes / 16)
    assert size % mmap.PAGESIZE == 0
    assert size_class(size) == size


# the pool

SIZES = st.integers(1, 600 * KIB)
ACTIONS = st.one_of(
    st.tuples(st.just("take"), SIZES),
    st.tuples(st.just("give"), st.integers(0, 30)),
    st.tuples(st.just("prepare"), st.lists(SIZES, max_size=4)),
    st.tuples(st.just("trim"), st.lists(SIZES, max_size=4)),
    st.tuples(st.just("settle"), st.none()),
)


@given(st.lists(ACTIONS, max_size=40), st.integers(0, 3 * MIB))
def test_any_sequence_of_calls(actions: list[tuple[str, object]], limit_bytes: int) -> None:
    memory = PlainMemory()
    live: list[tuple[Buffer, int, int]] = []  # with the bytes asked for and what was written into them
    with pool_of(memory, limit_bytes) as pool:
        for number, (action, what) in enumerate(actions):
            match action, what:
                case "take", int(nbytes):
                    buffer = pool.take(nbytes)
                    if buffer is None:
                        pool.settle()  # memory on its way to being prepared is neither free nor in use
                        buffer = pool.take(nbytes)
                    if buffer is None:
                        in_use = sum(b.nbytes for b, _, _ in live)
                        assert in_use + size_class(nbytes) > limit_bytes, "there was room"
                        continue
                    assert buffer.tensor is not None and buffer.tensor.numel() >= nbytes
                    # A copy may be under way from the last use: the event of that very memory comes with the buffer.
                    assert buffer.event is memory.given[buffer.tensor.data_ptr()][1]
                    buffer.tensor.fill_(number)
                    live.append((buffer, nbytes, number))
                case "give", int(which) if live:
                    buffer, nbytes, tag = live.pop(which % len(live))
                    assert buffer.tensor is not None
                    assert bool((buffer.tensor == tag).all()), "somebody else wrote here"
                    assert isinstance(buffer.event, Event)
                    buffer.event.record()
                    pool.give_back(buffer)
                case "prepare", list(sizes):
                    pool.prepare(sizes)
                case "trim", list(sizes):
                    pool.trim(sizes)
                case "settle", None:
                    pool.settle()
            assert memory.given_bytes <= limit_bytes
            spans = sorted((b.tensor.data_ptr(), b.tensor.numel()) for b, _, _ in live if b.tensor is not None)
            assert len(spans) == len(live)
            assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
        pool.settle()
        assert pool.total_bytes == memory.given_bytes
    assert memory.given == {}


@given(st.lists(st.lists(SIZES, max_size=8), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_what_was_prepared_for_never_waits(plans: list[list[int]], draw: random.Random) -> None:
    """Plans take turns: each finds a buffer for every copy, in any order, and those of one do for the others."""
    memory = PlainMemory()
    with pool_of(memory, 64 * MIB) as pool:
        for sizes in plans:
            pool.prepare(sizes)
        pool.settle()
        for sizes in (draw.choice(plans) for _ in range(6)):
            buffers = [taken(pool, nbytes) for nbytes in draw.sample(sizes, len(sizes))]
            for buffer in buffers:
                pool.give_back(buffer)
        assert pool.allocated_in_step == 0
        pool.trim(plans[0])
        pool.settle()
        for nbytes in plans[0]:
            taken(pool, nbytes)
        assert pool.allocated_in_step == 0


def test_buffers_of_a_large_input_do_for_smaller_ones(memory: PlainMemory) -> None:
    with pool_of(memory, 64 * MIB) as pool:
        pool.prepare([MIB] * 4 + [256 * KIB] * 4)
        pool.settle()
        held = memory.given_bytes
        pool.prepare([900 * KIB] * 3 + [600 * KIB] + [200 * KIB] * 4)
        pool.settle()
        assert memory.given_bytes == held
        pool.prepare([900 * KIB] * 5)
        pool.settle()
        assert held < memory.given_bytes < held + MIB


def test_a_buffer_comes_back_with_the_event_of_its_last_use(memory: PlainMemory) -> None:
    with pool_of(memory, MIB) as pool:
        buffer = taken(pool, MIB)
        assert isinstance(buffer.event, Event)
        buffer.event.record()
        pool.give_back(buffer)
        again = taken(pool, MIB)
        assert again is buffer
        assert buffer.event.pending  # nobody waited: the copy is put behind it on the device


def test_the_oldest_is_reused_first(memory: PlainMemory) -> None:
    with pool_of(memory, 4 * MIB) as pool:
        buffers = [taken(pool, MIB) for _ in range(3)]
        for buffer in buffers:
            pool.give_back(buffer)
        assert [taken(pool, MIB) for _ in range(3)] == buffers


def test_nothing_beyond_the_limit(memory: PlainMemory) -> None:
    with pool_of(memory, 2 * MIB) as pool:
        first = taken(pool, MIB)
        taken(pool, MIB)
        assert pool.take(4096) is None
        pool.give_back(first)
        assert pool.take(MIB) is first


def test_small_free_buffers_make_way_for_a_large_one(memory: PlainMemory) -> None:
    with pool_of(memory, 2 * MIB) as pool:
        buffers = [taken(pool, 512 * KIB) for _ in range(4)]
        for buffer in buffers:
            assert isinstance(buffer.event, Event)
            buffer.event.record()
        assert pool.take(2 * MIB) is None
        for buffer in buffers:
            pool.give_back(buffer)
        large = taken(pool, 2 * MIB)
        assert large.nbytes == 2 * MIB
        assert memory.given_bytes == 2 * MIB


def test_too_few_free_bytes_are_left_alone(memory: PlainMemory) -> None:
    with pool_of(memory, 2 * MIB) as pool:
        taken(pool, MIB)
        small = taken(pool, 512 * KIB)
        pool.give_back(small)
        assert pool.take(3 * MIB // 2) is None
        assert pool.take(512 * KIB) is small


def test_a_larger_buffer_serves_where_memory_would_have_to_be_got(memory: PlainMemory) -> None:
    with pool_of(memory, 64 * MIB) as pool:
        double, huge = taken(pool, 2 * MIB), taken(pool, 32 * MIB)
        pool.give_back(huge)
        pool.give_back(double)
        assert taken(pool, MIB + 1) is double
        assert taken(pool, MIB + 1).nbytes < 2 * MIB  # the huge one is worth more than getting a small one


def test_at_the_limit_even_a_much_larger_one_serves(memory: PlainMemory) -> None:
    with pool_of(memory, 32 * MIB) as pool:
        huge = taken(pool, 32 * MIB)
        pool.give_back(huge)
        assert taken(pool, MIB) is huge


# ahead of need


def test_a_prepared_step_gets_no_memory(memory: PlainMemory) -> None:
    sizes = [3 * MIB, MIB, MIB, 64 * KIB]
    with pool_of(memory, 16 * MIB) as pool:
        pool.prepare(sizes)
        pool.settle()
        for _ in range(3):
            buffers = [taken(pool, nbytes) for nbytes in sizes]
            assert len({b.tensor.data_ptr() for b in buffers if b.tensor is not None}) == len(sizes)
            for buffer in buffers:
                pool.give_back(buffer)
        assert pool.allocated_in_step == 0
        taken(pool, 8 * MIB)
        assert pool.allocated_in_step == 1


def test_prepare_does_not_wait_and_adds_only_what_is_missing(memory: PlainMemory) -> None:
    with pool_of(memory, 16 * MIB) as pool:
        live = taken(pool, MIB)
        memory.gate.clear()
        pool.prepare([MIB, MIB, 2 * MIB])
        pool.prepare([MIB, MIB, 2 * MIB])  # the same plan again, while the first call is still at work
        memory.gate.set()
        pool.settle()
        assert sorted(memory.asked) == [MIB, MIB, 2 * MIB]
        pool.give_back(live)


def test_prepare_stops_at_the_limit(memory: PlainMemory) -> None:
    with pool_of(memory, 3 * MIB) as pool:
        pool.prepare([2 * MIB, 2 * MIB, MIB])
        pool.settle()
        assert sorted(memory.asked) == [MIB, 2 * MIB]


def test_who_waits_goes_before_what_is_prepared(memory: PlainMemory) -> None:
    with pool_of(memory, 64 * MIB) as pool:
        memory.gate.clear()
        pool.prepare([4 * MIB] * 3 + [MIB])
        while not memory.asked:
            pass  # the thread is at the first one
        opener = threading.Timer(0.1, memory.gate.set)
        opener.start()
        taken(pool, MIB)
        opener.join()
        pool.settle()
        # The waiting one comes second, and what was prepared for it is not got a second time.
        assert memory.asked == [4 * MIB, MIB, 4 * MIB, 4 * MIB]


def test_trim_gives_back_what_a_plan_does_not_need(memory: PlainMemory) -> None:
    with pool_of(memory, 64 * MIB) as pool:
        buffers = [taken(pool, nbytes) for nbytes in [4 * MIB] * 3 + [MIB] * 3]
        held = buffers.pop()
        for buffer in buffers:
            assert isinstance(buffer.event, Event)
            buffer.event.record()  # memory under a copy may not be freed: PlainMemory.free() looks
            pool.give_back(buffer)
        pool.trim([4 * MIB, MIB, MIB])
        pool.settle()
        assert sorted(nbytes for nbytes, _ in memory.given.values()) == [MIB, MIB, 4 * MIB]
        assert pool.total_bytes == 6 * MIB
        assert held.tensor is not None
        pool.trim([])
        pool.settle()
        assert memory.given_bytes == MIB  # what is in use stays


def test_a_trim_makes_room_for_what_is_prepared_after_it(memory: PlainMemory) -> None:
    with pool_of(memory, 4 * MIB) as pool:
        pool.give_back(taken(pool, 4 * MIB))
        pool.trim([MIB] * 4)
        pool.prepare([MIB] * 4)
        pool.settle()
        assert pool.total_bytes == 4 * MIB
        assert {nbytes for nbytes, _ in memory.given.values()} == {MIB}


# what the machine does not give


def test_a_refusal_is_the_new_limit() -> None:
    memory = PlainMemory(most_bytes=2 * MIB)
    with pool_of(memory, 64 * MIB) as pool:
        first = taken(pool, MIB)
        assert pool.take(2 * MIB) is None
        assert "2097152 bytes" in pool.refusal
        assert pool.limit_bytes == pool.total_bytes == MIB
        asked = len(memory.asked)
        assert pool.take(2 * MIB) is None
        assert len(memory.asked) == asked  # it is not asked in vain at every copy
        pool.give_back(first)
        assert pool.take(MIB) is first


def test_an_error_that_is_no_refusal_reaches_the_taker(memory: PlainMemory) -> None:
    def broken(nbytes: int) -> torch.Tensor:
        raise RuntimeError("broken")

    memory.get = broken  # type: ignore[method-assign]
    with pool_of(memory, MIB) as pool:
        with pytest.raises(RuntimeError, match="broken"):
            pool.take(4096)
        assert pool.total_bytes == 0


# the end


def pin_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("legroom-")]


def test_close_gives_everything_back_and_leaves_no_thread(memory: PlainMemory) -> None:
    with pool_of(memory, 64 * MIB) as pool:
        live, free = taken(pool, MIB), taken(pool, 2 * MIB)
        pool.give_back(free)
        pool.prepare([MIB] * 20)
        pool.close()
        assert memory.given == {}
        assert live.tensor is None
        assert pin_threads() == []
        pool.give_back(live)  # a handle that outlived the room
        with pytest.raises(DeviceError, match="closed"):
            pool.take(MIB)


def test_a_pool_that_nobody_closed_gives_everything_back(memory: PlainMemory) -> None:
    pool = PinnedPool(memory, limit_bytes=MIB)
    pool.give_back(taken(pool, 4096))
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    assert memory.given == {}
    assert pin_threads() == []


# pages


def mapping_of(address: int) -> dict[str, str]:
    """The kernel's account of the mapping that an address lies in."""
    found: dict[str, str] = {}
    with open("/proc/self/smaps") as file:
        for line in file:
            head, _, rest = line.partition(" ")
            if "-" in head and not head.endswith(":"):
                if found:
                    break
                start, end = (int(part, 16) for part in head.split("-"))
                inside = start <= address < end
            elif inside:
                found[head.rstrip(":")] = rest.strip()
    return found


@pytest.mark.parametrize("nbytes", [mmap.PAGESIZE, 8 * MIB, 40 * MIB, 67 * MIB + 3 * mmap.PAGESIZE])
def test_pages_are_there_and_are_not_copied_by_a_fork(nbytes: int) -> None:
    tensor = pages(nbytes)
    assert tensor.data_ptr() % mmap.PAGESIZE == 0
    mapping = mapping_of(tensor.data_ptr())
    assert int(mapping["Rss"].split()[0]) >= nbytes // KIB  # present before anybody touched them
    flags = mapping["VmFlags"].split()
    assert "dc" in flags and "hg" in flags and "sh" not in flags
    tensor.fill_(7)
    assert int(tensor.sum(dtype=torch.int64)) == 7 * nbytes


def test_pages_come_where_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert int(pages(40 * MIB).sum()) == 0


def test_pages_go_with_their_tensor() -> None:
    tensor = pages(32 * MIB)
    address = tensor.data_ptr()
    del tensor
    mapping = mapping_of(address)
    assert not mapping or "dc" not in mapping["VmFlags"].split()


# the file behind the pool


class PooledDevice(CpuDevice):
    """The CPU with the host side of the CUDA device: the pool first, the file through pieces behind it."""

    def __init__(self, spill_dir: str, memory: PlainMemory, *, limit_bytes: int, piece_bytes: int) -> None:
        super().__init__(spill_dir)
        self.pool = PinnedPool(memory, limit_bytes=limit_bytes)
        self.lane = Gate()
        self.staged = StagedFile(
            self.spill, memory, piece_bytes=piece_bytes, device=torch.device("cpu"), out=self.lane, into=self.lane
        )

    def copy_out(self, bytes_: torch.Tensor, *, waits: bool = False) -> tuple[HostCopy, Copy]:
        buffer = self.pool.take(bytes_.numel())
        if buffer is None:
            slot = self.spill.take(bytes_.numel())
            future = self.staged.write(bytes_.data_ptr(), slot)
            return FileCopy(self.spill, slot, future), FutureCopy(future, bytes_)
        assert buffer.tensor is not None
        buffer.tensor[: bytes_.numel()].copy_(bytes_)
        host = Pooled(self.pool, buffer)
        return host, host

    def copy_in(self, host: HostCopy, bytes_: torch.Tensor, *, waits: bool = False) -> Copy:
        if isinstance(host, FileCopy):
            return FutureCopy(self.staged.read(bytes_.data_ptr(), host.slot), bytes_)
        assert isinstance(host, Pooled) and host.buffer.tensor is not None
        bytes_.copy_(host.buffer.tensor[: bytes_.numel()])
        return host

    def close(self) -> None:
        super().close()
        self.staged.close()
        self.pool.close()


class Pooled:
    def __init__(self, pool: PinnedPool, buffer: Buffer) -> None:
        self.pool = pool
        self.buffer = buffer

    def wait(self) -> None:
        pass

    def drop(self) -> None:
        self.pool.give_back(self.buffer)


class Gate(contextlib.AbstractContextManager[None]):
    """Stands for a stream: copies that enter while it is shut wait."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()

    def __enter__(self) -> None:
        assert self.open.wait(10)

    def __exit__(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def device_of(folder: Path, memory: PlainMemory, *, limit_bytes: int, piece_bytes: int) -> Iterator[PooledDevice]:
    device = PooledDevice(str(folder), memory, limit_bytes=limit_bytes, piece_bytes=piece_bytes)
    try:
        yield device
    finally:
        device.lane.open.set()
        device.close()
    assert memory.given == {}
    assert pin_threads() == []


def noise(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("limit_bytes", [0, MIB, 64 * MIB], ids=["all to the file", "some", "none"])
@pytest.mark.parametrize("piece_bytes", [mmap.PAGESIZE, 64 * KIB, 4 * MIB])
def test_what_leaves_comes_back_the_same(
    tmp_path: Path, memory: PlainMemory, limit_bytes: int, piece_bytes: int
) -> None:
    sizes = [1, 4095, 4096, 4097, 64 * KIB, 64 * KIB + 1, 500_001, MIB] * 3
    with device_of(tmp_path, memory, limit_bytes=limit_bytes, piece_bytes=piece_bytes) as device:
        ledger = Ledger(device)
        entries, handles, copies = [], [], []
        for number, nbytes in enumerate(sizes):
            tensor = noise(nbytes, number)
            copies.append(tensor.clone())
            entries.append(ledger.entry_of(tensor.untyped_storage(), number))
            handles.append(ledger.handle(entries[-1], tensor))
            del tensor
            entries[-1].start_saving()
        for entry in entries:
            entry.release()
            assert not entry.in_memory
        for entry in reversed(entries):
            entry.start_loading()
        for entry, expected in zip(entries, copies, strict=True):
            entry.finish_loading()
            assert entry.base is not None and torch.equal(entry.base, expected)
        assert (device.spill._end > 0) == (limit_bytes < 64 * MIB)
        del entry, entries
        handles.clear()
        assert ledger.entries == 0
        assert device.spill._end == sum(size * len(free) for size, free in device.spill._free.items())


def test_a_copy_under_way_does_not_count_as_a_user(tmp_path: Path, memory: PlainMemory) -> None:
    """Otherwise an entry would not be free to go at its release, depending on the disk's speed."""
    with device_of(tmp_path, memory, limit_bytes=0, piece_bytes=64 * KIB) as device:
        ledger = Ledger(device)
        tensor = noise(MIB, 1)
        entry = ledger.entry_of(tensor.untyped_storage(), 0)
        handle = ledger.handle(entry, tensor)
        del tensor
        assert entry.exclusive()
        device.lane.open.clear()
        entry.start_saving()
        assert entry.exclusive()
        device.lane.open.set()
        entry.release()
        assert not entry.in_memory
        assert handle.entry is entry


def test_a_copy_that_nobody_wants_any_more_is_waited_for(tmp_path: Path, memory: PlainMemory) -> None:
    with device_of(tmp_path, memory, limit_bytes=0, piece_bytes=64 * KIB) as device:
        tensor = noise(MIB, 1)
        device.lane.open.clear()
        host, _ = device.copy_out(tensor)
        opener = threading.Timer(0.1, device.lane.open.set)
        opener.start()
        host.drop()
        assert device.lane.open.is_set()  # the slot was not handed on before the thread was through with it
        opener.join()


def test_no_memory_for_a_piece_is_an_error_at_the_wait(tmp_path: Path) -> None:
    with device_of(tmp_path, PlainMemory(most_bytes=0), limit_bytes=0, piece_bytes=64 * KIB) as device:
        host, copy = device.copy_out(noise(MIB, 1))
        with pytest.raises(DeviceError, match="65536 bytes"):
            copy.wait()
        host.drop()


def test_a_closed_file_refuses(tmp_path: Path, memory: PlainMemory) -> None:
    with device_of(tmp_path, memory, limit_bytes=0, piece_bytes=64 * KIB) as device:
        tensor = noise(MIB, 1)
        host, copy = device.copy_out(tensor)
        copy.wait()
        device.close()
        with pytest.raises(DeviceError, match="closed"):
            device.copy_in(host, tensor)
        assert os.listdir(tmp_path) == []


def test_the_cpu_device_writes_without_pieces(tmp_path: Path) -> None:
    file = SpillFile(str(tmp_path))
    try:
        source, target = noise(MIB, 1), torch.empty(MIB, dtype=torch.uint8)
        slot = file.take(MIB)
        file.write(source.data_ptr(), slot).result()
        file.read(target.data_ptr(), slot).result()
        assert torch.equal(source, target)
    finally:
        file.close()
