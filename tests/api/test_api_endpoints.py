"""Everything but generation: models, tokens, health, metrics, and what an operator does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from api_harness import MODEL, RawClient, RunningServer
from api_sse import parse_events
from fake_engine import wait_until
from prometheus_client.parser import text_string_to_metric_families

from minisgl.message.packed_ids import pack_ids, unpack_ids
from minisgl.message.shared import Abort, FlushCache, StatsRequest
from minisgl.message.to_api import OutputDelta, OutputDeltas
from minisgl.message.to_tokenizer import ChatPrompt, Encode, Generate, IdsPrompt, TextPrompt
from minisgl.server.api.bodies.route_bodies import ChatBody, CompletionBody, GenerateBody, SglangBody

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hello there"}


# --- models ---


def test_models_health_version(server: RunningServer) -> None:
    assert [model.id for model in server.sdk.models.list()] == [MODEL]
    model = server.sdk.models.retrieve(MODEL)
    assert (model.object, model.owned_by) == ("model", "minisgl")
    assert server.get(f"/v1/models/{MODEL}").json()["max_model_len"] == 4096
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/version").json()["version"]


def test_several_names(start_server: Callable[..., RunningServer]) -> None:
    names = [MODEL, "short", "org/Long-Name"]
    server = start_server(model_names=tuple(names))
    assert [model.id for model in server.sdk.models.list()] == names
    for name in names:
        card = server.sdk.models.retrieve(name)
        assert (card.id, card.object, card.owned_by, card.root) == (name, "model", "minisgl", "/models/test")  # type: ignore[attr-defined]
        answer = server.sdk.chat.completions.create(model=name, messages=[{"role": "user", "content": "x"}])
        assert answer.model == MODEL
    assert server.get("/v1/models/org").status_code == 404


def test_sglangs_model_info(server: RunningServer) -> None:
    info = server.get("/get_model_info").json()
    assert info["model_path"] == info["tokenizer_path"] == "/models/test"
    assert info["is_generation"] is True


# --- tokens ---


def test_tokenize_returns_ids(server: RunningServer) -> None:
    body = server.post("/tokenize", json={"model": MODEL, "prompt": "a bb ccc"}).json()
    assert body == {"count": 3, "max_model_len": 4096, "tokens": [1, 2, 3], "token_strs": None}
    body = server.post("/tokenize", json={"prompt": "a bb", "return_token_strs": True}).json()
    assert body["token_strs"] == ["a", "bb"]
    assert server.engine.of_type(Encode)[-1].prompt == TextPrompt("a bb")
    server.post("/tokenize", json={"prompt": "a bb", "add_special_tokens": False})
    assert server.engine.of_type(Encode)[-1].prompt == TextPrompt("a bb", add_special_tokens=False)


def test_tokenize_messages(server: RunningServer) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": [USER], "tools": tools, "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}}
    assert server.post("/tokenize", json=body).json()["tokens"] == [5, 5]
    assert server.engine.of_type(Encode)[-1].prompt == ChatPrompt([USER], tools, {"a": 1}, add_generation_prompt=False)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
        {"functions": [{"name": "f"}]},
        {"functions": [{"name": "f"}], "function_call": "none"},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"tools": []},
        {"continue_final_message": True},
        {"add_generation_prompt": False},
    ],
)
def test_tokenize_makes_the_prompt_that_chat_makes(server: RunningServer, fields: dict[str, Any]) -> None:
    body = {"model": MODEL, "messages": [USER], **fields}
    assert server.post("/tokenize", json=body).status_code == 200
    assert server.post("/v1/chat/completions", json=body).status_code == 200
    assert server.engine.of_type(Encode)[-1].prompt == server.engine.of_type(Generate)[-1].prompt


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"messages": [USER], "reasoning_effort": "huge"}, 400, "reasoning_effort"),
        ({"messages": [USER], "functions": [{}]}, 400, "functions.0.name"),
        (
            {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
            400,
            "continue_final_message",
        ),
        ({"prompt": "a", "messages": [USER]}, 400, "prompt"),
        ({"prompt": 5}, 400, "prompt"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "king"}]}, 400, "messages.0.role"),
        ({"messages": [USER], "add_special_tokens": True}, 400, "add_special_tokens"),
        ({"messages": [{"role": "user", "content": "refuse"}]}, 400, "messages"),
        ({"prompt": "a", "model": "gpt-99"}, 404, "model"),
    ],
)
def test_bad_tokenize(server: RunningServer, body: dict[str, Any], status: int, param: str) -> None:
    response = server.post("/tokenize", json=body)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param


def test_a_tokenizer_that_is_silent(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.server.api.routes.service.TOKENIZER_TIMEOUT", 0.1)
    response = server.post("/tokenize", json={"prompt": "silent"})
    assert response.status_code == 503
    assert response.headers["retry-after"]


def test_detokenize_returns_text(server: RunningServer) -> None:
    assert server.post("/detokenize", json={"tokens": [1, 3]}).json() == {"prompt": "x xxx"}
    for tokens in ([-1], [1000], [True], ["a"], 5, [10**29]):
        response = server.post("/detokenize", json={"tokens": tokens})
        assert response.status_code == 400, tokens
        assert response.json()["error"]["param"].startswith("tokens")


def test_tokenizer_info(server: RunningServer) -> None:
    assert server.get("/tokenizer_info").json() == {"tokenizer_class": "Words", "chat_template": None}


# --- health ---


def test_health_ping_ready(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(beats=True)
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/ping").status_code == server.post("/ping").status_code == 200
    assert server.get("/ready").json() == {"status": "ready"}


def test_health_notices_a_silent_engine(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(beats=True, health_timeout=1.5)
    server.engine.answers_queries = False
    wait_until(lambda: server.get("/health").status_code == 503)
    asked = len(server.engine.of_type(StatsRequest))
    for path in ("/health", "/ready"):
        response = server.get(path)
        assert response.json()["error"]["code"] == "unhealthy"
        assert response.headers["retry-after"]
    assert server.get("/version").status_code == 200
    assert len(server.engine.of_type(StatsRequest)) == asked, "no process is asked"


def test_ready_says_when_the_server_is_full(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(max_queued_requests=1)
    client = RawClient(server.port)
    client.post("/generate", {"prompt": "hold"})
    server.engine.wait_for(Generate)
    assert server.get("/ready").status_code == 503
    assert server.get("/health").status_code == 200
    client.leave()
    wait_until(lambda: server.get("/ready").status_code == 200)


def test_health_generate_really_generates(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.get("/health_generate").json()["status"] == "ok"
    (generate,) = server.engine.of_type(Generate)
    assert isinstance(generate.prompt, IdsPrompt)
    assert generate.sampling.max_tokens == 1
    assert generate.priority > 1000, "ahead of whatever clients may send"
    monkeypatch.setattr("minisgl.server.api.routes.operations.GENERATE_TIMEOUT", 0.1)
    monkeypatch.setattr(server.engine, "generates", False)
    assert server.get("/health_generate").status_code == 503
    server.engine.wait_for(Abort)


# --- metrics ---


def metrics(server: RunningServer) -> dict[str, float]:
    """Sample name with its labels, without the model's -> value."""
    response = server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(response.text):
        assert family.documentation
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == MODEL
            found[sample.name + "".join(f"|{value}" for value in labels.values())] = sample.value
    return found


def test_metrics_count_requests(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(beats=True)
    server.engine.scheduler_counts |= {
        "requests_waiting": 3,
        "pages": 100,
        "pages_free": 50,
        "pages_cached": 40,
        "pages_locked": 10,
        "retractions": 2,
        "prefix_tokens_queried": 60,
        "prefix_tokens_hit": 45,
        "snapshot_hits": 3,
        "snapshots_saved": 7,
        "snapshots_evicted": 1,
    }
    before = metrics(server)
    assert before["minisgl:generation_tokens_total"] == 0
    start = time.perf_counter()
    server.post("/v1/completions", json={"prompt": ["one two", "one"], "n": 2, "max_tokens": 5})
    server.post(CHAT, json={"messages": [{"role": "user", "content": "stop it now"}], "max_tokens": 3})
    client = RawClient(server.port)
    client.post("/generate", {"prompt": "hold"})
    wait_until(lambda: metrics(server)["minisgl:prompt_tokens_total"] == 2 + 1 + 3 + 1)  # the request is accepted
    client.leave()
    server.post("/generate", json={"prompt": "fail"})
    server.assert_idle()
    seconds = time.perf_counter() - start
    server.engine.wait_for(Abort)
    wait_until(lambda: metrics(server)["minisgl:num_requests_waiting"] == 3)
    after = metrics(server)
    for prefix in ("minisgl:", "vllm:", "sglang:"):
        expected = {
            "num_requests_waiting": 3,
            "num_requests_running": 0,
            "kv_cache_usage_perc": 0.2,
            "num_preemptions_total": 2,
            "prefix_cache_queries_total": 60,
            "prefix_cache_hits_total": 45,
            "state_snapshot_hits_total": 3,
            "state_snapshots_saved_total": 7,
            "state_snapshots_evicted_total": 1,
            "prompt_tokens_total": 2 + 1 + 3 + 1 + 1,
            "generation_tokens_total": 4 * 5 + 3 + 2,
            "request_success_total|length": 4,
            "request_success_total|stop": 1,
            "request_success_total|abort": 1,
            "request_success_total|error": 1,
            "time_to_first_token_seconds_count": 6,
            "inter_token_latency_seconds_count": 4 * 4 + 2 + 1,
            "e2e_request_latency_seconds_count": 5,
            "request_prompt_tokens_sum": 8,
            "request_generation_tokens_sum": 23,
            "request_max_num_generation_tokens_sum": 5 + 3,
            "request_max_num_generation_tokens_count": 2,
            "request_generation_tokens_bucket|5.0": 5,
            "request_generation_tokens_bucket|2.0": 0,
            "request_generation_tokens_bucket|+Inf": 5,
        }
        assert {name: after[prefix + name] for name in expected} == expected
        assert 0 <= after[f"{prefix}inter_token_latency_seconds_sum"] < 6 * seconds
        assert 0 < after[f"{prefix}e2e_request_latency_seconds_sum"] < 5 * seconds


def test_the_time_between_tokens_is_that_of_their_arrival(start_server: Callable[..., RunningServer]) -> None:
    server = start_server()
    start = time.perf_counter()
    client = RawClient(server.port)
    client.post("/generate", {"prompt": "hold"})
    (generate,) = server.engine.wait_for(Generate)
    for count in (1, 2, 3):
        server.engine.say(OutputDeltas([OutputDelta(generate.seq_ids[0], pack_ids([count]), "x")]))
        wait_until(lambda count=count: server.client.metrics.generation_tokens == count)  # type: ignore[misc]
        time.sleep(0.05)
    found = metrics(server)
    assert found["minisgl:inter_token_latency_seconds_count"] == 2
    assert 2 * 0.05 <= found["minisgl:inter_token_latency_seconds_sum"] <= time.perf_counter() - start
    client.leave()


def test_running_requests_are_seen(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(beats=True)
    client = RawClient(server.port)
    client.post("/generate", {"prompt": "endless", "stream": True})
    wait_until(lambda: metrics(server)["vllm:num_requests_running"] == 1)
    client.leave()
    wait_until(lambda: metrics(server)["vllm:num_requests_running"] == 0)


# --- what an operator does ---


def test_flush_cache(server: RunningServer) -> None:
    assert server.post("/flush_cache").json() == {"success": True, "pages": 17}
    assert server.get("/flush_cache").status_code == 200
    assert server.post("/reset_prefix_cache").status_code == 200
    assert len(server.engine.of_type(FlushCache)) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_abort_by_id(server: RunningServer, stream: bool) -> None:
    """A request ends by the id that the client chose, in the middle of the answer, under SGLang's name too."""
    for body in ({"request_id": "mine"}, {"request_ids": ["no", "mine"]}, {"rid": "mine"}):
        answers: list[Any] = []

        def ask(answers: list[Any] = answers) -> None:
            request = {"prompt": "endless", "stream": stream, "n": 2}
            answers.append(server.post("/v1/completions", json=request, headers={"x-request-id": "mine"}))

        generated = server.client.metrics.generation_tokens
        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda generated=generated: server.client.metrics.generation_tokens > generated)  # type: ignore[misc]
        path = "/abort_request" if "rid" in body else "/abort"
        wait_until(lambda path=path, body=body: server.post(path, json=body).json() == {"aborted": 1})  # type: ignore[misc]
        thread.join(120)
        (answer,) = answers
        if stream:
            *_, last = parse_events(answer.text)
            assert last["error"]["code"] == "request_aborted"
        else:
            assert answer.status_code == 499
            error = answer.json()["error"]
            assert (error["code"], error["type"]) == ("request_aborted", "server_error"), "the client did nothing wrong"
            assert answer.headers["x-should-retry"] == "false"
        (generate,) = server.engine.of_type(Generate)
        (abort,) = server.engine.wait_for(Abort)
        assert abort.seq_ids == generate.seq_ids
        assert server.post("/abort", json={"request_id": "mine"}).json() == {"aborted": 0}
        server.engine.received.clear()


def test_abort_by_the_answers_id(server: RunningServer) -> None:
    with server.stream("/v1/completions", json={"prompt": "endless", "stream": True}) as response:
        lines = response.iter_lines()
        identity = parse_events(next(lines) + "\n\ndata: [DONE]\n\n")[0]["id"]
        assert server.post("/abort", json={"request_id": identity}).json() == {"aborted": 1}
        assert any("request_aborted" in line for line in lines)


@pytest.mark.parametrize("field", ["request_id", "rid"])
def test_abort_by_a_name_in_the_body(server: RunningServer, field: str) -> None:
    with server.stream("/v1/completions", json={"prompt": "endless", "stream": True, field: "my own"}) as response:
        lines = response.iter_lines()
        next(lines)
        assert server.post("/abort_request", json={"rid": "my own"}).json() == {"aborted": 1}
        assert any("request_aborted" in line for line in lines)


def test_abort_all(server: RunningServer) -> None:
    clients = [RawClient(server.port) for _ in range(3)]
    for client in clients:
        client.post("/generate", {"prompt": "hold"})
    server.engine.wait_for(Generate, 3)
    wait_until(lambda: server.counts()["open_requests"] == 3)
    assert server.post("/abort", json={"all": True}).json() == {"aborted": 3}
    for client in clients:
        assert b" 499 " in client.read_all()
    assert server.post("/abort_request", json={"abort_all": True}).json() == {"aborted": 0}
    sent = {seq_id for generate in server.engine.of_type(Generate) for seq_id in generate.seq_ids}
    wait_until(lambda: sent <= {s for abort in server.engine.of_type(Abort) for s in abort.seq_ids})


@pytest.mark.parametrize("body", [{}, {"request_id": ""}, {"request_ids": []}, {"request_id": 5}, {"all": "yes"}])
def test_bad_abort(server: RunningServer, body: dict[str, Any]) -> None:
    assert server.post("/abort", json=body).status_code == 400


def test_equal_ids_name_all_of_them(server: RunningServer) -> None:
    """The end of one does not take it from the others."""
    headers = {"x-request-id": "same"}
    with server.stream("/generate", json={"prompt": "endless", "stream": True}, headers=headers) as response:
        lines = response.iter_lines()
        next(lines)
        assert server.post("/generate", json={"prompt": "x"}, headers=headers).status_code == 200
        with server.stream("/generate", json={"prompt": "endless", "stream": True}, headers=headers) as other:
            assert server.post("/abort", json={"request_id": "same"}).json() == {"aborted": 2}
            assert "request_aborted" in other.read().decode()
        assert any("request_aborted" in line for line in lines)


def test_ids_of_the_tokens(server: RunningServer) -> None:
    """Text goes out as ids and comes back from them."""
    tokens = server.post("/tokenize", json={"prompt": "a bb ccc"}).json()["tokens"]
    server.post("/v1/completions", json={"prompt": tokens})
    assert unpack_ids(server.engine.of_type(Generate)[-1].prompt.ids).tolist() == tokens


# --- docs ---


def test_the_docs_name_every_route_and_field(server: RunningServer) -> None:
    docs = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    paths = {route.path.partition("/{")[0] for route in server.app.routes}  # type: ignore[attr-defined]
    assert [path for path in sorted(paths) if path not in docs] == []
    fields = ChatBody.model_fields | CompletionBody.model_fields | GenerateBody.model_fields | SglangBody.model_fields
    assert [name for name in fields if f"`{name}`" not in docs] == []


# --- /server_info ---


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server waits longer for its processes than any pause of a test."""
    monkeypatch.setattr("minisgl.server.api.routes.operations.SERVER_INFO_TIMEOUT", 120.0)


@pytest.mark.usefixtures("patient")
def test_server_info(server: RunningServer) -> None:
    info = server.get("/server_info").json()
    assert info["complete"] is True
    assert info["processes"].keys() == {"api", "tokenizer-0", "scheduler-0", "detokenizer"}
    assert info["processes"]["api"]["open_requests"] == 0
    limits = {"max_seq_len": 4096, "vocab_size": 1000, "max_choices": 64, "max_stop_strings": 32, "max_logprobs": 20}
    assert info["limits"] == {**limits, "max_new_tokens": None}
    assert info["config"]["model_names"] == [MODEL]


@pytest.mark.usefixtures("patient")
def test_server_info_of_several_tokenizers(start_server: Callable[..., RunningServer]) -> None:
    info = start_server(num_tokenizers=3).get("/server_info").json()
    assert {f"tokenizer-{index}" for index in range(3)} <= info["processes"].keys()


def test_server_info_when_a_process_is_silent(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.server.api.routes.operations.SERVER_INFO_TIMEOUT", 0.1)
    monkeypatch.setattr(server.engine, "answers_queries", False)
    info = server.get("/server_info").json()
    assert info["complete"] is False
    assert info["processes"].keys() == {"api"}
    server.assert_idle()
