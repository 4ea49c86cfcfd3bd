"""How much of a capped allocator's memory a plan may fill.

The cap holds for what the allocator has reserved, and some of that may be free but in pieces too small for the next
request. When nothing fits, the allocator gives pieces back and maps them anew, which stops the device: 22 ms of 150 on
an H200, in every step, or ends the step with an error. Where the pieces of a plan can be arranged (see `arrange`), it
may fill nearly everything; where not, it stays well below the cap. Either way a plan under which the allocator has to
rearrange is taken back for a smaller one.
"""

from __future__ import annotations

# Of the budget, from the first that is tried on. Some is lost at the edges of pages whatever the arrangement.
SHARES = (0.97, 0.95, 0.935, 0.92, 0.90, 0.86, 0.82, 0.78, 0.74, 0.70)
UNARRANGED = 0.90  # without an arrangement at most: under a plan for 0.97 pieces were too small by 0.05 GiB of 17
# Memory is mapped 20 MiB at a time, and what is mapped in part cannot be given back: in small budgets a few such pieces
# are more than a tenth. 95 MiB of 718 were lost to them in a step that ran out of memory.
_LEAST_FREE_BYTES, _LEAST_SHARE = 148 * 2**20, 0.8  # free under the first plan; where that is too much, its share
_MOST_RELIEFS = 4  # steps of a plan that has settled, in which something had to go beside it
_LOOK_AFTER = 3  # steps of a plan: the first two find what the plan before left, and rearrange it


class Brim:
    """The bytes that the next plan may fill, from what happened under the plans before."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._place = 0
        self._steps = 0
        self._reliefs = 0
        self.settled = False

    @property
    def arranged(self) -> bool:
        """Whether a plan may fill so much only if its pieces are arranged."""
        return SHARES[self._place] > UNARRANGED

    @property
    def untried(self) -> bool:
        """Whether no step has run under the plan yet."""
        return self._steps == 0

    @property
    def usable_bytes(self) -> int:
        first = max(self._budget_bytes - _LEAST_FREE_BYTES, int(self._budget_bytes * _LEAST_SHARE))
        first = min(first, int(self._budget_bytes * SHARES[0]))
        return int(first * SHARES[self._place] / SHARES[0])

    @property
    def unarranged_bytes(self) -> int:
        """What a plan may fill whose pieces nobody arranges."""
        return min(self.usable_bytes, int(self._budget_bytes * UNARRANGED))

    def lower(self) -> bool:
        """The pieces of a plan for so much do not fit. Whether there is less to try."""
        self.settled, self._steps, self._reliefs = False, 0, 0
        if self._place + 1 == len(SHARES):
            return False
        self._place += 1
        return True

    def after_step(self, *, rearranged: bool) -> bool:
        """Hear of a planned step; whether `usable_bytes` is another one now, so that it should be planned again."""
        self._steps += 1
        if self.settled or self._steps < _LOOK_AFTER:
            return False
        if rearranged and self.lower():
            return True
        self.settled = True
        return False

    def after_relief(self) -> bool:
        """A step of a plan that had settled found too little room; whether that came often enough to plan again."""
        self._reliefs += 1
        return self._reliefs >= _MOST_RELIEFS and self.lower()

    def after_failure(self, *, arranged: bool) -> None:
        """A step ran out of memory; arranged: one whose pieces may have been arranged."""
        while not arranged and self.arranged and self.lower():
            pass
        self.lower()

    def new_plan(self) -> None:
        """Another plan for as many bytes: how its memory falls into pieces is not known yet."""
        self.settled, self._steps, self._reliefs = False, 0, 0
