"""The anthropic package: messages, streams, a tool, count_tokens, typed answers, errors, refused images, cancel."""

from __future__ import annotations

import anthropic
from aborts import wait_for_aborts
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": "What is 12 + 30?"}]
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


class Person(BaseModel):
    name: str
    age: int


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
    asked = [{"role": "user", "content": "Ann is 41 years old."}]
    typed = client.messages.parse(**common, messages=asked, output_format=Person)
    assert typed.parsed_output == Person(name="Ann", age=41)
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    refusal = None
    try:
        client.messages.create(**common, messages=[{"role": "user", "content": [{"type": "image", "source": source}]}])
    except anthropic.BadRequestError as error:
        refusal = error.message
    assert refusal is not None
    assert "only text" in refusal
    with client.messages.stream(
        model="demo", max_tokens=3000, messages=MESSAGES, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream.text_stream))
    wait_for_aborts(1)
    print("messages, stream, tools, count_tokens, a typed answer, errors, cancel")


main()
