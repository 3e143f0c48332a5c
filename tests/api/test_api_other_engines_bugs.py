"""Requests that crash or corrupt other engines are refused, or answered correctly, by this API server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from api_harness import MODEL, RawClient, RunningServer
from api_sse import parse_events
from fake_engine import LIMITS, answer, wait_until

from minisgl.message.packed_ids import pack_ids
from minisgl.message.shared import Abort
from minisgl.message.to_api import OutputDelta, OutputDeltas
from minisgl.message.to_tokenizer import Generate

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": HELLO, "max_tokens": -5}, "max_tokens"),
        (CHAT, {"messages": HELLO, "top_k": 2**40}, "top_k"),
        (CHAT, {"messages": []}, "messages"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, "prompt.0"),
        ("/generate", {"prompt": []}, "prompt"),
        ("/generate", {"prompt": [10**12]}, "prompt.0"),
    ],
)
def test_requests_that_crash_other_servers_are_refused(
    server: RunningServer, path: str, body: dict[str, Any], param: str
) -> None:
    response = server.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not server.engine.of_type(Generate)
    assert server.post(CHAT, json={"messages": HELLO}).status_code == 200, "the server still answers"


@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_prompt_is_answered(server: RunningServer, stream: bool) -> None:
    """The tokenizer worker refuses it, or the API server when its ids alone show that it is too long."""
    for prompt in ("refuse it: too long", [1] * LIMITS.max_seq_len):
        response = server.post("/v1/completions", json={"prompt": prompt, "stream": stream})
        assert response.status_code == 400
        assert response.headers["content-type"] == "application/json"


def test_a_dead_worker_ends_the_wait(start_server: Callable[..., RunningServer]) -> None:
    server = start_server()
    client = RawClient(server.port)
    client.post(CHAT, {"messages": [{"role": "user", "content": "silent"}]})
    server.engine.wait_for(Generate)
    server.call(lambda: server.client.shut_down("the scheduler has died"))
    assert b"the scheduler has died" in client.read_all()


def test_a_late_token_creates_nothing(server: RunningServer) -> None:
    server.post(CHAT, json={"messages": HELLO})
    (generate,) = server.engine.of_type(Generate)
    dropped = server.counts()["dropped_pieces"]
    server.engine.say(OutputDeltas([OutputDelta(generate.seq_ids[0], pack_ids([1]), "late")]))
    wait_until(lambda: server.counts()["dropped_pieces"] == dropped + 1)
    server.assert_idle()


def test_a_client_that_leaves_before_streaming_begins(server: RunningServer) -> None:
    for prompt in ("silent", "hold"):
        server.engine.received.clear()
        client = RawClient(server.port)
        client.post("/v1/completions", {"prompt": prompt, "stream": True})
        (generate,) = server.engine.wait_for(Generate)
        client.leave()
        (abort,) = server.engine.wait_for(Abort)
        assert abort.seq_ids == generate.seq_ids
        server.assert_idle()


def test_clean_up_does_not_wait_for_the_next_token(server: RunningServer) -> None:
    """A held sequence never gets another one."""
    client = RawClient(server.port)
    client.post("/v1/completions", {"prompt": ["one", "hold"], "stream": True, "max_tokens": 2})
    client.read_until(b'"finish_reason":"length"')
    client.leave()
    (abort,) = server.engine.wait_for(Abort)
    assert abort.seq_ids == [server.engine.of_type(Generate)[1].seq_ids[0]]
    server.assert_idle()


def test_an_abort_follows_its_request(start_server: Callable[..., RunningServer]) -> None:
    """All messages of a request go to one tokenizer worker, in order; requests go round."""
    server = start_server(num_tokenizers=4)
    clients = [RawClient(server.port) for _ in range(20)]
    for client in clients:
        client.post("/v1/completions", {"prompt": ["endless", "hold"], "n": 2})
    server.engine.wait_for(Generate, 40)
    for client in clients:
        client.leave()
    server.engine.wait_for(Abort, 20)
    server.assert_idle()
    came: dict[int, tuple[int, int]] = {}  # sequence -> (worker, position)
    workers = set()
    for position, (worker, message) in enumerate(server.engine.received):
        if isinstance(message, Generate):
            came.update(dict.fromkeys(message.seq_ids, (worker, position)))
        elif isinstance(message, Abort):
            workers.add(worker)
            assert len(message.seq_ids) == 4
            for seq_id in message.seq_ids:
                generated_by, generated_at = came.pop(seq_id)
                assert generated_by == worker
                assert generated_at < position
    assert not came
    assert workers == {0, 1, 2, 3}


def test_streams_only_when_asked_to(server: RunningServer) -> None:
    for path in (CHAT, "/v1/completions", "/generate"):
        body: dict[str, Any] = {"messages": HELLO, "prompt": "hello", "max_tokens": 2}
        assert server.post(path, json=body).headers["content-type"] == "application/json"
        assert server.post(path, json={**body, "stream": False}).headers["content-type"] == "application/json"
        streamed = server.post(path, json={**body, "stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")


def test_objects_are_named_right(server: RunningServer) -> None:
    names = {CHAT: ("chat.completion", "chat.completion.chunk"), "/v1/completions": ("text_completion",) * 2}
    for path, (whole, chunk) in names.items():
        body = {"model": MODEL, "messages": HELLO, "prompt": "hello"}
        assert server.post(path, json=body).json()["object"] == whole
        events = parse_events(server.post(path, json={**body, "stream": True}).text)
        assert {event["object"] for event in events} == {chunk}


def test_finish_reason_and_usage_are_true(server: RunningServer) -> None:
    for prompt, reason in (("stop now", "stop"), ("go on", "length")):
        body = server.post(CHAT, json={"messages": [{"role": "user", "content": prompt}], "max_tokens": 3}).json()
        assert body["choices"][0]["finish_reason"] == reason
        assert body["usage"]["completion_tokens"] == 3


def test_n_and_stop_are_not_ignored(server: RunningServer) -> None:
    body = server.post(CHAT, json={"messages": HELLO, "n": 3, "stop": ["a", "b"], "max_tokens": 2}).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == [answer("hello", i, 2) for i in range(3)]
    (generate,) = server.engine.of_type(Generate)
    assert generate.text.stop == generate.sampling.stop == ("a", "b")
    assert server.post(CHAT, json={"messages": HELLO, "presence_penalty": 1}).status_code == 200
    assert server.engine.of_type(Generate)[-1].sampling.presence_penalty == 1
    refused = server.post(CHAT, json={"messages": HELLO, "use_beam_search": True})
    assert refused.status_code == 400, "an unsupported field is refused, not ignored"


def test_generate_events_have_the_blank_line(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(tick=0.1)  # tokens that come while the server is busy share an event
    text = server.post("/generate", json={"prompt": "hello", "stream": True}).text
    assert len(parse_events(text)) > 1
