"""Rows and keys of torch's variable-length attention, and the torch backend with few scores at a time; needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.attention.backends import varlen
from minisgl.attention.backends.torch_backend import TorchAttention
from minisgl.attention.backends.varlen import VarlenAttention, VarlenGroup
from minisgl.attention.base import AttentionInputs, AttentionSpec
from minisgl.core import Int32Array
from minisgl.kvcache.kv_pool import KVPool
from minisgl.kvcache.layout import KVLayout

CPU = torch.device("cpu")


class World:
    """Random rows over pages in any order; page-table entries after a row's length are wrong."""

    def __init__(self, page_size: int, query_lens: list[int], kv_lens: list[int]) -> None:
        rng = torch.Generator().manual_seed(0)
        self.query_lens, self.kv_lens = (np.array(lens, dtype=np.int32) for lens in (query_lens, kv_lens))
        width = -(-int(self.kv_lens.max()) // page_size) + 1
        self.spec = AttentionSpec(6, 2, 16, page_size, torch.float32)
        self.pool = KVPool(KVLayout(page_size, (self.spec.kv_stores(),)), len(kv_lens) * width, CPU)
        for stored in (self.pool.keys(0), self.pool.values(0)):
            stored.copy_(torch.randn(stored.shape, generator=rng))
        table = torch.randperm(len(kv_lens) * width, generator=rng).int().view(-1, width)
        for row, length in enumerate(kv_lens):
            table[row, -(-length // page_size) :] = 1 << 30
        self.inputs = AttentionInputs(
            query_lens=self.query_lens,
            kv_lens=self.kv_lens,
            query_starts=torch.from_numpy(_starts(self.query_lens)),
            kv_lens_device=torch.from_numpy(self.kv_lens),
            page_table=table,
        )
        self.q = torch.randn(int(self.query_lens.sum()), 6, 16, generator=rng)


def _starts(lengths: Int32Array) -> Int32Array:
    return np.concatenate([np.zeros(1, dtype=np.int32), np.cumsum(lengths, dtype=np.int32)])


def attend(
    q: Tensor, k: Tensor, v: Tensor, group: VarlenGroup, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute row by row what torch's kernel gives for a group, without the sums of its softmax that sinks need."""
    out = torch.empty_like(q)
    for row in range(len(group.query_starts) - 1):
        queries = slice(int(group.query_starts[row]), int(group.query_starts[row + 1]))
        seen = slice(int(group.key_starts[row]), int(group.key_starts[row + 1]))
        keys, values = (x[seen].repeat_interleave(3, dim=1) for x in (k, v))
        behind = torch.arange(seen.stop - seen.start) - (seen.stop - seen.start)
        ahead = behind - (torch.arange(queries.stop - queries.start) - (queries.stop - queries.start)).unsqueeze(1)
        scores = torch.einsum("qhd,khd->hqk", q[queries], keys) * scale
        hidden = (ahead > 0) if window is None else (ahead > 0) | (ahead <= -window)
        out[queries] = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
    return out, out.new_empty(0)


STEPS = [([1], [1]), ([5], [5]), ([7, 1, 1, 30, 2], [40, 9, 1, 30, 77]), ([1, 1, 1], [50, 3, 20]), ([33], [200])]


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize(("query_lens", "kv_lens"), STEPS)
@pytest.mark.parametrize("window", [None, 1, 6, 500])
def test_each_group_holds_the_keys_that_its_rows_see(
    page_size: int, query_lens: list[int], kv_lens: list[int], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(page_size, query_lens, kv_lens)
    monkeypatch.setattr(varlen, "_MAX_KEYS", 64)
    monkeypatch.setattr(varlen, "_attend", attend)  # the CPU's attention, because torch's varlen kernel needs a GPU
    spec = replace(world.spec, window=window)
    have, want = (
        backend.plan(world.inputs).forward(0, world.q, world.pool)
        for backend in (VarlenAttention(spec), TorchAttention(spec))
    )
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)


def test_keys_copied_at_a_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "_MAX_KEYS", 100)
    kv_lens = [40, 40, 40, 300, 5, 5, 60, 60]
    world = World(4, [1] * 8, kv_lens)
    groups = VarlenAttention(world.spec).plan(world.inputs).groups
    assert [len(group.kv_indices) for group in groups] == [80, 40, 300, 70, 60]  # one row alone may be longer
    assert [group.tokens for group in groups] == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 7), slice(7, 8)]
    windowed = VarlenAttention(replace(world.spec, window=10)).plan(world.inputs).groups
    assert [len(group.kv_indices) for group in windowed] == [70], "no more than the window is copied"


def test_decodes_stand_apart_from_prefills() -> None:
    """The kernel's launch is as large as its rows times the longest query."""
    world = World(4, [1, 1, 50, 60, 1], [9, 9, 50, 90, 9])
    groups = VarlenAttention(world.spec).plan(world.inputs).groups
    assert [(group.tokens.start, group.max_query_len) for group in groups] == [(0, 1), (2, 60), (112, 1)]


@pytest.mark.parametrize(("query_lens", "kv_lens"), STEPS)
@pytest.mark.parametrize("window", [None, 6])
def test_torch_attends_in_pieces_that_store_few_scores(
    query_lens: list[int], kv_lens: list[int], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(4, query_lens, kv_lens)
    spec = replace(world.spec, window=window)
    largest = 0
    plain = torch.nn.functional.scaled_dot_product_attention

    def counted(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        nonlocal largest
        largest = max(largest, q.shape[2] * k.shape[2] if q.shape[2] > 1 and q.shape[1] == 6 else 0)
        return plain(q, k, v, **options)

    have_functional = SimpleNamespace(scaled_dot_product_attention=counted)
    want = TorchAttention(spec).plan(world.inputs).forward(0, world.q, world.pool)
    monkeypatch.setattr("minisgl.attention.backends.torch_backend.F", have_functional)
    have = TorchAttention(spec, max_scores=120).plan(world.inputs).forward(0, world.q, world.pool)
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)
    assert largest <= 120
