"""Grammars for tool calls in the model's own form, demanded or optional, with arguments that follow their schemas.

Tools come from clients, so a grammar template is generated line by line and counted, and generation stops at the limit
on grammars. A schema is written with only those definitions to which it refers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import msgspec

from minisgl.parsers.harmony import CONSTRAIN, HARMONY, MESSAGE, HarmonyParser
from minisgl.parsers.json_forms import HermesParser, LlamaJsonParser, MistralParser
from minisgl.parsers.plain_values import SAYS_NOTHING, Allowance, is_exact, texts_of, types_of
from minisgl.parsers.pythonic import PythonicParser, is_key
from minisgl.parsers.qwen_coder import QwenCoderParser
from minisgl.parsers.tool_calls import ToolCallParser, Tools
from minisgl.sampling_params import MAX_GRAMMAR_CHARS, Grammar, InvalidRequest
from minisgl.structured_output.grammar_template import (
    ANY_TEXT,
    final_message,
    grammar_rule,
    marker,
    owner_line,
    text_literal,
    until_rule,
)

_DEFINITIONS = ("$defs", "definitions")
_BY_PARAMETER_KEYWORDS = frozenset(("type", "properties", "required", "additionalProperties", *_DEFINITIONS))
_REFERENCE = re.compile(rb'"\$ref":("(?:[^"\\]|\\.)*")')  # in JSON that msgspec has written


@dataclass(frozen=True, slots=True)
class CallForm:
    """Form in which a model writes calls."""

    rules: Callable[[Tools, bool], Iterable[str]]  # rules of `call`, from the tools and True if calls may be parallel
    parser: type[ToolCallParser] | type[HarmonyParser]
    between: str | None  # text between calls that have a marker each; None: there is one marker, or none
    head: str = ""  # beginning of an answer that is a call, if the form has no marker
    by_parameter: bool = False  # each parameter has a rule; otherwise one rule has all arguments

    @property
    def marker(self) -> str:
        """Marker that begins a call; empty if calls need none."""
        return "" if self.head else self.parser.markers[0]


def calls_grammar(form: str, tools: Tools, *, parallel: bool) -> Grammar:
    """Return the template that demands a call of one of these tools, or several if `parallel`.

    `form` names one of `FORMS`. InvalidRequest if the template is too long.
    """
    how = FORMS[form]
    opening = f"{marker(how.marker)} " if how.marker else ""
    calls = "opened" if how.between is None else _repeated("opened", how.between, parallel)
    return _template([f"start: {calls}", f"opened: {opening}call"], how.rules(tools, parallel))


def free_grammar(form: str, tools: Tools, *, parallel: bool) -> Grammar:
    """Return the template of any text, with or without calls.

    Where a call begins, one of these tools must follow, with its arguments. InvalidRequest if the template is too long.
    """
    if form == HARMONY:
        return either(form, calls_grammar(form, tools, parallel=parallel), Grammar("regex", "(?s:.*)"))
    how = FORMS[form]
    calls = _containing(*how.parser.markers)
    if how.head:
        calls += f"|[\\s\\x1c-\\x1f]*{_regex_literal(how.head)}(?s:.*)"
        rules = ["start: TEXT | call"]
    else:
        start = "(begin call)* TEXT" if parallel else "TEXT | begin call"
        rules = [f"start: {start}", until_rule("begin", how.marker)]
    rules += [f"TEXT: {_text_without(calls)}"]
    return _template(rules, how.rules(tools, parallel))


def either(form: str, calls: Grammar, content: Grammar) -> Grammar:
    """Return the template of either calls in this form or constrained content."""
    content = final_message(content) if form == HARMONY else content
    rules = ["start: calls | content", grammar_rule("calls", calls), grammar_rule("content", content)]
    return Grammar("template", "\n".join(rules))


def check_strict(form: str, tools: Tools, strict: AbstractSet[str]) -> None:
    """Raise InvalidRequest if this form of calls cannot enforce the schema of one of the `strict` tools."""
    if not FORMS[form].by_parameter:
        return
    allowance = Allowance()
    for name in strict & tools.keys():
        schema = tools[name]
        properties = schema.get("properties") or {}
        foreign = sorted(schema.keys() - SAYS_NOTHING - _BY_PARAMETER_KEYWORDS)
        foreign += sorted(set(schema.get("required") or ()) - set(properties))
        if form == "qwen3_coder":
            foreign += [key for key, value in properties.items() if not is_exact(value, schema, allowance)]
        if foreign:
            reason = f"this model's form of calls cannot enforce {foreign[0]!r:.80} in its parameters"
            raise InvalidRequest("tools", f"tools: {name} cannot be strict, because {reason}")


def schemas_to_enforce(tools: Tools, strict: AbstractSet[str]) -> Tools:
    """Return the tools with the schemas of the `strict` ones; the others' parameters may have any values."""
    return {name: schema if name in strict else _loose(schema) for name, schema in tools.items()}


def _loose(schema: Mapping[str, Any]) -> dict[str, Any]:
    names = schema.get("properties") or {}
    return {"type": "object", "properties": {key: {} for key in names}, "additionalProperties": True}


def _template(begin: list[str], rules: Iterable[str]) -> Grammar:
    """Return the template of these lines; InvalidRequest as soon as they are longer than a grammar may be."""
    lines, chars = begin, sum(map(len, begin))
    for line in rules:
        lines.append(line)
        chars += len(line) - line.count('\\"') - line.count("\\\\")  # without the escapes of grammars in it
        if chars > MAX_GRAMMAR_CHARS:
            raise _too_long()
    return Grammar("template", "\n".join(lines))


def _too_long() -> InvalidRequest:
    text = f"tools need a grammar of more than {MAX_GRAMMAR_CHARS} characters, which is the limit"
    return InvalidRequest("tools", text)


def _text_without(expression: str) -> str:
    """Return a terminal for any text that the expression does not match as a whole.

    The complement alone would allow bytes that are no text.
    """
    return f"{ANY_TEXT} & (~/{expression}/)"


def _containing(*texts: str) -> str:
    """Return a regular expression for a text that contains one of these."""
    return f"(?s:.*)({'|'.join(map(_regex_literal, texts))})(?s:.*)"


def _regex_literal(text: str) -> str:
    """Return a regular expression for this text, escaped for Lark."""
    return re.escape(text).replace("/", r"\/")


class _Definitions:
    """Definitions of one tool's schema, to which its parts may refer. Each is encoded at most once."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._written: dict[tuple[str, str], tuple[bytes, set[tuple[str, str]]]] = {}

    def rule(self, name: str, schema: Any) -> str:
        """Return a rule for a part of the schema, with the definitions to which it refers, directly or not."""
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        text = msgspec.json.encode(schema)
        used: dict[str, dict[str, msgspec.Raw]] = {}
        chars, unread = len(text), [self._referred(text)]
        while unread:
            for keyword, definition in unread.pop():
                if definition in used.setdefault(keyword, {}):
                    continue
                written, referred = self._definition(keyword, definition)
                used[keyword][definition] = msgspec.Raw(written)
                unread.append(referred)
                chars += len(written)
                if chars > 4 * MAX_GRAMMAR_CHARS:  # counted in bytes, at most 4 of which are a character
                    raise _too_long()
        if used:
            text = msgspec.json.encode({**schema, **used})
        return grammar_rule(name, Grammar("json_schema", text.decode()))

    def _definition(self, keyword: str, name: str) -> tuple[bytes, set[tuple[str, str]]]:
        """Return the definition as JSON, and the definitions that it refers to."""
        place = keyword, name
        if place not in self._written:
            text = msgspec.json.encode(self._root[keyword][name])
            self._written[place] = text, self._referred(text)
        return self._written[place]

    def _referred(self, text: bytes) -> set[tuple[str, str]]:
        """Return the definitions to which a text refers, as (keyword, name)."""
        named: set[tuple[str, str]] = set()
        for found in set(_REFERENCE.findall(text)):
            reference: str = msgspec.json.decode(found)
            if not reference.startswith(("#/$defs/", "#/definitions/")):
                if reference == "#" or reference.startswith("#/"):
                    reason = f"tools: {reference:.80} is no definition; this form of calls takes no other reference"
                    raise InvalidRequest("tools", reason)
                # The reference names an `$id` or `$anchor`, which any definition may have.
                return {(keyword, one) for keyword in _DEFINITIONS for one in self._of(keyword)}
            _, keyword, pointer = reference.split("/", 2)
            name = unquote(pointer.partition("/")[0]).replace("~1", "/").replace("~0", "~")
            if name in self._of(keyword):
                named.add((keyword, name))
        return named

    def _of(self, keyword: str) -> Mapping[str, Any]:
        definitions = self._root.get(keyword)
        return definitions if isinstance(definitions, dict) else {}


def _arguments(index: int, name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rule for all arguments of a tool."""
    yield owner_line(name)
    yield grammar_rule(f"arguments_{index}", Grammar("json_schema", msgspec.json.encode(schema).decode()))


def _objects(tools: Tools, key: str) -> Iterator[str]:
    """Yield rules for `{"name": ..., key: {...}}`."""
    yield f"object: {_alternatives('object', tools)}"
    for index, (name, schema) in enumerate(tools.items()):
        head = f"{{{text_literal('name')}: {text_literal(name)}, {text_literal(key)}: "
        yield f"object_{index}: {text_literal(head)} arguments_{index} {text_literal('}')}"
        yield from _arguments(index, name, schema)


def _alternatives(name: str, tools: Tools) -> str:
    return " | ".join(f"{name}_{index}" for index in range(len(tools)))


def _repeated(item: str, separator: str, parallel: bool) -> str:
    return f"{item} ({text_literal(separator)} {item})*" if parallel else item


def _hermes(tools: Tools, _parallel: bool) -> Iterator[str]:
    yield f"call: {text_literal(chr(10))} object {text_literal(chr(10))} {marker('</tool_call>')}"
    yield from _objects(tools, "arguments")


def _llama_json(tools: Tools, _parallel: bool) -> Iterator[str]:
    yield "call: object"  # Llama's chat templates accept one call only
    yield from _objects(tools, "parameters")


def _mistral_list(tools: Tools, parallel: bool) -> Iterator[str]:
    yield f"call: {text_literal('[')} {_repeated('object', ', ', parallel)} {text_literal(']')}"
    yield from _objects(tools, "arguments")


def _mistral_named(tools: Tools, _parallel: bool) -> Iterator[str]:
    return _headed(tools, lambda name: f"{text_literal(name)} {marker('[ARGS]')}")


def _harmony(tools: Tools, _parallel: bool) -> Iterator[str]:
    end = f'{marker(CONSTRAIN)}? "json" {marker(MESSAGE)}'
    return _headed(tools, lambda name: f"{text_literal(f'commentary to=functions.{name} ')} {end}")


def _headed(tools: Tools, head: Callable[[str], str]) -> Iterator[str]:
    """Yield rules for a head, which names the tool, followed by its arguments."""
    yield f"call: {_alternatives('call', tools)}"
    for index, (name, schema) in enumerate(tools.items()):
        yield f"call_{index}: {head(name)} arguments_{index}"
        yield from _arguments(index, name, schema)


def _pythonic(tools: Tools, parallel: bool) -> Iterator[str]:
    yield f"call: {text_literal('[')} {_repeated('one', ', ', parallel)} {text_literal(']')}"
    yield f"one: {_alternatives('one', tools)}"
    for index, (name, schema) in enumerate(tools.items()):
        yield owner_line(name)
        yield f"one_{index}: {text_literal(f'{name}(')} first_{index}_0 {text_literal(')')}"
        required = set(schema.get("required") or ())
        properties = schema.get("properties") or {}
        definitions = _Definitions(schema)
        for number, (key, value) in enumerate(properties.items()):
            if not is_key(key):
                reason = f"the parameter {key!r:.80} of {name} cannot be written in this model's form of calls"
                raise InvalidRequest("tools", f"tools: {reason}")
            # Before the first argument there is no comma, and an optional one may be left out.
            this, following = f"{index}_{number}", f"{index}_{number + 1}"
            for state, comma in (("first", ""), ("later", ", ")):
                skip = "" if key in required else f" | {state}_{following}"
                yield f"{state}_{this}: {text_literal(f'{comma}{key}=')} value_{this} later_{following}{skip}"
            yield definitions.rule(f"value_{this}", value)
        for state in ("first", "later"):
            yield f'{state}_{index}_{len(properties)}: ""'


def _qwen_coder(tools: Tools, _parallel: bool) -> Iterator[str]:
    yield f"call: {text_literal(chr(10))} function {marker('</tool_call>')}"
    yield f"VALUE: {_text_without(_containing('</parameter>'))}"
    yield f"function: {_alternatives('function', tools)}"
    allowance = Allowance()
    for index, (name, schema) in enumerate(tools.items()):
        required = set(schema.get("required") or ())
        properties = schema.get("properties") or {}
        definitions = _Definitions(schema)
        names = [f"parameter_{index}_{number}{'' if key in required else '?'}" for number, key in enumerate(properties)]
        yield owner_line(name)
        head, end = text_literal(f"<function={name}>\n"), text_literal("</function>\n")
        yield f"function_{index}: {' '.join([head, *names, end])}"
        for number, (key, value) in enumerate(properties.items()):
            this = f"{index}_{number}"
            yield f"parameter_{this}: {text_literal(f'<parameter={key}>{chr(10)}')} value_{this}"
            # The value and the tag that ends it.
            end = text_literal("\n</parameter>\n")
            if "string" not in types_of(value, schema, allowance):
                yield f"value_{this}: value_{this}_json {end}"
                yield definitions.rule(f"value_{this}_json", value)
            elif texts := texts_of(value, schema, allowance):
                yield f"value_{this}: ({' | '.join(map(text_literal, texts))}) {end}"
            else:
                yield f"value_{this}[suffix={end}]: VALUE"


FORMS = {
    HARMONY: CallForm(_harmony, HarmonyParser, None),
    "hermes": CallForm(_hermes, HermesParser, "\n"),
    "qwen3_coder": CallForm(_qwen_coder, QwenCoderParser, "\n", by_parameter=True),
    "llama3_json": CallForm(_llama_json, LlamaJsonParser, None, head="{"),
    "pythonic": CallForm(_pythonic, PythonicParser, None, head="[", by_parameter=True),
    "mistral": CallForm(_mistral_list, MistralParser, None),
    "mistral_named": CallForm(_mistral_named, MistralParser, ""),
}
