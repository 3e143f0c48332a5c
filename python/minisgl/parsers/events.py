"""Events that the parsers emit. The texts of one kind are to be joined in order; calls are numbered from 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the thought before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: together JSON text as the model wrote it, so cut short where the model was."""

    index: int
    text: str


Event: TypeAlias = Content | Reasoning | CallStart | CallArguments
