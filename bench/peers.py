"""What others offer for training in less memory, each as a training step of a workload.

A peer takes a workload and gives back the step: a function of the step's number. It may change the workload's model, so
that each is used in a process of its own.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from bench.workloads import Workload, train_step

Step = Callable[[int], Tensor]

SMALLEST_OFFLOAD_BYTES = 1024  # torchtune's default
STASHED = 5  # tensors whose copy out may still run, torchtune's default as well

_aten = torch.ops.aten
_SAVED_OPS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)


class Unavailable(Exception):
    """This contender cannot run here: another device, a library that is not installed."""


@dataclass(frozen=True, slots=True)
class Peer:
    label: str
    make: Callable[[Workload], Step]
    checkpointing: bool = False


def _plain(workload: Workload) -> Step:
    return functools.partial(train_step, workload)


def _checkpointed(workload: Workload, *, every: int = 1, **options: Any) -> Step:
    for block in workload.blocks[::every]:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
    return functools.partial(train_step, workload)


def _selective(workload: Workload) -> Step:
    def policy(_: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in _SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE

    return _checkpointed(workload, context_fn=functools.partial(create_selective_checkpoint_contexts, policy))


def _save_on_cpu(workload: Workload) -> Step:
    _needs_cuda(workload)

    def step(number: int) -> Tensor:
        return train_step(workload, number, saving=torch.autograd.graph.save_on_cpu(pin_memory=True))

    return step


def _stream_offload(workload: Workload) -> Step:
    _needs_cuda(workload)
    offload = StreamOffload(list(workload.model.parameters()))

    def step(number: int) -> Tensor:
        loss = train_step(workload, number, saving=offload)
        offload.finish()
        return loss

    return step


def _torchtune_offload(workload: Workload) -> Step:
    _needs_cuda(workload)
    try:
        from torchtune.training import OffloadActivations
    except ImportError as error:
        raise Unavailable(f"torchtune is not installed ({error})") from None

    def step(number: int) -> Tensor:
        return train_step(workload, number, saving=OffloadActivations(use_pin_memory=True, use_streams=True))

    return step


def _needs_cuda(workload: Workload) -> None:
    if next(workload.model.parameters()).device.type != "cuda":
        raise Unavailable("needs a CUDA device")


class _Offloaded:
    """A saved tensor in pinned memory. Its buffer goes back when autograd lets go, so that it may be read twice."""

    __slots__ = ("_free", "fetched", "host", "position", "used")

    def __init__(self, host: Tensor, position: int, free: list[Tensor]) -> None:
        self.host = host
        self.position = position
        self.fetched: tuple[Tensor, torch.cuda.Event] | None = None
        self.used = False
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.host)


class StreamOffload(torch.autograd.graph.saved_tensors_hooks):
    """Every saved tensor goes to pinned memory on a side stream and comes back one ahead of its use.

    Written here after the design of torchtune's OffloadActivations with streams, for machines without torchtune: the
    same smallest size, the same stash. Kinder than the original in two ways: views of parameters stay, and pinned
    buffers are kept from step to step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(self._pack, self._unpack)
        self._parameters = {p.untyped_storage().data_ptr() for p in parameters}
        # One stream for both directions: a buffer that is taken again is then never written before it was read.
        self._side = torch.cuda.Stream()
        self._stash: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._handles: list[_Offloaded] = []
        self._free: dict[tuple[Any, ...], list[Tensor]] = {}

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._settle(0)

    def finish(self) -> None:
        """The end of the step. What was fetched and never used must not be freed under a copy."""
        torch.cuda.current_stream().wait_stream(self._side)
        self._handles.clear()

    def _pack(self, tensor: Tensor) -> Tensor | _Offloaded:
        if (
            not tensor.is_cuda
            or tensor.nbytes < SMALLEST_OFFLOAD_BYTES
            or tensor.untyped_storage().data_ptr() in self._parameters
        ):
            return tensor.detach()
        tensor = tensor.detach()
        free = self._free.setdefault((tensor.dtype, tensor.shape, tensor.stride()), [])
        host = free.pop() if free else torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            host.copy_(tensor, non_blocking=True)
            self._stash.append((tensor, self._side.record_event()))
        self._settle(STASHED)
        self._handles.append(handle := _Offloaded(host, len(self._handles), free))
        return handle

    def _unpack(self, saved: Tensor | _Offloaded) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        tensor, done = saved.fetched or self._fetch(saved)
        saved.fetched, saved.used = None, True
        ahead = self._handles[saved.position - 1] if saved.position else saved
        if not ahead.used and ahead.fetched is None:
            ahead.fetched = self._fetch(ahead)
        torch.cuda.current_stream().wait_event(done)
        return tensor

    def _fetch(self, handle: _Offloaded) -> tuple[Tensor, torch.cuda.Event]:
        # Allocated on the compute stream, where it is also freed: no record_stream, no delayed reuse.
        tensor = torch.empty_like(handle.host, device="cuda", pin_memory=False)
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            tensor.copy_(handle.host, non_blocking=True)
            return tensor, self._side.record_event()

    def _settle(self, most: int) -> None:
        while len(self._stash) > most:
            _, done = self._stash.popleft()
            torch.cuda.current_stream().wait_event(done)


PEERS: dict[str, Peer] = {
    "plain": Peer("plain", _plain),
    "checkpoint": Peer("checkpoint every block", _checkpointed, checkpointing=True),
    "every-other": Peer("checkpoint every other block", functools.partial(_checkpointed, every=2), checkpointing=True),
    "selective": Peer("selective checkpoint (save matmuls and attention)", _selective, checkpointing=True),
    "torchtune": Peer("torchtune's offload context", _torchtune_offload),
    "stream-offload": Peer("stream-based offload context (ours, after torchtune's)", _stream_offload),
    "save-on-cpu": Peer("save_on_cpu(pin_memory=True)", _save_on_cpu),
}
