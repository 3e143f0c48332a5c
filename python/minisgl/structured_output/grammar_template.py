r"""Grammar templates: llguidance's dialect of Lark with directives, which need the model's tokens and a compiler.

Only the server writes templates, never a client. `translate.complete_template` replaces the three directives:

    %marker "..."                 marker: the token with that text, or the text if the model has no such token
    %until name "..."             rule for TEXT up to a marker, with the marker
    %grammar name [kind, text]    rule for the language of a `Grammar`, which may be a template itself
"""

from __future__ import annotations

import json
import re
from collections.abc import Container

from minisgl.parsers.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START
from minisgl.parsers.reasoning import ReasoningFormat
from minisgl.sampling_params import Grammar

ANY_TEXT = "/(?s:.*)/"
_OWNER = "// tool "

DIRECTIVE = re.compile(
    r"""
    ^%grammar\ (?P<rule>\w+)\ (?P<grammar>\[.*\])$
    | ^%until\ (?P<until>\w+)\ (?P<end>"(?:[^"\\]|\\.)*")$
    | %marker\ (?P<marker>"(?:[^"\\]|\\.)*")
    """,
    re.MULTILINE | re.VERBOSE,
)


def text_literal(text: str) -> str:
    """Return a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def marker(text: str) -> str:
    """Return the directive for a marker."""
    return f"%marker {text_literal(text)}"


def until_rule(name: str, text: str) -> str:
    """Return the directive for a rule for TEXT up to a marker, with the marker."""
    return f"%until {name} {text_literal(text)}"


def grammar_rule(name: str, grammar: Grammar) -> str:
    """Return the directive for a rule for the grammar's language."""
    return f"%grammar {name} {json.dumps([grammar.kind, grammar.text], ensure_ascii=False)}"


def owner_line(tool: str) -> str:
    """Return a comment for the rules below it, by which an error in them names the tool."""
    return f"{_OWNER}{tool}"


def owner_of(text: str, line: int) -> str:
    """Return the tool that owns a line of a completed template, counted from 1; empty if none does.

    A brace ends the rules of all tools.
    """
    above = reversed(text.split("\n")[:line])
    nearest = next((one for one in above if one == "}" or one.startswith(_OWNER)), "")
    return nearest.removeprefix(_OWNER) if nearest != "}" else ""


def with_closed_schemas(grammar: Grammar) -> Grammar:
    """Return the grammar with every json_schema, also within a template, as closed_json_schema."""
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
    """Return the template of free reasoning followed by the grammar.

    `is_open`: the prompt has opened the reasoning; otherwise the model may open it or answer at once. `tokens`: texts
    of the tokens that grammars may name.
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


# OpenAI's Harmony format (`parsers.harmony`), in which the constrained text is in a channel.


def final_message(grammar: Grammar) -> Grammar:
    """Return the template of a message in the final channel, whose text follows the grammar."""
    constrain = f'(" " {marker(CONSTRAIN)} "json")?'
    start = f'start: {marker(CHANNEL)} "final" {constrain} {marker(MESSAGE)} answer'
    return Grammar("template", "\n".join([start, grammar_rule("answer", grammar)]))


def after_analysis(grammar: Grammar) -> Grammar:
    """Return the template of optional reasoning followed by the grammar.

    The grammar describes whole messages if it is a template, else the text of the final message.
    """
    rules = [
        "start: thought* answer",
        f'thought: {marker(CHANNEL)} "analysis" {marker(MESSAGE)} thought_text {marker(START)} "assistant"',
        until_rule("thought_text", END),
        f"TEXT: {ANY_TEXT}",
        grammar_rule("answer", grammar if grammar.kind == "template" else final_message(grammar)),
    ]
    return Grammar("template", "\n".join(rules))
