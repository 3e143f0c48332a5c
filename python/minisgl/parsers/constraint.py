"""Grammars that make a model call tools in its own form, and that let it think first.

They are written in llguidance's dialect of Lark, where `%json {...}` is a rule for what a schema allows. A marker is
written `%marker "..."` until `for_tokenizer` knows the token that it is: single tokens are named by their id, since no
text may stand for them; what is none is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from minisgl.core import Grammar
from minisgl.parsers.qwen_coder import types_of
from minisgl.parsers.reasoning import ReasoningFormat, Start
from minisgl.parsers.tool_calls import Tools

TokenId = Callable[[str], int | None]

_MARKER = re.compile(r'%marker ("(?:[^"\\]|\\.)*")')
_ANY_TEXT = "/(?s:.*)/"
# As chat templates show the models their own calls.
_SEPARATORS = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}


def calls_grammar(form: str, tools: Tools, *, parallel: bool) -> Grammar:
    """What demands a call of one of these tools, or several. `form` is a tool-call parser's name."""
    return Grammar("lark", "\n".join(_FORMS[form](tools, parallel)))


def has_grammar(form: str) -> bool:
    """Whether calls can be demanded in this form."""
    return form in _FORMS


def either(calls: Grammar, content: Grammar) -> Grammar:
    """Calls, or else content that is constrained too."""
    return Grammar("lark", "\n".join(["start: calls | content", *_rule("calls", calls), *_rule("content", content)]))


def for_tokenizer(grammar: Grammar, form: ReasoningFormat | None, start: Start, token_id: TokenId) -> Grammar:
    """The grammar with a thought before it where one may come, for a tokenizer in which `token_id` finds markers."""
    if form is not None and start is not Start.OUTSIDE and grammar.kind != "ebnf":
        grammar = Grammar("lark", "\n".join([*_thought(form, start, token_id), *_rule("answer", grammar)]))
    if grammar.kind != "lark":
        return grammar
    return Grammar("lark", _MARKER.sub(lambda match: _token(json.loads(match[1]), token_id), grammar.text))


def _thought(form: ReasoningFormat, start: Start, token_id: TokenId) -> list[str]:
    opening = f"{_token(form.opening, token_id)} " if start is Start.UNDECIDED else ""
    if token_id(form.closing) is None:
        rules = [f"thought: {opening}thought_text", f"thought_text[suffix={_text(form.closing)}]: {_ANY_TEXT}"]
    else:
        rules = [f"thought: {opening}{_ANY_TEXT} {_token(form.closing, token_id)}"]
    optional = "?" if start is Start.UNDECIDED else ""
    return [f"start: (thought LINE_BREAKS){optional} answer", r"LINE_BREAKS: /\n*/", *rules]


def _token(marker: str, token_id: TokenId) -> str:
    number = token_id(marker)
    return _text(marker) if number is None else f"<[{number}]>"


def _rule(name: str, grammar: Grammar) -> list[str]:
    """A rule for what the grammar allows."""
    match grammar.kind:
        case "json_object":
            return [f'{name}: %json {{"type": "object"}}']
        case "json_schema":
            return [f"{name}: %json {grammar.text}"]
        case "regex":
            return [f"{name}: /{_escaped_slashes(grammar.text)}/"]
        case "choice":
            return [f"{name}: {' | '.join(map(_text, json.loads(grammar.text)))}"]
        case _:
            return [f"{name}: %lark {{", grammar.text, "}"]


def _escaped_slashes(expression: str) -> str:
    return re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", expression, flags=re.DOTALL).replace("\n", r"\n")


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _marker(text: str) -> str:
    return f"%marker {_text(text)}"


def _json(schema: Any, root: Mapping[str, Any]) -> str:
    """A rule for a part of a schema, which may refer to definitions at the root."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return f"%json {json.dumps({**definitions, **schema, **_SEPARATORS}, ensure_ascii=False)}"


def _objects(tools: Tools, key: str) -> list[str]:
    """Rules for `{"name": ..., key: {...}}`."""
    rules = [f"object: {_alternatives('object', tools)}"]
    for index, (name, schema) in enumerate(tools.items()):
        head = f"{{{_text('name')}: {_text(name)}, {_text(key)}: "
        rules += [f"object_{index}: {_text(head)} arguments_{index} {_text('}')}"]
        rules += [f"arguments_{index}: {_json(schema, schema)}"]
    return rules


def _alternatives(name: str, tools: Tools) -> str:
    return " | ".join(f"{name}_{index}" for index in range(len(tools)))


def _repeated(item: str, separator: str, parallel: bool) -> str:
    return f"{item} ({_text(separator)} {item})*" if parallel else item


def _hermes(tools: Tools, parallel: bool) -> list[str]:
    call = f"{_marker('<tool_call>')} {_text(chr(10))} object {_text(chr(10))} {_marker('</tool_call>')}"
    return [f"start: {_repeated('call', chr(10), parallel)}", f"call: {call}", *_objects(tools, "arguments")]


def _llama_json(tools: Tools, _parallel: bool) -> list[str]:
    return ["start: object", *_objects(tools, "parameters")]  # the templates take no second call


def _mistral_list(tools: Tools, parallel: bool) -> list[str]:
    items = _repeated("object", ", ", parallel)
    return [f"start: {_marker('[TOOL_CALLS]')} {_text('[')} {items} {_text(']')}", *_objects(tools, "arguments")]


def _mistral_named(tools: Tools, parallel: bool) -> list[str]:
    rules = ["start: call+" if parallel else "start: call", f"call: {_alternatives('call', tools)}"]
    for index, (name, schema) in enumerate(tools.items()):
        rules += [f"call_{index}: {_marker('[TOOL_CALLS]')} {_text(name)} {_marker('[ARGS]')} arguments_{index}"]
        rules += [f"arguments_{index}: {_json(schema, schema)}"]
    return rules


def _pythonic(tools: Tools, parallel: bool) -> list[str]:
    rules = [f"start: {_text('[')} {_repeated('call', ', ', parallel)} {_text(']')}"]
    rules += [f"call: {_alternatives('call', tools)}"]
    for index, (name, schema) in enumerate(tools.items()):
        rules += [f"call_{index}: {_text(f'{name}(')} first_{index}_0 {_text(')')}"]
        required = schema.get("required") or ()
        properties = schema.get("properties") or {}
        for number, (key, value) in enumerate(properties.items()):
            # Before the first argument there is no comma, and an optional one may be left out.
            this, following = f"{index}_{number}", f"{index}_{number + 1}"
            for state, comma in (("first", ""), ("later", ", ")):
                skip = "" if key in required else f" | {state}_{following}"
                rules += [f"{state}_{this}: {_text(f'{comma}{key}=')} value_{this} later_{following}{skip}"]
            rules += [f"value_{this}: {_json(value, schema)}"]
        rules += [f'{state}_{index}_{len(properties)}: ""' for state in ("first", "later")]
    return rules


def _qwen_coder(tools: Tools, parallel: bool) -> list[str]:
    rules = [f"start: {_repeated('call', chr(10), parallel)}"]
    rules += [f"call: {_marker('<tool_call>')} {_text(chr(10))} function {_marker('</tool_call>')}"]
    rules += [f"function: {_alternatives('function', tools)}"]
    for index, (name, schema) in enumerate(tools.items()):
        required = schema.get("required") or ()
        properties = schema.get("properties") or {}
        names = [f"parameter_{index}_{number}{'' if key in required else '?'}" for number, key in enumerate(properties)]
        head, end = _text(f"<function={name}>\n"), _text("</function>\n")
        rules += [f"function_{index}: {' '.join([head, *names, end])}"]
        for number, (key, value) in enumerate(properties.items()):
            this = f"{index}_{number}"
            rules += [f"parameter_{this}: {_text(f'<parameter={key}>{chr(10)}')} value_{this}"]
            rules += [f"value_{this}{_plain_value(value, schema)}"]
    return rules


def _plain_value(schema: Any, root: Mapping[str, Any]) -> str:
    """The rest of a rule for a value and the tag that ends it."""
    end = _text("\n</parameter>\n")
    if types_of(schema) != {"string"}:
        return f": {_json(schema, root)} {end}"
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return f": ({' | '.join(map(_text, choices))}) {end}"
    return f"[suffix={end}]: {_ANY_TEXT}"


_FORMS: dict[str, Callable[[Tools, bool], list[str]]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen_coder,
    "llama3_json": _llama_json,
    "pythonic": _pythonic,
    "mistral": _mistral_list,
    "mistral_named": _mistral_named,
}
