"""The tools of a chat request, and which of them the answer may or must call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minisgl.core import InvalidRequest

Tool = dict[str, Any]

_NAME = re.compile(r"[\w.:/-]{1,256}", re.ASCII)
_CHOICES = "'none', 'auto', 'required' or an object that names a function"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What the model is told of tools, and what it must do with them."""

    shown: list[Tool] | None = None  # to the chat template
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of the parameters, by the tool's name
    required: bool = False  # one of them must be called
    named: bool = False  # the client chose it: the call is what it asked for, and no reason to stop
    strict: frozenset[str] = frozenset()  # tools whose arguments follow their schemas, also if the model may choose
    parallel: bool = True  # more than one call in an answer


def tool_use(tools: list[Tool] | None, choice: Any, parallel: bool) -> ToolUse:
    """The meaning of `tools`, `tool_choice` and `parallel_tool_calls`, or InvalidRequest naming the field."""
    schemas = {tool["function"]["name"]: schema_of(tool) for tool in template_tools(tools or [])}
    strict = frozenset(tool["function"]["name"] for tool in tools or [] if tool["function"].get("strict"))
    if choice == "none":
        return ToolUse()
    if choice == "auto":
        return ToolUse(tools or None, schemas, strict=strict, parallel=parallel)
    if not tools:
        raise InvalidRequest("tool_choice", "tool_choice is only allowed when tools are given")
    if choice == "required":
        return ToolUse(tools, schemas, required=True, strict=strict, parallel=parallel)
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = _chosen(choice, "tool_choice", schemas)
        return ToolUse(tools, {name: schemas[name]}, required=True, named=True, strict=strict, parallel=False)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(tools, choice.get("allowed_tools"), schemas, strict, parallel)
    raise InvalidRequest("tool_choice", f"tool_choice must be {_CHOICES}")


def _chosen(choice: dict[str, Any], path: str, schemas: Mapping[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest(f"{path}.function.name", f"{path}.function.name must be a string")
    if name not in schemas:
        raise InvalidRequest(f"{path}.function.name", f"{path}: there is no function {name!r:.80} among the tools")
    return name


def _allowed(
    tools: list[Tool],
    allowed: Any,
    schemas: Mapping[str, Mapping[str, Any]],
    strict: frozenset[str],
    parallel: bool,
) -> ToolUse:
    """OpenAI's allowed_tools: a choice among some of the tools."""
    path = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict) or not isinstance(chosen := allowed.get("tools"), list) or not chosen:
        raise InvalidRequest(f"{path}.tools", f"{path}.tools must be a list of tools")
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise InvalidRequest(f"{path}.mode", f"{path}.mode must be 'auto' or 'required'")
    names = {
        _chosen(tool if isinstance(tool, dict) else {}, f"{path}.tools.{index}", schemas)
        for index, tool in enumerate(chosen)
    }
    # The others are not shown: nothing else would keep the model from calling them.
    shown = [tool for tool in tools if tool["function"]["name"] in names]
    return ToolUse(
        shown,
        {name: schemas[name] for name in names},
        required=mode == "required",
        strict=strict & names,
        parallel=parallel,
    )


def template_tools(tools: list[Tool]) -> list[Tool]:
    """The tools, each a named function with a schema of its parameters; InvalidRequest naming what is wrong."""
    for index, tool in enumerate(tools):
        path = f"tools.{index}"
        if tool.get("type") != "function":
            raise InvalidRequest(f"{path}.type", f"{path}.type must be 'function', not {tool.get('type')!r:.80}")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise InvalidRequest(f"{path}.function", f"{path}.function must be an object")
        check_function(function, f"{path}.function")
    return tools


def check_function(function: dict[str, Any], path: str) -> None:
    """InvalidRequest if it is not a name with a schema of its parameters."""
    name = function.get("name")
    if not isinstance(name, str):
        raise InvalidRequest(f"{path}.name", f"{path}.name must be a string")
    if not _NAME.fullmatch(name):
        text = f"{path}.name must have 1 to 256 letters, digits or any of _.:/- and nothing else, not {name!r:.80}"
        raise InvalidRequest(f"{path}.name", text)
    if not isinstance(function.get("description"), (str, type(None))):
        raise InvalidRequest(f"{path}.description", f"{path}.description must be a string")
    if not isinstance(function.get("strict"), (bool, type(None))):
        raise InvalidRequest(f"{path}.strict", f"{path}.strict must be true or false")
    schema = function.get("parameters")
    path = f"{path}.parameters"
    if schema is None:
        return
    if not isinstance(schema, dict):
        raise InvalidRequest(path, f"{path} must be a JSON schema")
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f"{path}.type", f"{path}.type must be 'object': arguments have names")
    properties = schema.get("properties")
    if not isinstance(properties, (dict, type(None))):
        raise InvalidRequest(f"{path}.properties", f"{path}.properties must be an object")
    for key, value in (properties or {}).items():
        if not isinstance(value, (dict, bool)):
            raise InvalidRequest(f"{path}.properties.{key}", f"{path}.properties.{key} must be a JSON schema")
    required = schema.get("required")
    if required is not None and not (isinstance(required, list) and all(isinstance(key, str) for key in required)):
        raise InvalidRequest(f"{path}.required", f"{path}.required must be a list of strings")


def schema_of(tool: Tool) -> dict[str, Any]:
    """The JSON schema of a tool's arguments: always an object."""
    schema: dict[str, Any] = tool["function"].get("parameters") or {}
    return {"type": "object", **schema}
