"""Chooses the parsers that a model needs: by its chat template, or as the command line says."""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from minisgl.parsers.hermes import HermesParser
from minisgl.parsers.llama import LlamaJsonParser
from minisgl.parsers.mistral import MistralParser
from minisgl.parsers.output import OutputParser
from minisgl.parsers.pythonic import PythonicParser
from minisgl.parsers.qwen_coder import QwenCoderParser
from minisgl.parsers.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningParser, start_of_answer
from minisgl.parsers.tool_calls import ToolCallParser, Tools

AUTO, NONE = "auto", "none"
PLAIN_FORM = "llama3_json"  # an object of JSON, and nothing around it

TOOL_CALL_PARSERS: dict[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "qwen3_coder": QwenCoderParser,
    "llama3_json": LlamaJsonParser,
    "pythonic": PythonicParser,
    "mistral": MistralParser,
}

# Texts that show a form, and none that show another one which looks alike.
_TOOL_CALL_SIGNS = (
    ("qwen3_coder", ("<tool_call>", "<function="), ()),
    ("mistral", ("[TOOL_CALLS]",), ()),
    ("hermes", ("<tool_call>",), ("<arg_key>", "<tool_calls>", "<tool_sep>")),
    ("llama3_json", ('{"name": function name, "parameters":',), ()),
    ("pythonic", ("[func_name1(",), ()),
)
_REASONING_SIGNS = (
    ("mistral", ("[THINK]",)),
    ("deepseek_r1", ("</think>", "<｜Assistant｜>")),
    ("qwen3", ("</think>",)),
)


def shown_tool_call_parser(templates: Iterable[str]) -> str:
    """The name of the parser for the form that these chat templates show; none if they show none."""
    text = "\n".join(templates)
    for name, signs, others in _TOOL_CALL_SIGNS:
        if all(sign in text for sign in signs) and not any(other in text for other in others):
            return name
    return NONE


def shown_reasoning_parser(templates: Iterable[str]) -> str:
    """Name the parser for the thought before the answer that these chat templates show; none if they show none."""
    text = "\n".join(templates)
    return next((name for name, signs in _REASONING_SIGNS if all(sign in text for sign in signs)), NONE)


@dataclass(frozen=True, slots=True)
class Parsers:
    """Names of the parsers by which this server takes answers apart."""

    tool_calls: str = NONE
    reasoning: str = NONE
    call_form: str = NONE  # in which calls are demanded: `tool_grammar.FORMS` has two for Mistral

    @classmethod
    def choose(cls, tool_calls: str, reasoning: str, templates: Collection[str]) -> Parsers:
        """Choose as the flags say; where they say auto, as the chat templates show."""
        name = shown_tool_call_parser(templates) if tool_calls == AUTO else tool_calls
        named = name == "mistral" and any("[ARGS]" in template for template in templates)
        thoughts = shown_reasoning_parser(templates) if reasoning == AUTO else reasoning
        return cls(name, thoughts, "mistral_named" if named else name)

    def demanding_calls(self) -> Parsers:
        """Return these parsers with a form for calls, in plain JSON if the model is known to have none of its own."""
        return self if self.tool_calls != NONE else replace(self, tool_calls=PLAIN_FORM, call_form=PLAIN_FORM)

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        return REASONING_FORMATS.get(self.reasoning)

    def markers(self, *, tools: bool, reasoning: bool) -> tuple[str, ...]:
        """Return the markers that must stay in the text for these parsers, even where they are special tokens."""
        markers: tuple[str, ...] = ()
        form = self.reasoning_format
        if reasoning and form is not None:
            markers += (form.opening, form.closing)
        if tools and self.tool_calls != NONE:
            markers += TOOL_CALL_PARSERS[self.tool_calls].kept
        return markers

    def parser(
        self, tools: Tools | None, *, reasoning: bool, prompt_end: str, continued: str = ""
    ) -> OutputParser | None:
        """Make the parser of one answer that begins as `start_of_answer` says; None if none is needed."""
        form = self.reasoning_format if reasoning else None
        reasoning_parser = None if form is None else ReasoningParser(form, start_of_answer(form, prompt_end, continued))
        tool_call_parser = None
        if tools and self.tool_calls != NONE:
            new_id = short_id if self.tool_calls == "mistral" else long_id
            tool_call_parser = TOOL_CALL_PARSERS[self.tool_calls](tools, new_id)
        if reasoning_parser is None and tool_call_parser is None:
            return None
        return OutputParser(reasoning_parser, tool_call_parser)


def long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def short_id() -> str:
    """Mistral's templates take nothing but nine letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
