"""Grammars that make a model call tools in its own form, or let it, with arguments that follow their schemas.

They are sketches in llguidance's dialect of Lark: what only the tokenizer worker knows stands in them as lines that it
replaces (`tokenizer.constraint`). `%marker "..."` is a token, or the text where there is no such token; `%until name
"..."` is a rule for TEXT up to and with such a marker; `%grammar name [kind, text]` is a rule for what a `core.Grammar`
allows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from minisgl.core import Grammar
from minisgl.parsers.hermes import HermesParser
from minisgl.parsers.llama import LlamaJsonParser
from minisgl.parsers.mistral import MistralParser
from minisgl.parsers.plain_values import texts_of, types_of
from minisgl.parsers.pythonic import PythonicParser
from minisgl.parsers.qwen_coder import QwenCoderParser
from minisgl.parsers.tool_calls import ToolCallParser, Tools

ANY_TEXT = "/(?s:.*)/"


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a model writes calls."""

    rules: Callable[[Tools, bool], list[str]]  # of `call`: one, behind the marker; or several, if that is allowed
    parser: type[ToolCallParser]
    between: str | None  # calls with a marker each; None: there is one marker, or none
    head: str = ""  # with which an answer that is a call begins, where no marker does

    @property
    def marker(self) -> str:
        """With which a call begins, if it needs one."""
        return "" if self.head else self.parser.markers[0]


def calls_grammar(form: str, tools: Tools, *, parallel: bool) -> Grammar:
    """What demands a call of one of these tools, or several. `form` is the name of one in `FORMS`."""
    how = FORMS[form]
    opening = f"{_marker(how.marker)} " if how.marker else ""
    calls = "opened" if how.between is None else _repeated("opened", how.between, parallel)
    rules = [f"start: {calls}", f"opened: {opening}call", *how.rules(tools, parallel)]
    return Grammar("sketch", "\n".join(rules))


def free_grammar(form: str, tools: Tools, *, parallel: bool) -> Grammar:
    """Any text, with calls or without; where a call begins, one of these tools must follow, with its arguments."""
    how = FORMS[form]
    calls = _containing(*how.parser.markers)
    if how.head:
        calls += f"|[\\s\\x1c-\\x1f]*{_literal(how.head)}(?s:.*)"
        rules = ["start: TEXT | call"]
    else:
        start = "(begin call)* TEXT" if parallel else "TEXT | begin call"
        rules = [f"start: {start}", f"%until begin {text_rule(how.marker)}"]
    rules += [f"TEXT: {_text_without(calls)}"]
    return Grammar("sketch", "\n".join([*rules, *how.rules(tools, parallel)]))


def has_grammar(form: str) -> bool:
    """Whether calls can be constrained in this form."""
    return form in FORMS


def either(calls: Grammar, content: Grammar) -> Grammar:
    """Calls, or else content that is constrained too."""
    rules = ["start: calls | content", grammar_rule("calls", calls), grammar_rule("content", content)]
    return Grammar("sketch", "\n".join(rules))


def grammar_rule(name: str, grammar: Grammar) -> str:
    """A rule for what the grammar allows."""
    return f"%grammar {name} {json.dumps([grammar.kind, grammar.text])}"


def text_rule(text: str) -> str:
    """A literal."""
    return json.dumps(text, ensure_ascii=False)


def _marker(text: str) -> str:
    return f"%marker {text_rule(text)}"


def _text_without(expression: str) -> str:
    """Any text that does not match as a whole. (The complement alone would allow what is no text at all.)"""
    return f"{ANY_TEXT} & (~/{expression}/)"


def _containing(*texts: str) -> str:
    """A regular expression for a text with one of these in it."""
    return f"(?s:.*)({'|'.join(map(_literal, texts))})(?s:.*)"


def _literal(text: str) -> str:
    """A regular expression for this text, as Lark takes it."""
    return re.escape(text).replace("/", r"\/")


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


def _hermes(tools: Tools, _parallel: bool) -> list[str]:
    call = f"call: {text_rule(chr(10))} object {text_rule(chr(10))} {_marker('</tool_call>')}"
    return [call, *_objects(tools, "arguments")]


def _llama_json(tools: Tools, _parallel: bool) -> list[str]:
    return ["call: object", *_objects(tools, "parameters")]  # the templates take no second call


def _mistral_list(tools: Tools, parallel: bool) -> list[str]:
    items = _repeated("object", ", ", parallel)
    return [f"call: {text_rule('[')} {items} {text_rule(']')}", *_objects(tools, "arguments")]


def _mistral_named(tools: Tools, _parallel: bool) -> list[str]:
    rules = [f"call: {_alternatives('call', tools)}"]
    for index, (name, schema) in enumerate(tools.items()):
        rules += [f"call_{index}: {text_rule(name)} {_marker('[ARGS]')} arguments_{index}"]
        rules += [_schema_rule(f"arguments_{index}", schema, schema)]
    return rules


def _pythonic(tools: Tools, parallel: bool) -> list[str]:
    rules = [f"call: {text_rule('[')} {_repeated('one', ', ', parallel)} {text_rule(']')}"]
    rules += [f"one: {_alternatives('one', tools)}"]
    for index, (name, schema) in enumerate(tools.items()):
        rules += [f"one_{index}: {text_rule(f'{name}(')} first_{index}_0 {text_rule(')')}"]
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


def _qwen_coder(tools: Tools, _parallel: bool) -> list[str]:
    rules = [f"call: {text_rule(chr(10))} function {_marker('</tool_call>')}"]
    rules += [f"VALUE: {_text_without(_containing('</parameter>'))}"]
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
    if "string" not in types_of(schema, root):
        return [f"{name}: {name}_json {end}", _schema_rule(f"{name}_json", schema, root)]
    if texts := texts_of(schema, root):
        return [f"{name}: ({' | '.join(map(text_rule, texts))}) {end}"]
    return [f"{name}[suffix={end}]: VALUE"]


FORMS = {
    "hermes": CallForm(_hermes, HermesParser, "\n"),
    "qwen3_coder": CallForm(_qwen_coder, QwenCoderParser, "\n"),
    "llama3_json": CallForm(_llama_json, LlamaJsonParser, None, head="{"),
    "pythonic": CallForm(_pythonic, PythonicParser, None, head="["),
    "mistral": CallForm(_mistral_list, MistralParser, None),
    "mistral_named": CallForm(_mistral_named, MistralParser, ""),
}
