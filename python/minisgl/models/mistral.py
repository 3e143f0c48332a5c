"""Mistral (Jiang et al., 2023): Llama's decoder without biases; in the first version with a sliding window."""

from __future__ import annotations

from minisgl.layers.attention import Attention
from minisgl.layers.decoder import CausalLM, DecoderLayer
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.rotary import Rotary


class MistralForCausalLM(CausalLM):
    def make_layer(self, index: int, rotary: Rotary) -> DecoderLayer:
        config, tp, dtype = self.config, self.tp, self.dtype
        attention = Attention(config, index, rotary, tp=tp, dtype=dtype)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, tp=tp, dtype=dtype)
        return DecoderLayer(config, attention, mlp, dtype=dtype)
