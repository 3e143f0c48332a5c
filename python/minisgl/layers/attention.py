"""Grouped-query attention with rotary positions over the paged KV pool."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.distributed import TPGroup
from minisgl.distributed.group import Summed
from minisgl.kernel.base import Heads, Norm
from minisgl.kernel.fp8_rows import Fp8Rows
from minisgl.layers.layer_config import AttentionConfig, NormConfig
from minisgl.layers.linear import ColumnParallelLinear, HeadParameter, Part, RowParallelLinear
from minisgl.layers.norm import ProjectionNorm, RMSNorm, params_of
from minisgl.layers.rotary import Rotary, paired_rows


def attend(
    layer: int, qkv: Tensor, heads: Heads, sinks: Tensor | None, ctx: ForwardContext, kv_of: int | None = None
) -> Tensor:
    """Store the tokens' k and v and attend with their q: qkv [T, rows of q, k and v] -> [T, heads, head_dim].

    `kv_of`: an earlier layer to whose K and V, stored already, q [T, rows of q] attends instead.
    """
    source = layer if kv_of is None else kv_of
    keys, values = ctx.kv.keys(source), ctx.kv.values(source)
    fused = ctx.fused.get(layer)
    if fused is not None:
        return fused.forward(qkv, heads, keys, values, sinks)
    q = ctx.ops.norm_rope_store(qkv, heads, ctx.positions, ctx.cache_loc(layer), keys, values)
    return ctx.attention[layer].forward(source, q, ctx.kv, sinks)


def attend_rounded(
    layer: int, qkv: Tensor, heads: Heads, sinks: Tensor | None, ctx: ForwardContext, kv_of: int | None = None
) -> Fp8Rows | None:
    """Do as `attend`, and round the rows [T, heads * head_dim] to FP8 as the output projection would.

    Return None, and do nothing, if no kernel does both.
    """
    fused = ctx.fused.get(layer)
    if fused is None or not fused.rounds:
        return None
    source = layer if kv_of is None else kv_of
    return fused.forward_rounded(qkv, heads, ctx.kv.keys(source), ctx.kv.values(source), sinks)


class Attention(nn.Module):
    """attention(norm(x)): [T, hidden_size] -> [T, hidden_size].

    A rank has an even share of the query heads and the KV heads they need. With `config.kv_of` there are only queries,
    which attend to the pages of that layer (Gemma 4 E2B, E4B): it has the same heads, window and rope.
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
        self.layer, self.kv_of = layer, config.kv_of
        self.rotary = rotary
        self.num_heads = config.heads_per_rank(tp.size)
        self.num_kv_heads = config.kv_heads_per_rank(tp.size) if config.kv_of is None else 0
        self.head_dim = dim = config.head_dim
        q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim
        share = self.num_heads * dim
        q_all = [range(tp.rank * share, (tp.rank + 1) * share)]
        gate_kept: list[range] = []
        if config.output_gate:  # q_proj has a head's query, then its gate
            heads = range(tp.rank * self.num_heads, (tp.rank + 1) * self.num_heads)
            q_all = [range(2 * head * dim, (2 * head + 1) * dim) for head in heads]
            gate_kept = [range((2 * head + 1) * dim, (2 * head + 2) * dim) for head in heads]
            q_rows *= 2
        q_kept = paired_rows(q_all, dim, config.rope)
        v_kept = [range(head * dim, (head + 1) * dim) for head in config.kv_heads_of(tp.rank, tp.size)]
        k_kept = paired_rows(v_kept, dim, config.rope)
        v_name = "k_proj" if config.k_is_v else "v_proj"
        parts = [Part("q_proj", q_rows, q_kept)]
        if config.kv_of is None:
            parts += [Part("k_proj", kv_rows, k_kept), Part(v_name, kv_rows, v_kept)]
        if config.output_gate:
            parts.append(Part("q_proj", q_rows, gate_kept))
        self.output_gate = config.output_gate
        self.qkv_proj = ColumnParallelLinear(hidden_size, parts, bias=config.qkv_bias, dtype=dtype)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm == "head":
            kept = paired_rows([range(dim)], dim, config.rope)
            self.q_norm = RMSNorm(dim, norm, dtype=dtype, kept=kept)
            self.k_norm = RMSNorm(dim, norm, dtype=dtype, kept=kept) if config.kv_of is None else None
        elif config.qk_norm == "projection":
            self.q_norm = ProjectionNorm(q_rows, norm, dtype=dtype, kept=q_kept, tp=tp)
            self.k_norm = ProjectionNorm(kv_rows, norm, dtype=dtype, kept=k_kept, tp=tp)
        self.sinks: HeadParameter | None = None
        if config.has_sinks:
            heads = range(tp.rank * self.num_heads, (tp.rank + 1) * self.num_heads)
            self.sinks = HeadParameter("sinks", config.num_heads, heads, dtype=dtype)
        by_head = config.qk_norm == "head"  # norms of single heads, which the fused operations compute
        self.heads = Heads(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            cos_sin=rotary.cos_sin,
            q_norm=params_of(self.q_norm) if by_head else None,
            k_norm=params_of(self.k_norm) if by_head else None,
            v_eps=norm.eps if config.v_norm else None,
        )
        self.o_proj = RowParallelLinear(config.num_heads * dim, hidden_size, bias=config.out_bias, tp=tp, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        norm: RMSNorm | None,
        ctx: ForwardContext,
        residual: Tensor | None = None,
        next_norm: Norm | None = None,
    ) -> Summed:
        """Attend to norm(x). The output projection ends as `RowParallelLinear.add` does."""
        qkv, gate = self.qkv_proj(x, norm), None
        if self.output_gate:
            gate = qkv[:, -self.num_heads * self.head_dim :]
            qkv = qkv[:, : -self.num_heads * self.head_dim].contiguous()
        if self.rotary.query_scale is not None:  # a rotation keeps the factor
            scale = self.rotary.query_scale[ctx.positions].to(qkv.dtype).unsqueeze(-1)
            qkv[:, : self.num_heads * self.head_dim].mul_(scale)
        q_norm, k_norm = self.q_norm, self.k_norm
        if isinstance(q_norm, ProjectionNorm) and isinstance(k_norm, ProjectionNorm):
            q, k, v = qkv.split([len(q_norm.weight), len(k_norm.weight), len(k_norm.weight)], dim=-1)
            qkv = torch.cat((q_norm(q, ctx), k_norm(k, ctx), v), dim=-1)
        sinks = None if self.sinks is None else self.sinks.weight
        if self.may_round:
            rounded = attend_rounded(self.layer, qkv, self.heads, sinks, ctx, self.kv_of)
            if rounded is not None:
                return self.o_proj.add(rounded, residual, next_norm)
        attended = attend(self.layer, qkv, self.heads, sinks, ctx, self.kv_of).flatten(1)
        if gate is not None:
            attended = ctx.ops.activate(gate, attended, "sigmoid")
        return self.o_proj.add(attended, residual, next_norm)

    @property
    def may_round(self) -> bool:
        """True if the output of attention may be rounded to FP8 before it is stored, because its product reads FP8."""
        return self.o_proj.takes_rounded and not self.output_gate
