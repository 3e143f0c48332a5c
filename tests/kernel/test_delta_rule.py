"""Gated DeltaNet in chunks and in single steps against the recurrence in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl.kernel.delta_net import delta_rule
from minisgl.kernel.delta_net.recurrent_rows import captured_rows, recurrent_rows
from support.delta_net import by_the_book, make_layer, projection


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [5, 1, 9, 1], [130, 3, 64, 2], [17]], ids=str)
def test_rows_in_chunks_and_steps_are_the_recurrence(query_lens: list[int]) -> None:
    """New and continued rows, in slots out of order; all other slots keep their state."""
    torch.manual_seed(sum(query_lens))
    layer = make_layer(2, 6, 8, 12, slots=7, dtype=torch.float32, device="cpu")
    want, slots = layer.copy(), [5, 0, 3, 6][: len(query_lens)]
    starts = [4, 0, 77, 0][: len(query_lens)]
    projected = projection(layer.heads, sum(query_lens), torch.float32, "cpu")
    positions = torch.cat([start + torch.arange(length) for start, length in zip(starts, query_lens, strict=True)])
    lens = np.array(query_lens, dtype=np.int32)
    rows = recurrent_rows(lens, torch.tensor(slots), positions, 3, torch.from_numpy)
    out = torch.empty(len(projected), 6 * 12)
    if rows.single is not None:
        tokens = slice(None) if rows.single.tokens is None else rows.single.tokens
        out[tokens] = delta_rule.step(projected[tokens], layer.heads, layer.inputs, layer.memory, rows.single)
    if rows.chunked is not None:
        tokens = rows.chunked.tokens
        out[tokens] = delta_rule.chunks(projected[tokens], layer.heads, layer.inputs, layer.memory, rows.chunked)
    parts = projected.split(query_lens)
    book = torch.cat(
        [
            by_the_book(part, want, slot, fresh=start == 0)
            for part, slot, start in zip(parts, slots, starts, strict=True)
        ]
    )
    torch.testing.assert_close(out.double(), book, rtol=1e-4, atol=1e-5)
    assert torch.equal(layer.inputs, want.inputs)
    torch.testing.assert_close(layer.memory, want.memory, rtol=1e-4, atol=1e-5)


def test_layout_of_the_example() -> None:
    """Rows of 5, 1 and 20 tokens in chunks of 32: the longest row comes first."""
    lens = np.array([5, 1, 20], dtype=np.int32)
    rows = recurrent_rows(lens, torch.tensor([7, 8, 9]), torch.arange(26), 3, torch.from_numpy)
    assert rows.single is not None
    assert rows.chunked is not None
    assert (rows.single.slots.tolist(), rows.single.tokens.tolist()) == ([8], [5])  # type: ignore[union-attr]
    chunked = rows.chunked
    assert chunked.padded is not None
    assert (chunked.slots.tolist(), chunked.positions.tolist()) == ([9, 7], [6, 0])
    assert (chunked.padded.size, chunked.padded.active) == (32, (2,))
    assert chunked.padded.indices.tolist() == [*range(20), *range(32, 37)]
    assert chunked.padded.before.tolist() == [[0, 1, 2], [23, 24, 25]]
    assert chunked.padded.last.tolist() == [[20, 21, 22], [28, 29, 30]]


def test_layout_of_lengths_on_the_device() -> None:
    """Rows of 130, 1, 64, 2 and 0 tokens, and a padding row: the chunks after theirs belong to no row."""
    lens = np.array([130, 1, 64, 2, 0, 11], dtype=np.int32)
    starts = torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)
    rows = captured_rows(starts, torch.arange(6) + 7, torch.arange(208) + 1000)
    single, chunked = rows.single, rows.chunked
    assert single is not None
    assert chunked is not None
    assert single.lengths is not None
    assert single.tokens is not None
    assert (single.lengths[0], single.slots[0], single.tokens[0]) == (1, 8, 130)
    assert 1 not in single.lengths[1:]
    assert chunked.lengths.tolist() == [130, 64, 11, 2, 0, 0]
    assert chunked.slots.tolist()[:4] == [7, 9, 12, 10]
    assert chunked.begins.tolist()[:4] == [0, 131, 197, 195]
    assert chunked.positions.tolist()[:4] == [1000, 1131, 1197, 1195]
    chunks = list(zip(chunked.chunk_rows.tolist(), chunked.chunk_firsts.tolist(), strict=True))
    assert chunks[:6] == [(0, 0), (0, 64), (0, 128), (1, 0), (2, 0), (3, 0)]
    assert all(first >= chunked.lengths[row] for row, first in chunks[6:])
