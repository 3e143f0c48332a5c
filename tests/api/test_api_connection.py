"""The connection between socket and application: heads and bodies in packets of any cut."""

from __future__ import annotations

import asyncio
import json
import random
import tracemalloc
from itertools import accumulate, pairwise

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from minisgl.server.api.http.connection import MAX_HEAD_BYTES, MAX_WRITE_BYTES, Connection, stream_body_of

UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUPgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
CHUNKS = b"8;a=b\r\n\r\nupgrad\r\n7\r\ne:\r\n\r\nz\r\n0\r\nx-last: 1\r\n\r\n"
Requests = list[tuple[str, bytes]]  # path, body
TIMEOUTS = {"header_timeout": 60.0, "send_timeout": 60.0}


class Wire(asyncio.Transport):
    """Takes what is written, until it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self._closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._closing:
            self.written += data

    def close(self) -> None:
        self._closing = True

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def send_all(packets: list[bytes]) -> tuple[Requests, Wire]:
    """Return what an application gets when these come, and the wire with what it writes."""
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
    connection = Connection(uvicorn.Config(app, ws="none", log_config=None), ServerState(), {}, **TIMEOUTS)
    connection.connection_made(wire)
    for packet in packets:
        connection.data_received(packet)
        for _ in range(10):  # time to answer: a client sends its next request behind the answer
            await asyncio.sleep(0)
    connection.connection_lost(None)
    return requests, wire


def requests_of(packets: list[bytes]) -> Requests:
    return asyncio.run(send_all(packets))[0]


def post(path: str, body: bytes, headers: bytes = b"") -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: a\r\n%bcontent-length: %d\r\n\r\n%b" % (
        path.encode(),
        headers,
        len(body),
        body,
    )


SENT = [
    (b"\r\n\r\n" + post("/1", b"\r\n\r\nupgrade: b\r\n", UPGRADE), ("/1", b"\r\n\r\nupgrade: b\r\n")),
    (b"GET /2 HTTP/1.1\r\nhost: a\r\n" + UPGRADE + b"\r\n", ("/2", b"")),
    (
        b"POST /3 HTTP/1.1\r\nhost: a\r\n" + UPGRADE + b"transfer-encoding: chunked\r\n\r\n" + CHUNKS,
        ("/3", b"\r\nupgrade:\r\n\r\nz"),
    ),
    (post("/4", b""), ("/4", b"")),
    (post("/5", b"x" * 100, UPGRADE), ("/5", b"x" * 100)),
]
EXPECTED = [request for _, request in SENT]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 17, 1000])
def test_requests_in_small_packets(size: int) -> None:
    """An offer to speak another protocol is passed over in each of them."""
    packets = [sent[start : start + size] for sent, _ in SENT for start in range(0, len(sent), size)]
    assert requests_of(packets) == EXPECTED


@settings(deadline=None)
@given(st.sets(st.integers(0, sum(len(sent) for sent, _ in SENT))))
def test_requests_cut_anywhere(cuts: set[int]) -> None:
    whole = b"".join(sent for sent, _ in SENT)
    ends = {0, *accumulate(len(sent) for sent, _ in SENT)}
    packets = [whole[start:end] for start, end in pairwise(sorted(ends | cuts))]
    assert requests_of(packets) == EXPECTED


@settings(deadline=None)
@given(st.integers(1, len(SENT[3][0])))
def test_bytes_sent_before_an_answer_are_never_read(length: int) -> None:
    """The bytes are neither a request nor an error, and the connection closes after the answer."""
    for early in (SENT[3][0][:length], b"hello\r\n\r\n"[:length], b"\r\nGET"[:length] + b"a" * 2 * MAX_HEAD_BYTES):
        requests, wire = asyncio.run(send_all([SENT[4][0] + early, b"x" * 100, *[sent for sent, _ in SENT]]))
        assert requests == EXPECTED[4:]
        assert wire.is_closing()
        head, _, rest = wire.written.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nconnection: close" in head
        assert not rest


def test_empty_lines_without_end_before_the_answer() -> None:
    wire = asyncio.run(send_all([SENT[4][0] + b"\r\n" * MAX_HEAD_BYTES]))[1]
    assert wire.written.count(b"HTTP/1.1 ") == wire.written.count(b"HTTP/1.1 200 ") == 1
    assert wire.is_closing()


def test_no_proxy() -> None:
    requests, wire = asyncio.run(send_all([b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n"]))
    assert not requests
    assert wire.written.startswith(b"HTTP/1.1 400 ")
    assert wire.is_closing()


CHUNKED = b"POST /1 HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nx: "
OPEN_ENDED = {
    "value": [b"GET /1 HTTP/1.1\r\nhost: a\r\nx: "],
    "path": [b"GET /"],
    "second": [b"GET /0 HTTP/1.1\r\nhost: a\r\n\r\n", b"GET /1 HTTP/1.1\r\nhost: a\r\nx: "],
    "behind a body": [post("/0", b"abc"), b"GET /1 HTTP/1.1\r\nhost: a\r\nx: "],
    "trailer": [CHUNKED],
}


@pytest.mark.parametrize("size", [1000, 2**18])
@pytest.mark.parametrize("begin", OPEN_ENDED.values(), ids=OPEN_ENDED)
def test_heads_without_end(begin: list[bytes], size: int) -> None:
    """Refused before much of them is kept."""
    wire = asyncio.run(send_all([*begin, *[b"a" * size] * (2**20 // size)]))[1]
    assert wire.is_closing()
    head, _, body = wire.written[wire.written.index(b"HTTP/1.1 431 ") :].partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head
    assert b"content-length: %d" % len(body) in head
    assert json.loads(body)["error"]["code"] == "head_too_large"
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_many_header_lines() -> None:
    requests, wire = asyncio.run(send_all([b"GET /1 HTTP/1.1\r\nhost: a\r\n", *[b"a: b\r\n" * 1000] * 30, b"\r\n"]))
    assert not requests
    assert wire.written.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("more", [0, 1])
def test_the_largest_head(more: int) -> None:
    """The head arrives in one packet or in several, between other requests."""
    head = b"POST /1 HTTP/1.1\r\nhost: a\r\ncontent-length: 70000\r\nx: "
    head += b"a" * (MAX_HEAD_BYTES - len(head) - 4 + more) + b"\r\n\r\n"
    sent = [post("/0", b"x" * 70_000), head + b"y" * 70_000, post("/2", b"z")]
    bodies = [("/0", b"x" * 70_000), ("/1", b"y" * 70_000), ("/2", b"z")]
    for size in (2**20, 10_000, 1999):
        packets = [one[start : start + size] for one in sent for start in range(0, len(one), size)]
        assert requests_of(packets) == bodies[: 1 if more else 3]


def test_chunks_have_no_limit_together() -> None:
    """Together, what is between them may be more than a head may have."""
    head = b"POST /1 HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    assert requests_of([head, *[b"1\r\nx\r\n" * 1000] * 30, b"0\r\n\r\n"]) == [("/1", b"x" * 30_000)]


def test_a_refusal_is_not_taken_for_another_answer() -> None:
    """A refusal is sent after the answer to the request before it."""
    for begin, status in (
        (b"hello\r\n\r\n", b"400"),
        (b"GET /2 HTTP/1.1\r\nhost: a\r\nx: " + b"a" * MAX_HEAD_BYTES, b"431"),
    ):
        wire = asyncio.run(send_all([b"GET /1 HTTP/1.1\r\nhost: a\r\n\r\n", begin]))[1]
        assert wire.is_closing()
        assert [answer[:3] for answer in wire.written.split(b"HTTP/1.1 ")[1:]] == [b"200", status]


@pytest.mark.parametrize("body", [b"", bytes(20_000)])
def test_idle_connections_keep_no_request(body: bytes) -> None:
    head = b"GET /%b HTTP/1.1\r\nhost: a\r\nx: %b\r\ncontent-length: %d\r\n\r\n"
    request = head % (b"u" * 20_000, b"x" * 40_000, len(body)) + body

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def main() -> None:
        config, connections = uvicorn.Config(app, ws="none", log_config=None), []
        for _ in range(20):
            connection = Connection(config, ServerState(), {}, **TIMEOUTS)
            connections.append(connection)
            connection.connection_made(Wire())
            for _ in range(2):
                connection.data_received(request[:70_000])
                connection.data_received(request[70_000:])
                for _ in range(10):
                    await asyncio.sleep(0)
        used, _ = tracemalloc.get_traced_memory()
        assert used < len(connections) * 20_000
        assert b"".join(one.transport.written for one in connections).count(b" 200 OK") == 40

    tracemalloc.start()
    try:
        asyncio.run(main())
    finally:
        tracemalloc.stop()


def test_a_large_part_of_a_body_is_written_in_slices_between_which_others_get_their_turn() -> None:
    """Nothing is written while the client does not read."""
    data = random.Random(0).randbytes(3 * MAX_WRITE_BYTES + 5)
    turns: list[int] = [0]  # bytes that were written at each turn of another task
    paused_at = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        body = stream_body_of(scope)
        body.begin()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await body.write_large(data, b"end")
        await send({"type": "http.response.body", "body": b""})

    async def main() -> bytes:
        nonlocal paused_at
        wire = Wire()
        connection = Connection(uvicorn.Config(app, ws="none", log_config=None), ServerState(), {}, **TIMEOUTS)
        connection.connection_made(wire)
        connection.data_received(b"GET / HTTP/1.0\r\nhost: a\r\n\r\n")
        while not wire.is_closing():
            await asyncio.sleep(0)
            turns.append(len(wire.written))
            if not paused_at and len(wire.written) > MAX_WRITE_BYTES:
                connection.pause_writing()
                await asyncio.sleep(0)
                turns.append(len(wire.written))
                paused_at = len(wire.written)
                for _ in range(20):
                    await asyncio.sleep(0)
                assert len(wire.written) == paused_at
                connection.resume_writing()
        connection.connection_lost(None)
        return wire.written

    written = asyncio.run(main())
    assert written.endswith(b"\r\n\r\n" + data + b"end")
    assert max(after - before for before, after in pairwise(turns)) < 2 * MAX_WRITE_BYTES
    assert paused_at < len(data)
