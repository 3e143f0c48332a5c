"""uvicorn's HTTP connection, with a short way for the events of streams.

Through ASGI an event costs a task its turn and a call through every layer of the application, which is most of what a
token costs. So a request also gets the body of its answer as an object that may be written to from anywhere on the
event loop, between the start and the last message of the answer, which take the usual way.
"""

from __future__ import annotations

import asyncio

from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


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
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["stream_body"] = StreamBody(self.transport, self.flow)


def stream_body_of(scope: Scope) -> StreamBody:
    """The body of the answer to this request."""
    body: StreamBody = scope["state"]["stream_body"]
    return body
