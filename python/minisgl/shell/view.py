"""What the session asks of a terminal or a pipe."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class AnswerView(Protocol):
    """Shows an answer while it comes."""

    def add(self, text: str) -> None: ...

    def think(self, text: str) -> None:
        """A piece of thought before the answer."""
        ...


class View(Protocol):
    """Where questions come from and everything goes."""

    interactive: bool  # somebody sits there: errors and Ctrl-C do not end the program

    def ask(self) -> str:
        """The next question or command. EOFError at the end, KeyboardInterrupt when it is taken back."""
        ...

    def answer(self) -> AbstractContextManager[AnswerView]:
        """Around one answer; whatever has come is shown in full when it is left."""
        ...

    def note(self, text: str) -> None: ...

    def error(self, text: str) -> None: ...
