"""Tools of a message: Anthropic's Messages API gives a function's schema as `input_schema`."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from minisgl.sampling_params import InvalidRequest
from minisgl.server.api.bodies.tools import Tool, ToolChoice, ToolUse, check_function, name_of, use_of
from minisgl.tokenizer.conversation import member, optional_member

_CUSTOM = "custom"  # type of the tools that Anthropic's clients define


def messages_tools(tools: list[dict[str, Any]] | None, choice: dict[str, Any] | None) -> ToolUse:
    """Return the meaning of `tools` and `tool_choice`; InvalidRequest naming the wrong field.

    Tools with a type other than `custom` are defined by Anthropic, and are ignored. A choice that demands one is
    refused.
    """
    tools, choice = tools or [], {"type": "auto"} if choice is None else choice
    kinds = [optional_member(tool, "type", str, f"tools.{index}") or _CUSTOM for index, tool in enumerate(tools)]
    custom = [_tool(tool, f"tools.{index}") for index, tool in enumerate(tools) if kinds[index] == _CUSTOM]
    parallel = not optional_member(choice, "disable_parallel_tool_use", bool, "tool_choice")
    meaning = _choice(choice, set(map(name_of, custom)))
    return use_of(custom, meaning, parallel=parallel, passed_over=frozenset(kinds) - {_CUSTOM})


def _tool(tool: dict[str, Any], path: str) -> Tool:
    function = {
        "name": member(tool, "name", str, path),
        "description": optional_member(tool, "description", str, path),
        "parameters": member(tool, "input_schema", dict, path),
        "strict": optional_member(tool, "strict", bool, path),
    }
    function = {key: value for key, value in function.items() if value is not None}
    check_function(function, path, "input_schema")
    return {"type": "function", "function": function}


def _choice(choice: dict[str, Any], names: Set[str]) -> ToolChoice:
    match choice.get("type"):
        case "auto" | "none" as mode:
            return ToolChoice(mode)
        case "any":
            if not names:
                raise InvalidRequest("tool_choice", "tool_choice demands a call, but there is no tool that it could be")
            return ToolChoice("required")
        case "tool":
            name = member(choice, "name", str, "tool_choice")
            if name not in names:
                text = f"tool_choice.name: there is no tool {name!r:.80} among the tools with an input_schema"
                raise InvalidRequest("tool_choice.name", text)
            return ToolChoice.of(name)
        case _:
            raise InvalidRequest("tool_choice.type", "tool_choice.type must be auto, any, tool or none")
