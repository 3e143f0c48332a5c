"""Tools of a response: OpenAI's Responses API gives a function's name and schema beside its type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from minisgl.sampling_params import InvalidRequest
from minisgl.server.api.bodies.tools import Tool, ToolChoice, ToolUse, check_function, known_function, name_of, use_of
from minisgl.tokenizer.conversation import member

_CHOICES = "'none', 'auto', 'required', or an object that names a function or allowed_tools"


def response_tools(tools: Sequence[Mapping[str, Any]], choice: Any, parallel: bool) -> tuple[ToolUse, list[str]]:
    """Return the meaning of the tools, and a warning for each ignored one; InvalidRequest naming the wrong field."""
    functions: list[Tool] = []
    others: dict[str, str] = {}  # path -> type of the tools that are not functions
    for index, tool in enumerate(tools):
        path = f"tools.{index}"
        if (kind := member(tool, "type", str, path)) != "function":
            others[path] = kind
            continue
        function = {name: value for name, value in tool.items() if name != "type" and value is not None}
        check_function(function, path)
        functions.append({"type": "function", "function": function})
    if choice == "required" and others and not functions:
        raise InvalidRequest("tool_choice", "tool_choice: a call is required, but none of the tools is a function")
    meaning = _choice(choice, set(map(name_of, functions)))
    warnings = [
        f"{path}: tools of the type {kind!r:.80} are not supported; the model is not told of it"
        for path, kind in others.items()
    ]
    return use_of(functions, meaning, parallel=parallel, passed_over=frozenset(others.values())), warnings


def _choice(choice: Any, names: Set[str]) -> ToolChoice:
    if choice in ("none", "auto", "required"):
        return ToolChoice(choice)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequest("tool_choice", f"tool_choice must be {_CHOICES}")
    if kind == "allowed_tools":
        return _allowed(choice, names)
    if kind != "function":
        text = f"tool_choice.type: a tool of the type {kind!r:.80} cannot be demanded, only a function"
        raise InvalidRequest("tool_choice.type", text)
    return ToolChoice.of(known_function(choice, names, "tool_choice"))


def _allowed(choice: dict[str, Any], names: Set[str]) -> ToolChoice:
    path = "tool_choice.tools"
    allowed = member(choice, "tools", list, "tool_choice")
    mode = choice.get("mode")
    if mode not in ("auto", "required"):
        raise InvalidRequest("tool_choice.mode", "tool_choice.mode must be 'auto' or 'required'")
    if not all(isinstance(tool, dict) for tool in allowed):
        raise InvalidRequest(path, f"{path} must be a list of objects")
    found = [
        known_function(tool, names, f"{path}.{index}")
        for index, tool in enumerate(allowed)
        if tool.get("type") == "function"
    ]
    if mode == "required" and not found:
        raise InvalidRequest(path, f"{path}: a call is required, but none of them is a function")
    return ToolChoice(mode, frozenset(found)) if found else ToolChoice("none")
