"""Plans that are made beside the program: in a thread, or in processes of their own where the device asks for that."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from legroom.hardware import Hardware, cores
from legroom.ir import Trace
from legroom.plan import Plan
from legroom.planprocess import PlanProcess, ProcessError, can_be_sent
from legroom.schedule import Schedule
from legroom.sizes import Numbers

# Plans for a hundred sizes, of a second each, are a thousand steps in which worse ones do. One core in four at most:
# the program has data to load, and may be one of several on this machine.
MOST_PROCESSES, CORES_A_PROCESS = 4, 4


class Beside:
    """Pieces of work, in the order in which they are asked for. What fails is counted; the program goes on with what it
    has."""

    def __init__(
        self,
        planner: Callable[[Trace, Hardware, int], Plan],
        fallbacks: Counter[str],
        *,
        apart: bool,
        processes: int | None = None,
    ) -> None:
        """apart: in as many processes as asked for, or as the machine has room for."""
        self._planner = planner
        self._fallbacks = fallbacks
        self._apart = apart and can_be_sent(planner)
        most = (processes or _processes()) if self._apart else 1
        self._workers = ThreadPoolExecutor(most, thread_name_prefix="legroom-plan")
        self._processes: list[PlanProcess] = []  # no more than there is work for at once, and one
        self._free: list[PlanProcess] = []
        self._waiting = 0  # pieces of work that nobody has begun
        self._taking = threading.Lock()  # of these three
        self._alone = threading.Lock()  # in a thread, two plans take twice as long, and more from the program
        self._closed = False
        self._asked: deque[Future[None]] = deque()

    def ask(self, work: Callable[[], None]) -> None:
        with self._taking:
            self._waiting += 1
        self._asked.append(self._workers.submit(self._begin, work))
        while self._asked and self._asked[0].done():
            self._hear(self._asked.popleft())

    def plan(
        self, trace: Trace, hardware: Hardware, target_bytes: int, *, like: tuple[Trace, Numbers] | None = None
    ) -> tuple[Plan, Schedule | None]:
        """For the work that was asked for: a plan, and its schedule where that is known already. like: as there."""
        if self._apart:
            process = self._taken()
            try:
                return process.plan(self._planner, trace, hardware, target_bytes, like=like)
            except ProcessError as error:
                if self._closed:
                    raise
                with self._taking:
                    if self._apart:
                        self._fallbacks[f"planned in a thread: {error}"] += 1
                    self._apart = False
            finally:
                self._give_back(process)
        with self._alone:
            if self._closed:
                raise ProcessError("planning was ended")
            return self._planner(trace, hardware, target_bytes), None

    def settle(self) -> None:
        """Wait for all that was asked for."""
        while self._asked:
            self._hear(self._asked.popleft())

    def close(self) -> None:
        with self._taking:
            self._closed = True
            processes = list(self._processes)
        for process in processes:
            process.close()
        self._workers.shutdown(wait=True, cancel_futures=True)

    def _begin(self, work: Callable[[], None]) -> None:
        with self._taking:
            self._waiting -= 1
        self._end_idle()
        work()

    def _taken(self) -> PlanProcess:
        with self._taking:
            if self._free:
                return self._free.pop(0)
            process = PlanProcess()
            self._processes.append(process)
            if self._closed:
                process.close()
            return process

    def _give_back(self, process: PlanProcess) -> None:
        with self._taking:
            self._free.append(process)
        self._end_idle()

    def _end_idle(self) -> None:
        """One stays for the next question, and more only while work waits: they take memory of the host."""
        with self._taking:
            stay = 0 if not self._apart else len(self._free) if self._waiting else 1
            idle, self._free = self._free[stay:], self._free[:stay]
            self._processes = [process for process in self._processes if process not in idle]
        for process in idle:
            process.close()

    def _hear(self, asked: Future[None]) -> None:
        error = asked.exception()
        if error is not None:
            self._fallbacks[f"planning in the background failed: {type(error).__name__}: {error}"] += 1


def _processes() -> int:
    return max(1, min(MOST_PROCESSES, cores() // CORES_A_PROCESS))
