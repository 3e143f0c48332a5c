"""Writes the engine's output as a chat.completion object, or as chat.completion.chunk events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable

import msgspec
from msgspec import UNSET, UnsetType

from minisgl.message.packed_ids import unpack_ids
from minisgl.parsers.streaming import CallArguments, CallStart, Content, Event, Reasoning
from minisgl.server.api.answers.answer import CompletionTokensDetails, Usage, Writer, server_sent_event, usage_of
from minisgl.server.api.answers.large_json import encode_large
from minisgl.server.api.answers.logprob_forms import ChatLogprobs, PromptLogprobs, prompt_logprobs
from minisgl.server.api.answers.parsed_choice import ChatFinishReason, ChatOptions, ParsedChoice
from minisgl.server.api.requests.open_request import Delta, OpenRequest


class FunctionCall(msgspec.Struct):
    arguments: str  # JSON, unless the model wrote something else
    name: str


class ToolCall(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    id: str
    function: FunctionCall


class ChatMessage(msgspec.Struct, frozen=True):
    """Message of an answer. The reasoning has two names: DeepSeek's, and vLLM's newer one."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET  # older form of tool_calls, if the request used `functions`


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessage
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, tag_field="object", tag="chat.completion"):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(msgspec.Struct, frozen=True):
    """Part of a call: the first has the call's id, type and name, each later one more of its arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    """Additions of a chunk to the message; unset fields are not written."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: ChatDelta
    finish_reason: ChatFinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, tag_field="object", tag="chat.completion.chunk"):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatWriter(Writer):
    """Writes one chat completion."""

    def __init__(self, options: ChatOptions) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._options = options
        self._include_usage = options.body.wants_usage()
        self._tier: str | UnsetType = UNSET if options.body.service_tier is None else options.body.service_tier
        self._choices: list[ParsedChoice] = []
        self._begun: set[int] = set()  # choices whose chunk with the role has been written
        self._told_prompt = False  # the prompt's ids and log-probabilities have been written

    def begin(self, request: OpenRequest) -> None:
        super().begin(request)
        self._choices = [ParsedChoice(self._options, request.prompts[0].prompt_end) for _ in request.seq_ids]

    # A stream.

    def events(self, delta: Delta) -> bytes:
        options, choice, index = self._options, self._choices[delta.index], delta.index
        events: list[bytes] = []
        if index not in self._begun:
            self._begun.add(index)
            events.append(self._event(ChatChunkChoice(index, ChatDelta(role=options.role, content="")), delta))
            if options.echo:
                events.append(self._event(ChatChunkChoice(index, ChatDelta(content=options.echo)), delta))
        for event in choice.take(delta):
            written = ChatChunkChoice(
                index,
                delta_of(event, options),
                logprobs=choice.take_logprobs(),
                token_ids=choice.take_token_ids(),
            )
            events.append(self._event(written, delta))
        if delta.finish is not None:
            last = ChatChunkChoice(
                index,
                ChatDelta(),
                choice.finish_reason(delta),
                delta.stop_reason,
                choice.take_logprobs(),  # tokens without text, such as the one that ends the answer
                choice.take_token_ids(),
            )
            events.append(self._event(last, delta))
        return b"".join(events)

    def _event(self, choice: ChatChunkChoice, delta: Delta) -> bytes:
        usage: Usage | UnsetType | None = None if self._include_usage else UNSET
        if self._options.body.wants_continuous_usage():
            usage = self._with_details(usage_of(self._request))
        written = (self.id, self._created, self._options.model, [choice], usage, self._tier)
        return server_sent_event(ChatChunk(*written, *self._of_prompt([delta])))

    def last_events(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return b""
        usage = self._with_details(usage)
        return server_sent_event(ChatChunk(self.id, self._created, self._options.model, [], usage, self._tier))

    # A whole answer.

    def body(self, choices: list[Delta], usage: Usage) -> bytes:
        written = [self._whole(delta) for delta in choices]
        told = (self.id, self._created, self._options.model, written, self._with_details(usage), self._tier)
        return encode_large(ChatCompletion(*told, *self._of_prompt(choices)))

    def _whole(self, delta: Delta) -> ChatChoice:
        choice = self._choices[delta.index]
        return ChatChoice(
            delta.index,
            message_of(choice.take(delta), self._options),
            choice.finish_reason(delta),
            delta.stop_reason,
            choice.take_logprobs() or (ChatLogprobs([]) if self._options.body.logprobs else None),
            choice.take_token_ids() or ([] if self._options.body.return_token_ids else UNSET),
        )

    # Both.

    def _with_details(self, usage: Usage) -> Usage:
        tokens = sum(choice.reasoning_tokens for choice in self._choices)
        return msgspec.structs.replace(usage, completion_tokens_details=CompletionTokensDetails(tokens))

    def _of_prompt(self, deltas: list[Delta]) -> tuple[list[int] | UnsetType, PromptLogprobs | UnsetType]:
        """Return the prompt's ids and log-probabilities, if requested, at the first call."""
        if self._told_prompt:
            return UNSET, UNSET
        self._told_prompt = True
        ids: list[int] | UnsetType = UNSET
        if self._options.body.return_token_ids:
            ids = unpack_ids(self._request.prompts[0].prompt_ids).tolist()
        top = self._options.body.prompt_logprobs
        return ids, UNSET if top is None else prompt_logprobs(deltas[0].prompt_logprobs, top)


def delta_of(event: Event, options: ChatOptions) -> ChatDelta:
    """Return the part of a message that an event adds."""
    match event:
        case Content(text):
            return ChatDelta(content=text)
        case Reasoning(text):
            return ChatDelta(reasoning_content=text, reasoning=text)
        case CallStart(_, _, name) if options.body.functions:
            return ChatDelta(function_call=FunctionDelta("", name))
        case CallArguments(_, text) if options.body.functions:
            return ChatDelta(function_call=FunctionDelta(text))
        case CallStart(index, id, name):
            return ChatDelta(tool_calls=[CallDelta(index, FunctionDelta("", name), id, "function")])
        case CallArguments(index, text):
            return ChatDelta(tool_calls=[CallDelta(index, FunctionDelta(text))])


def message_of(events: Iterable[Event], options: ChatOptions) -> ChatMessage:
    """Return the message made of all events of a choice."""
    content, reasoning = options.echo, ""
    calls: list[ToolCall] = []
    for event in events:
        match event:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallStart(_, id, name):
                calls.append(ToolCall(id, FunctionCall("", name)))
            case CallArguments(index, text):
                calls[index].function.arguments += text
    return ChatMessage(
        content or (None if calls else ""),
        options.role,
        reasoning_content=reasoning or UNSET,
        reasoning=reasoning or UNSET,
        tool_calls=UNSET if options.body.functions else calls or UNSET,
        function_call=calls[0].function if options.body.functions and calls else UNSET,
    )
