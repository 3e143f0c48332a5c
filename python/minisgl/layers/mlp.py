"""The gated feed-forward block (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.distributed.group import TPGroup
from minisgl.layers.linear import ColumnParallelLinear, Part, RowParallelLinear


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)): [T, hidden_size] -> [T, hidden_size]."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, bias: bool = False, tp: TPGroup, dtype: torch.dtype
    ) -> None:
        super().__init__()
        parts = [Part.even(name, intermediate_size, tp) for name in ("gate_proj", "up_proj")]
        self.gate_up_proj = ColumnParallelLinear(hidden_size, parts, bias=bias, dtype=dtype)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias=bias, tp=tp, dtype=dtype)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        y: Tensor = self.down_proj(ctx.ops.silu_and_mul(self.gate_up_proj(x, ctx)), ctx)
        return y
