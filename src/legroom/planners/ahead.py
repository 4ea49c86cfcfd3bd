"""Linear programs that are solved in a thread of their own, while the search goes on elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from legroom.bound import bound_of
from legroom.kernels.codes import Codes
from legroom.planners.local import rounded
from legroom.tables import Tables


class Program(NamedTuple):
    tables: Tables
    budget_bytes: int
    most_ticks: int

    def start(self) -> Codes:
        """A plan to start a search from."""
        return rounded(bound_of(self.tables, self.budget_bytes, most_ticks=self.most_ticks))


class Ahead:
    """Solved one after another, from the beginning of the context on. What nobody has asked for by its end is lost."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self._programs = programs
        self._pool = ThreadPoolExecutor(1)
        self._starts: list[Future[Codes]] = []

    def __enter__(self) -> Ahead:
        with contextlib.suppress(RuntimeError):  # the interpreter is about to end, or there may be no more threads
            for program in self._programs:
                self._starts.append(self._pool.submit(program.start))
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def starts(self) -> Iterator[Codes]:
        """In the order of the programs. What no thread took is solved here."""
        for number, program in enumerate(self._programs):
            yield self._starts[number].result() if number < len(self._starts) else program.start()
