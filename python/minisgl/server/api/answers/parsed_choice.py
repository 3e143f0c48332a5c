"""One choice of a chat's answer, parsed into reasoning, content and calls; the writers of three APIs share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal, TypeAlias

from msgspec import UNSET, UnsetType

from minisgl.message.logprobs import PackedPositions, PositionLogprobs, unpack_positions
from minisgl.parsers.json_call import ValueEnd
from minisgl.parsers.parser_choice import AnswerParser
from minisgl.parsers.streaming import CallArguments, CallStart, Content, Event, Reasoning, next_character
from minisgl.server.api.answers.logprob_forms import ChatLogprobs, chat_logprobs
from minisgl.server.api.bodies.route_bodies import ChatBody
from minisgl.server.api.bodies.tools import ToolUse
from minisgl.server.api.requests.open_request import Delta

ChatFinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "function_call"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options of an answer's writer: the request's body, and values derived from it."""

    body: ChatBody
    model: str
    parser: Callable[[str], AnswerParser | None]  # makes a choice's parser from the end of the prompt
    use: ToolUse = field(default_factory=ToolUse)
    role: str = "assistant"
    echo: str = ""  # beginning of the content


class ParsedChoice:
    """One choice: its parser, and log-probabilities and ids that wait for the next chunk."""

    def __init__(self, options: ChatOptions, prompt_end: str) -> None:
        self._options = options
        self._parser = options.parser(prompt_end)
        self._num_calls = 0  # calls written so far
        self._arguments: ValueEnd | None = None  # of the last call, once there are any
        self.is_cut = False  # the events so far end within a call, as they may where a stop string or a limit ends them
        self._packed_logprobs: list[PackedPositions] = []
        self.token_ids: list[int] = []

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._parser is None else self._parser.reasoning_tokens

    def take(self, delta: Delta) -> list[Event]:
        """Return the events of a delta, neighbours of the same kind merged."""
        if self._options.body.logprobs:
            self._packed_logprobs += filter(None, delta.packed_logprobs)
        if self._options.body.return_token_ids:
            self.token_ids += delta.token_ids
        if self._parser is None:
            return [Content(text)] if (text := delta.text) else []
        events: list[Event] = []
        for text, num_tokens in delta.pieces:
            events += self._parser.feed(text, num_tokens)
        if delta.finish is not None:
            events += self._parser.finish()
        if len(events) > 1:
            events = _merged(events)
        wanted = [event for event in events if self._is_wanted(event)]
        for event in wanted:
            self._follow_calls(event)
        return wanted

    def _follow_calls(self, event: Event) -> None:
        match event:
            case CallStart():
                self._num_calls += 1
                self._arguments = None
                self.is_cut = True
            case CallArguments(_, text):
                if self._arguments is None:
                    self._arguments = ValueEnd(next_character(text)[0])
                self._arguments.feed(text, 0)
                self.is_cut = self._arguments.is_cut
            case _:
                self.is_cut = False

    @property
    def demands_calls(self) -> bool:
        """True if the client is to run calls of the answer, once it has ended."""
        return self._num_calls > 0 and not self.is_cut

    def _is_wanted(self, event: Event) -> bool:
        match event:
            case Reasoning():
                return self._options.body.include_reasoning
            case CallStart(index) | CallArguments(index):
                return index == 0 or self._options.use.parallel
            case _:
                return True

    def finish_reason(self, delta: Delta) -> ChatFinishReason | None:
        """Return OpenAI's finish reason: tool_calls after calls, unless one is cut or the client named the tool."""
        if delta.finish == "abort" or delta.finish == "error":
            raise ValueError("an aborted or failed answer is an error: it has no finish reason")
        if delta.finish == "stop" and self.demands_calls and not self._options.use.named:
            return "function_call" if self._options.body.functions else "tool_calls"
        return delta.finish

    def take_positions(self) -> Iterator[PositionLogprobs]:
        """Return the log-probabilities that wait for the next chunk, and wait for others."""
        packed, self._packed_logprobs = self._packed_logprobs, []
        return unpack_positions(packed)

    def take_logprobs(self) -> ChatLogprobs | None:
        """Return `take_positions` in the form of chats; None if there are none."""
        return chat_logprobs(self.take_positions()) if self._packed_logprobs else None

    def take_token_ids(self) -> list[int] | UnsetType:
        ids, self.token_ids = self.token_ids, []
        return ids or UNSET


def _merged(events: Iterable[Event]) -> list[Event]:
    """Return the events with the texts of neighbours of the same kind joined."""
    result: list[Event] = []
    for _, group in groupby(events, key=lambda event: (type(event), getattr(event, "index", None))):
        same = list(group)
        texts = [event.text for event in same if not isinstance(event, CallStart)]
        match same[0]:
            case CallStart():
                result += same
            case first:
                result.append(replace(first, text="".join(texts)))
    return result
