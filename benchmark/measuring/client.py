"""A streaming client of POST /v1/completions that costs little, because it shares the machine with what it measures.

One connection and one protocol object a request, no coroutine while it runs. Every event is decoded as it comes; an
event with text is a time in the record.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from measuring.workload import TimedRequest


@dataclass(slots=True)
class RequestRecord:
    """Outcome of one request. Times are seconds after the start of the load."""

    index: int  # in the load
    due: float  # when it had to be sent
    prompt_tokens: int
    max_tokens: int
    sent: float | None = None
    times: array[float] = field(default_factory=lambda: array("d"))  # when each event with text came
    sizes: array[int] = field(default_factory=lambda: array("i"))  # characters in each of them
    completion_tokens: int = 0  # tokens by the server's count, or events if it gives none
    cached_tokens: int = 0
    error: str | None = None

    @property
    def begin(self) -> float:
        """Time that latencies count from: when it was due, or sent if a coarse timer sent it a moment early."""
        return self.due if self.sent is None else min(self.due, self.sent)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.begin

    @property
    def end_to_end(self) -> float:
        return self.times[-1] - self.begin

    @property
    def time_per_token(self) -> float | None:
        """Mean time between tokens."""
        if self.completion_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class Target:
    """Server that requests go to, and the fields that all of them have."""

    base_url: str  # without /v1
    model: str
    temperature: float = 0.6
    timeout: float = 600.0  # seconds a request may take
    api_key: str | None = None

    @property
    def address(self) -> tuple[str, int, bool]:
        """Host, port, and True for TLS."""
        parts = urlsplit(self.base_url)
        if parts.hostname is None or parts.scheme not in ("http", "https"):
            raise ValueError(f"not an http or https address: {self.base_url}")
        tls = parts.scheme == "https"
        return parts.hostname, parts.port or (443 if tls else 80), tls

    def encode(self, request: TimedRequest) -> bytes:
        """Return the whole HTTP request. The server must give exactly `max_tokens` tokens."""
        body = msgspec.json.encode(
            {
                "model": self.model,
                "prompt": request.prompt.tolist(),
                "max_tokens": request.max_tokens,
                "temperature": self.temperature,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        parts = urlsplit(self.base_url)
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        head = (
            f"POST {parts.path.rstrip('/')}/v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body


class _Choice(msgspec.Struct):
    text: str = ""


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Stream(asyncio.Protocol):
    """One request on its connection. `ended` is done when the record is complete."""

    def __init__(self, payload: bytes, record: RequestRecord, start: float) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._payload = payload
        self._record = record
        self._start = start
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._now = 0.0
        self._rest = b""  # part of an event that is not complete
        self._refusal: list[bytes] | None = None  # the body of an answer that is not 200
        self._usage: _Usage | None = None

    def end(self, error: str | None = None) -> None:
        """Complete the record. The first call counts."""
        if self.ended.done():
            return
        record = self._record
        record.completion_tokens = len(record.times) if self._usage is None else self._usage.completion_tokens
        if self._usage is not None and self._usage.prompt_tokens_details is not None:
            record.cached_tokens = self._usage.prompt_tokens_details.cached_tokens or 0
        if not record.times and record.completion_tokens:  # a few tokens of no text: a part of a character, perhaps
            record.times.append(self._now)
            record.sizes.append(0)
        if error is None and not record.times:
            error = "no text came"
        elif error is None and record.completion_tokens != record.max_tokens and self._usage is not None:
            error = f"{record.completion_tokens} tokens came, {record.max_tokens} were asked for"
        record.error = error
        if self._transport is not None:
            self._transport.abort()
        self.ended.set_result(None)

    # --- the connection ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class does not derive from it
        self._transport.write(self._payload)
        self._payload = b""
        self._record.sent = time.monotonic() - self._start

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic() - self._start
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.MsgspecError) as error:
            self.end(f"not understood: {error.__context__ or error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(f"the connection was lost: {exc or 'closed by the server'}")

    # --- the parser's callbacks -------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() != 200:
            self._refusal = []

    def on_body(self, body: bytes) -> None:
        if self._refusal is not None:
            self._refusal.append(body)
            return
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            self._take(event)

    def on_message_complete(self) -> None:
        if self._refusal is None:
            self.end()
        else:
            text = b"".join(self._refusal)[:300].decode(errors="replace")
            self.end(f"status {self._parser.get_status_code()}: {text}")

    def _take(self, data: bytes) -> None:
        if not data.startswith(b"data: {"):  # [DONE], or a comment
            return
        event = _decode(data[6:])
        if event.choices and (text := event.choices[0].text):
            self._record.times.append(self._now)
            self._record.sizes.append(len(text))
        if event.usage is not None:
            self._usage = event.usage
        if event.error is not None:
            self.end(f"error in the stream: {msgspec.json.encode(event.error)[:300].decode(errors='replace')}")


async def ask(target: Target, payload: bytes, record: RequestRecord, start: float) -> None:
    """Send one request and wait for the end of its answer. Whatever happens is in the record."""
    host, port, tls = target.address
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(target.timeout):
            _, stream = await loop.create_connection(
                lambda: Stream(payload, record, start), host, port, ssl=tls or None
            )
    except (OSError, TimeoutError) as error:
        record.error = f"no connection: {error or 'timeout'}"
        return
    _, waiting = await asyncio.wait({stream.ended}, timeout=target.timeout)
    if waiting:
        stream.end(f"no end after {target.timeout:g} s")
