"""Writes the engine's output as Anthropic's message, or as the events of its stream."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec.json import encode
from pydantic_core import from_json

from minisgl.parsers.streaming import CallArguments, CallStart, Content, Event, Reasoning
from minisgl.server.api.answers.answer import Usage, Writer, named_event
from minisgl.server.api.answers.parsed_choice import ChatOptions, ParsedChoice
from minisgl.server.api.http.errors import ApiError
from minisgl.server.api.requests.open_request import Delta, OpenRequest

SIGNATURE = "minisgl"  # signature of all reasoning: clients send it back, and it is not checked

StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class ThinkingTokens(msgspec.Struct, frozen=True):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True):
    """Counts of tokens. The three input counts add up to the prompt's tokens."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    output_tokens_details: ThinkingTokens = ThinkingTokens(0)


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


ContentBlock: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock


class AnthropicMessage(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    model: str
    content: list[ContentBlock]
    usage: MessageUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    message: AnthropicMessage


class Ping(msgspec.Struct, frozen=True, tag_field="type", tag="ping"):
    pass


class BlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: ContentBlock


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


BlockDelta: TypeAlias = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockDeltaEvent(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: BlockDelta


class BlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnd(msgspec.Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag_field="type", tag="message_delta"):
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    pass


StreamEvent: TypeAlias = MessageStart | Ping | BlockStart | BlockDeltaEvent | BlockStop | MessageDelta | MessageStop


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


class MessagesWriter(Writer):
    """Writes one message."""

    stream_end: ClassVar[bytes] = b""

    def __init__(self, options: ChatOptions, request_id: str, max_seq_len: int) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._options = options
        self._request_id = request_id
        self._max_seq_len = max_seq_len

    def begin(self, request: OpenRequest) -> None:
        super().begin(request)
        self._choice = ParsedChoice(self._options, request.prompts[0].prompt_end)
        self._blocks = BlockEvents()

    # A stream.

    def first_events(self) -> bytes:
        usage = MessageUsage(self._request.prompt_tokens, 0)  # the number of cached tokens is known at the end
        message = AnthropicMessage(self.id, self._options.model, [], usage)
        return named_event(MessageStart(message)) + named_event(Ping())

    def events(self, delta: Delta) -> bytes:
        data = b"".join([self._blocks.take(event) for event in self._choice.take(delta)])
        if delta.finish is None:
            return data
        self._end = self._end_of(delta)
        return data + self._blocks.close()

    def last_events(self, usage: Usage) -> bytes:
        return named_event(MessageDelta(self._end, self._usage(usage))) + named_event(MessageStop())

    def error_event(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error.anthropic_body(self._request_id) + b"\n\n"

    # A whole answer.

    def body(self, choices: list[Delta], usage: Usage) -> bytes:
        (delta,) = choices
        blocks = content_blocks(self._choice.take(delta))
        end = self._end_of(delta)
        model = self._options.model
        return encode(AnthropicMessage(self.id, model, blocks, self._usage(usage), end.stop_reason, end.stop_sequence))

    # Both.

    def _end_of(self, delta: Delta) -> MessageEnd:
        sequence = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        return MessageEnd(self._stop_reason(delta, sequence), sequence)

    def _stop_reason(self, delta: Delta, sequence: str | None) -> StopReason:
        if delta.finish == "length":
            num_tokens = self._request.prompt_tokens + self._request.completion_tokens
            asked = self._request.job.sampling.max_tokens or 0
            is_full = num_tokens >= self._max_seq_len and self._request.completion_tokens < asked
            return "model_context_window_exceeded" if is_full else "max_tokens"
        if sequence is not None:
            return "stop_sequence"
        return "tool_use" if self._choice.demands_calls else "end_turn"

    def _usage(self, usage: Usage) -> MessageUsage:
        cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(
            usage.prompt_tokens - cached,
            usage.completion_tokens,
            cache_read_input_tokens=cached,
            output_tokens_details=ThinkingTokens(self._choice.reasoning_tokens),
        )


class BlockEvents:
    """Stream events of a message's blocks. A block begins with its first text and ends when the next begins."""

    def __init__(self) -> None:
        self._index = -1
        self._open: type[ContentBlock] | None = None  # kind of the block that has not ended

    def take(self, event: Event) -> bytes:
        """Return the stream events for an event of the answer, with those that end and begin blocks."""
        match event:
            case Content(text):
                return self._within(TextBlock("")) + self._delta(TextDelta(text))
            case Reasoning(text):
                return self._within(ThinkingBlock("", "")) + self._delta(ThinkingDelta(text))
            case CallStart(_, id, name):
                return self.close() + self._start(ToolUseBlock(id, name, {}))
            case CallArguments(_, text):
                return self._delta(InputJsonDelta(text))

    def close(self) -> bytes:
        """Return the events that end the open block, if there is one."""
        if self._open is None:
            return b""
        signature = self._delta(SignatureDelta(SIGNATURE)) if self._open is ThinkingBlock else b""
        self._open = None
        return signature + named_event(BlockStop(self._index))

    def _within(self, block: ContentBlock) -> bytes:
        return b"" if self._open is type(block) else self.close() + self._start(block)

    def _start(self, block: ContentBlock) -> bytes:
        self._index += 1
        self._open = type(block)
        return named_event(BlockStart(self._index, block))

    def _delta(self, delta: BlockDelta) -> bytes:
        return named_event(BlockDeltaEvent(self._index, delta))


def content_blocks(events: Iterable[Event]) -> list[ContentBlock]:
    """Return the blocks made of all events of an answer."""
    blocks: list[ContentBlock] = []
    calls: dict[int, tuple[ToolUseBlock, list[str]]] = {}
    for event in events:
        match event:
            case Content(text):
                blocks.append(TextBlock(text))
            case Reasoning(text):
                blocks.append(ThinkingBlock(text, SIGNATURE))
            case CallStart(index, id, name):
                calls[index] = ToolUseBlock(id, name, {}), []
                blocks.append(calls[index][0])
            case CallArguments(index, text):
                calls[index][1].append(text)
    for block, texts in calls.values():
        block.input.update(tool_input("".join(texts)))
    return blocks


def tool_input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments, even if their JSON is cut short; {} if they are no JSON object."""
    try:
        value = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
