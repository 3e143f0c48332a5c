"""smolagents by OpenAIModel: a chat, a stream, an agent that calls a tool."""

from __future__ import annotations

import os

from smolagents import ChatMessage, OpenAIModel, tool


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: The city.
    """
    return f"4711 in {city}"


def main() -> None:
    model = OpenAIModel(
        "demo", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], temperature=0
    )
    asked = [ChatMessage(role="user", content=[{"type": "text", "text": "What is 12 + 30?"}])]
    text = model(asked).content
    assert "42" in text
    assert "".join(piece.content or "" for piece in model.generate_stream(asked)) == text
    weather = [ChatMessage(role="user", content=[{"type": "text", "text": "What is the weather in Paris?"}])]
    called = model(weather, tools_to_call_from=[get_weather], max_tokens=200)
    (call,) = called.tool_calls
    assert call.function.name == "get_weather"
    print("chat, stream, a demanded tool (an agent's own prompt is too much for the demo model)")


main()
