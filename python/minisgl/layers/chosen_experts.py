"""Experts beside a layer's MLP (Gemma 4): a router chooses them for the states that the MLP reads before their norm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.distributed import TPGroup
from minisgl.kernel.base import Activation, Norm, Ops
from minisgl.kernel.torch_ops import route
from minisgl.layers.layer_config import MoEConfig, NormConfig
from minisgl.layers.linear import empty
from minisgl.layers.mlp import Experts
from minisgl.layers.weight_slice import WeightSlice, whole


class ScaledRouter(nn.Module):
    """Choice of each token's experts by proj @ (norm(x) * scale / sqrt(hidden_size)). Every rank has it.

    The norm has no other weights. An expert's weight is multiplied by a learned scale of its own.
    """

    def __init__(self, config: MoEConfig, hidden_size: int, norm: NormConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.routing, self.eps = config.routing, norm.eps
        self.root = hidden_size**-0.5
        self.weight = empty(config.num_experts, hidden_size, dtype=dtype)
        norm_dtype = torch.float32 if norm.float32 else dtype
        self.scale = nn.Parameter(torch.ones(hidden_size, dtype=norm_dtype), requires_grad=False)
        self.expert_scale = nn.Parameter(torch.ones(config.num_experts), requires_grad=False)

    def forward(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """x [T, hidden_size] -> the weights, float32, and the ids of each token's experts, both [T, top_k]."""
        _, logits = ctx.ops.norm_router(x, Norm(self.scale * self.root, self.eps), self.weight, None)
        weights, experts = route(logits.float(), self.routing)
        return weights * self.expert_scale[experts], experts

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        yield whole(f"{name}.proj.weight", self.weight)
        yield whole(f"{name}.scale", self.scale)
        yield whole(f"{name}.per_expert_scale", self.expert_scale)


class ChosenExperts(Experts):
    """Experts of tokens whose router chose before: a rank's part of [T, hidden_size]."""

    may_pack = False

    def __init__(
        self, config: MoEConfig, activation: Activation, hidden_size: int, *, tp: TPGroup, dtype: torch.dtype
    ) -> None:
        super().__init__(config, hidden_size, tp=tp, dtype=dtype)
        self.activation = activation

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor, ctx: ForwardContext) -> Tensor:
        """Send each token of x to its experts; see `Ops.moe_chosen`."""
        matrices, held = (self.w13, self.w2), (self.first, self.num_experts)
        return ctx.ops.moe_chosen(x, weights, experts, *matrices, self.activation, *held)

    def graph_safe(self, ops: Ops) -> bool:
        """True if its work is the same whatever the data: the kernels of csrc/ have silu alone."""
        return self.activation == "silu" and ops.moe_graph_safe(self.w13, self.w2, self.num_experts, self.top_k)
