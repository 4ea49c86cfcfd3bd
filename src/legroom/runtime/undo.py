"""Taking a step's work back: one that turns out to be over the budget has not happened.

What an optimizer allocates is known only when it has run. So in steps that are not known yet every lasting tensor is
copied to the host before an op first writes it, and gradients that stand when the step begins. If it is refused the
copies go back, gradients and state that were made in this step are taken away again, and generators draw the same
numbers again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from legroom.runtime.device import Device, HostCopy
from legroom.runtime.lineage import RandomState
from legroom.runtime.residency import Layout, laid_out, layout_of, storage_key


class Undo:
    def __init__(self, device: Device, optimizer: torch.optim.Optimizer | None) -> None:
        self._device = device
        self._optimizer = optimizer
        self._saved: dict[int, tuple[StorageWeakRef, HostCopy, int]] = {}  # the last: how many bytes
        self._elsewhere: list[tuple[torch.Tensor, torch.Tensor]] = []  # tensors on other devices, and what was in them
        self._random = RandomState(None)
        self._keys: dict[Any, set[Any]] = {}
        self._without_gradient: list[torch.Tensor] = []
        # Parameters, and how their gradients lie in which storage. Not the gradients: it must be possible to free them.
        self._gradients: list[tuple[torch.Tensor, int, Layout]] = []
        if optimizer is not None:
            self._keys = {parameter: set(state) for parameter, state in optimizer.state.items()}
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self._without_gradient = [p for p in parameters if p.grad is None]
            plain = [(p, p.grad) for p in parameters if p.grad is not None and p.grad.layout is torch.strided]
            plain = [(p, grad) for p, grad in plain if grad.device.type == device.name]
            self._gradients = [(p, storage_key(grad), layout_of(grad)) for p, grad in plain]
            # Nobody counts what lies on other devices, such as Adam's count of steps: it is small, or the host's own.
            of_state = [value for state in optimizer.state.values() for value in state.values()]
            trained = [tensor for p in parameters for tensor in (p, p.grad)]
            self._elsewhere = [
                (tensor, tensor.detach().clone())
                for tensor in (*trained, *of_state)
                if isinstance(tensor, torch.Tensor) and tensor.device.type != device.name
            ]
            try:
                self.before_write([grad for _, grad in plain])
            except BaseException:
                self.forget()
                raise

    def before_write(self, tensors: list[torch.Tensor]) -> None:
        """Keep the bytes of these tensors as they are now, unless that was done already."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._saved and storage.nbytes():
                host, copy = self._device.copy_out(_flat(storage), waits=True)
                # First, so that a failure leaves nothing.
                self._saved[storage._cdata] = StorageWeakRef(storage), host, storage.nbytes()
                copy.wait()

    def restore(self) -> None:
        for ref, host, _ in self._saved.values():
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is not None:
                self._device.copy_in(host, _flat(storage), waits=True).wait()
        self._random.restore()
        with torch.no_grad():
            for tensor, before in self._elsewhere:
                tensor.copy_(before)
        for parameter, key, layout in self._gradients:
            self._restore_gradient(parameter, key, layout)
        for parameter in self._without_gradient:
            parameter.grad = None
        if self._optimizer is not None:
            for parameter in list(self._optimizer.state):
                if parameter not in self._keys:
                    del self._optimizer.state[parameter]
                    continue
                for key in set(self._optimizer.state[parameter]) - self._keys[parameter]:
                    del self._optimizer.state[parameter][key]
        self.forget()

    def _restore_gradient(self, parameter: torch.Tensor, key: int, layout: Layout) -> None:
        """Put one that was let go of, or that another has taken the place of, back from its copy."""
        if key not in self._saved or (parameter.grad is not None and storage_key(parameter.grad) == key):
            return
        ref, host, nbytes = self._saved[key]
        storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
        if storage is None:
            flat = self._device.allocate(nbytes)
            self._device.copy_in(host, flat, waits=True).wait()
            storage = flat.untyped_storage()
        parameter.grad = laid_out(layout, _flat(storage))

    def forget(self) -> None:
        for _, host, _ in self._saved.values():
            host.drop()
        self._saved.clear()
        self._elsewhere.clear()

    def new_state_bytes(self) -> int:
        """What the optimizer has made since and kept."""
        if self._optimizer is None:
            return 0
        return sum(
            value.untyped_storage().nbytes()
            for parameter, state in self._optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and key not in self._keys.get(parameter, ())
        )


def _flat(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
