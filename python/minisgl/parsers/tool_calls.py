"""Base class of tool call parsers: handles the text around calls, and text that looked like a call and is none.

White space next to a call is removed with it: models write a line break there that is not part of the content.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from minisgl.parsers.json_call import JsonCall
from minisgl.parsers.streaming import (
    CallArguments,
    CallStart,
    Content,
    State,
    StateParser,
    find_first,
    possible_start,
)

MAX_NAME = 256  # characters of a tool's name
MAX_REREAD = 131_072  # characters of an answer that are parsed again for calls, in all supposed calls that are none

Tools = Mapping[str, Mapping[str, Any]]  # JSON schema of the parameters, by the tool's name


class ToolCallParser(StateParser):
    """Parses one answer. `new_id` returns an id for each call; `tools` are those that the client declared."""

    markers: ClassVar[tuple[str, ...]]  # a call begins with one of these
    kept: ClassVar[tuple[str, ...]]  # texts that the detokenizer must keep, even if they are special tokens
    shown_by: ClassVar[tuple[str, ...]] = ()  # texts that all must be in the chat template; (): chosen by flag only
    contradicted_by: ClassVar[tuple[str, ...]] = ()  # texts of other forms that look like this one

    def __init__(self, tools: Tools, new_id: Callable[[], str]) -> None:
        super().__init__(type(self)._content)
        self._tools = tools
        self._new_id = new_id
        self._num_calls = 0
        self._head: list[str] = []  # text before the call itself, which is content if it turns out to be no call
        # Text of the call itself; if it turns out to be no call, it is parsed again for calls, up to MAX_REREAD.
        self._raw: list[str] = []
        self._num_reread = 0
        self._after_call = False  # only white space came since the last call
        self._json = JsonCall()
        self._after_json: State = type(self)._content

    def _finish(self) -> None:
        while self._head or self._raw:
            self._reject()
            self._run()
        if not self._after_call or not self._buffer.isspace():
            self._say(self._buffer)
        self._buffer = ""

    @abstractmethod
    def _begin(self) -> None:
        """Set the state for the text after a marker."""

    def _content(self) -> bool:
        """Emit text between calls, up to a marker or text that may become one."""
        found = find_first(self._buffer, self.markers)
        end = possible_start(self._buffer, self.markers) if found is None else found[0]
        shown = self._buffer[:end].rstrip()
        self._say(shown)
        if found is None:
            self._buffer = self._buffer[len(shown) :]
            return False
        _, marker = found
        self._take_head(end + len(marker), len(shown))
        self._begin()
        return True

    def _take_head(self, end: int, start: int = 0) -> None:
        """Consume the buffer up to `end`; its part from `start` on becomes content if no call follows."""
        if start < end:
            self._head.append(self._buffer[start:end])
        self._buffer = self._buffer[end:]

    def _say(self, text: str) -> None:
        if text:
            self._after_call = False
            if self._events and isinstance(last := self._events[-1], Content):
                text = last.text + text
                self._events.pop()
            self._events.append(Content(text))

    def _reject(self) -> None:
        """Return to the content: emit the head, and parse the text of the supposed call again.

        Calls may begin within calls that are none, so the whole text could be parsed again as often as it has markers.
        """
        head, raw = "".join(self._head), "".join(self._raw)
        self._head.clear()
        self._raw.clear()
        self._num_reread += len(raw)
        if self._num_reread > MAX_REREAD:
            head, raw = head + raw, ""
        self._say(head)
        self._buffer = raw + self._buffer
        self._state = type(self)._content

    def _start(self, name: str) -> None:
        self._head.clear()
        self._raw.clear()
        self._events.append(CallStart(self._num_calls, self._new_id(), name))
        self._num_calls += 1

    def _add(self, arguments: str) -> None:
        """Add text to the arguments of the last call."""
        if arguments:
            self._events.append(CallArguments(self._num_calls - 1, arguments))

    def _end(self, then: State) -> None:
        self._after_call = True
        self._state = then

    def _begin_json(self, then: State, *, declared: bool = False) -> None:
        """Read a call as a JSON object, then continue with `then`. `declared`: only declared tools make it a call."""
        self._json = JsonCall(self._tools.keys() if declared else None)
        self._after_json = then
        self._state = type(self)._in_json

    def _in_json(self) -> bool:
        call = self._json
        started = call.started
        taken = call.feed(self._buffer)
        if call.started and not started:
            assert call.name is not None
            self._start(call.name)
        elif not call.started and taken:
            self._raw.append(self._buffer[:taken])
        self._buffer = self._buffer[taken:]
        self._add(call.take_arguments())
        if not call.done and not call.failed:
            return False
        if call.started:
            self._end(self._after_json)
        else:
            self._reject()
        return True

    def _expect(self, text: str, then: State) -> bool:
        """Skip white space and this text, if it is there, and continue with `then` in any case."""
        stripped = self._buffer.lstrip()
        if text.startswith(stripped) and stripped != text:
            return False
        if stripped.startswith(text):
            self._buffer = stripped[len(text) :]
        self._state = then
        return True
