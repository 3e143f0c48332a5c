"""A drain answers the requests it has, refuses new ones, and closes no connection without an answer."""

from __future__ import annotations

import json
import os
import resource
import socket
from collections.abc import Callable
from typing import Any

import pytest
from api_harness import RawClient, RunningServer
from fake_engine import answer, prompt_text, wait_until

from minisgl.message.packed_ids import pack_ids
from minisgl.message.to_api import OutputDelta, OutputDeltas
from minisgl.message.to_tokenizer import Generate

HELD = {"prompt": "hold", "max_tokens": 2}
Start = Callable[..., RunningServer]


def post(client: RawClient, body: dict[str, Any], *, cut: int = 0) -> bytes:
    """Send a request, but for the last `cut` bytes of its body, which are returned."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
    client.socket.sendall(head.encode() + data[: len(data) - cut])
    return data[len(data) - cut :]


def finish(server: RunningServer, text: str = "late") -> None:
    """Let the engine give everything that is held its one and last token."""
    for generate in server.engine.of_type(Generate):
        if prompt_text(generate.prompt) == "hold":
            (seq_id,) = generate.seq_ids
            server.engine.say(OutputDeltas([OutputDelta(seq_id, pack_ids([1]), text, "length", 1)]))


def test_a_drain_refuses_what_comes_and_answers_what_was_there(start_server: Start) -> None:
    server = start_server()
    stream, whole, streamed_later = (RawClient(server.port) for _ in range(3))
    post(stream, {"prompt": "endless", "stream": True, "max_tokens": 100_000})
    head = stream.read_until(b"data: ")
    post(whole, HELD)
    post(streamed_later, {**HELD, "stream": True})  # held before its first token
    server.engine.wait_for(Generate, 3)
    server.call(server.drain.begin)
    for path in ("/health", "/ready", "/ping", "/v1/models", "/nowhere"):
        refused = server.get(path)
        assert refused.status_code == 503, path
        assert int(refused.headers["retry-after"]) > 0
        assert refused.headers["connection"] == "close"
        assert refused.json()["error"]["code"] == "shutting_down"
    refused = server.post("/v1/completions", json={"prompt": "new"})
    assert (refused.status_code, refused.headers["connection"]) == (503, "close")
    assert "x-should-retry" not in refused.headers, "the clients of OpenAI may try again, elsewhere"
    assert server.get("/metrics").status_code == 200
    assert not server.drained.is_set()
    assert len(server.engine.of_type(Generate)) == 3, "refused requests do not reach the engine"
    name = json.loads(head.partition(b"data: ")[2].partition(b"\n")[0] or stream.read_until(b"\n").partition(b"\n")[0])
    finish(server)
    assert b'"late"' in streamed_later.read_all()
    assert b'"late"' in whole.read_all(), "the connection closes after the answer"
    assert not server.drained.is_set()
    assert server.post("/abort", json={"request_id": name["id"]}).json() == {"aborted": 1}
    assert b"request_aborted" in stream.read_all()
    assert server.drained.wait(60)


def test_a_drain_closes_connections_only_after_their_answers(start_server: Start) -> None:
    """A connection that is closed while a request is on its way costs that request an answer."""
    server = start_server()
    client = RawClient(server.port)
    post(client, {"prompt": "abc", "max_tokens": 2})
    answered = client.read_until(b"usage")
    assert b"connection: close" not in answered
    while not answered.endswith(b"}}"):
        answered += client.socket.recv(65536)
    server.call(server.drain.begin)
    assert server.drained.wait(60)
    post(client, {"prompt": "abc"})
    refused = client.read_all()  # up to the close
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b"connection: close" in refused


def test_a_request_whose_body_is_on_its_way_when_the_drain_begins_is_answered(start_server: Start) -> None:
    server = start_server()
    client = RawClient(server.port)
    rest = post(client, {"prompt": "abc", "max_tokens": 2}, cut=10)
    wait_until(lambda: server.drain.num_requests == 1)
    server.call(server.drain.begin)
    client.socket.sendall(rest)
    answered = client.read_all()
    assert json.dumps(answer("abc", 0, 2), ensure_ascii=False).encode() in answered
    assert server.drained.wait(60)


def test_at_the_end_every_request_gets_an_error_and_none_a_bare_cut(start_server: Start) -> None:
    """A stream, a whole answer, a stream without a token, a question to a tokenizer, and half a body."""
    server = start_server()
    stream, whole, first, half = (RawClient(server.port) for _ in range(4))
    question = RawClient(server.port)
    post(stream, {"prompt": "endless", "stream": True, "max_tokens": 100_000})
    stream.read_until(b"data: ")
    post(whole, HELD)
    post(first, {"prompt": "silent", "stream": True})
    post(half, HELD, cut=10)
    question.post("/tokenize", {"prompt": "silent"})
    server.engine.wait_for(Generate, 3)
    wait_until(lambda: server.drain.num_requests == 5)

    server.end("the time is up")
    streamed = stream.read_all()
    assert streamed.rpartition(b"data: {")[2].startswith(b'"error":{"message":"the server is shutting down: the time')
    assert streamed.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    for client in (whole, first, half, question):
        refused = client.read_all()
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in refused
        assert b"the server is shutting down: the time is up" in refused
    assert server.drained.wait(60)


def test_clients_wait_when_no_more_files_may_be_opened(start_server: Start, caplog: pytest.LogCaptureFixture) -> None:
    """asyncio's own server closes such clients without a byte, or stops accepting without a message."""
    server = start_server()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients = [socket.socket() for _ in range(8)]  # made before, because they are files of this process, too
    body = b'{"prompt": "abc", "max_tokens": 2}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: [::]\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
    fillers = _fill()
    try:
        for client in clients:
            client.settimeout(60)
            client.connect(("127.0.0.1", server.port))
            client.sendall(head + body)
        wait_until(lambda: server.client.metrics.failed_accepts > 1)
        for client in clients:
            client.setblocking(False)
            with pytest.raises(BlockingIOError):  # no answer and no end of the connection
                client.recv(1)
            client.settimeout(60)
    finally:
        for filler in fillers:
            os.close(filler)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for client in clients:
        received = b""
        while data := client.recv(65536):
            received += data
        assert received.startswith(b"HTTP/1.1 200 ")
        client.close()
    assert "a connection must wait: Too many open files" in caplog.text
    counts = [line for line in server.get("/metrics").text.splitlines() if line.startswith("minisgl:failed_accepts")]
    assert float(counts[0].split()[-1]) > 1


def _fill() -> list[int]:
    """Open files until there may be no more."""
    opened = []
    while True:
        try:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            return opened
