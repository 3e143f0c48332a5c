"""DeepSeek V2 and V3 (DeepSeek-AI, 2024) and related models: R1, Moonlight, Kimi K2 (Moonshot AI, 2025) and
GLM-4.7-Flash (GLM team, 2026). Latent attention, many small experts and shared ones, dense first layers.

Layers for multi-token prediction, which follow the others, are left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from minisgl.kernel.base import Routing
from minisgl.layers.layer_config import AttentionConfig, LatentConfig, LayerConfig, MLPConfig, MoEConfig, RopeConfig
from minisgl.models.config.common_fields import read_context_len, read_model, read_rope, rope_parameters
from minisgl.models.config.config_reader import ConfigReader, brief
from minisgl.models.config.model_config import CheckpointNames, ModelConfig, UnsupportedModel

_V2 = "DeepseekV2ForCausalLM"
_DEEPSEEK: Mapping[str, Any] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
# Values that transformers takes for keys which a config.json leaves out.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    _V2: {
        **_DEEPSEEK,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
        "topk_method": "greedy",
    },
    "DeepseekV3ForCausalLM": {
        **_DEEPSEEK,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 3,
    },
    "Glm4MoeLiteForCausalLM": {
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
    },
}
ARCHITECTURES = tuple(_DEFAULTS)


def read_deepseek(architecture: str, reader: ConfigReader) -> ModelConfig:
    """Read a config.json of an architecture in ARCHITECTURES. Raises UnsupportedModel."""
    reader = reader.with_defaults(_DEFAULTS[architecture])
    for key in ("attention_bias", "mlp_bias"):
        if reader.flag(key):
            raise UnsupportedModel(f"{key} true is not supported for this architecture")
    rope = dataclasses.replace(read_rope(reader), interleaved=reader.flag("rope_interleave", default=True))
    attention = _read_attention(reader, rope)
    dense, experts = MLPConfig(reader.count("intermediate_size")), _read_experts(architecture, reader)
    sparse = _read_sparse_layers(reader)
    layers = [LayerConfig(attention, experts if is_sparse else dense) for is_sparse in sparse]
    names = without_prediction(reader)
    return read_model(architecture, reader, layers, read_context_len(reader, rope), checkpoint=names)


def _read_attention(reader: ConfigReader, rope: RopeConfig) -> AttentionConfig:
    num_heads = reader.count("num_attention_heads")
    if (num_kv_heads := reader.count("num_key_value_heads", num_heads)) != num_heads:
        raise UnsupportedModel(
            f"num_key_value_heads {num_kv_heads} must be num_attention_heads {num_heads}: "
            "latent attention has no groups of heads"
        )
    latent = LatentConfig(
        kv_rank=reader.count("kv_lora_rank"),
        nope_dim=reader.count("qk_nope_head_dim"),
        rope_dim=reader.count("qk_rope_head_dim"),
        value_dim=reader.count("v_head_dim"),
        q_rank=None if reader.get("q_lora_rank") is None else reader.count("q_lora_rank"),
    )
    if latent.rope_dim % 2:
        raise UnsupportedModel(f"qk_rope_head_dim {latent.rope_dim} is odd; rotary embeddings need an even one")
    return AttentionConfig(
        num_heads,
        num_kv_heads=1,
        head_dim=latent.kv_rank + latent.rope_dim,
        rope=rope,
        scale=(latent.nope_dim + latent.rope_dim) ** -0.5 * _yarn_scale(reader),
        latent=latent,
    )


def _yarn_scale(reader: ConfigReader) -> float:
    """Return the factor of the scores for a rope with mscale_all_dim: the square of YaRN's temperature."""
    parameters = ConfigReader(rope_parameters(reader))
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default" or not parameters.get("mscale_all_dim"):
        return 1.0
    factor = parameters.number("factor")
    return (0.1 * parameters.number("mscale_all_dim") * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0


def _read_experts(architecture: str, reader: ConfigReader) -> MoEConfig:
    """Read how V2 or V3 chooses its experts; other ways are refused."""
    method = reader.get("topk_method")
    if architecture != _V2:
        _expect(reader, "topk_method", "noaux_tc")
        _expect(reader, "scoring_func", "sigmoid")
        return read_grouped_experts(reader)
    _expect(reader, "topk_method", "greedy", "group_limited_greedy")
    _expect(reader, "scoring_func", "softmax")
    _expect(reader, "norm_topk_prob", False)  # transformers ignores it, DeepSeek's code then leaves out the scale
    experts = read_grouped_experts(reader)
    grouped = method == "group_limited_greedy"
    routing = dataclasses.replace(
        experts.routing,
        score="softmax",
        groups=experts.routing.groups if grouped else 1,
        top_groups=experts.routing.top_groups if grouped else 1,
        group_scores=1,
    )
    return dataclasses.replace(experts, routing=routing, choice_bias=False)


def _expect(reader: ConfigReader, key: str, *known: Any) -> None:
    """Raise UnsupportedModel for another value than these, or none."""
    value = reader.get(key)
    if value is not None and value not in known:
        raise UnsupportedModel(f"{key} {brief(value)} is not supported for this architecture")


def _read_sparse_layers(reader: ConfigReader) -> list[bool]:
    """Return True for each layer with experts."""
    num_layers, types = reader.count("num_hidden_layers"), reader.get("mlp_layer_types")
    if types is None:
        first = reader.count("first_k_dense_replace", least=0)
        return [layer >= first for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(one not in ("dense", "sparse") for one in types):
        raise UnsupportedModel(f"mlp_layer_types must hold dense or sparse for each layer, not {brief(types)}")
    return [one == "sparse" for one in types]


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


def without_prediction(reader: ConfigReader) -> CheckpointNames:
    """Return a checkpoint's names without its layers for multi-token prediction, which follow the others."""
    num_layers = reader.count("num_hidden_layers")
    count = reader.count("num_nextn_predict_layers", reader.count("num_mtp_layers", 1, least=0), least=0)
    return CheckpointNames(ignored=tuple(f"model.layers.{num_layers + layer}." for layer in range(count)))
