"""Events that parsers return, the base class of parsers, and searches for markers in text that comes in pieces.

The texts of events of one kind must be concatenated in order; calls are numbered from 0.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias


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
    """Part of a call's arguments. Together they are the JSON text that the model wrote, perhaps cut short."""

    index: int
    text: str


Event: TypeAlias = Content | Reasoning | CallStart | CallArguments

# State of a parser: it consumes the start of the parser's buffer; False: it needs more text. It is a function of the
# parser's class, because a bound method would refer to the parser: it would wait for the garbage collector.
State: TypeAlias = Callable[[Any], bool]

_NOT_SPACE = re.compile(r"\S")


class StateParser(ABC):
    """Parser of one answer as a state machine: the current state consumes text, adds events and sets the next state.

    White space that a state has held back waits for other text, so that states do not read it again with each token.
    """

    def __init__(self, state: State) -> None:
        self._buffer = ""  # not consumed yet
        self._spaces: list[str] = []  # white space after a buffer that is white space, too
        self._state = state
        self._events: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        """Add text; return the events that are certain now."""
        self._receive(text)
        return self._take_events()

    def finish(self) -> list[Event]:
        """Return the events of the text held back, at the end."""
        self._join_spaces()
        self._finish()
        return self._take_events()

    @abstractmethod
    def _finish(self) -> None:
        """Add the events of the text held back, at the end."""

    def _receive(self, text: str) -> None:
        """Add text to the buffer, and run the states if there is anything new for them."""
        if not text:
            return
        if text.isspace() and (self._spaces or self._buffer.isspace()):
            self._spaces.append(text)
            return
        self._join_spaces()
        self._buffer += text
        self._run()

    def _join_spaces(self) -> None:
        if self._spaces:
            self._buffer += "".join(self._spaces)
            self._spaces.clear()

    def _run(self) -> None:
        while self._buffer and self._state(self):
            pass

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def find_first(text: str, markers: Iterable[str]) -> tuple[int, str] | None:
    """Return the position of the first marker in the text, and the marker; None if there is none."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, default=None)


def possible_start(text: str, markers: Iterable[str]) -> int:
    """Return where the longest end of the text that may begin a marker starts; the text's length if there is none.

    "so <too" may continue with "l_call>": `possible_start("so <too", ("<tool_call>",))` is 3.
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
    """Return the end of a pattern's match at `at`; the pattern also matches "" (such as `[a-z]*`)."""
    found = pattern.match(text, at)
    return at if found is None else found.end()


def next_character(text: str, at: int = 0) -> tuple[str, int]:
    """Return the first character from `at` on that is not white space, and its position; "" if there is none."""
    found = _NOT_SPACE.search(text, at)
    return (found[0], found.start()) if found else ("", len(text))
