"""The gated feed-forward block (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.distributed.group import TPGroup
from minisgl.layers.linear import ColumnParallelLinear, Part, RowParallelLinear
from minisgl.layers.norm import RMSNorm


class GatedMLP(nn.Module):
    """x + down(silu(gate(norm(x))) * up(norm(x))): [T, hidden_size] -> [T, hidden_size]."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, bias: bool = False, tp: TPGroup, dtype: torch.dtype
    ) -> None:
        super().__init__()
        parts = [Part.even(name, intermediate_size, tp) for name in ("gate_proj", "up_proj")]
        self.gate_up_proj = ColumnParallelLinear(hidden_size, parts, bias=bias, dtype=dtype)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias=bias, tp=tp, dtype=dtype)

    def forward(self, x: Tensor, norm: RMSNorm, ctx: ForwardContext) -> Tensor:
        gate_up = self.gate_up_proj
        hidden = ctx.ops.norm_gated_linear(x, norm.params, gate_up.weight, gate_up.bias)
        y: Tensor = self.down_proj(hidden, x, ctx)
        return y
