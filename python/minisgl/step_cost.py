"""Cost model of a step: the seconds that a plan takes, by what it computes. Pure.

A step is a fixed part, the products of its tokens, and the attention of each token to those before it. The engine
measures or estimates the five coefficients at its start (`engine.step_costs`); the scheduler corrects them by the steps
that it has measured since.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from minisgl.core import Batch, Int32Array

_LATEST_WEIGHT = 0.2  # of the latest step in the mean ratio, once there have been some


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: a sum of what its rows take."""

    prefill_token: float  # for each token of a chunk; above 0
    prefill_context: float = 0.0  # for each token of a chunk and each token that it attends to
    decode_row: float = 0.0  # for each decode
    decode_context: float = 0.0  # for each token that a decode attends to
    fixed: float = 0.0  # for each step

    def prefill(self, start_pos: int, length: int) -> float:
        """Return the seconds of a chunk of `length` tokens behind `start_pos` others, without the fixed part."""
        return length * (self.prefill_token + self.prefill_context * (start_pos + length / 2))

    def decodes(self, start_pos: Int32Array) -> float:
        """Return the seconds of decodes behind so many tokens, [rows], without the fixed part."""
        return len(start_pos) * self.decode_row + float(start_pos.sum()) * self.decode_context

    def chunk_within(self, seconds: float, start_pos: int) -> int:
        """Return the tokens of the longest chunk behind `start_pos` others that takes at most `seconds`."""
        if seconds <= 0:
            return 0
        linear = self.prefill_token + self.prefill_context * start_pos
        return math.floor(2 * seconds / (linear + math.sqrt(linear**2 + 2 * self.prefill_context * seconds)) + 1e-9)

    def seconds(self, batch: Batch) -> float:
        """Return the seconds of a whole step."""
        is_prefill = batch.query_lens > 1
        starts, lengths = batch.start_pos[is_prefill].tolist(), batch.query_lens[is_prefill].tolist()
        prefills = sum(map(self.prefill, starts, lengths))
        return self.fixed + prefills + self.decodes(batch.start_pos[~is_prefill])


class LearnedCost:
    """Cost model, corrected by the ratio of measured to modelled seconds.

    The ratio is a geometric mean over the latest steps. The model itself counts as one measurement at first, so that a
    few steps correct it.
    """

    def __init__(self, model: StepCost) -> None:
        self.model = model
        self.ratio = 1.0
        self._count = 1

    def record(self, batch: Batch, seconds: float) -> None:
        """Take a step's measured seconds. Steps of decodes alone are left out, since the ratio sizes chunks."""
        if seconds <= 0 or int(batch.query_lens.max()) == 1:
            return
        self._count += 1
        weight = max(1 / self._count, _LATEST_WEIGHT)
        self.ratio *= (seconds / (self.ratio * self.model.seconds(batch))) ** weight
