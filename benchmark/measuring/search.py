"""Search for the highest rate that a server holds, by bisection on a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self


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

    @classmethod
    def of(cls, probes: Sequence[tuple[float, Verdict]]) -> Self:
        """Return what the verdicts on some rates say together."""

        def rates(wanted: Verdict) -> list[float]:
            return [rate for rate, verdict in probes if verdict is wanted]

        return cls(
            held=max(rates(Verdict.HELD), default=None),
            missed=min(rates(Verdict.MISSED), default=None),
            refused=min(rates(Verdict.REFUSED), default=None),
        )

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
    probes: list[tuple[float, Verdict]] = []
    for _ in range(num_probes(low, high, precision)):
        rate = math.sqrt(low * high)
        verdict = probe(rate)
        if verdict is None:
            break
        if verdict is Verdict.HELD:
            low = rate
        else:
            high = rate
        probes.append((rate, verdict))
    return Bracket.of(probes)
