"""Lines of cells as text for a terminal and as Markdown: columns of words to the left, figures to the right."""

from __future__ import annotations

from collections.abc import Sequence

Line = Sequence[str]


def text(head: Line, lines: Sequence[Line], *, words: Sequence[int] = (0,)) -> str:
    every = [head, *lines]
    widths = [max(len(line[column]) for line in every) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in every
    )


def markdown(head: Line, lines: Sequence[Line], *, words: Sequence[int] = (0,)) -> str:
    rule = ["---" if column in words else "---:" for column in range(len(head))]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in (head, rule, *lines)
    )
