"""How a planned step makes again what it dropped, and holds it against the real bytes where that is to be checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from legroom.errors import StepError
from legroom.runtime.checking import Checks
from legroom.runtime.device import Device, HostCopy
from legroom.runtime.lineage import Made, Node
from legroom.runtime.plannedops import PlannedOps
from legroom.runtime.program import Program
from legroom.runtime.replay import Action, NotAtHand, actions_for, play, recall, remember, replay_by
from legroom.runtime.residency import Entry

NOT_USED = "a replay gave other bits and was not used"


class Again:
    """The replays of one planned step."""

    def __init__(
        self,
        program: Program,
        ops: PlannedOps,
        checks: Checks,
        device: Device,
        fallbacks: Counter[str],
        *,
        to_check: frozenset[int],
        told_ops: frozenset[int],
        as_planned: bool,
    ) -> None:
        """to_check: storages. told_ops: ops whose arguments are told from other sizes, where replays are checked.
        as_planned: nothing goes beside the plan, so that a tape that does not fit is worth no second try."""
        self._program, self._ops, self._checks, self._device = program, ops, checks, device
        self._fallbacks = fallbacks
        self._to_check, self._told_ops = to_check, told_ops
        self._as_planned = as_planned
        self._storages = len(program.trace.storages)
        self._ran: list[Action] = []  # by the last replay

    def goes_beside_plan(self) -> None:
        """More is away than in other steps."""
        self._as_planned = False

    def tape(self, tick: int, number: int) -> int:
        """What the tape of a replay is known by."""
        return tick * self._storages + number

    def make(self, entry: Entry, others: list[Entry], tape: int, *, settle: Callable[[Entry], None]) -> None:
        """An entry, and of the others what is made on the way. tape: -1 where there is none. settle: is told of each
        that is back."""
        assert entry.node is not None
        nodes = [other.node for other in others if other.node is not None]
        checked = any(back.number in self._to_check for back in (entry, *others))
        made = self._replay(entry.node, nodes, tape, checked=checked)
        for back, tensor in zip((entry, *others), made, strict=True):
            if tensor is not None:
                self._came_back(back, tensor)
                settle(back)
        self._ran = []

    def _replay(self, target: Node, also: list[Node], tape: int, *, checked: bool) -> list[torch.Tensor | None]:
        tapes = self._program.tapes
        known = tapes.get(tape)
        actions = recall(known, self._ops.made, self._ops.first) if known is not None else None
        if actions is not None:
            try:
                made = play(actions, (target, *also), checked=checked)
            except (NotAtHand, StepError):
                if self._as_planned:
                    tapes[tape] = None
            else:
                self._ran = actions
                return made
        actions = actions_for(target, also)
        if tape >= 0 and tape not in tapes:
            tapes[tape] = remember(actions, self._ops.first)
        made = replay_by(actions, (target, *also), checked=checked)
        self._ran = actions
        return made

    def _came_back(self, entry: Entry, tensor: torch.Tensor) -> None:
        real: HostCopy | None = None
        if entry.number in self._to_check:
            ran = {action.made.func for action in self._ran}
            real = self._checks.end(entry.number, tensor, ran, proves=self._ran_as_planned())
        entry.adopt(tensor)
        if real is not None:
            self._fallbacks[NOT_USED] += 1
            # Into the memory of the replay: beside that there may be no room.
            entry.host = real
            self._device.copy_in(real, entry.flat(), waits=True).wait()
        entry.ledger.unpin(entry)

    def _ran_as_planned(self) -> bool:
        return self.proves([action.made for action in self._ran])

    def proves(self, ran: list[Made]) -> bool:
        """Whether normalisations that are to be short were, and ops that are to be told from other sizes: what was
        compared is what is proven."""
        short, told = self._program.statistics, self._told_ops
        numbered = [(made, made.order - self._ops.first) for made in ran]
        return all(
            (made.statistics is not None or op not in short) and (made.told or op not in told) for made, op in numbered
        )
