"""Record of completed steps for the glass box, kept only while it is watched. Recording takes some microseconds a step.

A decode of a small model takes less than a millisecond, so successive decodes of the same sequences become one record,
up to MERGED_SECONDS, which is fine enough for a picture of a minute.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

from minisgl.core import Batch, Int32Array
from minisgl.message.engine_state import Chunk, StepRecord

MAX_RECORDS = 4096
MAX_ROWS = 64  # rows of a step whose sequences are listed
MERGED_SECONDS = 0.05


class StepTrace:
    """Record of the last steps."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=MAX_RECORDS)
        self._decoded: Int32Array | None = None  # slots of the last record, if it only decoded

    def add(self, batch: Batch, seq_ids: list[int], begin: float, end: float) -> None:
        """Record a completed step; `seq_ids` are those of its rows, `begin` and `end` seconds."""
        if self._extends_last(batch, end):
            last = self._records.pop()
            self._records.append(msgspec.structs.replace(last, step=batch.step, count=last.count + 1, end=end))
            return
        decodes = batch.needs_sample & (batch.query_lens == 1)
        rows = np.flatnonzero(~decodes)[:MAX_ROWS].tolist()
        chunks = [Chunk(seq_ids[row], int(batch.start_pos[row]), int(batch.query_lens[row])) for row in rows]
        record = StepRecord(
            step=batch.step,
            begin=begin,
            end=end,
            decodes=int(decodes.sum()),
            prefill_tokens=int(batch.query_lens[~decodes].sum()),
            decoding=[seq_ids[row] for row in np.flatnonzero(decodes)[:MAX_ROWS].tolist()],
            chunks=chunks,
        )
        self._records.append(record)
        self._decoded = None if chunks else batch.slots

    def _extends_last(self, batch: Batch, end: float) -> bool:
        """Return True if the step decodes the same rows as the last record, and directly follows it."""
        if self._decoded is None or not batch.is_decode or not np.array_equal(batch.slots, self._decoded):
            return False
        last = self._records[-1]
        return batch.step == last.step + 1 and not batch.new_rows and end - last.begin < MERGED_SECONDS

    def since(self, step: int) -> list[StepRecord]:
        """Return the records that end after step number `step`, oldest first."""
        return [record for record in self._records if record.step > step]
