"""Inputs of each layer in addition to the states (Gemma 4 E2B, E4B): every layer has its own token embeddings."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.distributed import TPGroup
from minisgl.kernel.base import Norm
from minisgl.layers.embedding import VocabShard
from minisgl.layers.layer_config import LayerInputConfig, NormConfig
from minisgl.layers.linear import empty
from minisgl.layers.norm import norm_weight
from minisgl.layers.weight_slice import WeightSlice, beside, whole


class PerLayerInputs(nn.Module):
    """(norm(projection(x) / root) + sqrt(size) * embedding(ids)) / sqrt(2), of each layer's `size`.

    The root is sqrt(hidden_size). The table is divided by tokens among ranks as the embedding is; every rank has the
    projection.
    """

    def __init__(
        self,
        config: LayerInputConfig,
        num_layers: int,
        hidden_size: int,
        norm: NormConfig,
        *,
        tp: TPGroup,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.size, self.shard = config.size, VocabShard(config.vocab_size, tp)
        self.eps = norm.eps * hidden_size  # makes norm(projection) equal to norm(projection / root)
        self.table_scale = torch.tensor(config.size**0.5, dtype=dtype, device="cpu").item()  # rounded as in training
        self.table = self.shard.make_weight(num_layers * config.size, dtype)
        self.projection = empty(num_layers * config.size, hidden_size, dtype=dtype)
        self.norm = norm_weight(config.size, norm, dtype)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Input embeddings x [T, hidden_size] -> [T, layers, size]."""
        embedded = self.shard.embed(ctx.input_ids, self.table, ctx).mul_(self.table_scale).view(-1, self.size)
        projected = ctx.ops.linear(x, self.projection).view(-1, self.size)
        both, *_ = ctx.ops.norm_add(projected, Norm(self.norm, self.eps), embedded)
        return both.mul_(2**-0.5).view(len(x), -1, self.size)

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        yield self.shard.weight_slice(beside(name, "embed_tokens_per_layer"), self.table)
        yield whole(beside(name, "per_layer_model_projection.weight"), self.projection)
        yield whole(beside(name, "per_layer_projection_norm.weight"), self.norm)


class LayerInput(nn.Module):
    """x + norm(projection(gelu(gate(x)) * input)) of one layer's input, which ends the layer. Every rank has it."""

    def __init__(self, size: int, hidden_size: int, norm: NormConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = norm.eps
        self.gate = empty(size, hidden_size, dtype=dtype)
        self.projection = empty(hidden_size, size, dtype=dtype)
        self.norm = norm_weight(hidden_size, norm, dtype)

    def forward(
        self, x: Tensor, inputs: Tensor, ctx: ForwardContext, *next_norms: Norm, factor: Tensor
    ) -> tuple[Tensor, ...]:
        """x [T, hidden_size] and inputs [T, size] -> [T, hidden_size] times factor, and its norms; may overwrite x."""
        gated = ctx.ops.activate(ctx.ops.linear(x, self.gate), inputs, "gelu_tanh")
        projected = ctx.ops.linear(gated, self.projection)
        return ctx.ops.norm_add(projected, Norm(self.norm, self.eps), x, *next_norms, factor=factor)

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        yield whole(beside(name, "per_layer_input_gate.weight"), self.gate)
        yield whole(beside(name, "per_layer_projection.weight"), self.projection)
        yield whole(beside(name, "post_per_layer_input_norm.weight"), self.norm)
