"""The body of an answer without content-length: a way past ASGI for its events, in chunks or, for HTTP/1.0, bare.

Through ASGI an event costs a task its turn and a call through every layer of the application, which is most of what a
token costs. So a request also gets the body of its answer as an object that may be written to from anywhere on the
event loop, between the start and the last message of the answer, which take the usual way. The last one is empty.
"""

from __future__ import annotations

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class StreamBody:
    """The body of an answer without content-length."""

    def __init__(self, cycle: RequestResponseCycle, *, chunked: bool) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._flow = cycle.flow
        self._chunked = chunked

    def begin(self) -> None:
        """Before the answer's start. A client of HTTP/1.0 knows no chunks: the body ends with the connection."""
        if not self._chunked:
            self._cycle.chunked_encoding = False

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
