"""Gemma 3, its text model (Gemma team, 2025): five layers with a window to one without, norms on both sides of blocks.

Checkpoints with a vision tower are served as text: the tower's weights are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from minisgl.layers.layer_config import LayerConfig, MLPConfig, NormNames
from minisgl.models.config.common_fields import (
    MULTIMODAL_NAMES,
    read_attention,
    read_layer_types,
    read_model,
    read_ropes_by_type,
    read_window,
)
from minisgl.models.config.config_reader import ConfigReader, brief
from minisgl.models.config.model_config import CheckpointNames, ModelConfig, UnsupportedModel

_TEXT, _WITH_VISION = "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"
ARCHITECTURES = (_TEXT, _WITH_VISION)
_DEFAULTS: Mapping[str, Any] = {  # defaults of transformers' Gemma3TextConfig, most of which published files omit
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
SANDWICH_NORMS = NormNames(
    attention="input_layernorm",
    attention_post="post_attention_layernorm",
    mlp="pre_feedforward_layernorm",
    mlp_post="post_feedforward_layernorm",
)


def check_activation(reader: ConfigReader) -> None:
    """Raise UnsupportedModel for an activation other than the one of all published models."""
    if (activation := reader.get("hidden_activation")) != "gelu_pytorch_tanh":
        raise UnsupportedModel(f"hidden_activation {brief(activation)} is not supported")


def read_gemma3(architecture: str, reader: ConfigReader) -> ModelConfig:
    """Read a config.json of an architecture in ARCHITECTURES. Raises UnsupportedModel."""
    if architecture == _WITH_VISION:
        reader = reader.text_config()
    reader = reader.with_defaults(_DEFAULTS)
    check_activation(reader)
    num_layers, context_len = reader.count("num_hidden_layers"), reader.count("max_position_embeddings")
    pattern, window = reader.count("sliding_window_pattern"), read_window(reader, context_len)
    windowed = read_layer_types(reader, num_layers) or [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    full_rope, window_rope = read_ropes_by_type(
        reader,
        theta=reader.number("rope_theta", 1_000_000.0),
        window_theta=reader.number("rope_local_base_freq", 10_000.0),
    )
    full = dataclasses.replace(
        read_attention(reader, full_rope, bias=reader.flag("attention_bias")),
        scale=reader.number("query_pre_attn_scalar") ** -0.5,
        qk_norm="head",
    )
    sliding = dataclasses.replace(full, rope=window_rope, window=window)
    mlp = MLPConfig(reader.count("intermediate_size"), activation="gelu_tanh")
    layers = [LayerConfig(sliding if slides else full, mlp, SANDWICH_NORMS) for slides in windowed]
    names = MULTIMODAL_NAMES if architecture == _WITH_VISION else CheckpointNames()
    model = read_model(
        architecture, reader, layers, context_len, float32_norms=True, unit_offset=True, checkpoint=names
    )
    return dataclasses.replace(model, embedding_scale=reader.count("hidden_size") ** 0.5)
