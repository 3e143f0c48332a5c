"""Protocol between scheduler and grammars: a constrained request has a matcher, which has consumed its tokens so far.

The scheduler imports this and no implementation; `matcher` implements it with llguidance.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol

from minisgl.core import Int32Array
from minisgl.sampling_params import SamplingParams


class MatcherStatus(Enum):
    """Status of a matcher after a token."""

    OPEN = auto()  # more tokens can follow
    COMPLETE = auto()  # nothing can follow but an end of sequence
    FAILED = auto()  # the grammar does not allow the token, or has become too complex to follow
    UNUSABLE = auto()  # the grammar, or every grammar, cannot be followed with the model's tokenizer
    TOO_LARGE = auto()  # all grammars together need too much memory, and this one has more than an equal share
    EXCLUDED = auto()  # the request's `allowed_token_ids` and the grammar allow no common token


class Matcher(Protocol):
    """Position of one request in its grammar."""

    @property
    def is_compiling(self) -> bool:
        """True while the grammar is being compiled; its request should not be admitted yet."""


class Grammars(Protocol):
    """Creates and advances matchers."""

    def start(self, sampling: SamplingParams) -> Matcher:
        """Return the matcher of a new request with a grammar, without waiting for its compilation."""

    def advance(self, matchers: Sequence[Matcher], tokens: Int32Array) -> list[MatcherStatus]:
        """Advance each matcher by its token; return their statuses."""

    def fill(self, bitmask: Int32Array, matchers: Sequence[Matcher | None]) -> None:
        """Write the grammar bitmask int32[rows, words]: bit i of word w is set if id 32 w + i is allowed next.

        A row without a matcher may choose any id.
        """


class NoGrammars:
    """Implementation for an engine without structured output."""

    def start(self, sampling: SamplingParams) -> Matcher:
        raise NotImplementedError("this engine serves no grammars")

    def advance(self, matchers: Sequence[Matcher], tokens: Int32Array) -> list[MatcherStatus]:
        raise NotImplementedError("this engine serves no grammars")

    def fill(self, bitmask: Int32Array, matchers: Sequence[Matcher | None]) -> None:
        raise NotImplementedError("this engine serves no grammars")
