"""The pre-norm decoder that the families share. Module names are the checkpoint's, so that loading maps none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.distributed.group import TPGroup
from minisgl.kernel.base import Ops
from minisgl.layers.embedding import LMHead, VocabEmbedding
from minisgl.layers.moe import SparseMLP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import Rotary
from minisgl.models.config import ModelConfig


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Norms and additions are fused into the products beside them."""

    def __init__(self, config: ModelConfig, attention: nn.Module, mlp: nn.Module, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = mlp

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        x = self.self_attn(x, self.input_layernorm, ctx)
        y: Tensor = self.mlp(x, self.post_attention_layernorm, ctx)
        return y


class Decoder(nn.Module):
    """[T] token ids -> [R, hidden_size]: the states of `ctx.read_rows` (None: of all T tokens), before `norm`."""

    def __init__(
        self,
        config: ModelConfig,
        make_layer: Callable[[int, Rotary], DecoderLayer],
        *,
        tp: TPGroup,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        rotary = Rotary(config.head_dim, config.max_position_embeddings, config.rope)
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, tp=tp, dtype=dtype)
        self.layers = nn.ModuleList([make_layer(index, rotary) for index in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)

    def forward(self, ctx: ForwardContext) -> Tensor:
        x: Tensor = self.embed_tokens(ctx.input_ids, ctx)
        for layer in self.layers:
            x = layer(x, ctx)
        return x if ctx.read_rows is None else x[ctx.read_rows]


class CausalLM(nn.Module):
    """A decoder and its head; a family says how one of its layers is made."""

    def __init__(self, config: ModelConfig, *, tp: TPGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.tp = tp
        self.model = Decoder(config, self.make_layer, tp=tp, dtype=dtype)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, tied_to=tied_to, tp=tp, dtype=dtype)

    def make_layer(self, index: int, rotary: Rotary) -> DecoderLayer:
        """Uses config, dtype and tp."""
        raise NotImplementedError

    def graph_safe(self, ops: Ops) -> bool:
        """Whether a decode launches the same work whatever its data, so that a CUDA graph may hold it."""
        return all(module.graph_safe(ops) for module in self.modules() if isinstance(module, SparseMLP))

    @property
    def layer_weights(self) -> int:
        """How many of the last layer's weights each token is multiplied by."""
        layer = self.model.layers[-1]
        idle = sum(module.idle_weights for module in layer.modules() if isinstance(module, SparseMLP))
        return sum(weight.numel() for weight in layer.parameters()) - idle

    def forward(self, ctx: ForwardContext) -> Tensor:
        """Logits [S, vocab_size] of the tokens that sample, in the model's dtype, the same on every rank."""
        return self.logits(self.model(ctx), ctx)

    def logits(self, states: Tensor, ctx: ForwardContext) -> Tensor:
        """The same of states [S, hidden_size] that the decoder gave."""
        logits: Tensor = self.lm_head(states, self.model.norm, ctx)
        return logits
