r"""Grammar templates: llguidance's dialect of Lark with parts that only the model's tokenizer and a compiler can fill.

The server writes them, never a client. Three directives stand for what is filled in (`translate.complete_template`):

    %marker "..."                 a marker: the token of that text, or the text where the model has no such token
    %until name "..."             a rule for TEXT up to and with a marker
    %grammar name [kind, text]    a rule for what a `core.Grammar` allows, which may be a template itself
"""

from __future__ import annotations

import json
import re
from collections.abc import Container

from minisgl.core import Grammar
from minisgl.parsers.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START
from minisgl.parsers.reasoning import ReasoningFormat

ANY_TEXT = "/(?s:.*)/"

DIRECTIVE = re.compile(
    r"""
    ^%grammar\ (?P<rule>\w+)\ (?P<grammar>\[.*\])$
    | ^%until\ (?P<until>\w+)\ (?P<end>"(?:[^"\\]|\\.)*")$
    | %marker\ (?P<marker>"(?:[^"\\]|\\.)*")
    """,
    re.MULTILINE | re.VERBOSE,
)


def text_literal(text: str) -> str:
    """Write a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def marker(text: str) -> str:
    """Write the directive for a marker."""
    return f"%marker {text_literal(text)}"


def until_rule(name: str, text: str) -> str:
    """Write the directive for a rule: TEXT up to and with a marker."""
    return f"%until {name} {text_literal(text)}"


def grammar_rule(name: str, grammar: Grammar) -> str:
    """Write the directive for a rule: what the grammar allows."""
    return f"%grammar {name} {json.dumps([grammar.kind, grammar.text], ensure_ascii=False)}"


def with_closed_schemas(grammar: Grammar) -> Grammar:
    """Return the grammar with every json_schema, also those within a template, as closed_json_schema."""
    if grammar.kind == "json_schema":
        return Grammar("closed_json_schema", grammar.text)
    if grammar.kind != "template":
        return grammar

    def closed(found: re.Match[str]) -> str:
        if not found["rule"]:
            return found[0]
        return grammar_rule(found["rule"], with_closed_schemas(Grammar(*json.loads(found["grammar"]))))

    return Grammar("template", DIRECTIVE.sub(closed, grammar.text))


def after_reasoning(grammar: Grammar, form: ReasoningFormat, tokens: Container[str], *, is_open: bool) -> Grammar:
    """Return the template of free reasoning and then the grammar.

    `is_open`: the prompt has opened the reasoning; if not, the model may open it or answer at once. `tokens`: texts of
    the tokens that grammars may name.
    """
    opening = "" if is_open else f"{marker(form.opening)} "
    if form.closing in tokens:
        thought = [f"thought: {opening}{ANY_TEXT} {marker(form.closing)}"]
    else:
        thought = [
            f"thought: {opening}thought_text",
            f"thought_text[suffix={text_literal(form.closing)}]: {ANY_TEXT}",
        ]
    start = f"start: (thought LINE_BREAKS){'' if is_open else '?'} answer"
    lines = [start, r"LINE_BREAKS: /\n{0,2}/", *thought, grammar_rule("answer", grammar)]
    return Grammar("template", "\n".join(lines))


# OpenAI's Harmony format (`parsers.harmony`): what is constrained stands in a channel.


def final_message(grammar: Grammar) -> Grammar:
    """Return the template of a message in the final channel whose text the grammar constrains."""
    constrain = f'(" " {marker(CONSTRAIN)} "json")?'
    start = f'start: {marker(CHANNEL)} "final" {constrain} {marker(MESSAGE)} answer'
    return Grammar("template", "\n".join([start, grammar_rule("answer", grammar)]))


def after_analysis(grammar: Grammar) -> Grammar:
    """Return the template of reasoning, or none, and then what the grammar allows: whole messages if it is a template,
    else the text of the final one.
    """
    rules = [
        "start: thought* answer",
        f'thought: {marker(CHANNEL)} "analysis" {marker(MESSAGE)} thought_text {marker(START)} "assistant"',
        until_rule("thought_text", END),
        f"TEXT: {ANY_TEXT}",
        grammar_rule("answer", grammar if grammar.kind == "template" else final_message(grammar)),
    ]
    return Grammar("template", "\n".join(rules))
