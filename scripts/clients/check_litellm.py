"""litellm: chat, streams, text completions, tools, embeddings, errors."""

from __future__ import annotations

import asyncio
import json
import os

import litellm

URL = os.environ["MINISGL_URL"] + "/v1"
MESSAGES = [{"role": "user", "content": "What is 12 + 30?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def main() -> None:
    chat = {"model": "openai/demo", "api_base": URL, "messages": MESSAGES, "temperature": 0, "max_tokens": 32}
    whole = litellm.completion(**chat)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.completion_tokens > 0
    assert whole.choices[0].finish_reason in ("stop", "length")
    chunks = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert rebuilt.choices[0].message.content == text
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens

    two = litellm.completion(**chat | {"temperature": 1}, n=2, seed=1, logprobs=True, top_logprobs=2)
    assert len(two.choices) == 2
    assert two.choices[0].logprobs.content[0].top_logprobs

    asynchronous = asyncio.run(litellm.acompletion(**chat))
    assert asynchronous.choices[0].message.content == text

    plain = litellm.text_completion(
        model="text-completion-openai/demo", api_base=URL, prompt=["one two", "three"], max_tokens=4, temperature=0
    )
    assert [choice.index for choice in plain.choices] == [0, 1]

    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    called = litellm.completion(**chat | {"messages": asked, "max_tokens": 100}, tools=[TOOL], tool_choice="required")
    (call,) = called.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert "city" in json.loads(call.function.arguments)

    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    shaped = litellm.completion(
        **chat, response_format={"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    )
    if shaped.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(shaped.choices[0].message.content)["sum"], int)

    item = {"model": "openai/demo", "api_base": URL, "input": MESSAGES, "temperature": 0, "max_output_tokens": 32}
    response = litellm.responses(**item)
    assert response.status in ("completed", "incomplete")
    assert response.output[0].content[0].text == text
    *_, last = litellm.responses(**item, stream=True)
    assert last.response.output[0].content[0].text == text

    embedded = litellm.embedding("openai/demo", ["one two", "three"], api_base=os.environ["MINISGL_EMBEDDER"] + "/v1")
    assert len(embedded.data) == 2

    for change, kind in (
        ({"model": "openai/nothing"}, litellm.NotFoundError),
        ({"temperature": 9}, litellm.BadRequestError),
        ({"max_tokens": 10**6}, litellm.ContextWindowExceededError),
        ({"api_key": "wrong"}, litellm.AuthenticationError),
    ):
        try:
            litellm.completion(**chat | change)
        except kind:
            continue
        raise AssertionError(f"{change} was answered without {kind}")
    print("chat, stream, completions, a tool, a schema, responses, embeddings, errors")


main()
