"""uvicorn's HTTP connection, with limits on the size and time of what clients send, and a fast path for streams."""

from __future__ import annotations

import asyncio
import re
import weakref
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from minisgl.server.api.http.errors import ApiError, head_too_large

MAX_WRITE_BYTES = 256 * 1024  # of an answer, in one turn of the event loop
MAX_HEAD_BYTES = 64 * 1024  # of a request's line and headers, or of the end of a chunked body
_HOST = re.compile(rb"(\[[\da-f:.]+\]|[\w.~!$&'()*+,;=%-]*)(:\d{0,5})?", re.IGNORECASE | re.ASCII)  # RFC 3986's


class Connection(HttpToolsProtocol):
    """Connection of one client, with a timeout in every state and a bound on what it buffers.

    While no request is being answered, one of two timers runs: uvicorn's keep-alive timer between requests, else
    `header_timeout` seconds. These cover a connection's first head, each later head from its first byte on, and the
    rest of a body that the answer did not wait for. A client that has fallen behind has `send_timeout` seconds to read.

    A pipelined request, one that comes before the request ahead of it is answered, is dropped, and the connection
    closes after the answer: clients that pipeline send it again (RFC 9112, section 9.3.2). An offer to upgrade to
    another protocol is ignored.
    """

    def __init__(self, *args: Any, header_timeout: float, send_timeout: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.url = b""  # URL of the request that is read or answered
        self._header_timeout = header_timeout
        self._send_timeout = send_timeout
        self._send_timeout_task: asyncio.TimerHandle | None = None
        self._header_timeout_task: asyncio.TimerHandle | None = None
        self._reads_head = True  # False from the end of a head to the end of its body
        # Bytes of an unfinished head, or of a chunked body since its last data; too small by at most one packet.
        self._unread = 0
        self._ignores_input = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_header_timeout()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_header_timeout()
        super().connection_lost(exc)
        self._end_send_timeout()

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
            raised = error.__context__  # set if one of the callbacks below raised it
            self._refuse(raised if isinstance(raised, ApiError) else ApiError(400, "this is no HTTP request"))
        else:
            if self._unread > MAX_HEAD_BYTES:
                self._refuse(head_too_large(MAX_HEAD_BYTES))
        self._choose_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.client is None:  # no address: a Unix domain socket; the kernel has a timeout for TCP
            self._send_timeout_task = self.loop.call_later(self._send_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_send_timeout()

    # Callbacks of httptools' parser.

    def on_message_begin(self) -> None:
        if self._is_answering():
            raise EarlyRequest
        super().on_message_begin()
        self._end_header_timeout()  # the request before took its own time
        self._unread = self._unread or 1  # 0 if this head began in the packet that ended the body before

    def on_headers_complete(self) -> None:
        """Begin to answer; ApiError if the head is too large or does not name exactly one host."""
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
            self._forget_request()

    # Answers.

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._choose_timer()
        self._forget_request()

    def close_after_answer(self) -> None:
        """Close the connection after the answer under way."""
        if self._is_answering():
            self.cycle.keep_alive = False

    def _decline_upgrade(self, rest: bytes) -> None:
        """Parse a head again without its Upgrade header, because the parser skips the body of such a request."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(ApiError(400, "this server is no proxy: it does not know the method CONNECT"))
            return
        line = b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())
        lines = [line, *(b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"), b"", b""]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join(lines) + rest)

    def _refuse(self, error: ApiError) -> None:
        """Answer the request being read with an error, and close; only close if its answer has begun."""
        if self._reads_head and self._is_answering():  # a pipelined request: it is dropped, not answered
            self._ignores_input = True
            self.close_after_answer()
            return
        if self._reads_head or not self.cycle.response_started:
            path = self.url.partition(b"?")[0].decode("latin-1")
            scope = {"path": path, "root_path": "", "headers": self.headers or [], "state": {"request_id": ""}}
            body = error.body_for(scope)
            headers = {**error.headers, "content-type": "application/json", "connection": "close"}
            lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", f"content-length: {len(body)}"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()

    def _forget_request(self) -> None:
        """Free the head and body of a request that has been read and answered, which an idle connection would keep."""
        if self._reads_head and not self._is_answering():
            self.cycle = self.scope = None  # type: ignore[assignment]
            self.headers, self.url = [], b""

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # Timers.

    def _choose_timer(self) -> None:
        if self.transport.is_closing() or self._is_answering():
            self._end_header_timeout()
        elif self._unread or not self._reads_head:
            self._unset_keepalive_if_required()
            if self._header_timeout_task is None:
                self._start_header_timeout()
        else:
            self._end_header_timeout()
            # Every received byte cancels it, and uvicorn itself starts it only after answers.
            if self.timeout_keep_alive_task is None:
                handler = self.timeout_keep_alive_handler
                self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, handler)

    def _start_header_timeout(self) -> None:
        self._header_timeout_task = self.loop.call_later(self._header_timeout, self.transport.close)

    def _end_header_timeout(self) -> None:
        if self._header_timeout_task is not None:
            self._header_timeout_task.cancel()
            self._header_timeout_task = None

    def _end_send_timeout(self) -> None:
        if self._send_timeout_task is not None:
            self._send_timeout_task.cancel()
            self._send_timeout_task = None


class EarlyRequest(Exception):
    """A request has come before the one ahead of it is answered; it stops the parser."""


def _check_host(hosts: list[bytes], http_version: str) -> None:
    """Raise ApiError unless there is one well-formed host, or none in HTTP/1.0 (RFC 9112, section 3.2)."""
    if not hosts and http_version == "1.0":
        return
    if len(hosts) != 1:
        raise ApiError(400, f"the request must have one Host header, not {len(hosts)}")
    if not _HOST.fullmatch(hosts[0].strip(b" \t")):
        raise ApiError(400, "the request's Host header is not a host with or without a port")


class StreamBody:
    """Body of a streamed answer, written to the transport directly instead of through ASGI.

    Through ASGI each event costs a turn of its task and a call through every middleware, most of a token's cost in this
    process. Any code on the event loop may write here between the answer's first and last ASGI messages, which are sent
    as usual; the last has an empty body.
    """

    def __init__(self, cycle: RequestResponseCycle, *, chunked: bool) -> None:
        # The cycle's scope has this object: a reference would keep both, and the request's head, until a collection.
        self._cycle = weakref.ref(cycle)
        self._transport = cycle.transport
        self._flow = cycle.flow
        self._chunked = chunked

    def begin(self) -> None:
        """Prepare for the answer's start. HTTP/1.0 has no chunked encoding: the connection's end ends the body."""
        cycle = self._cycle()
        if not self._chunked and cycle is not None:
            cycle.chunked_encoding = False

    @property
    def is_behind(self) -> bool:
        """True if the client reads more slowly than we write: more data would only fill memory."""
        return self._flow.write_paused

    async def caught_up(self) -> None:
        """Wait until the client has read enough, or is gone."""
        await self._flow.drain()

    def write(self, data: bytes) -> None:
        """Write a part of the body; do nothing if the client is gone."""
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def write_large(self, data: bytes, after: bytes = b"") -> None:
        """Write a part of the body that may be large, with `after` at its end, as fast as the client reads.

        Others get their turn between the slices: to copy or encrypt 200 MB takes a tenth of a second.
        """
        for one, is_last in slices_of(data):
            if is_last:
                self.write(one + after)
            else:
                self.write(one)
                await asyncio.sleep(0)
                await self.caught_up()


class LargeJson:
    """Answer of JSON that may be large. Others get their turn between its slices."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self._data))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for one, is_last in slices_of(self._data):
            await send({"type": "http.response.body", "body": one, "more_body": not is_last})
            if not is_last:
                await asyncio.sleep(0)


def slices_of(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield slices of data that are small enough to be written in a turn, at least one, and True with the last."""
    for start in range(0, len(data) or 1, MAX_WRITE_BYTES):
        end = start + MAX_WRITE_BYTES
        yield data[start:end], end >= len(data)


def stream_body_of(scope: Scope) -> StreamBody:
    """Return the body of the answer to this request."""
    body: StreamBody = scope["state"]["stream_body"]
    return body
