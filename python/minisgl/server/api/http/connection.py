"""uvicorn's HTTP connection, with limits on what clients may send and when, and a short way out for streams."""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from typing import Any

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from minisgl.server.api.http.errors import ApiError, head_too_large, invalid

MAX_HEAD_BYTES = 64 * 1024  # a request's line and headers, or what ends a chunked body
_HOST = re.compile(rb"(\[[\da-f:.]+\]|[\w.~!$&'()*+,;=%-]*)(:\d{0,5})?", re.IGNORECASE | re.ASCII)  # RFC 3986's


class Connection(HttpToolsProtocol):
    """One client's connection, which waits for nobody for ever and keeps little of what has no end.

    While no request is being answered one of two clocks runs: uvicorn's keep-alive between requests, and else
    `header_timeout` seconds, for a connection's first head, for each from its first byte on, and for what is missing of
    a body that the answer did not wait for.

    A request that comes before the one ahead of it is answered is dropped, and the connection closes behind the answer:
    clients that pipeline send it again (RFC 9112, section 9.3.2). An offer to speak another protocol is passed over.
    """

    def __init__(self, *args: Any, header_timeout: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.url = b""  # URL of the last request that arrived
        self._header_timeout = header_timeout
        self._header_timeout_task: asyncio.TimerHandle | None = None
        self._reads_head = True  # or what is between two requests
        self._unread = 0  # bytes of a head, or of a chunked body since its last data; fewer by a packet at most
        self._ignores_input = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_header_timeout()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_header_timeout()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._ignores_input or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._unread += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline_upgrade(data[offer.args[0] :])
        except httptools.HttpParserError as error:
            raised = error.__context__  # by a method of ours that the parser has called
            self._refuse(raised if isinstance(raised, ApiError) else invalid(None, "this is no HTTP request"))
        else:
            if self._unread > MAX_HEAD_BYTES:
                self._refuse(head_too_large(MAX_HEAD_BYTES))
        self._choose_clock()

    # The parser's calls.

    def on_message_begin(self) -> None:
        if self._is_answering():
            raise EarlyRequest
        super().on_message_begin()
        self._end_header_timeout()  # the request before took its own time
        self._unread = self._unread or 1  # where it shares its packet with the end of a body

    def on_headers_complete(self) -> None:
        """Begin to answer; ApiError if the head is too large or names no one host."""
        self._unread = 0
        version = self.parser.get_http_version()
        line = b"%b %b HTTP/1.1\r\n" % (self.parser.get_method(), self.url)
        if len(line) + sum(len(name) + len(value) + 4 for name, value in self.headers) + 2 > MAX_HEAD_BYTES:
            raise head_too_large(MAX_HEAD_BYTES)
        _check_host([value for name, value in self.headers if name == b"host"], version)
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        knows_chunks = version >= "1.1"
        if not knows_chunks:
            self.cycle.keep_alive = False
        self.scope["state"]["stream_body"] = StreamBody(self.cycle, chunked=knows_chunks)
        self._reads_head = False

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread = 0
        if not self._reads_head:  # otherwise its body has been skipped: see `_decline_upgrade`
            self._reads_head = True
            super().on_message_complete()

    # Answers.

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._choose_clock()

    def close_after_answer(self) -> None:
        """Let no other request follow the one that is being answered."""
        if self._is_answering():
            self.cycle.keep_alive = False

    def _decline_upgrade(self, rest: bytes) -> None:
        """Read a head again without its offer of another protocol, such as HTTP/2: the parser has skipped the body."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(invalid(None, "this server is no proxy: it does not know the method CONNECT"))
            return
        line = b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())
        lines = [line, *(b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"), b"", b""]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join(lines) + rest)

    def _refuse(self, error: ApiError) -> None:
        """Answer what is being read, and close; without a word, if its answer has begun."""
        if self._reads_head and self._is_answering():  # it belongs to no request that anybody will answer
            self._ignores_input = True
            self.close_after_answer()
            return
        if self._reads_head or not self.cycle.response_started:
            path = self.url.partition(b"?")[0].decode("latin-1")
            body = error.body_for({"path": path, "root_path": ""})
            headers = {**error.headers, "content-type": "application/json", "connection": "close"}
            lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", f"content-length: {len(body)}"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # Clocks.

    def _choose_clock(self) -> None:
        if self.transport.is_closing() or self._is_answering():
            self._end_header_timeout()
        elif self._unread or not self._reads_head:
            self._unset_keepalive_if_required()
            if self._header_timeout_task is None:
                self._start_header_timeout()
        else:
            self._end_header_timeout()
            if self.timeout_keep_alive_task is None:  # every byte ends it, and uvicorn starts it only after answers
                handler = self.timeout_keep_alive_handler
                self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, handler)

    def _start_header_timeout(self) -> None:
        self._header_timeout_task = self.loop.call_later(self._header_timeout, self.transport.close)

    def _end_header_timeout(self) -> None:
        if self._header_timeout_task is not None:
            self._header_timeout_task.cancel()
            self._header_timeout_task = None


class EarlyRequest(Exception):
    """A request has come before the one ahead of it is answered; it stops the parser."""


def _check_host(hosts: list[bytes], http_version: str) -> None:
    """ApiError unless there is one host that can be one, or none in HTTP/1.0 (RFC 9112, section 3.2)."""
    if not hosts and http_version == "1.0":
        return
    if len(hosts) != 1:
        raise invalid(None, f"the request must have one Host header, not {len(hosts)}")
    if not _HOST.fullmatch(hosts[0].strip(b" \t")):
        raise invalid(None, "the request's Host header is not a host with or without a port")


class StreamBody:
    """Body of an answer without content-length: a way past ASGI for its events.

    Through ASGI an event costs a task its turn and a call through every layer of the application, which is most of what
    a token costs. This object may be written to from anywhere on the event loop, between the start and the last message
    of the answer, which take the usual way. The last one is empty.
    """

    def __init__(self, cycle: RequestResponseCycle, *, chunked: bool) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._flow = cycle.flow
        self._chunked = chunked

    def begin(self) -> None:
        """Prepare for the answer's start. A client of HTTP/1.0 knows no chunks: the body ends with the connection."""
        if not self._chunked:
            self._cycle.chunked_encoding = False

    @property
    def is_behind(self) -> bool:
        """True if the client has not yet taken what was written: more would only lie in memory."""
        return self._flow.write_paused

    async def caught_up(self) -> None:
        """Wait until the client has taken it, or is gone."""
        await self._flow.drain()

    def write(self, data: bytes) -> None:
        """Write a part of it; nothing, if the client is gone."""
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)


def stream_body_of(scope: Scope) -> StreamBody:
    """Return the body of the answer to this request."""
    body: StreamBody = scope["state"]["stream_body"]
    return body
