"""Tools of a response: OpenAI's Responses API gives a function's name and schema beside its type.

Functions may stand in a namespace, as Codex sends those of MCP servers. Chat templates know no namespaces, so the model
is told of one function, `namespace__name`; in calls the two are apart again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from minisgl.sampling_params import InvalidRequest
from minisgl.server.api.bodies.tools import (
    Tool,
    ToolChoice,
    ToolUse,
    check_function,
    known_function,
    name_of,
    use_of,
    valid_name,
)
from minisgl.tokenizer.conversation import member, optional_member

_CHOICES = "'none', 'auto', 'required', or an object that names a function or allowed_tools"


class NamespacedName(NamedTuple):
    """Function of a namespace, as a call's item names it."""

    namespace: str
    name: str

    @property
    def shown(self) -> str:
        """Name that the model knows."""
        return f"{self.namespace}__{self.name}"


@dataclass(frozen=True, slots=True)
class ResponseTools:
    use: ToolUse
    namespaced: Mapping[str, NamespacedName]  # by the name that the model knows
    warnings: list[str]  # one for each ignored tool


def shown_name(owner: Mapping[str, Any], path: str) -> str:
    """Return the name by which the model knows the function that a call or a choice names."""
    name = member(owner, "name", str, path)
    namespace = optional_member(owner, "namespace", str, path)
    return name if namespace is None else NamespacedName(namespace, name).shown


def response_tools(tools: Sequence[Mapping[str, Any]], choice: Any, parallel: bool) -> ResponseTools:
    """Return the meaning of the tools; InvalidRequest naming the wrong field."""
    functions: list[Tool] = []
    namespaced: dict[str, NamespacedName] = {}
    others: dict[str, str] = {}  # path -> type of the tools that are not functions
    for path, tool, namespace in _single_tools(tools):
        if (kind := member(tool, "type", str, path)) != "function":
            others[path] = kind
            continue
        function = {name: value for name, value in tool.items() if name != "type" and value is not None}
        if namespace is not None:
            name = NamespacedName(namespace, valid_name(function, path))
            function["name"] = name.shown
            namespaced[name.shown] = name
        check_function(function, path)  # also that the two names together are not too long
        functions.append({"type": "function", "function": function})
    counts = Counter(map(name_of, functions))
    for name in namespaced.values():
        if counts[name.shown] > 1:
            text = f"tools: the model is told of {name.name!r:.80} as {name.shown!r:.80}, and so of another function"
            raise InvalidRequest("tools", text)
    if choice == "required" and others and not functions:
        raise InvalidRequest("tool_choice", "tool_choice: a call is required, but none of the tools is a function")
    meaning = _choice(choice, counts.keys())
    warnings = [
        f"{path}: tools of the type {kind!r:.80} are not supported; the model is not told of it"
        for path, kind in others.items()
    ]
    use = use_of(functions, meaning, parallel=parallel, passed_over=frozenset(others.values()))
    return ResponseTools(use, namespaced, warnings)


def _single_tools(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any], str | None]]:
    """Yield the path of each tool, the tool, and its namespace if it has one."""
    for index, tool in enumerate(tools):
        path = f"tools.{index}"
        if tool.get("type") != "namespace":
            yield path, tool, None
            continue
        namespace = valid_name(tool, path)
        for inner_index, inner in enumerate(member(tool, "tools", list, path)):
            inner_path = f"{path}.tools.{inner_index}"
            if not isinstance(inner, dict):
                raise InvalidRequest(inner_path, f"{inner_path} must be an object")
            yield inner_path, inner, namespace


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
    return ToolChoice.of(_known(choice, names, "tool_choice"))


def _allowed(choice: dict[str, Any], names: Set[str]) -> ToolChoice:
    path = "tool_choice.tools"
    allowed = member(choice, "tools", list, "tool_choice")
    mode = choice.get("mode")
    if mode not in ("auto", "required"):
        raise InvalidRequest("tool_choice.mode", "tool_choice.mode must be 'auto' or 'required'")
    if not all(isinstance(tool, dict) for tool in allowed):
        raise InvalidRequest(path, f"{path} must be a list of objects")
    found = [
        _known(tool, names, f"{path}.{index}") for index, tool in enumerate(allowed) if tool.get("type") == "function"
    ]
    if mode == "required" and not found:
        raise InvalidRequest(path, f"{path}: a call is required, but none of them is a function")
    return ToolChoice(mode, frozenset(found)) if found else ToolChoice("none")


def _known(owner: Mapping[str, Any], names: Set[str], path: str) -> str:
    return known_function({"name": shown_name(owner, path)}, names, path)
