"""/v1/completions and /generate."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from api_harness import MODEL, RunningServer
from api_sse import parse_events
from fake_engine import answer

from minisgl.message.packed_ids import pack_ids
from minisgl.message.to_api import OutputDelta, OutputDeltas
from minisgl.message.to_tokenizer import Generate, IdsPrompt, TextPrompt

PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("one two", [TextPrompt("one two")]),
        (["one", "two"], [TextPrompt("one"), TextPrompt("two")]),
        ([5, 6, 7], [IdsPrompt(pack_ids([5, 6, 7]))]),
        ([[5], [6, 999]], [IdsPrompt(pack_ids([5])), IdsPrompt(pack_ids([6, 999]))]),
    ],
)
def test_prompt_forms(server: RunningServer, prompt: Any, expected: list[Any]) -> None:
    completion = server.sdk.completions.create(model=MODEL, prompt=prompt, n=2, max_tokens=3)
    generates = server.engine.of_type(Generate)
    assert [generate.prompt for generate in generates] == expected
    assert [choice.index for choice in completion.choices] == list(range(2 * len(expected)))
    assert completion.object == "text_completion"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 6 * len(expected)
    server.assert_idle()


def test_choices_are_numbered_across_prompts(server: RunningServer) -> None:
    request: dict[str, Any] = {"model": MODEL, "prompt": ["one", "two"], "n": 2, "max_tokens": 5}
    expected = [answer("one", 0, 5), answer("one", 1, 5), answer("two", 0, 5), answer("two", 1, 5)]
    assert [choice.text for choice in server.sdk.completions.create(**request).choices] == expected
    texts = [""] * 4
    for chunk in server.sdk.completions.create(**request, stream=True):
        assert chunk.object == "text_completion"
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected


def test_a_prompt_in_a_list_gets_the_seeds_it_gets_alone(server: RunningServer) -> None:
    server.sdk.completions.create(model=MODEL, prompt=["one", "two"], seed=7, n=2)
    server.sdk.completions.create(model=MODEL, prompt="two", seed=7, n=2)
    one, two, alone = (generate.seeds for generate in server.engine.of_type(Generate))
    assert one == two == alone
    server.sdk.completions.create(model=MODEL, prompt=["one", "one"])
    *_, first, second = (generate.seeds for generate in server.engine.of_type(Generate))
    assert first != second, "without a seed, equal prompts are drawn apart"


def test_priority_reaches_the_scheduler(server: RunningServer) -> None:
    assert server.post(PATH, json={"prompt": "one", "priority": 5}).status_code == 200
    assert server.engine.of_type(Generate)[-1].priority == 5
    error = server.post(PATH, json={"prompt": "one", "priority": 5000}).json()["error"]
    assert error["param"] == "priority"
    assert "1000" in error["message"]


def test_default_is_16_tokens(server: RunningServer) -> None:
    completion = server.sdk.completions.create(model=MODEL, prompt="one")
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 16


def test_echo_prepends_the_prompt(server: RunningServer) -> None:
    request: dict[str, Any] = {"model": MODEL, "prompt": ["one", "two"], "max_tokens": 3, "echo": True}
    texts = [choice.text for choice in server.sdk.completions.create(**request).choices]
    assert texts == ["one" + answer("one", 0, 3), "two" + answer("two", 0, 3)]
    chunks = parse_events(server.post(PATH, json={**request, "stream": True}).text)
    for index, text in enumerate(texts):
        choices = [chunk["choices"][0] for chunk in chunks]
        assert "".join(choice["text"] for choice in choices if choice["index"] == index) == text


def test_the_stop_string_is_named_whole_and_streamed(server: RunningServer) -> None:
    body = {"prompt": "stop it", "max_tokens": 3, "stop": "END"}
    whole = server.post(PATH, json=body).json()
    *_, last = parse_events(server.post(PATH, json={**body, "stream": True}).text)
    for answered in (whole, last):
        (choice,) = answered["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")


def test_include_usage(server: RunningServer) -> None:
    body = {"prompt": "one", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 4}
    *chunks, last = parse_events(server.post(PATH, json=body).text)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("cached", [(0, 7, 5), (5, 0, 7), (7, 5, 0)])
def test_choices_of_a_prompt_share_the_cached_tokens_of_the_first(
    server: RunningServer, cached: tuple[int, int, int]
) -> None:
    """The others find the prompt that the first has just computed, in whatever order they end."""
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(server.post, PATH, json={"prompt": ["hold one", "hold two"], "n": 3})
        for generate in server.engine.wait_for(Generate, 2):
            for seq_id, number in zip(generate.seq_ids, cached, strict=True):
                server.engine.say(OutputDeltas([OutputDelta(seq_id, pack_ids([1]), "a", "length", number)]))
        usage = whole.result().json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_best_of_that_equals_n(server: RunningServer) -> None:
    assert server.post(PATH, json={"prompt": "one", "n": 2, "best_of": 2}).status_code == 200


def test_generate_answers_in_its_own_format(server: RunningServer) -> None:
    body = server.post("/generate", json={"prompt": "one two", "max_tokens": 3}).json()
    assert body.pop("id")
    assert body == {
        "text": answer("one two", 0, 3),
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }
    generate = server.engine.of_type(Generate)[-1]
    assert generate.sampling.temperature == 0.0
    stream = server.post("/generate", json={"prompt": "one two", "max_tokens": 3, "stream": True})
    *events, last = parse_events(stream.text)
    assert "".join(event["text"] for event in events) == answer("one two", 0, 3)
    assert (last["text"], last["finish_reason"], last["usage"]["completion_tokens"]) == ("", "length", 3)


def test_generate_takes_token_ids(server: RunningServer) -> None:
    assert server.post("/generate", json={"prompt": [1, 2]}).status_code == 200
    assert server.engine.of_type(Generate)[-1].prompt == IdsPrompt(pack_ids([1, 2]))
