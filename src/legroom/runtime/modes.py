"""The two places where eager PyTorch is intercepted, and how they are put in and taken out.

Saved-tensor hooks see what autograd keeps. A dispatch mode sees ops. The mode is not neutral inside the autograd
engine, where PyTorch takes other formulas while any mode is on, so it is taken off around every call into the engine.
Planned steps have it on inside a few of the program's calls only: see `calls`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from legroom.runtime.calls import CallMode, Gate
from legroom.runtime.stacks import CALLS, OPS

OpHandler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class OpMode(TorchDispatchMode):
    """Hands every op to one function."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the guard against compiling this method imports the compiler and costs a wrapper on every op

    def __init__(self, handler: OpHandler) -> None:
        super().__init__()
        self.handler = handler

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not isinstance(func, torch._ops.OpOverload):  # higher-order ops: not ours to see into
            return func(*args, **(kwargs or {}))
        return self.handler(func, args, kwargs or {})


class Engine:
    """Stands in for the autograd engine while a step runs: the modes are off inside, and the step hears of it."""

    def __init__(
        self,
        real: Any,
        mode: OpMode | None,
        calls: CallMode | None,
        entered: Callable[[], None],
        left: Callable[[], None],
    ) -> None:
        self._real = real
        self._mode = mode
        self._calls = calls
        self._entered = entered
        self._left = left
        self._depth = 0

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        # Not there: in another thread's backward, in one inside ours, or where the mode is off at the moment.
        mode_depth = OPS.take_out(self._mode) if self._mode in OPS.modes() else None
        calls_depth = CALLS.take_out(self._calls) if self._calls in CALLS.modes() else None
        # A node may call the engine again: that is no step of the program's.
        self._depth += 1
        if self._depth == 1:
            self._entered()
        try:
            return self._real.run_backward(*args, **kwargs)
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._left()
            if calls_depth is not None:
                CALLS.put_in(self._calls, calls_depth)
            if mode_depth is not None:
                OPS.put_in(self._mode, mode_depth)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class Interception:
    """Everything that is put into PyTorch for a step, and taken out again whatever happens."""

    def __init__(
        self,
        pack: Callable[[torch.Tensor], Any],
        unpack: Callable[[Any], torch.Tensor],
        *,
        mode: OpMode | None,
        calls: CallMode | None = None,
        entered: Callable[[], None],
        left: Callable[[], None],
        depths: tuple[int, int] | None = None,
    ) -> None:
        """depths: how many modes of ops and of calls were on when the step began. What the program has put on since, it
        takes off from the top, so ours go beneath. None: it begins now."""
        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        self._depths = depths
        self._mode, self._calls = mode, calls
        self._entered, self._left = entered, left
        self._engine: Any = None

    def __enter__(self) -> None:
        self._hooks.__enter__()
        self._engine = torch.autograd.Variable._execution_engine
        engine = Engine(self._engine, self._mode, self._calls, self._entered, self._left)
        torch.autograd.Variable._execution_engine = engine  # type: ignore[assignment]
        if self._mode is not None and not isinstance(self._calls, Gate):
            if self._depths is None:
                self._mode.__enter__()
            else:
                OPS.put_in(self._mode, self._depths[0])
        if self._calls is not None:
            CALLS.put_in(self._calls, CALLS.depth() if self._depths is None else self._depths[1])

    def __exit__(self, *error: Any) -> None:
        try:
            if self._calls in CALLS.modes():
                CALLS.take_out(self._calls)
            if isinstance(self._calls, Gate):
                self._calls.close()
            elif self._mode is not None and self._depths is None:
                self._mode.__exit__(*error)
            elif self._mode in OPS.modes():
                OPS.take_out(self._mode)
        finally:
            torch.autograd.Variable._execution_engine = self._engine
            self._hooks.__exit__(*error)
