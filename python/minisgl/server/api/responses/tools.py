"""Tools of a response and the choice among them, in the words of chat completions.

Functions are called. Tools of other types, custom ones and those that OpenAI hosts, are passed over with a warning,
because agents offer them to every model, and refused only where `tool_choice` demands them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.core import InvalidRequest
from minisgl.server.api.bodies.conversation import Tool, check_function, member

MODES = ("none", "auto", "required")
_CHOICES = "'none', 'auto', 'required', or an object that names a function or allowed_tools"


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The fields `tools` and `tool_choice` of a chat, and what of the request has no part in them."""

    tools: list[Tool]
    choice: Any
    warnings: list[str]


def chat_tools(tools: Sequence[Mapping[str, Any]], choice: Any) -> ChatTools:
    """Return the chat's tools and choice; InvalidRequest naming the field that is wrong."""
    shown: list[Tool] = []
    warnings: list[str] = []
    for index, tool in enumerate(tools):
        path = f"tools.{index}"
        kind = member(tool, "type", str, path)
        if kind == "function":
            shown.append(_chat_function(dict(tool), path))
        else:
            shown.append({"type": kind})  # a chat passes it over
            warnings.append(f"{path}: tools of the type {kind!r:.80} are not supported; the model is not told of it")
    names = [tool["function"]["name"] for tool in shown if "function" in tool]
    return ChatTools(shown, _chat_choice(choice, names, has_tools=bool(tools)), warnings)


def _chat_function(tool: dict[str, Any], path: str) -> Tool:
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    check_function(function, path)
    return {"type": "function", "function": function}


def _chat_choice(choice: Any, names: Sequence[str], *, has_tools: bool) -> Any:
    if choice == "required" and has_tools and not names:
        raise InvalidRequest("tool_choice", "tool_choice: a call is required, but none of the tools is a function")
    if choice in MODES:
        return choice
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequest("tool_choice", f"tool_choice must be {_CHOICES}")
    if kind == "allowed_tools":
        return _allowed(choice, names)
    if kind != "function":
        text = f"tool_choice.type: a tool of the type {kind!r:.80} cannot be demanded, only a function"
        raise InvalidRequest("tool_choice.type", text)
    return {"type": "function", "function": {"name": _known(choice, names, "tool_choice")}}


def _allowed(choice: dict[str, Any], names: Sequence[str]) -> Any:
    path = "tool_choice.tools"
    allowed = member(choice, "tools", list, "tool_choice")
    mode = choice.get("mode")
    if mode not in ("auto", "required"):
        raise InvalidRequest("tool_choice.mode", "tool_choice.mode must be 'auto' or 'required'")
    if not all(isinstance(tool, dict) for tool in allowed):
        raise InvalidRequest(path, f"{path} must be a list of objects")
    functions = [
        {"type": "function", "function": {"name": _known(tool, names, f"{path}.{index}")}}
        for index, tool in enumerate(allowed)
        if tool.get("type") == "function"
    ]
    if functions:
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}
    if mode == "required":
        raise InvalidRequest(path, f"{path}: a call is required, but none of them is a function")
    return "none"


def _known(choice: Mapping[str, Any], names: Sequence[str], path: str) -> str:
    name = member(choice, "name", str, path)
    if name not in names:
        raise InvalidRequest(f"{path}.name", f"{path}: there is no function {name!r:.80} among the tools")
    return name
