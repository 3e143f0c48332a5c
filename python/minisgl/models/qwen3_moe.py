"""Qwen3 with experts (Qwen team, 2025): Qwen3 whose feed-forward blocks, or most of them, are sparse."""

from __future__ import annotations

from torch import nn

from minisgl.layers.attention import Attention
from minisgl.layers.decoder import CausalLM, DecoderLayer
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.moe import SparseMLP
from minisgl.layers.rotary import Rotary


class Qwen3MoeForCausalLM(CausalLM):
    def make_layer(self, index: int, rotary: Rotary) -> DecoderLayer:
        config, tp, dtype = self.config, self.tp, self.dtype
        bias = config.attention_bias
        attention = Attention(config, index, rotary, qkv_bias=bias, out_bias=bias, qk_norm=True, tp=tp, dtype=dtype)
        mlp: nn.Module
        if config.moe is not None and index in config.moe.layers:
            mlp = SparseMLP(config.hidden_size, config.moe, tp=tp, dtype=dtype)
        else:
            mlp = GatedMLP(config.hidden_size, config.intermediate_size, tp=tp, dtype=dtype)
        return DecoderLayer(config, attention, mlp, dtype=dtype)
