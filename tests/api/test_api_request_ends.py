"""However a request ends, it ends once and leaves nothing: answers, aborts, slow clients, errors, shutdown."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
from api_harness import MODEL, RawClient, RunningServer
from api_sse import parse_events
from fake_engine import answer, wait_until
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from minisgl.core import ErrorCause
from minisgl.message.packed_ids import pack_ids
from minisgl.message.shared import Abort
from minisgl.message.to_api import Accepted, OutputDelta, OutputDeltas
from minisgl.message.to_tokenizer import Generate
from minisgl.server.api.answers.answer import Answer, Writer
from minisgl.server.api.requests.open_request import Job, OpenRequest

CHAT = "/v1/chat/completions"


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def check_aborted_once(server: RunningServer) -> None:
    """Every sequence that was sent was aborted, once, and nothing of it is left."""
    seq_ids = [seq_id for generate in server.engine.of_type(Generate) for seq_id in generate.seq_ids]
    assert seq_ids
    server.assert_idle()

    def aborted() -> list[int]:
        return [seq_id for abort in server.engine.of_type(Abort) for seq_id in abort.seq_ids]

    wait_until(lambda: len(aborted()) >= len(seq_ids))
    time.sleep(0.05)  # for one too many
    assert sorted(aborted()) == sorted(seq_ids)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_client_leaves_while_waiting_for_tokens(server: RunningServer, stream: bool, reset: bool) -> None:
    client = RawClient(server.port)
    client.post(CHAT, chat("hold", stream=stream, n=3))
    server.engine.wait_for(Generate)
    client.leave(reset=reset)
    check_aborted_once(server)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/generate"])
@pytest.mark.parametrize("reset", [False, True])
def test_client_leaves_in_the_middle_of_a_stream(server: RunningServer, path: str, reset: bool) -> None:
    client = RawClient(server.port)
    client.post(path, {**chat("endless"), "prompt": "endless", "stream": True})
    client.read_until(b"data: ")
    client.leave(reset=reset)
    check_aborted_once(server)


def test_client_leaves_a_whole_answer_that_is_being_made(server: RunningServer) -> None:
    client = RawClient(server.port)
    client.post(CHAT, chat("endless"))
    server.engine.wait_for(Generate)
    client.leave()
    check_aborted_once(server)


@pytest.mark.parametrize("stream", [False, True])
def test_client_leaves_before_its_prompt_is_tokenized(server: RunningServer, stream: bool) -> None:
    client = RawClient(server.port)
    client.post(CHAT, chat("silent", stream=stream))
    server.engine.wait_for(Generate)
    client.leave()
    check_aborted_once(server)


def test_client_leaves_while_sending(server: RunningServer) -> None:
    client = RawClient(server.port)
    client.post(CHAT, chat("endless"), cut=5)
    time.sleep(0.05)
    client.leave()
    server.assert_idle()
    assert not server.engine.of_type(Generate)


def test_sdk_closes_a_stream(server: RunningServer) -> None:
    stream = server.sdk.chat.completions.create(**chat("endless"), stream=True)
    for index, _ in enumerate(stream):
        if index == 5:
            break
    stream.close()
    check_aborted_once(server)


def test_a_client_that_leaves_is_freed_by_its_end_and_by_no_poll(server: RunningServer) -> None:
    """The event loop's next turns free it: its clock stands still, so none of its timers becomes due."""
    client = RawClient(server.port)
    client.post(CHAT, chat("endless", stream=True))
    client.read_until(b"data: ")

    async def is_freed() -> bool:
        loop, deadline = asyncio.get_running_loop(), time.monotonic() + 60
        now = loop.time()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "time", lambda: now)
            client.leave()
            while server.client.counts().counts["open_sequences"] and time.monotonic() < deadline:
                await asyncio.sleep(0)
        return not server.client.counts().counts["open_sequences"]

    assert server.wait_for(is_freed)
    check_aborted_once(server)


def keep_alive(body: dict[str, Any]) -> bytes:
    """A chat that others may follow on the same connection."""
    data = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (CHAT.encode(), len(data), data)


VERSION = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_leaves_that_has_asked_further(server: RunningServer, stream: bool, reset: bool) -> None:
    """The end of the connection is noticed, and pipelined requests are dropped."""
    client = RawClient(server.port)
    client.socket.sendall(keep_alive(chat("hold", stream=stream)) + VERSION * 3)
    server.engine.wait_for(Generate)
    client.leave(reset=reset)
    check_aborted_once(server)


def test_a_request_sent_before_an_answer_is_left_to_another_connection(server: RunningServer) -> None:
    """The running answer is complete, and the connection closes after it, however the bytes were cut."""
    ask = keep_alive(chat("hold", stream=True))  # its answer ends when all is sent
    sent = ask + VERSION * 2
    for cut in (len(sent), len(ask) + 3, len(ask) - 3, len(ask) + len(VERSION) + 30):
        server.engine.received.clear()
        client = RawClient(server.port)
        client.socket.sendall(sent[:cut])
        time.sleep(0.02)
        client.socket.sendall(sent[cut:])
        (generate,) = server.engine.wait_for(Generate)
        server.engine.say(OutputDeltas([OutputDelta(generate.seq_ids[0], pack_ids([1]), "text", "length")]))
        (answered,) = client.read_all().split(b"HTTP/1.1 200 OK")[1:]
        assert answered.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_requests_of_one_connection_are_answered_in_turn(server: RunningServer) -> None:
    """Each is sent when the one before is answered."""
    client = RawClient(server.port)
    for _ in range(2):
        client.socket.sendall(keep_alive(chat("one two", stream=True)))
        assert client.read_until(b"[DONE]\n\n\r\n0\r\n\r\n").startswith(b"HTTP/1.1 200 OK")
        client.socket.sendall(VERSION)
        assert b'"version"' in client.read_until(b"}")


def test_no_abort_for_what_has_ended(server: RunningServer) -> None:
    for stream in (False, True):
        assert server.post(CHAT, json=chat("x", stream=stream, n=2)).status_code == 200
    server.assert_idle()
    assert not server.engine.of_type(Abort)


@pytest.mark.parametrize("stream", [False, True])
def test_only_what_has_not_ended_is_aborted(server: RunningServer, stream: bool) -> None:
    """One prompt of the list fails: the others end with it."""
    body = {"prompt": ["fail a", "endless b", "hold c"], "stream": stream}
    response = server.post("/v1/completions", json=body)
    failed, endless, hold = (generate.seq_ids[0] for generate in server.engine.of_type(Generate))
    assert "the generation failed" in response.text
    server.assert_idle()
    (abort,) = server.engine.wait_for(Abort)
    assert abort.seq_ids == [endless, hold]
    assert failed not in abort.seq_ids


def test_engine_error_in_a_stream(server: RunningServer) -> None:
    client = RawClient(server.port)
    client.post("/generate", {"prompt": "hold", "stream": True})
    (generate,) = server.engine.wait_for(Generate)
    server.engine.say(OutputDeltas([OutputDelta(generate.seq_ids[0], pack_ids([1]), "some text")]))
    assert b" 200 OK" in client.read_until(b"some text")
    server.engine.say(OutputDeltas([OutputDelta(generate.seq_ids[0], b"", "", "error")]))
    rest = client.read_all()
    assert b'data: {"error":{"message":"the generation failed in the server","type":"server_error"' in rest
    assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    with pytest.raises(openai.APIError, match="failed"):
        list(server.sdk.chat.completions.create(**chat("fail"), stream=True))


def test_engine_error_in_a_whole_answer(server: RunningServer) -> None:
    response = server.post(CHAT, json=chat("fail"))
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "hold", "allowed_token_ids": [1], "regex": "a"}, "allowed_token_ids"),
        (
            {"text": "hold", "sampling_params": {"allowed_token_ids": [1], "regex": "a"}},
            "sampling_params.allowed_token_ids",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_the_allowed_ids_exclude(
    server: RunningServer, stream: bool, body: dict[str, Any], param: str
) -> None:
    """The client's fields contradict each other: the error says so, and asks for no retry."""
    client = RawClient(server.port)
    client.post("/generate", {**body, "stream": stream})
    (generate,) = server.engine.wait_for(Generate)
    server.engine.say(OutputDeltas([OutputDelta(generate.seq_ids[0], b"", "", "error", cause="no_allowed_token")]))
    rest = client.read_all()
    assert f'"{param} have no token that can follow the grammar'.encode() in rest
    assert f'"type":"invalid_request_error","param":"{param}"'.encode() in rest
    if not stream:
        assert b" 400 Bad Request" in rest
        assert b"x-should-retry: false" in rest


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {"text": "hold", "sampling_params": {"regex": "a"}}, "sampling_params.regex"),
        (CHAT, chat("hold", response_format={"type": "json_object"}), "response_format"),
        ("/v1/completions", {"prompt": "hold", "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
@pytest.mark.parametrize(
    ("cause", "message"),
    [
        ("grammar_too_large", r"needs too much memory .* the limit of 2 GiB"),
        ("grammar_unusable", "cannot be followed with the tokenizer of this model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_fails_in_the_engine(
    server: RunningServer, stream: bool, cause: ErrorCause, message: str, path: str, body: dict[str, Any], param: str
) -> None:
    client = RawClient(server.port)
    client.post(path, {**body, "stream": stream})
    (generate,) = server.engine.wait_for(Generate)
    server.engine.say(OutputDeltas([OutputDelta(generate.seq_ids[0], b"", "", "error", cause=cause)]))
    rest = client.read_all()
    assert re.search(f'"{re.escape(param)} gave a grammar that {message}', rest.decode())
    assert f'"type":"invalid_request_error","param":"{param}"'.encode() in rest
    assert stream or b" 400 Bad Request" in rest


@pytest.mark.parametrize("stream", [False, True])
def test_abort_by_the_engine_is_an_error(server: RunningServer, stream: bool) -> None:
    client = RawClient(server.port)
    client.post(CHAT, chat("hold", stream=stream))
    (generate,) = server.engine.wait_for(Generate)
    server.engine.say(OutputDeltas([OutputDelta(generate.seq_ids[0], b"", "", "abort")]))
    assert b'"error"' in client.read_all()
    server.assert_idle()
    assert not server.engine.of_type(Abort)


def test_late_pieces_are_dropped_and_counted(server: RunningServer) -> None:
    dropped = server.counts()["dropped_pieces"]
    late = [OutputDelta(10**9, pack_ids([1]), "x"), OutputDelta(10**9 + 1, pack_ids([1]), "x", "stop")]
    server.engine.say(OutputDeltas(late))
    wait_until(lambda: server.counts()["dropped_pieces"] == dropped + 2)
    server.assert_idle()


def test_pieces_may_overtake_accepted(server: RunningServer) -> None:
    """The two come from different processes in any order: the answer is complete in both."""
    for stream in (False, True):
        server.engine.received.clear()
        client = RawClient(server.port)
        client.post(CHAT, chat("silent", stream=stream, stream_options={"include_usage": True} if stream else None))
        (generate,) = server.engine.wait_for(Generate)
        server.engine.say(OutputDeltas([OutputDelta(generate.seq_ids[0], pack_ids([1]), "text", "stop", 2)]))
        time.sleep(0.02)
        server.engine.say(Accepted(generate.seq_ids, pack_ids([1, 2, 3])))
        data = client.read_all()
        assert b"text" in data
        assert b'"prompt_tokens":3' in data
        assert b'"cached_tokens":2' in data


def test_too_many_sequences(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(max_queued_requests=4)
    clients = [RawClient(server.port) for _ in range(2)]
    for client in clients:
        client.post(CHAT, chat("hold", n=2))
    server.engine.wait_for(Generate, 2)
    refused = server.post(CHAT, json=chat("x", stream=True))
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "overloaded"
    assert server.get("/health").status_code == 200
    for client in clients:
        client.leave()
    server.assert_idle()
    assert server.post(CHAT, json=chat("x", n=4)).status_code == 200
    never = server.post(CHAT, json=chat("x", n=5))
    assert (never.status_code, never.json()["error"]["param"]) == (400, "n")


def test_a_slow_client_gets_merged_events_and_blocks_no_other(server: RunningServer) -> None:
    """The tokens of a client that does not read wait as one delta, and it gets all of them in the end."""
    slow = RawClient(server.port, receive_buffer=2**16)
    num_tokens = 160
    slow.post(CHAT, chat("big", stream=True, max_tokens=num_tokens))  # 16 MB: more than any socket buffer holds
    server.engine.wait_for(Generate)
    quick = server.post(CHAT, json=chat("quick", stream=True, max_tokens=50))
    deltas = [chunk["choices"][0]["delta"] for chunk in parse_events(quick.text)]
    assert "".join(delta.get("content", "") for delta in deltas) == answer("quick", 0, 50)
    wait_until(lambda: server.counts()["open_sequences"] == 0)  # the engine is done with it
    assert server.counts()["open_requests"] == 1
    data = slow.read_all()
    assert data.count(b"data: ") < num_tokens / 2, "tokens were merged"
    assert data.count(b"x") >= 100_000 * num_tokens, "nothing was lost"
    server.assert_idle()


def test_slow_client_leaves(server: RunningServer) -> None:
    slow = RawClient(server.port, receive_buffer=4096)
    slow.post(CHAT, chat("big", stream=True, max_tokens=400))
    server.engine.wait_for(Generate)
    time.sleep(0.2)
    slow.leave(reset=True)
    server.assert_idle()


def test_shutdown_with_open_requests(start_server: Callable[..., RunningServer]) -> None:
    server = start_server()
    streaming, held, whole = (RawClient(server.port) for _ in range(3))
    streaming.post(CHAT, chat("endless", stream=True))
    head = streaming.read_until(b"data: ")
    held.post(CHAT, chat("silent", stream=True))
    whole.post(CHAT, chat("endless"))
    server.engine.wait_for(Generate, 3)
    server.call(lambda: server.client.shut_down("a worker died"))
    data = head + streaming.read_all()
    assert b'data: {"error":{"message":"the server is shutting down: a worker died"' in data
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    for client in (held, whole):
        answered = client.read_all()
        assert b" 503 " in answered
        assert b"retry-after" in answered
        assert b"a worker died" in answered
    assert server.get("/health").status_code == 503
    assert server.post(CHAT, json=chat("x")).status_code == 503
    server.assert_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["a", "refuse", "fail", "hold"])
def test_what_has_ended_is_freed_without_the_garbage_collector(server: RunningServer, text: str, stream: bool) -> None:
    """Otherwise the objects of large bodies stay in memory until a collection, for which all streams wait."""
    body = chat(text, stream=stream, max_tokens=5)
    server.post(CHAT, json=chat("a"))  # makes what stays
    server.assert_idle()
    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(0)
    try:
        client = RawClient(server.port)
        client.post(CHAT, body)
        if text == "hold":
            server.engine.wait_for(Generate, 2)
        else:
            client.read_all()
        client.leave()
        server.assert_idle()
        kinds = (OpenRequest, Job, Answer, Writer)
        wait_until(lambda: not any(issubclass(type(one), kinds) for one in gc.get_objects()))
    finally:
        gc.set_threshold(*thresholds)


@pytest.mark.parametrize("stream", [False, True])
def test_heads_are_freed_without_the_garbage_collector(server: RunningServer, stream: bool) -> None:
    """A head may have 64 KB. Those of all answered requests stayed in memory until a collection."""
    client, data = RawClient(server.port), json.dumps(chat("a", stream=stream)).encode()
    request = b"POST %b HTTP/1.1\r\nhost: localhost\r\nx-mark: mark\r\ncontent-length: %d\r\n\r\n%b"

    def num_marked() -> int:
        cycles = [one for one in gc.get_objects() if type(one) is RequestResponseCycle]
        return sum((b"x-mark", b"mark") in cycle.scope["headers"] for cycle in cycles)

    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    try:
        for _ in range(3):
            client.socket.sendall(request % (CHAT.encode(), len(data), data))
            client.read_until(b"0\r\n\r\n" if stream else b'"usage"')
            server.assert_idle()
        wait_until(lambda: num_marked() == 0)  # although the connection is open
    finally:
        gc.set_threshold(*thresholds)


def test_200_concurrent_streams(server: RunningServer) -> None:
    """Each gets its own answer, whole."""

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300) as sdk:

            async def one(index: int) -> str:
                text = ""
                stream = await sdk.chat.completions.create(**chat(f"p{index}"), stream=True, max_tokens=20)
                async for chunk in stream:
                    for choice in chunk.choices:
                        text += choice.delta.content or ""
                return text

            return list(await asyncio.gather(*(one(index) for index in range(200))))

    assert asyncio.run(main()) == [answer(f"p{index}", 0, 20) for index in range(200)]
    server.assert_idle()
    assert not server.engine.of_type(Abort)


def test_200_cut_streams(server: RunningServer) -> None:
    clients = [RawClient(server.port) for _ in range(200)]
    for client in clients:
        client.post(CHAT, chat("endless", stream=True))
    for client in clients:
        client.read_until(b"data: ")
        client.leave(reset=True)
    check_aborted_once(server)
