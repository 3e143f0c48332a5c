"""The form before tools, `functions` and `function_call`, as clients of old send it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from api_harness import MODEL, RunningServer

from minisgl.message.to_tokenizer import ChatPrompt, Generate

PATH = "/v1/chat/completions"
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
SLOW = 0.1  # seconds between tokens: two that come while the server is busy share an event
TIME: dict[str, Any] = {"name": "get_time"}
CALL = [
    "Hm.\n",
    "<tool_call>",
    '\n{"name": "get_weather", ',
    '"arguments": {"ci',
    'ty": "Paris"}',
    "}\n",
    "</tool_call>",
]
SECOND = ['\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>']


@pytest.fixture
def hermes(start_server: Callable[..., RunningServer]) -> RunningServer:
    return start_server(tool_call_parser="hermes")


def say(*texts: str, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"say {json.dumps(texts)}"}
    return {"model": MODEL, "messages": [message], "functions": [WEATHER, TIME], **fields}


def last_request(server: RunningServer) -> Generate:
    generate: Generate = server.engine.wait_for(Generate)[-1]
    return generate


def test_a_call_is_written_in_the_older_form(hermes: RunningServer) -> None:
    completion = hermes.sdk.chat.completions.create(**say(*CALL, *SECOND))
    choice = completion.choices[0]
    assert choice.finish_reason == "function_call"
    assert choice.message.content == "Hm."
    assert choice.message.tool_calls is None
    assert choice.message.function_call is not None, "the first, and no other"
    assert choice.message.function_call.model_dump() == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    plain = hermes.sdk.chat.completions.create(**say("Hello")).choices[0]
    assert (plain.finish_reason, plain.message.content, plain.message.function_call) == ("stop", "Hello", None)


def test_a_call_is_streamed_in_the_older_form(hermes: RunningServer) -> None:
    hermes.engine.tick = SLOW
    deltas = []
    reasons = []
    for chunk in hermes.sdk.chat.completions.create(**say(*CALL, *SECOND), stream=True):
        delta = chunk.choices[0].delta
        reasons.append(chunk.choices[0].finish_reason)
        assert delta.tool_calls is None
        if delta.function_call is not None:
            deltas.append((delta.function_call.name, delta.function_call.arguments))
    assert deltas[0] == ("get_weather", "")
    assert all(name is None for name, _ in deltas[1:])
    assert len(deltas) > 2
    assert "".join(arguments for _, arguments in deltas) == '{"city": "Paris"}'
    assert [reason for reason in reasons if reason] == ["function_call"]


def test_which_function_is_called(hermes: RunningServer) -> None:
    def asked(**fields: Any) -> tuple[list[str] | None, str]:
        choice = hermes.post(PATH, json=say(*CALL, **fields)).json()["choices"][0]
        generate = last_request(hermes)
        assert isinstance(generate.prompt, ChatPrompt)
        shown = generate.prompt.tools
        grammar = generate.sampling.grammar
        assert grammar is None or ("get_weather" in grammar.text and "get_time" not in grammar.text)
        assert (grammar is not None) is isinstance(fields.get("function_call"), dict)
        return shown and [tool["function"]["name"] for tool in shown], choice["finish_reason"]

    both = ["get_weather", "get_time"]
    assert asked() == asked(function_call="auto") == (both, "function_call")
    assert asked(function_call={"name": "get_weather"}) == (both, "stop"), "the answer has the requested form"
    assert asked(function_call="none") == (None, "stop")


def test_a_conversation_with_calls(hermes: RunningServer) -> None:
    call = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "get_weather", "content": "sunny"},
        {"role": "user", "content": "and now"},
    ]
    assert hermes.post(PATH, json={"messages": messages}).status_code == 200
    prompt = last_request(hermes).prompt
    assert isinstance(prompt, ChatPrompt)
    assistant, result = prompt.messages[1:3]
    (sent,) = assistant["tool_calls"]
    assert (sent["type"], sent["function"]) == ("function", call)
    assert (result["role"], result["content"], result["tool_call_id"]) == ("tool", "sunny", sent["id"])
    assert "function_call" not in assistant


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"functions": [WEATHER, {"name": "a b"}]}, "functions.1.name"),
        ({"functions": [{"name": "f", "parameters": {"type": "array"}}]}, "functions.0.parameters.type"),
        ({"functions": {"name": "f"}}, "functions"),
        ({"function_call": "required"}, "function_call"),
        ({"function_call": {"name": "other"}}, "function_call.name"),
        ({"functions": None, "function_call": {"name": "f"}}, "function_call"),
        ({"tools": [{"type": "function", "function": TIME}]}, "functions"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.name"),
        ({"messages": [{"role": "assistant", "function_call": {"arguments": "{}"}}]}, "messages.0.function_call.name"),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": {}}}]},
            "messages.0.function_call.arguments",
        ),
    ],
)
def test_wrong_fields_are_named(server: RunningServer, change: dict[str, Any], param: str) -> None:
    response = server.post(PATH, json=say("x", **change))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
