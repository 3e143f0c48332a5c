"""FlashAttention 2 (Dao, 2023) with variable lengths, as built into torch: bf16 and fp16 on 8.0 and later, no toolkit.

Keys and values must be contiguous, so in every layer the tokens that a step sees are copied from their pages, for
several rows together up to `_MAX_KEYS` tokens. The kernel supports query heads that share KV heads, so neither scores
nor repeated heads are stored. A prefill's products take far longer than the copy.

Block tables, which torch has from 2.13 on, would avoid the copy, but FlashAttention 2 needs pages of at least 256
tokens for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.attention.backends.torch_backend import read_pages
from minisgl.attention.base import AttentionInputs, AttentionSpec, add_sinks, shorter_window, window_left
from minisgl.core import Int32Array
from minisgl.kvcache.kv_pool import KVPool

_MAX_KEYS = 1 << 16  # tokens copied at a time, unless one row alone has more


@dataclass(frozen=True, slots=True)
class VarlenGroup:
    """Consecutive rows that attend in one call: T queries, K keys."""

    tokens: slice  # part of the step's queries
    query_starts: Tensor  # [rows + 1] int32: prefix sums
    key_starts: Tensor  # [rows + 1] int32: prefix sums
    max_query_len: int
    max_key_len: int
    kv_indices: Tensor  # [K] int32: index of each key in the pool, page * page_size + offset


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """Implements attention.base.AttentionPlan; copies are in the queries' dtype."""

    groups: list[VarlenGroup]
    window: int | None
    scale: float

    def forward(self, layer: int, q: Tensor, kv: KVPool, sinks: Tensor | None = None) -> Tensor:
        keys, values = kv.keys(layer).flatten(0, 1), kv.values(layer).flatten(0, 1)
        parts = []
        for group in self.groups:
            k, v = (read_pages(pool, group.kv_indices).to(q.dtype) for pool in (keys, values))
            attended, lse = _attend(q[group.tokens], k, v, group, self.window, self.scale)
            parts.append(attended if sinks is None else add_sinks(attended, lse.t(), sinks))
        return torch.cat(parts) if len(parts) > 1 else parts[0]


class VarlenAttention:
    """Implements attention.base.AttentionBackend for any page size."""

    graph_safe = False  # how much is copied depends on the lengths
    prefill_graph_safe = False
    upcasts = False
    reads_whole_pages = False

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec

    def plan(self, inputs: AttentionInputs) -> VarlenPlan:
        window = shorter_window(self._spec.window, inputs)
        return VarlenPlan(list(self._groups(inputs, window)), window, self._spec.softmax_scale)

    def _groups(self, inputs: AttentionInputs, window: int | None) -> Iterator[VarlenGroup]:
        """Yield the step's rows in groups, each row with the keys that any of its queries sees."""
        query_lens, kv_lens, page_size = inputs.query_lens, inputs.kv_lens, self._spec.page_size
        key_lens = kv_lens if window is None else np.minimum(kv_lens, query_lens + (window - 1))
        ends = np.cumsum(query_lens)
        for rows in _split(query_lens, key_lens):
            query_starts = inputs.query_starts[rows.start : rows.stop + 1]
            kv_ends = inputs.kv_lens_device[rows]
            seen = kv_ends if window is None else torch.minimum(kv_ends, query_starts.diff() + (window - 1))
            key_ends = seen.cumsum(0, dtype=torch.int32)
            total = int(key_lens[rows].sum())
            row = torch.repeat_interleave(torch.arange(len(seen), device=seen.device), seen, output_size=total)
            positions = torch.arange(total, dtype=torch.int32, device=seen.device) + (kv_ends - key_ends)[row]
            pages = inputs.page_table[rows][row, positions // page_size]
            yield VarlenGroup(
                tokens=slice(int(ends[rows.start] - query_lens[rows.start]), int(ends[rows.stop - 1])),
                query_starts=query_starts - query_starts[0],
                key_starts=F.pad(key_ends, (1, 0)),
                max_query_len=int(query_lens[rows].max()),
                max_key_len=int(key_lens[rows].max()),
                kv_indices=pages * page_size + positions % page_size,
            )


def _split(query_lens: Int32Array, key_lens: Int32Array) -> Iterator[slice]:
    """Yield rows in order, in groups of up to `_MAX_KEYS` keys.

    Decodes and prefills are in different groups, because the kernel's launch is as large as the number of rows times
    the longest query.
    """
    first = keys = 0
    for row, (queries, length) in enumerate(zip(query_lens.tolist(), key_lens.tolist(), strict=True)):
        if row > first and (keys + length > _MAX_KEYS or (queries == 1) != (query_lens[row - 1] == 1)):
            yield slice(first, row)
            first, keys = row, 0
        keys += length
    yield slice(first, len(query_lens))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, group: VarlenGroup, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend with q [T, heads, d] to k and v [K, kv_heads, d]; a row's last query sees its last key.

    Return [T, heads, d] and the scores' log-sum-exp [heads, T] float32.
    torch.nn.attention.varlen is a wrapper of this operation whose arguments differ between torch 2.11 and 2.13.
    """
    attended, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        group.query_starts,
        group.key_starts,
        group.max_query_len,
        group.max_key_len,
        0.0,  # dropout
        window is None,  # causal
        False,  # no debug mask
        scale=scale,
        window_size_left=window_left(window),
        window_size_right=0,
    )
    return attended, lse
