"""Our logits beside the oracle's, position by position, and what the differences mean. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from minisgl.verify.limits import Tolerance

FloatArray = NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Choice:
    """A token and its logit on both sides."""

    token: int
    ours: float
    theirs: float


@dataclass(frozen=True, slots=True)
class Position:
    """One position's logits compared; differences in standard deviations of the oracle's logits."""

    position: int
    absolute: float  # the largest difference, as it is
    largest: float
    rms: float
    our_best: Choice
    their_best: Choice

    def within(self, tolerance: Tolerance) -> bool:
        """False for NaN too."""
        return self.rms <= tolerance.rms and self.largest <= tolerance.largest


def compare_rows(first: int, ours: FloatArray, theirs: FloatArray) -> list[Position]:
    """Rows [n, vocab] of logits at the positions from `first` on."""
    theirs = theirs.astype(np.float64)
    difference = ours - theirs
    scale = np.maximum(theirs.std(axis=1), 1e-12)
    absolute = np.abs(difference).max(axis=1)
    rms = np.sqrt((difference**2).mean(axis=1))
    return [
        Position(
            position=first + row,
            absolute=float(absolute[row]),
            largest=float(absolute[row] / scale[row]),
            rms=float(rms[row] / scale[row]),
            our_best=_choice(int(ours[row].argmax()), ours[row], theirs[row]),
            their_best=_choice(int(theirs[row].argmax()), ours[row], theirs[row]),
        )
        for row in range(len(ours))
    ]


def _choice(token: int, ours: FloatArray, theirs: FloatArray) -> Choice:
    return Choice(token, float(ours[token]), float(theirs[token]))


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True, slots=True)
class Parting:
    """The first new token that differs."""

    step: int  # of the new tokens, from 0
    ours: Choice
    theirs: Choice
    margin: float  # how much better the oracle finds its token than ours, in standard deviations
    is_our_best: bool  # our token is the best of our logits: the sampler is not to blame

    def near_tie(self, tolerance: Tolerance) -> bool:
        """Rounding may turn this choice over."""
        return self.is_our_best and self.margin <= tolerance.margin


@dataclass(slots=True)
class Run:
    """One prompt in one pass of our engine."""

    cached_tokens: int = 0  # of the prompt: their logits were not computed again
    tokens: list[int] = field(default_factory=list)
    positions: dict[int, Position] = field(default_factory=dict)

    def parting(self, prompt_len: int, expected: Sequence[int], logits: FloatArray) -> Parting | None:
        """Return where the tokens part from the oracle's, if they do. logits [positions, vocab] are the oracle's."""
        step = common_length(self.tokens, expected)
        if step == len(expected):
            return None
        row = logits[prompt_len - 1 + step]
        ours, theirs = self.tokens[step], expected[step]
        seen = self.positions.get(prompt_len - 1 + step)
        nan = float("nan")  # not seen: that pass kept no logits
        best, at_theirs = (None, nan) if seen is None else (seen.our_best, seen.their_best.ours)
        is_best = best is None or ours == best.token
        our_logit = best.ours if best is not None and ours == best.token else nan
        return Parting(
            step,
            Choice(ours, our_logit, float(row[ours])),
            Choice(theirs, at_theirs, float(row[theirs])),
            float((row[theirs] - row[ours]) / max(float(row.std()), 1e-12)),
            is_best,
        )
