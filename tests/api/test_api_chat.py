"""/v1/chat/completions: what goes to the engine, and what comes back, streamed and not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from api_harness import MODEL, RunningServer
from api_sse import parse_events
from fake_engine import answer

from minisgl.message.logprobs import PositionLogprobs, TokenLogprob, pack_positions
from minisgl.message.packed_ids import pack_ids
from minisgl.message.shared import TextOptions
from minisgl.message.to_api import Accepted, OutputDelta
from minisgl.message.to_tokenizer import ChatPrompt, Generate
from minisgl.server.api.answers.chat_writer import ChatWriter
from minisgl.server.api.answers.parsed_choice import ChatOptions
from minisgl.server.api.bodies.route_bodies import ChatBody
from minisgl.server.api.requests.open_request import Delta

PATH = "/v1/chat/completions"


def chat(text: str = "hello you", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def sent(server: RunningServer, body: dict[str, Any]) -> Generate:
    """Return what the engine gets for this body."""
    before = len(server.engine.of_type(Generate))
    response = server.post(PATH, json=body)
    assert response.status_code == 200, response.text
    generate = server.engine.wait_for(Generate, before + 1)[-1]
    assert isinstance(generate, Generate)
    return generate


@pytest.mark.parametrize("n", [1, 3])
def test_stream_concatenates_to_the_whole_answer(server: RunningServer, n: int) -> None:
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "héllo 你好 🙂"}],
        "n": n,
        "max_tokens": 11,
    }
    whole = server.sdk.chat.completions.create(**request)
    texts = [""] * n
    finishes: list[str | None] = [None] * n
    for chunk in server.sdk.chat.completions.create(**request, stream=True):
        for choice in chunk.choices:
            assert finishes[choice.index] is None, "a chunk after the last"
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts == [answer("héllo 你好 🙂", index, 11) for index in range(n)]
    assert finishes == [choice.finish_reason for choice in whole.choices] == ["length"] * n
    assert [choice.index for choice in whole.choices] == list(range(n))
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 11 * n)
    server.assert_idle()


def test_a_streams_last_chunk_tells_of_the_token_that_ended_it() -> None:
    """The token has no text, so only the last chunk can carry its log probability and id."""
    body = ChatBody(messages=[], logprobs=True, return_token_ids=True)
    options = ChatOptions(body=body, model=MODEL, parser=lambda _end: None)
    writer = ChatWriter(options)
    writer.begin(SimpleNamespace(prompts={0: Accepted([0], pack_ids([1]))}, seq_ids=[0]))  # type: ignore[arg-type]
    text, end = Delta(0), Delta(0)
    text.add(
        OutputDelta(
            0, pack_ids([5]), "a", logprobs=pack_positions([PositionLogprobs(TokenLogprob(5, b"a", -0.5), 1, [])])
        )
    )
    end.add(
        OutputDelta(
            0,
            pack_ids([7]),
            "",
            "stop",
            logprobs=pack_positions([PositionLogprobs(TokenLogprob(7, b"", -0.25), 1, [])]),
        )
    )
    data = writer.events(text) + writer.events(end) + b"data: [DONE]\n\n"
    _role, first, last = [event["choices"][0] for event in parse_events(data.decode())]
    assert (first["delta"]["content"], first["token_ids"]) == ("a", [5])
    assert [one["logprob"] for one in first["logprobs"]["content"]] == [-0.5]
    assert (last["delta"], last["finish_reason"], last["token_ids"]) == ({}, "stop", [7])
    assert [one["logprob"] for one in last["logprobs"]["content"]] == [-0.25]


def test_whole_answer_is_openais_object(server: RunningServer) -> None:
    response = server.post(PATH, json=chat(max_tokens=2))
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": answer("hello you", 0, 2), "refusal": None},
                "finish_reason": "length",
                "stop_reason": None,
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 2,
            "total_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_stream_is_openais_chunks(server: RunningServer) -> None:
    response = server.post(PATH, json=chat("stop it", stream=True, max_tokens=4, n=2))
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "no-cache" in response.headers["cache-control"]
    assert response.headers["x-accel-buffering"] == "no"
    chunks = parse_events(response.text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    for index in range(2):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        first, *middle, last = mine
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert all(choice["delta"].keys() == {"content"} and choice["delta"]["content"] for choice in middle)
        assert all(choice["finish_reason"] is None for choice in mine[:-1])
        assert (last["delta"], last["finish_reason"], last["stop_reason"]) == ({}, "stop", "END")


def test_choices_interleave(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(tick=0.02)
    chunks = parse_events(server.post(PATH, json=chat(stream=True, max_tokens=4, n=2)).text)
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order != sorted(order)


def test_role_leaves_with_the_first_token(server: RunningServer) -> None:
    with server.sdk.chat.completions.create(**chat("endless"), stream=True) as stream:
        first, second = next(iter(stream)), next(iter(stream))
        assert first.choices[0].delta.role == "assistant"
        assert second.choices[0].delta.content


def test_include_usage(server: RunningServer) -> None:
    body = chat(stream=True, max_tokens=3, stream_options={"include_usage": True})
    *chunks, last = parse_events(server.post(PATH, json=body).text)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 5
    silent = chat(stream=True, max_tokens=3, stream_options={"include_usage": False})
    assert all("usage" not in chunk for chunk in parse_events(server.post(PATH, json=silent).text))


def test_messages_reach_the_template(server: RunningServer) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm", "audio": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = {"messages": messages, "tools": tools, "chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 1}
    generate = sent(server, body)
    assert generate.prompt == ChatPrompt(
        [
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": "a\nb", "name": "ann"},
            {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "call_1", "content": "42"},
        ],
        tools,
        {"enable_thinking": False},
    )
    assert sent(server, {**body, "tool_choice": "auto"}).prompt.tools == tools  # type: ignore[union-attr]
    assert sent(server, {**body, "tool_choice": "none"}).prompt.tools is None  # type: ignore[union-attr]


def test_sampling_reaches_the_engine(server: RunningServer) -> None:
    generate = sent(
        server,
        chat(
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            min_p=0.1,
            seed=-5,
            stop="end",
            stop_token_ids=[3],
            ignore_eos=True,
            max_tokens=9,
            max_completion_tokens=2,
            skip_special_tokens=False,
        ),
    )
    sampling = generate.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.seed, sampling.stop, sampling.stop_token_ids) == (-5, ("end",), (3,))
    assert (sampling.ignore_eos, sampling.max_tokens) == (True, 2)
    assert generate.text == TextOptions(("end",), skip_special_tokens=False)


def test_defaults_and_nulls(server: RunningServer) -> None:
    """An explicit null is the same as nothing."""
    plain = sent(server, chat())
    names = (
        "temperature top_p top_k min_p n seed stop stop_token_ids max_tokens max_completion_tokens stream "
        "stream_options tools tool_choice response_format logprobs logit_bias user metadata model"
    )
    nulls = sent(server, {**chat(), **dict.fromkeys(names.split())})
    assert plain.sampling == nulls.sampling
    assert plain.sampling.temperature == 1.0
    assert plain.sampling.max_tokens is None
    assert plain.text == nulls.text


@pytest.mark.parametrize(
    "neutral",
    [
        {"logprobs": False},
        {"logit_bias": {}},
        {"presence_penalty": 0, "frequency_penalty": 0.0},
        {"response_format": {"type": "text"}},
        {"parallel_tool_calls": True},
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"no_such_field": 1},
        {"modalities": ["text"]},
    ],
)
def test_neutral_values_are_accepted(server: RunningServer, neutral: dict[str, Any]) -> None:
    sent(server, chat(**neutral))


def test_verbosity_is_the_chat_templates(server: RunningServer) -> None:
    prompt = sent(server, chat(verbosity="low", prediction={"type": "content", "content": "x"})).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_kwargs == {"verbosity": "low"}
    assert server.post(PATH, json=chat(verbosity="loud")).status_code == 400
    assert server.post(PATH, json=chat(modalities=["text", "audio"])).status_code == 400


def test_the_service_tier_is_repeated_in_the_answer(server: RunningServer) -> None:
    whole = server.sdk.chat.completions.create(**chat(service_tier="flex"))
    assert whole.service_tier == "flex"
    asked = chat(service_tier="flex", stream=True, stream_options={"include_usage": True})
    assert {chunk.service_tier for chunk in server.sdk.chat.completions.create(**asked)} == {"flex"}
    assert "service_tier" not in server.post(PATH, json=chat()).json()


@pytest.mark.parametrize("path", ["/v1/moderations", "/v1/files"])
def test_missing_openai_routes_are_answered_in_its_shape(server: RunningServer, path: str) -> None:
    response = server.post(path, json={"input": "x"})
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert path in response.json()["error"]["message"]


def test_seeds_of_choices(server: RunningServer) -> None:
    """A seed always gives the same seeds, none gives fresh ones; choices differ."""
    first, again, longer = (sent(server, chat(seed=42, n=n)).seeds for n in (2, 2, 3))
    assert first == again == longer[:2]
    assert len(set(longer)) == 3
    fresh = [sent(server, chat()).seeds[0] for _ in range(2)]
    assert fresh[0] != fresh[1]
    assert all(0 <= seed < 2**63 for seed in longer + fresh)
