"""Attention of a layer without K and V of its own: its queries attend to those of an earlier layer (Gemma 4 E2B, E4B).

That layer has the same heads, window and rope, and has stored the step's own tokens already.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.distributed import TPGroup
from minisgl.distributed.group import Summed
from minisgl.kernel.base import Norm
from minisgl.kernel.torch_ops import rotate
from minisgl.layers.layer_config import AttentionConfig, NormConfig
from minisgl.layers.linear import ColumnParallelLinear, Part, RowParallelLinear
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import Rotary, paired_rows


class SharedKVAttention(nn.Module):
    """attention(norm(x)): [T, hidden_size] -> [T, hidden_size], over the pages of layer `config.kv_of`.

    A rank has an even share of the query heads.
    """

    def __init__(
        self,
        config: AttentionConfig,
        layer: int,
        hidden_size: int,
        rotary: Rotary,
        norm: NormConfig,
        *,
        tp: TPGroup,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        if config.kv_of is None:
            raise ValueError("a layer with K and V of its own is an Attention")
        self.layer, self.kv_of = layer, config.kv_of
        self.rotary = rotary
        self.head_dim = dim = config.head_dim
        rows, share = config.num_heads * dim, config.heads_per_rank(tp.size) * dim
        kept = paired_rows([range(tp.rank * share, (tp.rank + 1) * share)], dim, config.rope)
        self.q_proj = ColumnParallelLinear(hidden_size, [Part("q_proj", rows, kept)], bias=config.qkv_bias, dtype=dtype)
        self.q_norm: RMSNorm | None = None
        if config.qk_norm == "head":
            self.q_norm = RMSNorm(dim, norm, dtype=dtype, kept=paired_rows([range(dim)], dim, config.rope))
        self.o_proj = RowParallelLinear(rows, hidden_size, bias=config.out_bias, tp=tp, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        norm: RMSNorm | None,
        ctx: ForwardContext,
        residual: Tensor | None = None,
        next_norm: Norm | None = None,
    ) -> Summed:
        """Attend to norm(x); the end is `RowParallelLinear.add`."""
        q = self.q_proj(x, norm).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None:
            q = self.q_norm(q, ctx)
        cos, sin = self.rotary.cos_sin[ctx.positions].unsqueeze(1).chunk(2, dim=-1)
        attended = ctx.attention[self.layer].forward(self.kv_of, rotate(q, cos, sin), ctx.kv)
        return self.o_proj.add(attended.flatten(1), residual, next_norm)
