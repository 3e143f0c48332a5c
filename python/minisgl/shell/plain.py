"""For pipes and scripts: one question a line (a backslash at its end continues it), the answers' text out.

Only the answers go to stdout; notes and errors go to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

CONTINUES = "\\"


class PlainView:
    """Implements view.View on stdin, stdout and stderr."""

    interactive = False

    def ask(self) -> str:
        lines: list[str] = []
        while line := sys.stdin.readline():
            line = line.rstrip("\r\n")
            if not line.endswith(CONTINUES):
                return "\n".join([*lines, line])
            lines.append(line.removesuffix(CONTINUES))
        if lines:
            return "\n".join(lines)
        raise EOFError

    @contextmanager
    def answer(self) -> Iterator[PlainView]:
        try:
            yield self
        finally:
            print(flush=True)

    def add(self, text: str) -> None:
        print(text, end="", flush=True)

    def think(self, text: str) -> None:
        """Thoughts are not the answer."""

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def error(self, text: str) -> None:
        print(f"error: {text}", file=sys.stderr, flush=True)
