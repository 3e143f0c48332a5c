"""Cost model of a step that measured steps correct. Pure."""

from __future__ import annotations

from minisgl.core import Batch
from minisgl.step_cost import StepCost

WEIGHT = 0.2  # of the latest step


class LearnedCost:
    """Cost model, and the ratio of measured seconds to its own: a mean that forgets, of logarithms.

    The model counts as one measurement, so that what it lacks is found within a few steps.
    """

    def __init__(self, model: StepCost) -> None:
        self.model = model
        self.ratio = 1.0
        self._count = 1

    def record(self, batch: Batch, seconds: float) -> None:
        """Take a step's measured seconds. Decodes alone have nothing to tell: the ratio is for the size of chunks."""
        if seconds <= 0 or int(batch.query_lens.max()) == 1:
            return
        self._count += 1
        weight = max(1 / self._count, WEIGHT)
        self.ratio *= (seconds / (self.ratio * self.model.seconds(batch))) ** weight
