"""PyTorch's two stacks of modes, and ways to get at one that does not lie on top.

What the program puts on inside a step, it takes off from the top. So what is ours goes in and out beneath it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode


class Stack:
    def __init__(
        self,
        push: Callable[[Any], Any],
        pop: Callable[[], Any],
        depth: Callable[[], int],
        modes: Callable[[], list[Any]],
    ) -> None:
        self._push, self._pop = push, pop
        self.depth = depth
        self.modes = modes

    def put_in(self, mode: Any, depth: int) -> None:
        """With so many modes beneath it."""
        above = [self._pop() for _ in range(self.depth() - depth)]
        self._push(mode)
        for other in reversed(above):
            self._push(other)

    def take_out(self, mode: Any) -> int:
        """It must be there. How many modes lay beneath it."""
        above: list[Any] = []
        while (top := self._pop()) is not mode:
            above.append(top)
        depth = self.depth()
        for other in reversed(above):
            self._push(other)
        return depth


OPS = Stack(_push_mode, _pop_mode, torch._C._len_torch_dispatch_stack, _get_current_dispatch_mode_stack)
CALLS = Stack(
    _push_function_mode, _pop_function_mode, torch._C._len_torch_function_stack, _get_current_function_mode_stack
)
