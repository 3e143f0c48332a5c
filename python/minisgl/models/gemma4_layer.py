"""A layer of Gemma 4, which may have experts beside its MLP and an input of its own, and scales its output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.distributed import TPGroup
from minisgl.layers.chosen_experts import ChosenExperts, ScaledRouter
from minisgl.layers.layer_config import Gemma4Parts, MLPConfig, RopeConfig
from minisgl.layers.norm import RMSNorm
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
        parts, mlp = cast(Gemma4Parts, layer.gemma4), cast(MLPConfig, layer.mlp)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(size, config.norm, dtype=dtype, checkpoint_name=name)

        # Named as in the checkpoints.
        self.router: ScaledRouter | None = None
        if parts.experts is not None:
            self.router = ScaledRouter(parts.experts, size, config.norm, dtype=dtype)
            self.experts = ChosenExperts(parts.experts, mlp.activation, size, tp=tp, dtype=dtype)
            self.experts_norm = norm("pre_feedforward_layernorm_2")
            self.mlp_part_norm = norm("post_feedforward_layernorm_1")
            self.experts_part_norm = norm("post_feedforward_layernorm_2")
        self.index = index
        self.layer_input: LayerInput | None = None
        if config.layer_inputs is not None:
            self.layer_input = LayerInput(config.layer_inputs.size, size, config.norm, dtype=dtype)
        self.layer_scalar = LayerScalar(dtype=dtype)

    def forward(
        self,
        states: States,
        ctx: ForwardContext,
        next_norm: RMSNorm | None,  # noqa: ARG002
    ) -> States:
        """Pass states through all blocks; may overwrite them. The norm of the next layer is left to it."""
        inputs = states.layer_inputs
        states = self._block(self.attention, self.attention_norm, self.attention_post_norm, states, ctx, None)
        if self.router is None:
            states = self._block(self.mlp, self.mlp_norm, self.mlp_post_norm, states, ctx, None)
        else:
            states = self._feed_both(states.x, self.router, ctx)
        x = states.x
        if self.layer_input is not None and inputs is not None:
            x = self.layer_input(x, inputs[:, self.index], ctx)
        return States(x.mul_(self.layer_scalar.weight), layer_inputs=inputs)

    def _feed_both(self, x: Tensor, router: ScaledRouter, ctx: ForwardContext) -> States:
        """x + post_norm(norm_1(mlp(norm(x))) + norm_2(experts(norm(x))))."""
        part, _ = self.mlp(x, self.mlp_norm, ctx)
        dense = self.mlp_part_norm(self.tp.all_reduce(part), ctx)
        part = self.experts(self.experts_norm(x, ctx), *router(x, ctx), ctx)
        sparse = self.experts_part_norm(self.tp.all_reduce(part), ctx)
        return States(cast(RMSNorm, self.mlp_post_norm)(dense.add_(sparse), ctx, residual=x))
