"""strands-agents: an agent, streamed, with a tool, and a typed answer, which it demands as a tool's call."""

from __future__ import annotations

import asyncio
import os

from pydantic import BaseModel
from strands import Agent, tool
from strands.models.openai import OpenAIModel

CITIES = []


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    CITIES.append(city)
    return f"4711 in {city}"


async def streamed(agent: Agent, prompt: str) -> str:
    return "".join([event["data"] async for event in agent.stream_async(prompt) if "data" in event])


def main() -> None:
    options = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    model = OpenAIModel(client_args=options, model_id="demo", params={"temperature": 0})
    common = {"model": model, "callback_handler": None}
    assert "42" in str(Agent(**common)("What is 12 + 30?"))
    assert "42" in asyncio.run(streamed(Agent(**common), "What is 12 + 30?"))
    assert str(Agent(**common, tools=[get_weather])("What is the weather in Paris?"))
    assert CITIES == ["Paris"]
    person = Agent(**common)("Ann is 41 years old.", structured_output_model=Person).structured_output
    assert isinstance(person, Person)
    print("an agent, streamed too, with a tool; a typed answer")


main()
