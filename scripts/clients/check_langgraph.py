"""LangGraph: an agent of nodes that calls a tool, with a memory, whole and streamed."""

from __future__ import annotations

from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import MemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f"4711 in {city}"


def main() -> None:
    model = ChatOpenAI(model="demo", temperature=0).bind_tools([get_weather])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([get_weather]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    agent = graph.compile(checkpointer=MemorySaver())
    thread = {"configurable": {"thread_id": "1"}}
    messages = agent.invoke({"messages": [("user", "What is the weather in Paris?")]}, thread)["messages"]
    assert any(isinstance(message, ToolMessage) and message.content == "4711 in Paris" for message in messages)
    assert messages[-1].content
    pieces = agent.stream({"messages": [("user", "What is 12 + 30?")]}, thread, stream_mode="messages")
    assert "42" in "".join(piece.content for piece, _ in pieces)
    assert len(agent.get_state(thread).values["messages"]) == len(messages) + 2
    print("an agent with a tool and a memory, streamed")


main()
