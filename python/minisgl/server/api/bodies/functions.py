"""OpenAI's older form of tools: `functions` and `function_call`, in requests, conversations and answers.

A request in this form becomes one with `tools`, of which at most one is called; its answer is written in this form.
"""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
from msgspec import UNSET

from minisgl.core import InvalidRequest
from minisgl.parsers.streaming import CallArguments, CallStart
from minisgl.server.api.answers.responses import ChatDelta, ChatMessage, FunctionDelta
from minisgl.server.api.bodies.tools import Tool, ToolUse, check_function, tool_use


def function_use(functions: list[dict[str, Any]], choice: Any) -> ToolUse:
    """The meaning of `functions` and `function_call`, or InvalidRequest naming the field."""
    for index, function in enumerate(functions):
        check_function(function, f"functions.{index}")
    tools: list[Tool] = [{"type": "function", "function": function} for function in functions]
    return tool_use(tools, _tool_choice(functions, choice), parallel=False)


def _tool_choice(functions: list[dict[str, Any]], choice: Any) -> Any:
    if choice in (None, "none", "auto"):
        return choice or "auto"
    name = choice.get("name") if isinstance(choice, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest("function_call", "function_call must be 'none', 'auto' or an object with a name")
    if name not in [function["name"] for function in functions]:
        raise InvalidRequest(
            "function_call.name", f"function_call: there is no function {name!r:.80} among the functions"
        )
    return {"type": "function", "function": {"name": name}}


def with_tool_calls(message: dict[str, Any], path: str) -> dict[str, Any]:
    """A message of a conversation in today's form; itself, if that is its form."""
    if message.get("role") == "function":
        name = message.get("name")
        if not isinstance(name, str):
            raise InvalidRequest(f"{path}.name", f"{path}.name must be the name of the function")
        return {**message, "role": "tool", "tool_call_id": _call_id(name)}
    call = message.get("function_call")
    if call is None or message.get("role") != "assistant":
        return message
    path = f"{path}.function_call"
    if message.get("tool_calls"):
        raise InvalidRequest(path, f"{path} and tool_calls cannot be given together")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise InvalidRequest(f"{path}.name", f"{path} must be an object with a name")
    if not isinstance(call.get("arguments"), (str, type(None))):
        raise InvalidRequest(f"{path}.arguments", f"{path}.arguments must be a string of JSON")
    calls = [{"id": _call_id(call["name"]), "type": "function", "function": call}]
    return {**message, "function_call": None, "tool_calls": calls}


def _call_id(name: str) -> str:
    """What ties a result to its call, of which it tells only the name. Some templates take nothing but nine digits."""
    return f"{zlib.crc32(name.encode()) % 10**9:09}"


def function_delta(event: CallStart | CallArguments) -> ChatDelta:
    """A piece of the call in a stream."""
    if isinstance(event, CallStart):
        return ChatDelta(function_call=FunctionDelta("", event.name))
    return ChatDelta(function_call=FunctionDelta(event.text))


def with_function_call(message: ChatMessage) -> ChatMessage:
    """The message, with its call in the older form."""
    if message.tool_calls is UNSET:
        return message
    return msgspec.structs.replace(message, tool_calls=UNSET, function_call=message.tool_calls[0].function)
