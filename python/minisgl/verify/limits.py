"""Distances that two correct computations of the same logits may have. Pure.

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
where rounding moves transformers' own logits by more than the limit allows, a prompt has `OWN_ROOM` times that.

Tokens may differ only at a near tie: where the oracle's margin between the two is at most `MARGIN_ROOM` times what is
expected of one logit, which is over five standard deviations of the difference of two.

Measured on the demo model (6 layers), the worst position: float32 4e-6 of 3.5e-5, bfloat16 0.07 of 0.15. So float32 is
the sharp test; bfloat16 finds what is wrong by several percent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ROUNDINGS = 8
SUMMATION = 16
RMS_ROOM = 4  # some positions are several times worse than the average
LARGEST_ROOM = 6  # times the limit of the root mean square
MARGIN_ROOM = 8
OWN_ROOM = 2  # times the distance of transformers' logits in the dtype from those in float32

_UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Limits on differences of logits, in standard deviations of the logits."""

    rms: float
    largest: float
    margin: float  # two logits nearer than this may change places

    def at_least(self, rounding: float) -> Tolerance:
        """Return the limits for a prompt whose logits in transformers rounding moves by this root mean square."""
        wider = max(1.0, OWN_ROOM * rounding / self.rms)
        return Tolerance(wider * self.rms, wider * self.largest, wider * self.margin)


def tolerance(dtype: str, num_layers: int, factor: float = 1.0, *, experts_per_token: int = 0) -> Tolerance:
    """Return the limits for a model of so many layers computed in this dtype on both sides; `factor` widens them."""
    expected = factor * _UNIT_ROUNDOFF[dtype] * math.sqrt(2 * (ROUNDINGS + experts_per_token) * num_layers)
    if dtype == "float32":
        expected *= SUMMATION
    rms = RMS_ROOM * expected
    return Tolerance(rms, LARGEST_ROOM * rms, MARGIN_ROOM * expected)
