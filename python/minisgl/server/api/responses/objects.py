"""Forms of a response, of its items and of a stream's events, as OpenAI's Responses API has them."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from minisgl.server.api.answers.objects import ChatLogprob

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
ResponseStatus: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    logprobs: list[ChatLogprob] = []
    annotations: list[dict[str, Any]] = []


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


Part: TypeAlias = OutputText | ReasoningText


class MessageItem(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: list[dict[str, Any]] = []
    encrypted_content: str | None = None


class FunctionCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem: TypeAlias = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0  # that are paid for: none


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class Response(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="response"):
    """Response as it stands; most fields repeat the request's. `warnings` is our own: what was passed over."""

    id: str
    created_at: int  # seconds since 1970
    status: ResponseStatus
    model: str
    output: list[OutputItem] = []
    background: bool = False
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any] = {}
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = False
    temperature: float | None = None
    text: dict[str, Any] = {}
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    warnings: list[str] | UnsetType = UNSET


class DeletedResponse(msgspec.Struct, frozen=True, tag_field="object", tag="response"):
    id: str
    deleted: bool = True


class ItemList(msgspec.Struct, frozen=True, tag_field="object", tag="list"):
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class _ResponseEvent(msgspec.Struct, frozen=True, tag_field="type"):
    sequence_number: int
    response: Response


class ResponseCreated(_ResponseEvent, frozen=True, tag="response.created"):
    pass


class ResponseInProgress(_ResponseEvent, frozen=True, tag="response.in_progress"):
    pass


class ResponseCompleted(_ResponseEvent, frozen=True, tag="response.completed"):
    pass


class ResponseIncomplete(_ResponseEvent, frozen=True, tag="response.incomplete"):
    pass


class ResponseFailed(_ResponseEvent, frozen=True, tag="response.failed"):
    pass


class OutputItemAdded(msgspec.Struct, frozen=True, tag_field="type", tag="response.output_item.added"):
    sequence_number: int
    output_index: int
    item: OutputItem


class OutputItemDone(msgspec.Struct, frozen=True, tag_field="type", tag="response.output_item.done"):
    sequence_number: int
    output_index: int
    item: OutputItem


class _ItemEvent(msgspec.Struct, frozen=True, tag_field="type"):
    sequence_number: int
    output_index: int
    item_id: str


class ContentPartAdded(_ItemEvent, frozen=True, kw_only=True, tag="response.content_part.added"):
    part: Part
    content_index: int = 0


class ContentPartDone(_ItemEvent, frozen=True, kw_only=True, tag="response.content_part.done"):
    part: Part
    content_index: int = 0


class OutputTextDelta(_ItemEvent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[ChatLogprob] = []
    content_index: int = 0


class OutputTextDone(_ItemEvent, frozen=True, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[ChatLogprob] = []
    content_index: int = 0


class ReasoningTextDelta(_ItemEvent, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str
    content_index: int = 0


class ReasoningTextDone(_ItemEvent, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    text: str
    content_index: int = 0


class ArgumentsDelta(_ItemEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_ItemEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


StreamEvent: TypeAlias = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
)


def named_event(event: StreamEvent) -> bytes:
    """Return an event of a stream, under the name of its type."""
    return b"event: %b\ndata: %b\n\n" % (str(event.__struct_config__.tag).encode(), msgspec.json.encode(event))
