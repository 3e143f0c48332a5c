"""Layout of a step's rows for recurrent layers: rows of one token form one group, longer rows are cut into chunks.

A row of one token is one step of the recurrence. Longer rows are laid out in chunks of equal size, and the last chunk
of a row is padded, so that all chunks can be computed in the same products. Chunks depend on each other only within a
row. They are ordered by their index in the row: chunk 0 of all rows, then chunk 1 of all rows, and so on. The longest
rows come first, so the rows that have a chunk i are always the first ones. For example, take rows of 5, 1 and 9 tokens
and chunks of 4. The second row is a single step. The chunks 0 are 4 tokens of the row of 9 and 4 of the row of 5, the
chunks 1 are 4 tokens and 1 token, and chunk 2 is the last token of the row of 9.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK = 64  # tokens: a larger chunk has more products (its length squared), a smaller one makes more dependent chunks
_SMALLEST = 16  # tokens of a chunk in torch, where all rows are short


@dataclass(frozen=True, slots=True)
class SingleRows:
    """Rows of one token."""

    slots: Tensor  # [R] int64
    positions: Tensor  # [R] int64; a token at position 0 begins with a state of zeros
    tokens: Tensor | None = None  # [R] int64: index of each row's token in the step; None: row i has token i
    # [R] int64: in a CUDA graph rows of other lengths than 1 follow; None: there are none
    lengths: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PaddedChunks:
    """Chunks of equal size of all rows, the longest row first, as products of torch take them."""

    indices: Tensor  # [n] int64: index of each token in [chunks * size]
    size: int  # tokens of a chunk
    active: tuple[int, ...]  # number of rows that have a chunk 0, 1, ...: their sum is the number of chunks
    extended: Tensor  # [n] int64: index of each token among the rows' tokens with `history` inputs before each row
    before: Tensor  # [R, history] int64: indices of these inputs there
    last: Tensor  # [R, history] int64: indices of the inputs that the next step finds before the row


@dataclass(frozen=True, slots=True)
class ChunkedRows:
    """Rows of several tokens, R of them with n tokens in all, the longest first."""

    slots: Tensor  # [R] int64
    positions: Tensor  # [R] int64: of each row's first token; at 0 it begins with a state of zeros
    begins: Tensor  # [R] int64: of each row's first token in the step
    lengths: Tensor  # [R] int64; in a CUDA graph there may be rows of length 0, the last ones
    tokens: Tensor  # [n] int64: of the step's T tokens, row after row
    chunk_rows: Tensor  # [chunks] int64: of each chunk of CHUNK tokens, its row
    chunk_firsts: Tensor  # [chunks] int64: of each chunk, its first token in the row; no chunk begins after its end
    padded: PaddedChunks | None  # None in a CUDA graph


@dataclass(frozen=True, slots=True)
class RecurrentRows:
    """All rows of a step."""

    single: SingleRows | None
    chunked: ChunkedRows | None = None


def recurrent_rows(
    query_lens: NDArray[np.int32],
    slots: Tensor,
    positions: Tensor,
    history: int,
    upload: Callable[[NDArray[np.int64]], Tensor],
) -> RecurrentRows:
    """Return the layout of rows of `query_lens` [rows] tokens in `slots` [rows] int64, at positions [T] int64.

    `history`: number of inputs before a token that a convolution reads. `upload` copies to the device.
    """
    if int(query_lens.max()) == 1:
        return RecurrentRows(SingleRows(slots, positions))
    starts = np.cumsum(query_lens, dtype=np.int64) - query_lens
    alone, long = np.flatnonzero(query_lens == 1), np.flatnonzero(query_lens > 1)
    long = long[np.argsort(-query_lens[long], kind="stable")]
    lengths = query_lens[long].astype(np.int64)
    size = min(CHUNK, max(_SMALLEST, 1 << int(lengths[0] - 1).bit_length()))
    active = [int((lengths > first).sum()) for first in range(0, int(lengths[0]), size)]
    first_chunks = np.cumsum(active) - active
    row = np.repeat(np.arange(len(long)), lengths)
    within = np.arange(len(row)) - (np.cumsum(lengths) - lengths)[row]  # place of each token in its row
    extended, before, last = _extended_indices(lengths, row, history)
    device = _upload_together(
        {
            "alone_rows": alone,
            "alone_tokens": starts[alone],
            "long_rows": long,
            "begins": starts[long],
            "lengths": lengths,
            "tokens": starts[long][row] + within,
            "chunk_rows": np.concatenate([np.arange(count) for count in active]),
            "chunk_firsts": np.repeat(np.arange(len(active)) * size, active),
            "indices": (first_chunks[within // size] + row) * size + within % size,
            "extended": extended,
            "before": before,
            "last": last,
        },
        upload,
    )
    chunked = ChunkedRows(
        slots=slots[device["long_rows"]],
        positions=positions[device["begins"]],
        begins=device["begins"],
        lengths=device["lengths"],
        tokens=device["tokens"],
        chunk_rows=device["chunk_rows"],
        chunk_firsts=device["chunk_firsts"],
        padded=PaddedChunks(
            indices=device["indices"],
            size=size,
            active=tuple(active),
            extended=device["extended"],
            before=device["before"].view(-1, history),
            last=device["last"].view(-1, history),
        ),
    )
    if not len(alone):
        return RecurrentRows(None, chunked)
    tokens = device["alone_tokens"]
    return RecurrentRows(SingleRows(slots[device["alone_rows"]], positions[tokens], tokens), chunked)


def _extended_indices(
    lengths: NDArray[np.int64], row: NDArray[np.int64], history: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return `extended`, `before` and `last` of PaddedChunks, flat, for rows of `lengths` [R] tokens, at least 1.

    `row` [n]: row of each token.
    """
    ends, inputs, shift = np.cumsum(lengths), np.arange(history), history * np.arange(len(lengths))
    return (
        np.arange(len(row)) + history + shift[row],
        ((ends - lengths + shift)[:, None] + inputs).ravel(),
        ((ends + shift)[:, None] + inputs).ravel(),
    )


def _upload_together(
    arrays: Mapping[str, NDArray[np.int64]], upload: Callable[[NDArray[np.int64]], Tensor]
) -> dict[str, Tensor]:
    """Copy arrays to the device in one transfer."""
    packed = upload(np.concatenate([*arrays.values()]).astype(np.int64, copy=False))
    return dict(zip(arrays, torch.split(packed, [len(array) for array in arrays.values()]), strict=True))


def captured_rows(query_starts: Tensor, slots: Tensor, positions: Tensor) -> RecurrentRows:
    """Return the layout of rows whose lengths only the device knows, so that one CUDA graph serves all lengths.

    Row r of `slots` [R] int64 has the tokens from query_starts[r] to query_starts[r + 1], [R + 1] int32, or none.
    There is room for as many chunks as T tokens in R rows could need.
    """
    rows, num_tokens = len(slots), len(positions)
    starts = query_starts.long()
    begins, lengths = starts[:-1], starts.diff()
    first_positions = positions[begins.clamp(max=num_tokens - 1)]  # an empty row may begin after the last token
    alone = (lengths == 1).long().argsort(descending=True)
    long, order = lengths.masked_fill(lengths == 1, 0).sort(descending=True)
    counts = (long + CHUNK - 1) // CHUNK
    ends = counts.cumsum(0)
    numbers = torch.arange(num_tokens // CHUNK + min(rows, num_tokens // 2), device=slots.device)
    chunk_rows = torch.searchsorted(ends, numbers, right=True).clamp_(max=rows - 1)
    return RecurrentRows(
        SingleRows(slots[alone], first_positions[alone], begins[alone], lengths[alone]),
        ChunkedRows(
            slots=slots[order],
            positions=first_positions[order],
            begins=begins[order],
            lengths=long,
            tokens=torch.arange(num_tokens, device=slots.device),
            chunk_rows=chunk_rows,
            chunk_firsts=(numbers - (ends - counts)[chunk_rows]) * CHUNK,
            padded=None,
        ),
    )
