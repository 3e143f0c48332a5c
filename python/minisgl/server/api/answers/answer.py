"""The HTTP side of one generation: an ASGI response that owns the request from its submission to its last byte.

The request is submitted here and not in the route's handler, so that from its submission on a task listens to `receive`
for the client's disconnect. Whatever ends the answer, the `with` block aborts what is unfinished.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import ClassVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.types import Receive, Scope, Send

from minisgl.server.api.answers.large_json import encode_large
from minisgl.server.api.answers.writer_thread import WriterThread
from minisgl.server.api.http.connection import LargeJson, StreamBody, stream_body_of
from minisgl.server.api.http.errors import ApiError, internal_error
from minisgl.server.api.requests.engine_client import EngineClient
from minisgl.server.api.requests.open_request import (
    SMALL_LOGPROBS,
    SMALL_TOKENS,
    ClientGone,
    Delta,
    Job,
    OpenRequest,
)

logger = logging.getLogger(__name__)

LARGE_LOGPROBS = 2**17  # written in 0.2 s; answers with more let others pass
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-store"),
    (b"x-accel-buffering", b"no"),  # reverse proxies must not collect events
]


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


class Writer(ABC):
    """Writes the engine's output in the form of one route. By default a stream fails and ends as OpenAI's do."""

    stream_end: ClassVar[bytes] = b"data: [DONE]\n\n"
    in_thread: ClassVar[bool] = False  # True if `body` always takes so long that it must run in a thread
    keeps_logprobs: ClassVar[bool] = False  # True if the last events of a stream repeat its log-probabilities
    repeats_logprobs: ClassVar[bool] = False  # True if each event of a stream repeats those of all before it
    id: str  # id of the answer

    def begin(self, request: OpenRequest) -> None:
        """Set the request whose output will be written; all its prompts are accepted."""
        self._request = request

    def first_events(self) -> bytes:
        """Return the events before the first delta."""
        return b""

    @abstractmethod
    def events(self, delta: Delta) -> bytes:
        """Return the events of a delta; b"" if there is nothing to tell of it."""

    @abstractmethod
    def last_events(self, usage: Usage) -> bytes:
        """Return the events after the last delta, before `stream_end`."""

    def error_event(self, error: ApiError) -> bytes:
        """Return the event of an error that cuts a stream short, before `stream_end`."""
        return b"data: " + error.body() + b"\n\n"

    @abstractmethod
    def body(self, choices: list[Delta], usage: Usage) -> bytes:
        """Return the whole answer, if it is not streamed."""

    async def keep(self, last: bytes) -> bytes:
        """Store an answer that has ended, before its client is told of the end by the bytes `last`.

        Returns `last`, or what must be sent instead if the answer could not be stored.
        """
        return last


def usage_of(request: OpenRequest) -> Usage:
    prompt, completion = request.prompt_tokens, request.completion_tokens
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(request.cached_tokens))


def server_sent_event(data: msgspec.Struct) -> bytes:
    """Return an event of a stream."""
    return encode_large(data, b"data: ", b"\n\n")


def named_event(data: msgspec.Struct) -> bytes:
    """Return an event of a stream, named by the struct's tag."""
    return encode_large(data, f"event: {data.__struct_config__.tag}\ndata: ".encode(), b"\n\n")


async def _written(
    write: Callable[[], bytes], num_logprobs: int, thread: WriterThread, *, in_thread: bool = False
) -> bytes:
    """Return what `write` returns: so many log-probabilities, which are written in the thread if they are many."""
    if num_logprobs <= SMALL_LOGPROBS and not in_thread:
        return write()
    return await thread.write(write, is_large=num_logprobs > LARGE_LOGPROBS)


def _unless_failed(request: OpenRequest, write: Callable[[], bytes]) -> bytes:
    """Return what `write` returns; raise the request's error if it has failed while it waited for the thread."""
    request.raise_failure()
    return write()


class EventStream:
    """Sink that writes the events of deltas to a streamed body."""

    def __init__(self, request: OpenRequest, writer: Writer, thread: WriterThread, body: StreamBody) -> None:
        self._request = request
        self._writer = writer
        self._thread = thread
        self._body = body
        self.keeps_logprobs = writer.keeps_logprobs
        self.repeats_logprobs = writer.repeats_logprobs

    @property
    def is_behind(self) -> bool:
        return self._body.is_behind

    async def caught_up(self) -> None:
        await self._body.caught_up()

    def take(self, deltas: Iterable[Delta]) -> None:
        if data := self._events(deltas):
            self._body.write(data)

    async def take_in_thread(self, deltas: Iterable[Delta], num_logprobs: int) -> None:
        write = partial(_unless_failed, self._request, lambda: self._events(deltas))
        if data := await _written(write, num_logprobs, self._thread, in_thread=True):
            await self._body.write_large(data)

    def _events(self, deltas: Iterable[Delta]) -> bytes:
        return b"".join([self._writer.events(delta) for delta in deltas])


class Answer:
    """Submits a job and writes its answer, as a stream of events or as one JSON body."""

    def __init__(
        self,
        client: EngineClient,
        job: Job,
        writer: Writer,
        thread: WriterThread,
        *,
        stream: bool,
        names: tuple[str, ...],
    ) -> None:
        """`names`: ids by which `EngineClient.abort` finds the request, besides the answer's id."""
        self._client = client
        self._names = (*names, writer.id)
        self._job = job
        self._writer = writer
        self._thread = thread
        self._stream = stream
        self._started = False  # the status line has been sent
        self._num_logprobs = 0  # that the request held at its end, which the end of a stream may repeat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request: OpenRequest | None = None
        try:
            await asyncio.sleep(0)  # making the job may have taken long: others get their turn
            with self._client.open(self._job, self._names) as request:
                watcher = asyncio.create_task(self._watch(request, receive))
                try:
                    await (self._send_stream if self._stream else self._send_body)(request, scope, receive, send)
                finally:
                    watcher.cancel()
                    self._num_logprobs = request.num_logprobs  # none any more, once `request` is closed
        except (ClientGone, OSError):  # servers of ASGI 2.4 raise OSError from send
            return
        except ApiError as error:
            await self._send_error(error, scope, receive, send)
        except Exception:
            logger.exception("a request ended with an internal error", extra={"request_id": self._names[0]})
            await self._send_error(internal_error(), scope, receive, send)
        finally:
            if request is not None:
                request.break_cycles()
                if self._client.tracer is not None:
                    self._client.tracer.record(request, self._writer.id, scope)

    async def _watch(self, request: OpenRequest, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._client.abandon(request)

    async def _send_stream(self, request: OpenRequest, scope: Scope, _receive: Receive, send: Send) -> None:
        await request.accepted()  # a refusal until here is an ordinary error response
        self._writer.begin(request)
        self._started = True
        body = stream_body_of(scope)
        body.begin()
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        if data := self._writer.first_events():
            body.write(data)
        await request.stream_to(EventStream(request, self._writer, self._thread, body))
        usage = usage_of(request)
        last = await _written(lambda: self._writer.last_events(usage), request.num_logprobs, self._thread)
        await self._end_stream(body, last, send)

    async def _send_body(self, request: OpenRequest, scope: Scope, receive: Receive, send: Send) -> None:
        choices = await request.complete()
        self._writer.begin(request)
        await asyncio.sleep(0)  # with thousands of choices each of these calls takes long: others get their turn
        usage = usage_of(request)
        write = partial(_unless_failed, request, lambda: self._writer.body(choices, usage))
        in_thread = self._writer.in_thread or request.completion_tokens > SMALL_TOKENS
        data = await _written(write, request.num_logprobs, self._thread, in_thread=in_thread)
        data = await self._writer.keep(data)
        self._started = True
        await LargeJson(data)(scope, receive, send)

    async def _send_error(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._started:
            await error.response(scope)(scope, receive, send)
        elif self._stream:
            last = await _written(lambda: self._writer.error_event(error), self._num_logprobs, self._thread)
            await self._end_stream(stream_body_of(scope), last, send)

    async def _end_stream(self, body: StreamBody, last_events: bytes, send: Send) -> None:
        await body.write_large(await self._writer.keep(last_events), self._writer.stream_end)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
