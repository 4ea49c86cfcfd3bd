"""Replays, held against the real bytes: one a step, and more where they were never proven at these sizes.

Where it is waited for, and on the CPU always, the real bytes are kept on the host until the replay, so one that gives
others is found out in time and not used. Otherwise a device with streams is not waited for: digests are compared there.
Where a check is due, its outcome is read before the optimizer runs; else when it has arrived, some steps later. What
was found wrong then has been used; it is counted, and a warning says so.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from legroom.errors import StepError
from legroom.runtime.device import Device, Fingerprint, HostCopy
from legroom.runtime.hashing import MOST_DUE
from legroom.runtime.residency import Entry


class Check:
    """The real bytes of one value, or their digest, from the drop to the replay."""

    __slots__ = ("_after", "_before", "_device", "_digest", "_due", "_funcs", "_wait", "host")

    def __init__(self, device: Device, flat: torch.Tensor, *, wait: bool = False, due: bool = False) -> None:
        self._device = device
        self._due = due
        self._wait = wait or not device.answers_later
        self._before = device.fingerprint(flat.untyped_storage(), due=due)
        self._digest: bytes | None = None
        self._after: Fingerprint | None = None
        self._funcs: Collection[Any] = ()
        self.host: HostCopy | None = None
        if self._wait:
            self.host, copy = device.copy_out(flat, waits=True)
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
        return self.before() == self._after.value()

    def before(self) -> bytes:
        """What the real bytes were. Once asked for, it is known for good: others may take the place of the answer."""
        if self._digest is None:
            self._digest = self._before.value()
        return self._digest

    def drop(self) -> None:
        if self.host is not None:
            self.host.drop()
            self.host = None


class Checks:
    """Those of one step."""

    def __init__(self, device: Device, *, wait: bool, due: bool, doubted: set[str]) -> None:
        """wait: for each outcome, before a replay is used. due: they are heard before the optimizer runs. doubted: for
        ops whose replays gave other bits when the step was over."""
        self._device = device
        self._wait, self._due = wait, due
        self._left = MOST_DUE // 2  # that can still be heard together
        self._begun: dict[int, Check] = {}  # by storage, from the drop on
        self.compared: list[Check] = []  # from the replay on; outcomes may not be known yet
        self.replayed: Counter[int] = Counter()  # how often the replay of each storage was compared, used, and a proof
        self.mismatch: list[str] = []  # the ops of replays that gave other bits
        self._over = False  # the step
        self._doubted = doubted

    def begin(self, storage: int, flat: torch.Tensor) -> bool:
        """Of what is to be dropped: its bytes. False where it was never proven at this size, and cannot be now."""
        if self._due and not self._left:
            return False
        self._left -= 1
        self._begun[storage] = Check(self._device, flat, wait=self._wait, due=self._due)
        return True

    def end(self, storage: int, again: torch.Tensor, funcs: Collection[Any], *, proves: bool) -> HostCopy | None:
        """Of what came back, by a replay that ran these. Where that is known to have given other bits: the real ones.

        proves: something about other steps.
        """
        check = self._begun.get(storage)
        if check is None:
            return None
        real: HostCopy | None = None
        wrong = check.compare(again, funcs)
        if wrong and check.host is not None:
            self._note(check)
            real, check.host = check.host, None
        elif wrong or (self._over and not check.same()):
            del self._begun[storage]
            self._note(check)
            raise StepError(
                f"recomputing {', '.join(check.ops)} gave other bits than the first run, found out after the step: "
                "gradients of this backward pass must not be used. Run backward inside step(), or the step again: it "
                "is kept or swapped from now on"
            )
        else:
            self.compared.append(check)
            self.replayed[storage] += proves
        check.drop()
        del self._begun[storage]
        return real

    def _note(self, wrong: Check) -> None:
        self.mismatch += wrong.ops
        if self._over:
            self._doubted.update(wrong.ops)

    def hear(self) -> list[str]:
        """The ops of replays that gave other bits, of those that are due."""
        if not self._due:
            return []
        compared, self.compared = self.compared, []
        wrong = sorted({op for check in compared if not check.same() for op in check.ops})
        self.mismatch += wrong
        return wrong

    def close(self, entry_of: Mapping[int, Entry]) -> None:
        """The step is over, and nobody hears of outcomes any more. But its graph may live on, as after a step that
        failed: what was dropped and never came back is had from its real bytes where they are at hand, and is held
        against their digest before it is used where they are not."""
        self._wait, self._due, self._over = True, False, True
        for storage, check in list(self._begun.items()):
            entry = entry_of.get(storage)
            if entry is not None and entry.views and entry.number != storage:
                with contextlib.suppress(Exception):
                    check.before()
                check.drop()  # it has joined another one, and has no use for bytes of its own
                continue
            if entry is not None and entry.views and not entry.in_memory and entry.host is None:
                if check.host is None:
                    with contextlib.suppress(Exception):  # a device that failed fails again when asked
                        check.before()
                    continue
                entry.host, check.host = check.host, None
                entry.ledger.unpin(entry)
            check.drop()
            del self._begun[storage]


def refusal(ops: Sequence[str], *, optimizer_began: bool) -> str:
    """What to say of a step in which replays of these ops gave other bits, and were used."""
    if optimizer_began:
        changed = "An optimizer had begun before that was known: go back to a checkpoint, or take back what it did"
    else:
        changed = "Parameters were not changed, unless in a closure or without an optimizer of PyTorch's"
    return (
        f"recomputing {', '.join(ops)} gave other bits than the first run at this size of the input, and the same at "
        "others: gradients of this step, and what they were added to, must not be used. Set them to zero and run the "
        f"batch again: it is kept or swapped from now on. {changed}. Running statistics and random numbers have moved "
        "on"
    )
