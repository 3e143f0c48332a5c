"""The access log: one line a request, whatever becomes of it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import pytest
from api_harness import RawClient, RunningServer, make_config
from fake_engine import wait_until

from minisgl.server.api.app import middleware_stack
from minisgl.server.api.http.drain import DrainState
from minisgl.server.api.http.middleware import AccessLogMiddleware

LOGGER = "minisgl.server.api.http.middleware"
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 3}


def lines(caplog: pytest.LogCaptureFixture, count: int, level: int = logging.INFO) -> list[str]:
    """The log's lines without their times, once there are so many."""

    def found() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.name == LOGGER and one.levelno >= level]

    wait_until(lambda: len(found()) >= count)
    assert all(re.search(r" \d+\.\d ms$", line) for line in found())
    return [line.rpartition(" ")[0].rpartition(" ")[0] for line in found()]


def test_each_request_has_one_line(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    server.post(CHAT, json=HELLO)
    assert "[DONE]" in server.post(CHAT, json={**HELLO, "stream": True}).text
    server.post(CHAT, json={"messages": "none"})
    server.get("/no/such/route?with=query")
    assert lines(caplog, 4) == [
        f"127.0.0.1 POST {CHAT} 200",
        f"127.0.0.1 POST {CHAT} 200",
        f"127.0.0.1 POST {CHAT} 400",
        "127.0.0.1 GET /no/such/route 404",
    ]


def test_a_stream_has_its_line_when_it_ends(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    endless = {"messages": [{"role": "user", "content": "endless"}], "stream": True}  # until the client leaves
    with server.stream(CHAT, json=endless) as response:
        events = response.iter_lines()  # held: httpx closes the answer with its iterator
        next(events)
        assert not [one for one in caplog.records if one.name == LOGGER]
    assert lines(caplog, 1) == [f"127.0.0.1 POST {CHAT} 200"]


def test_a_client_that_leaves_early_is_logged_as_499(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    client = RawClient(server.port)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 100\r\n\r\n"
    client.socket.sendall(head)
    client.read_until(b"100 Continue")  # the server waits for the body
    client.leave(reset=True)
    assert lines(caplog, 1) == ["127.0.0.1 POST /v1/completions 499"]


def test_a_path_cannot_forge_a_line(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    server.get("/a%0a12:00:00%20127.0.0.1%20GET%20/forged%20200")
    server.get("/" + "x" * 5000)
    first, second = lines(caplog, 2)
    assert first == "127.0.0.1 GET /a%0a12:00:00%20127.0.0.1%20GET%20/forged%20200 404"
    assert second == f"127.0.0.1 GET /{'x' * 199}... 404"


def test_probes_are_logged_as_debug_alone(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, LOGGER)
    probes = ("/health", "/ready", "/ping", "/metrics")
    for path in probes:
        server.get(path)
    assert len(lines(caplog, 4, logging.DEBUG)) == 4
    assert lines(caplog, 0) == []


def test_the_access_log_can_be_disabled(
    start_server: Callable[..., RunningServer], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, LOGGER)
    assert AccessLogMiddleware not in [layer.cls for layer in middleware_stack(make_config(shell=True), DrainState())]
    server = start_server(access_log=False)
    assert server.post(CHAT, json=HELLO).status_code == 200
    server.assert_idle()
    assert not [one for one in caplog.records if one.name == LOGGER]
