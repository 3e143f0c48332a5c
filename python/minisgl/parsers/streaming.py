"""Events that parsers emit, and the search for markers in text that comes in pieces.

The texts of one kind of event are to be joined in order; calls are numbered from 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: together JSON text as the model wrote it, so cut short where the model was."""

    index: int
    text: str


Event: TypeAlias = Content | Reasoning | CallStart | CallArguments

State: TypeAlias = Callable[[], bool]  # takes text from the front of the buffer; False: it needs more

_NOT_SPACE = re.compile(r"\S")


class StateParser:
    """Takes one answer apart by states, each of which chooses the next: text in, events out."""

    def __init__(self, state: State) -> None:
        self._buffer = ""  # not consumed yet
        self._state = state
        self._events: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        """Take more text; return the events that are certain with it."""
        self._buffer += text
        self._run()
        return self._take_events()

    def _run(self) -> None:
        while self._buffer and self._state():
            pass

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def find_first(text: str, markers: Iterable[str]) -> tuple[int, str] | None:
    """Find the first marker: its place in the text, and which it is."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, default=None)


def possible_start(text: str, markers: Iterable[str]) -> int:
    """Return the place of the text's longest end that may begin a marker; the text's length if there is none.

    "so <too" may go on with "l_call>": `possible_start("so <too", ("<tool_call>",))` is 3.
    """
    first = len(text)
    for marker in markers:
        at = max(len(text) - len(marker) + 1, 0)
        while 0 <= (at := text.find(marker[0], at)) < first:
            if marker.startswith(text[at:]):
                first = at
            at += 1
    return first


def end_of(pattern: re.Pattern[str], text: str, at: int = 0) -> int:
    """Return where a pattern that also matches nothing (`[a-z]*`) ends in the text if it begins at `at`."""
    found = pattern.match(text, at)
    return at if found is None else found.end()


def next_character(text: str, at: int = 0) -> tuple[str, int]:
    """Return the first character from `at` on that is not white space, and its place; "" at the end of the text."""
    found = _NOT_SPACE.search(text, at)
    return (found[0], found.start()) if found else ("", len(text))
