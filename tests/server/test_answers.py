"""Answers of the running server, through the OpenAI SDK and curl."""

from __future__ import annotations

import json
import random
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError

from minisgl import LLM, SamplingParams
from minisgl.tokenizer.text import TextTokenizer
from support.server import PATIENCE, Server, wait_until

PROMPTS = [
    "The quick brown fox",
    "机器学习 is 有趣的 👩‍👩‍👧‍👦 café",
    "e\u0301 o\u0308 \U0001f1e9\U0001f1ea flags",
    "x",
    "The quick brown fox jumps over the lazy dog, again and again and again",
]


@pytest.fixture(scope="module")
def expected(random_model: Path) -> list[dict[str, Any]]:
    """Greedy answers of LLM for PROMPTS."""
    with LLM(str(random_model), device="cpu") as llm:
        return llm.generate(PROMPTS, SamplingParams(max_tokens=60, ignore_eos=True))  # type: ignore[return-value]


def complete(server: Server, prompt: str, **params: Any) -> Any:
    params = {"max_tokens": 60, "temperature": 0, "extra_body": {"ignore_eos": True}, **params}
    return server.client.completions.create(model="random-model", prompt=prompt, **params)


def streamed(server: Server, prompt: str, **params: Any) -> str:
    return "".join(chunk.choices[0].text for chunk in complete(server, prompt, stream=True, **params))


def test_streaming_equals_not_streaming_equals_decoding_all_ids(
    server: Server, expected: list[dict[str, Any]], random_model: Path
) -> None:
    tokenizer = TextTokenizer.from_folder(random_model)
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        whole = complete(server, prompt)
        decoded = tokenizer.decode(answer["token_ids"])
        assert whole.choices[0].text == streamed(server, prompt) == answer["text"] == decoded
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage.completion_tokens == 60
        assert whole.usage.prompt_tokens == len(tokenizer.encode(prompt))
    # The vocabulary's cut characters were really there.
    assert any("\ufffd" in answer["text"] for answer in expected)


def test_chat_streams_what_it_answers(server: Server) -> None:
    messages = [{"role": "user", "content": "héllo 👋"}]
    params = {"model": "random-model", "messages": messages, "max_completion_tokens": 40, "temperature": 0}
    whole = server.client.chat.completions.create(**params)
    chunks = list(server.client.chat.completions.create(**params, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_chat_adds_no_special_tokens_of_its_own(server: Server, random_model: Path) -> None:
    tokenizer = TextTokenizer.from_folder(random_model)
    messages = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.templates.render(messages)
    answer = server.client.chat.completions.create(
        model="random-model",
        messages=messages,
        max_tokens=1,  # type: ignore[arg-type]
    )
    assert answer.usage.prompt_tokens == len(tokenizer.encode(rendered, add_special_tokens=False))


def test_stop_strings_split_over_tokens_never_leak(server: Server, expected: list[dict[str, Any]]) -> None:
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        text = answer["text"]
        for start in range(5, min(len(text) - 4, 60), 11):
            stop = text[start : start + 4]
            if "\ufffd" in stop:
                continue
            shown = streamed(server, prompt, stop=stop)
            assert shown == text[: text.index(stop)]
    whole = complete(server, PROMPTS[0], stop=[expected[0]["text"][20:24]])
    assert whole.choices[0].finish_reason == "stop"
    server.wait_idle()


def test_token_id_prompts_and_lists(server: Server, expected: list[dict[str, Any]], random_model: Path) -> None:
    tokenizer = TextTokenizer.from_folder(random_model)
    ids = [tokenizer.encode(prompt).tolist() for prompt in PROMPTS]
    for prompt in (ids, PROMPTS):
        answer = complete(server, prompt)  # type: ignore[arg-type]
        assert [choice.text for choice in answer.choices] == [one["text"] for one in expected]
        assert [choice.index for choice in answer.choices] == list(range(len(PROMPTS)))


def test_choices_and_seeds(server: Server) -> None:
    params: dict[str, Any] = {"n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 12, "extra_body": {"top_k": 5}}
    first, second = (complete(server, "once", **params) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) == 3
    assert complete(server, "once", **(params | {"n": 1})).choices[0].text == texts[0]
    assert complete(server, "once", **(params | {"seed": 8})).choices[0].text != texts[0]


def test_a_repeated_prompt_reports_cached_tokens(server: Server) -> None:
    prompt = " ".join(f"word{index}" for index in range(80))
    first, second = complete(server, prompt, max_tokens=3), complete(server, prompt, max_tokens=3)
    assert first.choices[0].text == second.choices[0].text
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached == (second.usage.prompt_tokens - 1) // 4 * 4


def test_200_concurrent_streams(server: Server, expected: list[dict[str, Any]]) -> None:
    jobs = [index % len(PROMPTS) for index in range(200)]
    random.Random(0).shuffle(jobs)
    with ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(lambda index: streamed(server, PROMPTS[index]), jobs))
    assert answers == [expected[index]["text"] for index in jobs]
    server.wait_idle()


def test_abandoned_streams_leave_the_server_idle(server: Server) -> None:
    def cut(index: int) -> None:
        body = {"prompt": f"cut {index}", "max_tokens": 30000, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as response:
            lines = response.iter_lines()
            for _ in range(index % 4):
                next(lines)

    def leave_before_the_answer(index: int) -> None:
        body = {"prompt": f"leave {index}", "max_tokens": 30000, "temperature": 0, "ignore_eos": True}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=httpx.Timeout(PATIENCE, read=0.3))

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(cut, range(24)))
        list(pool.map(leave_before_the_answer, range(12)))
    server.wait_idle()


def test_a_client_that_leaves_frees_its_request_before_its_end(server: Server) -> None:
    def aborted() -> int:
        (line,) = re.findall(
            r'\nminisgl:request_success_total{.*"abort".*} (.*)',
            httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text,
        )
        return int(float(line))

    before = aborted()
    body = {"prompt": "long", "max_tokens": 30000, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as response:
        lines = response.iter_lines()
        next(lines)
        wait_until(lambda: server.info()["scheduler-0"]["requests_running"] == 1)
    wait_until(lambda: server.info()["scheduler-0"]["requests_running"] == 0)
    assert aborted() == before + 1, "the request was aborted, not finished"


def test_curl_reads_a_stream(server: Server) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True})
    out = subprocess.run(
        ["curl", "-sN", f"{server.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    events = out.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert all(json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk" for event in events[:-1])


def test_errors_name_the_field_and_the_limit(server: Server) -> None:
    with pytest.raises(BadRequestError) as caught:
        complete(server, "x", max_tokens=40000)
    assert caught.value.param == "max_tokens"
    assert "32768" in caught.value.message
    with pytest.raises(BadRequestError) as caught:
        complete(server, "word " * 40000)
    assert caught.value.param == "prompt"
    with pytest.raises(BadRequestError) as caught:
        complete(server, [[5, 10**6]])  # type: ignore[arg-type]
    assert caught.value.param == "prompt.0.1"
    with pytest.raises(NotFoundError):
        server.client.completions.create(model="another", prompt="x")
    assert complete(server, "still there", max_tokens=2).usage.completion_tokens == 2


def test_models_and_health(server: Server) -> None:
    names = [model.id for model in server.client.models.list()]
    assert names[0] == "random-model"
    assert names[1].endswith("/random-model"), "the folder as it was given is a name, too"
    assert server.client.models.retrieve("random-model").id == "random-model"
    assert httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
    body = {"prompt": "hi", "max_tokens": 3, "temperature": 0}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=PATIENCE).json()
    assert isinstance(answer["text"], str)
