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

_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


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
    """Takes `receive_timeout` seconds for a connection's first head, and for each from its first byte on."""

    def __init__(self, *args: Any, receive_timeout: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._receive_timeout = receive_timeout
        self._patience: asyncio.TimerHandle | None = None
        self._reads_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(_without_upgrade(data) if self._reads_head else data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()
        self.scope["state"]["stream_body"] = StreamBody(self.transport, self.flow)

    def on_headers_complete(self) -> None:
        self._forget_head()
        self._reads_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._reads_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is answered like all else that is wrong."""
        body = invalid(None, msg).body()
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d"
        self.transport.write(head % len(body) + b"\r\n\r\n" + body)
        self.transport.close()

    def _expect_head(self) -> None:
        self._forget_head()
        self._patience = self.loop.call_later(self._receive_timeout, self.transport.close)

    def _forget_head(self) -> None:
        if self._patience is not None:
            self._patience.cancel()


def _without_upgrade(data: bytes) -> bytes:
    """A request's head without an offer to speak another protocol, such as HTTP/2: the parser would skip its body."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nx-upgrade:", head) + end + rest


def stream_body_of(scope: Scope) -> StreamBody:
    """The body of the answer to this request."""
    body: StreamBody = scope["state"]["stream_body"]
    return body
