"""pydantic-ai: agents with a tool and a typed answer over chat completions, Responses and Anthropic's messages."""

from __future__ import annotations

import os

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel


class Person(BaseModel):
    name: str
    age: int


def try_model(model: Model) -> None:
    settings = {"temperature": 0, "max_tokens": 300}
    assert "42" in Agent(model, model_settings=settings).run_sync("What is 12 + 30?").output
    cities = []
    agent = Agent(model, model_settings=settings)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        cities.append(city)
        return f"4711 in {city}"

    assert agent.run_sync("What is the weather in Paris?").output
    assert cities == ["Paris"]


def main() -> None:
    for model in (OpenAIChatModel("demo"), OpenAIResponsesModel("demo"), AnthropicModel("demo")):
        try_model(model)
    typed = Agent(OpenAIChatModel("demo"), output_type=NativeOutput(Person), model_settings={"temperature": 0})
    assert typed.run_sync("Ann is 41 years old.").output == Person(name="Ann", age=41)
    assert os.environ["OPENAI_BASE_URL"]
    print("an agent with a tool by chat, responses and Anthropic's messages; a typed answer")


main()
