"""Fits grammars to a model and a prompt: which tokens their markers are, and whether a thought comes first."""

from __future__ import annotations

from collections.abc import Mapping

from minisgl.core import Grammar
from minisgl.grammar.validate import GrammarValidator, PendingCheck
from minisgl.message.to_tokenizer import ChatPrompt, IdsPrompt, TextPrompt
from minisgl.parsers.constraint import ANY_TEXT, grammar_rule, marker, text_rule
from minisgl.parsers.reasoning import Place, ReasoningFormat, start_of_answer


class GrammarFitter:
    """For one model: `named_tokens` are those that grammars may name, by id; `form` is how it writes thoughts."""

    def __init__(
        self, named_tokens: Mapping[int, str], form: ReasoningFormat | None, validator: GrammarValidator
    ) -> None:
        self._tokens = frozenset(named_tokens.values())
        self._form = form
        self._validator = validator

    def check(self, fitted: Grammar, client: str = "") -> PendingCheck:
        """Begin to find out if it can be followed, as `GrammarValidator.check` does."""
        return self._validator.check(fitted, client)

    def poll(self) -> None:
        """Take in what has been found out, and go on with what waits."""
        self._validator.poll()

    def fit(self, grammar: Grammar, prompt: TextPrompt | IdsPrompt | ChatPrompt, prompt_end: str) -> Grammar:
        """The grammar as the model is to follow it after this prompt. A sketch is completed when it is checked."""
        if self._form is not None and isinstance(prompt, ChatPrompt):
            continued = prompt.messages[-1].get("content", "") if prompt.continue_final_message else ""
            start = start_of_answer(self._form, prompt_end, continued)
            if start is not Place.OUTSIDE:
                grammar = self._after_thought(grammar, self._form, optional=start is Place.UNDECIDED)
        return grammar

    def _after_thought(self, grammar: Grammar, form: ReasoningFormat, *, optional: bool) -> Grammar:
        """One that is open already, or else may be opened."""
        opening = f"{marker(form.opening)} " if optional else ""
        if form.closing in self._tokens:
            thought = [f"thought: {opening}{ANY_TEXT} {marker(form.closing)}"]
        else:
            thought = [f"thought: {opening}thought_text", f"thought_text[suffix={text_rule(form.closing)}]: {ANY_TEXT}"]
        start = f"start: (thought LINE_BREAKS){'?' if optional else ''} answer"
        return Grammar(
            "sketch", "\n".join([start, r"LINE_BREAKS: /\n{0,2}/", *thought, grammar_rule("answer", grammar)])
        )
