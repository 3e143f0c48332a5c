"""Llama 2 and 3 (Touvron et al., 2023; Llama team, 2024)."""

from __future__ import annotations

from minisgl.layers.attention import Attention
from minisgl.layers.decoder import CausalLM, DecoderLayer
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.rotary import Rotary


class LlamaForCausalLM(CausalLM):
    def make_layer(self, index: int, rotary: Rotary) -> DecoderLayer:
        config, tp, dtype = self.config, self.tp, self.dtype
        bias = config.attention_bias
        attention = Attention(config, index, rotary, qkv_bias=bias, out_bias=bias, tp=tp, dtype=dtype)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias, tp=tp, dtype=dtype)
        return DecoderLayer(config, attention, mlp, dtype=dtype)
