"""Tools of a chat completion and the choice among them: from OpenAI's forms to what the model is told.

`functions` and `function_call` are the older form: such a request gets at most one call, in an answer of that form.

Tools that are not functions, which are custom or hosted by OpenAI or Anthropic, are ignored, because agents offer them
to every model; they are refused only if the choice demands one. `responses.tools` and `anthropic.tools` have the forms
of those APIs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from minisgl.sampling_params import InvalidRequest
from minisgl.tokenizer.conversation import member, optional_member

Tool = dict[str, Any]

_NAME = re.compile(r"[\w.:/-]{1,256}", re.ASCII)
_CHOICES = "'none', 'auto', 'required' or an object that names a function"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that the model is told of, and the calls that it may or must make."""

    shown: list[Tool] | None = None  # tools that the chat template gets
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of the parameters, by the tool's name
    required: bool = False  # at least one call must be made
    named: bool = False  # the client named the tool: the call is the answer, so the finish reason is `stop`
    strict: frozenset[str] = frozenset()  # tools whose arguments follow their schemas even with tool_choice auto
    parallel: bool = True  # an answer may have more than one call
    passed_over: frozenset[str] = frozenset()  # types of the ignored tools, which are not functions


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Choice among the tools, whichever API's form it had."""

    mode: Literal["none", "auto", "required"]
    names: frozenset[str] | None = None  # tools that may be called; None: all
    named: bool = False  # the client named one tool; the model is shown the others too

    @classmethod
    def of(cls, name: str) -> ToolChoice:
        """Return the choice that demands a call of this tool."""
        return cls("required", frozenset({name}), named=True)


def use_of(functions: list[Tool], choice: ToolChoice, *, parallel: bool, passed_over: frozenset[str]) -> ToolUse:
    """Return what a choice among functions means; InvalidRequest if it demands a call and there are no functions."""
    if choice.mode == "none":
        return ToolUse(passed_over=passed_over)
    if choice.mode == "required" and not functions:
        raise _no_tools()
    # Tools that may not be called are not shown, because nothing else keeps the model from calling them.
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
    """Return the meaning of `tools`, `tool_choice` and `parallel_tool_calls`; InvalidRequest naming the wrong field."""
    kinds = [member(tool, "type", str, f"tools.{index}") for index, tool in enumerate(tools)]
    functions = []
    for index, (tool, kind) in enumerate(zip(tools, kinds, strict=True)):
        if kind == "function":
            check_function(member(tool, "function", dict, f"tools.{index}"), f"tools.{index}.function")
            functions.append(tool)
    choice = _choice(choice, set(map(name_of, functions)))
    return use_of(functions, choice, parallel=parallel, passed_over=frozenset(kinds) - {"function"})


def _choice(choice: Any, names: Set[str]) -> ToolChoice:
    if choice in ("none", "auto", "required"):
        return ToolChoice(choice)
    if not names:
        raise _no_tools()
    if isinstance(choice, dict) and choice.get("type") == "function":
        return ToolChoice.of(_chosen(choice, "tool_choice", names))
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools"), names)
    raise InvalidRequest("tool_choice", f"tool_choice must be {_CHOICES}")


def _allowed(allowed: Any, names: Set[str]) -> ToolChoice:
    """Return the meaning of OpenAI's `allowed_tools`: a choice among some of the tools."""
    path = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict) or not isinstance(chosen := allowed.get("tools"), list) or not chosen:
        raise InvalidRequest(f"{path}.tools", f"{path}.tools must be a list of tools")
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise InvalidRequest(f"{path}.mode", f"{path}.mode must be 'auto' or 'required'")
    found = (_chosen(tool, f"{path}.tools.{index}", names) for index, tool in enumerate(chosen))
    return ToolChoice(mode, frozenset(found))


def _chosen(choice: Any, path: str, names: Set[str]) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    return known_function(function if isinstance(function, dict) else {}, names, path, ".function")


def known_function(owner: Mapping[str, Any], names: Set[str], path: str, place: str = "") -> str:
    """Return the function's name in `owner`, which is at `path` + `place`; InvalidRequest if no tool has it."""
    name = member(owner, "name", str, path + place)
    if name not in names:
        raise InvalidRequest(f"{path}{place}.name", f"{path}: there is no function {name!r:.80} among the tools")
    return name


def function_use(functions: list[dict[str, Any]], choice: Any) -> ToolUse:
    """Return the meaning of `functions` and `function_call`; InvalidRequest naming the wrong field."""
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


def check_function(function: dict[str, Any], path: str, schema_field: str = "parameters") -> None:
    """Raise InvalidRequest unless the function has a valid name and an object schema of its parameters.

    `schema_field` is the client's name of the schema.
    """
    valid_name(function, path)
    optional_member(function, "description", str, path)
    optional_member(function, "strict", bool, path)
    schema = optional_member(function, "parameters", dict, path)
    if schema is None:
        return
    path = f"{path}.{schema_field}"
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f"{path}.type", f"{path}.type must be 'object': arguments have names")
    for key, value in (optional_member(schema, "properties", dict, path) or {}).items():
        if not isinstance(value, (dict, bool)):
            raise InvalidRequest(f"{path}.properties.{key}", f"{path}.properties.{key} must be a JSON schema")
    if not all(isinstance(key, str) for key in optional_member(schema, "required", list, path) or []):
        raise InvalidRequest(f"{path}.required", f"{path}.required must be a list of strings")


def valid_name(owner: Mapping[str, Any], path: str) -> str:
    """Return the name of a function or a namespace; InvalidRequest if it has none or one that is not valid."""
    name: str = member(owner, "name", str, path)
    if not _NAME.fullmatch(name):
        text = f"{path}.name must have 1 to 256 letters, digits or any of _.:/- and nothing else, not {name!r:.80}"
        raise InvalidRequest(f"{path}.name", text)
    return name
