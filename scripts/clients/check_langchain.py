"""langchain-openai and langchain-anthropic: chats, streams, tools, structured output, completions, embeddings."""

from __future__ import annotations

import asyncio
import os

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

URL = os.environ["MINISGL_URL"] + "/v1"


class Sum(BaseModel):
    """The result of an addition."""

    sum: int


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


def main() -> None:
    model = ChatOpenAI(model="demo", base_url=URL, temperature=0, max_tokens=64, stream_usage=True)
    messages = [SystemMessage("Answer briefly."), HumanMessage("What is 12 + 30?")]
    whole = model.invoke(messages)
    assert whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    streamed = None
    for chunk in model.stream(messages):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.content == whole.content
    assert streamed.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert asyncio.run(model.ainvoke(messages)).content == whole.content
    assert [answer.content for answer in model.batch([messages] * 3)] == [whole.content] * 3

    scored = model.bind(logprobs=True, top_logprobs=2).invoke(messages)
    assert scored.response_metadata["logprobs"]["content"]

    called = model.bind_tools([get_weather], tool_choice="get_weather").invoke("What is the weather in Paris?")
    assert isinstance(called, AIMessage)
    (call,) = called.tool_calls
    assert call["name"] == "get_weather"
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    conversation = [HumanMessage("What is the weather in Paris?"), called, result]
    answer = model.bind_tools([get_weather]).invoke(conversation)
    assert answer.content or answer.tool_calls

    for method in ("json_schema", "function_calling"):
        shaped = model.with_structured_output(Sum, method=method, include_raw=True).invoke("What is 12 + 30?")
        if shaped["raw"].response_metadata["finish_reason"] != "length":
            assert isinstance(shaped["parsed"], Sum), shaped

    plain = OpenAI(model="demo", base_url=URL, temperature=0, max_tokens=8)
    assert plain.invoke("Once upon")
    assert "".join(plain.stream("Once upon")) == plain.invoke("Once upon")
    # By default it sends tokens of OpenAI's tokenizer, which another model's are not.
    embedder = OpenAIEmbeddings(
        model="demo", base_url=os.environ["MINISGL_EMBEDDER"] + "/v1", check_embedding_ctx_length=False
    )
    assert len(embedder.embed_documents(["one two", "three"])) == 2
    claude = ChatAnthropic(model="demo", max_tokens=64, temperature=0)
    assert claude.invoke(messages).content == whole.content
    assert "".join(chunk.text for chunk in claude.stream(messages)) == whole.content
    print("chat, stream, batch, log-probabilities, a tool, typed answers, completions, embeddings; ChatAnthropic")


main()
