"""One HTML page that needs nothing else: headings, tables, and bars, curves and points drawn as inline SVG.

Built as a tree, so that text is escaped in one place, by the library that writes the tree out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal
from xml.etree.ElementTree import Element, SubElement, tostring

MOST_POINTS = 800  # of a curve: more than a screen has columns for
MOST_TICKS = 7  # of an axis
_WIDTH, _HEIGHT = 800, 260
_LABEL, _BAR, _ROW = 190, 410, 24  # what they leave of the width is for the value
_LEFT, _TOP = 84, 8  # of a plot with axes: the figures beside it, and half of the uppermost one
_ENTRIES = 4  # of a legend, in a row

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --soft: #66717d; --line: #d5dae0; --paper: #fff;
  --1: #2b6cb0; --2: #dd8b2f; --3: #8e44ad; --4: #2f8f5b; --over: #c53030; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ed; --soft: #98a3af; --line: #3a444f; --paper: #14191f;
  --1: #63a4e6; --2: #e9a85a; --3: #c39bd3; --4: #6fcf97; --over: #f08080; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 860px;
  margin: 2em auto; padding: 0 1em; overflow-wrap: anywhere; }
h1 { font-size: 1.5em; } h2 { font-size: 1.1em; margin: 2em 0 .4em; } p { margin: .4em 0; color: var(--soft); }
dl { display: flex; flex-wrap: wrap; gap: 1em 2em; margin: 1em 0; } dt { color: var(--soft); font-size: .85em; }
dd { margin: 0; font-size: 1.4em; font-variant-numeric: tabular-nums; } dd.over { color: var(--over); }
table { border-collapse: collapse; width: 100%; } th { text-align: left; font-weight: 600; color: var(--soft); }
th, td { padding: .25em 1em .25em 0; border-bottom: 1px solid var(--line); vertical-align: top; }
svg { width: 100%; height: auto; overflow: visible; } svg text { fill: var(--ink); font-size: 13px; }
.faint { fill: var(--line); } .one { fill: var(--1); } .frame { fill: none; stroke: var(--line); }
.line-1, .line-2, .limit { fill: none; stroke-width: 1.5; }
.line-1 { stroke: var(--1); stroke-width: 4; } .line-2 { stroke: var(--2); }
.limit { stroke: var(--over); stroke-dasharray: 6 4; }
.dot { stroke-width: 5; stroke-linecap: round; } .cross, .dash { fill: none; stroke-width: 1.2; }
.colour-1 { stroke: var(--1); } .colour-2 { stroke: var(--2); } .colour-3 { stroke: var(--3); }
.colour-4 { stroke: var(--4); } .ink { stroke: var(--ink); } .soft { stroke: var(--soft); }
.grid { stroke: var(--line); }
"""
Mark = Literal["dot", "cross", "dash"]
_MARKS: dict[Mark, str] = {"dot": "M{x} {y}h0", "cross": "M{x} {y}m-5 -5l10 10m0 -10l-10 10", "dash": "M{x} {y}m-3 0h6"}


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: float
    shown: str  # the value as people read it


@dataclass(frozen=True, slots=True)
class Curve:
    label: str
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cloud:
    """Points that look alike."""

    label: str
    mark: Mark
    colour: str  # a class of the style
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """What runs along one side of a plot, from `low` to `high`."""

    low: float
    high: float
    shown: Callable[[float], str]  # a value as people read it
    scale: Literal["decimal", "binary", "log"] = "decimal"

    def share(self, value: float) -> float:
        """Where a value lies between the ends: 0 to 1."""
        if self.scale == "log":
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values between the ends."""
        if self.scale == "log":
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            found = [step * 10.0**power for power in range(first, last + 1) for step in (1, 2, 5)]
            found = [value for value in found if self.low <= value <= self.high]
            # Every third is of the same digit, so the thinned ones are evenly apart.
            return found if len(found) <= MOST_TICKS else found[:: 3 * math.ceil(len(found) / 3 / MOST_TICKS)]
        apart = (self.high - self.low) / (MOST_TICKS - 1)
        if self.scale == "binary":
            step = 2.0 ** math.ceil(math.log2(apart))
        else:
            power = 10.0 ** math.floor(math.log10(apart))
            step = next(times * power for times in (1, 2, 5, 10) if times * power >= apart or times == 10)
        start = math.ceil(self.low / step)
        return [value for value in ((start + i) * step for i in range(MOST_TICKS)) if value <= self.high]


class Page:
    """Filled from top to bottom, then written out by `text()`."""

    def __init__(self, title: str) -> None:
        self._root = Element("html", lang="en")
        head = SubElement(self._root, "head")
        SubElement(head, "meta", charset="utf-8")
        SubElement(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
        _add(head, "title", title)
        SubElement(head, "style").text = _STYLE
        self._body = SubElement(self._root, "body")
        _add(self._body, "h1", title)

    def text(self) -> str:
        return "<!DOCTYPE html>\n" + tostring(self._root, encoding="unicode", method="html") + "\n"

    def heading(self, text: str) -> None:
        _add(self._body, "h2", text)

    def paragraph(self, text: str) -> None:
        _add(self._body, "p", text)

    def figures(self, figures: Sequence[tuple[str, str]], *, over: Sequence[str] = ()) -> None:
        """Large numbers under their names; those in `over` stand out."""
        parent = SubElement(self._body, "dl")
        for name, shown in figures:
            pair = SubElement(parent, "div")
            _add(pair, "dt", name)
            _add(pair, "dd", shown, **({"class": "over"} if name in over else {}))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        parent = SubElement(self._body, "table")
        head = SubElement(parent, "tr")
        for column in columns:
            _add(head, "th", column)
        for row in rows:
            line = SubElement(parent, "tr")
            for cell in row:
                _add(line, "td", cell)

    def bars(self, title: str, bars: Sequence[Bar], *, most: float = 0.0) -> None:
        """A row for each bar, all to one scale: the largest of them, or `most` if that is larger."""
        most = max([most, *(bar.value for bar in bars)]) or 1.0
        svg = self._svg(title, len(bars) * _ROW)
        for row, bar in enumerate(bars):
            top = row * _ROW
            _add(svg, "text", bar.label, x="0", y=str(top + 16))
            box = {"x": str(_LABEL), "y": str(top + 4), "height": str(_ROW - 8)}
            SubElement(svg, "rect", {"class": "faint", "width": str(_BAR), **box})
            SubElement(svg, "rect", {"class": "one", "width": _number(_BAR * bar.value / most), **box})
            _add(svg, "text", bar.shown, x=str(_WIDTH), y=str(top + 16), **{"text-anchor": "end"})

    def curves(self, title: str, curves: Sequence[Curve], *, limit: tuple[str, int] | None = None) -> None:
        """One or two curves to one scale, each over the full width, and a dashed line across at `limit`."""
        top = max(max(curve.values) for curve in curves)
        most = 1.05 * max(top, limit[1] if limit is not None else 0, 1)
        svg = self._svg(title, _HEIGHT + _ROW)
        SubElement(svg, "rect", {"class": "frame", "width": str(_WIDTH), "height": str(_HEIGHT)})
        for number, curve in enumerate(curves, 1):
            values = thinned(curve.values)
            step = _WIDTH / len(values)
            # A level holds from one point to the next, so each is a flat stretch and not a corner.
            points = [
                f"{_number(x * step)},{_number(_HEIGHT * (1 - value / most))}"
                for i, value in enumerate(values)
                for x in (i, i + 1)
            ]
            SubElement(svg, "polyline", {"class": f"line-{number}", "points": " ".join(points)})
            self._legend(svg, number, f"line-{number}", curve.label)
        if limit is not None:
            y = _number(_HEIGHT * (1 - limit[1] / most))
            SubElement(svg, "line", {"class": "limit", "x1": "0", "x2": str(_WIDTH), "y1": y, "y2": y})
            self._legend(svg, 0, "limit", limit[0])

    def scatter(
        self,
        title: str,
        clouds: Sequence[Cloud],
        *,
        across: Axis,
        up: Axis,
        below: str,
        limit: tuple[str, float] | None = None,
    ) -> None:
        """Points between two axes, the later clouds over the earlier ones, and a dashed line across at `limit`."""
        entries = [(cloud.label, cloud) for cloud in clouds] + ([(limit[0], None)] if limit is not None else [])
        bottom = _TOP + _HEIGHT
        svg = self._svg(title, bottom + (2 - (-len(entries) // _ENTRIES)) * _ROW)

        def x(value: float) -> float:
            return _LEFT + across.share(value) * (_WIDTH - _LEFT - 1)

        def y(value: float) -> float:
            return bottom - up.share(value) * _HEIGHT

        for value in up.ticks():
            SubElement(svg, "line", {"class": "grid", **_ends(_LEFT, _WIDTH - 1, y(value))})
            _add(svg, "text", up.shown(value), x=str(_LEFT - 8), y=_number(y(value) + 4), **{"text-anchor": "end"})
        for value in across.ticks():
            _add(svg, "text", across.shown(value), x=_number(x(value)), y=str(bottom + 18), **{"text-anchor": "middle"})
        frame = {"x": str(_LEFT), "y": str(_TOP), "width": str(_WIDTH - _LEFT - 1), "height": str(_HEIGHT)}
        SubElement(svg, "rect", {"class": "frame", **frame})
        middle = (_LEFT + _WIDTH) // 2
        _add(svg, "text", below, x=str(middle), y=str(bottom + 40), **{"text-anchor": "middle"})
        for cloud in clouds:
            # One path and each place once: thousands of steps fall on a few hundred.
            places = dict.fromkeys((_number(x(a)), _number(y(b))) for a, b in cloud.points)
            drawn = "".join(_MARKS[cloud.mark].format(x=a, y=b) for a, b in places)
            SubElement(svg, "path", {"class": f"{cloud.mark} {cloud.colour}", "d": drawn})
        if limit is not None:
            SubElement(svg, "line", {"class": "limit", **_ends(_LEFT, _WIDTH - 1, y(limit[1]))})
        for place, (label, entry) in enumerate(entries):
            left = _LEFT + place % _ENTRIES * (_WIDTH - _LEFT) // _ENTRIES
            line = bottom + 64 + place // _ENTRIES * _ROW
            if entry is None:
                SubElement(svg, "line", {"class": "limit", **_ends(left, left + 20, line - 4)})
            else:
                sample = _MARKS[entry.mark].format(x=left + 10, y=line - 4)
                SubElement(svg, "path", {"class": f"{entry.mark} {entry.colour}", "d": sample})
            _add(svg, "text", label, x=str(left + 26), y=str(line))

    @staticmethod
    def _legend(svg: Element, place: int, kind: str, label: str) -> None:
        x, y = place * _WIDTH // 3, _HEIGHT + 16
        SubElement(svg, "line", {"class": kind, "x1": str(x), "x2": str(x + 24), "y1": str(y - 4), "y2": str(y - 4)})
        _add(svg, "text", label, x=str(x + 30), y=str(y))

    def _svg(self, title: str, height: int) -> Element:
        svg = SubElement(self._body, "svg", {"viewBox": f"0 0 {_WIDTH} {height}", "role": "img"})
        _add(svg, "title", title)
        return svg


def thinned(values: Sequence[int], *, most: int = MOST_POINTS) -> list[int]:
    """At most so many values, each the largest of its stretch: a peak one tick long must not get lost."""
    count = min(len(values), most)
    edges = [i * len(values) // count for i in range(count)] + [len(values)] if count else []
    return [max(values[a:b]) for a, b in pairwise(edges)]


def printable(text: str) -> str:
    """Text for a page or a terminal: neither takes control characters, halves of surrogate pairs or the like."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(text.split()))


def _add(parent: Element, tag: str, text: str, **attributes: str) -> None:
    SubElement(parent, tag, attributes).text = printable(text)


def _ends(left: float, right: float, y: float) -> dict[str, str]:
    return {"x1": _number(left), "x2": _number(right), "y1": _number(y), "y2": _number(y)}


def _number(value: float) -> str:
    return f"{value:.1f}"
