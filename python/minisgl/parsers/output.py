"""A whole answer: the thought first, then content and tool calls; and which of its tokens were the thought's."""

from __future__ import annotations

from collections.abc import Iterable

from minisgl.parsers.events import Content, Event
from minisgl.parsers.reasoning import Place, ReasoningParser
from minisgl.parsers.tool_calls import ToolCallParser


class OutputParser:
    """One answer. Without a parser for it, a part is content like all the rest."""

    def __init__(self, reasoning: ReasoningParser | None, tool_calls: ToolCallParser | None) -> None:
        self._reasoning = reasoning
        self._tool_calls = tool_calls
        self._undecided_tokens = 0
        self.reasoning_tokens = 0  # so far, markers included

    def feed(self, text: str, num_tokens: int = 0) -> list[Event]:
        """The text that these tokens brought."""
        if self._reasoning is None:
            return self._content(text)
        before = self._reasoning.position
        events = self._reasoning.feed(text)
        after = self._reasoning.position
        if Place.INSIDE in (before, after):
            self.reasoning_tokens += num_tokens + self._undecided_tokens
            self._undecided_tokens = 0
        elif after is Place.UNDECIDED:
            self._undecided_tokens += num_tokens
        return self._parse_content(events)

    def finish(self) -> list[Event]:
        """Return the events of what was held back, when no text follows."""
        events = [] if self._reasoning is None else self._parse_content(self._reasoning.finish())
        return events if self._tool_calls is None else events + self._tool_calls.finish()

    def _parse_content(self, events: Iterable[Event]) -> list[Event]:
        parsed: list[Event] = []
        for event in events:
            parsed += self._content(event.text) if isinstance(event, Content) else (event,)
        return parsed

    def _content(self, text: str) -> list[Event]:
        if self._tool_calls is not None:
            return self._tool_calls.feed(text)
        return [Content(text)] if text else []
