"""uvicorn's HTTP connection, with a short way for the events of streams, and a limit on the time that a head may take.

Through ASGI an event costs a task its turn and a call through every layer of the application, which is most of what a
token costs. So a request also gets the body of its answer as an object that may be written to from anywhere on the
event loop, between the start and the last message of the answer, which take the usual way.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minisgl.server.api.errors import invalid

_END = b"\r\n\r\n"  # of every head, and of every chunked body
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_BEGUN = re.compile(rb"\r(\n(\r|[a-z]{0,7}))?\Z", re.IGNORECASE)  # may go on as one of these two
_LONGEST_BEGUN = len(b"\r\nupgrade")


class StreamBody:
    """The body of an answer without content-length."""

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow

    @property
    def is_behind(self) -> bool:
        """The client has not yet taken what was written: more would only lie in memory."""
        return self._flow.write_paused

    async def caught_up(self) -> None:
        """Wait until the client has taken it, or is gone."""
        await self._flow.drain()

    def write(self, data: bytes) -> None:
        """Write a chunk; nothing, if the client is gone."""
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class Connection(HttpToolsProtocol):
    """Takes `receive_timeout` seconds for a connection's first head, and for each from its first byte on.

    The parser gets what comes in pieces, none of which goes beyond the end of a head or of a body: so it is known of
    every byte which of them it belongs to.
    """

    def __init__(self, *args: Any, receive_timeout: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._receive_timeout = receive_timeout
        self._patience: asyncio.TimerHandle | None = None
        self._reads_head = True
        self._body_left = 0  # bytes, where the head says how many
        self._held = b""  # the end of what came, while it is not known what it begins

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        data, self._held = self._held + data, b""
        start = 0
        while start < len(data) and not self.transport.is_closing():
            end = self._end_of_piece(data, start)
            if end == start:
                self._held = data[start:]
                return
            piece = data[start:end]
            super().data_received(_without_upgrade(piece) if self._reads_head else piece)
            start = end

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()
        self.scope["state"]["stream_body"] = StreamBody(self.transport, self.flow)

    def on_headers_complete(self) -> None:
        self._forget_head()
        self._body_left = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        super().on_headers_complete()
        self._reads_head = False

    def on_body(self, body: bytes) -> None:
        self._body_left = max(0, self._body_left - len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._reads_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is answered like all else that is wrong."""
        body = invalid(None, msg).body()
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d"
        self.transport.write(head % len(body) + b"\r\n\r\n" + body)
        self.transport.close()

    def _end_of_piece(self, data: bytes, start: int) -> int:
        """How far the parser may be given what came; `start` for nothing, until more has come."""
        if self._body_left:
            return min(len(data), start + self._body_left)
        end = data.find(_END, start)
        if end >= 0:
            return end + len(_END)
        begun = _BEGUN.search(data, max(start, len(data) - _LONGEST_BEGUN))
        return begun.start() if begun else len(data)

    def _expect_head(self) -> None:
        self._forget_head()
        self._patience = self.loop.call_later(self._receive_timeout, self.transport.close)

    def _forget_head(self) -> None:
        if self._patience is not None:
            self._patience.cancel()


def _without_upgrade(head: bytes) -> bytes:
    """Without an offer to speak another protocol, such as HTTP/2: the parser would skip the body."""
    return _UPGRADE.sub(b"\r\nx-upgrade:", head)


def stream_body_of(scope: Scope) -> StreamBody:
    """The body of the answer to this request."""
    body: StreamBody = scope["state"]["stream_body"]
    return body
