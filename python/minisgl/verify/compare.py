"""Our logits against the oracle's, position by position, with limits for two correct computations. Pure.

Both engines round, and not in the same order. With the unit roundoff u of the dtype (2^-24 float32, 2^-11 float16,
2^-8 bfloat16), a layer rounds the residual stream and what is added to it some `ROUNDINGS` times; these errors are
independent, so the logits' relative error grows with the square root of their number, and the difference of two such
computations is sqrt(2) of it:

    expected = u * sqrt(2 * ROUNDINGS * layers)

transformers adds the experts of a token one after another in the dtype: as many roundings more in a layer of experts.

The limits are multiples of that. Sums over thousands of products in another order add to it in float32 (the narrower
dtypes are summed in float32, which hides it), so float32 has `SUMMATION` times more room. All is relative to the
standard deviation of the position's logits over the vocabulary: a limit on the root mean square of the difference,
which a wrong weight or a wrong angle exceeds many times, and a wider one on the largest difference, for the tails of
large vocabularies.

That holds for weights that pass errors on as they are. Trained ones amplify them in places: SmolLM2-135M in bfloat16
is 0.1 to 0.3 standard deviations from float32, and one where a prompt repeats itself, in transformers as here, whose
two ways to attend are 1.7 apart there. So both computations are measured from float32 where it fits in memory, and
where rounding moves transformers' own logits by more than the limit allows, a prompt has `OWN_ROOM` times that. With
experts all prompts have it: at a router's near tie rounding sends a token to another expert, in one of transformers'
prompts and another one of ours. Where float32 does not fit, transformers' two ways to attend show what rounding does,
and all prompts have `OWN_ROOM` times the largest of these distances.

Tokens may differ only at a near tie: where the oracle's margin between the two is at most `MARGIN_ROOM` times what is
expected of one logit, which is over five standard deviations of the difference of two.

Measured on the demo model (6 layers), the worst position: float32 4e-6 of 3.5e-5, bfloat16 0.07 of 0.15. So float32 is
the sharp test; bfloat16 finds what is wrong by several percent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating]

ROUNDINGS = 8
SUMMATION = 16
RMS_ROOM = 4  # some positions are several times worse than the average
LARGEST_ROOM = 6  # times the limit of the root mean square
MARGIN_ROOM = 8
OWN_ROOM = 2  # times the distance of transformers' logits in the dtype from others of its own

_UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Limits on differences of logits, in standard deviations of the logits."""

    rms: float
    largest: float
    margin: float  # two logits closer than this may swap ranks

    def at_least(self, rounding: float) -> Tolerance:
        """Return the limits for a prompt for which rounding moves transformers' logits by this root mean square."""
        wider = max(1.0, OWN_ROOM * rounding / self.rms)
        return Tolerance(wider * self.rms, wider * self.largest, wider * self.margin)


def tolerance(dtype: str, num_layers: int, factor: float = 1.0, *, experts_per_token: int = 0) -> Tolerance:
    """Return the limits for a model with this many layers in this dtype on both sides; `factor` widens them."""
    expected = factor * _UNIT_ROUNDOFF[dtype] * math.sqrt(2 * (ROUNDINGS + experts_per_token) * num_layers)
    if dtype == "float32":
        expected *= SUMMATION
    rms = RMS_ROOM * expected
    return Tolerance(rms, LARGEST_ROOM * rms, MARGIN_ROOM * expected)


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
    absolute: float  # the largest difference, not divided by the standard deviation
    largest: float
    rms: float
    our_best: Choice
    their_best: Choice

    def within(self, tolerance: Tolerance) -> bool:
        """True if all differences are within the limits; False for NaN."""
        return self.rms <= tolerance.rms and self.largest <= tolerance.largest


def compare_rows(first: int, ours: FloatArray, theirs: FloatArray) -> list[Position]:
    """Compare rows [n, vocab] of logits at the positions from `first` on."""
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
    """The first new token that differs from the oracle's."""

    step: int  # number of the new token, from 0
    ours: Choice
    theirs: Choice
    margin: float  # how much better the oracle finds its token than ours, in standard deviations
    is_our_best: bool  # our token is the best of our logits: the sampler is not to blame

    def near_tie(self, tolerance: Tolerance) -> bool:
        """True if rounding may have changed the choice."""
        return self.is_our_best and self.margin <= tolerance.margin


@dataclass(slots=True)
class Run:
    """One prompt in one pass of our engine."""

    cached_tokens: int = 0  # prompt tokens whose logits were not computed again
    tokens: list[int] = field(default_factory=list)
    positions: dict[int, Position] = field(default_factory=dict)

    def parting(self, prompt_len: int, expected: Sequence[int], logits: FloatArray) -> Parting | None:
        """Return where the tokens part from the oracle's, or None. logits [positions, vocab] are the oracle's."""
        step = common_length(self.tokens, expected)
        if step == len(expected):
            return None
        row = logits[prompt_len - 1 + step]
        ours, theirs = self.tokens[step], expected[step]
        seen = self.positions.get(prompt_len - 1 + step)
        nan = float("nan")  # unknown, because that pass kept no logits
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
