"""GLM-4.5 to 4.7 (GLM team, 2025): many small experts and a shared one, chosen as in DeepSeek V3; dense first layers.

The layers for multi-token prediction, behind the others, are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from minisgl.kernel.base import Routing
from minisgl.layers.layer_config import LayerConfig, MLPConfig, MoEConfig
from minisgl.models.config.common_fields import read_attention, read_context_len, read_model, read_rope
from minisgl.models.config.config_reader import ConfigReader
from minisgl.models.config.model_config import CheckpointNames, ModelConfig, UnsupportedModel

ARCHITECTURES = ("Glm4MoeForCausalLM",)
_DEFAULTS: Mapping[str, Any] = {  # of transformers' Glm4MoeConfig
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
    model = read_model(architecture, reader, layers, read_context_len(reader, rope))
    predicting = reader.count("num_nextn_predict_layers", reader.count("num_mtp_layers", 1, least=0), least=0)
    ignored = tuple(f"model.layers.{num_layers + layer}." for layer in range(predicting))
    return dataclasses.replace(model, checkpoint=CheckpointNames(ignored=ignored))


def read_grouped_experts(reader: ConfigReader) -> MoEConfig:
    """Read experts that are chosen as in DeepSeek V3: by sigmoids with a bias, from the best groups."""
    num_experts, size = reader.count("n_routed_experts"), reader.count("moe_intermediate_size")
    routing = Routing(
        reader.count("num_experts_per_tok"),
        renormalize=reader.flag("norm_topk_prob"),
        score="sigmoid",
        groups=reader.count("n_group", 1),
        top_groups=reader.count("topk_group", 1),
        scale=reader.number("routed_scaling_factor", 1.0),
    )
    if num_experts % routing.groups or (routing.groups > 1 and num_experts < 2 * routing.groups):
        raise UnsupportedModel(f"n_group {routing.groups} does not divide n_routed_experts {num_experts} into groups")
    if routing.top_groups > routing.groups:
        raise UnsupportedModel(f"topk_group {routing.top_groups} is more than n_group {routing.groups}")
    if routing.top_k > (competing := num_experts // routing.groups * routing.top_groups):
        raise UnsupportedModel(f"num_experts_per_tok {routing.top_k} is more than the {competing} that compete")
    return MoEConfig(
        num_experts,
        size,
        routing,
        shared_intermediate_size=size * reader.count("n_shared_experts", least=0),
        choice_bias=True,
        float32_router=True,
    )
