"""Inputs of a step, against plain loops over its rows; padding adds tokens and rows and changes nothing else."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.core import Batch, ScoredTokens
from minisgl.engine.step_inputs import last_pages, no_inputs, pad_inputs, step_inputs, views_like

SCRATCH = 99
MAX_SEQ_LEN = 50
ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9), st.booleans()), min_size=1, max_size=6)


def batch_of(rows: list[tuple[int, int, bool]], scored: list[int] | None = None) -> Batch:
    start_pos, query_lens, needs_sample = (np.array(column) for column in zip(*rows, strict=True))
    nobody = np.empty(0, dtype=np.int32)
    return Batch(
        step=0,
        slots=np.arange(10, 10 + len(rows), dtype=np.int32)[::-1],
        start_pos=start_pos.astype(np.int32),
        query_lens=query_lens.astype(np.int32),
        needs_sample=needs_sample,
        new_pages=np.zeros((0, 3), dtype=np.int32),
        logprobs=None if scored is None else ScoredTokens(nobody, 0, np.array(scored, dtype=np.int32), 0),
    )


@settings(deadline=None)
@given(ROWS, st.data())
def test_rows_and_reads(rows: list[tuple[int, int, bool]], data: st.DataObject) -> None:
    scored = [data.draw(st.integers(0, length)) for _, length, _ in rows]
    batch = batch_of(rows, scored)
    host = step_inputs(batch)
    tokens = [
        (slot, start + i) for slot, (start, length, _) in zip(batch.slots, rows, strict=True) for i in range(length)
    ]
    assert list(zip(host.token_slots, host.positions, strict=True)) == tokens
    assert host.slots.tolist() == batch.slots.tolist()
    assert host.kv_lens.tolist() == [start + length for start, length, _ in rows]
    ends = host.query_starts[1:]
    assert [0, *np.cumsum([length for _, length, _ in rows])] == host.query_starts.tolist()
    sampling = [row for row, (_, _, samples) in enumerate(rows) if samples]
    firsts = [
        place
        for row, count in enumerate(scored)
        for place in range(host.query_starts[row], host.query_starts[row] + count)
    ]
    assert host.logits_indices.tolist() == [ends[row] - 1 for row in sampling] + firsts
    assert host.sampling_slots.tolist() == [batch.slots[row] for row in sampling]
    assert all(array.dtype == np.int32 for array in host)
    packed = torch.from_numpy(np.concatenate([*host, np.full(3, -1, dtype=np.int32)]))
    for view, array in zip(views_like(packed, host), host, strict=True):
        assert view.tolist() == array.tolist()


@settings(deadline=None)
@given(ROWS, st.integers(0, 70), st.integers(0, 5))
def test_padding_uses_scratch_slots(rows: list[tuple[int, int, bool]], more_tokens: int, more_rows: int) -> None:
    host = step_inputs(batch_of(rows))
    tokens, count = len(host.token_slots), len(rows)
    padded = pad_inputs(host, tokens + more_tokens, count + more_rows, SCRATCH, MAX_SEQ_LEN)
    for ours, before in zip(padded, host, strict=True):
        assert ours.dtype == np.int32
        assert ours[: len(before)].tolist() == before.tolist()
    assert padded.token_slots[tokens:].tolist() == [SCRATCH] * more_tokens
    assert padded.positions[tokens:].tolist() == [0] * more_tokens
    assert padded.slots[count:].tolist() == [SCRATCH] * (more_rows + 1)
    lengths = np.diff(padded.query_starts).tolist()
    assert lengths[count:] == [0] * more_rows + [more_tokens]
    assert padded.kv_lens[count:].tolist() == [0] * more_rows + [min(more_tokens, MAX_SEQ_LEN)]


def test_a_graph_is_captured_with_padding_alone() -> None:
    padded = pad_inputs(no_inputs(), 8, 3, SCRATCH, MAX_SEQ_LEN)
    assert [array.tolist() for array in padded] == [
        [SCRATCH] * 8,
        [0] * 8,
        [SCRATCH] * 4,
        [0, 0, 0, 8],
        [0, 0, 0, 0, 8],
        [],
        [],
    ]
    assert all(array.dtype == np.int32 for array in padded)


@settings(deadline=None)
@given(ROWS, st.integers(1, 5), st.booleans())
def test_the_last_page_of_each_row_that_is_new(
    rows: list[tuple[int, int, bool]], page_size: int, windowed: bool
) -> None:
    batch, new, expected = batch_of(rows), [], []
    for slot, (start, length, _) in zip(batch.slots.tolist(), rows, strict=True):
        last = (start + length - 1) // page_size
        for index in range(-(-start // page_size), last + 1):
            page = len(new)
            new.append([slot, index, 1000 + page, 2000 + page][: 4 if windowed else 3])
            expected += [new[-1][2:]] if index == last else []
    pages = np.array(new, dtype=np.int32).reshape(-1, 4 if windowed else 3)
    found = last_pages(msgspec.structs.replace(batch, new_pages=pages), page_size)
    assert found.T.tolist() == expected
