"""Qwen3, dense (Qwen team, 2025): Llama's decoder with a norm on each head of q and k."""

from __future__ import annotations

from minisgl.layers.attention import Attention
from minisgl.layers.decoder import CausalLM, DecoderLayer
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.rotary import Rotary


class Qwen3ForCausalLM(CausalLM):
    def make_layer(self, index: int, rotary: Rotary) -> DecoderLayer:
        config, tp, dtype = self.config, self.tp, self.dtype
        bias = config.attention_bias
        attention = Attention(config, index, rotary, qkv_bias=bias, out_bias=bias, qk_norm=True, tp=tp, dtype=dtype)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, tp=tp, dtype=dtype)
        return DecoderLayer(config, attention, mlp, dtype=dtype)
