"""Imports point upward in one list, and its pure half never sees torch."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "legroom"

# A module may import what stands above it. A folder is one entry: inside it, imports are its own affair.
ORDER = (
    # pure: no torch
    "errors",
    "units",
    "jsonio",
    "ir",
    "traceio",
    "replayprice",
    "hardware",
    "brim",
    "plan",
    "tables",
    "fitting",
    "sizes",
    "numbersio",
    "ladder",
    "kernels",
    "bestfit",
    "packing",
    "schedule",
    "peaks",
    "requested",
    "arrange",
    "timeline",
    "simulate",
    "hostfit",
    "evaluate",
    "bound",
    "planners",
    "planprocess",
    "beside",
    "reasons",
    "page",
    "report",
    "patience",
    "compare",
    "kerneltimes",
    # torch
    "history",
    "alloclog",
    "curve",
    "blocks",
    "runtime",
    "probing",
    "assembling",
    "admission",
    "courses",
    "strays",
    "following",
    "arranging",
    "standing",
    "room",
    "__init__",
    # edges
    "doctor",
    "demo",
    "commands",
    "cli",
)
PURE = ORDER[: ORDER.index("history")]
PURE_LIBRARIES = {"numpy", "numba", "scipy"}

MODULES = sorted(SOURCE.rglob("*.py"))


def entry(path: Path) -> str:
    """The name in ORDER that a file belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import in a file, those inside functions and behind conditions included."""
    out = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            out += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: imports are absolute"
            module = node.module or ""
            # `from legroom import plan` names a module; `from legroom.plan import Plan` names what is in one.
            out += [(node.lineno, f"legroom.{alias.name}") for alias in node.names if module == "legroom"]
            out += [(node.lineno, module)] if module != "legroom" else []
    return out


def own_entry(name: str) -> str | None:
    """The name in ORDER that an imported name belongs to, None for other libraries."""
    top, _, rest = name.partition(".")
    if top != "legroom":
        return None
    head = rest.partition(".")[0]
    return head if head and ((SOURCE / head).is_dir() or (SOURCE / f"{head}.py").is_file()) else "__init__"


def test_there_are_modules() -> None:
    assert len(MODULES) >= 10


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_upward(path: Path) -> None:
    mine = entry(path)
    assert mine in ORDER, f"{mine} has no place in ORDER; give it one"
    for line, name in imports(path):
        other = own_entry(name)
        if other is None or other == mine:
            continue
        assert ORDER.index(other) < ORDER.index(mine), f"{path.name}:{line} imports {name}, which stands below {mine}"


@pytest.mark.parametrize(
    "path", [path for path in MODULES if entry(path) in PURE], ids=lambda path: str(path.relative_to(SOURCE))
)
def test_the_pure_half_imports_no_torch(path: Path) -> None:
    for line, name in imports(path):
        top = name.partition(".")[0]
        known = top == "legroom" or top in sys.stdlib_module_names or top in PURE_LIBRARIES
        assert known, f"{path.name}:{line} imports {name}; the pure half may use {', '.join(sorted(PURE_LIBRARIES))}"


def test_the_order_names_what_exists() -> None:
    missing = [name for name in ORDER if not (SOURCE / name).is_dir() and not (SOURCE / f"{name}.py").is_file()]
    assert missing == []
