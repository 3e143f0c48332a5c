"""Grammars that make a model call tools in its own form.

They are sketches in llguidance's dialect of Lark: what only the tokenizer worker knows stands in them as lines that it
replaces (`tokenizer.constraint`). `%marker "..."` is a token, or the text where there is no such token;
`%grammar name [kind, text]` is a rule for what a `core.Grammar` allows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from minisgl.core import Grammar
from minisgl.parsers.qwen_coder import types_of
from minisgl.parsers.tool_calls import Tools

ANY_TEXT = "/(?s:.*)/"


def calls_grammar(form: str, tools: Tools, *, parallel: bool) -> Grammar:
    """What demands a call of one of these tools, or several. `form` is a tool-call parser's name."""
    return Grammar("lark", "\n".join(_FORMS[form](tools, parallel)))


def has_grammar(form: str) -> bool:
    """Whether calls can be demanded in this form."""
    return form in _FORMS


def either(calls: Grammar, content: Grammar) -> Grammar:
    """Calls, or else content that is constrained too."""
    rules = ["start: calls | content", grammar_rule("calls", calls), grammar_rule("content", content)]
    return Grammar("lark", "\n".join(rules))


def grammar_rule(name: str, grammar: Grammar) -> str:
    """A rule for what the grammar allows."""
    return f"%grammar {name} {json.dumps([grammar.kind, grammar.text])}"


def text_rule(text: str) -> str:
    """A literal."""
    return json.dumps(text, ensure_ascii=False)


def _marker(text: str) -> str:
    return f"%marker {text_rule(text)}"


def _schema_rule(name: str, schema: Any, root: Mapping[str, Any]) -> str:
    """A rule for a part of a schema, which may refer to definitions at the root."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return grammar_rule(name, Grammar("json_schema", json.dumps({**definitions, **schema})))


def _objects(tools: Tools, key: str) -> list[str]:
    """Rules for `{"name": ..., key: {...}}`."""
    rules = [f"object: {_alternatives('object', tools)}"]
    for index, (name, schema) in enumerate(tools.items()):
        head = f"{{{text_rule('name')}: {text_rule(name)}, {text_rule(key)}: "
        rules += [f"object_{index}: {text_rule(head)} arguments_{index} {text_rule('}')}"]
        rules += [_schema_rule(f"arguments_{index}", schema, schema)]
    return rules


def _alternatives(name: str, tools: Tools) -> str:
    return " | ".join(f"{name}_{index}" for index in range(len(tools)))


def _repeated(item: str, separator: str, parallel: bool) -> str:
    return f"{item} ({text_rule(separator)} {item})*" if parallel else item


def _hermes(tools: Tools, parallel: bool) -> list[str]:
    call = f"{_marker('<tool_call>')} {text_rule(chr(10))} object {text_rule(chr(10))} {_marker('</tool_call>')}"
    return [f"start: {_repeated('call', chr(10), parallel)}", f"call: {call}", *_objects(tools, "arguments")]


def _llama_json(tools: Tools, _parallel: bool) -> list[str]:
    return ["start: object", *_objects(tools, "parameters")]  # the templates take no second call


def _mistral_list(tools: Tools, parallel: bool) -> list[str]:
    items = _repeated("object", ", ", parallel)
    return [
        f"start: {_marker('[TOOL_CALLS]')} {text_rule('[')} {items} {text_rule(']')}",
        *_objects(tools, "arguments"),
    ]


def _mistral_named(tools: Tools, parallel: bool) -> list[str]:
    rules = ["start: call+" if parallel else "start: call", f"call: {_alternatives('call', tools)}"]
    for index, (name, schema) in enumerate(tools.items()):
        rules += [f"call_{index}: {_marker('[TOOL_CALLS]')} {text_rule(name)} {_marker('[ARGS]')} arguments_{index}"]
        rules += [_schema_rule(f"arguments_{index}", schema, schema)]
    return rules


def _pythonic(tools: Tools, parallel: bool) -> list[str]:
    rules = [f"start: {text_rule('[')} {_repeated('call', ', ', parallel)} {text_rule(']')}"]
    rules += [f"call: {_alternatives('call', tools)}"]
    for index, (name, schema) in enumerate(tools.items()):
        rules += [f"call_{index}: {text_rule(f'{name}(')} first_{index}_0 {text_rule(')')}"]
        required = schema.get("required") or ()
        properties = schema.get("properties") or {}
        for number, (key, value) in enumerate(properties.items()):
            # Before the first argument there is no comma, and an optional one may be left out.
            this, following = f"{index}_{number}", f"{index}_{number + 1}"
            for state, comma in (("first", ""), ("later", ", ")):
                skip = "" if key in required else f" | {state}_{following}"
                rules += [f"{state}_{this}: {text_rule(f'{comma}{key}=')} value_{this} later_{following}{skip}"]
            rules += [_schema_rule(f"value_{this}", value, schema)]
        rules += [f'{state}_{index}_{len(properties)}: ""' for state in ("first", "later")]
    return rules


def _qwen_coder(tools: Tools, parallel: bool) -> list[str]:
    rules = [f"start: {_repeated('call', chr(10), parallel)}"]
    rules += [f"call: {_marker('<tool_call>')} {text_rule(chr(10))} function {_marker('</tool_call>')}"]
    rules += [f"function: {_alternatives('function', tools)}"]
    for index, (name, schema) in enumerate(tools.items()):
        required = schema.get("required") or ()
        properties = schema.get("properties") or {}
        names = [f"parameter_{index}_{number}{'' if key in required else '?'}" for number, key in enumerate(properties)]
        head, end = text_rule(f"<function={name}>\n"), text_rule("</function>\n")
        rules += [f"function_{index}: {' '.join([head, *names, end])}"]
        for number, (key, value) in enumerate(properties.items()):
            this = f"{index}_{number}"
            rules += [f"parameter_{this}: {text_rule(f'<parameter={key}>{chr(10)}')} value_{this}"]
            rules += _plain_value(f"value_{this}", value, schema)
    return rules


def _plain_value(name: str, schema: Any, root: Mapping[str, Any]) -> list[str]:
    """Rules for a value and the tag that ends it."""
    end = text_rule("\n</parameter>\n")
    if types_of(schema) != {"string"}:
        return [f"{name}: {name}_json {end}", _schema_rule(f"{name}_json", schema, root)]
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return [f"{name}: ({' | '.join(map(text_rule, choices))}) {end}"]
    return [f"{name}[suffix={end}]: {ANY_TEXT}"]


_FORMS: dict[str, Callable[[Tools, bool], list[str]]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen_coder,
    "llama3_json": _llama_json,
    "pythonic": _pythonic,
    "mistral": _mistral_list,
    "mistral_named": _mistral_named,
}
