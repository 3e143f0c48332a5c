"""Inputs of a step, made of its plan: NumPy arrays on the host, which are sent to the device in one copy."""

from __future__ import annotations

from typing import Generic, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.core import A, Batch, IndexArray, Int32Array
from minisgl.uploads import upload


class StepInputs(NamedTuple, Generic[A]):
    """The T tokens of a step and their rows, all int32: as arrays on the host, then in one copy on the device."""

    token_slots: A  # [T]: slot of each token
    positions: A  # [T]: position of each token in its sequence
    slots: A  # [rows]
    kv_lens: A  # [rows]: tokens of each row in the pool, this step's included
    query_starts: A  # [rows + 1]: prefix sums of the query lengths
    logits_indices: A  # [S + P]: indices of the tokens that sample, then of those that score prompt_logprobs
    sampling_slots: A  # [S]


def step_inputs(batch: Batch) -> StepInputs[Int32Array]:
    """Return the inputs of a step, from its plan."""
    query_starts = np.zeros(len(batch.query_lens) + 1, dtype=np.int32)
    np.cumsum(batch.query_lens, out=query_starts[1:])
    indices = np.arange(query_starts[-1], dtype=np.int32)
    sampling = query_starts[1:][batch.needs_sample] - 1
    return StepInputs(
        token_slots=np.repeat(batch.slots, batch.query_lens),
        positions=indices - np.repeat(query_starts[:-1] - batch.start_pos, batch.query_lens),
        slots=batch.slots,
        kv_lens=batch.start_pos + batch.query_lens,
        query_starts=query_starts,
        logits_indices=np.concatenate([sampling, _scored_tokens(batch, query_starts)]),
        sampling_slots=batch.slots[batch.needs_sample],
    )


def no_inputs() -> StepInputs[Int32Array]:
    """Return the inputs of a step without rows."""
    empty = np.empty(0, dtype=np.int32)
    return StepInputs(
        token_slots=empty,
        positions=empty,
        slots=empty,
        kv_lens=empty,
        query_starts=np.zeros(1, dtype=np.int32),
        logits_indices=empty,
        sampling_slots=empty,
    )


def _scored_tokens(batch: Batch, query_starts: Int32Array) -> Int32Array:
    """Return the indices of the step's tokens that score the next token of the prompt."""
    if batch.logprobs is None:
        return np.empty(0, dtype=np.int32)
    counts = batch.logprobs.prompt_lens
    before = np.cumsum(counts) - counts
    return np.arange(int(counts.sum()), dtype=np.int32) + np.repeat(query_starts[:-1] - before, counts).astype(np.int32)


def pad_inputs(
    host: StepInputs[Int32Array], tokens: int, rows: int, scratch_slot: int, max_seq_len: int
) -> StepInputs[Int32Array]:
    """Pad the inputs to `tokens` tokens in `rows` + 1 rows, for a graph of that size.

    A graph computes all its tokens, so padding tokens need finite K and V to attend to: all are at position 0 of the
    scratch slot, in one row after the others. Rows between the step's own and that row have no token.
    """
    missing, empty = tokens - len(host.token_slots), rows - len(host.slots)
    return host._replace(
        token_slots=_extended(host.token_slots, missing, scratch_slot),
        positions=_extended(host.positions, missing, 0),
        slots=_extended(host.slots, empty + 1, scratch_slot),
        kv_lens=_extended(_extended(host.kv_lens, empty, 0), 1, min(missing, max_seq_len)),
        query_starts=_extended(_extended(host.query_starts, empty, len(host.token_slots)), 1, tokens),
    )


def _extended(array: Int32Array, count: int, value: int) -> Int32Array:
    return np.concatenate([array, np.full(count, value, dtype=np.int32)])


def upload_inputs(host: StepInputs[Int32Array], device: torch.device) -> StepInputs[Tensor]:
    """Copy the inputs to the device in one transfer."""
    return views_like(upload(np.concatenate(host), device), host)


def views_like(packed: Tensor, host: StepInputs[Int32Array]) -> StepInputs[Tensor]:
    """Return the parts of a packed tensor as views, with the lengths of the host's arrays."""
    lengths = [len(array) for array in host]
    return StepInputs(*torch.split(packed[: sum(lengths)], lengths))


def last_pages(batch: Batch, page_size: int) -> IndexArray:
    """Return the new pages in which rows end, [1, n]; with a windowed group [2, n], the second row its pages."""
    last = np.zeros(int(batch.slots.max()) + 1, dtype=np.int32)  # by slot: index of the row's last page
    last[batch.slots] = (batch.start_pos + batch.query_lens - 1) // page_size
    new = batch.new_pages  # [n, 3 or 4]: slot, index in its row, page, windowed page
    return new[new[:, 1] == last[new[:, 0]], 2:].T.astype(np.intp)
