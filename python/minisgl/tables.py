"""Tables and colours of command output, for terminals and pipes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Literal

Color = Literal["red", "green", "yellow"]
_CODES: dict[Color, int] = {"red": 31, "green": 32, "yellow": 33}


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> list[str]:
    """Align columns, the first `left` of them to the left; return the header, a rule, and a line for each row."""
    cells = [header, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "  ".join([*map(str.ljust, row[:left], widths), *map(str.rjust, row[left:], widths[left:])]).rstrip()
        for row in cells
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def colored(text: str, color: Color) -> str:
    """Return the text in this color if stdout is a terminal that shows colors, or else as it is."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_CODES[color]}m{text}\x1b[0m"
