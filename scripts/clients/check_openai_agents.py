"""openai-agents by its default, /v1/responses: tools, a namespace, streams, typed output."""

from __future__ import annotations

import asyncio
import os

from agents import (
    Agent,
    ModelSettings,
    Runner,
    WebSearchTool,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
    tool_namespace,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

SETTINGS = ModelSettings(temperature=0, max_tokens=400)
TOOL_ITEMS = ["ToolCallItem", "ToolCallOutputItem", "MessageOutputItem"]


class Person(BaseModel):
    name: str
    age: int


@function_tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"4711 in {city}"


async def main() -> None:
    set_default_openai_client(AsyncOpenAI(base_url=os.environ["MINISGL_URL"] + "/v1"), use_for_tracing=False)
    set_tracing_disabled(True)
    asked = "What is the weather in Paris?"
    agent = Agent(name="a", instructions="Be brief.", model="demo", tools=[get_weather], model_settings=SETTINGS)
    whole = await Runner.run(agent, asked, max_turns=4)
    assert [type(item).__name__ for item in whole.new_items] == TOOL_ITEMS, whole.new_items
    streamed = Runner.run_streamed(agent, asked, max_turns=4)
    async for _ in streamed.stream_events():
        pass
    assert streamed.final_output == whole.final_output
    hosted = Agent(name="b", model="demo", tools=[get_weather, WebSearchTool()], model_settings=SETTINGS)
    assert (await Runner.run(hosted, "Hello!")).final_output
    tools = tool_namespace(name="forecast", description="Weather forecasts.", tools=[get_weather])
    grouped = Agent(name="d", instructions="Be brief.", model="demo", tools=tools, model_settings=SETTINGS)
    items = (await Runner.run(grouped, asked, max_turns=4)).new_items
    assert [type(item).__name__ for item in items] == TOOL_ITEMS, items
    typed = Agent(name="c", model="demo", output_type=Person, model_settings=SETTINGS)
    assert (await Runner.run(typed, "Ann is 41 years old.")).final_output == Person(name="Ann", age=41)
    print("an agent with a tool, streamed too, hosted tools, a namespace, a typed answer over /v1/responses")


asyncio.run(main())
