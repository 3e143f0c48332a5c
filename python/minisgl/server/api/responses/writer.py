"""Writes the engine's output as a Response object, or as the events of its stream.

Specification: https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from threading import Lock
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from minisgl.parsers.streaming import Content
from minisgl.server.api.answers.answer import Usage, Writer, named_event, usage_of
from minisgl.server.api.answers.large_json import encode_large
from minisgl.server.api.answers.logprob_forms import chat_logprob
from minisgl.server.api.answers.parsed_choice import ChatOptions, ParsedChoice
from minisgl.server.api.answers.writer_thread import let_others_pass
from minisgl.server.api.http.errors import ApiError
from minisgl.server.api.requests.open_request import Delta, OpenRequest
from minisgl.server.api.responses.output import ItemEvent, Output, OutputItem
from minisgl.server.api.responses.tools import NamespacedName

PREFIX = "resp_"
ResponseStatus: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0  # OpenAI's charge for caching; there is none here


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
    """Response in any state. Most fields repeat the request's; `warnings` is a field of our own."""

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


StreamEvent: TypeAlias = (
    ResponseCreated | ResponseInProgress | ResponseCompleted | ResponseIncomplete | ResponseFailed | ItemEvent
)
_LastEvent: TypeAlias = ResponseCompleted | ResponseIncomplete | ResponseFailed
_LAST_EVENTS: dict[ResponseStatus, type[_LastEvent]] = {
    "completed": ResponseCompleted,
    "incomplete": ResponseIncomplete,
    "failed": ResponseFailed,
    "cancelled": ResponseFailed,
}
Keep = Callable[[Response], Awaitable[Response]]  # stores a response; returns it as the client is to see it


class ResponsesWriter(Writer):
    """Writes one response."""

    stream_end: ClassVar[bytes] = b""
    keeps_logprobs: ClassVar[bool] = True

    def __init__(
        self,
        begun: Response,
        options: ChatOptions,
        keep: Keep | None,
        namespaced: Mapping[str, NamespacedName],
        *,
        seals_reasoning: bool,
    ) -> None:
        """`begun`: the response before it has any output; `keep` stores the response once it has ended."""
        self.id = begun.id
        self._response = begun
        self._options = options
        self._keep = keep
        self._next: Callable[[], int] = itertools.count().__next__  # sequence numbers of a stream's events
        self._output = Output(begun.id.removeprefix(PREFIX), self._next, namespaced, seals_reasoning=seals_reasoning)
        self._open: OpenRequest | None = None
        self._choice: ParsedChoice | None = None
        self._is_complete = False  # the model ended the answer, not a limit
        self._last_event: _LastEvent | None = None  # of a stream
        self._ending = Lock()  # a client may cancel while the writer thread ends the response

    def begin(self, request: OpenRequest) -> None:
        self._open = request
        self._choice = ParsedChoice(self._options, request.prompts[0].prompt_end)

    def cancel(self) -> Response:
        """Return the response as cancelled now, or as it ended before."""
        self._end("cancelled")
        return self._response

    # A stream.

    def first_events(self) -> bytes:
        created = ResponseCreated(self._next(), self._response)
        return named_event(created) + named_event(ResponseInProgress(self._next(), self._response))

    def events(self, delta: Delta) -> bytes:
        return b"".join(map(named_event, self._take(delta)))

    def last_events(self, usage: Usage) -> bytes:  # noqa: ARG002 - `_end` adds it, also to a stream that fails
        self._finish()
        return self._end_stream()

    def error_event(self, error: ApiError) -> bytes:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        self._end("failed", error=ResponseError(code, error.detail.message))
        return self._end_stream()

    def _end_stream(self) -> bytes:
        self._last_event = _LAST_EVENTS[self._response.status](self._next(), self._response)
        return named_event(self._last_event)

    # A whole answer.

    def body(self, choices: list[Delta], usage: Usage) -> bytes:  # noqa: ARG002
        for _ in self._take(choices[0]):  # collects the items; the stream's events are not needed
            pass
        self._finish()
        return encode_large(self._response)

    # Both.

    async def keep(self, last: bytes) -> bytes:
        if self._keep is None:
            return last
        shown = await self._keep(self._response)
        if shown is self._response:
            return last
        if self._last_event is None:
            return await asyncio.to_thread(encode_large, shown)
        return await asyncio.to_thread(named_event, msgspec.structs.replace(self._last_event, response=shown))

    def _take(self, delta: Delta) -> Iterator[StreamEvent]:
        assert self._choice is not None
        pieces: Iterable[Delta] = delta.split() if self._options.body.logprobs else (delta,)
        for piece in pieces:
            let_others_pass()  # the log-probabilities of all pieces may take seconds
            before = self._choice.reasoning_tokens
            events = self._choice.take(piece)
            if self._choice.reasoning_tokens > before:
                self._choice.take_positions()  # drops them: log-probabilities of reasoning and calls belong to no text
            for event in events:
                positions = self._choice.take_positions()
                logprobs = list(map(chat_logprob, positions)) if isinstance(event, Content) else []
                yield from self._output.take(event, logprobs)
        if delta.finish is not None:
            self._is_complete = delta.finish == "stop"
            is_whole = self._is_complete and not self._choice.is_cut
            yield from self._output.finish("completed" if is_whole else "incomplete")

    def _finish(self) -> None:
        if self._is_complete:
            self._end("completed", completed_at=int(time.time()))
        else:
            self._end("incomplete", incomplete_details=IncompleteDetails())

    def _end(self, status: ResponseStatus, **changes: object) -> None:
        """End the response with this status, if it has not ended. Only the first call has an effect."""
        with self._ending:
            if self._response.status != "in_progress":
                return
            usage = None if self._open is None else self._usage(usage_of(self._open))
            self._response = msgspec.structs.replace(
                self._response, status=status, output=self._output.items(), usage=usage, **changes
            )

    def _usage(self, usage: Usage) -> ResponseUsage:
        reasoning_tokens = 0 if self._choice is None else self._choice.reasoning_tokens
        return ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(reasoning_tokens),
            usage.total_tokens,
        )
