"""How functions are compiled, and when again: whenever a file of this folder, or the tables, have changed.

numba keeps what it has compiled in a cache, which it throws away when the file of the function changes; but not when
that of a function or a constant does which went into it. It tells functions apart by the variables of the functions
around them, though. So each gets one, whose value stands for all files here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import CellType, FunctionType
from typing import Any, TypeVar, cast

import numba
from numba.core.registry import cpu_target

F = TypeVar("F", bound=Callable[..., Any])


def _lean(**options: bool) -> dict[str, Any]:
    """Those of these options that this numba knows."""
    return {name: value for name, value in options.items() if hasattr(cpu_target.options, name)}


# Not to count references to arrays halves the time of lowering; that, and to make no entries nobody uses, saves a third
# of the compilation.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", **_lean(_nrt=False, no_cfunc_wrapper=True)}


def _sources() -> str:
    """A digest of all files that go into compiled functions; empty where there are none to read."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    try:
        for path in (*sorted(folder.glob("*.py")), folder.parent / "tables.py"):
            digest.update(path.read_bytes())
    except OSError:
        return ""
    return digest.hexdigest()


_SOURCES = _sources()


def compiled(function: F) -> F:
    """For functions that Python calls."""
    try:
        return cast(F, numba.njit(cache=bool(_SOURCES), **_OPTIONS)(_known_by_sources(function)))
    except RuntimeError:  # no place to write a cache: compile in each process instead
        return cast(F, numba.njit(**_OPTIONS)(function))


def inner(function: F) -> F:
    """For functions that only compiled functions call, and that end up in the caches of these."""
    return cast(F, numba.njit(**_OPTIONS, **_lean(no_cpython_wrapper=True))(function))


def inlined(function: F) -> F:
    """For small functions that call large ones: these would be optimised once more for each function around them."""
    return cast(F, numba.njit(inline="always", **_OPTIONS)(function))


def _known_by_sources(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with one variable of a function around it, which it never reads."""
    code = function.__code__
    assert isinstance(function, FunctionType) and not code.co_freevars
    code = code.replace(co_freevars=("sources",))
    out = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, (CellType(_SOURCES),))
    out.__qualname__, out.__doc__, out.__module__ = function.__qualname__, function.__doc__, function.__module__
    return out
