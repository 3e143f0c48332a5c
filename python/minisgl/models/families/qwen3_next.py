"""Qwen3-Next (Qwen team, 2025) and Qwen3.5, 3.6 (Qwen team, 2026), dense and with experts.

Of each four layers three are recurrent (Gated DeltaNet), and the fourth has attention whose output has a gate. Vision
towers and the layers for multi-token prediction are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from minisgl.layers.layer_config import AttentionConfig, DeltaNetConfig, LayerConfig, MLPConfig, MoEConfig
from minisgl.models.config.common_fields import (
    MULTIMODAL_NAMES,
    read_attention,
    read_context_len,
    read_experts,
    read_model,
    read_rope,
)
from minisgl.models.config.config_reader import ConfigReader, brief
from minisgl.models.config.model_config import CheckpointNames, ModelConfig, UnsupportedModel

_NEXT = "Qwen3NextForCausalLM"
_WITH_VISION = "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"
ARCHITECTURES = (_NEXT, "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", *_WITH_VISION)
_HYBRID: Mapping[str, Any] = {  # defaults of transformers' configurations
    "num_attention_heads": 16,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "Qwen3Next": {"num_key_value_heads": 2, "num_experts_per_tok": 10, "num_experts": 512, **_EXPERTS},
    "Qwen3_5": {"num_key_value_heads": 4},
    "Qwen3_5Moe": {"num_key_value_heads": 2, "num_experts_per_tok": 8, "num_experts": 256, **_EXPERTS},
}
_LEFT_OUT = "mtp.", "model.visual."
_TEXT = CheckpointNames(ignored=_LEFT_OUT)
_MULTIMODAL = CheckpointNames(MULTIMODAL_NAMES.renamed, ignored=(*MULTIMODAL_NAMES.ignored, *_LEFT_OUT))


def read_qwen3_next(architecture: str, reader: ConfigReader) -> ModelConfig:
    """Read a config.json of an architecture in ARCHITECTURES. Raises UnsupportedModel."""
    if architecture in _WITH_VISION:
        reader = reader.text_config()
    family = architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    reader = reader.with_defaults({**_HYBRID, **_DEFAULTS[family]})
    num_layers, rope = reader.count("num_hidden_layers"), read_rope(reader, partial=True)
    if not reader.flag("attn_output_gate", default=True):
        raise UnsupportedModel("attn_output_gate false is not supported")
    attention = read_attention(reader, rope, bias=reader.flag("attention_bias"))
    attention = dataclasses.replace(attention, qk_norm="head", output_gate=True)
    delta_net = _read_delta_net(reader, grouped=architecture == _NEXT)
    mlps = _read_mlps(family, reader, num_layers)
    mixers: list[AttentionConfig | DeltaNetConfig] = [
        delta_net if is_linear else attention for is_linear in _read_linear(reader, num_layers)
    ]
    layers = [LayerConfig(mixer, mlp) for mixer, mlp in zip(mixers, mlps, strict=True)]
    return read_model(
        architecture,
        reader,
        layers,
        read_context_len(reader, rope),
        float32_norms=True,
        unit_offset=True,
        checkpoint=_MULTIMODAL if architecture in _WITH_VISION else _TEXT,
    )


def _read_delta_net(reader: ConfigReader, *, grouped: bool) -> DeltaNetConfig:
    config = DeltaNetConfig(
        reader.count("linear_num_key_heads"),
        reader.count("linear_num_value_heads"),
        reader.count("linear_key_head_dim"),
        reader.count("linear_value_head_dim"),
        reader.count("linear_conv_kernel_dim", least=2),
        grouped,
    )
    if config.num_value_heads % config.num_key_heads:
        raise UnsupportedModel(
            f"linear_num_value_heads {config.num_value_heads} is not a multiple of linear_num_key_heads "
            f"{config.num_key_heads}"
        )
    return config


def _read_linear(reader: ConfigReader, num_layers: int) -> list[bool]:
    """Return True for each recurrent layer; at least one layer must attend."""
    types = reader.get("layer_types")
    if types is None:
        interval = reader.count("full_attention_interval")
        types = ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(num_layers)]
    known = isinstance(types, list) and set(map(str, types)) <= {"linear_attention", "full_attention"}
    if not known or len(types) != num_layers:
        raise UnsupportedModel(
            f"layer_types must name {num_layers} layers linear_attention or full_attention, not {brief(types)}"
        )
    if "full_attention" not in types:
        raise UnsupportedModel("a model without any full_attention layer is not supported")
    return [kind == "linear_attention" for kind in types]


def _read_mlps(family: str, reader: ConfigReader, num_layers: int) -> list[MLPConfig | MoEConfig]:
    if family == "Qwen3_5":
        return [MLPConfig(reader.count("intermediate_size"))] * num_layers
    shared_size = reader.count("shared_expert_intermediate_size")
    experts = {
        layer: dataclasses.replace(moe, shared_intermediate_size=shared_size, shared_gate=True)
        for layer, moe in read_experts(reader, num_layers).items()
    }
    if len(experts) == num_layers:
        return [experts[layer] for layer in range(num_layers)]
    dense = MLPConfig(reader.count("intermediate_size"))
    return [experts.get(layer, dense) for layer in range(num_layers)]
