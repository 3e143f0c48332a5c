"""Tool calls of Qwen3-Coder, in tags:

    <tool_call>
    <function=name>
    <parameter=key>
    value, as many lines as it has
    </parameter>
    </function>
    </tool_call>

Values are plain text, whose meaning the tool's schema determines. A value that can only be a string is streamed; any
other is sent when it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from minisgl.parsers.plain_values import ALL_TYPES, Allowance, typed, types_of
from minisgl.parsers.streaming import State, find_first, possible_start
from minisgl.parsers.tool_calls import ToolCallParser, Tools
from minisgl.sampling_params import InvalidRequest

MAX_TAG = 1024  # characters

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_CALL_END = "</tool_call>"
_VALUE_ENDS = (f"\n{_PARAMETER_END}", _PARAMETER_END)


class QwenCoderParser(ToolCallParser):
    """Reads calls in tags. The outer tags may be missing, because models forget them."""

    markers = ("<tool_call>", _FUNCTION)
    kept = ("<tool_call>", _CALL_END)
    shown_by = ("<tool_call>", _FUNCTION)

    def __init__(self, tools: Tools, new_id: Callable[[], str]) -> None:
        super().__init__(tools, new_id)
        self._function = ""
        self._key = ""
        self._num_parameters = 0
        self._value: list[str] = []  # text of a value that is not streamed
        self._types: dict[tuple[str, str], frozenset[str]] = {}  # by function and parameter

    def _begin(self) -> None:
        if self._head[-1].endswith(_FUNCTION):
            if shown := self._head.pop().removesuffix(_FUNCTION):
                self._head.append(shown)
            self._buffer = _FUNCTION + self._buffer
        self._state = type(self)._in_function_tag

    def _in_function_tag(self) -> bool:
        name = self._tag(_FUNCTION)
        if name is None:
            return False
        if not name:
            # The tag must not be found as a marker again, which would repeat without end.
            self._take_head(len(self._buffer) - len(self._buffer.lstrip().removeprefix(_FUNCTION)))
            self._reject()
            return True
        self._function = name
        self._num_parameters = 0
        self._start(name)
        self._state = type(self)._between
        return True

    def _tag(self, opening: str) -> str | None:
        """Consume `<opening=value>` and return the value; None while it may still come, "" if it does not come."""
        stripped = self._buffer.lstrip()
        if opening.startswith(stripped):
            return None
        if not stripped.startswith(opening):
            return ""
        value, end, rest = stripped.removeprefix(opening).partition(">")
        if len(value) > MAX_TAG or "<" in value or "\n" in value:
            return ""
        if not end:
            return None
        if name := value.strip():
            self._buffer = rest
        return name

    def _between(self) -> bool:
        """Find the tag after a parameter: another parameter's, or the end of the function or the call."""
        stripped = self._buffer.lstrip()
        tags = (_PARAMETER, _FUNCTION_END, _CALL_END)
        tag = next((tag for tag in tags if stripped.startswith(tag)), None)
        if tag is None:
            if any(tag.startswith(stripped) for tag in tags):
                return False
            self._end_call(type(self)._content)
        elif tag == _PARAMETER:
            self._state = type(self)._in_parameter_tag
        elif tag == _FUNCTION_END:
            self._buffer = stripped[len(tag) :]
            self._end_call(type(self)._closing)
        else:
            self._end_call(type(self)._closing)
        return True

    def _closing(self) -> bool:
        return self._expect(_CALL_END, type(self)._content)

    def _end_call(self, then: State) -> None:
        self._add("}" if self._num_parameters else "{}")
        self._end(then)

    def _in_parameter_tag(self) -> bool:
        key = self._tag(_PARAMETER)
        if key is None:
            return False
        if not key:
            self._end_call(type(self)._content)
            return True
        self._key = key
        self._add(f"{', ' if self._num_parameters else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._num_parameters += 1
        self._state = type(self)._value_start
        return True

    def _value_start(self) -> bool:
        self._buffer = self._buffer.removeprefix("\n")
        if self._value_types() == {"string"}:
            self._add('"')
            self._state = type(self)._string
        else:
            self._value.clear()
            self._state = type(self)._typed_value
        return True

    def _string(self) -> bool:
        text, ended = self._until_end()
        self._add(json.dumps(text, ensure_ascii=False)[1:-1])
        if ended:
            self._add('"')
            self._state = type(self)._between
        return ended

    def _typed_value(self) -> bool:
        text, ended = self._until_end()
        self._value.append(text)
        if ended:
            self._add(typed("".join(self._value), self._value_types()))
            self._state = type(self)._between
        return ended

    def _until_end(self) -> tuple[str, bool]:
        found = find_first(self._buffer, _VALUE_ENDS)
        end = possible_start(self._buffer, _VALUE_ENDS) if found is None else found[0]
        text = self._buffer[:end]
        self._buffer = self._buffer[end + (len(found[1]) if found else 0) :]
        return text, found is not None

    def _value_types(self) -> frozenset[str]:
        """Return the types that the parameter may have: all, if its schema exceeds the allowance."""
        place = self._function, self._key
        if place not in self._types:
            root = self._tools.get(self._function, {})
            properties = root.get("properties")
            schema = properties.get(self._key) if isinstance(properties, Mapping) else None
            try:
                self._types[place] = types_of(schema, root, Allowance())
            except InvalidRequest:
                self._types[place] = ALL_TYPES
        return self._types[place]

    def _finish(self) -> None:
        if self._state in (type(self)._between, type(self)._in_parameter_tag):
            self._end_call(type(self)._content)
        elif self._state == type(self)._string:
            self._add(json.dumps(self._buffer, ensure_ascii=False)[1:-1])
            self._buffer = ""
        elif self._state == type(self)._typed_value:
            self._add("".join(self._value) + self._buffer)
            self._buffer = ""
        super()._finish()
