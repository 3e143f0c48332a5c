"""Who may call the server and how: keys, CORS, root path, TLS, clients that are too slow."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import pytest
from api_harness import MODEL, RawClient, RunningServer
from api_sse import parse_events
from fake_engine import wait_until
from starlette.requests import HTTPConnection

from minisgl.cli import parse_args
from minisgl.config import ConfigError, HttpConfig
from minisgl.message.shared import Abort
from minisgl.message.to_tokenizer import Generate
from minisgl.server.api.http.gates import client_of
from minisgl.server.listener import bind, bind_unix

CHAT = "/v1/chat/completions"
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
OPEN = ["/", "/health", "/ready", "/ping", "/version", "/docs", "/redoc", "/openapi.json"]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_every_route_wants_a_key_but_the_open_ones(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(api_keys=("one", "two"))
    paths = {route.path for route in server.app.routes}  # type: ignore[attr-defined]
    assert {CHAT, "/metrics", "/server_info", "/tokenize", "/flush_cache"} <= paths
    for path in [*paths, "/no/such/route", "/health/", "//health", "/Health"]:
        for response in (server.get(path), server.post(path, json=HELLO)):
            if path in OPEN:
                assert response.status_code in (200, 405), path
            elif path == "/guide/{page}":  # all pages below it
                assert response.status_code in (404, 405), path
            else:
                assert response.status_code == 401, path
                error = response.json()["error"]
                if path.startswith("/v1/messages"):
                    assert error["type"] == "authentication_error"  # in Anthropic's shape
                else:
                    assert error["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
                assert response.headers["x-request-id"]
    assert not server.engine.of_type(Generate)


def test_messages_name_the_client_without_its_key(start_server: Callable[..., RunningServer]) -> None:
    """Clients have names, so that they can take turns where work is expensive."""
    server = start_server(api_keys=("first-secret", "second-secret"))
    for key in ("first-secret", "second-secret", "first-secret"):
        for path, body in ((CHAT, HELLO), ("/v1/completions", {"prompt": "x"}), ("/generate", {"prompt": "x"})):
            assert server.post(path, json={**body, "max_tokens": 1}, headers=bearer(key)).status_code == 200
    asked = server.engine.of_type(Generate)
    assert [one.client for one in asked] == ["key 0"] * 3 + ["key 1"] * 3 + ["key 0"] * 3
    assert not any("secret" in repr(one) for one in asked)


def test_without_keys_a_client_is_its_address(start_server: Callable[..., RunningServer]) -> None:
    server = start_server()
    assert server.post(CHAT, json=HELLO, headers={"x-forwarded-for": "1.2.3.4"}).status_code == 200
    (asked,) = server.engine.of_type(Generate)
    assert asked.client == "127.0.0.1"
    for address, client in (
        (("2001:db8:1:2:3:4:5:6", 80), "2001:db8:1:2::/64"),
        (("2001:db8:1:2::1", 81), "2001:db8:1:2::/64"),
        (("10.0.0.1", 80), "10.0.0.1"),
        (("a socket", 0), "a socket"),
        (None, ""),
    ):
        assert client_of(HTTPConnection({"type": "http", "client": address})) == client


def test_any_of_the_keys_opens(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(api_keys=("one", "two"))
    for key in ("one", "two"):
        assert server.post(CHAT, json=HELLO, headers=bearer(key)).status_code == 200
        assert server.post(CHAT, json=HELLO, headers={"authorization": f"bearer  {key}"}).status_code == 200
        assert server.sdk.with_options(api_key=key).models.list().data[0].id == MODEL
    for wrong in ("onetwo", "on", "ONE", "one,two", "one\ttwo"):
        assert server.post(CHAT, json=HELLO, headers=bearer(wrong)).status_code == 401, wrong
    for header in ("one", "Basic one", "Bearer", "Bearerone"):
        assert server.post(CHAT, json=HELLO, headers={"authorization": header}).status_code == 401, header
    twice = [("authorization", "Bearer one"), ("authorization", "Bearer two")]
    assert server.post(CHAT, json=HELLO, headers=twice).status_code == 401
    with pytest.raises(openai.AuthenticationError):
        server.sdk.models.list()


def test_keys_do_not_appear_in_server_info(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(api_keys=("very-secret",))
    info = server.get("/server_info", headers=bearer("very-secret"))
    assert info.status_code == 200
    assert "very-secret" not in info.text


def test_keys_come_from_flag_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("three\n\n four \n")
    monkeypatch.setenv("MINISGL_API_KEY", "five, six")
    config, _ = parse_args(["--api-key", "one", "two", "--api-key-file", str(file)])
    assert set(config.http.api_keys) == {"one", "two", "three", "four", "five", "six"}
    file.write_text("\n")
    with pytest.raises(ConfigError, match="has no key"):
        parse_args(["--api-key-file", str(file)])
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_args(["--api-key-file", str(tmp_path / "none")])
    with pytest.raises(ConfigError, match="--api-key"):
        parse_args(["--api-key", "a b"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ssl_keyfile": "/k"}, "together"),
        ({"ssl_keyfile": "/no/k", "ssl_certfile": "/no/c"}, "no such file"),
        ({"response_store": "/no/such/folder/file"}, "no such folder"),
        ({"root_path": "api"}, "--root-path"),
        ({"root_path": "/api/"}, "--root-path"),
        ({"allowed_origins": ("*",), "allow_credentials": True}, "--allow-credentials"),
        ({"allowed_origins": ("page.example",)}, "of the form https://example.com"),
        ({"allowed_origins": ("https://page.example/",)}, "of the form https://example.com"),
        ({"allowed_origins": ('["*"]',)}, "of the form https://example.com"),
        ({"allowed_origins": ("http://localhost:*",)}, "of the form https://example.com"),
        ({"allowed_origins": ("https://",)}, "of the form https://example.com"),
        ({"max_body_bytes": 0}, "--max-body-bytes"),
        ({"max_queued_requests": 0}, "--max-queued-requests"),
        ({"max_choices": 0}, "--max-choices"),
        ({"max_stop_strings": 33}, "--max-stop-strings"),
        ({"max_logprobs": 21}, "--max-logprobs"),
        ({"send_timeout": 0.0}, "--send-timeout"),
        ({"receive_timeout": float("nan")}, "--receive-timeout"),
        ({"health_timeout": 1e9}, "--health-timeout"),
    ],
)
def test_bad_flags(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        HttpConfig(**changes).validate()  # type: ignore[arg-type]


def test_origins_of_other_pages_than_those_of_the_web_may_be_allowed() -> None:
    """An Android app's web view names its own files so, others have schemes of their own."""
    HttpConfig(allowed_origins=("file://", "null", "app://obsidian.md", "http://[::1]:3000")).validate()


def test_allowed_origins_get_cors_headers(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(allowed_origins=("https://page.example",), api_keys=("key",))
    ask = {"origin": "https://page.example", "access-control-request-method": "POST"}
    preflight = httpx.options(server.url + CHAT, headers={**ask, "access-control-request-headers": "authorization"})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://page.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    refused = server.post(CHAT, json=HELLO, headers={"origin": "https://page.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://page.example", "the page must see the refusal"
    stranger = httpx.options(server.url + CHAT, headers={**ask, "origin": "https://other.example"})
    assert "access-control-allow-origin" not in stranger.headers


def test_no_cors_unless_asked_for(server: RunningServer) -> None:
    response = server.get("/health", headers={"origin": "https://page.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_root_path(start_server: Callable[..., RunningServer]) -> None:
    """A proxy may strip the prefix or keep it; the gate and the routes see the same path."""
    server = start_server(root_path="/llm/a", api_keys=("key",))
    for prefix in ("", "/llm/a"):
        assert server.post(prefix + CHAT, json=HELLO, headers=bearer("key")).status_code == 200
        assert server.get(f"{prefix}/health").status_code == 200
        assert server.get(f"{prefix}/metrics").status_code == 401
    assert server.get("/llm/health", headers=bearer("key")).status_code == 404
    assert server.get("/llm/b/health").status_code == 401


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A key and a certificate for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = str(folder / "key.pem"), str(folder / "certificate.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return key, certificate


def test_tls_serves_streams(start_server: Callable[..., RunningServer], certificate: tuple[str, str]) -> None:
    key, cert = certificate
    server = start_server(ssl_keyfile=key, ssl_certfile=cert)
    context = ssl.create_default_context(cafile=cert)
    with httpx.Client(verify=context, trust_env=False, timeout=120) as http:
        body = {"prompt": "hello", "stream": True, "max_tokens": 3}
        with http.stream("POST", f"https://127.0.0.1:{server.port}/v1/completions", json=body) as response:
            assert response.status_code == 200
            assert "".join(response.iter_text()).endswith("data: [DONE]\n\n")


def test_the_shell_speaks_no_https(certificate: tuple[str, str]) -> None:
    key, cert = certificate
    words = ["--ssl-keyfile", key, "--ssl-certfile", cert]
    http = parse_args(words)[0].http
    assert (http.ssl_keyfile, http.ssl_certfile) == (key, cert)
    with pytest.raises(ConfigError, match="--shell does not speak https"):
        parse_args([*words, "--shell"])


def test_a_certificate_that_is_none(certificate: tuple[str, str]) -> None:
    key, _ = certificate
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        HttpConfig(ssl_keyfile=key, ssl_certfile=key).validate()


def connect_and_send(server: RunningServer, sent: bytes) -> RawClient:
    """Do both in one turn of the server's event loop, so that the receive timeout cannot end in between."""

    def begin() -> RawClient:
        client = RawClient(server.port)
        client.socket.sendall(sent)
        return client

    client: RawClient = server.call(begin)
    return client


def test_a_body_that_never_ends(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(receive_timeout=1.0)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 9\r\n\r\n"
    client = connect_and_send(server, f"{head}{{".encode())
    assert b" 408 " in client.read_all()
    assert not server.engine.of_type(Generate)


def test_a_body_that_is_announced_as_too_large_is_not_awaited(server: RunningServer) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 1{'0' * 19}\r\n\r\n"
    client = connect_and_send(server, head.encode())
    assert client.read_until(b"request_too_large").startswith(b"HTTP/1.1 413 "), "and not 100"


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nho"])
def test_a_head_that_never_ends(start_server: Callable[..., RunningServer], sent: bytes) -> None:
    server = start_server(receive_timeout=1.0)
    assert connect_and_send(server, sent).read_all() == b""
    client = connect_and_send(server, HEALTH)
    assert b" 200 " in client.read_until(b"\r\n\r\n")
    time.sleep(1.5)  # a connection between two requests may be idle for longer
    client.socket.sendall(HEALTH)
    assert b" 200 " in client.read_until(b"\r\n\r\n")


EARLY = b"POST /nope HTTP/1.1\r\nhost: localhost\r\n%b\r\n\r\n"  # answered whatever its body is
LENGTH, CHUNKED = EARLY % b"content-length: 9", EARLY % b"transfer-encoding: chunked"


def test_the_receive_timeout_applies_after_an_answer(
    start_server: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server waits only so long for the rest of an unread body, and for a head that has begun."""
    monkeypatch.setattr("minisgl.server.api.http.server.KEEP_ALIVE_SECONDS", 86_400)
    server = start_server(receive_timeout=1.0)
    clients = []
    for sent in (LENGTH, LENGTH + b"12345", CHUNKED, CHUNKED + b"1\r\nx\r"):
        clients.append(client := connect_and_send(server, sent))
        assert b" 404 " in client.read_until(b"}}")
    for more in (b"\r", b"\r\n\r\n", b"G", b"GET / HTTP/1.1\r\n"):
        clients.append(client := connect_and_send(server, HEALTH))
        assert b" 200 " in client.read_until(b'"ok"}')
        client.socket.sendall(more)
    next_head = clients.pop(0)
    with suppress(ConnectionError):  # on a busy machine the time for the body may be over
        next_head.socket.sendall(b"123456789GET")
        assert next_head.read_all() == b""
    for client in clients:
        assert client.read_all() == b""


def test_after_a_body_that_was_not_read(
    start_server: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection serves further requests, and ends like others when it is idle."""
    monkeypatch.setattr("minisgl.server.api.http.server.KEEP_ALIVE_SECONDS", 0.5)
    client = RawClient(start_server().port)
    client.socket.sendall(LENGTH)
    assert b" 404 " in client.read_until(b"}}")
    client.socket.sendall(b"123456789" + CHUNKED)
    assert b" 404 " in client.read_until(b"}}")
    client.socket.sendall(b"0\r\n\r\n")
    assert client.read_all() == b""


def test_an_endless_head_after_a_request(start_server: Callable[..., RunningServer]) -> None:
    """The head does not end the running answer; the receive timeout begins after that answer."""
    data = json.dumps({"prompt": "x", "stream": True, "max_tokens": 20}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(data)
    client = connect_and_send(start_server(receive_timeout=1.0, tick=0.1), head + data + b"GET")
    assert client.read_all().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_length_may_have_zeros_in_front(server: RunningServer) -> None:
    """HTTP allows any number of them; Python reads numbers of up to 4,300 digits."""
    client = RawClient(server.port)
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: %b2\r\n\r\n"
    client.socket.sendall(head % (b"0" * 5000) + b"{}")
    assert client.read_all().startswith(b"HTTP/1.1 400 "), "the body has no prompt"


@pytest.mark.parametrize("sent", [b"hello\r\n\r\n", b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: x\r\n\r\n"])
def test_bytes_that_are_not_http_are_answered_400(server: RunningServer, sent: bytes) -> None:
    client = RawClient(server.port)
    client.socket.sendall(sent)
    head, _, body = client.read_all().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_head_that_is_too_large(server: RunningServer) -> None:
    client = RawClient(server.port)
    client.socket.sendall(b"GET /health HTTP/1.1\r\nx: " + b"a" * 2**16)
    head, _, body = client.read_all().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert json.loads(body)["error"]["code"] == "head_too_large"


def test_an_offer_to_speak_http_2(server: RunningServer) -> None:
    """`curl --http2` and Java's client make it: the answer is in HTTP/1.1, and nothing of the body is lost."""
    client = RawClient(server.port)
    data = json.dumps({"model": MODEL, "prompt": "a\r\n\r\nupgrade: b", "max_tokens": 2}).encode()
    client.socket.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nConnection: Upgrade, HTTP2-Settings, close\r\n"
        b"Upgrade: h2c\r\n"
        b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\ncontent-length: %d\r\n\r\n" % len(data)
    )
    time.sleep(0.1)
    client.socket.sendall(data)
    assert client.read_all().startswith(b"HTTP/1.1 200 ")


def ask_in_http_1_0(server: RunningServer, line: str, body: dict[str, object], headers: str = "") -> RawClient:
    client = RawClient(server.port)
    data = json.dumps(body)
    client.socket.sendall(f"{line} HTTP/1.0\r\n{headers}content-length: {len(data)}\r\n\r\n{data}".encode())
    return client


def http_1_0(server: RunningServer, line: str, body: dict[str, object], headers: str = "") -> tuple[str, str]:
    """The head and the body of the answer."""
    head, _, answered = ask_in_http_1_0(server, line, body, headers).read_all().decode().partition("\r\n\r\n")
    assert "transfer-encoding" not in head
    assert "connection: close" in head
    return head, answered


@pytest.mark.parametrize("headers", ["", "connection: keep-alive\r\n"])
def test_a_stream_to_a_client_of_http_1_0(server: RunningServer, headers: str) -> None:
    """HTTP/1.0 has no chunked encoding: the stream is sent as it is, and ends with the connection."""
    fields = {"stream": True, "max_tokens": 30}
    for path, prompt in (("/v1/completions", "hello"), ("/generate", "big hello")):
        head, body = http_1_0(server, f"POST {path}", {"prompt": prompt, **fields}, headers)
        assert head.startswith("HTTP/1.1 200 ")
        assert body.endswith("data: [DONE]\n\n")
        assert all(line.startswith("data: ") for line in body.split("\n") if line)
        expected = server.post(path, json={"prompt": prompt, **fields}).text
        assert "".join(texts(body)) == "".join(texts(expected))


def test_an_error_in_a_stream_to_a_client_of_http_1_0(server: RunningServer) -> None:
    client = ask_in_http_1_0(server, "POST /v1/completions", {"prompt": "endless", "stream": True})
    begun = client.read_until(b"data: ")
    assert server.post("/abort", json={"all": True}).json() == {"aborted": 1}
    body = (begun + client.read_all()).partition(b"\r\n\r\n")[2].decode()
    events = parse_events(body)
    assert "error" in events[-1]
    assert not any("error" in event for event in events[:-1])


def texts(body: str) -> list[str]:
    events = parse_events(body)
    return [event["choices"][0]["text"] if "choices" in event else event.get("text", "") for event in events]


def test_other_answers_to_a_client_of_http_1_0(server: RunningServer) -> None:
    for line, status in (("POST /v1/completions", 200), ("POST /nope", 404), ("GET /health", 200)):
        head, body = http_1_0(server, line, {"prompt": "hello"})
        assert f" {status} " in head
        assert f"content-length: {len(body.encode())}" in head
        assert json.loads(body)
    head, body = http_1_0(server, "HEAD /health", {})
    assert " 200 " in head
    assert not body


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_client_that_never_reads_and_never_leaves(
    start_server: Callable[..., RunningServer], tmp_path: Path, kind: str
) -> None:
    """A connection that takes nothing for too long is ended, by the kernel if it is TCP, and the request with it."""
    path = str(tmp_path / "socket")
    listener = bind("127.0.0.1", 0, send_timeout=0.5) if kind == "tcp" else bind_unix(path)
    server = start_server(listener=listener, send_timeout=0.5)
    deaf = RawClient(server.port if kind == "tcp" else path, receive_buffer=4096)
    deaf.post("/v1/completions", {"prompt": "big endless", "stream": True, "max_tokens": 4000})
    (generate,) = server.engine.wait_for(Generate)
    wait_until(lambda: bool(server.engine.of_type(Abort)))
    assert server.engine.of_type(Abort)[0].seq_ids == generate.seq_ids
    server.assert_idle()
    deaf.leave()


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_slow_reader_is_not_cut(start_server: Callable[..., RunningServer], tmp_path: Path, kind: str) -> None:
    """A client that reads something now and then keeps its connection."""
    path = str(tmp_path / "socket")
    listener = bind("127.0.0.1", 0, send_timeout=5.0) if kind == "tcp" else bind_unix(path)
    server = start_server(listener=listener, send_timeout=5.0)
    slow = RawClient(server.port if kind == "tcp" else path, receive_buffer=4096)
    slow.post("/v1/completions", {"prompt": "big", "stream": True, "max_tokens": 20})
    received = b""
    deadline = time.monotonic() + 6.0
    while time.monotonic() < deadline:
        time.sleep(0.1)
        received += slow.socket.recv(16384)
    slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
    assert (received + slow.read_all()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    server.assert_idle()


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"GET /health HTTP/1.1\r\n", "not 0"),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n", "not 2"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHOST: page.example\r\n", "not 2"),
        (b"GET /health HTTP/1.0\r\nhost: localhost\r\nhost: localhost\r\n", "not 2"),
        (b"GET /health HTTP/1.1\r\nhost: local host\r\n", "Host"),
        (b"GET /health HTTP/1.1\r\nhost: localhost, page.example\r\n", "Host"),
        (b"GET /health HTTP/1.1\r\nhost: localhost:80:80\r\n", "Host"),
        (b"GET /health HTTP/1.1\r\nhost: localhost:http\r\n", "Host"),
        (b"GET /health HTTP/1.1\r\nhost: me@localhost\r\n", "Host"),
        (b"GET /health HTTP/1.1\r\nhost: http://localhost\r\n", "Host"),
        (b"GET /health HTTP/1.1\r\nhost: [::1\r\n", "Host"),
        (b"GET /health HTTP/1.1\r\nhost: local\xffhost\r\n", "Host"),
        (b"POST /generate HTTP/1.1\r\ncontent-length: 15\r\n", "not 0"),
    ],
)
def test_a_request_that_names_no_one_host_is_refused(server: RunningServer, head: bytes, says: str) -> None:
    """A proxy may take one of two hosts and the server the other."""
    client = RawClient(server.port)
    client.socket.sendall(head + b"\r\n" + b'{"prompt": "a"}' * head.startswith(b"POST"))
    answer, _, body = client.read_all().partition(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert says in json.loads(body)["error"]["message"]
    assert not server.engine.of_type(Generate)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.0\r\n",
        b"GET /health HTTP/1.1\r\nhost:\r\n",
        b"GET /health HTTP/1.1\r\nHost:  LocalHost:1919 \r\n",
        b"GET /health HTTP/1.1\r\nhost: [::1]:65535\r\n",
        b"GET http://localhost/health HTTP/1.1\r\nhost: localhost\r\n",
    ],
)
def test_a_request_that_names_one_host_is_served(server: RunningServer, head: bytes) -> None:
    client = RawClient(server.port)
    client.socket.sendall(head + b"connection: close\r\n\r\n")
    assert client.read_all().startswith(b"HTTP/1.1 200 ")
