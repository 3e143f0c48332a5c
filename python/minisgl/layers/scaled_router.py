"""Router of experts beside a layer's MLP (Gemma 4), which reads the states that the MLP reads before their norm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.kernel.base import Norm
from minisgl.layers.layer_config import MoEConfig, NormConfig
from minisgl.layers.linear import empty
from minisgl.layers.weight_slice import WeightSlice, whole


class ScaledRouter(nn.Module):
    """Logits of the experts: proj @ (norm(x) * scale / sqrt(hidden_size)). Every rank has it.

    The norm has no other weights. An expert's weight is multiplied by `expert_scale` [experts], learned too.
    """

    def __init__(self, config: MoEConfig, hidden_size: int, norm: NormConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps, self.root = norm.eps, hidden_size**-0.5
        self.weight = empty(config.num_experts, hidden_size, dtype=dtype)
        norm_dtype = torch.float32 if norm.float32 else dtype
        self.scale = nn.Parameter(torch.full((hidden_size,), self.root, dtype=norm_dtype), requires_grad=False)
        self.expert_scale = nn.Parameter(torch.ones(config.num_experts, dtype=torch.float32), requires_grad=False)

    @property
    def norm(self) -> Norm:
        """Parameters of norm(x) * scale / sqrt(hidden_size)."""
        return Norm(self.scale, self.eps)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, hidden_size], normed -> [T, experts]."""
        return ctx.ops.linear(x, self.weight)

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        yield whole(f"{name}.proj.weight", self.weight)
        yield whole(f"{name}.scale", self.scale, factor=self.root)
        yield whole(f"{name}.per_expert_scale", self.expert_scale)
