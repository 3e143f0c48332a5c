"""FlashAttention 3 (Shah et al., 2024) on the paged pool, as packaged in sgl_kernel: Ampere to Hopper, bf16 and fp16.

One call serves prefill, decode and mixed batches: queries of variable length against page tables. How the work is
split over the GPU is worked out on the device, once a step instead of in every layer.

From a pool of 8 bits it reads copies in 16: FlashAttention's own products of 8 bits would round q and the softmax too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from sgl_kernel.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata
from torch import Tensor

from minisgl.attention.base import AttentionInputs, AttentionPlan, AttentionShape, Unprepared, window_left
from minisgl.attention.widen import SeenPages, Widener
from minisgl.kvcache.pool import KVPool

# Rows x longest query up to which a row's keys may be divided among multiprocessors: the launch that merges the parts
# is as large as this, however few of its blocks have work.
_MAX_MERGED = 2048


@dataclass(frozen=True, slots=True)
class Fa3Plan:
    """Schedules are made when the first layer of their window asks."""

    inputs: AttentionInputs
    max_query_len: int
    num_splits: int  # of a row's keys; 0: as FlashAttention decides
    seen: SeenPages | None  # where K and V have to be widened
    schedules: dict[int | None, Tensor] = field(default_factory=dict)


class FlashAttention3:
    """Implements attention.base.AttentionBackend. Planning costs the host nothing."""

    graph_safe = True
    prefill_graph_safe = True

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._shape = shape
        self._widener = Widener(shape, device) if shape.fp8_kv else None

    @property
    def widens(self) -> bool:
        return self._widener is not None

    def plan(self, inputs: AttentionInputs) -> Fa3Plan:
        rows, longest = len(inputs.query_lens), int(inputs.query_lens.max())
        num_splits = 1 if longest > 1 and rows * longest > _MAX_MERGED else 0
        return Fa3Plan(inputs, longest, num_splits, self._widener.find_pages(inputs) if self._widener else None)

    def graphed_decode(self, rows: int) -> Unprepared:  # noqa: ARG002
        return Unprepared(self)

    def forward(self, layer: int, q: Tensor, kv: KVPool, plan: AttentionPlan, window: int | None = None) -> Tensor:
        assert isinstance(plan, Fa3Plan)
        inputs = plan.inputs
        if window not in plan.schedules:
            plan.schedules[window] = self._schedule(plan, window)
        keys, values = kv.keys(layer), kv.values(layer)
        if self._widener is not None and plan.seen is not None:
            keys, values = self._widener.widen(layer, kv, plan.seen)
        out: Tensor = flash_attn_with_kvcache(
            q,
            keys,
            values,
            cache_seqlens=inputs.kv_lens_device,
            page_table=inputs.page_table,
            cu_seqlens_q=inputs.query_starts,
            max_seqlen_q=plan.max_query_len,
            softmax_scale=self._shape.scale,
            causal=True,
            window_size=(window_left(window), 0),
            num_splits=plan.num_splits,
            scheduler_metadata=plan.schedules[window],
        )
        return out

    def _schedule(self, plan: Fa3Plan, window: int | None) -> Tensor:
        """int32, on the device. Its arguments must be what `forward` passes for the same step."""
        shape, inputs = self._shape, plan.inputs
        schedule: Tensor = get_scheduler_metadata(
            batch_size=len(inputs.query_lens),
            max_seqlen_q=plan.max_query_len,
            max_seqlen_k=inputs.page_table.shape[1] * shape.page_size,
            num_heads=shape.num_heads,
            num_heads_k=shape.num_kv_heads,
            headdim=shape.head_dim,
            cache_seqlens=inputs.kv_lens_device,
            qkv_dtype=shape.dtype,
            cu_seqlens_q=inputs.query_starts,
            page_size=shape.page_size,
            causal=True,
            window_size=(window_left(window), 0),
            num_splits=plan.num_splits,
        )
        return schedule
