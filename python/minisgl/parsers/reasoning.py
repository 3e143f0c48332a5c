"""Splits a model's reasoning, which comes first, from its answer.

The reasoning is between an opening and a closing marker. A chat template may write the opening marker at the end of the
prompt, or empty reasoning, after which the answer has none. The line breaks next to markers are removed with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from minisgl.parsers.harmony import END, HARMONY, SHOWN_BY
from minisgl.parsers.streaming import Content, Reasoning, StateParser, possible_start


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Format of the reasoning of a family of models."""

    opening: str
    closing: str
    starts_inside: bool = False  # answers begin with reasoning even if there is no opening marker
    shown_by: tuple[str, ...] = ()  # texts that all must be in the chat template; (): chosen by flag only
    has_channels: bool = False  # the answer has a marker before it too: `HarmonyParser` parses it


REASONING_FORMATS = {  # by the name of the parser; in order of precedence, if a chat template shows several
    HARMONY: ReasoningFormat(SHOWN_BY, END, shown_by=(SHOWN_BY,), has_channels=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", shown_by=("[THINK]",)),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", shown_by=("</think>", "<｜Assistant｜>"), starts_inside=True),
    "qwen3": ReasoningFormat("<think>", "</think>", shown_by=("</think>",)),
}


class Place(Enum):
    """Position relative to the reasoning, at the beginning of an answer or of its parser."""

    UNDECIDED = auto()  # reasoning may follow
    INSIDE = auto()  # within reasoning
    OUTSIDE = auto()  # after the reasoning, or there is none


def start_of_answer(form: ReasoningFormat, prompt_end: str, continued: str = "") -> Place:
    """Return the position at which an answer begins, from the prompt's end and the message that it continues."""
    if continued.strip():
        return Place.INSIDE if continued.rfind(form.opening) > continued.rfind(form.closing) else Place.OUTSIDE
    end = prompt_end.rstrip()
    if end.endswith(form.opening):
        return Place.INSIDE
    if end.endswith(form.closing):
        return Place.OUTSIDE
    return Place.INSIDE if form.starts_inside else Place.UNDECIDED


class ReasoningParser(StateParser):
    """Splits one answer into Reasoning and Content."""

    def __init__(self, form: ReasoningFormat, start: Place) -> None:
        super().__init__(type(self)._answer if start is Place.OUTSIDE else type(self)._opening)
        self._form = form
        self.position = start

    def _finish(self) -> None:
        text, self._buffer = self._buffer, ""
        if text:
            self._events.append(Reasoning(text) if self.position is Place.INSIDE else Content(text))

    def _opening(self) -> bool:
        stripped = self._buffer.lstrip()
        if stripped.startswith(self._form.opening):
            self._buffer = stripped[len(self._form.opening) :]
            self.position = Place.INSIDE
        elif self._form.opening.startswith(stripped):
            return False
        if self.position is Place.INSIDE:
            self._state = type(self)._reasoning_start
        else:
            self.position = Place.OUTSIDE
            self._state = type(self)._answer
        return True

    def _reasoning_start(self) -> bool:
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._state = type(self)._reasoning
        return bool(self._buffer)

    def _reasoning(self) -> bool:
        closing = self._form.closing
        found = self._buffer.find(closing)
        end = found if found >= 0 else possible_start(self._buffer, (closing,))
        shown = self._buffer[:end].rstrip("\n")
        if shown:
            self._events.append(Reasoning(shown))
        if found < 0:
            self._buffer = self._buffer[len(shown) :]
            return False
        self._buffer = self._buffer[found + len(closing) :]
        self.position = Place.OUTSIDE
        self._state = type(self)._answer_start
        return True

    def _answer_start(self) -> bool:
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._state = type(self)._answer
        return bool(self._buffer)

    def _answer(self) -> bool:
        self._events.append(Content(self._buffer))
        self._buffer = ""
        return False
