"""The body of an answer without content-length: a way past ASGI for its events, in chunks or, for HTTP/1.0, bare.

Through ASGI an event costs a task its turn and a call through every layer of the application, which is most of what a
token costs. So a request also gets the body of its answer as an object that may be written to from anywhere on the
event loop, between the start and the last message of the answer, which take the usual way.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent


class StreamBody:
    """The body of an answer without content-length."""

    def __init__(self, transport: asyncio.Transport, flow: FlowControl, *, chunked: bool) -> None:
        self._transport = transport
        self._flow = flow
        self._chunked = chunked

    @property
    def is_behind(self) -> bool:
        """The client has not yet taken what was written: more would only lie in memory."""
        return self._flow.write_paused

    async def caught_up(self) -> None:
        """Wait until the client has taken it, or is gone."""
        await self._flow.drain()

    def write(self, data: bytes) -> None:
        """Write a part of it; nothing, if the client is gone."""
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)


def stream_body_of(scope: Scope) -> StreamBody:
    """The body of the answer to this request."""
    body: StreamBody = scope["state"]["stream_body"]
    return body


class BareCycle(RequestResponseCycle):
    """uvicorn's way of an answer to a client of HTTP/1.0, which knows no chunks: the body ends with the connection."""

    _is_bare = False  # its length is not said

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            if all(name.lower() != b"content-length" for name, _ in message.get("headers", ())):
                self._is_bare = True
                self.chunked_encoding = False
        elif message["type"] == "http.response.body" and self._is_bare:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)
