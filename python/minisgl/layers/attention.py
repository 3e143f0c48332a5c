"""Grouped-query attention with rotary positions over the paged KV pool."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.distributed import TPGroup
from minisgl.distributed.group import Summed
from minisgl.kernel.base import Heads, Norm
from minisgl.kernel.gemm.fp8_rows import Fp8Rows
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
    layer: int, qkv: Tensor, heads: Heads, sinks: Tensor | None, ctx: ForwardContext, kv_of: int | None
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
        self.head_dim = config.head_dim
        parts = _qkv_parts(config, tp)
        self.output_gate = config.output_gate
        self.qkv_proj = ColumnParallelLinear(hidden_size, parts, bias=config.qkv_bias, dtype=dtype)
        self.q_norm, self.k_norm = _qk_norms(config, parts, norm, tp, dtype)
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
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim, hidden_size, bias=config.out_bias, tp=tp, dtype=dtype
        )

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


def _qkv_parts(config: AttentionConfig, tp: TPGroup) -> list[Part]:
    """Return this rank's rows of q, k, v and the output gate, in the order of the merged product.

    With `config.k_is_v` the rows of v are read from k's matrix, and with `config.kv_of` there are neither k nor v.
    """
    dim, share = config.head_dim, config.heads_per_rank(tp.size)
    heads = range(tp.rank * share, (tp.rank + 1) * share)
    if config.output_gate:  # q_proj has a head's query, then its gate
        q_rows = 2 * config.num_heads * dim
        q_kept = [range(2 * head * dim, (2 * head + 1) * dim) for head in heads]
        gate_kept = [range((2 * head + 1) * dim, (2 * head + 2) * dim) for head in heads]
        gate = [Part("q_proj", q_rows, gate_kept)]
    else:
        q_rows, gate = config.num_heads * dim, []
        q_kept = [range(heads.start * dim, heads.stop * dim)]
    parts = [Part("q_proj", q_rows, paired_rows(q_kept, dim, config.rope))]
    if config.kv_of is None:
        kv_rows = config.num_kv_heads * dim
        v_kept = [range(head * dim, (head + 1) * dim) for head in config.kv_heads_of(tp.rank, tp.size)]
        parts.append(Part("k_proj", kv_rows, paired_rows(v_kept, dim, config.rope)))
        parts.append(Part("k_proj" if config.k_is_v else "v_proj", kv_rows, v_kept))
    return parts + gate


def _qk_norms(
    config: AttentionConfig, parts: list[Part], norm: NormConfig, tp: TPGroup, dtype: torch.dtype
) -> tuple[RMSNorm | None, RMSNorm | None]:
    """Return the norms of q and k: of single heads, or of all heads of a projection."""
    if config.qk_norm == "none":
        return None, None

    def make(part: Part) -> RMSNorm:
        if config.qk_norm == "head":
            kept = paired_rows([range(config.head_dim)], config.head_dim, config.rope)
            return RMSNorm(config.head_dim, norm, dtype=dtype, kept=kept)
        return ProjectionNorm(part.rows, norm, dtype=dtype, kept=part.kept, tp=tp)

    return make(parts[0]), make(parts[1]) if config.kv_of is None else None
