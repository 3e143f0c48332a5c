"""Harmony's channels through the three APIs: thoughts, calls and content where each API has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from api_harness import MODEL, RunningServer
from api_sse import parse_events

THOUGHT = ["<|channel|>", "analysis", "<|message|>", "Hm", ".", "<|end|>", "<|start|>", "assistant"]
FINAL = ["<|channel|>", "final", "<|message|>", "Hello", " you."]
CALL = ["<|channel|>", "commentary to=functions.f ", "<|constrain|>", "json", "<|message|>", '{"a"', ": 1}"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture
def server(start_server: Callable[..., RunningServer]) -> RunningServer:
    return start_server(tool_call_parser="harmony", reasoning_parser="harmony")


def said(*texts: str) -> str:
    return f"say {json.dumps(texts)}"


def post(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(path, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    return {"model": MODEL, "messages": [{"role": "user", "content": said(*texts)}], "tools": [tool], **fields}


def test_chat_completions(server: RunningServer) -> None:
    path = "/v1/chat/completions"
    whole = post(server, path, chat(*THOUGHT, *FINAL))
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Hello you.")
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    whole = post(server, path, chat(*THOUGHT, *CALL))
    choice = whole["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    chunks = parse_events(server.post(path, json=chat(*THOUGHT, *CALL, stream=True)).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert calls[0]["function"]["name"] == "f"
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1}'
    assert not any(delta.get("content") for delta in deltas)


def test_items_of_the_responses_api(server: RunningServer) -> None:
    tool = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": False}
    body = {"model": MODEL, "tools": [tool], "reasoning": {"effort": "low"}}
    found = post(server, "/v1/responses", body | {"input": said(*THOUGHT, *FINAL)})
    assert [item["type"] for item in found["output"]] == ["reasoning", "message"]
    assert found["output"][1]["content"][0]["text"] == "Hello you."
    found = post(server, "/v1/responses", body | {"input": said(*THOUGHT, *CALL)})
    assert [item["type"] for item in found["output"]] == ["reasoning", "function_call"]
    assert (found["output"][1]["name"], found["output"][1]["arguments"]) == ("f", '{"a": 1}')


def test_blocks_of_the_messages_api(server: RunningServer) -> None:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 64, "tools": [{"name": "f", "input_schema": SCHEMA}]}
    for texts, kinds in ((THOUGHT + FINAL, ["thinking", "text"]), (THOUGHT + CALL, ["thinking", "tool_use"])):
        found = post(server, "/v1/messages", body | {"messages": [{"role": "user", "content": said(*texts)}]})
        assert [block["type"] for block in found["content"]] == kinds
    assert found["content"][1]["input"] == {"a": 1}
    assert found["stop_reason"] == "tool_use"
