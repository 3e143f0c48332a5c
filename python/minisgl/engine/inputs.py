"""What a step of any rows reads: reckoned on the host from the plan, then one copy to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.core import Batch, Int32Array


class RowInputs(NamedTuple):
    """The T tokens of a step and the rows they belong to, on the device."""

    token_slots: Tensor  # [T] int32: slot of each token
    positions: Tensor  # [T] int32: its place in its sequence
    slots: Tensor  # [rows] int32
    kv_lens: Tensor  # [rows] int32: tokens of each row in the cache after this step's are written
    query_starts: Tensor  # [rows + 1] int32: prefix sums of the rows' new tokens


@dataclass(frozen=True, slots=True)
class HostRows:
    """The same on the host."""

    token_slots: Int32Array
    positions: Int32Array
    slots: Int32Array
    kv_lens: Int32Array
    query_starts: Int32Array

    @classmethod
    def of(cls, batch: Batch) -> HostRows:
        query_starts = np.zeros(len(batch.query_lens) + 1, dtype=np.int32)
        np.cumsum(batch.query_lens, out=query_starts[1:])
        places = np.arange(query_starts[-1], dtype=np.int32)
        return cls(
            token_slots=np.repeat(batch.slots, batch.query_lens),
            positions=places - np.repeat(query_starts[:-1] - batch.start_pos, batch.query_lens),
            slots=batch.slots,
            kv_lens=batch.start_pos + batch.query_lens,
            query_starts=query_starts,
        )

    def padded(self, tokens: int, rows: int, scratch_slot: int, max_seq_len: int) -> HostRows:
        """As many tokens in `rows` + 1 rows: first these, then some of no token, last one of all the missing tokens.

        That one gives every token of padding something finite to attend to. All of them stand at position 0 of the
        scratch slot.
        """
        missing, empty = tokens - len(self.token_slots), rows - len(self.slots)
        return HostRows(
            token_slots=_extended(self.token_slots, missing, scratch_slot),
            positions=_extended(self.positions, missing, 0),
            slots=_extended(self.slots, empty + 1, scratch_slot),
            kv_lens=_extended(_extended(self.kv_lens, empty, 0), 1, min(missing, max_seq_len)),
            query_starts=_extended(_extended(self.query_starts, empty, len(self.token_slots)), 1, tokens),
        )

    @property
    def arrays(self) -> tuple[Int32Array, ...]:
        """In the order of RowInputs."""
        return self.token_slots, self.positions, self.slots, self.kv_lens, self.query_starts


@dataclass(frozen=True, slots=True)
class LogitsIndices:
    """What of a step's tokens is read."""

    rows: Int32Array  # [S + P] of the T tokens: those that sample, then those scored for prompt_logprobs
    slots: Int32Array  # [S]: of those that sample

    @classmethod
    def of(cls, batch: Batch, query_starts: Int32Array) -> LogitsIndices:
        sampling = query_starts[1:][batch.needs_sample] - 1
        rows = np.concatenate([sampling, _scored_tokens(batch, query_starts)])
        return cls(rows, batch.slots[batch.needs_sample])

    @property
    def arrays(self) -> tuple[Int32Array, ...]:
        return self.rows, self.slots


def split_like(packed: Tensor, arrays: Sequence[Int32Array]) -> Sequence[Tensor]:
    """Views of a tensor that begins with these arrays, one after another."""
    lengths = [len(array) for array in arrays]
    return torch.split(packed[: sum(lengths)], lengths)


def _extended(array: Int32Array, count: int, value: int) -> Int32Array:
    return np.concatenate([array, np.full(count, value, dtype=np.int32)])


def _scored_tokens(batch: Batch, query_starts: Int32Array) -> Int32Array:
    """Which of the step's tokens the model's opinion on the next one is wanted of."""
    if batch.logprobs is None:
        return np.empty(0, dtype=np.int32)
    counts = batch.logprobs.prompt_lengths
    before = np.cumsum(counts) - counts
    return np.arange(int(counts.sum()), dtype=np.int32) + np.repeat(query_starts[:-1] - before, counts).astype(np.int32)
