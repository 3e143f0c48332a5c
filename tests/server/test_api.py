"""The API of a running server: what only the real processes show. The built-in model, with keys and a second name."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import AuthenticationError, BadRequestError
from prometheus_client.parser import text_string_to_metric_families

from minisgl.models.hub import demo_folder
from minisgl.tokenizer.text import TextTokenizer
from support.server import PATIENCE, Server, cpu_seconds, wait_until, worker_pids

LONG = "The harbour master counted forty boats before the fog came in. " * 2
CONTEXT = 4000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ["--served-model-name", "demo", "org/demo", "--page-size", "4", "--max-body-bytes", "40000000"]
    flags += ["--max-seq-len-override", str(CONTEXT)]
    with Server(*flags, "--api-key", "secret", "--root-path", "/llm") as server:
        yield server
        server.wait_idle()


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.from_folder(demo_folder())


def get(server: Server, path: str) -> httpx.Response:
    return httpx.get(server.url + path, headers={"authorization": "Bearer secret"}, timeout=300)


def post(server: Server, path: str, body: dict[str, Any] | None = None, **headers: str) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers={"authorization": "Bearer secret", **headers}, timeout=300)


def complete(server: Server, **body: Any) -> dict[str, Any]:
    response = post(server, "/v1/completions", {"max_tokens": 4, "temperature": 0, "ignore_eos": True, **body})
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def cached_tokens(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]  # type: ignore[no-any-return]


def test_the_api_key_admits_and_stays_secret(server: Server) -> None:
    assert httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
    with pytest.raises(AuthenticationError):
        server.client.with_options(api_key="wrong").models.list()
    assert [model.id for model in server.client.models.list()] == ["demo", "org/demo"]
    assert "secret" not in get(server, "/server_info").text
    assert get(server, "/llm/v1/models/org/demo").json()["max_model_len"] == CONTEXT


def test_text_to_tokens_and_back(server: Server, tokenizer: TextTokenizer) -> None:
    text = "héllo, 世界 🙂"
    body = post(server, "/tokenize", {"prompt": text}).json()
    assert body["tokens"] == tokenizer.encode(text).tolist()
    assert body["count"] == len(body["tokens"])
    assert post(server, "/detokenize", {"tokens": body["tokens"]}).json() == {"prompt": text}
    messages = [{"role": "user", "content": "hi"}]
    body = post(server, "/tokenize", {"messages": messages}).json()
    assert body["tokens"] == tokenizer.encode_chat(messages).tolist()
    answer = post(server, "/v1/chat/completions", {"messages": messages, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == body["count"]
    assert "messages" in get(server, "/tokenizer_info").json()["chat_template"]


def test_flush_and_salts(server: Server) -> None:
    """A prefix is shared only under the same salt, and by no request after a flush."""
    assert post(server, "/flush_cache").json()["success"]
    first = complete(server, prompt=LONG)
    assert cached_tokens(first) == 0
    again = complete(server, prompt=LONG)
    length = first["usage"]["prompt_tokens"]
    assert cached_tokens(again) == (length - 1) // 4 * 4
    salted = complete(server, prompt=LONG, cache_salt="mine")
    assert cached_tokens(salted) == 0
    assert cached_tokens(complete(server, prompt=LONG, cache_salt="mine")) == (length - 1) // 4 * 4
    assert cached_tokens(complete(server, prompt=LONG, cache_salt="other")) == 0
    texts = {answer["choices"][0]["text"] for answer in (first, again, salted)}
    assert len(texts) == 1
    server.wait_idle()
    assert post(server, "/flush_cache").json()["pages"] >= 3 * ((length - 1) // 4)
    assert post(server, "/flush_cache").json()["pages"] == 0
    assert cached_tokens(complete(server, prompt=LONG)) == 0


def test_truncated_prompt(server: Server, tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode(LONG).tolist()
    answer = complete(server, prompt=LONG, truncate_prompt_tokens=9, echo=True, return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["prompt_token_ids"] == ids[-9:]
    assert choice["text"].startswith(tokenizer.decode(ids[-9:]))
    assert answer["usage"]["prompt_tokens"] == 9
    whole = complete(server, prompt="abc " * 2000, truncate_prompt_tokens=-1, max_tokens=7)
    assert whole["usage"]["prompt_tokens"] == CONTEXT - 7


def test_scores_do_not_depend_on_how_they_are_asked(server: Server) -> None:
    """Echoed, listed by id, chunked by a cache hit or not: one number for a token."""
    body: dict[str, Any] = {"prompt": "one two three", "echo": True, "logprobs": 2, "prompt_logprobs": 0}
    (choice,) = complete(server, **body)["choices"]
    (alone,) = complete(server, **body | {"max_tokens": 0})["choices"]
    logprobs = choice["logprobs"]
    count = len(alone["logprobs"]["tokens"])
    assert alone["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:count]
    listed = [next(iter(entry.values()))["logprob"] for entry in choice["prompt_logprobs"][1:]]
    assert listed == logprobs["token_logprobs"][1:count]
    for value, top in zip(logprobs["token_logprobs"][count:], logprobs["top_logprobs"][count:], strict=True):
        assert value == max(top.values()), "greedy: the token is the most likely, bit for bit"


def test_offsets_are_places_in_the_text(server: Server) -> None:
    """Offsets hold for special tokens, skipped or not, and for bytes that are no text."""
    for ids, skip, text, offsets in (
        ([97, 258, 98], True, "ab", [0, 1, 1]),
        ([97, 258, 98], False, "a<|im_end|>b", [0, 1, 11]),
        ([128, 97, 98], True, "\ufffdab", [0, 1, 2]),
    ):
        body = {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 1, "skip_special_tokens": skip}
        (choice,) = complete(server, **body)["choices"]
        assert choice["text"].startswith(text)
        assert choice["logprobs"]["text_offset"] == [*offsets, len(text)]


def test_best_of_is_the_likeliest(server: Server) -> None:
    body: dict[str, Any] = {"prompt": "Once", "temperature": 1.5, "seed": 3, "max_tokens": 6, "logprobs": 0}
    every = complete(server, **body, n=6)["choices"]
    ranked = sorted(every, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    best = complete(server, **body, n=2, best_of=6)["choices"]
    assert [choice["text"] for choice in best] == [choice["text"] for choice in ranked[:2]]


BAD_SCHEMA = {"type": "object", "properties": {"a": {"type": "no such type"}}}


@pytest.mark.parametrize(
    ("path", "field", "param"),
    [
        ("/v1/completions", {"guided_regex": "("}, "guided_regex"),
        ("/v1/completions", {"structured_outputs": {"json": BAD_SCHEMA}}, "structured_outputs.json"),
        ("/v1/completions", {"ebnf": "root ::= nothing"}, "ebnf"),
        ("/v1/chat/completions", {"guided_grammar": "start: a\n%grammar a [5]"}, "guided_grammar"),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": BAD_SCHEMA}}},
            "response_format",
        ),
        ("/generate", {"text": "x", "sampling_params": {"regex": "("}}, "sampling_params.regex"),
    ],
)
def test_a_grammar_that_is_none(server: Server, path: str, field: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    response = post(server, path, field if "text" in field else body | field)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_that_the_allowed_ids_exclude(server: Server, temperature: float) -> None:
    body = {"prompt": "x", "max_tokens": 5, "temperature": temperature, "guided_regex": "a[bc]+"}
    for allowed in ([99], [97]):  # from the beginning, or behind the first token
        response = post(server, "/v1/completions", {**body, "allowed_token_ids": allowed})
        assert response.status_code == 400, response.text
        assert response.headers["x-should-retry"] == "false"
        assert response.json()["error"]["param"] == "allowed_token_ids"
    assert complete(server, **{**body, "allowed_token_ids": [97, 99]})["choices"][0]["text"] == "acccc"


def test_abort_ends_the_engines_work(server: Server) -> None:
    body = {"prompt": "on and on", "n": 8, "max_tokens": CONTEXT - 100, "ignore_eos": True}  # many seconds
    with ThreadPoolExecutor() as pool:
        answers = [
            pool.submit(post, server, "/v1/completions", body, **{"x-request-id": f"job-{index}"}) for index in range(3)
        ]
        wait_until(lambda: server.info()["scheduler-0"]["requests_running"] == 3 * 8)
        assert post(server, "/abort", {"request_id": "job-1"}).json() == {"aborted": 1}
        assert answers[1].result(PATIENCE).status_code == 499
        wait_until(lambda: server.info()["scheduler-0"]["requests_running"] == 2 * 8)
        assert post(server, "/abort", {"all": True}).json() == {"aborted": 2}
        assert {answer.result(PATIENCE).status_code for answer in answers} == {499}
    server.wait_idle()


def test_a_huge_prompt_delays_no_other_request(server: Server) -> None:
    """Megabytes of text once kept a tokenizer worker busy for half a minute."""
    tokenizer = worker_pids(server.process.pid)["minisgl.tokenizer.tokenizer_worker"]
    before = cpu_seconds(tokenizer)
    huge = "lorem ipsum " * 2_500_000
    with ThreadPoolExecutor() as pool:
        refused = pool.submit(post, server, "/v1/completions", {"prompt": huge})
        complete(server, prompt="hello")
        response = refused.result(PATIENCE)
    assert cpu_seconds(tokenizer) - before < 3
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "prompt", "context_length_exceeded")
    assert response.headers["x-should-retry"] == "false"
    with pytest.raises(BadRequestError) as caught:
        server.client.completions.create(model="demo", prompt="x " * 5000)
    assert caught.value.code == "context_length_exceeded"


def test_health_and_metrics(server: Server) -> None:
    assert get(server, "/health_generate").json()["status"] == "ok"
    assert get(server, "/ready").status_code == 200

    def sample(name: str) -> float:
        text = get(server, "/metrics").text
        families = text_string_to_metric_families(text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    before = sample("vllm:generation_tokens_total")
    complete(server, prompt=LONG, n=2, max_tokens=5)
    assert sample("vllm:generation_tokens_total") == before + 10
    assert sample("minisgl:time_to_first_token_seconds_count") >= 2
    wait_until(lambda: sample("minisgl:prefix_cache_queries_total") > 0)
    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json={"prompt": "long", "n": 8, "max_tokens": CONTEXT - 100, "stream": True, "ignore_eos": True},
        headers={"authorization": "Bearer secret"},
        timeout=PATIENCE,
    ) as response:
        lines = response.iter_lines()
        next(lines)
        wait_until(lambda: sample("vllm:num_requests_running") == 8)
        assert sample("vllm:kv_cache_usage_perc") > 0
    wait_until(lambda: sample("vllm:num_requests_running") == 0)
