"""llama-index by OpenAILike: chats, streams, completions, a tool, a typed answer, embeddings."""

from __future__ import annotations

import os

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"4711 in {city}"


def main() -> None:
    model = OpenAILike(
        model="demo",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=4096,
        temperature=0,
    )
    asked = [ChatMessage(role="user", content="What is 12 + 30?")]
    text = model.chat(asked).message.content
    assert "42" in text
    assert "".join(piece.delta or "" for piece in model.stream_chat(asked)) == text
    assert "42" in model.complete("What is 12 + 30?").text
    tool = FunctionTool.from_defaults(fn=get_weather)
    called = model.chat_with_tools([tool], user_msg="What is the weather in Paris?")
    (call,) = model.get_tool_calls_from_response(called)
    assert call.tool_name == "get_weather"
    person = model.as_structured_llm(Person).chat([ChatMessage(role="user", content="Ann is 41 years old.")]).raw
    assert isinstance(person, Person), person
    embedder = OpenAILikeEmbedding(
        model_name="demo",
        api_base=os.environ["MINISGL_EMBEDDER"] + "/v1",
        api_key=os.environ["OPENAI_API_KEY"],
    )
    assert len(embedder.get_text_embedding_batch(["one two", "three"])) == 2
    print("chat, stream, completion, a tool, a typed answer, embeddings")


main()
