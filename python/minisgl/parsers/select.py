"""Which parsers a model needs: as its chat template shows, or as the command line says."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass

from minisgl.parsers.hermes import HermesParser
from minisgl.parsers.llama import LlamaJsonParser
from minisgl.parsers.mistral import MistralParser
from minisgl.parsers.output import OutputParser
from minisgl.parsers.pythonic import PythonicParser
from minisgl.parsers.qwen_coder import QwenCoderParser
from minisgl.parsers.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningParser, start_of_answer
from minisgl.parsers.tool_calls import ToolCallParser, Tools

AUTO, NONE = "auto", "none"

TOOL_CALL_PARSERS: dict[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "qwen3_coder": QwenCoderParser,
    "llama3_json": LlamaJsonParser,
    "pythonic": PythonicParser,
    "mistral": MistralParser,
}
_ALIASES = {  # other servers' names
    "qwen": "hermes",
    "qwen25": "hermes",
    "llama3": "llama3_json",
    "llama4_pythonic": "pythonic",
    "llama4_json": "llama3_json",
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


def tool_call_parser_name(choice: str, templates: Iterable[str]) -> str:
    """The name of the parser for this `choice`: auto, none, or a name or alias. ValueError if it is unknown."""
    if choice == AUTO:
        text = "\n".join(templates)
        return next(
            (
                name
                for name, signs, others in _TOOL_CALL_SIGNS
                if all(sign in text for sign in signs) and not any(other in text for other in others)
            ),
            NONE,
        )
    return _known("tool-call", choice, TOOL_CALL_PARSERS)


def reasoning_parser_name(choice: str, templates: Iterable[str]) -> str:
    """The same for the thought before the answer."""
    if choice == AUTO:
        text = "\n".join(templates)
        return next((name for name, signs in _REASONING_SIGNS if all(sign in text for sign in signs)), NONE)
    return _known("reasoning", choice, REASONING_FORMATS)


def _known(what: str, choice: str, names: Iterable[str]) -> str:
    name = choice.replace("-", "_")
    name = _ALIASES.get(name, name)
    if name != NONE and name not in names:
        raise ValueError(f"--{what}-parser must be {AUTO}, {NONE}, {', '.join(names)}, not {choice}")
    return name


@dataclass(frozen=True, slots=True)
class Parsers:
    """How this server takes answers apart; names as above."""

    tool_calls: str = NONE
    reasoning: str = NONE

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        return REASONING_FORMATS.get(self.reasoning)

    def markers(self, *, tools: bool, reasoning: bool) -> tuple[str, ...]:
        """What must stay in the text for these parsers, even where it is a special token."""
        markers: tuple[str, ...] = ()
        form = self.reasoning_format
        if reasoning and form is not None:
            markers += (form.opening, form.closing)
        if tools and self.tool_calls != NONE:
            markers += TOOL_CALL_PARSERS[self.tool_calls].kept
        return markers

    def parser(self, tools: Tools | None, reasoning: bool, prompt_end: str) -> OutputParser | None:
        """For one answer to a prompt with this end; None if there is nothing to take apart."""
        form = self.reasoning_format if reasoning else None
        reasoning_parser = None if form is None else ReasoningParser(form, start_of_answer(form, prompt_end))
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
