"""Qwen2 and Qwen2.5, dense (Qwen team, 2024): Llama's decoder with biases on q, k and v."""

from __future__ import annotations

from minisgl.layers.attention import Attention
from minisgl.layers.decoder import CausalLM, DecoderLayer
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.rotary import Rotary


class Qwen2ForCausalLM(CausalLM):
    def make_layer(self, index: int, rotary: Rotary) -> DecoderLayer:
        config, tp, dtype = self.config, self.tp, self.dtype
        attention = Attention(config, index, rotary, qkv_bias=True, tp=tp, dtype=dtype)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, tp=tp, dtype=dtype)
        return DecoderLayer(config, attention, mlp, dtype=dtype)
