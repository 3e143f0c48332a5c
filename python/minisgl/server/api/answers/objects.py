"""Answers to clients: OpenAI's response objects as msgspec structs (`object` is the tag), encoded without detours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from minisgl.core import FinishReason


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class ChatTopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True):
    """The older form, of completions: parallel lists, an entry a token. The first token of a prompt has no values."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    @classmethod
    def join(cls, parts: Sequence[TextLogprobs]) -> TextLogprobs:
        """Return the parts one after the other."""
        return cls(
            [token for part in parts for token in part.tokens],
            [logprob for part in parts for logprob in part.token_logprobs],
            [top for part in parts for top in part.top_logprobs],
            [offset for part in parts for offset in part.text_offset],
        )


class PromptLogprob(msgspec.Struct, frozen=True):
    """vLLM's."""

    logprob: float
    rank: int
    decoded_token: str


ChatFinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "function_call"]


class FunctionCall(msgspec.Struct):
    arguments: str  # JSON, if the model wrote such
    name: str


class ToolCall(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    id: str
    function: FunctionCall


class ChatMessage(msgspec.Struct, frozen=True):
    """The reasoning has two names: DeepSeek's, and vLLM's newer one."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET  # the older form, of those who ask in it


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
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(msgspec.Struct, frozen=True):
    """The first of a call has its id, type and name, all others more of its arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    """Only what is new: fields that are not set are not written."""

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
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class TextChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class TextCompletion(msgspec.Struct, frozen=True, tag_field="object", tag="text_completion"):
    """The whole answer, and also a chunk of it."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET


class Generated(msgspec.Struct, frozen=True):
    """The whole answer of /generate, and also a chunk of it."""

    id: str
    text: str
    logprobs: TextLogprobs | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    usage: Usage | UnsetType = UNSET


class ModelCard(msgspec.Struct, frozen=True, tag_field="object", tag="model"):
    id: str
    created: int
    root: str
    max_model_len: int
    owned_by: str = "minisgl"


class ModelList(msgspec.Struct, frozen=True, tag_field="object", tag="list"):
    data: list[ModelCard]


class Tokenized(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str


def server_sent_event(data: msgspec.Struct) -> bytes:
    """Return an event of a stream."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
