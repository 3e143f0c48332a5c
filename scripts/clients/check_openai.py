"""The openai package: chats, streams, tools, parsed answers, completions, Responses with earlier ones, embeddings,
errors, images that are refused, streams that are left."""

from __future__ import annotations

import json
import os

from aborts import wait_for_aborts
from openai import BadRequestError, NotFoundError, OpenAI, pydantic_function_tool
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": "What is 12 + 30?"}]


class Person(BaseModel):
    name: str
    age: int


class GetWeather(BaseModel):
    """Get the weather in a city."""

    city: str


def main() -> None:
    client = OpenAI()
    assert [model.id for model in client.models.list()] == ["demo"]
    chat = {"model": "demo", "messages": MESSAGES, "temperature": 0}
    whole = client.chat.completions.create(**chat)
    text = whole.choices[0].message.content
    assert "42" in text
    with client.chat.completions.stream(**chat) as stream:
        assert stream.get_final_completion().choices[0].message.content == text

    asked = [{"role": "user", "content": "Ann is 41 years old."}]
    parsed = client.chat.completions.parse(model="demo", messages=asked, response_format=Person, temperature=0)
    assert parsed.choices[0].message.parsed == Person(name="Ann", age=41)
    weather = [{"role": "user", "content": "What is the weather in Paris?"}]
    called = client.chat.completions.parse(
        model="demo", messages=weather, tools=[pydantic_function_tool(GetWeather)], temperature=0
    )
    (call,) = called.choices[0].message.tool_calls
    assert call.function.parsed_arguments == GetWeather(city="Paris")

    plain = client.completions.create(model="demo", prompt=["one two", "three"], max_tokens=4, logprobs=1)
    assert [choice.index for choice in plain.choices] == [0, 1]

    first = client.responses.create(model="demo", input="What is 12 + 30?", temperature=0)
    assert first.output_text == text
    again = client.responses.create(model="demo", input="Hello!", previous_response_id=first.id, temperature=0)
    assert [item.role for item in client.responses.input_items.list(again.id, order="asc")][:2] == ["user", "assistant"]
    with client.responses.stream(model="demo", input="What is 12 + 30?", temperature=0) as events:
        kinds = [event.type for event in events]
        assert events.get_final_response().output_text == text
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    typed = client.responses.parse(model="demo", input="Ann is 41 years old.", text_format=Person, temperature=0)
    assert typed.output_parsed == Person(name="Ann", age=41)
    assert json.loads(typed.output_text) == {"name": "Ann", "age": 41}

    code = None
    try:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    except NotFoundError as error:
        code = error.code
    assert code == "model_not_found"
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    refused = None
    try:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": [image]}])
    except BadRequestError as error:
        refused = error.message
    assert refused is not None
    assert "only text" in refused

    endless = {"model": "demo", "stream": True, "extra_body": {"ignore_eos": True}}
    with client.chat.completions.create(**endless, messages=MESSAGES) as chunks:
        next(iter(chunks))
    with client.responses.create(**endless, input="What is 12 + 30?") as events:
        next(iter(events))
    wait_for_aborts(2)
    embedder = OpenAI(base_url=os.environ["MINISGL_EMBEDDER"] + "/v1")
    embedded = embedder.embeddings.create(model="demo", input=["one two", "three"], dimensions=16)
    assert [len(one.embedding) for one in embedded.data] == [16, 16]
    print("chat, stream, parse, tools, completions, responses with an earlier one, embeddings, errors, cancel")


main()
