"""agno: an agent, streamed, with a tool, and a typed answer."""

from __future__ import annotations

import os

from agno.agent import Agent
from agno.models.openai.like import OpenAILike
from pydantic import BaseModel

CITIES = []


class Person(BaseModel):
    name: str
    age: int


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    CITIES.append(city)
    return f"4711 in {city}"


def main() -> None:
    model = OpenAILike(
        id="demo", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], temperature=0
    )
    common = {"model": model, "telemetry": False}
    text = Agent(**common).run("What is 12 + 30?").content
    assert "42" in text
    assert "".join(event.content or "" for event in Agent(**common).run("What is 12 + 30?", stream=True)) == text
    assert Agent(**common, tools=[get_weather]).run("What is the weather in Paris?").content
    assert CITIES == ["Paris"]
    assert Agent(**common, output_schema=Person).run("Ann is 41 years old.").content == Person(name="Ann", age=41)
    print("an agent, streamed too, with a tool; a typed answer")


main()
