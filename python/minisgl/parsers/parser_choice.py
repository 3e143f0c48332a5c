"""Chooses a model's parsers, by its chat template or by flag, and combines them into one parser of whole answers."""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from minisgl.parsers.harmony import HARMONY, SHOWN_BY, HarmonyParser
from minisgl.parsers.json_forms import HermesParser, LlamaJsonParser, MistralParser
from minisgl.parsers.pythonic import PythonicParser
from minisgl.parsers.qwen_coder import QwenCoderParser
from minisgl.parsers.reasoning import REASONING_FORMATS, Place, ReasoningFormat, ReasoningParser, start_of_answer
from minisgl.parsers.streaming import Content, Event
from minisgl.parsers.tool_calls import ToolCallParser, Tools

AUTO, NONE = "auto", "none"
PLAIN_FORM = "llama3_json"  # a JSON object with nothing around it

TOOL_CALL_PARSERS: dict[str, type[ToolCallParser]] = {  # by precedence, if a chat template shows several forms
    "qwen3_coder": QwenCoderParser,
    "mistral": MistralParser,
    "hermes": HermesParser,
    "llama3_json": LlamaJsonParser,
    "pythonic": PythonicParser,
}


def shown_tool_call_parser(templates: Iterable[str]) -> str:
    """Return the name of the parser for the form of calls that these chat templates show, or NONE."""
    text = "\n".join(templates)
    if SHOWN_BY in text:
        return HARMONY
    for name, kind in TOOL_CALL_PARSERS.items():
        if _shows(text, kind.shown_by) and not any(other in text for other in kind.contradicted_by):
            return name
    return NONE


def shown_reasoning_parser(templates: Iterable[str]) -> str:
    """Return the name of the parser for the reasoning that these chat templates show, or NONE."""
    text = "\n".join(templates)
    return next((name for name, form in REASONING_FORMATS.items() if _shows(text, form.shown_by)), NONE)


def _shows(text: str, signs: tuple[str, ...]) -> bool:
    return bool(signs) and all(sign in text for sign in signs)


@dataclass(frozen=True, slots=True)
class Parsers:
    """Names of the parsers of a model's answers."""

    tool_calls: str = NONE
    reasoning: str = NONE
    call_form: str = NONE  # form of demanded calls in `tool_grammar.FORMS`, which has two for Mistral

    @classmethod
    def choose(cls, tool_calls: str, reasoning: str, templates: Collection[str]) -> Parsers:
        """Return the parsers that the flags name, or for `auto` those that the chat templates show."""
        name = shown_tool_call_parser(templates) if tool_calls == AUTO else tool_calls
        named = name == "mistral" and any("[ARGS]" in template for template in templates)
        reasoning = shown_reasoning_parser(templates) if reasoning == AUTO else reasoning
        return cls(name, reasoning, "mistral_named" if named else name)

    def demanding_calls(self) -> Parsers:
        """Return these parsers with a form for calls: plain JSON if the model has none of its own."""
        return self if self.tool_calls != NONE else replace(self, tool_calls=PLAIN_FORM, call_form=PLAIN_FORM)

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        return REASONING_FORMATS.get(HARMONY if self.is_harmony else self.reasoning)

    @property
    def is_harmony(self) -> bool:
        """True if answers have channels, which one parser splits into reasoning, content and calls."""
        return HARMONY in (self.tool_calls, self.reasoning)

    def markers(self, *, tools: bool, reasoning: bool) -> tuple[str, ...]:
        """Return the markers that the text must keep for these parsers, even if they are special tokens."""
        if self.is_harmony:
            return HarmonyParser.kept
        markers: tuple[str, ...] = ()
        form = self.reasoning_format
        if reasoning and form is not None:
            markers += (form.opening, form.closing)
        if tools and self.tool_calls != NONE:
            markers += TOOL_CALL_PARSERS[self.tool_calls].kept
        return markers

    def parser(
        self, tools: Tools | None, *, reasoning: bool, prompt_end: str, continued: str = ""
    ) -> AnswerParser | None:
        """Return the parser of one answer, which begins as `start_of_answer` says; None if none is needed."""
        if self.is_harmony:
            names = tools if tools and self.tool_calls == HARMONY else ()
            reasoning = reasoning and self.reasoning == HARMONY
            return HarmonyParser(names, long_id, reasoning=reasoning, prompt_end=prompt_end, continued=continued)
        form = self.reasoning_format if reasoning else None
        reasoning_parser = None if form is None else ReasoningParser(form, start_of_answer(form, prompt_end, continued))
        tool_call_parser = None
        if tools and self.tool_calls != NONE:
            new_id = short_id if self.tool_calls == "mistral" else long_id
            tool_call_parser = TOOL_CALL_PARSERS[self.tool_calls](tools, new_id)
        if reasoning_parser is None and tool_call_parser is None:
            return None
        return OutputParser(reasoning_parser, tool_call_parser)


class OutputParser:
    """Splits one answer into reasoning, content and tool calls. Parts without a parser are content."""

    def __init__(self, reasoning: ReasoningParser | None, tool_calls: ToolCallParser | None) -> None:
        self._reasoning = reasoning
        self._tool_calls = tool_calls
        self._undecided_tokens = 0
        self.reasoning_tokens = 0  # so far, markers included

    def feed(self, text: str, num_tokens: int = 0) -> list[Event]:
        """Add the text of `num_tokens` tokens; return the events that are certain now."""
        if self._reasoning is None:
            return self._content(text)
        before = self._reasoning.position
        events = self._reasoning.feed(text)
        after = self._reasoning.position
        if Place.INSIDE in (before, after):
            self.reasoning_tokens += num_tokens + self._undecided_tokens
            self._undecided_tokens = 0
        elif after is Place.UNDECIDED:
            self._undecided_tokens += num_tokens
        return self._parse_content(events)

    def finish(self) -> list[Event]:
        """Return the events of the text held back, at the end."""
        events = [] if self._reasoning is None else self._parse_content(self._reasoning.finish())
        return events if self._tool_calls is None else events + self._tool_calls.finish()

    def _parse_content(self, events: Iterable[Event]) -> list[Event]:
        parsed: list[Event] = []
        for event in events:
            parsed += self._content(event.text) if isinstance(event, Content) else (event,)
        return parsed

    def _content(self, text: str) -> list[Event]:
        if self._tool_calls is not None:
            return self._tool_calls.feed(text)
        return [Content(text)] if text else []


AnswerParser: TypeAlias = OutputParser | HarmonyParser


def long_id() -> str:
    """Return a new id of a call in the form of OpenAI's API."""
    return f"call_{secrets.token_hex(12)}"


def short_id() -> str:
    """Return a new id of a call with nine letters and digits, which Mistral's templates require."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
