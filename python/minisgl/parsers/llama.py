"""Tool calls of Llama 3.x as JSON: the whole answer is `{"name": ..., "parameters": {...}}`.

Nothing but the name of a declared tool tells a call from an answer that is JSON. `<|python_tag|>` may come before it,
and models that call several tools write them one after the other, with semicolons between them.
"""

from __future__ import annotations

from collections.abc import Callable

from minisgl.parsers.markers import next_character
from minisgl.parsers.tool_calls import ToolCallParser, Tools


class LlamaJsonParser(ToolCallParser):
    """A call is at the beginning of the answer, after the tag, or after another call."""

    markers = ("<|python_tag|>",)
    kept = markers

    def __init__(self, tools: Tools, new_id: Callable[[], str]) -> None:
        super().__init__(tools, new_id)
        self._state = self._at_call

    def _begin(self) -> None:
        self._begin_json(self._separator, declared=True)

    def _at_call(self) -> bool:
        character, at = next_character(self._buffer)
        if not character:
            return False
        if character == "{":
            self._take_head(at)
            self._begin()
        else:
            self._state = self._content
        return True

    def _separator(self) -> bool:
        character, at = next_character(self._buffer)
        if not character:
            return False
        if character == ";":
            self._take_head(at + 1)
            self._begin()
        else:
            self._state = self._at_call
        return True
