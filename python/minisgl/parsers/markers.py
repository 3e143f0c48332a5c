"""Looking for markers, and past white space, in text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SPACE = re.compile(r"\s*")


def find_first(text: str, markers: Iterable[str]) -> tuple[int, str] | None:
    """Find the first marker: its place in the text, and which it is."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, default=None)


def possible_start(text: str, markers: Iterable[str]) -> int:
    """Find the text's longest end that is the beginning of a marker: its place; the text's length if there is none."""
    first = len(text)
    for marker in markers:
        at = max(len(text) - len(marker) + 1, 0)
        while 0 <= (at := text.find(marker[0], at)) < first:
            if marker.startswith(text[at:]):
                first = at
            at += 1
    return first


def next_character(text: str, at: int = 0) -> tuple[str, int]:
    """The first character from `at` on that is not white space, and where it is; "" at the end."""
    match = _SPACE.match(text, at)
    assert match is not None
    at = match.end()
    return text[at : at + 1], at
