"""Plans that are made beside the program: in a thread, and in a process of their own where the device asks for that."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.plan import Plan
from legroom.planprocess import PlanProcess, ProcessError, can_be_sent
from legroom.schedule import Schedule


class Beside:
    """One piece of work after the other. What fails is counted; the program goes on with what it has."""

    def __init__(
        self, planner: Callable[[Trace, Hardware, int], Plan], fallbacks: Counter[str], *, apart: bool
    ) -> None:
        self._planner = planner
        self._fallbacks = fallbacks
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="legroom-plan")
        self._apart = PlanProcess() if apart and can_be_sent(planner) else None
        self._closed = False
        self._asked: deque[Future[None]] = deque()

    def ask(self, work: Callable[[], None]) -> None:
        self._asked.append(self._worker.submit(work))
        while self._asked and self._asked[0].done():
            self._hear(self._asked.popleft())

    def plan(self, trace: Trace, hardware: Hardware, target_bytes: int) -> tuple[Plan, Schedule | None]:
        """For the work that was asked for: a plan, and its schedule where that is known already."""
        apart = self._apart
        if apart is not None:
            try:
                return apart.plan(self._planner, trace, hardware, target_bytes)
            except ProcessError as error:
                if self._closed:
                    raise
                self._fallbacks[f"planned in a thread: {error}"] += 1
                self._apart = None
                apart.close()
        return self._planner(trace, hardware, target_bytes), None

    def settle(self) -> None:
        """Wait for all that was asked for."""
        while self._asked:
            self._hear(self._asked.popleft())

    def close(self) -> None:
        self._closed = True
        apart = self._apart
        if apart is not None:
            apart.close()
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _hear(self, asked: Future[None]) -> None:
        error = asked.exception()
        if error is not None:
            self._fallbacks[f"planning in the background failed: {type(error).__name__}: {error}"] += 1
