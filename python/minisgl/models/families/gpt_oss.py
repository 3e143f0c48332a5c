"""gpt-oss (OpenAI, 2025): experts with biases and a clamped SwiGLU, attention sinks, a window in every second layer.

Experts that are published in MXFP4 stay so on Hopper, and are dequantized elsewhere as they are loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from minisgl.kernel.base import ClampedSwiGLU, Routing
from minisgl.layers.layer_config import LayerConfig, MoEConfig
from minisgl.models.config.common_fields import (
    read_attention,
    read_context_len,
    read_expert_counts,
    read_layer_types,
    read_model,
    read_rope,
    read_window,
)
from minisgl.models.config.config_reader import ConfigReader
from minisgl.models.config.model_config import ModelConfig

ARCHITECTURES = ("GptOssForCausalLM",)
_DEFAULTS: Mapping[str, Any] = {  # defaults of transformers' GptOssConfig
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "attention_bias": True,
}


def read_gpt_oss(architecture: str, reader: ConfigReader) -> ModelConfig:
    """Read a config.json of an architecture in ARCHITECTURES. Raises UnsupportedModel."""
    reader = reader.with_defaults(_DEFAULTS)
    rope = read_rope(reader)
    context_len, num_layers = read_context_len(reader, rope), reader.count("num_hidden_layers")
    attention = read_attention(reader, rope, bias=reader.flag("attention_bias"))
    full = dataclasses.replace(attention, has_sinks=True)
    sliding = dataclasses.replace(full, window=read_window(reader, context_len))
    windowed = read_layer_types(reader, num_layers) or [layer % 2 == 0 for layer in range(num_layers)]
    experts = _read_experts(reader)
    layers = [LayerConfig(sliding if slides else full, experts) for slides in windowed]
    return read_model(architecture, reader, layers, context_len, float32_norms=True)


def _read_experts(reader: ConfigReader) -> MoEConfig:
    """Read experts whose weights are the softmax over the chosen experts' logits, which equals renormalized weights."""
    key = "num_experts" if reader.get("num_local_experts") is None else "num_local_experts"
    num_experts, chosen = read_expert_counts(reader, key)
    reader.get("num_experts")
    return MoEConfig(
        num_experts,
        reader.count("intermediate_size"),
        Routing(chosen, renormalize=True),
        activation=ClampedSwiGLU(reader.number("swiglu_alpha"), reader.number("swiglu_limit")),
        router_name="router",
        router_bias=True,
        expert_bias=True,
        interleaved=True,
    )
