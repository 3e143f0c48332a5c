"""Web pages: any browser near the server sends what they ask for, and none of it may come in unasked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from api_harness import RunningServer

from minisgl.cli import parse_args
from minisgl.config import ConfigError, HttpConfig
from minisgl.message.shared import Abort, FlushCache
from minisgl.message.to_tokenizer import Encode, Generate
from minisgl.server.api.http.gates import CONTROL_ROUTES

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
PAGE = {"origin": "https://page.example"}
BODIES = {CHAT: HELLO, "/v1/completions": {"prompt": "a"}, "/generate": {"prompt": "a"}, "/tokenize": {"prompt": "a"}}
ACTING = [CHAT, "/v1/completions", "/generate", "/tokenize", "/flush_cache", "/reset_prefix_cache", "/abort"]

DONE = (Generate, Abort, FlushCache, Encode)


def refusal(response: object, status: int, code: str) -> str:
    """The message of an error in OpenAI's shape."""
    assert response.status_code == status, response.text  # type: ignore[attr-defined]
    error = response.json()["error"]  # type: ignore[attr-defined]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == code
    return str(error["message"])


@pytest.mark.parametrize("path", ACTING)
@pytest.mark.parametrize(
    "headers",
    [
        PAGE,
        {"origin": "null"},  # a page from a file, or in a sandbox
        {"origin": "http://127.0.0.1:1"},  # another server on the same machine
        {"origin": "http://localhost"},
        {**PAGE, "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=str,
)
def test_a_foreign_web_page_gets_nothing_done(server: RunningServer, path: str, headers: dict[str, str]) -> None:
    body = BODIES.get(path, {"all": True})
    for host in ({}, {"host": "localhost"}):
        if host.get("host") == headers.get("origin", "").removeprefix("http://"):
            continue  # the server's own page
        message = refusal(server.post(path, json=body, headers=headers | host), 403, "origin_not_allowed")
        assert "--allowed-origins" in message
    if path == "/flush_cache":
        refusal(server.get(path, headers=headers), 403, "origin_not_allowed")
        refusal(server.get("/health_generate", headers=headers), 403, "origin_not_allowed")
    assert not [message for _, message in server.engine.received if isinstance(message, DONE)]


def test_pages_may_send_requests_that_change_nothing(server: RunningServer) -> None:
    """A page cannot read the answers, unless CORS allows that."""
    for path in ("/health", "/v1/models", "/metrics"):
        assert server.get(path, headers=PAGE).status_code == 200


@pytest.mark.parametrize(
    "headers", [{}, {"sec-fetch-site": "none"}, {"sec-fetch-site": "same-origin"}, {"origin": "same"}], ids=str
)
def test_requests_that_come_from_no_foreign_page_are_served(server: RunningServer, headers: dict[str, str]) -> None:
    if headers.get("origin") == "same":
        headers = {"origin": server.url, "sec-fetch-site": "same-origin"}
    assert server.post(CHAT, json=HELLO, headers=headers).status_code == 200
    assert server.post("/flush_cache", headers=headers).json()["success"]
    assert server.get("/flush_cache", headers=headers).json()["success"], "as SGLang's clients ask"


def test_an_allowed_page_is_served(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(allowed_origins=("https://page.example",))
    response = server.post(CHAT, json=HELLO, headers={**PAGE, "sec-fetch-site": "cross-site"})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://page.example"
    refusal(server.post(CHAT, json=HELLO, headers={"origin": "https://other.example"}), 403, "origin_not_allowed")


def test_all_pages_are_served_if_all_are_allowed(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(allowed_origins=("*",))
    assert server.post(CHAT, json=HELLO, headers={"origin": "https://any.example"}).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/generate", "/tokenize", "/detokenize", "/abort"])
def test_a_body_of_a_type_that_any_page_may_send_is_refused(server: RunningServer, path: str, kind: str) -> None:
    response = server.post(path, content=b'{"all": true, "prompt": "a", "tokens": [1]}', headers={"content-type": kind})
    assert "Content-Type: application/json" in refusal(response, 415, "unsupported_content_type")
    assert not [message for _, message in server.engine.received if isinstance(message, DONE)]


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", ""])
def test_json_and_a_body_without_a_type_are_taken(server: RunningServer, kind: str) -> None:
    headers = {"content-type": kind} if kind else {}
    assert server.post("/generate", content=b'{"prompt": "a", "max_tokens": 1}', headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/v1/models", CHAT])
@pytest.mark.parametrize("host", ["page.example", "page.example:1919", "localhost.page.example", "127.0.0.1.nip.io"])
def test_another_name_of_a_loopback_address_is_refused(server: RunningServer, host: str, path: str) -> None:
    """The name is a page's own, which now stands for this address: the page counts as the server's."""
    headers = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    response = server.post(path, json=HELLO, headers=headers) if path == CHAT else server.get(path, headers=headers)
    assert "--allowed-hosts" in refusal(response, 403, "host_not_allowed")
    assert not server.engine.of_type(Generate)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST.:80", "127.0.0.1:9", "127.1.2.3", "[::1]", "[::1]:1919", "10.0.0.5"]
)
def test_localhost_and_ip_addresses_are_allowed_hosts(server: RunningServer, host: str) -> None:
    assert server.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    ("changes", "served", "refused"),
    [
        ({"allowed_hosts": ("llm.example",)}, ["llm.example", "LLM.example:80", "localhost"], ["page.example"]),
        ({"allowed_hosts": ("*",)}, ["page.example"], []),
        ({"host": "0.0.0.0"}, ["page.example", "localhost", "10.0.0.1:80"], []),
        ({"host": "0.0.0.0", "allowed_hosts": ("llm.example",)}, ["llm.example", "10.0.0.1"], ["page.example"]),
        ({"host": "localhost"}, ["localhost:1919"], ["page.example"]),
        ({"host": "::1"}, ["[::1]:1919", "localhost"], ["page.example"]),
    ],
    ids=str,
)
def test_which_hosts_are_checked(
    start_server: Callable[..., RunningServer], changes: dict[str, object], served: list[str], refused: list[str]
) -> None:
    server = start_server(**changes)
    for host in served:
        assert server.get("/health", headers={"host": host}).status_code == 200, host
    for host in refused:
        refusal(server.get("/health", headers={"host": host}), 403, "host_not_allowed")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("keys", [(), ("user",)])
def test_the_admin_key_alone_opens_the_control_routes(
    start_server: Callable[..., RunningServer], keys: tuple[str, ...]
) -> None:
    server = start_server(api_keys=keys, admin_api_key="admin")
    routes = {route.path: route for route in server.app.routes}
    assert set(routes) >= CONTROL_ROUTES
    for path in CONTROL_ROUTES:
        for headers in ({}, bearer("user"), bearer("admi")):
            refusal(server.post(path, json={"all": True}, headers=headers), 401, "invalid_api_key")
        assert server.post(path, json={"all": True}, headers=bearer("admin")).status_code == 200
    refusal(server.get("/flush_cache"), 401, "invalid_api_key")
    assert server.post(CHAT, json=HELLO, headers=bearer("admin")).status_code == 200, "the admin key opens all routes"
    assert server.post(CHAT, json=HELLO, headers=bearer("user")).status_code == 200
    assert server.post(CHAT, json=HELLO).status_code == (401 if keys else 200)
    info = server.get("/server_info", headers=bearer("user"))
    assert '"admin_api_key":"***"' in info.text


def test_the_admin_key_comes_from_the_flag_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_args([])[0].http.admin_api_key is None
    monkeypatch.setenv("MINISGL_ADMIN_API_KEY", "")
    assert parse_args([])[0].http.admin_api_key is None
    monkeypatch.setenv("MINISGL_ADMIN_API_KEY", "one")
    assert parse_args([])[0].http.admin_api_key == "one"
    assert parse_args(["--admin-api-key", "two"])[0].http.admin_api_key == "two"
    for bad in ("", "a b", "a\tb", "é"):
        with pytest.raises(ConfigError, match="--admin-api-key"):
            parse_args(["--admin-api-key", bad])
        with pytest.raises(ConfigError, match="--admin-api-key"):
            HttpConfig(admin_api_key=bad).validate()


def test_the_readme_shows_a_request_that_is_taken() -> None:
    """The README's command sets the content type, because curl -d sends a form by default."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    commands = [block for block in text.split("```") if "curl " in block]
    assert commands
    assert all("-H 'Content-Type: application/json'" in command for command in commands)
