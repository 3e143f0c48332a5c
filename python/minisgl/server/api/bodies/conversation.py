"""Messages and tools of a conversation: from OpenAI's form to that of chat templates.

`functions` and `function_call` are OpenAI's older form of tools: a request in it becomes one with `tools`, of which at
most one is called, and its answer is written in that form. Nested fields are named by their path where they are wrong.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from minisgl.core import InvalidRequest

Tool = dict[str, Any]
T = TypeVar("T")

_NAME = re.compile(r"[\w.:/-]{1,256}", re.ASCII)
_CHOICES = "'none', 'auto', 'required' or an object that names a function"
_NOUNS: dict[type, str] = {str: "a string", dict: "an object", list: "a list", bool: "true or false"}


def optional_member(owner: Mapping[str, Any], name: str, kind: type[T], path: str) -> T | None:
    """Return a member of the object at `path`, or None; InvalidRequest naming it if it is of another type."""
    value = owner.get(name)
    if value is not None and not isinstance(value, kind):
        raise InvalidRequest(f"{path}.{name}", f"{path}.{name} must be {_NOUNS[kind]}")
    return value


def member(owner: Mapping[str, Any], name: str, kind: type[T], path: str) -> T:
    """Return a member that must be there, as `optional_member`."""
    value = optional_member(owner, name, kind, path)
    if value is None:
        raise InvalidRequest(f"{path}.{name}", f"{path}.{name} must be {_NOUNS[kind]}")
    return value


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that the model is told of, and what it must do with them."""

    shown: list[Tool] | None = None  # to the chat template
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of the parameters, by the tool's name
    required: bool = False  # one of them must be called
    named: bool = False  # the client chose it: the call is what it asked for, and no reason to stop
    strict: frozenset[str] = frozenset()  # tools whose arguments follow their schemas, also if the model may choose
    parallel: bool = True  # more than one call in an answer
    passed_over: frozenset[str] = frozenset()  # types of tools that are no functions, and of which nobody is told


def tool_use(tools: list[Tool] | None, choice: Any, parallel: bool) -> ToolUse:
    """Return the meaning of `tools`, `tool_choice` and `parallel_tool_calls`; InvalidRequest naming the field.

    Tools that are no functions, custom ones and those that OpenAI hosts, are passed over unless the choice demands one.
    """
    kinds = [member(tool, "type", str, f"tools.{index}") for index, tool in enumerate(tools or [])]
    functions = []
    for index, (tool, kind) in enumerate(zip(tools or [], kinds, strict=True)):
        if kind == "function":
            check_function(member(tool, "function", dict, f"tools.{index}"), f"tools.{index}.function")
            functions.append(tool)
    use = _use_of_functions(functions, choice, parallel)
    return replace(use, passed_over=frozenset(kinds) - {"function"})


def _use_of_functions(tools: list[Tool], choice: Any, parallel: bool) -> ToolUse:
    schemas = {tool["function"]["name"]: schema_of(tool) for tool in tools}
    strict = frozenset(tool["function"]["name"] for tool in tools if tool["function"].get("strict"))
    if choice == "none":
        return ToolUse()
    if choice == "auto":
        return ToolUse(tools or None, schemas, strict=strict, parallel=parallel)
    if not tools:
        raise InvalidRequest("tool_choice", "tool_choice is only allowed when tools are given that are functions")
    if choice == "required":
        return ToolUse(tools, schemas, required=True, strict=strict, parallel=parallel)
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = _chosen(choice, "tool_choice", schemas)
        return ToolUse(tools, {name: schemas[name]}, required=True, named=True, strict=strict, parallel=False)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(tools, choice.get("allowed_tools"), schemas, strict, parallel)
    raise InvalidRequest("tool_choice", f"tool_choice must be {_CHOICES}")


def function_use(functions: list[dict[str, Any]], choice: Any) -> ToolUse:
    """Return the meaning of `functions` and `function_call`; InvalidRequest naming the field."""
    for index, function in enumerate(functions):
        check_function(function, f"functions.{index}")
    tools: list[Tool] = [{"type": "function", "function": function} for function in functions]
    if choice in (None, "none", "auto"):
        return tool_use(tools, choice or "auto", parallel=False)
    name = choice.get("name") if isinstance(choice, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest("function_call", "function_call must be 'none', 'auto' or an object with a name")
    if name not in [function["name"] for function in functions]:
        raise InvalidRequest(
            "function_call.name", f"function_call: there is no function {name!r:.80} among the functions"
        )
    return tool_use(tools, {"type": "function", "function": {"name": name}}, parallel=False)


def _chosen(choice: dict[str, Any], path: str, schemas: Mapping[str, Any]) -> str:
    function = choice.get("function")
    name = member(function if isinstance(function, dict) else {}, "name", str, f"{path}.function")
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
    """Return the meaning of OpenAI's allowed_tools: a choice among some of the tools."""
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


def schema_of(tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments: always an object."""
    schema: dict[str, Any] = tool["function"].get("parameters") or {}
    return {"type": "object", **schema}


ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
TEXT_PARTS = {"text": "text", "refusal": "refusal"}  # type of a content part -> where its text is

Message = dict[str, Any]


def template_messages(messages: list[Message]) -> list[Message]:
    """Return all messages for the template; InvalidRequest naming the first field that is wrong."""
    return [template_message(message, f"messages.{index}") for index, message in enumerate(messages)]


def template_message(message: Message, path: str) -> Message:
    """Return a message as chat templates know it: one string of content, and nothing that is null or empty."""
    message = with_tool_calls(message, path)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{path}.role", f"{path}.role must be one of {', '.join(ROLES)}")
    changed: Message = {"tool_calls": None}
    strings = ["name"]
    if role == "assistant":
        strings += [*REASONING_NAMES, "refusal"]
        if message.get("audio") is not None:
            raise InvalidRequest(f"{path}.audio", f"{path}.audio is not supported: send its text as content")
        if message.get("tool_calls"):
            calls = member(message, "tool_calls", list, path)
            changed["tool_calls"] = [
                _template_call(call, f"{path}.tool_calls.{index}") for index, call in enumerate(calls)
            ]
    elif role == "tool":
        strings.append("tool_call_id")
    for name in strings:
        optional_member(message, name, str, path)
    changed["content"] = _content(message, path)
    return {key: value for key, value in (message | changed).items() if value is not None}


def with_tool_calls(message: Message, path: str) -> Message:
    """Return a message of OpenAI's older form, with a function's call or result, in today's; others as they are."""
    if message.get("role") == "function":
        return {**message, "role": "tool", "tool_call_id": _call_id(member(message, "name", str, path))}
    call = message.get("function_call")
    if call is None or message.get("role") != "assistant":
        return message
    path = f"{path}.function_call"
    if message.get("tool_calls"):
        raise InvalidRequest(path, f"{path} and tool_calls cannot be given together")
    call_id = _call_id(member(call if isinstance(call, dict) else {}, "name", str, path))
    optional_member(call, "arguments", str, path)
    return {
        **message,
        "function_call": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": call}],
    }


def _call_id(name: str) -> str:
    """Return what ties a result to its call, of which it tells only the name.

    Some templates take nothing but nine digits.
    """
    return f"{zlib.crc32(name.encode()) % 10**9:09}"


def _content(message: Message, path: str) -> str:
    content = message.get("content")
    if content is None:
        others = ("tool_calls", "refusal", *REASONING_NAMES)
        if message["role"] != "assistant" or not any(message.get(name) for name in others):
            raise InvalidRequest(f"{path}.content", f"{path}.content is required")
        return message.get("refusal") or ""
    return content_text(content, f"{path}.content", TEXT_PARTS)


def content_text(content: Any, path: str, text_parts: Mapping[str, str]) -> str:
    """Return content as one text: a string, or parts of which each has a line; InvalidRequest naming a wrong part.

    `text_parts` says by type of a part where its text is.
    """
    if isinstance(content, list):
        parts = [_text_of_part(part, f"{path}.{index}", text_parts) for index, part in enumerate(content)]
        return "\n".join(parts)
    if not isinstance(content, str):
        raise InvalidRequest(path, f"{path} must be a string or a list of text parts")
    return content


def _text_of_part(part: Any, path: str, text_parts: Mapping[str, str]) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(path, f"{path} must be an object with a type")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in text_parts:
        raise InvalidRequest(f"{path}.type", f"{path}.type: only text parts are supported, not {kind!r:.80}")
    return member(part, text_parts[kind], str, path)


def _template_call(call: Any, path: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise InvalidRequest(path, f"{path} must be an object")
    if call.get("type", "function") != "function":
        raise InvalidRequest(f"{path}.type", f"{path}.type must be 'function'")
    optional_member(call, "id", str, path)
    function = member(call, "function", dict, path)
    member(function, "name", str, f"{path}.function")
    arguments = function.get("arguments")
    if not isinstance(arguments, (str, dict, type(None))):
        raise InvalidRequest(f"{path}.function.arguments", f"{path}.function.arguments must be a string of JSON")
    return {**call, "type": "function", "function": {**function, "arguments": arguments or "{}"}}
