"""Anthropic's SDK against the real server: its helpers for streams, a loop of tool calls, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import MessageParam, ToolParam

from support.server import PATIENCE, Server

QUESTION: list[MessageParam] = [{"role": "user", "content": "What is Minisgl?"}]
WEATHER: ToolParam = {
    "name": "get_weather",
    "description": "Get the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CONTEXT = 640
GREEDY = {"temperature": 0}  # sent in the body, because newer clients have no such argument


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--served-model-name", "demo", "--api-key", "secret", "--max-seq-len-override", str(CONTEXT)) as server:
        yield server
        server.wait_idle()


@pytest.fixture
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0, timeout=PATIENCE)


def test_a_streamed_message_is_the_whole_one(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 40, "messages": QUESTION, "extra_body": GREEDY}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert (whole.type, whole.role, whole.model, whole.stop_reason) == ("message", "assistant", "demo", "max_tokens")
    assert [block.text for block in whole.content if block.type == "text"] == [text]
    assert text.startswith("Minisgl is")
    assert [block.model_dump(exclude={"parsed_output"}) for block in final.content] == [
        block.model_dump() for block in whole.content
    ]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert whole._request_id


def test_tokens_are_counted_as_messages_report_them(client: anthropic.Anthropic) -> None:
    """However much of the prompt is cached."""
    asked: dict[str, Any] = {"model": "demo", "system": "Be brief. " * 20, "messages": QUESTION, "tools": [WEATHER]}
    count = client.messages.count_tokens(**asked).input_tokens
    cached = []
    for _ in range(2):
        usage = client.messages.create(max_tokens=2, **asked).usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count
        cached.append(usage.cache_read_input_tokens or 0)
    assert cached[1] > cached[0]


def test_a_loop_of_tool_calls(client: anthropic.Anthropic) -> None:
    messages: list[MessageParam] = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 64, "tools": [WEATHER], "extra_body": GREEDY}
    with client.messages.stream(messages=messages, tool_choice={"type": "any"}, **asked) as stream:
        partial = [event.partial_json for event in stream if event.type == "input_json"]
        called = stream.get_final_message()
    (call,) = called.content
    assert call.type == "tool_use"
    assert (call.name, call.input, called.stop_reason) == ("get_weather", {"city": "Paris"}, "tool_use")
    assert "".join(partial) == '{"city": "Paris"}'
    messages += [
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]},
    ]
    answer = client.messages.create(messages=messages, **asked)
    assert answer.stop_reason == "end_turn"
    assert "sunny" in "".join(block.text for block in answer.content if block.type == "text")


def test_an_answer_is_begun_and_stopped(client: anthropic.Anthropic) -> None:
    """The client writes the first words, and a full context ends an answer."""
    begun: list[MessageParam] = [*QUESTION, {"role": "assistant", "content": "Minisgl is a small and"}]
    asked: dict[str, Any] = {"model": "demo", "extra_body": GREEDY}
    answer = client.messages.create(messages=begun, max_tokens=64, stop_sequences=["server"], **asked)
    (block,) = answer.content
    assert block.type == "text"
    assert block.text == " fast inference "
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "server")
    long: list[MessageParam] = [{"role": "user", "content": "x" * (CONTEXT - 50)}]
    full = client.messages.create(messages=long, max_tokens=CONTEXT, **asked)
    assert full.stop_reason == "model_context_window_exceeded"
    assert full.usage.input_tokens + full.usage.output_tokens == CONTEXT
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(messages=[{"role": "user", "content": "x" * CONTEXT}], max_tokens=8, **asked)


def test_errors_are_the_clients_classes(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.AuthenticationError) as unauthorized:
        client.with_options(api_key="wrong").messages.create(model="demo", max_tokens=1, messages=QUESTION)
    assert unauthorized.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nobody", max_tokens=1, messages=QUESTION)
    image: Any = [{"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0\.type.*image"):
        client.messages.create(model="demo", max_tokens=1, messages=[{"role": "user", "content": image}])
