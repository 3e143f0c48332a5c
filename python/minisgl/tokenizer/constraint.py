"""Fits grammars to a model and a prompt: which tokens their markers are, and whether a thought comes first."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from minisgl.core import Grammar
from minisgl.grammar.text import lark_rule
from minisgl.grammar.validate import Check, GrammarValidator
from minisgl.message.to_tokenizer import ChatPrompt, IdsPrompt, TextPrompt
from minisgl.parsers.constraint import ANY_TEXT, grammar_rule, text_rule
from minisgl.parsers.reasoning import Place, ReasoningFormat, start_of_answer

_OPEN = re.compile(
    r"""
    ^%grammar\ (?P<rule>\w+)\ (?P<grammar>\[.*\])$
    | ^%until\ (?P<until>\w+)\ (?P<end>"(?:[^"\\]|\\.)*")$
    | %marker\ (?P<marker>"(?:[^"\\]|\\.)*")
    """,
    re.MULTILINE | re.VERBOSE,
)


class GrammarFitter:
    """For one model: `named_tokens` are those that grammars may name, by id; `form` is how it writes thoughts."""

    def __init__(
        self, named_tokens: Mapping[int, str], form: ReasoningFormat | None, validator: GrammarValidator
    ) -> None:
        self._tokens = {text: index for index, text in named_tokens.items()}
        self._form = form
        self._validator = validator

    def check(self, fitted: Grammar) -> Check:
        """Whether it can be followed."""
        return self._validator.check(fitted)

    def fit(self, grammar: Grammar, prompt: TextPrompt | IdsPrompt | ChatPrompt, prompt_end: str) -> Grammar:
        """The grammar as the model is to follow it after this prompt; InvalidRequest for what is plainly wrong."""
        if self._form is not None and isinstance(prompt, ChatPrompt):
            continued = prompt.messages[-1].get("content", "") if prompt.continue_final_message else ""
            start = start_of_answer(self._form, prompt_end, continued)
            if start is not Place.OUTSIDE:
                grammar = self._after_thought(grammar, self._form, optional=start is Place.UNDECIDED)
        return self._completed(grammar)

    def _after_thought(self, grammar: Grammar, form: ReasoningFormat, *, optional: bool) -> Grammar:
        """One that is open already, or else may be opened."""
        opening = f"{self._token(form.opening)} " if optional else ""
        if form.closing in self._tokens:
            thought = [f"thought: {opening}{ANY_TEXT} {self._token(form.closing)}"]
        else:
            thought = [f"thought: {opening}thought_text", f"thought_text[suffix={text_rule(form.closing)}]: {ANY_TEXT}"]
        start = f"start: (thought LINE_BREAKS){'?' if optional else ''} answer"
        return Grammar(
            "sketch", "\n".join([start, r"LINE_BREAKS: /\n{0,2}/", *thought, grammar_rule("answer", grammar)])
        )

    def _completed(self, grammar: Grammar) -> Grammar:
        """The Lark that a sketch of `parsers.constraint` stands for, which may hold others; or what is no sketch."""
        if grammar.kind != "sketch":
            return grammar
        return Grammar("lark", _OPEN.sub(self._replaced, grammar.text))

    def _replaced(self, found: re.Match[str]) -> str:
        # What is put in is not searched: it may be a client's, and say anything.
        if found["rule"]:
            return lark_rule(found["rule"], self._completed(Grammar(*json.loads(found["grammar"]))))
        if found["until"]:
            return self._until(found["until"], json.loads(found["end"]))
        return self._token(json.loads(found["marker"]))

    def _until(self, name: str, marker: str) -> str:
        if marker in self._tokens:
            return f"{name}: TEXT {self._token(marker)}"
        return f"{name}[suffix={text_rule(marker)}]: TEXT"

    def _token(self, marker: str) -> str:
        index = self._tokens.get(marker)
        return text_rule(marker) if index is None else f"<[{index}]>"
