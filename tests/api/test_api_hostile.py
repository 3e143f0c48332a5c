"""Bodies made to hold the server up: how long the event loop, and with it every stream, stands still for one."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
from api_harness import RawClient, RunningServer
from fake_engine import LIMITS, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from minisgl.config import HttpConfig
from minisgl.message.logprobs import PositionLogprobs
from minisgl.message.to_tokenizer import Generate
from minisgl.server.api.answers import answer, chat_writer, completions
from minisgl.server.api.answers.chat_writer import ChatMessage, message_of
from minisgl.server.api.answers.large_json import slices
from minisgl.server.api.answers.logprob_forms import ChatLogprob, chat_logprob
from minisgl.server.api.answers.writer_thread import WriterThread
from minisgl.server.api.api_process import COLLECT_AFTER
from minisgl.server.api.bodies.parsing_turns import BYTES_AT_ONCE, ParsingTurns
from minisgl.server.api.bodies.read_body import MAX_ITEMS, MAX_VALUES, BodyScan, check_numbers, read_fields
from minisgl.server.api.http.errors import ApiError
from minisgl.server.api.http.middleware import SMALL_BODY
from minisgl.server.api.requests.open_request import SMALL_LOGPROBS, SMALL_TOKENS
from minisgl.server.api.responses import writer
from minisgl.server.api.routes import service

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
LARGEST = HttpConfig().max_body_bytes
LONGEST_TURN = 0.15  # seconds of CPU: the aim is 0.05, of a core that has not seven others' work beside it


class Turns:
    """CPU time of the longest callback that an event loop has run, of any loop but one in the main thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.longest = 0.0
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            begin = time.thread_time()
            run(handle)
            if threading.current_thread() is not threading.main_thread():
                self.longest = max(self.longest, time.thread_time() - begin)

        monkeypatch.setattr(asyncio.Handle, "_run", timed)

    def of(self, server: RunningServer) -> float:
        """Return the longest up to now, with the turn that sent the last answer, which may not have ended before."""
        longest: float = server.call(lambda: self.longest)
        return longest


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Turns]:
    """Have the garbage collector as the server's process has it."""
    threshold = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    yield Turns(monkeypatch)
    gc.set_threshold(*threshold)
    gc.unfreeze()


def filled(before: str, item: str, after: str, size: int = LARGEST) -> bytes:
    """A body of this size: as many items as fit."""
    count = (size - len(before) - len(after)) // (len(item) + 1)
    return (before + ",".join([item] * count) + after).encode()


MESSAGE = '{"messages":[{"role":"user","content":"hello"}],'
TOO_MANY = {
    "arrays in metadata": (CHAT, MESSAGE + '"metadata":[', "[]", "]}"),
    "arrays around numbers": (CHAT, MESSAGE + '"metadata":[', "[1]", "]}"),
    "objects": (CHAT, MESSAGE + '"chat_template_kwargs":{"a":[', '{"a":1}', "]}}"),
    "numbers": (CHAT, MESSAGE + '"user":[', "1.5", "]}"),
    "nulls": (CHAT, "{" + '"metadata":[', "null", "]}"),
    "names": (CHAT, "{", '"a":null', "}"),
    "messages": (CHAT, '{"messages":[', '{"role":"user","content":"a"}', "]}"),
    "tools": (CHAT, MESSAGE + '"tools":[', '{"type":"function","function":{"name":"a"}}', "]}"),
    "content parts": (CHAT, '{"messages":[{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}"),
    "tool calls": (CHAT, '{"messages":[{"role":"assistant","tool_calls":[', '{"function":{"name":"f"}}', "]}]}"),
    "biases": (CHAT, MESSAGE + '"logit_bias":{', '"1":1', "}}"),
    "stop strings": (CHAT, MESSAGE + '"stop":[', '"a"', "]}"),
    "prompts": (COMPLETIONS, '{"prompt":[', '"a"', "]}"),
    "prompts of ids": (COMPLETIONS, '{"prompt":[', "[1]", "]}"),
    "ids": (COMPLETIONS, '{"prompt":[', "1", "]}"),
    "allowed ids": (COMPLETIONS, '{"prompt":"a","allowed_token_ids":[', "12345", "]}"),
    "ids to generate from": ("/generate", '{"input_ids":[', "1", "]}"),
    "sampling parameters": ("/generate", '{"text":"a","sampling_params":{"a":[', "[]", "]}}"),
    "messages to tokenize": ("/tokenize", '{"messages":[', '{"role":"user","content":"a"}', "]}"),
    "ids to decode": ("/detokenize", '{"tokens":[', "1", "]}"),
    "ids to abort": ("/abort", '{"request_ids":[', '"a"', "]}"),
    "what is no JSON": (CHAT, "{", '"\\"a" [ ', "}"),
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_a_body_of_too_many_values_is_refused_without_stopping_the_streams(
    start_server: Callable[..., RunningServer], turns: Turns, name: str
) -> None:
    path, *parts = TOO_MANY[name]
    server = start_server()
    response = server.post(path, content=filled(*parts))
    assert response.status_code == 413, response.text
    error = response.json()["error"]
    assert error["code"] == "request_too_large"
    assert f"{MAX_VALUES} strings" in error["message"] or f"{MAX_ITEMS} list items" in error["message"]
    assert 0 < turns.of(server) < LONGEST_TURN


def distinct(count: int) -> Iterator[str]:
    return (f"{index:06}" for index in range(count))


def tools_of_which_one_is_allowed(count: int, *, nested: bool = True) -> dict[str, Any]:
    """Fields with tools, of which the last one is allowed as often, in the form of chats or of responses."""
    functions = [{"name": name} for name in distinct(count)]
    tools = [{"type": "function", **({"function": one} if nested else one)} for one in functions]
    allowed = {"mode": "auto", "tools": [tools[-1]] * count}
    choice = {"type": "allowed_tools", **({"allowed_tools": allowed} if nested else allowed)}
    return {"tools": tools, "tool_choice": choice}


MOST_VALUES = MAX_VALUES - 100
MOST: dict[str, tuple[str, Any]] = {
    "ids": (COMPLETIONS, {"prompt": [1] * MAX_ITEMS}),
    "prompts of ids": (COMPLETIONS, {"prompt": [[1] * 31] * 8192}),
    "8192 answers": (COMPLETIONS, {"prompt": ["a"] * 8192, "return_token_ids": True, "prompt_logprobs": 2}),
    "numbers": (CHAT, {"metadata": [123456] * (MAX_ITEMS - 10)}),
    "a large number among others": (CHAT, {"metadata": [1] * (MAX_ITEMS - 10) + [2**70]}),
    "names": (CHAT, {"metadata": dict.fromkeys(distinct(MOST_VALUES), 1)}),
    "fields": (CHAT, dict.fromkeys(distinct(MOST_VALUES), 1)),
    "arrays": (CHAT, {"metadata": [[]] * MOST_VALUES}),
    "biases": (CHAT, {"logit_bias": dict.fromkeys(distinct(MOST_VALUES), 1)}),
    "stop strings": (CHAT, {"stop": list(distinct(MOST_VALUES))}),
    "a schema": (CHAT, {"guided_json": dict.fromkeys(distinct(MOST_VALUES), 1)}),
    "messages": (CHAT, {"messages": [{"role": "user", "content": "a"}] * 8192}),
    "tool calls": (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 13_000}]}),
    "content parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 13_000}]}),
    "allowed ids": (COMPLETIONS, {"allowed_token_ids": [1] * (MAX_ITEMS - 10)}),
    "allowed tools": (CHAT, tools_of_which_one_is_allowed(4600)),
    "allowed tools of a response": (RESPONSES, tools_of_which_one_is_allowed(6400, nested=False)),
    "reasoning": (RESPONSES, {"input": [{"type": "reasoning", "content": "x" * 970}] * 8192}),
    "ids to decode": ("/detokenize", {"tokens": [1] * MAX_ITEMS}),
    "numbers for messages": (CHAT, {"messages": [0] * (MAX_ITEMS - 10)}),
    "fractions for ids": ("/generate", {"input_ids": [1.5] * (MAX_ITEMS - 10)}),
    "numbers for choices": (CHAT, {"structured_outputs": {"choice": [0] * (MAX_ITEMS - 10)}}),
    "escapes": (COMPLETIONS, {"prompt": "\\\n" * (LARGEST // 4 - 100)}),
    "escaped characters": (COMPLETIONS, {"prompt": "字" * (LARGEST // 6 - 100)}),
}


@pytest.mark.parametrize("name", MOST)
def test_the_largest_body_that_is_read_does_not_stop_the_streams(
    start_server: Callable[..., RunningServer], turns: Turns, name: str
) -> None:
    path, fields = MOST[name]
    server = start_server()
    base: dict[str, Any] = {
        CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1},
        COMPLETIONS: {"prompt": "hello", "max_tokens": 1},
        RESPONSES: {"input": "hello", "max_output_tokens": 1},
    }.get(path, {})
    response = server.post(path, json=base | fields)
    assert response.status_code in (200, 400), response.text
    assert 0 < turns.of(server) < LONGEST_TURN


CHAT_BODY = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
of_log_probabilities = pytest.mark.parametrize(
    ("path", "body"), [(CHAT, CHAT_BODY), (COMPLETIONS, {"prompt": "a", "logprobs": 20})]
)


@of_log_probabilities
def test_a_whole_answer_with_many_log_probabilities_does_not_stop_the_streams(
    start_server: Callable[..., RunningServer], turns: Turns, path: str, body: dict[str, Any]
) -> None:
    server = start_server()
    response = server.post(path, json=body | {"n": 64, "max_tokens": 800})
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 64 * 800
    assert 0 < turns.of(server) < LONGEST_TURN


@of_log_probabilities
def test_log_probabilities_that_a_client_reads_late_do_not_stop_other_streams(
    start_server: Callable[..., RunningServer], turns: Turns, path: str, body: dict[str, Any]
) -> None:
    """All that has come meanwhile is written at once."""
    server = start_server()
    client = RawClient(server.port, receive_buffer=4096)
    client.post(path, body | {"n": 64, "max_tokens": 800, "stream": True})
    client.read_until(b"data: ")
    wait_until(lambda: server.counts()["open_sequences"] == 0)
    data = client.read_all()
    assert data.count(b'"finish_reason":"length"') == 64
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    client.leave()
    assert 0 < turns.of(server) < LONGEST_TURN


def parsed_together(server: RunningServer, monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> list[tuple[int, int]]:
    """Send bodies of these sizes whose ends come at the same time; return turn and size of each as they are parsed."""
    turn, parsed, over = 0, [], False

    def count_turn() -> None:
        nonlocal turn
        turn += 1
        if not over:
            server._loop.call_soon(count_turn)

    def read(data: bytearray) -> dict[str, Any]:
        parsed.append((turn, len(data)))
        return read_fields(data)

    monkeypatch.setattr(service, "read_fields", read)
    clients = [RawClient(server.port) for _ in sizes]
    for client, size in zip(clients, sizes, strict=True):
        client.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "user": "x" * size}, cut=1)

    def send_ends() -> None:
        count_turn()
        for client in clients:
            client.socket.sendall(b"}")

    server.call(send_ends)
    for client in clients:
        assert b" 200 " in client.read_all()
        client.leave()
    over = True
    return parsed


def test_large_bodies_that_arrive_together_are_parsed_in_turns_of_their_own(
    start_server: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [turn for turn, _ in parsed_together(start_server(), monkeypatch, [100_000] * 20)]
    assert len(set(turns)) == 20


def test_of_small_bodies_that_arrive_together_a_turn_parses_a_few(
    start_server: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = parsed_together(start_server(), monkeypatch, [60_000] * 20 + [100] * 40)
    bytes_of_turn: Counter[int] = Counter()
    for turn, size in parsed:
        bytes_of_turn[turn] += size
    assert max(bytes_of_turn.values()) <= 2 * BYTES_AT_ONCE
    assert len(bytes_of_turn) < 20  # with one in a turn they would wait as long as some turns of large bodies take


def test_small_bodies_do_not_wait_for_large_ones(
    start_server: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = parsed_together(start_server(), monkeypatch, [100_000] * 20 + [100] * 20)
    assert sum(size < 1000 for _, size in parsed[:24]) == 20


def test_bodies_whose_clients_have_left_hold_up_no_others() -> None:
    async def parse_some() -> list[int]:
        turns, parsed = ParsingTurns(), []

        async def parse(number: int) -> None:
            async with turns.of(SMALL_BODY):
                parsed.append(number)

        tasks = [asyncio.create_task(parse(number)) for number in range(20)]
        await asyncio.sleep(0)
        for task in tasks[2:18]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return parsed

    assert asyncio.run(parse_some()) == [0, 1, 18, 19]


def until(event: threading.Event) -> Callable[[], bytes]:
    """Return an answer that has no pieces, and ends after the event."""

    def write() -> bytes:
        event.wait()
        return b""

    return write


def test_an_answer_does_not_wait_for_a_larger_one(start_server: Callable[..., RunningServer]) -> None:
    """It is written between two pieces of the larger one, which may take 20 s."""
    may_end = threading.Event()

    def values() -> Iterator[int]:
        while not may_end.is_set():
            yield 0

    def write_large() -> bytes:
        assert all(slices(values()))
        return b"large"

    server = start_server(tick=0.0)
    large = server.write_in_thread(write_large)
    try:
        wait_until(lambda: server.writer_thread._is_interruptible)
        choice = server.post(CHAT, json=CHAT_BODY | {"max_tokens": 300}).json()["choices"][0]
        assert len(choice["logprobs"]["content"]) == 300
        assert not large.done()
    finally:
        may_end.set()
    assert large.result(120) == b"large"


def test_a_large_response_lets_others_pass(
    start_server: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    server = start_server(tick=0.0)

    def write_one(position: PositionLogprobs) -> ChatLogprob:
        if not order:
            server.writer_thread._small.append(lambda: order.append("other"))
        order.append("token")
        return chat_logprob(position)

    monkeypatch.setattr(writer, "chat_logprob", write_one)
    monkeypatch.setattr(answer, "LARGE_LOGPROBS", SMALL_LOGPROBS)
    body = {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 20, "max_output_tokens": 300}
    assert server.post(RESPONSES, json=body).status_code == 200
    assert order[:2] == ["token", "other"]
    assert order.count("token") == 300


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_whose_client_has_left_is_not_written(
    start_server: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """It may have waited long for the thread."""
    written: list[int] = []
    monkeypatch.setattr(completions, "encode_large", lambda _: written.append(1) or b"")
    monkeypatch.setattr(completions, "server_sent_event", lambda _: written.append(1) or b"")
    server = start_server(tick=0.0)
    may_end = threading.Event()
    running = server.write_in_thread(until(may_end))
    client = RawClient(server.port)
    body = {"prompt": "a " * 5000, "logprobs": 2, "echo": True, "max_tokens": 1}
    try:
        client.post(COMPLETIONS, body | {"stream": stream})
        wait_until(lambda: len(server.writer_thread._small) == 1)
        client.leave()
        wait_until(lambda: server.call(lambda: all(one.has_failed for one in server.client._open)))
    finally:
        may_end.set()
    assert running.result(120) == b""
    wait_until(lambda: server.counts()["open_requests"] == 0)
    assert not written


def test_the_calls_of_a_long_answer_are_parsed_in_a_thread(
    start_server: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[type[threading.Thread]] = []

    def message(*args: Any) -> ChatMessage:
        threads.append(type(threading.current_thread()))
        return message_of(*args)

    monkeypatch.setattr(chat_writer, "message_of", message)
    server = start_server(tick=0.0)
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": SMALL_TOKENS + 1}
    assert server.post(CHAT, json=body).json()["usage"]["completion_tokens"] == SMALL_TOKENS + 1
    assert threads == [WriterThread]


def test_a_streamed_response_waits_for_no_thread_before_its_end(start_server: Callable[..., RunningServer]) -> None:
    """Only its last events repeat its log-probabilities. The thread is busy with the answers of others."""
    server = start_server(tick=0.0)
    body = {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 20, "max_output_tokens": 4000}
    may_end = threading.Event()
    try:
        server.write_in_thread(until(may_end))
        with server.stream(RESPONSES, json=body | {"stream": True}) as response:
            deltas = (line for line in response.iter_lines() if line == "event: response.output_text.delta")
            assert len(list(islice(deltas, 1000))) == 1000
    finally:
        may_end.set()


def test_a_streamed_response_that_repeats_many_log_probabilities_does_not_stop_other_streams(
    start_server: Callable[..., RunningServer], turns: Turns
) -> None:
    server = start_server(tick=0.0)
    body = {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 20, "max_output_tokens": 4000}
    with server.stream(RESPONSES, json=body | {"stream": True}) as response:
        last = json.loads(response.read().rpartition(b"data: ")[2])
    (part,) = last["response"]["output"][0]["content"]
    assert "".join(token["token"] for token in part["logprobs"]) == part["text"]
    assert 0 < turns.of(server) < LONGEST_TURN


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_log_probabilities_of_a_long_prompt_do_not_stop_other_streams(
    start_server: Callable[..., RunningServer], turns: Turns, path: str
) -> None:
    prompt = "w " * 100_000
    body = {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
    server = start_server()
    with server.stream(path, json=body | {"prompt_logprobs": 2, "stream": True, "max_tokens": 2}) as response:
        assert b'"rank":1' in response.read()
    assert 0 < turns.of(server) < LONGEST_TURN


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "word " * 800_000, "truncate_prompt_tokens": 10}),
        (COMPLETIONS, {"prompt": [7] * 200_000, "truncate_prompt_tokens": 10}),
        (COMPLETIONS, {"prompt": ["x"] * 2000, "max_tokens": 1}),
        (COMPLETIONS, {"prompt": [[5] * 120] * 2000, "max_tokens": 1}),
        ("/detokenize", {"tokens": [1] * MAX_ITEMS}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 100}] * 5000, "max_tokens": 1}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_honest_large_bodies_are_taken(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    assert server.post(path, json=body).status_code == 200


def test_a_prompt_of_ids_that_fits_a_very_long_context_is_read(start_server: Callable[..., RunningServer]) -> None:
    """The limit of items grows with the context."""
    with pytest.raises(ApiError):
        BodyScan(MAX_ITEMS).feed(b"1," * (MAX_ITEMS + 1))
    BodyScan(max(MAX_ITEMS, 1_000_000)).feed(b"1," * 1_000_000)
    assert LIMITS.max_seq_len < MAX_ITEMS


def test_large_bodies_that_are_held_together_are_bounded(
    start_server: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bodies count while their request is open or still on its way; ordinary requests are served all the same."""
    monkeypatch.setattr("minisgl.server.api.app.LARGEST_BODIES", 3)
    server = start_server(max_body_bytes=2**20)
    large = {"prompt": "hold " + "x" * 900_000}
    clients = [RawClient(server.port) for _ in range(3)]
    for client, missing in zip(clients, (0, 0, 10), strict=True):
        client.post(COMPLETIONS, large, cut=missing)
    server.engine.wait_for(Generate, 2)
    refused = wait_for_refusal(server, large)
    assert refused.headers["retry-after"]
    assert refused.json()["error"]["code"] == "overloaded"
    assert str(3 * 2**20) in refused.json()["error"]["message"]
    assert server.post(COMPLETIONS, json={"prompt": "x" * 60_000, "max_tokens": 1}).status_code == 200
    for client in clients:
        client.leave()
    server.assert_idle()
    large["prompt"] = "say []" + " " * 900_000
    for _ in range(5):  # answered, one after the other
        assert server.post(COMPLETIONS, json=large).status_code == 200


def test_objects_of_bodies_that_are_held_together_are_bounded(
    start_server: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take ten times the bytes of their bodies."""
    monkeypatch.setattr("minisgl.server.api.app.LARGEST_BODIES", 3)
    server = start_server(max_body_bytes=2**20)
    arrays = {"chat_template_kwargs": {"a": [[]] * 15_000}}  # 60 KB, 2 MB as objects
    held = RawClient(server.port)
    held.post(CHAT, {"messages": [{"role": "user", "content": "hold"}], **arrays})
    server.engine.wait_for(Generate)
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    refused, taken = (server.post(CHAT, json=one).status_code for one in (body | arrays, body))
    held.leave()
    assert (refused, taken) == (503, 200)
    server.assert_idle()
    for _ in range(100):
        if server.post(CHAT, json=body | arrays).status_code == 200:
            break
    else:
        raise AssertionError("what left is still counted")


def test_small_bodies_that_are_held_together_are_bounded(
    start_server: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of clients that send 60 KB and then no more held what no budget counted."""
    monkeypatch.setattr("minisgl.server.api.http.middleware.MAX_SMALL_BYTES", 150_000)
    server = start_server()
    small = {"prompt": "hold " + "x" * 60_000}
    clients = [RawClient(server.port) for _ in range(2)]
    for client in clients:
        client.post(COMPLETIONS, small, cut=10)
    refused = wait_for_refusal(server, small)
    assert (refused.json()["error"]["code"], "150000 bytes" in refused.text) == ("overloaded", True)
    assert server.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200
    for client in clients:
        client.leave()
    large = {"prompt": "say []" + " " * 1_000_000}  # its first 64 KiB have room again
    for _ in range(100):
        if server.post(COMPLETIONS, json=large).status_code == 200:
            break
    else:
        raise AssertionError("what left is still counted")


def wait_for_refusal(server: RunningServer, body: dict[str, Any]) -> Any:
    """The answer of a server that holds enough, once the last piece that it can hold has arrived."""
    for _ in range(100):
        response = server.post(COMPLETIONS, json={**body, "prompt": "x" + body["prompt"]})
        if response.status_code == 503:
            return response
        assert response.status_code == 200
    raise AssertionError("nothing was refused")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\[]{},:é\n', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\,[', max_size=3), inner, max_size=4),
    max_leaves=20,
)


def count(value: object) -> tuple[int, int]:
    """Strings, objects and arrays, and the commas between items."""
    if isinstance(value, str):
        return 1, 0
    if not isinstance(value, (list, dict)):
        return 0, 0
    inner = [count(item) for item in (value.values() if isinstance(value, dict) else value)]
    names = len(value) if isinstance(value, dict) else 0
    return 1 + names + sum(values for values, _ in inner), max(0, len(value) - 1) + sum(items for _, items in inner)


@settings(deadline=None)
@given(json_values, st.lists(st.integers(0, 200), max_size=6), st.booleans())
def test_a_scan_counts_what_is_there_however_it_comes(value: object, cuts: list[int], ascii_only: bool) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    ends = [*sorted(cuts), len(data)]
    scan = BodyScan(MAX_ITEMS)
    for start, end in zip([0, *ends], ends, strict=False):
        scan.feed(data[start:end])
    assert (scan.values, scan.items) == count(value)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (
            '{"a": 9223372036854775807, "b": -9223372036854775808, "c": [1e308, null, "9223372036854775808"]}',
            None,
        ),
        ('{"a": 9223372036854775808}', "a"),
        ('{"a": [1, 2.5, {"b": [0, -9223372036854775809]}]}', "a.2.b.1"),
        ('{"a": [[], {}], "b": {"c": [1, 1e999]}}', "b.c.1"),
        ('{"a": [1e400, 1]}', "a.0"),
        ('{"a": [-1e400, "x"]}', "a.0"),
    ],
)
def test_numbers_that_would_not_survive_are_named(text: str, path: str | None) -> None:
    fields = from_json(text)
    if path is None:
        check_numbers(fields)
        return
    with pytest.raises(ApiError) as caught:
        check_numbers(fields)
    assert caught.value.detail.param == path
    assert "-2^63 to 2^63 - 1" in caught.value.detail.message or "out of range" in caught.value.detail.message
