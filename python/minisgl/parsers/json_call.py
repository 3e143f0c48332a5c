"""Reads a tool call in the form of a JSON object, while it is being generated.

Models make mistakes in JSON, and a client should see what they wrote. So values are only scanned for their end (strings
and brackets), not validated; the object around them must be valid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from minisgl.parsers.streaming import end_of, next_character

ARGUMENT_KEYS = ("arguments", "parameters")

_NO_ARGUMENTS = "{}"
_IN_STRING = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}  # ordinary characters of a string
_BETWEEN = re.compile(r'[^"{}\[\]]*')  # characters outside of strings that do not nest
_SCALAR = re.compile(r"[^\s,{}\[\]\":]*")


class ValueEnd:
    """Finds the end of one value, whose first character is known.

    The value is JSON, or of a language with strings and brackets like JSON's: `between` matches the characters outside
    of strings that do not nest.
    """

    def __init__(self, first: str, between: re.Pattern[str] = _BETWEEN) -> None:
        self._is_scalar = first not in '"{[('
        self._between = between
        self._depth = 0
        self._quote = ""  # quotation mark of the current string, if in one
        self._escaped = False
        self.code_chars = 0  # characters outside of strings so far
        self.ended = False

    @property
    def is_cut(self) -> bool:
        """True if the value is incomplete as it is. A scalar is complete, although it may go on."""
        return not self.ended and not self._is_scalar

    def feed(self, text: str, at: int) -> int:
        """Scan the text from `at`; return the position up to which it belongs to the value. See `ended`."""
        if self._is_scalar:
            end = end_of(_SCALAR, text, at)
            self.ended = end < len(text)
            return end
        while at < len(text) and not self.ended:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = (_IN_STRING[self._quote] if self._quote else self._between).match(text, at)
            assert match is not None  # for mypy: both match nothing, too
            if not self._quote:
                self.code_chars += min(match.end() + 1, len(text)) - at
            at = match.end()
            if at < len(text):
                self._take(text[at])
                at += 1
        return at

    def _take(self, character: str) -> None:
        """Handle a quotation mark, a bracket, or a string's backslash."""
        if character == "\\":
            self._escaped = True
        elif character in _IN_STRING:
            self._quote = "" if self._quote else character
        else:
            self._depth += 1 if character in "{[(" else -1
        self.ended = self._depth <= 0 and not self._quote


class JsonCall:
    """Reads one call: `{"name": ..., "arguments": {...}}`, with its members in any order and possibly others.

    With `names`, an object with another name is no call. The call has `started` with the first character of its
    arguments if its name is known by then; from there on it cannot become content any more.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self._names = names
        self.name: str | None = None
        self.started = False
        self.done = False  # the object is complete
        self.failed = False  # it is not a call, or the rest is not part of one
        self._key = ""
        self._raw: list[str] = []  # text of the current key or value, unless it is streamed
        self._value = ValueEnd('"')
        self._arguments: list[str] = []  # text of the arguments that has not been taken yet
        self._has_arguments = False
        self._state: Callable[[JsonCall, str, int], int] = JsonCall._open

    def feed(self, text: str) -> int:
        """Add text; return how much of it belongs to the object: all, until the call is done or has failed."""
        at = 0
        while at < len(text) and not self.done and not self.failed:
            at = self._state(self, text, at)
        self.started = self.name is not None and (self._has_arguments or self.done)
        return at

    def take_arguments(self) -> str:
        """Return the text of the arguments since the last call; "" before the call has started."""
        if not self.started:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    # The states. Each consumes text from `at` and returns the new position; one that fails does not consume.

    def _open(self, text: str, at: int) -> int:
        character, at = next_character(text, at)
        if character == "{":
            self._state = JsonCall._member
            return at + 1
        return self._fail_unless(not character, at)

    def _member(self, text: str, at: int) -> int:
        character, at = next_character(text, at)
        if character == '"':
            self._value = ValueEnd(character)
            self._raw.clear()
            self._state = JsonCall._in_key
            return at
        if character == "}":
            return self._close(at)
        return self._fail_unless(not character, at)

    def _in_key(self, text: str, at: int) -> int:
        end = self._collect(text, at)
        if self._value.ended:
            key = _decoded("".join(self._raw))
            self._key = key if isinstance(key, str) else ""
            self._state = JsonCall._colon
        return end

    def _colon(self, text: str, at: int) -> int:
        character, at = next_character(text, at)
        if character == ":":
            self._state = JsonCall._begin_value
            return at + 1
        return self._fail_unless(not character, at)

    def _begin_value(self, text: str, at: int) -> int:
        character, at = next_character(text, at)
        if not character or character in ",}]:":
            return self._fail_unless(not character, at)
        self._value = ValueEnd(character)
        self._raw.clear()
        if self._key in ARGUMENT_KEYS and character in "{[" and not self._has_arguments:
            self._has_arguments = True
            self._state = JsonCall._in_arguments
        else:
            self._state = JsonCall._in_value
        return at

    def _in_arguments(self, text: str, at: int) -> int:
        end = self._value.feed(text, at)
        self._arguments.append(text[at:end])
        if self._value.ended:
            self._state = JsonCall._after_value
        return end

    def _in_value(self, text: str, at: int) -> int:
        end = self._collect(text, at)
        if self._value.ended:
            self._take_value("".join(self._raw))
            self._state = JsonCall._after_value
        return end

    def _take_value(self, raw: str) -> None:
        if self._key == "name" and self.name is None:
            name = _decoded(raw)
            if isinstance(name, str) and name and (self._names is None or name in self._names):
                self.name = name
            else:
                self.failed = True
            return
        if self._key in ARGUMENT_KEYS and not self._has_arguments:
            # Not an object: some models write the arguments as a string, as OpenAI's API does, or null for none.
            value = _decoded(raw)
            text = value if isinstance(value, str) else raw
            self._arguments.append(_NO_ARGUMENTS if value is None or not text.strip() else text)
            self._has_arguments = True

    def _after_value(self, text: str, at: int) -> int:
        character, at = next_character(text, at)
        if character == ",":
            self._state = JsonCall._member
            return at + 1
        if character == "}":
            return self._close(at)
        return self._fail_unless(not character, at)

    def _collect(self, text: str, at: int) -> int:
        end = self._value.feed(text, at)
        self._raw.append(text[at:end])
        return end

    def _close(self, at: int) -> int:
        if self.name is None:
            return self._fail_unless(False, at)
        if not self._has_arguments:
            self._arguments.append(_NO_ARGUMENTS)
        self.done = True
        return at + 1

    def _fail_unless(self, fine: bool, at: int) -> int:
        self.failed = not fine
        return at


_BROKEN = object()


def _decoded(raw: str) -> object:
    try:
        return json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return _BROKEN
