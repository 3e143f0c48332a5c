"""Gated DeltaNet (Yang et al., 2024): a layer with a recurrent state of fixed size in the place of attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.distributed import TPGroup
from minisgl.distributed.group import Summed
from minisgl.kernel.base import DeltaHeads, Norm
from minisgl.kernel.delta_net.recurrent_rows import RecurrentRows
from minisgl.layers.layer_config import DeltaNetConfig, NormConfig
from minisgl.layers.linear import ColumnParallelLinear, HeadParameter, Part, RowParallelLinear, zeros
from minisgl.layers.norm import RMSNorm
from minisgl.layers.weight_slice import WeightSlice, beside, row_slices


class GatedDeltaNet(nn.Module):
    """delta_net(norm(x)): [T, hidden_size] -> [T, hidden_size]. A rank has an even share of the heads of both kinds."""

    def __init__(
        self,
        config: DeltaNetConfig,
        layer: int,
        hidden_size: int,
        norm: NormConfig,
        *,
        tp: TPGroup,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.config = config
        self.num_key_heads = config.num_key_heads // tp.size
        self.num_value_heads = config.num_value_heads // tp.size
        heads = range(tp.rank * self.num_key_heads, (tp.rank + 1) * self.num_key_heads)
        parts = _grouped_parts(config, heads) if config.grouped else _plain_parts(config, heads)
        self.in_proj = ColumnParallelLinear(hidden_size, parts, bias=False, dtype=dtype)
        self.conv = Convolution(config, heads)
        values = _value_heads(config, heads)
        self.a_log = HeadParameter("A_log", config.num_value_heads, values, dtype=torch.float32)
        self.dt_bias = HeadParameter("dt_bias", config.num_value_heads, values, dtype=torch.float32)
        plain = dataclasses.replace(norm, float32=False, unit_offset=False)
        self.norm = RMSNorm(config.value_dim, plain, dtype=dtype)
        self.out_proj = RowParallelLinear(
            config.num_value_heads * config.value_dim, hidden_size, bias=False, tp=tp, dtype=dtype
        )

    @property
    def heads(self) -> DeltaHeads:
        """Return the heads and weights of this rank."""
        return DeltaHeads(
            self.num_key_heads,
            self.num_value_heads,
            self.config.key_dim,
            self.config.value_dim,
            self.conv.weight,
            self.a_log.weight,
            self.dt_bias.weight,
            self.norm.params,
        )

    def forward(
        self,
        x: Tensor,
        norm: RMSNorm | None,
        ctx: ForwardContext,
        residual: Tensor | None = None,
        next_norm: Norm | None = None,
    ) -> Summed:
        """Feed norm(x) through the recurrence. The output projection ends as `RowParallelLinear.add` does."""
        if ctx.recurrent is None:
            raise ValueError("a recurrent layer needs the layout of the step's rows")
        return self.out_proj.add(self._recur(self.in_proj(x, norm), ctx.recurrent, ctx), residual, next_norm)

    def _recur(self, projected: Tensor, rows: RecurrentRows, ctx: ForwardContext) -> Tensor:
        """Compute rows of one token by the step's formula and all others in chunks: [T, value_heads * value_dim]."""
        heads, (inputs, memory) = self.heads, ctx.kv.states(self.layer)
        single, chunked = rows.single, rows.chunked
        out = projected.new_empty(len(projected), self.num_value_heads * self.config.value_dim)
        if chunked is not None:
            ctx.ops.delta_chunks(projected, heads, inputs, memory, chunked, out)
        if single is not None:
            ctx.ops.delta_step(projected, heads, inputs, memory, single, out)
        return out


class Convolution(nn.Module):
    """Depthwise causal convolution of q, k and v, one filter per channel: weight [conv_size, channels] float32."""

    def __init__(self, config: DeltaNetConfig, heads: range) -> None:
        super().__init__()
        self.rows = 2 * config.num_key_heads * config.key_dim + config.num_value_heads * config.value_dim
        self.kept = _qkv_rows(config, heads)
        self.weight = zeros(config.conv_size, sum(map(len, self.kept)), dtype=torch.float32)

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        target = self.weight.t().unsqueeze(1)  # [channels, 1, conv_size], as a depthwise nn.Conv1d has it
        yield from row_slices(beside(name, "conv1d.weight"), self.rows, self.kept, target)


def _value_heads(config: DeltaNetConfig, heads: range) -> range:
    """Return the value heads that these key heads serve."""
    group = config.num_value_heads // config.num_key_heads
    return range(heads.start * group, heads.stop * group)


def _rows_of(heads: range, size: int, start: int = 0) -> range:
    return range(start + heads.start * size, start + heads.stop * size)


def _qkv_rows(config: DeltaNetConfig, heads: range) -> Sequence[range]:
    """Return the rows of q, k and v of these key heads, in a matrix that has all of q, then all of k, then all of v."""
    keys, values = config.num_key_heads * config.key_dim, _value_heads(config, heads)
    q, k = (_rows_of(heads, config.key_dim, start) for start in (0, keys))
    return q, k, _rows_of(values, config.value_dim, 2 * keys)


def _plain_parts(config: DeltaNetConfig, heads: range) -> Sequence[Part]:
    """Return the parts of Qwen3.5's matrices: q, k and v in one, then z, b and a."""
    keys, values = config.num_key_heads * config.key_dim, config.num_value_heads * config.value_dim
    mine = _value_heads(config, heads)
    return (
        Part("in_proj_qkv", 2 * keys + values, _qkv_rows(config, heads)),
        Part("in_proj_z", values, [_rows_of(mine, config.value_dim)]),
        Part("in_proj_b", config.num_value_heads, [mine]),
        Part("in_proj_a", config.num_value_heads, [mine]),
    )


def _grouped_parts(config: DeltaNetConfig, heads: range) -> Sequence[Part]:
    """Return the parts of Qwen3-Next's two matrices: rows [q, k, v, z] and rows [b, a], one key head after another."""
    group = config.num_value_heads // config.num_key_heads
    sizes = config.key_dim, config.key_dim, group * config.value_dim, group * config.value_dim
    block, starts = sum(sizes), [sum(sizes[:part]) for part in range(len(sizes))]
    qkvz = [
        range(head * block + start, head * block + start + size)
        for start, size in zip(starts, sizes, strict=True)
        for head in heads
    ]
    ba = [range(head * 2 * group + start, head * 2 * group + start + group) for start in (0, group) for head in heads]
    return (
        Part("in_proj_qkvz", config.num_key_heads * block, qkvz),
        Part("in_proj_ba", config.num_value_heads * 2, ba),
    )
