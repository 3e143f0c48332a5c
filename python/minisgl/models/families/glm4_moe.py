"""GLM-4.5 to 4.7 (GLM team, 2025): many small experts and a shared one, chosen as in DeepSeek V3; dense first layers.

The layers for multi-token prediction, which follow the others, are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from minisgl.layers.layer_config import LayerConfig, MLPConfig
from minisgl.models.config.common_fields import read_attention, read_context_len, read_model, read_rope
from minisgl.models.config.config_reader import ConfigReader
from minisgl.models.config.model_config import ModelConfig
from minisgl.models.families.deepseek import read_grouped_experts, without_prediction

ARCHITECTURES = ("Glm4MoeForCausalLM",)
_DEFAULTS: Mapping[str, Any] = {  # defaults of transformers' Glm4MoeConfig
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}


def read_glm4_moe(architecture: str, reader: ConfigReader) -> ModelConfig:
    """Read a config.json of an architecture in ARCHITECTURES. Raises UnsupportedModel."""
    reader = reader.with_defaults(_DEFAULTS)
    rope = read_rope(reader, partial=True)
    attention = dataclasses.replace(
        read_attention(reader, rope),
        qk_norm="head" if reader.flag("use_qk_norm") else "none",
        qkv_bias=reader.flag("attention_bias"),
    )
    dense = MLPConfig(reader.count("intermediate_size"))
    experts = read_grouped_experts(reader)
    first, num_layers = reader.count("first_k_dense_replace", least=0), reader.count("num_hidden_layers")
    layers = [LayerConfig(attention, dense if layer < first else experts) for layer in range(num_layers)]
    names = without_prediction(reader)
    return read_model(architecture, reader, layers, read_context_len(reader, rope), checkpoint=names)
