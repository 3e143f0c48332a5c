"""The anthropic package: messages, streams, a tool that is run, count_tokens, structured output, errors."""

from __future__ import annotations

import anthropic

MESSAGES = [{"role": "user", "content": "What is 12 + 30?"}]
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def main() -> None:
    client = anthropic.Anthropic()
    common = {"model": "demo", "max_tokens": 200}
    whole = client.messages.create(**common, messages=MESSAGES)
    text = whole.content[0].text
    assert "42" in text
    assert whole.stop_reason == "end_turn"
    with client.messages.stream(**common, messages=MESSAGES) as stream:
        assert "42" in "".join(stream.text_stream)
        assert stream.get_final_message().usage.output_tokens > 0
    counted = client.messages.count_tokens(model="demo", messages=MESSAGES).input_tokens
    assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens

    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    called = client.messages.create(**common, messages=asked, tools=[WEATHER])
    assert called.stop_reason == "tool_use"
    call = next(block for block in called.content if block.type == "tool_use")
    assert call.input == {"city": "Paris"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns = [*asked, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**common, messages=turns, tools=[WEATHER]).content[0].text

    refused = None
    try:
        client.messages.create(model="claude", max_tokens=8, messages=MESSAGES)
    except anthropic.NotFoundError as error:
        refused = error.body
    assert refused is not None
    assert refused["type"] == "error"
    print("messages, stream, tools, count_tokens, errors")


main()
