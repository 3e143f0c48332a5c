"""FlashAttention 3 (Shah et al., 2024) on the paged pool, as packaged in sgl_kernel: Hopper GPUs, bf16 and fp16.

One call serves prefill, decode and mixed batches: queries of variable length against page tables.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kernel.flash_attn import flash_attn_with_kvcache
from torch import Tensor

from minisgl.attention.base import AttentionInputs, AttentionPlan
from minisgl.kvcache.pool import KVPool


@dataclass(frozen=True, slots=True)
class Fa3Plan:
    inputs: AttentionInputs
    max_query_len: int


class FlashAttention3:
    """Implements attention.base.AttentionBackend. Planning costs the host nothing."""

    def plan(self, inputs: AttentionInputs) -> Fa3Plan:
        return Fa3Plan(inputs, int(inputs.query_lens.max()))

    def forward(self, layer: int, q: Tensor, kv: KVPool, plan: AttentionPlan, window: int | None = None) -> Tensor:
        assert isinstance(plan, Fa3Plan)
        out: Tensor = flash_attn_with_kvcache(
            q,
            kv.keys(layer),
            kv.values(layer),
            cache_seqlens=plan.inputs.kv_lens_device,
            page_table=plan.inputs.page_table,
            cu_seqlens_q=plan.inputs.query_starts,
            max_seqlen_q=plan.max_query_len,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
        )
        return out
