"""Tool calls of Mistral's models, after the token `[TOOL_CALLS]`.

Older ones write a list, `[{"name": ..., "arguments": {...}}, ...]`; newer ones `name[ARGS]{...}`, with a `[TOOL_CALLS]`
for each call, and some with `[CALL_ID]...` before the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from minisgl.parsers.json_call import JsonValue
from minisgl.parsers.markers import next_character
from minisgl.parsers.tool_calls import ToolCallParser, Tools

MAX_NAME = 256  # characters

_NAME = re.compile(r"[^\s\[\]{}\"]*")
_ID = re.compile(r"\w*")
_BEFORE_ARGUMENTS = ("{", "[ARGS]", "[CALL_ID]")


class MistralParser(ToolCallParser):
    """Both forms, whichever the model writes."""

    markers = ("[TOOL_CALLS]",)
    kept = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def __init__(self, tools: Tools, new_id: Callable[[], str]) -> None:
        super().__init__(tools, new_id)
        self._name = ""
        self._value = JsonValue("{")

    def _begin(self) -> None:
        self._state = self._form

    def _form(self) -> bool:
        character, at = next_character(self._buffer)
        if not character:
            return False
        if character == "[":
            self._take_head(at + 1)
            self._begin_json(self._after_item)
        elif character == "{":
            self._begin_json(self._content)
        else:
            self._take_head(at)
            self._state = self._in_name
        return True

    def _after_item(self) -> bool:
        character, at = next_character(self._buffer)
        if not character:
            return False
        if character == ",":
            self._take_head(at + 1)
            self._begin_json(self._after_item)
            return True
        if character == "]":
            self._buffer = self._buffer[at + 1 :]
        self._state = self._content
        return True

    def _in_name(self) -> bool:
        match = _NAME.match(self._buffer)
        assert match is not None
        if match.end() == len(self._buffer) and match.end() <= MAX_NAME:
            return False
        self._name = match[0]
        self._take_head(match.end())
        if 0 < len(self._name) <= MAX_NAME:
            self._state = self._before_arguments
        else:
            self._reject()
        return True

    def _before_arguments(self) -> bool:
        stripped = self._buffer.lstrip()
        mark = next((mark for mark in _BEFORE_ARGUMENTS if stripped.startswith(mark)), None)
        if mark is None:
            if any(mark.startswith(stripped) for mark in _BEFORE_ARGUMENTS):
                return False
            self._reject()
        elif mark == "{":
            self._buffer = stripped
            self._start(self._name)
            self._value = JsonValue(mark)
            self._state = self._arguments
        else:
            self._take_head(len(self._buffer) - len(stripped) + len(mark))
            if mark == "[CALL_ID]":
                self._state = self._call_id
        return True

    def _call_id(self) -> bool:
        match = _ID.match(self._buffer)
        assert match is not None
        more = match.end() < len(self._buffer)
        self._take_head(match.end())
        if more:
            self._state = self._before_arguments
        return more

    def _arguments(self) -> bool:
        end = self._value.feed(self._buffer, 0)
        self._add(self._buffer[:end])
        self._buffer = self._buffer[end:]
        if not self._value.ended:
            return False
        self._end(self._content)
        return True
