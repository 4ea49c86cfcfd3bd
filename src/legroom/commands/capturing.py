"""`legroom capture`: the trace of a step that a script defines.

The script is run once as a module, under the name of its file and not as `__main__`, so that a training loop behind
`if __name__ == "__main__"` stays where it is. It must define a function `step()` that makes one training step, and
should define `model` and `optimizer`, by which storages get their names and the device is found.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from legroom.errors import LegroomError, StepError, TraceError
from legroom.ir import Trace
from legroom.room import capture

_NAME = "legroom_captured_script"  # none that a script could want to import


def capture_script(path: Path, arguments: Sequence[str]) -> Trace:
    """Run the script, then its step, twice; the trace is of the second."""
    if not path.is_file():
        raise LegroomError(f"{path}: there is no such file")
    with _as_script(path, arguments):
        module = _load(path)
        step = _step_of(module, path)
        with _blaming(path, "step()"):
            trace = capture(step, model=getattr(module, "model", None), optimizer=getattr(module, "optimizer", None))
    if not trace.ticks:
        raise TraceError(
            f"{path}: step() saved nothing for a backward pass; does it run forward and backward itself, and does the "
            "script define `model`, by which the device is known?"
        )
    return trace


@contextlib.contextmanager
def _as_script(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """sys.argv and sys.path as the script would find them."""
    argv, folders = sys.argv, sys.path
    sys.argv, sys.path = [str(path), *arguments], [str(path.resolve().parent), *folders]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, folders
        sys.modules.pop(_NAME, None)


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_NAME, path)
    if spec is None or spec.loader is None:
        raise LegroomError(f"{path}: not a Python script; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module  # dataclasses and pickle look a class's module up by its name
    with _blaming(path, "the script"):
        spec.loader.exec_module(module)
    return module


def _step_of(module: ModuleType, path: Path) -> Callable[[], Any]:
    step = getattr(module, "step", None)
    if step is None:
        raise StepError(f"{path}: defines no step(); give it a function of that name that makes one training step")
    if not callable(step):
        raise StepError(f"{path}: step must be a function, got a {type(step).__name__}")
    if inspect.iscoroutinefunction(step) or inspect.isgeneratorfunction(step):
        raise StepError(f"{path}: step() must be a plain function: called, a generator or a coroutine does nothing")
    try:
        inspect.signature(step).bind()
    except TypeError as error:
        raise StepError(f"{path}: step() is called without arguments, but there is {error}") from None
    except ValueError:
        pass  # some callables have no signature to ask for
    return step  # type: ignore[no-any-return]


@contextlib.contextmanager
def _blaming(path: Path, what: str) -> Iterator[None]:
    """Turn what the user's code raises into one line that says where."""
    try:
        yield
    except LegroomError:
        raise
    except SystemExit as end:
        raise StepError(f"{path}: {what} ended the process (exit status {end.code})") from None
    except Exception as error:
        raise StepError(f"{path}: {what} raised {type(error).__name__}{_where(error, path)}: {error}") from error


def _where(error: Exception, path: Path) -> str:
    """The last line of the script that the error went through."""
    if isinstance(error, SyntaxError):
        return f" in line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == os.path.abspath(path)]
    return f" in line {lines[-1]}" if lines else ""
