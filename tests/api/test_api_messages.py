"""Anthropic's Messages: what the engine gets for a body, and its answers, events and errors, in Anthropic's shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import pytest
from api_harness import MODEL, RawClient, RunningServer
from fake_engine import LIMITS
from pydantic_core import from_json

from minisgl.config import SamplingDefaults
from minisgl.message.packed_ids import pack_ids
from minisgl.message.to_api import OutputDelta, OutputDeltas
from minisgl.message.to_tokenizer import ChatPrompt, Encode, Generate

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
CALLED: dict[str, Any] = {"type": "tool_use", "id": "1", "name": "get_time", "input": {}}
PICTURED = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TIME: dict[str, Any] = {"type": "custom", "name": "get_time", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
CALL = ["<tool_call>\n", '{"name": "get_weather", "arg', 'uments": {"ci', 'ty": "Pa', 'ris"}}\n', "</tool_call>"]
TIME_CALL = ["\n<tool_call>\n", '{"name": "get_time", "arguments": {}}\n', "</tool_call>"]
THOUGHT = ["<think>", "\nHm", ".\n", "</think>", "\n\n"]
HELLO: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "hello there"}]}


@pytest.fixture
def qwen(start_server: Callable[..., RunningServer]) -> RunningServer:
    return start_server(tool_call_parser="hermes", reasoning_parser="qwen3")


def say(*texts: str, **fields: Any) -> dict[str, Any]:
    """A request that the engine answers with these tokens."""
    messages = [{"role": "user", "content": f"say {json.dumps(texts)}"}]
    return {**HELLO, "max_tokens": 64, "messages": messages, "tools": [WEATHER, TIME], **fields}


def answer(server: RunningServer, body: dict[str, Any], path: str = PATH) -> dict[str, Any]:
    response = server.post(path, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def sent(server: RunningServer, **fields: Any) -> Generate:
    """Return what the engine gets for these fields."""
    before = len(server.engine.of_type(Generate))
    answer(server, HELLO | fields)
    generate = server.engine.wait_for(Generate, before + 1)[-1]
    assert isinstance(generate, Generate)
    return generate


def prompt(server: RunningServer, messages: list[Any], **fields: Any) -> ChatPrompt:
    found = sent(server, messages=messages, **fields).prompt
    assert isinstance(found, ChatPrompt)
    return found


def events(server: RunningServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of all events; each has its type as its name."""
    response = server.post(PATH, json={**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def replay(all_events: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Put a stream together as Anthropic's clients do; its order must be Anthropic's."""
    first, ping, *rest, end, stop = all_events
    assert (first["type"], ping["type"], end["type"], stop) == (
        "message_start",
        "ping",
        "message_delta",
        {"type": "message_stop"},
    )
    assert first["message"]["content"] == []
    assert first["message"]["stop_reason"] is None
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in rest:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                is_open = True
                blocks.append(event["content_block"] | {"json": ""})
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(blocks) - 1
                delta = event["delta"]
                kind, name = delta.pop("type").removesuffix("_delta"), next(iter(delta))
                assert kind == {"partial_json": "input_json"}.get(name, name)
                target = {"partial_json": "json"}.get(name, name)
                assert delta[name]
                blocks[-1][target] += delta[name]
            case "content_block_stop":
                assert is_open
                assert event == {"type": "content_block_stop", "index": len(blocks) - 1}
                is_open = False
            case other:
                raise AssertionError(other)
    assert not is_open
    for block in blocks:
        if text := block.pop("json"):
            block["input"] = from_json(text, allow_partial=True)
        block.pop("id", None)
    return blocks, end


def error(server: RunningServer, body: Any, path: str = PATH, status: int = 400) -> tuple[str, str]:
    """Type and message of the error, which must have Anthropic's shape."""
    response = server.post(path, json=body)
    assert response.status_code == status, response.text
    found = response.json()
    assert found["type"] == "error"
    assert found["error"].keys() == {"type", "message"}
    assert found["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    return found["error"]["type"], found["error"]["message"]


# What the engine gets.


def test_texts_become_the_conversation(server: RunningServer) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
        {"role": "system", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "e"}, {"type": "text", "text": "f"}]},
    ]
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=ab12;"}
    for system in ("S", [billing, {"type": "text", "text": "S"}]):
        found = prompt(server, messages, system=system)
        assert found.messages == [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": "c"},
            {"role": "system", "content": "d"},
            {"role": "user", "content": "e\nf"},
        ]
        assert found.add_generation_prompt
        assert found.tools is None


def test_calls_thoughts_and_results_become_the_conversation(server: RunningServer) -> None:
    messages = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "1", "name": "get_weather", "input": {"city": "Zürich"}},
                {"type": "tool_use", "id": "2", "name": "get_time", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "tool_result", "tool_use_id": "2", "content": "no clock", "is_error": True},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    _, called, *results, last = prompt(server, messages, tools=[WEATHER, TIME, SEARCH]).messages
    assert (called["reasoning_content"], called["content"]) == ("Hm.", "I look.")
    assert [(call["id"], call["function"]) for call in called["tool_calls"]] == [
        ("1", {"name": "get_weather", "arguments": '{"city": "Zürich"}'}),
        ("2", {"name": "get_time", "arguments": "{}"}),
    ]
    assert results == [
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "2", "content": "Error: no clock"},
    ]
    assert last == {"role": "user", "content": "so?"}


def test_an_empty_result_and_a_begun_answer(server: RunningServer) -> None:
    result = {"type": "tool_result", "tool_use_id": "1"}
    found = prompt(server, [{"role": "assistant", "content": [CALLED]}, {"role": "user", "content": [result]}])
    assert found.messages[1:] == [{"role": "tool", "tool_call_id": "1", "content": ""}]
    assert prompt(server, [{"role": "user", "content": []}]).messages == [{"role": "user", "content": ""}]
    generate = sent(server, messages=[*HELLO["messages"], {"role": "assistant", "content": "The answer is"}])
    assert isinstance(generate.prompt, ChatPrompt)
    assert generate.prompt.continue_final_message
    assert generate.text.continues


def test_tools_and_choices(qwen: RunningServer) -> None:
    found = prompt(qwen, HELLO["messages"], tools=[WEATHER | {"cache_control": {"type": "ephemeral"}}, SEARCH])
    function = {"name": "get_weather", "description": "Get the weather.", "parameters": WEATHER["input_schema"]}
    assert found.tools == [{"type": "function", "function": function}]
    tools = [WEATHER, TIME]
    assert prompt(qwen, HELLO["messages"], tools=tools, tool_choice={"type": "none"}).tools is None
    assert sent(qwen, tools=tools, tool_choice={"type": "auto"}).sampling.grammar is None
    some = sent(qwen, tools=tools, tool_choice={"type": "any"}).sampling.grammar
    one = sent(qwen, tools=tools, tool_choice={"type": "any", "disable_parallel_tool_use": True}).sampling.grammar
    named = sent(qwen, tools=tools, tool_choice={"type": "tool", "name": "get_time"}).sampling.grammar
    assert some is not None
    assert one is not None
    assert named is not None
    assert some.text != one.text
    assert "get_time" in named.text
    assert "get_weather" not in named.text
    assert sent(qwen, tools=[WEATHER | {"strict": True}]).sampling.grammar is not None


def test_sampling_and_template(server: RunningServer) -> None:
    generate = sent(server, temperature=0.5, top_p=0.9, top_k=5, stop_sequences=["END"], metadata={"user_id": "u"})
    sampling = generate.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 5, 8)
    assert generate.text.stop == ("END",)
    assert generate.fewer_tokens
    assert isinstance(generate.prompt, ChatPrompt)
    assert generate.prompt.template_kwargs == {"enable_thinking": False, "thinking": False}
    kwargs = prompt(
        server,
        HELLO["messages"],
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "max"},
        chat_template_kwargs={"thinking": 1},
    ).template_kwargs
    assert kwargs == {"enable_thinking": True, "thinking": 1, "reasoning_effort": "xhigh"}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    asking: list[dict[str, Any]] = [{"output_config": {"format": form}}, {"output_format": form}]
    for fields in asking:
        grammar = sent(server, **fields).sampling.grammar
        assert grammar is not None
        assert (grammar.kind, json.loads(grammar.text)) == ("json_schema", schema)


def test_the_models_recommendations_count(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(sampling_defaults=SamplingDefaults(temperature=0.6, top_k=20))
    sampling = sent(server, top_k=3).sampling
    assert (sampling.temperature, sampling.top_k) == (0.6, 3)


def test_the_prompt_is_counted_as_it_is_sent(server: RunningServer) -> None:
    """The tokenizer gets a message's own prompt, with system, tools and thoughts, and its count comes back."""
    conversation = {
        **{name: HELLO[name] for name in ("model", "messages")},
        "system": "S",
        "tools": [WEATHER],
        "thinking": {"type": "adaptive"},
    }
    counted = answer(server, conversation, COUNT)
    (question,) = server.engine.of_type(Encode)
    message = answer(server, {**conversation, "max_tokens": 5})
    (generate,) = server.engine.of_type(Generate)
    assert question.prompt == generate.prompt
    usage = message["usage"]
    assert counted == {"input_tokens": 2}
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == 2
    assert usage["cache_read_input_tokens"] == 1
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["output_tokens"] == 5


# Answers.


def test_a_message(server: RunningServer) -> None:
    found = answer(server, HELLO)
    assert found.pop("id").startswith("msg_")
    usage = found.pop("usage")
    assert usage["output_tokens"] == 8
    assert found == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "".join(f"hello there·0·{i} " for i in range(8))}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_why_an_answer_stops(qwen: RunningServer, stream: bool) -> None:
    def end(body: dict[str, Any]) -> tuple[str, str | None]:
        found = replay(events(qwen, body))[1]["delta"] if stream else answer(qwen, body)
        return found["stop_reason"], found["stop_sequence"]

    assert end(say("Hi", ".")) == ("end_turn", None)
    assert end(say("Hi", ".", max_tokens=1)) == ("max_tokens", None)
    assert end(say(*CALL)) == ("tool_use", None)
    assert end(say(*CALL[:3])) == ("end_turn", None), "the call is cut"
    assert end(say(*CALL, tool_choice={"type": "tool", "name": "get_weather"})) == ("tool_use", None)
    assert end(say(*CALL, max_tokens=4)) == ("max_tokens", None)
    stopped = {**HELLO, "messages": [{"role": "user", "content": "stop it"}], "stop_sequences": ["END"]}
    assert end(stopped) == ("stop_sequence", "END")


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "reason"),
    [
        (5, 8, "max_tokens"),  # the model's folder has a max_new_tokens of 5
        (LIMITS.max_seq_len - 1, LIMITS.max_seq_len - 1, "max_tokens"),
        (LIMITS.max_seq_len - 1, LIMITS.max_seq_len, "model_context_window_exceeded"),
    ],
)
def test_a_full_context_is_told_from_a_limit(
    server: RunningServer, num_tokens: int, max_tokens: int, reason: str
) -> None:
    client = RawClient(server.port)
    client.post(PATH, {**HELLO, "messages": [{"role": "user", "content": "hold"}], "max_tokens": max_tokens})
    (generate,) = server.engine.wait_for(Generate)
    server.engine.say(OutputDeltas([OutputDelta(generate.seq_ids[0], pack_ids([1] * num_tokens), "a", "length")]))
    assert json.loads(client.read_all().partition(b"\r\n\r\n")[2])["stop_reason"] == reason


def test_blocks_are_the_same_streamed_and_whole(qwen: RunningServer) -> None:
    body = say(*THOUGHT, "I look.", *CALL, *TIME_CALL)
    whole = answer(qwen, body)["content"]
    assert [block.pop("id", "")[:5] for block in whole] == ["", "", "call_", "call_"]
    assert [block["type"] for block in whole] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole[0]["thinking"] == "Hm."
    assert whole[0]["signature"]
    assert whole[1] == {"type": "text", "text": "I look."}
    assert whole[2:] == [
        {"type": "tool_use", "name": "get_weather", "input": {"city": "Paris"}},
        {"type": "tool_use", "name": "get_time", "input": {}},
    ]
    all_events = events(qwen, body)
    blocks, end = replay(all_events)
    assert blocks == whole
    assert end["usage"]["output_tokens_details"] == {"thinking_tokens": 4}
    kinds = [event["content_block"]["type"] for event in all_events if event["type"] == "content_block_start"]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    qwen.assert_idle()


def test_one_call_and_no_more_where_that_is_asked_for(qwen: RunningServer) -> None:
    body = say(*CALL, *TIME_CALL, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["name"] for block in answer(qwen, body)["content"]] == ["get_weather"]
    assert [block["name"] for block in replay(events(qwen, body))[0]] == ["get_weather"]


def test_a_call_that_is_cut_short_has_what_came(qwen: RunningServer) -> None:
    (block,) = answer(qwen, say(*CALL, max_tokens=4))["content"]
    assert block["name"] == "get_weather"
    assert block["input"] in ({}, {"city": "Pa"})


# Errors.


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "not 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "not 'document'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [{"role": "user", "content": [PICTURED]}]}, "messages.0.content.0.content.0.type"),
        ({"messages": [{"role": "assistant", "content": [CALLED | {"input": "x"}]}]}, "messages.0.content.0.input"),
        ({"messages": [{"role": "assistant", "content": [CALLED]}]}, "tool_result"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"system": 5}, "system"),
        ({"tools": [{"name": "x"}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "x", "input_schema": {"type": "string"}}]}, "tools.0.input_schema.type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice.name"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"thinking": {"type": "sometimes"}}, "thinking"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
    ],
)
def test_wrong_fields_are_named(server: RunningServer, change: dict[str, Any], names: str) -> None:
    kind, message = error(server, HELLO | change)
    assert kind == "invalid_request_error"
    assert names in message
    assert not server.engine.of_type(Generate)


def test_errors_of_every_origin_have_anthropics_shape(server: RunningServer) -> None:
    assert error(server, {**HELLO, "model": "nobody"}, status=404)[0] == "not_found_error"
    assert error(server, HELLO, path="/v1/messages/batches", status=404)[0] == "not_found_error"
    for word, status, kind in (
        ("busy", 503, "overloaded_error"),
        ("broken", 500, "api_error"),
        ("fail", 500, "api_error"),
    ):
        assert error(server, {**HELLO, "messages": [{"role": "user", "content": word}]}, status=status)[0] == kind
    refused = error(server, {"messages": [{"role": "user", "content": "refuse"}]}, path=COUNT)
    assert refused == ("invalid_request_error", "messages cannot be rendered")
    for kwargs, status, kind in (
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400, "invalid_request_error"),
        ({"content": b"a=b", "headers": {"content-type": "text/plain"}}, 415, "invalid_request_error"),
        ({"json": HELLO, "headers": {"origin": "https://evil.example"}}, 403, "permission_error"),
        ({"content": b" " * (5 * 1024 * 1024)}, 413, "request_too_large"),
    ):
        response = server.post(PATH, **kwargs)
        assert response.status_code == status
        assert response.json()["error"]["type"] == kind
        assert response.headers["request-id"]
    assert server.get(PATH).json()["error"]["type"] == "invalid_request_error"  # no such method
    assert "error" in server.post("/v1/chat/completions", json={}).json().keys() - {"type"}


def test_malformed_http_is_answered_in_anthropics_shape(server: RunningServer) -> None:
    client = RawClient(server.port)
    client.socket.sendall(b"POST /v1/messages HTTP/1.1\r\nhost: x y\r\n\r\n")
    head, _, body = client.read_all().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_an_error_ends_a_stream(server: RunningServer) -> None:
    client = RawClient(server.port)
    client.post(PATH, {**HELLO, "messages": [{"role": "user", "content": "hold"}], "stream": True})
    begun = client.read_until(b"event: ping")
    assert begun.startswith(b"HTTP/1.1 200 OK")
    (generate,) = server.engine.of_type(Generate)
    server.engine.say(OutputDeltas([OutputDelta(generate.seq_ids[0], pack_ids([1]), "some text")]))
    client.read_until(b"some text")
    server.engine.say(OutputDeltas([OutputDelta(generate.seq_ids[0], b"", "", "error")]))
    name, _, data = client.read_all().decode().partition("event: ")[2].partition("\ndata: ")
    assert name == "error"
    last = json.loads(data.partition("\n\n")[0])
    assert last["error"] == {"type": "api_error", "message": "the generation failed in the server"}
    assert last["type"] == "error"
    assert f"x-request-id: {last['request_id']}" in begun.decode()


def test_models_have_anthropics_form_for_its_clients(start_server: Callable[..., RunningServer]) -> None:
    names = [MODEL, "short", "org/Long-Name"]
    server = start_server(model_names=tuple(names), api_keys=("key",))
    client = anthropic.Anthropic(base_url=server.url, api_key="key", max_retries=0)
    for models in (client.models, client.beta.models):
        assert [model.id for model in models.list()] == names
        assert [model.id for model in models.list(limit=1)] == names, "three pages"
    page = client.models.list(limit=2)
    assert (page.has_more, page.first_id, page.last_id) == (True, MODEL, "short")
    earlier = client.models.list(limit=1, before_id="org/Long-Name")
    assert ([model.id for model in earlier.data], earlier.has_more) == (["short"], True)
    assert [model.id for model in client.models.list(after_id=names[-1])] == []
    for name in names:
        model = client.models.retrieve(name)
        assert (model.id, model.type, model.display_name, model.lifecycle) == (name, "model", name, "active")
        assert (model.max_input_tokens, model.created_at.tzinfo is not None) == (4096, True)
    openai_card = server.get(f"/v1/models/{MODEL}", headers={"x-api-key": "key"}).json()
    assert openai_card.keys() == {"id", "object", "created", "owned_by", "root", "max_model_len"}

    with pytest.raises(anthropic.NotFoundError) as missing:
        client.models.retrieve("claude")
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert missing.value.request_id
    for wrong in (
        {"limit": 0},
        {"limit": 1001},
        {"limit": "9" * 5000},
        {"after_id": "claude"},
        {"before_id": "claude"},
    ):
        with pytest.raises(anthropic.BadRequestError, match=next(iter(wrong))):
            client.models.list(**wrong)  # type: ignore[arg-type]
    with pytest.raises(anthropic.AuthenticationError) as closed:
        client.with_options(api_key="another").models.list()
    assert closed.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


def test_the_key_may_stand_in_x_api_key(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(api_keys=("one", "two"))
    good: list[Any] = [
        {"x-api-key": "two"},
        {"authorization": "Bearer one"},
        {"x-api-key": "one", "authorization": "Bearer wrong"},
        {"x-api-key": "wrong", "authorization": "Bearer two"},
    ]
    for headers in good:
        named = {"anthropic-version": "1999-01-01", "anthropic-beta": "no-such-beta-1999-01-01"}
        response = server.post(PATH, json=HELLO, headers=named | headers)
        assert response.status_code == 200, headers
    assert server.get("/v1/models", headers={"x-api-key": "one"}).status_code == 200
    bad: list[Any] = [
        {},
        {"x-api-key": "three"},
        {"x-api-key": ""},
        {"x-api-key": "Bearer one"},
        [("x-api-key", "one"), ("x-api-key", "two")],
    ]
    for headers in bad:
        response = server.post(PATH, json=HELLO, headers=headers)
        assert response.status_code == 401, headers
        assert response.json()["error"]["type"] == "authentication_error"
