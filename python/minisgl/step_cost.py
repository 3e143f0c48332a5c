"""Cost model of a step: the seconds that a plan takes, by what it computes. Pure.

A step with chunks is a fixed part, the products of its tokens, and the attention of each token to those before it. A
step of decodes alone has a fixed part of its own, the time of reading all weights, during which the GPU also computes
most of their products. The engine finds the coefficients at its start (`engine.cost_measurement`); the scheduler
corrects them by the steps that it has measured since.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from minisgl.core import Batch, Int32Array

# A step that takes the device less than so many times as long as its launches took the host may have waited for them.
LAUNCH_MARGIN = 1.25
MOST_UNMEASURED = 16  # such steps in a row that leave the ratio as it is
_LATEST_WEIGHT = 0.2  # of the latest step in the mean ratio, once there have been some


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: a sum of what its rows take."""

    prefill_token: float  # for each token of a chunk; above 0
    prefill_context: float = 0.0  # for each token of a chunk and each token that it attends to
    decode_row: float = 0.0  # for each decode in a step with chunks
    decode_context: float = 0.0  # for each token that a decode attends to
    fixed: float = 0.0  # for each step with chunks
    alone_row: float = 0.0  # for each decode of a step without chunks
    alone_fixed: float = math.inf  # for each step without chunks; infinite where it was not measured
    launching: float = 0.0  # of the host's launches of a step with chunks; 0 if graphs hold all shorter steps

    def prefill(self, start_pos: int, length: int) -> float:
        """Return the seconds of a chunk of `length` tokens after `start_pos` others, without the fixed part."""
        return length * (self.prefill_token + self.prefill_context * (start_pos + length / 2))

    def decodes(self, start_pos: Int32Array) -> float:
        """Return the seconds of decodes at positions [rows] in a step with chunks, without the fixed part."""
        return len(start_pos) * self.decode_row + float(start_pos.sum()) * self.decode_context

    def decodes_alone(self, start_pos: Int32Array) -> float:
        """Return the seconds of a whole step of decodes alone, at positions [rows]."""
        return self.alone_fixed + len(start_pos) * self.alone_row + float(start_pos.sum()) * self.decode_context

    def chunk_within(self, seconds: float, start_pos: int) -> int:
        """Return the tokens of the longest chunk after `start_pos` others that takes at most `seconds`."""
        if seconds <= 0:
            return 0
        linear = self.prefill_token + self.prefill_context * start_pos
        return math.floor(2 * seconds / (linear + math.sqrt(linear**2 + 2 * self.prefill_context * seconds)) + 1e-9)

    def seconds(self, batch: Batch) -> float:
        """Return the seconds of a whole step."""
        if batch.is_decode:
            return self.decodes_alone(batch.start_pos)
        is_prefill = (batch.query_lens > 1) | ~batch.needs_sample
        starts, lengths = batch.start_pos[is_prefill].tolist(), batch.query_lens[is_prefill].tolist()
        prefills = sum(map(self.prefill, starts, lengths))
        return self.fixed + prefills + self.decodes(batch.start_pos[~is_prefill])


class _Ratio:
    """Ratio of measured to modelled seconds, a geometric mean over the latest steps.

    The model itself counts as one measurement at first, so that a few steps correct it.
    """

    def __init__(self) -> None:
        self.value = 1.0
        self._count = 1

    def record(self, measured: float, modelled: float) -> None:
        self._count += 1
        weight = max(1 / self._count, _LATEST_WEIGHT)
        self.value *= (measured / (self.value * modelled)) ** weight


class LearnedCost:
    """Cost model, corrected by measured steps: one ratio for those with chunks, one for those of decodes alone."""

    def __init__(self, model: StepCost) -> None:
        self.model = model
        self._with_chunks, self._alone = _Ratio(), _Ratio()
        self._unmeasured = 0  # latest steps with chunks in a row that waited for the host

    @property
    def ratio(self) -> float:
        """Measured seconds of steps with chunks by those of the model."""
        return self._with_chunks.value

    def decodes_alone(self, start_pos: Int32Array) -> float:
        """Return the corrected seconds of a step of decodes alone, at positions [rows]."""
        return self._alone.value * self.model.decodes_alone(start_pos)

    def saved_by_turns(self, decodes: int, chunks: float) -> float:
        """Return by how many seconds a step of chunks and a step of decodes are shorter than one step of both.

        `chunks`: their seconds by the model, without the fixed part. Reading K and V is left out, since decodes do that
        in either kind of step. A step of few prompt tokens takes no less time than reading the weights.
        """
        model, alone = self.model, self._alone.value
        if not math.isfinite(model.alone_fixed):
            return -math.inf
        reads_on = max(alone * model.alone_fixed - self.ratio * (model.fixed + chunks), 0.0)
        of_decodes = alone * (model.alone_fixed + decodes * model.alone_row)
        return self.ratio * decodes * model.decode_row - of_decodes - reads_on

    def record(self, batch: Batch, seconds: float) -> None:
        """Take a step's measured seconds; those of a step that waited for the host's launches are left out.

        Such a step would take no less time with fewer tokens, so it must not make chunks smaller. Its seconds are NaN,
        or hardly longer than the model's launches: within a sum over ranks a device also waits for the launches of
        another rank, which its own host does not see. After MOST_UNMEASURED of them in a row a ratio above 1 returns
        towards 1: it may be a relic of a few slow steps, and chunks so small that they all wait would never show that.
        """
        modelled = self.model.seconds(batch)
        if not batch.is_decode and not seconds >= LAUNCH_MARGIN * self.model.launching:
            self._unmeasured += 1
            if self._unmeasured > MOST_UNMEASURED and self.ratio > 1:
                self._with_chunks.record(modelled, modelled)
            return
        if not batch.is_decode:
            self._unmeasured = 0
        if seconds > 0 and math.isfinite(modelled):
            (self._alone if batch.is_decode else self._with_chunks).record(seconds, modelled)
