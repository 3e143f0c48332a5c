"""Tools of a conversation and the choice among them: from the form of each API to what the model is told.

`functions` and `function_call` are OpenAI's older form of tools: of such a request at most one is called, and its
answer is written in that form.

Tools that are no functions, custom ones and those that OpenAI or Anthropic host or define, are passed over, with a
warning in a response, because agents offer them to every model. They are refused only where the choice demands one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from minisgl.core import InvalidRequest
from minisgl.server.api.bodies.conversation import member, optional_member

Tool = dict[str, Any]

_NAME = re.compile(r"[\w.:/-]{1,256}", re.ASCII)
_CHOICES = "'none', 'auto', 'required' or an object that names a function"

_RESPONSE_CHOICES = "'none', 'auto', 'required', or an object that names a function or allowed_tools"
_CUSTOM = "custom"  # type of the tools that Anthropic's clients define


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that the model is told of, and what it must do with them."""

    shown: list[Tool] | None = None  # to the chat template
    # Schema of the parameters by the tool's name.
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    required: bool = False  # one of them must be called
    named: bool = False  # the client chose it: the call is what it asked for, and no reason to stop
    strict: frozenset[str] = frozenset()  # tools whose arguments follow their schemas, also if the model may choose
    parallel: bool = True  # more than one call in an answer
    passed_over: frozenset[str] = frozenset()  # types of tools that are no functions, and of which nobody is told


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Calls that an answer may or must have."""

    mode: Literal["none", "auto", "required"]
    names: frozenset[str] | None = None  # tools that may be called; None: all
    named: bool = False  # the client chose the one; the others are shown beside it

    @classmethod
    def of(cls, name: str) -> ToolChoice:
        """Return the choice of the one tool."""
        return cls("required", frozenset({name}), named=True)


def use_of(functions: list[Tool], choice: ToolChoice, *, parallel: bool, passed_over: frozenset[str]) -> ToolUse:
    """Return the meaning of a choice among functions; InvalidRequest if it demands a call and there are none."""
    if choice.mode == "none":
        return ToolUse(passed_over=passed_over)
    if choice.mode == "required" and not functions:
        raise _no_tools()
    # Tools that may not be called are not shown: nothing else would keep the model from calling them.
    called = [tool for tool in functions if choice.names is None or name_of(tool) in choice.names]
    return ToolUse(
        (functions if choice.named else called) or None,
        {name_of(tool): {"type": "object", **(tool["function"].get("parameters") or {})} for tool in called},
        required=choice.mode == "required",
        named=choice.named,
        strict=frozenset(name_of(tool) for tool in called if tool["function"].get("strict")),
        parallel=parallel and not choice.named,
        passed_over=passed_over,
    )


def name_of(tool: Tool) -> str:
    name: str = tool["function"]["name"]
    return name


def _no_tools() -> InvalidRequest:
    return InvalidRequest("tool_choice", "tool_choice is only allowed when tools are given that are functions")


def tool_use(tools: Sequence[Tool], choice: Any, parallel: bool) -> ToolUse:
    """Return the meaning of `tools`, `tool_choice` and `parallel_tool_calls`; InvalidRequest naming the field.

    Tools that are no functions, custom ones and those that OpenAI hosts, are passed over unless the choice demands one.
    """
    kinds = [member(tool, "type", str, f"tools.{index}") for index, tool in enumerate(tools)]
    functions = []
    for index, (tool, kind) in enumerate(zip(tools, kinds, strict=True)):
        if kind == "function":
            check_function(member(tool, "function", dict, f"tools.{index}"), f"tools.{index}.function")
            functions.append(tool)
    choice = _choice(choice, [name_of(tool) for tool in functions])
    return use_of(functions, choice, parallel=parallel, passed_over=frozenset(kinds) - {"function"})


def _choice(choice: Any, names: Collection[str]) -> ToolChoice:
    if choice in ("none", "auto", "required"):
        return ToolChoice(choice)
    if not names:
        raise _no_tools()
    if isinstance(choice, dict) and choice.get("type") == "function":
        return ToolChoice.of(_chosen(choice, "tool_choice", names))
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools"), names)
    raise InvalidRequest("tool_choice", f"tool_choice must be {_CHOICES}")


def _allowed(allowed: Any, names: Collection[str]) -> ToolChoice:
    """Return the meaning of OpenAI's allowed_tools: a choice among some of the tools."""
    path = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict) or not isinstance(chosen := allowed.get("tools"), list) or not chosen:
        raise InvalidRequest(f"{path}.tools", f"{path}.tools must be a list of tools")
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise InvalidRequest(f"{path}.mode", f"{path}.mode must be 'auto' or 'required'")
    found = (_chosen(tool, f"{path}.tools.{index}", names) for index, tool in enumerate(chosen))
    return ToolChoice(mode, frozenset(found))


def _chosen(choice: Any, path: str, names: Collection[str]) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    return _known(function if isinstance(function, dict) else {}, names, path, ".function")


def _known(owner: Mapping[str, Any], names: Collection[str], path: str, place: str = "") -> str:
    """Return the name of a function, which stands at this place within the `path`."""
    name = member(owner, "name", str, path + place)
    if name not in names:
        raise InvalidRequest(f"{path}{place}.name", f"{path}: there is no function {name!r:.80} among the tools")
    return name


def function_use(functions: list[dict[str, Any]], choice: Any) -> ToolUse:
    """Return the meaning of `functions` and `function_call`; InvalidRequest naming the field."""
    for index, function in enumerate(functions):
        check_function(function, f"functions.{index}")
    tools: list[Tool] = [{"type": "function", "function": function} for function in functions]
    if choice in (None, "none", "auto"):
        return use_of(tools, ToolChoice(choice or "auto"), parallel=False, passed_over=frozenset())
    name = choice.get("name") if isinstance(choice, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest("function_call", "function_call must be 'none', 'auto' or an object with a name")
    if name not in map(name_of, tools):
        raise InvalidRequest(
            "function_call.name", f"function_call: there is no function {name!r:.80} among the functions"
        )
    return use_of(tools, ToolChoice.of(name), parallel=False, passed_over=frozenset())


def check_function(function: dict[str, Any], path: str) -> None:
    """Raise InvalidRequest if it is not a name with a schema of its parameters."""
    name = member(function, "name", str, path)
    if not _NAME.fullmatch(name):
        text = f"{path}.name must have 1 to 256 letters, digits or any of _.:/- and nothing else, not {name!r:.80}"
        raise InvalidRequest(f"{path}.name", text)
    optional_member(function, "description", str, path)
    optional_member(function, "strict", bool, path)
    schema = optional_member(function, "parameters", dict, path)
    if schema is None:
        return
    path = f"{path}.parameters"
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f"{path}.type", f"{path}.type must be 'object': arguments have names")
    for key, value in (optional_member(schema, "properties", dict, path) or {}).items():
        if not isinstance(value, (dict, bool)):
            raise InvalidRequest(f"{path}.properties.{key}", f"{path}.properties.{key} must be a JSON schema")
    if not all(isinstance(key, str) for key in optional_member(schema, "required", list, path) or []):
        raise InvalidRequest(f"{path}.required", f"{path}.required must be a list of strings")


# OpenAI's Responses API.


def response_tools(tools: Sequence[Mapping[str, Any]], choice: Any, parallel: bool) -> tuple[ToolUse, list[str]]:
    """Return what the model is told, and warnings of what it is not; InvalidRequest naming the field that is wrong."""
    functions: list[Tool] = []
    others: dict[str, str] = {}  # the types of the other tools, by their place
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
    meaning = _response_choice(choice, [name_of(tool) for tool in functions])
    warnings = [
        f"{path}: tools of the type {kind!r:.80} are not supported; the model is not told of it"
        for path, kind in others.items()
    ]
    return use_of(functions, meaning, parallel=parallel, passed_over=frozenset(others.values())), warnings


def _response_choice(choice: Any, names: Collection[str]) -> ToolChoice:
    if choice in ("none", "auto", "required"):
        return ToolChoice(choice)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequest("tool_choice", f"tool_choice must be {_RESPONSE_CHOICES}")
    if kind == "allowed_tools":
        return _response_allowed(choice, names)
    if kind != "function":
        text = f"tool_choice.type: a tool of the type {kind!r:.80} cannot be demanded, only a function"
        raise InvalidRequest("tool_choice.type", text)
    return ToolChoice.of(_known(choice, names, "tool_choice"))


def _response_allowed(choice: dict[str, Any], names: Collection[str]) -> ToolChoice:
    path = "tool_choice.tools"
    allowed = member(choice, "tools", list, "tool_choice")
    mode = choice.get("mode")
    if mode not in ("auto", "required"):
        raise InvalidRequest("tool_choice.mode", "tool_choice.mode must be 'auto' or 'required'")
    if not all(isinstance(tool, dict) for tool in allowed):
        raise InvalidRequest(path, f"{path} must be a list of objects")
    kinds = [tool.get("type") for tool in allowed]
    found = [_known(tool, names, f"{path}.{index}") for index, tool in enumerate(allowed) if kinds[index] == "function"]
    if mode == "required" and not found:
        raise InvalidRequest(path, f"{path}: a call is required, but none of them is a function")
    return ToolChoice(mode, frozenset(found)) if found else ToolChoice("none")


# Anthropic's Messages API.


def messages_tools(tools: list[dict[str, Any]] | None, choice: dict[str, Any] | None) -> ToolUse:
    """Return the meaning of `tools` and `tool_choice`; InvalidRequest naming the field.

    Tools that Anthropic defines, and runs or has trained its models for, are passed over: those have a type. A choice
    that demands one is refused.
    """
    tools, choice = tools or [], {"type": "auto"} if choice is None else choice
    kinds = [optional_member(tool, "type", str, f"tools.{index}") or _CUSTOM for index, tool in enumerate(tools)]
    custom = [_messages_tool(tool, f"tools.{index}") for index, tool in enumerate(tools) if kinds[index] == _CUSTOM]
    parallel = not optional_member(choice, "disable_parallel_tool_use", bool, "tool_choice")
    meaning = _messages_choice(choice, [name_of(tool) for tool in custom])
    return use_of(custom, meaning, parallel=parallel, passed_over=frozenset(kinds) - {_CUSTOM})


def _messages_tool(tool: dict[str, Any], path: str) -> Tool:
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


def _messages_choice(choice: dict[str, Any], names: Collection[str]) -> ToolChoice:
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
