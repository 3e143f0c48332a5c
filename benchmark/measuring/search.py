"""Search for the highest rate that a server holds, by bisection on a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Outcome of one probe."""

    HELD = "held"  # enough of its requests were within the objectives
    MISSED = "missed"
    REFUSED = "refused"  # the load generator was too slow to judge the server


@dataclass(frozen=True, slots=True)
class Bracket:
    """Rates between which the highest one that holds was found; None: no probe ended so."""

    held: float | None  # highest that held
    missed: float | None  # lowest that missed
    refused: float | None  # lowest that was refused

    @property
    def is_lower_bound(self) -> bool:
        """True if nothing shows that the server cannot do more: the range ended there, or the generator did."""
        if self.held is None:
            return False
        return self.missed is None or (self.refused is not None and self.refused < self.missed)


def num_probes(low: float, high: float, precision: float) -> int:
    """Return how many probes `bisect` makes."""
    if high <= low * (1 + precision):
        return 0
    return math.ceil(math.log2(math.log(high / low) / math.log1p(precision)) - 1e-9)


def bisect(probe: Callable[[float], Verdict | None], low: float, high: float, precision: float) -> Bracket:
    """Probe the geometric mean of what is left until its ends differ by no more than `precision`, a ratio less 1.

    A server is taken to hold any rate below one that it held. The ends themselves are not probed: when every probe
    holds, the last one is within `precision` of `high`. A refused rate is an upper end like one that missed. A probe
    that returns None ends the search: what was found so far counts. ValueError unless 0 < low < high and precision is
    positive.
    """
    if not 0 < low < high or precision <= 0:
        raise ValueError(f"cannot search between {low:g} and {high:g} with a precision of {precision:g}")
    held = missed = refused = None
    for _ in range(num_probes(low, high, precision)):
        rate = math.sqrt(low * high)
        match probe(rate):
            case Verdict.HELD:
                low = held = rate
            case Verdict.MISSED:
                high = missed = rate
            case Verdict.REFUSED:
                high = refused = rate
            case None:
                break
    return Bracket(held, missed, refused)
