"""Llama and the families that differ from it in a few settings.

Llama 2 and 3 (Touvron et al., 2023; Llama team, 2024), Mistral (Jiang et al., 2023) and Mistral 3, Qwen2 and Qwen2.5
(Qwen team, 2024), Qwen3 and Qwen3-MoE (Qwen team, 2025), OLMo 2 and 3 (OLMo team, 2025), Phi-3 and Phi-4 (Abdin et al.,
2024), SmolLM3 (Hugging Face, 2025), Granite (IBM, 2024), GLM-4 (GLM team, 2024), Seed-OSS (ByteDance, 2025), EXAONE 4
(LG AI Research, 2025), ERNIE 4.5 (Baidu, 2025).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from minisgl.layers.layer_config import NO_ROPE, LayerConfig, MLPConfig, NormNames, QKNorm, RopeConfig
from minisgl.models.config.common_fields import (
    MULTIMODAL_NAMES,
    read_attention,
    read_context_len,
    read_experts,
    read_layer_types,
    read_model,
    read_rope,
    read_ropes_by_type,
)
from minisgl.models.config.config_reader import ConfigReader, brief
from minisgl.models.config.model_config import ModelConfig, UnsupportedModel

_PRE_NORMS = NormNames()
_POST_NORMS = NormNames(None, None, "post_attention_layernorm", "post_feedforward_layernorm")
_GLM4_NORMS = NormNames(attention_post="post_self_attn_layernorm", mlp_post="post_mlp_layernorm")


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of the table: the differences of a family from Llama.

    `defaults`: values that transformers takes for keys a config.json leaves out. `qkv_bias`, `out_bias`, `mlp_bias`:
    products with biases, or the key that says it. `windows`: layers that sliding_window is for; "by layer" are those
    that layer_types names or, without it, all but each sliding_window_pattern-th, or those from max_window_layers on,
    if `defaults` has one of these keys.
    `float32_norms`: a norm's result is rounded once, after its weight. `partial_rotary`: partial_rotary_factor may
    leave the end of each head unrotated. `ropes_by_type`: layers with a window have the plain rope. `no_rope`: layers
    without any, those that no_rope_layers names or those without a window in a model that has windows.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: str | bool = "attention_bias"
    out_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = False
    qk_norm: QKNorm = "none"
    norms: NormNames = _PRE_NORMS
    float32_norms: bool = False
    partial_rotary: bool = False
    interleaved_rope: bool = False
    ropes_by_type: bool = False
    no_rope: Literal["never", "no_rope_layers", "without window"] = "never"
    windows: Literal["none", "all", "by layer"] = "none"
    experts: bool = False  # some layers have experts in place of the dense MLP
    multipliers: bool = False  # scales embeddings, scores, block outputs and logits
    query_scaling: bool = False  # the rope may scale queries beyond the original context
    longrope: bool = False  # the rope may be LongRoPE


_MISTRAL = {"num_key_value_heads": 8, "sliding_window": 4096}
_MISTRAL_3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_MISTRAL_3 = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_parameters": _MISTRAL_3_ROPE}
_GLM = {
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
}
_SEED_OSS = {"num_key_value_heads": 8, "attention_bias": True, "head_dim": 128}
_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
_QWEN_WINDOWS = {**_QWEN_WINDOW, "max_window_layers": 28}
_QWEN_MOE = {"num_key_value_heads": 4, **_QWEN_WINDOW}

VARIANTS: Mapping[str, Variant] = {
    "LlamaForCausalLM": Variant(mlp_bias="mlp_bias"),
    "MistralForCausalLM": Variant(_MISTRAL, qkv_bias=False, out_bias=False, windows="by layer"),
    "MinistralForCausalLM": Variant(_MISTRAL, qkv_bias=False, out_bias=False, windows="by layer"),
    "Ministral3ForCausalLM": Variant(_MISTRAL_3, qkv_bias=False, out_bias=False, windows="all", query_scaling=True),
    "Qwen2ForCausalLM": Variant(_QWEN_WINDOWS, qkv_bias=True, out_bias=False, windows="by layer"),
    "Qwen3ForCausalLM": Variant({"head_dim": 128, **_QWEN_WINDOWS}, qk_norm="head", windows="by layer"),
    "Qwen3MoeForCausalLM": Variant(_QWEN_MOE, qk_norm="head", windows="all", experts=True),
    "Olmo2ForCausalLM": Variant({"rms_norm_eps": 1e-5}, qk_norm="projection", norms=_POST_NORMS, float32_norms=True),
    "Olmo3ForCausalLM": Variant(
        {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096, "sliding_window_pattern": 4},
        qk_norm="projection",
        norms=_POST_NORMS,
        float32_norms=True,
        windows="by layer",
        ropes_by_type=True,
    ),
    "Phi3ForCausalLM": Variant(
        {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        qkv_bias=False,
        out_bias=False,
        windows="all",
        partial_rotary=True,
        longrope=True,
    ),
    "SmolLM3ForCausalLM": Variant(
        {"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True, "use_sliding_window": False},
        mlp_bias="mlp_bias",
        no_rope="no_rope_layers",
    ),
    "GraniteForCausalLM": Variant({"attention_multiplier": 1.0}, mlp_bias="mlp_bias", multipliers=True),
    "GlmForCausalLM": Variant(_GLM, out_bias=False, partial_rotary=True, interleaved_rope=True),
    "Glm4ForCausalLM": Variant(_GLM, out_bias=False, norms=_GLM4_NORMS, partial_rotary=True, interleaved_rope=True),
    "SeedOssForCausalLM": Variant(_SEED_OSS, out_bias="attention_out_bias", mlp_bias="mlp_bias"),
    "Exaone4ForCausalLM": Variant(
        {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
        qkv_bias=False,
        out_bias=False,
        qk_norm="head",
        norms=_POST_NORMS,
        windows="by layer",
        no_rope="without window",
    ),
    "Ernie4_5ForCausalLM": Variant(
        {
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
        },
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        interleaved_rope=True,
    ),
}

# Checkpoints with a vision tower whose text model is one of the table, by its model_type.
_TEXT_OF_MISTRAL_3 = {"mistral": "Mistral", "ministral": "Ministral", "ministral3": "Ministral3"}
MULTIMODAL: Mapping[str, Mapping[str, str]] = {"Mistral3ForConditionalGeneration": _TEXT_OF_MISTRAL_3}


def read_llama(architecture: str, reader: ConfigReader) -> ModelConfig:
    """Read a config.json of an architecture in VARIANTS. Raises UnsupportedModel."""
    variant = VARIANTS[architecture]
    reader = reader.with_defaults(variant.defaults)
    num_layers = reader.count("num_hidden_layers")
    sliding = _read_sliding(reader, variant, num_layers)
    rope, *others = _read_ropes(reader, variant)
    ropes = [others[0] if others and slides else rope for slides in sliding]
    for layer in _without_rope(reader, variant, sliding):
        ropes[layer] = NO_ROPE
    context_len = read_context_len(reader, rope)
    attention = dataclasses.replace(
        read_attention(reader, rope),
        qk_norm=variant.qk_norm,
        qkv_bias=_has_bias(reader, variant.qkv_bias),
        out_bias=_has_bias(reader, variant.out_bias),
    )
    dense = MLPConfig(reader.count("intermediate_size"), bias=_has_bias(reader, variant.mlp_bias))
    experts = read_experts(reader, num_layers) if variant.experts else {}
    windows = _read_windows(reader, variant, sliding, context_len)
    embedding_scale = residual_scale = logits_divisor = 1.0
    if variant.multipliers:
        attention = dataclasses.replace(attention, scale=reader.number("attention_multiplier"))
        embedding_scale = reader.number("embedding_multiplier", 1.0)
        residual_scale = reader.number("residual_multiplier", 1.0)
        logits_divisor = reader.number("logits_scaling", 1.0)
    layers = [
        LayerConfig(
            dataclasses.replace(attention, window=windows[layer], rope=ropes[layer]),
            experts.get(layer, dense),
            variant.norms,
            residual_scale,
        )
        for layer in range(num_layers)
    ]
    model = read_model(architecture, reader, layers, context_len, float32_norms=variant.float32_norms)
    return dataclasses.replace(model, embedding_scale=embedding_scale, logits_scale=1 / logits_divisor)


def read_multimodal(architecture: str, reader: ConfigReader) -> ModelConfig:
    """Read a config.json of an architecture in MULTIMODAL, of which only text is served. Raises UnsupportedModel."""
    text = reader.text_config()
    families, model_type = MULTIMODAL[architecture], text.get("model_type")
    if model_type not in families:
        raise UnsupportedModel(f"text_config has model_type {brief(model_type)}; known are {', '.join(families)}")
    model = read_llama(f"{families[model_type]}ForCausalLM", text)
    return dataclasses.replace(model, architecture=architecture, checkpoint=MULTIMODAL_NAMES)


def _has_bias(reader: ConfigReader, key: str | bool) -> bool:
    return reader.flag(key) if isinstance(key, str) else key


def _read_ropes(reader: ConfigReader, variant: Variant) -> Sequence[RopeConfig]:
    """Return the rope of all layers, or one of layers without a window and one of layers with a window."""
    if variant.ropes_by_type:
        theta = reader.number("rope_theta")
        return read_ropes_by_type(reader, theta=theta, window_theta=theta)
    rope = read_rope(
        reader, partial=variant.partial_rotary, query_scaling=variant.query_scaling, longrope=variant.longrope
    )
    return (dataclasses.replace(rope, interleaved=variant.interleaved_rope),)


def _without_rope(reader: ConfigReader, variant: Variant, sliding: Sequence[bool]) -> list[int]:
    """Return the indices of layers without a rope."""
    if variant.no_rope == "never":
        return []
    if variant.no_rope == "without window":
        return [layer for layer, slides in enumerate(sliding) if not slides and reader.get("sliding_window")]
    with_rope = reader.get("no_rope_layers")  # transformers names it for its zeros
    interval = reader.count("no_rope_layer_interval", 4)
    if with_rope is None:
        with_rope = [int((layer + 1) % interval != 0) for layer in range(len(sliding))]
    if not isinstance(with_rope, list) or len(with_rope) < len(sliding) or any(one not in (0, 1) for one in with_rope):
        raise UnsupportedModel(f"no_rope_layers must hold 0 or 1 for each layer, not {brief(with_rope)}")
    return [layer for layer in range(len(sliding)) if not with_rope[layer]]


def _read_sliding(reader: ConfigReader, variant: Variant, num_layers: int) -> list[bool]:
    """Return True for each layer with a window."""
    named = read_layer_types(reader, num_layers)
    uses = reader.get("sliding_window") is not None and reader.flag("use_sliding_window", default=True)
    if named is not None:
        if any(named) and not uses:
            raise UnsupportedModel("layer_types has sliding_attention, but no sliding_window is set or used")
        return named
    if "sliding_window_pattern" in variant.defaults and reader.get("sliding_window_pattern") is not None:
        pattern = reader.count("sliding_window_pattern") if uses else 1
        return [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    first = reader.count("max_window_layers", 0, least=0) if "max_window_layers" in variant.defaults else 0
    return [layer >= first for layer in range(num_layers)]


def _read_windows(
    reader: ConfigReader, variant: Variant, sliding: Sequence[bool], context_len: int
) -> Sequence[int | None]:
    """Return the sliding window by layer."""
    num_layers = len(sliding)
    if reader.get("sliding_window") is None or not reader.flag("use_sliding_window", default=True):
        return [None] * num_layers
    window = reader.count("sliding_window")
    if window >= context_len or (variant.windows != "all" and not any(sliding)):
        return [None] * num_layers
    if variant.windows == "none":
        raise UnsupportedModel(f"sliding_window {window} is not supported for this architecture")
    if variant.windows == "all" and not all(sliding):
        raise UnsupportedModel(
            f"layer_types has full_attention, but sliding_window {window} is for all layers of this architecture"
        )
    return [window if slides else None for slides in sliding]
