"""Reports for routers tell the numbers of /metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from api_harness import MODEL, RawClient, RunningServer
from fake_engine import wait_until

from minisgl.server.api.metrics import EngineLoad

COUNTS = {
    "requests_waiting": 3,
    "tokens_waiting": 700,
    "pages": 100,
    "pages_free": 50,
    "pages_cached": 40,
    "pages_locked": 10,
    "prefix_tokens_queried": 60,
    "prefix_tokens_hit": 45,
}


def metric(server: RunningServer, name: str) -> float:
    found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", server.get("/metrics").text, re.MULTILINE)
    assert found, name
    return float(found[1])


@pytest.fixture
def loaded(start_server: Callable[..., RunningServer]) -> Iterator[RunningServer]:
    """Start a server whose engine has reported these counts, with one running request."""
    server = start_server(beats=True)
    server.engine.scheduler_counts |= COUNTS
    client = RawClient(server.port)
    client.post("/generate", {"prompt": "endless"})
    wait_until(lambda: metric(server, "vllm:num_requests_running") == 1)
    yield server
    client.leave()


def test_loads_are_those_of_the_metrics(loaded: RunningServer) -> None:
    for path in ("/v1/loads", "/get_loads"):
        (load,) = loaded.get(path).json()["loads"]
        assert load["num_running_reqs"] == metric(loaded, "vllm:num_requests_running") == 1
        assert load["num_waiting_reqs"] == metric(loaded, "vllm:num_requests_waiting") == 3
        assert load["token_usage"] == metric(loaded, "vllm:kv_cache_usage_perc") == 0.2
        assert (load["max_total_num_tokens"], load["num_used_tokens"]) == (6400, 1280)
        assert (load["num_total_tokens"], load["cache_hit_rate"], load["dp_rank"]) == (1980, 0.75, 0)
    assert loaded.get("/get_load").json() == [
        {"dp_rank": 0, "num_reqs": 4, "num_waiting_reqs": 3, "num_tokens": 1980},
    ]
    assert loaded.get("/load").json() == {"server_load": 1}
    wait_until(lambda: loaded.get("/v1/loads").json()["loads"][0]["gen_throughput"] > 0)


def test_usage_is_that_of_the_fuller_pool() -> None:
    windowed = {"window_pages": 10, "window_pages_free": 2, "window_pages_cached": 5, "window_pages_locked": 2}
    assert EngineLoad.of(COUNTS, 64, 0.0).usage == 0.2
    assert EngineLoad.of(COUNTS | windowed, 64, 0.0).usage == 0.5
    assert EngineLoad.of(COUNTS | windowed | {"window_pages_free": 7}, 64, 0.0).usage == 0.2


def test_server_info_has_sglangs_keys(loaded: RunningServer) -> None:
    info = loaded.get("/server_info").json()
    assert info["model_path"] == info["tokenizer_path"] == "/models/test"
    assert (info["served_model_name"], info["tp_size"], info["dp_size"], info["page_size"]) == (MODEL, 1, 1, 64)
    assert (info["max_total_num_tokens"], info["context_length"]) == (6400, 4096)
    assert "kv_events" not in info, "nothing is published"


def test_an_idle_server_before_its_first_heartbeat(server: RunningServer) -> None:
    (load,) = server.get("/v1/loads").json()["loads"]
    assert (load["num_running_reqs"], load["token_usage"], load["cache_hit_rate"]) == (0, 0.0, 0.0)
    assert server.get("/load").json() == {"server_load": 0}
