"""A layer of Gemma 4, with a learned factor of its output, and optional experts and per-layer inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.distributed import TPGroup
from minisgl.kernel.base import Norm
from minisgl.layers.layer_config import Gemma4Parts, MoEConfig, NormConfig, RopeConfig
from minisgl.layers.linear import empty
from minisgl.layers.mlp import Experts
from minisgl.layers.norm import RMSNorm, all_params, norm_weight
from minisgl.layers.per_layer_inputs import LayerInput
from minisgl.layers.rotary import Rotary
from minisgl.layers.weight_slice import WeightSlice, whole
from minisgl.models.config.model_config import ModelConfig
from minisgl.models.decoder_layer import DecoderLayer, States


class LayerScalar(nn.Module):
    """Learned factor of a layer's output, weight [1]."""

    def __init__(self, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=dtype), requires_grad=False)

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        yield whole(name, self.weight)


class ScaledRouter(nn.Module):
    """Logits of the experts: proj @ (norm(x) * scale / sqrt(hidden_size)). Every rank has it.

    The norm has no other weights. An expert's weight is multiplied by `expert_scale` [experts], learned too.
    """

    def __init__(self, config: MoEConfig, hidden_size: int, norm: NormConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps, self.root = norm.eps, hidden_size**-0.5
        self.weight = empty(config.num_experts, hidden_size, dtype=dtype)
        self.scale = norm_weight(hidden_size, norm, dtype, self.root)
        self.expert_scale = nn.Parameter(torch.ones(config.num_experts, dtype=torch.float32), requires_grad=False)

    @property
    def norm(self) -> Norm:
        """Return the parameters of norm(x) * scale / sqrt(hidden_size)."""
        return Norm(self.scale, self.eps)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, hidden_size], normed -> [T, experts]."""
        return ctx.ops.linear(x, self.weight)

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        yield whole(f"{name}.proj.weight", self.weight)
        yield whole(f"{name}.scale", self.scale, factor=self.root)
        yield whole(f"{name}.per_expert_scale", self.expert_scale)


class Gemma4Layer(DecoderLayer):
    """A decoder layer whose feed-forward block may be two: norm_1(mlp(norm(x))) + norm_2(experts(norm(x)))."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        rotaries: Mapping[tuple[int, RopeConfig], Rotary],
        *,
        tp: TPGroup,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(config, index, rotaries, tp=tp, dtype=dtype)
        layer, size = config.layers[index], config.hidden_size
        parts = cast(Gemma4Parts, layer.gemma4)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(size, config.norm, dtype=dtype, checkpoint_name=name)

        # Named as in the checkpoints.
        self.router: ScaledRouter | None = None
        if parts.experts is not None:
            self.router = ScaledRouter(parts.experts, size, config.norm, dtype=dtype)
            self.experts = Experts(parts.experts, size, tp=tp, dtype=dtype)
            self.experts_norm = norm("pre_feedforward_layernorm_2")
            self.mlp_part_norm = norm("post_feedforward_layernorm_1")
            self.experts_part_norm = norm("post_feedforward_layernorm_2")
        self.index = index
        self.layer_input: LayerInput | None = None
        if config.layer_inputs is not None:
            self.layer_input = LayerInput(config.layer_inputs.size, size, config.norm, dtype=dtype)
        self.layer_scalar = LayerScalar(dtype=dtype)

    def forward(self, states: States, ctx: ForwardContext, next_norm: RMSNorm | None) -> States:
        """Pass states through all blocks; may overwrite them."""
        x, normed, inputs = states
        before = (x, self.attention_norm) if normed is None else (normed, None)
        part, _ = self.attention(*before, ctx)
        post_norm, mlp_post_norm = all_params(self.attention_post_norm, self.mlp_post_norm)
        norms = all_params(self.mlp_norm)
        if self.router is not None:
            norms += self.experts_norm.params, self.router.norm
        x, normed, *more = ctx.ops.norm_add(self.tp.all_reduce(part), post_norm, x, *norms)
        fed = self.tp.all_reduce(self.mlp(normed, None, ctx)[0])
        if self.router is not None:
            fed = self._with_experts(fed, self.router, more, ctx)
        factor, after = self.layer_scalar.weight, all_params(next_norm)
        if self.layer_input is None or inputs is None:
            return States(*ctx.ops.norm_add(fed, mlp_post_norm, x, *after, factor=factor))
        x, *_ = ctx.ops.norm_add(fed, mlp_post_norm, x)
        x, *found = self.layer_input(x, inputs[:, self.index], ctx, *after, factor=factor)
        return States(x, found[0] if found else None, inputs)

    def _with_experts(self, fed: Tensor, router: ScaledRouter, normed: Sequence[Tensor], ctx: ForwardContext) -> Tensor:
        """norm_1(fed) + norm_2(experts(x)), where x has one norm for the experts and one for their router."""
        for_experts, for_router = normed
        mixture = self.experts.mixture._replace(expert_scale=router.expert_scale)
        part = ctx.ops.moe(for_experts, router(for_router, ctx), mixture)
        dense = self.mlp_part_norm(fed, ctx)
        return ctx.ops.norm_add(self.tp.all_reduce(part), self.experts_part_norm.params, dense)[0]
