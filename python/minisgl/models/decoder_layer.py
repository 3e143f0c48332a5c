"""One layer of the decoder: its equations, and the fused operation that each line becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.distributed import TPGroup
from minisgl.distributed.group import Summed
from minisgl.kernel.base import Norm
from minisgl.layers.attention import Attention
from minisgl.layers.delta_net import GatedDeltaNet
from minisgl.layers.latent_attention import LatentAttention
from minisgl.layers.layer_config import AttentionConfig, MoEConfig, RopeConfig
from minisgl.layers.mlp import GatedMLP, SparseMLP
from minisgl.layers.norm import RMSNorm, all_params, params_of
from minisgl.layers.rotary import Rotary
from minisgl.models.config.model_config import ModelConfig


class States(NamedTuple):
    """States x [T, hidden_size] between two blocks, and the next block's norm of them if it is already computed.

    `layer_inputs` [T, layers, size]: what each layer has of the tokens besides, in models with `PerLayerInputs`.
    """

    x: Tensor
    normed: Tensor | None = None
    layer_inputs: Tensor | None = None


class Block(Protocol):
    """Attention or feed-forward block: [T, hidden_size] -> [T, hidden_size]."""

    def __call__(
        self,
        x: Tensor,
        norm: RMSNorm | None,
        ctx: ForwardContext,
        residual: Tensor | None = None,
        next_norm: Norm | None = None,
    ) -> Summed:
        """Return block(norm(x)) + residual, and `next_norm` of this sum if one kernel computes both.

        Without a residual, return the rank's part of block(norm(x)). The residual may be overwritten.
        """


class DecoderLayer(nn.Module):
    """x = x + attention(norm(x)), then x = x + mlp(norm(x)).

    Some families norm each block's output too (Gemma 3), or that alone (OLMo 2). Norms and additions are seldom
    launches of their own: the norm in front of a block begins the block's first product (`Ops.norm_linear`,
    `Ops.norm_gated_linear`), and `residual` is added by its last one (`Ops.linear`). Where a norm of the output stands
    between, one launch computes it, the sum, and the norm in front of the next block (`Ops.norm_add`). A family that
    scales a block's output (Granite) has its own addition. With several ranks a block gives a part of its output: what
    sums the parts adds the residual, and may compute the norm that comes next.
    """

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        rotaries: Mapping[tuple[int, RopeConfig], Rotary],
        *,
        tp: TPGroup,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.tp = tp
        layer, hidden_size = config.layers[index], config.hidden_size

        def norm(name: str | None) -> RMSNorm | None:
            return None if name is None else RMSNorm(hidden_size, config.norm, dtype=dtype, checkpoint_name=name)

        self.attention_norm = norm(layer.norms.attention)
        # Named as in the checkpoints.
        self.self_attn: Attention | LatentAttention | None = None
        self.linear_attn: GatedDeltaNet | None = None
        if isinstance(layer.attention, AttentionConfig):
            kind: type[Attention | LatentAttention] = Attention if layer.attention.latent is None else LatentAttention
            rotary = rotaries[layer.attention.rope_head_dim, layer.attention.rope]
            self.self_attn = kind(layer.attention, index, hidden_size, rotary, config.norm, tp=tp, dtype=dtype)
        else:
            self.linear_attn = GatedDeltaNet(layer.attention, index, hidden_size, config.norm, tp=tp, dtype=dtype)
        self.attention_post_norm = norm(layer.norms.attention_post)
        self.mlp_norm = norm(layer.norms.mlp)
        self.mlp: nn.Module
        if isinstance(layer.mlp, MoEConfig):
            self.mlp = SparseMLP(layer.mlp, hidden_size, tp=tp, dtype=dtype)
        else:
            self.mlp = GatedMLP(layer.mlp, hidden_size, tp=tp, dtype=dtype)
        self.mlp_post_norm = norm(layer.norms.mlp_post)
        self.residual_scale = layer.residual_scale

    @property
    def attention(self) -> Attention | LatentAttention | GatedDeltaNet:
        """The block in which tokens attend to others."""
        return self.self_attn or cast(GatedDeltaNet, self.linear_attn)

    def forward(self, states: States, ctx: ForwardContext, next_norm: RMSNorm | None) -> States:
        """Pass states through both blocks; may overwrite them. `next_norm` is the first norm of the next layer."""
        states = self._block(self.attention, self.attention_norm, self.attention_post_norm, states, ctx, self.mlp_norm)
        return self._block(self.mlp, self.mlp_norm, self.mlp_post_norm, states, ctx, next_norm)

    def _block(
        self,
        block: Block,
        norm: RMSNorm | None,
        post_norm: RMSNorm | None,
        states: States,
        ctx: ForwardContext,
        next_norm: RMSNorm | None,
    ) -> States:
        """x + residual_scale * post_norm(block(norm(x)))."""
        x, normed, _ = states
        inputs = (x, norm) if normed is None else (normed, None)
        if post_norm is None and self.residual_scale == 1.0:
            return States(*block(*inputs, ctx, x, params_of(next_norm)))
        part, _ = block(*inputs, ctx)
        y = self.tp.all_reduce(part)
        if self.residual_scale != 1.0:
            return States(x.add_(y if post_norm is None else post_norm(y, ctx), alpha=self.residual_scale))
        return States(*ctx.ops.norm_add(y, cast(RMSNorm, post_norm).params, x, *all_params(next_norm)))
