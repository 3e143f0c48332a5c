"""Grouped-query attention with rotary positions over the paged KV pool."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.distributed.group import TPGroup
from minisgl.kernel.base import Heads
from minisgl.layers.layer_config import AttentionConfig
from minisgl.layers.linear import ColumnParallelLinear, Part, RowParallelLinear
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import Rotary


class Attention(nn.Module):
    """attention(norm(x)): [T, hidden_size] -> [T, hidden_size].

    A rank has an even share of the query heads and the KV heads behind it.
    """

    def __init__(
        self,
        config: AttentionConfig,
        layer: int,
        hidden_size: int,
        rotary: Rotary,
        make_norm: Callable[[int], RMSNorm],
        *,
        tp: TPGroup,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.rotary = rotary
        self.window = config.window
        self.num_heads = config.heads_per_rank(tp.size)
        self.num_kv_heads = config.kv_heads_per_rank(tp.size)
        dim = config.head_dim
        kept = [range(head * dim, (head + 1) * dim) for head in config.kv_heads_of(tp.rank, tp.size)]
        self.qkv_proj = ColumnParallelLinear(
            hidden_size,
            [
                Part.even("q_proj", config.num_heads * dim, tp),
                Part("k_proj", config.num_kv_heads * dim, kept),
                Part("v_proj", config.num_kv_heads * dim, kept),
            ],
            bias=config.qkv_bias,
            dtype=dtype,
        )
        self.q_norm = make_norm(dim) if config.qk_norm else None
        self.k_norm = make_norm(dim) if config.qk_norm else None
        self.o_proj = RowParallelLinear(config.num_heads * dim, hidden_size, bias=config.out_bias, tp=tp, dtype=dtype)

    def forward(self, x: Tensor, norm: RMSNorm, ctx: ForwardContext, residual: Tensor | None = None) -> Tensor:
        """Attend to norm(x), plus `residual`."""
        heads = Heads(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            cos_sin=self.rotary.cos_sin,
            q_norm=self.q_norm.params if self.q_norm else None,
            k_norm=self.k_norm.params if self.k_norm else None,
        )
        keys, values = ctx.kv.keys(self.layer), ctx.kv.values(self.layer)
        qkv = self.qkv_proj(x, norm, ctx)
        if ctx.fused is not None:
            attended = ctx.fused.forward(qkv, heads, keys, values, self.window)
        else:
            q = ctx.ops.norm_rope_store(qkv, heads, ctx.positions, ctx.out_cache_loc, keys, values)
            attended = ctx.attention.forward(self.layer, q, ctx.kv, ctx.plan, self.window)
        y: Tensor = self.o_proj(attended.flatten(1), ctx, residual)
        return y
