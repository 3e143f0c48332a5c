"""Llama and the families that differ from it by a few words.

Llama 2 and 3 (Touvron et al., 2023; Llama team, 2024), Mistral (Jiang et al., 2023), Qwen2 and Qwen2.5 (Qwen team,
2024), Qwen3 and Qwen3-MoE (Qwen team, 2025), OLMo 2 (OLMo team, 2025), Phi-3 and Phi-4 (Abdin et al., 2024).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from minisgl.kernel.base import Routing
from minisgl.layers.layer_config import LayerConfig, MLPConfig, MoEConfig, NormNames, QKNorm
from minisgl.models.config.common_fields import (
    read_attention,
    read_context_len,
    read_layer_types,
    read_model,
    read_rope,
)
from minisgl.models.config.config_reader import ConfigReader, brief
from minisgl.models.config.model_config import ModelConfig, UnsupportedModel

_PRE_NORMS = NormNames()
_POST_NORMS = NormNames(None, None, "post_attention_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of the table: how a family differs from Llama.

    `defaults`: values that transformers takes for keys a config.json leaves out. `bias`: of the attention's products,
    as attention_bias says, of q, k and v alone, or none. `windows`: layers that sliding_window is for; "by layer" are
    those that layer_types names or, without it, those from max_window_layers on. `float32_norms`: a norm's result is
    rounded once, after its weight. `partial_rotary`: partial_rotary_factor may leave the end of each head unrotated.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    bias: Literal["attention_bias", "qkv", "none"] = "attention_bias"
    mlp_bias: bool = False  # the MLP has biases where the key mlp_bias says so
    qk_norm: QKNorm = "none"
    norms: NormNames = _PRE_NORMS
    float32_norms: bool = False
    partial_rotary: bool = False
    windows: Literal["none", "all", "by layer"] = "none"
    experts: bool = False  # some layers have experts in place of the dense MLP


_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
_QWEN_WINDOWS = {**_QWEN_WINDOW, "max_window_layers": 28}
_EXPERTS = ("num_experts", "num_local_experts")  # one key under two names; transformers 5 writes the second

VARIANTS: Mapping[str, Variant] = {
    "LlamaForCausalLM": Variant(mlp_bias=True),
    "MistralForCausalLM": Variant({"num_key_value_heads": 8, "sliding_window": 4096}, bias="none", windows="all"),
    "Qwen2ForCausalLM": Variant(_QWEN_WINDOWS, bias="qkv", windows="by layer"),
    "Qwen3ForCausalLM": Variant({"head_dim": 128, **_QWEN_WINDOWS}, qk_norm="head", windows="by layer"),
    "Qwen3MoeForCausalLM": Variant(_QWEN_WINDOW, qk_norm="head", windows="all", experts=True),
    "Olmo2ForCausalLM": Variant({"rms_norm_eps": 1e-5}, qk_norm="projection", norms=_POST_NORMS, float32_norms=True),
    "Phi3ForCausalLM": Variant({"rms_norm_eps": 1e-5}, bias="none", windows="all", partial_rotary=True),
}


def read_llama(architecture: str, reader: ConfigReader) -> ModelConfig:
    """Read a config.json of an architecture in VARIANTS. Raises UnsupportedModel."""
    variant = VARIANTS[architecture]
    reader = reader.with_defaults(variant.defaults)
    rope = read_rope(reader, partial=variant.partial_rotary)
    context_len = read_context_len(reader, rope)
    num_layers = reader.count("num_hidden_layers")
    has_bias = variant.bias == "attention_bias" and reader.flag("attention_bias")
    attention = dataclasses.replace(
        read_attention(reader, rope),
        qk_norm=variant.qk_norm,
        qkv_bias=has_bias or variant.bias == "qkv",
        out_bias=has_bias,
    )
    dense = MLPConfig(reader.count("intermediate_size"), bias=variant.mlp_bias and reader.flag("mlp_bias"))
    experts = _read_experts(reader, num_layers) if variant.experts else {}
    windows = _read_windows(reader, variant, num_layers, context_len)
    layers = [
        LayerConfig(dataclasses.replace(attention, window=window), experts.get(index, dense), variant.norms)
        for index, window in enumerate(windows)
    ]
    model = read_model(architecture, reader, layers, context_len)
    return dataclasses.replace(model, norm=dataclasses.replace(model.norm, float32=variant.float32_norms))


def _read_windows(reader: ConfigReader, variant: Variant, num_layers: int, context_len: int) -> list[int | None]:
    """Sliding window by layer."""
    named = read_layer_types(reader, num_layers)
    if named is None:
        first = reader.count("max_window_layers", 0, least=0) if variant.windows == "by layer" else 0
        sliding = [layer >= first for layer in range(num_layers)]
    else:
        sliding = named
    if reader.get("sliding_window") is None or not reader.flag("use_sliding_window", default=True):
        if named is not None and any(sliding):
            raise UnsupportedModel("layer_types has sliding_attention, but no sliding_window is set or used")
        return [None] * num_layers
    window = reader.count("sliding_window")
    if window >= context_len or not any(sliding):
        return [None] * num_layers
    if variant.windows == "none":
        raise UnsupportedModel(f"sliding_window {window} is not supported for this architecture")
    if variant.windows == "all" and not all(sliding):
        raise UnsupportedModel("layer_types that differ are not supported for this architecture")
    return [window if slides else None for slides in sliding]


def _read_experts(reader: ConfigReader, num_layers: int) -> dict[int, MoEConfig]:
    """The sparse layers by index."""
    key = next((key for key in _EXPERTS if reader.get(key) is not None), _EXPERTS[0])
    num_experts, chosen = reader.count(key), reader.count("num_experts_per_tok")
    if chosen > num_experts:
        raise UnsupportedModel(f"num_experts_per_tok {chosen} is more than {key} {num_experts}")
    dense = reader.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise UnsupportedModel(f"mlp_only_layers must be a list of layers, not {brief(dense)}")
    step = reader.count("decoder_sparse_step", 1)
    routing = Routing(chosen, renormalize=reader.flag("norm_topk_prob"))
    experts = MoEConfig(num_experts, reader.count("moe_intermediate_size"), routing)
    return {layer: experts for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0}
