"""The gated feed-forward block (Shazeer, 2020)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.distributed.group import TPGroup
from minisgl.layers.layer_config import MLPConfig
from minisgl.layers.linear import ColumnParallelLinear, Part, RowParallelLinear
from minisgl.layers.norm import RMSNorm, params_of


class GatedMLP(nn.Module):
    """down(activation(gate(norm(x))) * up(norm(x))): [T, hidden_size] -> [T, hidden_size]."""

    def __init__(self, config: MLPConfig, hidden_size: int, *, tp: TPGroup, dtype: torch.dtype) -> None:
        super().__init__()
        size, bias = config.intermediate_size, config.bias
        self.activation = config.activation
        parts = [Part.even(name, size, tp) for name in ("gate_proj", "up_proj")]
        self.gate_up_proj = ColumnParallelLinear(hidden_size, parts, bias=bias, dtype=dtype)
        self.down_proj = RowParallelLinear(size, hidden_size, bias=bias, tp=tp, dtype=dtype)

    def forward(self, x: Tensor, norm: RMSNorm | None, ctx: ForwardContext, residual: Tensor | None = None) -> Tensor:
        """Feed norm(x) forward, plus `residual`."""
        gate_up = self.gate_up_proj
        hidden = ctx.ops.norm_gated_linear(x, params_of(norm), gate_up.weight, gate_up.bias, activation=self.activation)
        y: Tensor = self.down_proj(hidden, ctx, residual)
        return y
