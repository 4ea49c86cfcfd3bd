"""A word on the terminal while something takes long, and silence where nobody watches."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

LONG_SECONDS = 2.0


@contextlib.contextmanager
def patience(doing: str) -> Iterator[None]:
    """Say what is being done once it has taken two seconds, on a terminal only; the line is wiped when it is over."""
    if not sys.stderr.isatty():
        yield
        return
    said = threading.Event()

    def say() -> None:
        said.set()
        sys.stderr.write(f"legroom: {doing} ...")
        sys.stderr.flush()

    timer = threading.Timer(LONG_SECONDS, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if said.is_set():
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
