"""Protocol between scheduler and grammars: a constrained request has a matcher, which stands behind its last token.

The scheduler imports this and no implementation; `matcher` has the one on llguidance.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol

from minisgl.core import Int32Array, SamplingParams


class Progress(Enum):
    """Position of a matcher after a token."""

    OPEN = auto()  # more tokens can follow
    COMPLETE = auto()  # none but an end of sequence
    FAILED = auto()  # the grammar does not allow the token, or has become too complex to follow
    EXCLUDED = auto()  # the request's `allowed_token_ids` leave nothing that the grammar allows


class Matcher(Protocol):
    """One request's place in its grammar."""

    @property
    def is_compiling(self) -> bool:
        """True while the grammar is not ready: the request had better wait."""


class Grammars(Protocol):
    """Makes and moves matchers."""

    def start(self, sampling: SamplingParams) -> Matcher:
        """Make the matcher of a new request that has a grammar; returns at once."""

    def advance(self, matchers: Sequence[Matcher], tokens: Int32Array) -> list[Progress]:
        """Move each matcher on by its token."""

    def fill(self, bitmask: Int32Array, matchers: Sequence[Matcher | None]) -> None:
        """Write the grammar bitmask int32[rows, words]: bit i of word w is set if id 32 w + i may come next.

        A row without a matcher may choose any id.
        """


class NoGrammars:
    """Stands in where an engine serves no constrained requests."""

    def start(self, sampling: SamplingParams) -> Matcher:
        raise NotImplementedError("this engine serves no grammars")

    def advance(self, matchers: Sequence[Matcher], tokens: Int32Array) -> list[Progress]:
        raise NotImplementedError("this engine serves no grammars")

    def fill(self, bitmask: Int32Array, matchers: Sequence[Matcher | None]) -> None:
        raise NotImplementedError("this engine serves no grammars")
