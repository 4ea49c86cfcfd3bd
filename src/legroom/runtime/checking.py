"""Replays, held against the real bytes: one a step, and more where they were never proven at these sizes.

Where it is waited for, and on the CPU always, the real bytes are kept on the host until the replay, so one that gives
others is found out in time and not used. Otherwise a device with streams is not waited for: digests are compared there.
Where a check is due, its outcome is read before the optimizer runs; else when it has arrived, some steps later. What
was found wrong then has been used; it is counted, and a warning says so.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from legroom.runtime.device import Device, Fingerprint, HostCopy


class Check:
    """The real bytes of one value, or their digest, from the drop to the replay."""

    __slots__ = ("_after", "_before", "_device", "_due", "_funcs", "_wait", "host")

    def __init__(self, device: Device, flat: torch.Tensor, *, wait: bool = False, due: bool = False) -> None:
        self._device = device
        self._due = due
        self._wait = wait or not device.answers_later
        self._before = device.fingerprint(flat.untyped_storage(), due=due)
        self._after: Fingerprint | None = None
        self._funcs: Collection[Any] = ()
        self.host: HostCopy | None = None
        if self._wait:
            self.host, copy = device.copy_out(flat)
            try:
                copy.wait()
            except BaseException:
                self.drop()
                raise

    @property
    def ops(self) -> list[str]:
        """What the replay ran."""
        return sorted(map(str, self._funcs))

    def compare(self, again: torch.Tensor, funcs: Collection[Any]) -> bool:
        """Whether the replay is known to have given other bits. funcs: what it ran."""
        self._funcs = funcs
        self._after = self._device.fingerprint(again.untyped_storage(), due=self._due)
        return self._wait and not self.same()

    def known(self) -> bool:
        """Whether `same()` can be asked without waiting for the device."""
        return self._after is not None and self._before.arrived() and self._after.arrived()

    def same(self) -> bool:
        assert self._after is not None
        return self._before.value() == self._after.value()

    def drop(self) -> None:
        if self.host is not None:
            self.host.drop()
            self.host = None
