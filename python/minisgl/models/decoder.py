"""The decoder of every family: its equations, and the fused operation that each line becomes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.distributed import TPGroup
from minisgl.kernel.base import KernelNeeds, LatentDims, Ops, Product
from minisgl.layers.attention import Attention
from minisgl.layers.delta_net import GatedDeltaNet
from minisgl.layers.embedding import LMHead, VocabEmbedding
from minisgl.layers.latent_attention import LatentAttention
from minisgl.layers.layer_config import AttentionConfig, DeltaNetConfig, MoEConfig, RopeConfig
from minisgl.layers.linear import ColumnParallelLinear, RowParallelLinear
from minisgl.layers.mlp import GatedMLP, Router, SparseMLP
from minisgl.layers.norm import RMSNorm, params_of
from minisgl.layers.rotary import Rotary
from minisgl.layers.weight_slice import WeightSlice, whole
from minisgl.models.base import Model
from minisgl.models.config.model_config import ModelConfig


class LayerScalar(nn.Module):
    """Learned factor of a layer's output, weight [1]."""

    def __init__(self, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=dtype), requires_grad=False)

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        yield whole(name, self.weight)


class States(NamedTuple):
    """States x [T, hidden_size] between two blocks, and the next block's norm of them, where it is known already."""

    x: Tensor
    normed: Tensor | None = None


class DecoderLayer(nn.Module):
    """x = x + attention(norm(x)), then x = x + mlp(norm(x)).

    Some families norm each block's output too (Gemma 3), or that alone (OLMo 2). Norms and additions are seldom
    launches of their own: the norm in front of a block begins the block's first product (`Ops.norm_linear`,
    `Ops.norm_gated_linear`), and `residual` is added by its last one (`Ops.linear`), unless a norm of the output
    stands between. A family that scales a block's output (Granite) has its own addition. With several ranks a block
    gives a part of its output: what sums the parts adds the residual, and may compute the norm that comes next.
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
            kind = Attention if layer.attention.latent is None else LatentAttention
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
        self.layer_scalar = LayerScalar(dtype=dtype) if layer.has_scalar else None

    @property
    def attention(self) -> Attention | LatentAttention | GatedDeltaNet:
        """The block in which tokens meet."""
        return self.self_attn or cast(GatedDeltaNet, self.linear_attn)

    def forward(self, states: States, ctx: ForwardContext, next_norm: RMSNorm | None) -> States:
        """Pass states through both blocks; may overwrite them. `next_norm`: of the layer behind this one."""
        if self.layer_scalar is not None:
            next_norm = None
        states = self._block(self.attention, self.attention_norm, self.attention_post_norm, states, ctx, self.mlp_norm)
        states = self._block(self.mlp, self.mlp_norm, self.mlp_post_norm, states, ctx, next_norm)
        return states if self.layer_scalar is None else States(states.x.mul_(self.layer_scalar.weight))

    def _block(
        self,
        block: Any,
        norm: RMSNorm | None,
        post_norm: RMSNorm | None,
        states: States,
        ctx: ForwardContext,
        next_norm: RMSNorm | None,
    ) -> States:
        """x + residual_scale * post_norm(block(norm(x)))."""
        x, normed = states
        inputs = (x, norm) if normed is None else (normed, None)
        if post_norm is None and self.residual_scale == 1.0:
            return States(*block(*inputs, ctx, x, params_of(next_norm)))
        part, _ = block(*inputs, ctx)
        y = self.tp.all_reduce(part)
        if self.residual_scale != 1.0:
            return States(x.add_(y if post_norm is None else post_norm(y, ctx), alpha=self.residual_scale))
        return States(cast(RMSNorm, post_norm)(y, ctx, residual=x))


class Decoder(nn.Module):
    """[T] token ids -> [R, hidden_size]: the states of `ctx.logits_indices` (None: of all T tokens), before `norm`."""

    def __init__(self, config: ModelConfig, *, tp: TPGroup, dtype: torch.dtype) -> None:
        super().__init__()
        size = config.hidden_size
        self.embedding_scale = config.embedding_scale
        self.embed_tokens = VocabEmbedding(config.vocab_size, size, tp=tp, dtype=dtype)
        kinds = dict.fromkeys((attention.rope_head_dim, attention.rope) for attention in config.attentions)
        rotaries = {kind: Rotary(kind[0], config.max_position_embeddings, kind[1]) for kind in kinds}
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, rotaries, tp=tp, dtype=dtype) for index in range(config.num_layers)
        )
        self.norm = RMSNorm(size, config.norm, dtype=dtype)

    def forward(self, ctx: ForwardContext) -> Tensor:
        x: Tensor = self.embed_tokens(ctx.input_ids, ctx)
        if self.embedding_scale != 1.0:
            x.mul_(self._scale(x))
        states = States(x)
        next_norms = [*(layer.attention_norm for layer in self.layers), None][1:]
        for layer, next_norm in zip(self.layers, next_norms, strict=True):
            states = layer(states, ctx, next_norm)
        x = states.x
        return x if ctx.logits_indices is None else x[ctx.logits_indices]

    def _scale(self, x: Tensor) -> float:
        """The scale rounded to x's dtype, as the families that have one were trained (Gemma)."""
        return torch.tensor(self.embedding_scale, dtype=x.dtype, device="cpu").item()


class DecoderModel(Model):
    """A decoder of these layers. Module names are the checkpoint's, so that loading maps few."""

    model: Decoder

    def __init__(self, config: ModelConfig, *, tp: TPGroup, dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        self.tp = tp
        self.model = Decoder(config, tp=tp, dtype=dtype)

    def graph_safe(self, ops: Ops) -> bool:
        return all(module.graph_safe(ops) for module in self.modules() if isinstance(module, SparseMLP))

    def prefill_graph_safe(self, ops: Ops) -> bool:
        recurrent = (module for module in self.modules() if isinstance(module, GatedDeltaNet))
        return self.graph_safe(ops) and all(ops.delta_graph_safe(module.heads, self.dtype) for module in recurrent)

    def kernel_needs(self, kv_dtype: torch.dtype) -> KernelNeeds:
        products, experts = set(), set()
        for layer in (module for module in self.modules() if isinstance(module, DecoderLayer)):
            for block, norm in ((layer.attention, layer.attention_norm), (layer.mlp, layer.mlp_norm)):
                gate = block.activation if isinstance(block, GatedMLP) else None
                for module in block.children():
                    if isinstance(module, ColumnParallelLinear | RowParallelLinear | Router):
                        width, size = module.weight.shape
                        begins = isinstance(module, ColumnParallelLinear)
                        products.add(Product(width, size, begins and norm is not None, gate if begins else None))
                if isinstance(block, SparseMLP):
                    experts.add(block.kernel_experts)
        return KernelNeeds(
            dtype=self.dtype,
            kv_dtype=kv_dtype,
            norm_dtype=self.model.norm.weight.dtype,
            head_dims=frozenset(one.head_dim for one in self.config.attentions if one.latent is None),
            latents=frozenset(
                LatentDims(one.latent.kv_rank, one.latent.rope_dim, one.latent.nope_dim, one.latent.value_dim)
                for one in self.config.attentions
                if one.latent
            ),
            products=frozenset(products),
            experts=frozenset(experts),
            delta_taps=frozenset(
                layer.attention.conv_size for layer in self.config.layers if isinstance(layer.attention, DeltaNetConfig)
            ),
        )

    @property
    def layer_weights(self) -> int:
        layer = self.model.layers[-1]
        idle = sum(module.idle_weights for module in layer.modules() if isinstance(module, SparseMLP))
        return sum(weight.numel() for weight in layer.parameters()) - idle


class CausalLM(DecoderModel):
    """A decoder and the head that says what may follow."""

    def __init__(self, config: ModelConfig, *, tp: TPGroup, dtype: torch.dtype) -> None:
        super().__init__(config, tp=tp, dtype=dtype)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, tied_to=tied_to, tp=tp, dtype=dtype)

    def kernel_needs(self, kv_dtype: torch.dtype) -> KernelNeeds:
        needs = super().kernel_needs(kv_dtype)
        width, size = self.lm_head.weight.shape
        return replace(needs, products=needs.products | {Product(width, size, norm=True, gate=None)})

    def logits(self, states: Tensor, ctx: ForwardContext) -> Tensor:
        """Logits [S, vocab_size] of states [S, hidden_size] that the decoder gave."""
        logits: Tensor = self.lm_head(states, self.model.norm, ctx)
        if self.config.logits_scale != 1.0:
            logits.mul_(self.config.logits_scale)
        cap = self.config.logits_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
