"""A digest of bytes: 128 bits. On the GPU nothing of it is copied to the host but the two words of the result.

Every 64-bit word (the last filled up with zeros) is mixed with its position by splitmix64's finaliser, and the mixed
words are summed modulo 2**64, twice with different seeds. Sums do not depend on the order in which blocks run, so the
digest is deterministic.
"""

from __future__ import annotations

import functools
import struct

import numba
import torch

from legroom.kernels.digests import sums_at

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch comes without
    triton = None

_SEEDS = (0x5851F42D4C957F2D, 0x14057B7EF767814F)
_CHUNK_WORDS = 1 << 20
_HALF = 2048  # of the places for results: they are cleared so many at a time
MOST_DUE = _HALF - 64  # fingerprints
_COMPILES = not numba.config.DISABLE_JIT  # type: ignore[attr-defined]
_ANSWERS = 256  # on the host at once; a step asks for two, and hears of them a step or two later


def prepare_digests(device: torch.device) -> None:
    """Get the little memory they take now, so that it does not show in a step's curve."""
    _sums(device)
    _ = _reader(device).answers


def hash_bytes(storage: torch.UntypedStorage) -> bytes:
    sums = _sums(storage.device).zero_()
    _add_hash(storage, sums)
    return struct.pack("<qqq", *sums.tolist(), storage.nbytes())


def hash_host_bytes(storage: torch.UntypedStorage) -> bytes:
    """The same for what is in the memory of the host: ten times as fast as SHA-256."""
    nbytes = storage.nbytes()
    address = storage.data_ptr() if nbytes else 0
    if address and not _COMPILES:
        return hash_bytes(storage)
    sums = sums_at(address, nbytes) if address else (0, 0)  # tensors of the meta device have bytes, but nowhere
    return struct.pack("<QQq", *sums, nbytes)


def make_current(stream: torch.cuda.Stream) -> None:
    """As torch.cuda.set_stream, which passes it on twice."""
    torch._C._cuda_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


class DeviceFingerprint:
    """The same digest without waiting for the device, which does not wait for it either.

    Its two words go to the host by a stream of their own: on the compute stream they would queue behind the swaps on
    the link, 4 ms at a time.
    """

    __slots__ = ("_event", "_nbytes", "_reader", "_words")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reader = reader = _reader(storage.device)
        _, sums = reader.next_turn()
        _add_hash(storage, sums)
        self._nbytes = storage.nbytes()
        self._words = reader.take_answer()
        compute, stream = torch.cuda.current_stream(storage.device), reader.stream
        reader.added.record(compute)
        reader.added.wait(stream)
        make_current(stream)
        try:
            self._words.copy_(sums, non_blocking=True)
        finally:
            make_current(compute)
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def __del__(self) -> None:
        # Whether it has arrived or not: the next answer takes the same stream, and comes later.
        words = getattr(self, "_words", None)
        if words is not None:
            self._reader.answers.append(words)

    def arrived(self) -> bool:
        return self._event.query()

    def value(self) -> bytes:
        self._event.synchronize()
        return struct.pack("<qqq", *self._words.tolist(), self._nbytes)


class DueFingerprint:
    """The same where the answer is waited for, of many at once: they are read together, when the first is asked for.

    Nothing goes to the host before, and no more than MOST_DUE may be asked for between two answers.
    """

    __slots__ = ("_nbytes", "_reader", "_turn")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reader = _reader(storage.device)
        self._turn, sums = self._reader.next_turn()
        _add_hash(storage, sums)
        self._nbytes = storage.nbytes()

    def arrived(self) -> bool:
        return False

    def value(self) -> bytes:
        return struct.pack("<qqq", *self._reader.words(self._turn), self._nbytes)


class _Reader:
    """Where fingerprints are added up, in turn; none is taken again before it was read."""

    def __init__(self, device: torch.device) -> None:
        self._slots = torch.zeros(2 * _HALF, 2, dtype=torch.int64, device=device)
        self._rows = self._slots.unbind()
        self._turn = 0
        self._read: list[list[int]] = []
        self._read_until = 0  # the first turn that was not

    @functools.cached_property
    def answers(self) -> list[torch.Tensor]:
        """Free places for answers on the host. PyTorch's own cache of pinned memory got new ones every few steps."""
        return list(torch.empty(_ANSWERS, 2, dtype=torch.int64, pin_memory=True).unbind())

    def take_answer(self) -> torch.Tensor:
        try:
            return self.answers.pop()
        except IndexError:
            return torch.empty(2, dtype=torch.int64, pin_memory=True)

    @functools.cached_property
    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._slots.device)

    @functools.cached_property
    def added(self) -> torch.cuda.Event:
        """One is enough: a stream that waits for an event waits for what was recorded by then."""
        return torch.cuda.Event()

    def next_turn(self) -> tuple[int, torch.Tensor]:
        turn = self._turn
        place = turn % len(self._rows)
        if place % _HALF == 0:
            self._slots[place : place + _HALF].zero_()
        self._turn = turn + 1
        return turn, self._rows[place]

    def words(self, turn: int) -> list[int]:
        if turn >= self._read_until:
            self._read, self._read_until = self._slots.tolist(), self._turn
        return self._read[turn % len(self._rows)]


@functools.cache
def _reader(device: torch.device) -> _Reader:
    return _Reader(device)


def _add_hash(storage: torch.UntypedStorage, sums: torch.Tensor) -> None:
    nbytes = storage.nbytes()
    whole = nbytes // 8
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    if nbytes == 0:
        return
    words = flat[: whole * 8].view(torch.int64)
    if triton is not None and storage.device.type == "cuda":
        # The place of the rest is worked out here: there, it would be in 32 bits, which 2 GiB do not fit into.
        grid = (triton.cdiv(whole + 1, 4096),)
        _hash_kernel[grid](words, flat, sums, whole, whole * 8, nbytes, *_signed(), BLOCK=4096)
    else:
        _hash_reference(words, flat[whole * 8 :], sums)


@functools.cache
def _sums(device: torch.device) -> torch.Tensor:
    """Where results are added up. Kept: memory that came and went with every digest would show in the curve."""
    return torch.zeros(2, dtype=torch.int64, device=device)


def _signed() -> tuple[int, ...]:
    return tuple(seed - (1 << 64) if seed >> 63 else seed for seed in _SEEDS)


def _hash_reference(words: torch.Tensor, tail: torch.Tensor, sums: torch.Tensor) -> None:
    """The same in torch, in chunks, so that it takes little memory beside what it reads."""
    for start in range(0, words.numel(), _CHUNK_WORDS):
        _add_reference(words[start : start + _CHUNK_WORDS], start, sums)
    shifts = torch.arange(0, 8 * tail.numel(), 8, dtype=torch.int64, device=tail.device)
    _add_reference((tail.to(torch.int64) << shifts).sum().view(1), words.numel(), sums)


def _add_reference(words: torch.Tensor, start: int, sums: torch.Tensor) -> None:
    position = torch.arange(start, start + words.numel(), dtype=torch.int64, device=words.device)
    for i, seed in enumerate(_signed()):
        sums[i] += _mix(words ^ (position * _GOLDEN + seed)).sum()


_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_M1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_M2 = 0x94D049BB133111EB - (1 << 64)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _M1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _M2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


if triton is not None:

    @triton.jit
    def _hash_kernel(  # type: ignore[no-untyped-def]
        words, flat, sums, whole, rest_at, nbytes, seed_0, seed_1, BLOCK: tl.constexpr
    ):
        position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        word = tl.load(words + position, mask=position < whole, other=0)
        # What is left behind the last whole word makes a word of its own, filled up with zeros.
        place = tl.arange(0, 8).to(tl.int64)
        rest = tl.load(flat + rest_at + place, mask=rest_at + place < nbytes, other=0)
        tail = tl.sum(rest.to(tl.int64) << (place * 8), axis=0)
        word = tl.where(position == whole, tail, word)
        for i in tl.static_range(2):
            seed = seed_0 if i == 0 else seed_1
            x = (word ^ (position * -7046029254386353131 + seed)).to(tl.uint64, bitcast=True)
            x = (x ^ (x >> 30)) * 13787848793156543929
            x = (x ^ (x >> 27)) * 10723151780598845931
            x = x ^ (x >> 31)
            total = tl.sum(tl.where(position <= whole, x.to(tl.int64, bitcast=True), 0), axis=0)
            tl.atomic_add(sums + i, total)
