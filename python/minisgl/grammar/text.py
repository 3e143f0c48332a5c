"""Grammars in llguidance's notation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
from llguidance import LLMatcher

from minisgl.core import Grammar, InvalidRequest
from minisgl.grammar.ebnf import EbnfError, ebnf_to_lark
from minisgl.grammar.schema import prepared_schema

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_CHOICES = 10_000
NOT_COMPLETE = "a sketch is no grammar before it is completed"
FIELDS = {"json_object": "response_format", "json_schema": "response_format"}  # where most clients write it

# Where JSON may have whitespace: a space, or a new line that is indented. Without a bound, models that are unsure what
# comes next write whitespace for ever.
WHITESPACE = r" |\r?\n[ \t]{0,32}"
SCHEMA_OPTIONS: JsonCompileOptions = {
    "whitespace_pattern": WHITESPACE,
    "json_allowed_escapes": 'nrtbf"\\',  # no \u: a key in other letters would pass for another key
    "coerce_one_of": False,
    "lenient": False,
}

_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{2})|\\x\{([0-9a-fA-F]{1,5})\}")  # of JSON, of expressions
_NOTATION = re.compile(r"[\\\"'/()\[\]{}|?*+\s]")


def field_of(grammar: Grammar) -> str:
    """The request's field that a refusal names, if the one who checks knows none."""
    return FIELDS.get(grammar.kind, "structured_outputs")


def to_llguidance(grammar: Grammar, field: str | None = None) -> str:
    """The grammar as llguidance's matchers take it. InvalidRequest if it is plainly wrong.

    Most of what can be wrong is found by `validate` only.
    """
    named = field or field_of(grammar)
    match grammar.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=SCHEMA_OPTIONS)
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(prepared_schema(grammar.text, named), overrides=SCHEMA_OPTIONS)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            return LLMatcher.grammar_from_regex(_any_of(_choices(grammar.text, named)))
        case "ebnf":
            return LLMatcher.grammar_from_lark(_ebnf(grammar.text, named))
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)
        case "sketch":
            raise InvalidRequest(named, NOT_COMPLETE)


def ebnf_as_lark(grammar: Grammar) -> Grammar:
    """The same in Lark, if it is EBNF, which takes time; else itself. InvalidRequest if it is plainly wrong."""
    return Grammar("lark", _ebnf(grammar.text, field_of(grammar))) if grammar.kind == "ebnf" else grammar


def unforced(grammar: Grammar) -> str:
    """The same where `text` may be spelt as the model likes, also if there is but one text that can follow.

    llguidance would spell that as its tokenizer does, to which the text of a special token is that token.
    """
    rules = grammar.text if grammar.kind == "lark" else lark_rule("start", grammar)
    return f'%llguidance {{"no_forcing": true}}\n{rules}'


def names_any(grammar: Grammar, special_tokens: Iterable[str]) -> bool:
    """Whether the grammar may demand the text of a special token: rather once too often, which costs but some speed."""
    written = _letters(grammar.text)
    return any(_letters(token) in written for token in special_tokens)


def _letters(text: str) -> str:
    """Without what notations put between the letters of a text that they demand, and without escapes."""
    return _NOTATION.sub("", _ESCAPE.sub(lambda found: chr(int(found[1] or found[2] or found[3], 16)), text))


def lark_rule(name: str, grammar: Grammar) -> str:
    """A rule of a larger Lark grammar for what `grammar` allows; InvalidRequest as in `to_llguidance`."""
    named = field_of(grammar)
    grammar.check_size(named)
    match grammar.kind:
        case "json_object":
            return _json_rule(name, {"type": "object"})
        case "json_schema":
            return _json_rule(name, prepared_schema(grammar.text, named))
        case "regex":
            return f"{name}: /{_within_slashes(grammar.text)}/"
        case "choice":
            return f"{name}: /{_any_of(_choices(grammar.text, named))}/"
        case "ebnf":
            return f"{name}: %lark {{\n{_ebnf(grammar.text, named)}\n}}"
        case "lark":
            return f"{name}: %lark {{\n{grammar.text}\n}}"
        case "sketch":
            raise InvalidRequest(named, NOT_COMPLETE)


def _within_slashes(expression: str) -> str:
    """A regular expression as Lark takes it between slashes."""
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", expression, flags=re.DOTALL)
    return escaped.replace("\n", r"\n")


def _json_rule(name: str, schema: dict[str, object]) -> str:
    text = json.dumps({**schema, "x-guidance": SCHEMA_OPTIONS}, ensure_ascii=False, separators=(",", ":"))
    return f"{name}: %json {text}"


def _choices(text: str, field: str) -> list[str]:
    try:
        choices = msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError as error:
        raise InvalidRequest(field, f"choices must be a list of strings: {error}") from None
    if not 0 < len(choices) <= MAX_CHOICES:
        raise InvalidRequest(field, f"there must be 1 to {MAX_CHOICES} choices, not {len(choices)}")
    return choices


def _any_of(choices: list[str]) -> str:
    return "|".join(re.sub(r"[^A-Za-z0-9]", lambda char: f"\\x{{{ord(char[0]):x}}}", choice) for choice in choices)


def _ebnf(text: str, field: str) -> str:
    try:
        return ebnf_to_lark(text)
    except EbnfError as error:
        raise InvalidRequest(field, f"the grammar is not valid EBNF: {error}") from None
