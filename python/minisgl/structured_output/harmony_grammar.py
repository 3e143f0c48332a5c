"""Grammar templates in OpenAI's Harmony format (`parsers.harmony`): what is constrained stands in a channel."""

from __future__ import annotations

from minisgl.core import Grammar
from minisgl.parsers.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START
from minisgl.structured_output.grammar_template import ANY_TEXT, grammar_rule, marker, until_rule


def final_message(grammar: Grammar) -> Grammar:
    """Return the template of a message in the final channel whose text the grammar constrains."""
    constrain = f'(" " {marker(CONSTRAIN)} "json")?'
    start = f'start: {marker(CHANNEL)} "final" {constrain} {marker(MESSAGE)} answer'
    return Grammar("template", "\n".join([start, grammar_rule("answer", grammar)]))


def after_analysis(grammar: Grammar) -> Grammar:
    """Return the template of thoughts, or none, and then what the grammar allows: whole messages if it is a template,
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
