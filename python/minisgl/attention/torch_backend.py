"""Attention in plain torch on any device: the oracle of the other backends, and the CPU's own.

Rows of one query are gathered from their pages and attend together, those of similar length in one call; rows of
more queries (prefill chunks) attend one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.attention.base import AttentionInputs, AttentionPlan
from minisgl.core import Int32Array
from minisgl.kvcache.pool import KVPool


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """R rows of one query each, padded to the longest of them, L."""

    tokens: Tensor | None  # [R] int64: where their queries stand in the step; None if they are the whole step
    kv_slots: Tensor  # [R, L] int64
    mask: Tensor  # [R, 1, 1, L] bool: true within the row's length


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row of several queries, the last of its L positions."""

    tokens: slice  # its queries
    kv_slots: Tensor  # [L] int64
    mask: Tensor | None  # [queries, L] bool; None where the row starts at position 0 and plain causal holds


@dataclass(frozen=True, slots=True)
class TorchPlan:
    groups: list[DecodeGroup]
    rows: list[PrefillRow]


class TorchAttention:
    """Implements attention.base.AttentionBackend for any page size, head size and mix of rows."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def plan(self, inputs: AttentionInputs) -> TorchPlan:
        first = np.cumsum(inputs.query_lens) - inputs.query_lens
        decode = np.flatnonzero(inputs.query_lens == 1).astype(np.int32)
        prefill = np.flatnonzero(inputs.query_lens > 1)
        return TorchPlan(
            groups=[self._group(inputs, first, rows) for rows in _similar_lengths(decode, inputs.kv_lens[decode])],
            rows=[self._row(inputs, int(first[row]), int(row)) for row in prefill],
        )

    def forward(self, layer: int, q: Tensor, kv: KVPool, plan: AttentionPlan) -> Tensor:
        assert isinstance(plan, TorchPlan)
        keys, values = kv.keys(layer).flatten(0, 1), kv.values(layer).flatten(0, 1)
        if len(plan.groups) == 1 and plan.groups[0].tokens is None:
            return _decode(q, keys, values, plan.groups[0])
        out = torch.empty_like(q)
        for group in plan.groups:
            assert group.tokens is not None
            out[group.tokens] = _decode(q[group.tokens], keys, values, group)
        for row in plan.rows:
            out[row.tokens] = _prefill(q[row.tokens], keys, values, row)
        return out

    def _group(self, inputs: AttentionInputs, first: Int32Array, rows: Int32Array) -> DecodeGroup:
        device = inputs.page_table.device
        table, lengths, tokens = inputs.page_table, inputs.kv_lens_device, None
        if len(rows) < len(inputs.query_lens):
            picked = torch.from_numpy(rows).to(device)
            table, lengths = table[picked], lengths[picked]
            tokens = torch.from_numpy(first[rows]).to(device)
        positions = torch.arange(int(inputs.kv_lens[rows].max()), device=device)
        mask = positions < lengths.unsqueeze(1)
        # Beyond a row's length its page table may hold anything: read some existing slot, masked.
        return DecodeGroup(tokens, self._slots(table, positions) * mask, mask[:, None, None, :])

    def _row(self, inputs: AttentionInputs, first: int, row: int) -> PrefillRow:
        device = inputs.page_table.device
        queries, length = int(inputs.query_lens[row]), int(inputs.kv_lens[row])
        positions = torch.arange(length, device=device)
        mask = None if queries == length else positions <= positions[length - queries :].unsqueeze(1)
        return PrefillRow(slice(first, first + queries), self._slots(inputs.page_table[row], positions), mask)

    def _slots(self, page_table: Tensor, positions: Tensor) -> Tensor:
        """page_table [..., pages] and positions [L] -> the places in the flattened pool, [..., L] int64."""
        pages = page_table[..., positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size


def _similar_lengths(rows: Int32Array, lengths: Int32Array) -> Iterator[Int32Array]:
    """Split rows so that none is padded to more than about twice its length; few short rows are not worth it."""
    if len(rows) == 0:
        return
    longest = int(lengths.max())
    if longest * len(rows) <= 2 * int(lengths.sum()):
        yield rows
        return
    short = lengths * 2 <= longest
    yield rows[~short]
    yield from _similar_lengths(rows[short], lengths[short])


def _gather(pool: Tensor, kv_slots: Tensor) -> Tensor:
    """pool[kv_slots], which on a CPU is several times slower than index_select."""
    return pool.index_select(0, kv_slots.flatten()).view(*kv_slots.shape, *pool.shape[1:])


def _decode(q: Tensor, keys: Tensor, values: Tensor, group: DecodeGroup) -> Tensor:
    """q [R, heads, d] over keys and values [slots, kv_heads, d] -> [R, heads, d]."""
    k = _gather(keys, group.kv_slots).transpose(1, 2)
    v = _gather(values, group.kv_slots).transpose(1, 2)
    # The query heads that share a KV head stand as so many queries of it: nothing is repeated.
    grouped = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[2])
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=group.mask).reshape(q.shape)


def _prefill(q: Tensor, keys: Tensor, values: Tensor, row: PrefillRow) -> Tensor:
    """q [queries, heads, d] -> [queries, heads, d]."""
    k = _gather(keys, row.kv_slots).transpose(0, 1).unsqueeze(0)
    v = _gather(values, row.kv_slots).transpose(0, 1).unsqueeze(0)
    y = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0), k, v, attn_mask=row.mask, is_causal=row.mask is None, enable_gqa=True
    )
    return y.squeeze(0).transpose(0, 1)
