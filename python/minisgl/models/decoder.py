"""The decoder of every family: its layers between the two matrices of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.distributed import TPGroup
from minisgl.kernel.base import KernelNeeds, Ops, Product
from minisgl.layers.delta_net import GatedDeltaNet
from minisgl.layers.embedding import LMHead, VocabEmbedding
from minisgl.layers.layer_config import DeltaNetConfig
from minisgl.layers.linear import ColumnParallelLinear, RowParallelLinear
from minisgl.layers.mlp import Experts, GatedMLP, Router, SparseMLP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.per_layer_inputs import LayerInput, PerLayerInputs
from minisgl.layers.rotary import Rotary
from minisgl.models.base import Model
from minisgl.models.config.model_config import ModelConfig
from minisgl.models.decoder_layer import DecoderLayer, States
from minisgl.models.gemma4_layer import Gemma4Layer


class Decoder(nn.Module):
    """[T] token ids -> [R, hidden_size]: the states of `ctx.logits_indices` (None: of all T tokens), before `norm`."""

    def __init__(self, config: ModelConfig, *, tp: TPGroup, dtype: torch.dtype) -> None:
        super().__init__()
        size = config.hidden_size
        self.embedding_scale = config.embedding_scale
        self.embed_tokens = VocabEmbedding(config.vocab_size, size, tp=tp, dtype=dtype)
        kinds = dict.fromkeys((attention.rope_head_dim, attention.rope) for attention in config.attentions)
        rotaries = {kind: Rotary(kind[0], config.max_position_embeddings, kind[1]) for kind in kinds}
        self.layer_inputs: PerLayerInputs | None = None
        if config.layer_inputs is not None:
            self.layer_inputs = PerLayerInputs(
                config.layer_inputs, config.num_layers, size, config.norm, tp=tp, dtype=dtype
            )
        self.layers = nn.ModuleList(
            (DecoderLayer if layer.gemma4 is None else Gemma4Layer)(config, index, rotaries, tp=tp, dtype=dtype)
            for index, layer in enumerate(config.layers)
        )
        self.norm = RMSNorm(size, config.norm, dtype=dtype)

    def forward(self, ctx: ForwardContext) -> Tensor:
        x: Tensor = self.embed_tokens(ctx.input_ids, ctx)
        if self.embedding_scale != 1.0:
            x.mul_(self._scale(x))
        states = States(x, layer_inputs=None if self.layer_inputs is None else self.layer_inputs(x, ctx))
        next_norms = (*[layer.attention_norm for layer in self.layers][1:], None)
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
        return all(module.graph_safe(ops) for module in self.modules() if isinstance(module, Experts))

    def prefill_graph_safe(self, ops: Ops) -> bool:
        recurrent = (module for module in self.modules() if isinstance(module, GatedDeltaNet))
        return self.graph_safe(ops) and all(ops.delta_graph_safe(module.heads, self.dtype) for module in recurrent)

    def kernel_needs(self, kv_dtype: torch.dtype) -> KernelNeeds:
        kinds = {module: module.kind for module in self.modules() if isinstance(module, Experts)}
        kinds |= {one.experts: one.kernel_experts for one in self.modules() if isinstance(one, SparseMLP)}
        return KernelNeeds(
            dtype=self.dtype,
            kv_dtype=kv_dtype,
            norm_dtype=self.model.norm.weight.dtype,
            head_dims=frozenset(one.head_dim for one in self.config.attentions if one.latent is None),
            latents=frozenset(one.latent.dims for one in self.config.attentions if one.latent is not None),
            products=frozenset(self._products()),
            experts=frozenset(kinds.values()),
            delta_taps=frozenset(
                layer.attention.conv_size for layer in self.config.layers if isinstance(layer.attention, DeltaNetConfig)
            ),
        )

    def _products(self) -> Iterator[Product]:
        """Yield the matrix products of a step, except those of experts."""
        for module in self.modules():
            if isinstance(module, DecoderLayer):
                yield from _block_products(module.attention, module.attention_norm)
                yield from _block_products(module.mlp, module.mlp_norm)
            elif isinstance(module, LayerInput):
                for width, size in (module.gate.shape, module.projection.shape):
                    yield Product(width, size, norm=False, gate=None)

    @property
    def supports_sequence_parallel(self) -> bool:
        """True if its layers read the residual only to add to it and to norm it, both in one operation."""
        return all(
            layer.norms.attention is not None
            and layer.norms.mlp is not None
            and layer.norms.attention_post is None
            and layer.norms.mlp_post is None
            and layer.residual_scale == 1.0
            and layer.gemma4 is None
            for layer in self.config.layers
        )

    @property
    def layer_weights(self) -> int:
        layer = self.model.layers[-1]
        idle = sum(module.idle_weights for module in layer.modules() if isinstance(module, Experts))
        return sum(weight.numel() for weight in layer.parameters()) - idle


def _block_products(block: nn.Module, norm: RMSNorm | None) -> Iterator[Product]:
    """Yield the products of a layer's half, which begins with `norm`."""
    gate = block.activation if isinstance(block, GatedMLP) else None
    for module in block.children():
        if isinstance(module, ColumnParallelLinear):
            width, size = module.weight.shape
            yield Product(width, size, norm is not None, gate)
        elif isinstance(module, RowParallelLinear | Router):
            width, size = module.weight.shape
            yield Product(width, size, norm=False, gate=None)


class CausalLM(DecoderModel):
    """A decoder with the head that gives the logits of the next token."""

    def __init__(self, config: ModelConfig, *, tp: TPGroup, dtype: torch.dtype) -> None:
        super().__init__(config, tp=tp, dtype=dtype)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, tied_to=tied_to, tp=tp, dtype=dtype)

    def _products(self) -> Iterator[Product]:
        yield from super()._products()
        width, size = self.lm_head.weight.shape
        yield Product(width, size, norm=True, gate=None)

    def logits(self, states: Tensor, ctx: ForwardContext) -> Tensor:
        """Return logits [S, vocab_size] of the decoder's states [S, hidden_size]."""
        logits: Tensor = self.lm_head(states, self.model.norm, ctx)
        if self.config.logits_scale != 1.0:
            logits.mul_(self.config.logits_scale)
        cap = self.config.logits_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
