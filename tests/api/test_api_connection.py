"""What stands between the socket and the application: heads and bodies in packets of any cut."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from minisgl.server.api.connection import Connection

UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUPgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
CHUNKS = b"8;a=b\r\n\r\nupgrad\r\n7\r\ne:\r\n\r\nz\r\n0\r\nx-last: 1\r\n\r\n"
Requests = list[tuple[str, bytes]]  # path, body


class Wire(asyncio.Transport):
    """Takes what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self._closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None:
        self._closing = True

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def requests_of(packets: list[bytes]) -> Requests:
    """What an application gets when these come."""
    requests: Requests = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        requests.append((scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    wire = Wire()
    connection = Connection(uvicorn.Config(app, ws="none", log_config=None), ServerState(), {}, receive_timeout=60)
    connection.connection_made(wire)
    for packet in packets:
        connection.data_received(packet)
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    connection.connection_lost(None)
    assert wire.written.count(b"HTTP/1.1 200 OK") == len(requests), wire.written
    return requests


def post(path: str, body: bytes, headers: bytes = b"") -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n%b" % (path.encode(), headers, len(body), body)


SENT = [
    (b"\r\n\r\n" + post("/1", b"\r\n\r\nupgrade: b\r\n", UPGRADE), ("/1", b"\r\n\r\nupgrade: b\r\n")),
    (b"GET /2 HTTP/1.1\r\n" + UPGRADE + b"\r\n", ("/2", b"")),
    (
        b"POST /3 HTTP/1.1\r\n" + UPGRADE + b"transfer-encoding: chunked\r\n\r\n" + CHUNKS,
        ("/3", b"\r\nupgrade:\r\n\r\nz"),
    ),
    (post("/4", b""), ("/4", b"")),
    (post("/5", b"x" * 100, UPGRADE), ("/5", b"x" * 100)),
]
WHOLE = b"".join(sent for sent, _ in SENT)
EXPECTED = [request for _, request in SENT]


def test_requests_in_one_packet() -> None:
    """An offer to speak another protocol is passed over in each of them."""
    assert asyncio.run(requests_of([WHOLE])) == EXPECTED


@pytest.mark.parametrize("size", [1, 2, 3, 5, 17])
def test_requests_in_small_packets(size: int) -> None:
    packets = [WHOLE[start : start + size] for start in range(0, len(WHOLE), size)]
    assert asyncio.run(requests_of(packets)) == EXPECTED


@settings(deadline=None)
@given(st.sets(st.integers(0, len(WHOLE))))
def test_requests_cut_anywhere(cuts: set[int]) -> None:
    packets = [WHOLE[start:end] for start, end in pairwise(sorted({0, *cuts, len(WHOLE)}))]
    assert asyncio.run(requests_of(packets)) == EXPECTED
