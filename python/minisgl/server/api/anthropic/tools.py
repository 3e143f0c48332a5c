"""Tools of Anthropic's API as the server's `ToolUse`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minisgl.core import InvalidRequest
from minisgl.server.api.bodies import conversation
from minisgl.server.api.bodies.conversation import Tool, ToolUse, check_function, member, optional_member

CUSTOM = "custom"


def tool_use(tools: list[dict[str, Any]] | None, choice: dict[str, Any] | None) -> ToolUse:
    """Return the meaning of `tools` and `tool_choice`; InvalidRequest naming the field.

    Tools that Anthropic defines, and runs or has trained its models for, are passed over: those have a type. A choice
    that demands one is refused.
    """
    kinds = [optional_member(tool, "type", str, f"tools.{index}") or CUSTOM for index, tool in enumerate(tools or [])]
    custom = [_tool(tool, f"tools.{index}") for index, tool in enumerate(tools or []) if kinds[index] == CUSTOM]
    choice = {"type": "auto"} if choice is None else choice
    parallel = not optional_member(choice, "disable_parallel_tool_use", bool, "tool_choice")
    use = conversation.tool_use(custom, _openai_choice(choice, custom), parallel)
    return replace(use, passed_over=frozenset(kinds) - {CUSTOM})


def _tool(tool: dict[str, Any], path: str) -> Tool:
    function = {
        "name": member(tool, "name", str, path),
        "description": optional_member(tool, "description", str, path),
        "parameters": member(tool, "input_schema", dict, path),
        "strict": optional_member(tool, "strict", bool, path),
    }
    function = {key: value for key, value in function.items() if value is not None}
    try:
        check_function(function, path)
    except InvalidRequest as error:  # under the name that the client used
        ours, theirs = f"{path}.parameters", f"{path}.input_schema"
        raise InvalidRequest(error.field.replace(ours, theirs), error.message.replace(ours, theirs)) from None
    return {"type": "function", "function": function}


def _openai_choice(choice: dict[str, Any], tools: list[Tool]) -> Any:
    match choice.get("type"):
        case "auto" | "none" as same:
            return same
        case "any":
            if not tools:
                raise InvalidRequest("tool_choice", "tool_choice demands a call, but there is no tool that it could be")
            return "required"
        case "tool":
            name = member(choice, "name", str, "tool_choice")
            if name not in [tool["function"]["name"] for tool in tools]:
                text = f"tool_choice.name: there is no tool {name!r:.80} among the tools with an input_schema"
                raise InvalidRequest("tool_choice.name", text)
            return {"type": "function", "function": {"name": name}}
        case _:
            raise InvalidRequest("tool_choice.type", "tool_choice.type must be auto, any, tool or none")
