"""Parses the output of gpt-oss (OpenAI's Harmony format, 2025): messages of several channels, one after another.

    <|channel|>analysis<|message|>We need the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Oslo"}<|call|>

(without the line break). The prompt ends with `<|start|>assistant`, and the token that ends the answer, `<|call|>` or
`<|return|>`, is not part of its text. `analysis` is reasoning, a message `to=functions.NAME` is a call, and everything
else is content: the `final` channel, and `commentary` for the user. The recipient may come before the channel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import ClassVar

from minisgl.parsers.streaming import (
    CallArguments,
    CallStart,
    Content,
    Event,
    Reasoning,
    StateParser,
    find_first,
    possible_start,
)

HARMONY = "harmony"  # value of both flags
START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CONSTRAIN = "<|constrain|>"
SHOWN_BY = f"{CHANNEL}analysis{MESSAGE}"
MAX_HEADER = 1024  # characters

_LAST = (END, "<|call|>", "<|return|>")
_ENDS = (*_LAST, START, CHANNEL)  # models forget to end a message
_HEADS = (CHANNEL, MESSAGE, START, "to=")
_CHANNEL_NAME = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class _Kind(Enum):
    """Part of the answer that a message belongs to."""

    CONTENT = auto()
    REASONING = auto()
    FRAMED_REASONING = auto()  # reasoning that stays in the content, with its markers
    CALL = auto()


class HarmonyParser(StateParser):
    """Parses one answer; text without a header is content.

    `tools`: names of the declared tools; if there are none, calls are content. Without `reasoning`, reasoning stays in
    the content, with its markers.
    """

    markers: ClassVar[tuple[str, ...]] = (CHANNEL,)  # a call begins with it
    kept: ClassVar[tuple[str, ...]] = (START, CHANNEL, MESSAGE, CONSTRAIN, *_LAST)

    def __init__(
        self,
        tools: Collection[str],
        new_id: Callable[[], str],
        *,
        reasoning: bool = True,
        prompt_end: str = "",
        continued: str = "",
    ) -> None:
        super().__init__(type(self)._first_header)
        self.reasoning_tokens = 0  # so far, markers included
        self._tools = tools
        self._new_id = new_id
        self._separates_reasoning = reasoning
        self._header_tokens = 0  # tokens of an incomplete header
        self._num_calls = 0
        self._shown: set[_Kind] = set()  # kinds that already have text in the answer
        self._kind = _Kind.CONTENT  # kind of the current message
        self._begun = False  # the current message has some text
        _, start, header = prompt_end.rpartition(START)
        if continued.strip():
            self._state = type(self)._text
        elif start and any(end in header for end in _LAST):
            self._state = type(self)._between
        elif start and MESSAGE in header:
            self._open(header)

    def feed(self, text: str, num_tokens: int = 0) -> list[Event]:
        """Add the text of `num_tokens` tokens; return the events that are certain now."""
        thinks = self._thinks
        self._receive(text)
        if thinks or self._thinks:
            self.reasoning_tokens += num_tokens + self._header_tokens
            self._header_tokens = 0
        elif self._state in (type(self)._first_header, type(self)._header, type(self)._between):
            self._header_tokens += num_tokens
        else:
            self._header_tokens = 0
        return self._take_events()

    def _finish(self) -> None:
        """Add the events of the text held back, at the end. A header without a message has none."""
        text, self._buffer = self._buffer, ""
        if self._state == type(self)._text:
            self._say(text)
            if self._kind is _Kind.CALL:
                self._close()
        elif self._state != type(self)._header and text.strip():
            self._kind, self._begun = _Kind.CONTENT, False
            self._say(text)

    @property
    def _thinks(self) -> bool:
        return self._state == type(self)._text and self._kind in (_Kind.REASONING, _Kind.FRAMED_REASONING)

    def _first_header(self) -> bool:
        """Find out if the answer begins with a header, or with text directly."""
        stripped = self._buffer.lstrip()
        if stripped.startswith(_HEADS):
            self._state = type(self)._between if stripped.startswith(START) else type(self)._header
        elif any(head.startswith(stripped) for head in _HEADS):
            return False
        else:
            self._begin(_Kind.CONTENT)
        return True

    def _between(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer.startswith((START, CHANNEL)):
            self._buffer = self._buffer.removeprefix(START)
            self._state = type(self)._header
        elif any(marker.startswith(self._buffer) for marker in (START, CHANNEL)):
            return False
        else:
            self._begin(_Kind.CONTENT)
        return True

    def _header(self) -> bool:
        end = self._buffer.find(MESSAGE, 0, MAX_HEADER)
        if end >= 0:
            header, self._buffer = self._buffer[:end], self._buffer[end + len(MESSAGE) :]
            self._open(header)
        elif len(self._buffer) < MAX_HEADER:
            return False
        else:
            self._begin(_Kind.CONTENT)
            self._say(self._buffer[:MAX_HEADER])
            self._buffer = self._buffer[MAX_HEADER:]
        return True

    def _text(self) -> bool:
        found = find_first(self._buffer, _ENDS)
        end = possible_start(self._buffer, _ENDS) if found is None else found[0]
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        self._say(text)
        if found is None:
            return False
        if found[1] in _LAST:
            self._buffer = self._buffer[len(found[1]) :]
        self._close()
        return True

    # Messages.

    def _open(self, header: str) -> None:
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        address = "" if recipient is None else recipient[1]
        name = address.removeprefix("functions.")
        if self._tools and name and (name != address or name in self._tools):
            self._begin(_Kind.CALL)
            self._events.append(CallStart(self._num_calls, self._new_id(), name))
            self._num_calls += 1
        elif channel is not None and channel[1] == "analysis":
            self._begin(_Kind.REASONING if self._separates_reasoning else _Kind.FRAMED_REASONING)
        else:
            self._begin(_Kind.CONTENT)

    def _begin(self, kind: _Kind) -> None:
        self._kind, self._begun = kind, False
        self._state = type(self)._text

    def _say(self, text: str) -> None:
        if self._kind is _Kind.CALL and not self._begun:
            text = text.lstrip()
        if not text:
            return
        if not self._begun:
            self._begun = True
            if self._kind in self._shown:
                text = f"\n\n{text}"
            elif self._kind is _Kind.FRAMED_REASONING:
                text = SHOWN_BY + text
            if self._kind in (_Kind.REASONING, _Kind.CONTENT):
                self._shown.add(self._kind)
        if self._kind is _Kind.CALL:
            self._events.append(CallArguments(self._num_calls - 1, text))
        else:
            self._events.append(Reasoning(text) if self._kind is _Kind.REASONING else Content(text))

    def _close(self) -> None:
        if self._kind is _Kind.CALL and not self._begun:
            self._say("{}")
        elif self._kind is _Kind.FRAMED_REASONING and self._begun:
            self._events.append(Content(END))
        self._state = type(self)._between
