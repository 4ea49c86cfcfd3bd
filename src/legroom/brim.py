"""How much of a capped allocator's memory a plan may fill, found by trying.

The cap holds for what the allocator has reserved, and some of that is always free but in pieces too small for the next
request. When nothing fits, the allocator gives pieces back and maps them anew, which stops the device: 22 ms of 150 on
an H200, in every step, or ends the step with an error. So the first plan stays well below the cap; how much is lost to
pieces is then seen, and the plan after it takes the rest. A plan under which the allocator has to rearrange is taken
back.
"""

from __future__ import annotations

_START = 0.90  # of the budget; under a plan for 0.97 the pieces were too small by 0.05 GiB of 17
# Memory is mapped 20 MiB at a time, and what is mapped in part cannot be given back: in small budgets a few such pieces
# are more than a tenth. 95 MiB of 718 were lost to them in a step that ran out of memory.
_LEAST_FREE_BYTES, _LEAST_START = 128 * 2**20, 0.8
_STEP = 0.04
_SPARE = 0.005  # left free beside the pieces that were seen
_WORTH = 0.03  # of the budget: less is not worth another plan
_LOOK_AFTER = 3  # steps of a plan: the first two find what the plan before left, and rearrange it
_MOST_TRIES = 6


class Brim:
    """The bytes that the next plan may fill, from what happened under the plans before."""

    def __init__(self, budget_bytes: int) -> None:
        less = max(budget_bytes - _LEAST_FREE_BYTES, int(budget_bytes * _LEAST_START))
        self.usable_bytes = min(int(budget_bytes * _START), less)
        self._budget_bytes = budget_bytes
        self._good_bytes = 0  # the most under which nothing had to be rearranged
        self._bad_bytes = 2 * budget_bytes  # the least under which something had to be
        self._tries = 0
        self._steps = 0
        self.settled = False

    def after_step(self, *, rearranged: bool, reserved_bytes: int, peak_bytes: int) -> bool:
        """Hear of a planned step; whether `usable_bytes` is another one now, so that it should be planned again.

        reserved_bytes: what the allocator holds. peak_bytes: the most of it that the step used.
        """
        self._steps += 1
        if self.settled or self._steps < _LOOK_AFTER:
            return False
        if rearranged:
            self._bad_bytes = min(self._bad_bytes, self.usable_bytes)
            return self._go_to(self._good_bytes or self.usable_bytes - int(self._budget_bytes * _STEP))
        self._good_bytes = max(self._good_bytes, self.usable_bytes)
        pieces = max(0, reserved_bytes - peak_bytes)
        goal = self._budget_bytes - pieces - int(self._budget_bytes * _SPARE)
        goal = min(goal, self._bad_bytes - int(self._budget_bytes * _WORTH))
        if goal - self.usable_bytes < self._budget_bytes * _WORTH or peak_bytes < self.usable_bytes * (1 - _WORTH):
            self.settled = True  # little to gain, or the plan does not fill what it has
            return False
        # Not all the way: another plan falls into other pieces, and one that does not fit ends the step.
        return self._go_to(self.usable_bytes + (goal - self.usable_bytes) * 2 // 3)

    def new_plan(self) -> None:
        """Another plan for as many bytes: how its memory falls into pieces is not known yet."""
        self.settled = False
        self._good_bytes = 0
        self._steps = 0

    def after_failure(self) -> None:
        """A planned step ran out of memory."""
        self._bad_bytes = min(self._bad_bytes, self.usable_bytes)
        self.settled = False
        self._go_to(min(self._good_bytes or self.usable_bytes, self.usable_bytes - int(self._budget_bytes * _STEP)))

    def _go_to(self, nbytes: int) -> bool:
        self._tries += 1
        # Back to what is known to be good costs no more tries.
        self.settled = nbytes == self._good_bytes or self._tries >= _MOST_TRIES
        self._steps = 0
        changed = nbytes != self.usable_bytes
        self.usable_bytes = nbytes
        return changed
