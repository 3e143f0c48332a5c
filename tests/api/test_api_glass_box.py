"""The glass box: who may read the page and its data, and how often it asks the engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

from api_harness import RunningServer

from minisgl.message.engine_state import StateRequest
from minisgl.server.api.routes.glass_box import MIN_INTERVAL, content_security_policy

STATE = "/debug/state"


def test_the_page_runs_nothing_but_its_own_script(server: RunningServer) -> None:
    response = server.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert policy == content_security_policy(response.text)
    assert re.findall(r"'sha256-[^']+'", policy), "the hashes of its script and its style"
    assert policy.count("sha256-") == 2
    for part in ("default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'", "form-action 'none'"):
        assert part in policy
    assert "unsafe" not in policy
    html = response.text
    assert not re.search(r"""(src|href)=["'](https?:)?//""", html), "nothing comes from elsewhere"
    assert not re.search(r"<[^>]+\s(style|on\w+)=", html), "the policy refuses inline handlers and styles"
    assert "innerHTML" not in html


def test_each_page_of_the_guide_that_is_linked_is_served(server: RunningServer) -> None:
    pages = set(re.findall(r'href="(guide/[^"]+)"', server.get("/").text))
    assert len(pages) >= 5
    for page in pages:
        response = server.get(f"/{page}")
        assert response.text.startswith("# ")
        assert response.headers["content-type"] == "text/plain; charset=utf-8"
    for page in ("none.md", "..%2F..%2Fconfig.py", "%2e%2e", "offline-14b.png", "x" * 5000 + ".md"):
        assert server.get(f"/guide/{page}").status_code == 404


def test_the_page_needs_no_key_but_its_data_does(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(api_keys=("secret",))
    assert server.get("/").status_code == server.get("/guide/glass-box.md").status_code == 200
    assert server.get(STATE).status_code == 401
    assert not server.engine.of_type(StateRequest)
    assert server.get(STATE, headers={"authorization": "Bearer secret"}).status_code == 200


def test_the_page_can_be_left_out(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(ui=False)
    for path in ("/", "/guide/glass-box.md", STATE):
        assert server.get(path).status_code == 404
    assert STATE not in server.get("/openapi.json").json()["paths"]


def test_many_viewers_share_one_inspection_of_the_engine(server: RunningServer) -> None:
    server.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    server.get("/metrics")
    server.get("/")
    assert not server.engine.of_type(StateRequest)
    begin = monotonic()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.get(STATE).json(), range(24)))
    assert all(answer["engine"]["counts"] for answer in answers)
    assert len(server.engine.of_type(StateRequest)) <= 1 + (monotonic() - begin) / MIN_INTERVAL


def test_a_look_says_what_it_knows(server: RunningServer) -> None:
    server.get(f"{STATE}?since=5")
    answer = server.get(STATE).json()
    assert answer["steps"][-1]["step"] == 9, "step 9 comes from the scripted engine"
    assert server.get(f"{STATE}?since=9").json()["steps"] == []
    for text in ("x", "-2", "1.5", "9" * 30, "%D9%A1"):
        error = server.get(f"{STATE}?since={text}")
        assert error.status_code == 400
        assert error.json()["error"]["param"] == "since"


def test_metrics_tell_the_counts_that_the_page_has(server: RunningServer) -> None:
    server.get(STATE)
    assert re.search(
        r'^minisgl:evicted_pages_total{model_name="[^"]+"} 3.0$', server.get("/metrics").text, re.MULTILINE
    )
