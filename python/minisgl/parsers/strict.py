"""Tools whose calls must follow their schemas to the letter, also where the model is free to call."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from minisgl.core import InvalidRequest
from minisgl.parsers.plain_values import SAYS_NOTHING, Allowance, is_exact
from minisgl.parsers.tool_calls import Tools

_BY_PARAMETER = ("pythonic", "qwen3_coder")  # forms with a rule for each parameter, and none for the whole
_OF_PARAMETERS = frozenset(("type", "properties", "required", "additionalProperties", "$defs", "definitions"))


def check_strict(form: str, tools: Tools, strict: AbstractSet[str]) -> None:
    """InvalidRequest if this form of calls does not allow some of the tools to be strict."""
    allowance = Allowance()
    for name in strict & tools.keys():
        _check(form, name, tools[name], allowance)


def schemas_to_enforce(tools: Tools, strict: AbstractSet[str]) -> Tools:
    """Where only the calls of some tools are to be strict."""
    return {name: schema if name in strict else _loose(schema) for name, schema in tools.items()}


def _loose(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Any arguments, under the names that the schema has."""
    return {"type": "object", "properties": {key: {} for key in schema.get("properties") or {}}}


def _check(form: str, name: str, schema: Mapping[str, Any], allowance: Allowance) -> None:
    if form not in _BY_PARAMETER:
        return
    properties = schema.get("properties") or {}
    foreign = sorted(schema.keys() - SAYS_NOTHING - _OF_PARAMETERS)
    foreign += sorted(set(schema.get("required") or ()) - set(properties))
    if form == "qwen3_coder":
        foreign += [key for key, value in properties.items() if not is_exact(value, schema, allowance)]
    if foreign:
        reason = f"this model's form of calls cannot hold to {foreign[0]!r:.80} among its parameters"
        raise InvalidRequest("tools", f"tools: {name} cannot be strict, because {reason}")
