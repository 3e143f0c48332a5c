"""Multi-head latent attention (DeepSeek V2, 2024) over the paged pool.

A head's key is W_k c and its value W_v c, of the token's latent c alone. So q @ (W_k c) = (W_k^T q) @ c: with W_k
absorbed by the query, and W_v by the output, all heads attend to the same cached rows, as in multi-query attention.
Where many queries share their keys, a backend may expand keys and values instead (`ExpandingPlan`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.distributed import TPGroup
from minisgl.distributed.group import Summed
from minisgl.kernel.base import LatentRows, Norm
from minisgl.layers.layer_config import AttentionConfig, LatentConfig, NormConfig
from minisgl.layers.linear import ColumnParallelLinear, Part, RowParallelLinear, empty
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import Rotary, paired_rows
from minisgl.layers.weight_slice import WeightSlice

if TYPE_CHECKING:
    from minisgl.attention.base import AttentionPlan

_EPS = 1e-6  # eps of the inner norms, independent of rms_norm_eps


class UpProjection(nn.Module):
    """Matrices of a rank's heads that make keys and values of a latent: [heads, nope_dim + value_dim, kv_rank]."""

    def __init__(self, config: LatentConfig, num_heads: int, tp: TPGroup, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads = num_heads
        share = num_heads // tp.size
        self.heads = range(tp.rank * share, (tp.rank + 1) * share)
        self.nope_dim = config.nope_dim
        self.weight = empty(share, config.nope_dim + config.value_dim, config.kv_rank, dtype=dtype)

    @property
    def keys(self) -> Tensor:
        """[heads, nope_dim, kv_rank]"""
        return self.weight[:, : self.nope_dim]

    @property
    def values(self) -> Tensor:
        """[heads, value_dim, kv_rank]"""
        return self.weight[:, self.nope_dim :]

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        _, rows, rank = self.weight.shape
        for index, head in enumerate(self.heads):
            kept = slice(head * rows, (head + 1) * rows)
            yield WeightSlice(f"{name}.weight", (self.num_heads * rows, rank), (kept, slice(None)), self.weight[index])


class LatentAttention(nn.Module):
    """attention(norm(x)): [T, hidden_size] -> [T, hidden_size].

    A rank has an even share of the heads; latents, and what is cached of them, are the same on every rank.
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
        if config.latent is None:
            raise ValueError("the layer's attention is not latent")
        self.config = latent = config.latent
        self.layer = layer
        self.rotary = rotary
        self.num_heads = config.heads_per_rank(tp.size)
        inner_norm = NormConfig(_EPS, float32=norm.float32)
        q_size, nope = latent.nope_dim + latent.rope_dim, latent.nope_dim
        heads = range(tp.rank * self.num_heads * q_size, (tp.rank + 1) * self.num_heads * q_size, q_size)
        # All heads' dimensions without a rope, then all of those with one.
        q_kept = [range(start, start + nope) for start in heads]
        for start in heads:
            q_kept += paired_rows([range(start + nope, start + q_size)], latent.rope_dim, config.rope)
        row_size = latent.kv_rank + latent.rope_dim
        row_kept = [range(latent.kv_rank)]
        row_kept += paired_rows([range(latent.kv_rank, row_size)], latent.rope_dim, config.rope)
        q_rows, row = config.num_heads * q_size, Part("kv_a_proj_with_mqa", row_size, row_kept)
        self.q_b_proj: ColumnParallelLinear | None = None
        self.q_a_layernorm: RMSNorm | None = None
        if latent.q_rank is None:
            first = Part("q_proj", q_rows, q_kept)
        else:
            first = Part("q_a_proj", latent.q_rank, [range(latent.q_rank)])
            self.q_a_layernorm = RMSNorm(latent.q_rank, inner_norm, dtype=dtype)
            q_part = Part("q_b_proj", q_rows, q_kept)
            self.q_b_proj = ColumnParallelLinear(latent.q_rank, [q_part], bias=False, dtype=dtype)
        self.q_kv_a_proj = ColumnParallelLinear(hidden_size, [first, row], bias=False, dtype=dtype)
        self.kv_a_layernorm = RMSNorm(latent.kv_rank, inner_norm, dtype=dtype)
        self.kv_b_proj = UpProjection(latent, config.num_heads, tp, dtype=dtype)
        self.o_proj = RowParallelLinear(
            config.num_heads * latent.value_dim, hidden_size, bias=False, tp=tp, dtype=dtype
        )

    def forward(
        self,
        x: Tensor,
        norm: RMSNorm | None,
        ctx: ForwardContext,
        residual: Tensor | None = None,
        next_norm: Norm | None = None,
    ) -> Summed:
        """Attend to norm(x); the end is `RowParallelLinear.add`."""
        config, tokens, heads = self.config, len(x), self.num_heads
        projected: Tensor = self.q_kv_a_proj(x, norm)
        q, row = projected.tensor_split([-config.kv_rank - config.rope_dim], dim=-1)
        if self.q_b_proj is not None:
            q = self.q_b_proj(q.contiguous(), self.q_a_layernorm)
        q_nope, q_rope = q.tensor_split([heads * config.nope_dim], dim=-1)
        q_nope, q_rope = q_nope.view(tokens, heads, -1), q_rope.view(tokens, heads, -1)
        rows = LatentRows(
            row,
            self.kv_a_layernorm.params,
            self.rotary.cos_sin,
            ctx.positions,
            ctx.out_cache_loc,
            ctx.kv.keys(self.layer),
        )
        plan = ctx.expanding.get(self.layer)
        if plan is None:
            query = ctx.ops.latent_query(rows, q_nope, q_rope, self.kv_b_proj.keys)
            attended = self._values(query, ctx.attention[self.layer], ctx)
        else:
            ctx.ops.norm_rope_store_latent(rows, q_rope, rotated=q_rope)
            attended = x.new_empty(tokens, heads, config.value_dim)
            plan.forward_expanded(self.layer, q_nope, q_rope, self.kv_b_proj.weight, ctx.kv, attended)
            if (few := plan.absorbed) is not None:
                absorbed = torch.bmm(q_nope[few.tokens].transpose(0, 1), self.kv_b_proj.keys).transpose(0, 1)
                query = torch.cat((absorbed, q_rope[few.tokens]), dim=-1)
                attended[few.tokens] = self._values(query, few.plan, ctx)
        return self.o_proj.add(attended.flatten(1), residual, next_norm)

    def _values(self, query: Tensor, plan: AttentionPlan, ctx: ForwardContext) -> Tensor:
        """Attend to the latents with query [n, heads, kv_rank + rope_dim]; return [n, heads, value_dim]."""
        return ctx.ops.latent_values(plan.forward(self.layer, query, ctx.kv), self.kv_b_proj.values)
