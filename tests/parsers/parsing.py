"""Runs parsers over text cut into pieces, and puts their events together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from minisgl.parsers.streaming import CallArguments, CallStart, Content, Event, Reasoning


class Parser(Protocol):
    def feed(self, text: str, /) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


@dataclass
class Parsed:
    """Contents of all events together."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, arguments
    ids: list[str] = field(default_factory=list)


def together(events: Iterable[Event]) -> Parsed:
    parsed = Parsed()
    for event in events:
        match event:
            case Content(text):
                assert text
                parsed.content += text
            case Reasoning(text):
                assert text
                parsed.reasoning += text
            case CallStart(index, id, name):
                assert index == len(parsed.calls)
                parsed.calls.append((name, ""))
                parsed.ids.append(id)
            case CallArguments(index, text):
                assert text
                assert index == len(parsed.calls) - 1, "a call's arguments come before the next call"
                name, arguments = parsed.calls[index]
                parsed.calls[index] = (name, arguments + text)
    return parsed


def run(parser: Parser, pieces: Sequence[str]) -> Parsed:
    return together([*itertools.chain.from_iterable(map(parser.feed, pieces)), *parser.finish()])


def cut(text: str, cuts: Iterable[int]) -> list[str]:
    """The text in pieces, cut at these places (modulo its length)."""
    places = sorted({place % (len(text) + 1) for place in cuts} | {0, len(text)})
    return [text[begin:end] for begin, end in itertools.pairwise(places)] or [""]
