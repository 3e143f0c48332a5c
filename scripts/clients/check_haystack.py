"""haystack: chats, streams, an agent with a tool, a typed answer, embeddings."""

from __future__ import annotations

import os
from typing import Annotated

from haystack.components.agents import Agent
from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from pydantic import BaseModel

CITIES = []


class Person(BaseModel):
    name: str
    age: int


@tool
def get_weather(city: Annotated[str, "the city"]) -> str:
    """Get the weather in a city."""
    CITIES.append(city)
    return f"4711 in {city}"


def main() -> None:
    model = {"model": "demo", "api_base_url": os.environ["OPENAI_BASE_URL"]}
    chat = OpenAIChatGenerator(**model, generation_kwargs={"temperature": 0})
    asked = [ChatMessage.from_user("What is 12 + 30?")]
    (whole,) = chat.run(asked)["replies"]
    assert "42" in whole.text
    pieces = []
    chat.run(asked, streaming_callback=lambda chunk: pieces.append(chunk.content))
    assert "".join(pieces) == whole.text
    agent = Agent(chat_generator=chat, tools=[get_weather])
    assert agent.run(messages=[ChatMessage.from_user("What is the weather in Paris?")])["last_message"].text
    assert CITIES == ["Paris"]
    typed = OpenAIChatGenerator(**model, generation_kwargs={"temperature": 0, "response_format": Person})
    (person,) = typed.run([ChatMessage.from_user("Ann is 41 years old.")])["replies"]
    assert Person.model_validate_json(person.text) == Person(name="Ann", age=41)
    embedder = OpenAITextEmbedder(model="demo", api_base_url=os.environ["MINISGL_EMBEDDER"] + "/v1")
    assert embedder.run("one two")["embedding"]
    print("chat, stream, an agent with a tool, a typed answer, embeddings")


main()
