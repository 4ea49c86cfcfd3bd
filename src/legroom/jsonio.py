"""Reading and writing the project's JSON files, strictly.

Every file is one object with "kind" and "version". A reader takes typed values out of it by path, and what does not
fit raises the caller's error with that path: `trace.storages[3].nbytes: expected an integer >= 0, got -5`. Nothing is
guessed: unknown fields, duplicate keys, NaN, infinities, and booleans in place of integers are refused.

Files come from other machines, so a hostile one may cost an error but neither memory without bound nor an exception of
another kind: sizes are capped before parsing (after decompression too), and depth is capped by the parser.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import secrets
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from legroom.errors import LegroomError, quote

# A trace of 5,000 ops takes about half a MiB. Parsed JSON can be 30 times its text: a few GiB at worst.
LARGEST_TEXT_BYTES = 128 * 2**20

_GZIP_MAGIC = b"\x1f\x8b"
_LONGEST_PATH = 200  # characters, in an error


@dataclass(frozen=True, slots=True)
class Node:
    """A JSON value, the path that leads to it, and the error to raise about it."""

    value: Any
    path: str
    error: type[LegroomError]

    def fail(self, what: str) -> NoReturn:
        raise self.error(f"{self.path}: {what}")

    def fields(self, *names: str, optional: Sequence[str] = ()) -> dict[str, Node]:
        """The fields of an object: all of `names`, any of `optional`, nothing else."""
        if not isinstance(self.value, dict):
            self.fail(f"expected an object, got {_type_of(self.value)}")
        for name in names:
            if name not in self.value:
                self.fail(f"the field {quote(name)} is missing")
        for name in self.value:
            if name not in names and name not in optional:
                self.fail(f"unknown field {quote(name)}; known are {', '.join((*names, *optional))}")
        return {name: Node(value, f"{self.path}.{name}", self.error) for name, value in self.value.items()}

    def items(self, *, longest: int | None = None) -> Iterator[Node]:
        """The entries of an array."""
        entries = self.array(longest=longest)
        return (Node(value, f"{self.path}[{index}]", self.error) for index, value in enumerate(entries))

    def array(self, *, longest: int | None = None) -> list[Any]:
        if not isinstance(self.value, list):
            self.fail(f"expected an array, got {_type_of(self.value)}")
        if longest is not None and len(self.value) > longest:
            self.fail(f"expected at most {longest} entries, got {len(self.value)}")
        return self.value

    def table(self, *columns: str) -> dict[str, list[Any]]:
        """An object of arrays of one length, the columns of a table. Check their entries with `entry()`."""
        out = {name: node.array() for name, node in self.fields(*columns).items()}
        rows = len(out[columns[0]])
        for name in columns:
            if len(out[name]) != rows:
                self.fail(f"{name} has {len(out[name])} rows where {columns[0]} has {rows}")
        return out

    def entry(self, row: int, column: str, value: Any) -> Node:
        """An entry of a table, named as the record it becomes: `trace.storages[3].nbytes`."""
        return Node(value, f"{self.path}[{row}].{column}", self.error)

    def integer(self, *, least: int = 0, most: int = 2**62 - 1) -> int:
        if type(self.value) is not int or self.value < least:
            self.fail(f"expected an integer >= {least}, got {quote(self.value)}")
        if self.value > most:
            self.fail(f"expected an integer <= {most}, got {quote(self.value)}")
        return self.value

    def integers(self, *, least: int = 0, most: int = 2**62 - 1) -> tuple[int, ...]:
        """An array of integers, without a Node for each: tables have hundreds of thousands."""
        values = self.array()
        for value in values:
            if type(value) is not int or not least <= value <= most:
                break
        else:
            return tuple(values)
        return tuple(node.integer(least=least, most=most) for node in self.items())

    def number(self, *, least: float = 0.0, most: float = math.inf) -> float:
        """A finite float; an integer is taken as one."""
        if type(self.value) not in (int, float) or not least <= self.value <= most:
            self.fail(f"expected a number from {least:g} to {most:g}, got {quote(self.value)}")
        try:
            number = float(self.value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            self.fail(f"expected a finite number, got {quote(self.value)}")
        return number

    def numbers(self) -> list[float]:
        """An array of finite floats from zero on, as above."""
        values = self.array()
        if all(type(value) is float and 0.0 <= value < math.inf for value in values):
            return values
        return [node.number() for node in self.items()]

    def boolean(self) -> bool:
        if type(self.value) is not bool:
            self.fail(f"expected true or false, got {quote(self.value)}")
        return self.value

    def text(self, *, longest: int = 4096) -> str:
        if not isinstance(self.value, str):
            self.fail(f"expected a text, got {_type_of(self.value)}")
        if len(self.value) > longest:
            self.fail(f"expected at most {longest} characters, got {len(self.value)}")
        # JSON can spell half of a surrogate pair, which no file and no terminal can take afterwards.
        if not self.value.isascii() and any("\ud800" <= character <= "\udfff" for character in self.value):
            self.fail(f"expected text that UTF-8 can hold, got {quote(self.value)}")
        return self.value

    def one_of(self, known: Sequence[str]) -> str:
        if not isinstance(self.value, str) or self.value not in known:
            self.fail(f"expected one of {', '.join(known)}, got {quote(self.value)}")
        return self.value


def parse(text: str, *, kind: str, version: int, error: type[LegroomError]) -> Node:
    """The root of a file of this kind, with "kind" and "version" checked and taken out."""
    if len(text) > LARGEST_TEXT_BYTES:
        raise error(f"{kind}: the text has {len(text)} characters, this legroom reads up to {LARGEST_TEXT_BYTES}")
    try:
        value = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_without_duplicates
        )
    except RecursionError:
        raise error(f"{kind}: not readable, the JSON is nested too deeply") from None
    except json.JSONDecodeError as cause:
        raise error(f"{kind}: not readable as JSON: {cause}") from None
    except ValueError as cause:  # a number, or a key that is there twice
        path, odd = _odd_number(text)
        raise error(f"{kind}{path}: {odd or f'not readable as JSON: {cause}'}") from None
    root = Node(value, kind, error)
    if not isinstance(value, dict):
        root.fail(f"expected an object, got {_type_of(value)}")
    if value.get("kind") != kind:
        root.fail(f"this file is of kind {quote(value.get('kind'))}, expected {quote(kind)}")
    found = Node(value.get("version"), f"{kind}.version", error).integer(least=1)
    if found > version:
        root.fail(f"this file is version {found}, this legroom reads up to {version}; a newer legroom reads it")
    return Node({name: entry for name, entry in value.items() if name not in ("kind", "version")}, kind, error)


def dump(kind: str, version: int, fields: dict[str, Any]) -> str:
    """The text of a file: compact, but a line for each field and each column, so that a diff shows what changed."""
    lines = [f'"kind":{json.dumps(kind)}', f'"version":{version}']
    for name, value in fields.items():
        if isinstance(value, dict):
            inner = ",\n".join(f" {json.dumps(key)}:{_compact(entry)}" for key, entry in value.items())
            lines.append(f"{json.dumps(name)}:{{\n{inner}\n}}")
        else:
            lines.append(f"{json.dumps(name)}:{_compact(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_text(path: str | os.PathLike[str], *, error: type[LegroomError]) -> str:
    """The text of a file, gzipped or not, by its first bytes and not by its name."""
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST_TEXT_BYTES + 1)
        if data[:2] == _GZIP_MAGIC:
            data = _decompress(data)
        if len(data) > LARGEST_TEXT_BYTES:
            raise error(f"{path}: larger than {LARGEST_TEXT_BYTES} bytes, the most this legroom reads")
        return data.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise error(f"{path}: not UTF-8 text (byte {cause.start})") from None
    except (zlib.error, EOFError) as cause:
        raise error(f"{path}: the gzip stream is damaged ({cause})") from None
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror or cause})") from None
    except ValueError as cause:  # a path with a NUL in it
        raise error(f"{quote(str(path))}: cannot be read ({cause})") from None


def write_text(path: str | os.PathLike[str], text: str, *, error: type[LegroomError]) -> None:
    """Write a file whole or not at all; gzipped where its name ends in .gz."""
    target = Path(path)
    if not target.name:
        raise error(f"{quote(str(path))}: cannot be written (not the name of a file)")
    data = text.encode("utf-8")
    if target.suffix == ".gz":
        data = gzip.compress(data, mtime=0)  # no time stamp: the same content is the same file
    scratch = target.with_name(f".{target.name[:100]}.{secrets.token_hex(6)}")
    try:
        scratch.write_bytes(data)
        os.replace(scratch, target)
    except (OSError, ValueError) as cause:  # ValueError: a path with a NUL in it
        with contextlib.suppress(OSError, ValueError):
            scratch.unlink()
        reason = getattr(cause, "strerror", None) or cause
        raise error(f"{quote(str(path))}: cannot be written ({reason})") from None


def _decompress(data: bytes) -> bytes:
    # One byte past the cap is enough to know, and a bomb is never unpacked further than that.
    stream = zlib.decompressobj(wbits=31)
    out = stream.decompress(data, LARGEST_TEXT_BYTES + 1)
    if len(out) <= LARGEST_TEXT_BYTES and not stream.eof:
        raise EOFError("it ends too early")
    if stream.unused_data:
        raise EOFError("more follows after its end")
    return out


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number that JSON knows")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


class _Odd(str):
    """What is wrong with a number, in its place."""

    __slots__ = ()


def _odd_number(text: str) -> tuple[str, str]:
    """Where the first number stands that cannot be read, and what is wrong with it; nothing where there is none.

    Text that was refused is read once more for that: to look at each number takes longer.
    """

    def number(convert: Callable[[str], object]) -> Callable[[str], object]:
        def read(digits: str) -> object:
            try:
                return convert(digits)
            except ValueError as cause:
                longest = sys.get_int_max_str_digits()
                return _Odd(f"an integer of more than {longest} digits" if convert is int else cause)

        return read

    try:
        value = json.loads(
            text, parse_constant=number(_refuse_constant), parse_float=number(_finite), parse_int=number(int)
        )
    except (ValueError, RecursionError):
        return "", ""
    keys: list[object] = []  # that lead to where the walk is
    inside: list[Iterator[tuple[object, Any]]] = [iter([(None, value)])]
    while inside:
        for key, entry in inside[-1]:
            if type(entry) is _Odd:
                path = "".join(map(_step_of_path, [*keys, key]))
                return path if len(path) <= _LONGEST_PATH else f"{path[:_LONGEST_PATH]}...", str(entry)
            if type(entry) is dict or type(entry) is list:
                keys.append(key)
                inside.append(iter(entry.items() if type(entry) is dict else enumerate(entry)))
                break
        else:
            inside.pop()
            if keys:
                keys.pop()
    return "", ""


def _step_of_path(key: object) -> str:
    if key is None:
        return ""
    if isinstance(key, int):
        return f"[{key}]"
    return f".{key}" if isinstance(key, str) and key.isidentifier() and len(key) <= 40 else f"[{quote(key)}]"


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"an object has the key {quote(key)} twice")
    return out


def _type_of(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
