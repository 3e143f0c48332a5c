"""Tool calls that models write as JSON: Hermes' form, Llama 3's and Mistral's.

- Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
- Llama 3.x: the whole answer is `{"name": ..., "parameters": {...}}`. Only the name of a declared tool distinguishes a
  call from an answer that is JSON. `<|python_tag|>` may come before it, and models that call several tools write one
  after another, separated by semicolons.
- Mistral, after the token `[TOOL_CALLS]`: older models write a list, `[{"name": ..., "arguments": {...}}, ...]`; newer
  ones `name[ARGS]{...}`, with a `[TOOL_CALLS]` for each call, and some with `[CALL_ID]...` before the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from minisgl.parsers.json_call import ValueEnd
from minisgl.parsers.streaming import end_of, next_character
from minisgl.parsers.tool_calls import MAX_NAME, ToolCallParser, Tools

_NAME = re.compile(r"[^\s\[\]{}\"]*")
_ID = re.compile(r"\w*")
_BEFORE_ARGUMENTS = ("{", "[ARGS]", "[CALL_ID]")


class HermesParser(ToolCallParser):
    """Reads calls that have tags of their own, with or without text between them."""

    markers = ("<tool_call>",)
    kept = ("<tool_call>", "</tool_call>")
    shown_by = ("<tool_call>",)
    contradicted_by = ("<arg_key>", "<tool_calls>", "<tool_sep>")

    def _begin(self) -> None:
        self._begin_json(type(self)._closing)

    def _closing(self) -> bool:
        return self._expect("</tool_call>", type(self)._content)


class LlamaJsonParser(ToolCallParser):
    """Reads a call at the beginning of the answer, after the tag, or after another call."""

    markers = ("<|python_tag|>",)
    kept = markers
    shown_by = ('{"name": function name, "parameters":',)

    def __init__(self, tools: Tools, new_id: Callable[[], str]) -> None:
        super().__init__(tools, new_id)
        self._state = type(self)._at_call

    def _begin(self) -> None:
        self._begin_json(type(self)._separator, declared=True)

    def _at_call(self) -> bool:
        character, at = next_character(self._buffer)
        if character == "{":
            self._take_head(at)
            self._begin()
        elif character:
            self._state = type(self)._content
        return bool(character)

    def _separator(self) -> bool:
        character, at = next_character(self._buffer)
        if character == ";":
            self._take_head(at + 1)
            self._begin()
        elif character:
            self._state = type(self)._at_call
        return bool(character)


class MistralParser(ToolCallParser):
    """Reads both of Mistral's forms."""

    markers = ("[TOOL_CALLS]",)
    kept = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    shown_by = ("[TOOL_CALLS]",)

    def __init__(self, tools: Tools, new_id: Callable[[], str]) -> None:
        super().__init__(tools, new_id)
        self._name = ""
        self._value = ValueEnd("{")

    def _begin(self) -> None:
        self._state = type(self)._form

    def _form(self) -> bool:
        character, at = next_character(self._buffer)
        if character == "[":
            self._take_head(at + 1)
            self._begin_json(type(self)._after_item)
        elif character == "{":
            self._begin_json(type(self)._content)
        elif character:
            self._take_head(at)
            self._state = type(self)._in_name
        return bool(character)

    def _after_item(self) -> bool:
        character, at = next_character(self._buffer)
        if character == ",":
            self._take_head(at + 1)
            self._begin_json(type(self)._after_item)
        elif character:
            if character == "]":
                self._buffer = self._buffer[at + 1 :]
            self._state = type(self)._content
        return bool(character)

    def _in_name(self) -> bool:
        end = end_of(_NAME, self._buffer)
        if end == len(self._buffer) and end <= MAX_NAME:
            return False
        self._name = self._buffer[:end]
        self._take_head(end)
        if 0 < len(self._name) <= MAX_NAME:
            self._state = type(self)._before_arguments
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
            self._value = ValueEnd(mark)
            self._state = type(self)._arguments
        else:
            self._take_head(len(self._buffer) - len(stripped) + len(mark))
            if mark == "[CALL_ID]":
                self._state = type(self)._call_id
        return True

    def _call_id(self) -> bool:
        end = end_of(_ID, self._buffer)
        more = end < len(self._buffer)
        self._take_head(end)
        if more:
            self._state = type(self)._before_arguments
        return more

    def _arguments(self) -> bool:
        end = self._value.feed(self._buffer, 0)
        self._add(self._buffer[:end])
        self._buffer = self._buffer[end:]
        if not self._value.ended:
            return False
        self._end(type(self)._content)
        return True
