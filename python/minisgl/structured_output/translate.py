"""Writes grammars of every kind in llguidance's notation, within the limits of its compiler."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec
from llguidance import LLMatcher, LLParserLimits

from minisgl.sampling_params import Grammar, InvalidRequest
from minisgl.structured_output.ebnf import ebnf_to_lark
from minisgl.structured_output.ebnf_reader import EbnfError
from minisgl.structured_output.grammar_template import DIRECTIVE, text_literal
from minisgl.structured_output.json_schema import prepared_schema

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions
    from tokenizers import Tokenizer

MAX_GRAMMAR_CHOICES = 10_000
# llguidance's limits on the cost of a bitmask and the size of an automaton; beyond them a grammar is too complex.
PARSER_LIMITS = LLParserLimits(precompute_large_lexemes=False, verbose_errors=False)
# Stack of a compiling thread, which follows chains of rules by recursion: enough for every grammar of up to
# core.MAX_GRAMMAR_CHARS.
STACK_BYTES = 256 * 2**20
NOT_COMPLETE = "a template must be completed before it is a grammar"
SCHEMA_KINDS = ("json_object", "json_schema", "closed_json_schema")

# Whitespace between JSON's tokens: a space, or a line break with indentation. Without a bound, a model that is unsure
# what comes next may write whitespace without end.
WHITESPACE = r" |\r?\n[ \t]{0,32}"
SCHEMA_OPTIONS: JsonCompileOptions = {
    "whitespace_pattern": WHITESPACE,
    "json_allowed_escapes": 'nrtbf"\\',  # no \u: a key written with escapes would pass for another key
    "coerce_one_of": False,
    "lenient": False,
}

# Escapes of JSON and of Rust's expressions.
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|U000([0-9a-fA-F]{5})|[uxU]\{0*([0-9a-fA-F]{1,5})\})")
_NOTATION = re.compile(r"[\\\"'/()\[\]{}|?*+\s]")


def named_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the tokens that grammars may name, by id."""
    return {index: token.content for index, token in tokenizer.get_added_tokens_decoder().items()}


def field_of(grammar: Grammar) -> str:
    """Return the request's field to name in a refusal if it is not known: the one that most clients use."""
    return "response_format" if grammar.kind in SCHEMA_KINDS else "structured_outputs"


def to_llguidance(grammar: Grammar) -> str:
    """Return the grammar in llguidance's notation. InvalidRequest if it is obviously wrong.

    Most errors are found only by a trial (`validator`).
    """
    if grammar.kind in SCHEMA_KINDS:
        return LLMatcher.grammar_from_json_schema(_schema(grammar), overrides=SCHEMA_OPTIONS)
    return LLMatcher.grammar_from_lark(_as_lark(grammar))


def ebnf_as_lark(grammar: Grammar) -> Grammar:
    """Return an EBNF grammar in Lark, which takes time, any other unchanged. InvalidRequest if it is no valid EBNF."""
    return Grammar("lark", _ebnf(grammar.text, field_of(grammar))) if grammar.kind == "ebnf" else grammar


def without_forced_tokens(grammar: Grammar) -> str:
    """Return the grammar in llguidance's notation, without forced tokens where only one text can follow.

    llguidance would force the tokenization of its tokenizer, which turns the text of a special token into that token.
    """
    return f'%llguidance {{"no_forcing": true}}\n{_as_lark(grammar)}'


def _as_lark(grammar: Grammar) -> str:
    return grammar.text if grammar.kind == "lark" else lark_rule("start", grammar)


def names_special_token(grammar: Grammar, special_tokens: Iterable[str]) -> bool:
    """Return True if the grammar may demand the text of a special token; a wrong True only costs some speed."""
    written = _letters(grammar.text)
    return any(_letters(token) in written for token in special_tokens)


def _letters(text: str) -> str:
    """Return a grammar's text with escapes resolved and without the notation's own characters."""
    return _NOTATION.sub("", _ESCAPE.sub(lambda found: chr(int(found[found.lastindex or 0], 16)), text))


def lark_rule(name: str, grammar: Grammar) -> str:
    """Return a rule of a Lark grammar for the language of `grammar`; InvalidRequest as in `to_llguidance`."""
    named = field_of(grammar)
    grammar.check_size(named)
    match grammar.kind:
        case "json_object" | "json_schema" | "closed_json_schema":
            return _json_rule(name, _schema(grammar))
        case "regex":
            return f"{name}: /{_within_slashes(grammar.text, named)}/"
        case "choice":
            return f"{name}: /{_any_of(_choices(grammar.text, named))}/"
        case "ebnf":
            return f"{name}: %lark {{\n{_ebnf(grammar.text, named)}\n}}"
        case "lark":
            return f"{name}: %lark {{\n{grammar.text}\n}}"
        case "template":
            raise InvalidRequest(named, NOT_COMPLETE)


def complete_template(template: Grammar, tokens: Mapping[str, int]) -> Grammar:
    """Return the Lark grammar of a template. `tokens`: ids that grammars may name, by their text.

    InvalidRequest if a grammar in it is out of bounds or obviously wrong.
    """

    def filled(found: re.Match[str]) -> str:
        # Inserted text is not searched for directives, because it may come from a client.
        if found["rule"]:
            inner = Grammar(*json.loads(found["grammar"]))
            return lark_rule(found["rule"], complete_template(inner, tokens) if inner.kind == "template" else inner)
        if found["until"]:
            return _until(found["until"], json.loads(found["end"]), tokens)
        return _marker(json.loads(found["marker"]), tokens)

    return Grammar("lark", DIRECTIVE.sub(filled, template.text))


def _until(name: str, marker: str, tokens: Mapping[str, int]) -> str:
    if marker in tokens:
        return f"{name}: TEXT {_marker(marker, tokens)}"
    return f"{name}[suffix={text_literal(marker)}]: TEXT"


def _marker(marker: str, tokens: Mapping[str, int]) -> str:
    index = tokens.get(marker)
    return text_literal(marker) if index is None else f"<[{index}]>"


def _within_slashes(expression: str, field: str) -> str:
    """Return a regular expression, escaped for Lark's slashes."""

    def escaped(found: re.Match[str]) -> str:
        if found[0] == "\\":
            raise InvalidRequest(field, "a regular expression cannot end with a backslash")
        if found[0] == "/":
            return r"\/"
        return r"\n" if found[0].endswith("\n") else found[0]

    return re.sub(r"\\.?|[/\n]", escaped, expression, flags=re.DOTALL)


def _schema(grammar: Grammar) -> dict[str, object]:
    if grammar.kind == "json_object":
        return {"type": "object"}
    return prepared_schema(grammar.text, field_of(grammar), closes=grammar.kind == "closed_json_schema")


def _json_rule(name: str, schema: dict[str, object]) -> str:
    text = json.dumps({**schema, "x-guidance": SCHEMA_OPTIONS}, ensure_ascii=False, separators=(",", ":"))
    return f"{name}: %json {text}"


def _choices(text: str, field: str) -> list[str]:
    try:
        choices = msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError as error:
        raise InvalidRequest(field, f"choices must be a list of strings: {error}") from None
    if not 0 < len(choices) <= MAX_GRAMMAR_CHOICES:
        raise InvalidRequest(field, f"there must be 1 to {MAX_GRAMMAR_CHOICES} choices, not {len(choices)}")
    return choices


def _any_of(choices: list[str]) -> str:
    return "|".join(re.sub(r"[^A-Za-z0-9]", lambda char: f"\\x{{{ord(char[0]):x}}}", choice) for choice in choices)


def _ebnf(text: str, field: str) -> str:
    try:
        return ebnf_to_lark(text)
    except EbnfError as error:
        raise InvalidRequest(field, f"the grammar is not valid EBNF: {error}") from None
