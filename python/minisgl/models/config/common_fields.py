"""Parts of a config.json that families share: ropes in the forms of transformers 4 and 5, attention, the model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from minisgl.kernel.base import Routing
from minisgl.layers.layer_config import (
    AttentionConfig,
    LayerConfig,
    LinearScaling,
    Llama3Scaling,
    LongropeScaling,
    MoEConfig,
    NormConfig,
    ProportionalScaling,
    QueryScaling,
    RopeConfig,
    YarnScaling,
)
from minisgl.models.config.config_reader import ConfigReader, brief
from minisgl.models.config.model_config import CheckpointNames, ModelConfig, UnsupportedModel

_EXPERT_COUNTS = ("num_experts", "num_local_experts")  # one key under two names; transformers 5 writes the second

# Text model of a checkpoint that has a vision tower too, as transformers 5 and as transformers 4 name its tensors.
MULTIMODAL_NAMES = CheckpointNames(
    renamed=(
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    ignored=("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector."),
)


def read_attention(reader: ConfigReader, rope: RopeConfig, *, bias: bool = False) -> AttentionConfig:
    """Read heads and their sizes, scaled by head_dim ** -0.5. `bias`: all of its products have biases."""
    num_heads, hidden_size = reader.count("num_attention_heads"), reader.count("hidden_size")
    if reader.get("head_dim") is None and hidden_size % num_heads:
        raise UnsupportedModel(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    num_kv_heads = reader.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModel(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    head_dim = reader.count("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise UnsupportedModel(f"head_dim {head_dim} is odd; rotary embeddings need an even one")
    if (rotary_dim := rope.rotary_dim(head_dim)) % 2 or not 0 < rotary_dim <= head_dim:
        raise UnsupportedModel(
            f"partial_rotary_factor {rope.partial_factor} rotates {rotary_dim} of {head_dim} dimensions"
        )
    if isinstance(rope.scaling, LongropeScaling) and 2 * len(rope.scaling.short_factors) != rotary_dim:
        raise UnsupportedModel(
            f"short_factor must hold {rotary_dim // 2} numbers, not {len(rope.scaling.short_factors)}"
        )
    return AttentionConfig(num_heads, num_kv_heads, head_dim, rope, scale=head_dim**-0.5, qkv_bias=bias, out_bias=bias)


def read_window(reader: ConfigReader, context_len: int) -> int | None:
    """Return the sliding window; None if no sequence is longer than it."""
    window = reader.count("sliding_window")
    return window if window < context_len else None


def read_layer_types(reader: ConfigReader, num_layers: int) -> list[bool] | None:
    """Return True for each layer with a sliding window, by layer_types; None without that key."""
    types = reader.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list):
        raise UnsupportedModel(f"layer_types must be a list, not {brief(types)}")
    others = sorted(set(map(str, types)) - {"full_attention", "sliding_attention"})
    if others:
        raise UnsupportedModel(f"layer type {', '.join(others)} is not supported")
    if len(types) != num_layers:
        raise UnsupportedModel(f"layer_types names {len(types)} layers, but num_hidden_layers is {num_layers}")
    return [kind == "sliding_attention" for kind in types]


def read_expert_counts(reader: ConfigReader, experts: str, chosen: str = "num_experts_per_tok") -> tuple[int, int]:
    """Read the number of experts and how many a token chooses. UnsupportedModel if it chooses more than there are."""
    count, top_k = reader.count(experts), reader.count(chosen)
    if top_k > count:
        raise UnsupportedModel(f"{chosen} {top_k} is more than {experts} {count}")
    return count, top_k


def read_experts(reader: ConfigReader, num_layers: int) -> dict[int, MoEConfig]:
    """Read the sparse layers, by index, of Qwen's families."""
    key = next((key for key in _EXPERT_COUNTS if reader.get(key) is not None), _EXPERT_COUNTS[0])
    num_experts, chosen = read_expert_counts(reader, key)
    dense = reader.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise UnsupportedModel(f"mlp_only_layers must be a list of layers, not {brief(dense)}")
    step = reader.count("decoder_sparse_step", 1)
    routing = Routing(chosen, renormalize=reader.flag("norm_topk_prob"))
    experts = MoEConfig(num_experts, reader.count("moe_intermediate_size"), routing)
    return {layer: experts for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0}


def read_model(
    architecture: str,
    reader: ConfigReader,
    layers: Sequence[LayerConfig],
    context_len: int,
    *,
    float32_norms: bool = False,
    unit_offset: bool = False,
    checkpoint: CheckpointNames = CheckpointNames(),  # noqa: B008
) -> ModelConfig:
    """Return a decoder of these layers. UnsupportedModel for a key that changes the result and has not been read.

    `float32_norms` and `unit_offset` as in NormConfig.
    """
    model = ModelConfig(
        architecture=architecture,
        vocab_size=reader.count("vocab_size"),
        hidden_size=reader.count("hidden_size"),
        layers=tuple(layers),
        norm=NormConfig(reader.number("rms_norm_eps", 1e-6), float32=float32_norms, unit_offset=unit_offset),
        max_position_embeddings=context_len,
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        dtype=reader.dtype(),
        initializer_range=reader.number("initializer_range", 0.02),
        checkpoint=checkpoint,
    )
    reader.refuse_unread()
    return model


def read_rope(
    reader: ConfigReader, *, partial: bool = False, query_scaling: bool = False, longrope: bool = False
) -> RopeConfig:
    """Read the rope that all layers share.

    `partial`: the family may rotate a part of each head. `query_scaling`: it may scale queries as Llama 4 does.
    `longrope`: its rope may be LongRoPE.
    """
    parameters = rope_parameters(reader)
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedModel(f"rope parameters by layer type ({', '.join(parameters)}) are not supported")
    inner, factor, scaling = ConfigReader(parameters), 1.0, None
    if partial:
        factor = inner.number("partial_rotary_factor", reader.number("partial_rotary_factor", 1.0))
        parameters = {**parameters, "partial_rotary_factor": None}
    if query_scaling and inner.get("llama_4_scaling_beta") is not None:
        scaling = QueryScaling(inner.number("llama_4_scaling_beta"), _original_length(reader, inner))
        parameters = {**parameters, "llama_4_scaling_beta": None}
    rope = parse_rope(reader, parameters, longrope=longrope)
    return dataclasses.replace(rope, partial_factor=factor, query_scaling=scaling)


def read_ropes_by_type(reader: ConfigReader, *, theta: float, window_theta: float) -> tuple[RopeConfig, RopeConfig]:
    """Read the ropes of layers without and with a window: from one object for each, or, as in transformers 4, from
    rope_scaling for the first alone. `theta`, `window_theta`: bases where these objects name none.
    """
    parameters = rope_parameters(reader)
    full, window = parameters.get("full_attention", parameters), parameters.get("sliding_attention", {})
    if not isinstance(full, dict) or not isinstance(window, dict):
        raise UnsupportedModel(f"rope_parameters must hold an object for each layer type, not {brief(parameters)}")
    return parse_rope(reader, {"rope_theta": theta, **full}), parse_rope(reader, {"rope_theta": window_theta, **window})


def rope_parameters(reader: ConfigReader) -> Mapping[str, Any]:
    """Return the object that describes the rope.

    Transformers 5 has all in rope_parameters; before, rope_theta stood outside and rope_scaling could be null.
    """
    rope = reader.get("rope_scaling") or reader.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise UnsupportedModel(f"rope_scaling must be an object, not {brief(rope)}")
    return rope


def parse_rope(reader: ConfigReader, parameters: Mapping[str, Any], *, longrope: bool = False) -> RopeConfig:
    """Read one kind of layer's rope; its `parameters` may leave theta and original length to the outer object.

    `longrope`: it may be LongRoPE, for `read_context_len` bounds the context then.
    """
    rope, max_positions = ConfigReader(parameters), reader.count("max_position_embeddings")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "proportional" and rope.get("partial_rotary_factor") not in (None, 1):
        raise UnsupportedModel(f"partial_rotary_factor {brief(rope.get('partial_rotary_factor'))} is not supported")
    if rope.get("llama_4_scaling_beta") is not None:
        raise UnsupportedModel(f"llama_4_scaling_beta {brief(rope.get('llama_4_scaling_beta'))} is not supported")
    theta = rope.number("rope_theta", reader.number("rope_theta", 10000.0))
    original = _original_length(reader, rope)
    match kind:
        case "default":
            return RopeConfig(theta)
        case "linear":
            return RopeConfig(theta, LinearScaling(rope.number("factor")))
        case "llama3":
            return RopeConfig(theta, _llama3(rope, original))
        case "yarn":
            return RopeConfig(theta, _yarn(rope, "factor" in parameters, original, max_positions))
        case "longrope" | "su" if longrope:
            return RopeConfig(theta, _longrope(rope, original, max_positions))
        case "proportional":
            share = rope.number("partial_rotary_factor", 1.0)
            return RopeConfig(theta, ProportionalScaling(share, rope.number("factor", 1.0)))
        case "dynamic" if original >= max_positions:
            return RopeConfig(theta)  # nothing changes up to the original length, and no more is served
        case "dynamic":
            raise UnsupportedModel(
                f'rope type "dynamic" is not supported beyond the original length: max_position_embeddings is '
                f"{max_positions}, original_max_position_embeddings {original}"
            )
    raise UnsupportedModel(
        f"rope type {brief(kind)} is not supported; known are default, linear, llama3, yarn, proportional, dynamic"
    )


def _original_length(reader: ConfigReader, rope: ConfigReader) -> int:
    """Return the context length before it was extended; a value outside of the rope's object has priority."""
    named = rope.count("original_max_position_embeddings", reader.count("max_position_embeddings"))
    return reader.count("original_max_position_embeddings", named)


def read_context_len(reader: ConfigReader, rope: RopeConfig) -> int:
    """Return the context length. Qwen's cards add YaRN but keep max_position_embeddings at the original length."""
    max_positions = reader.count("max_position_embeddings")
    if isinstance(rope.scaling, LongropeScaling):
        return min(max_positions, rope.scaling.original_max_positions)
    named = reader.get("original_max_position_embeddings") or rope_parameters(reader).get(
        "original_max_position_embeddings"
    )
    if isinstance(rope.scaling, YarnScaling) and named:
        return max(max_positions, int(rope.scaling.factor * rope.scaling.original_max_positions))
    return max_positions


def _llama3(rope: ConfigReader, original: int) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_positions=original,
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise UnsupportedModel(
            f"rope type llama3 needs high_freq_factor ({scaling.high_freq_factor}) above "
            f"low_freq_factor ({scaling.low_freq_factor})"
        )
    return scaling


def _longrope(rope: ConfigReader, original: int, max_positions: int) -> LongropeScaling:
    factors = rope.get("short_factor")
    if not isinstance(factors, list) or not all(isinstance(one, int | float) and one > 0 for one in factors):
        raise UnsupportedModel(f"short_factor must be a list of positive numbers, not {brief(factors)}")
    factor = rope.number("factor", max_positions / original)
    derived = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return LongropeScaling(tuple(map(float, factors)), rope.number("attention_factor", derived), original)


def _yarn(rope: ConfigReader, has_factor: bool, original: int, max_positions: int) -> YarnScaling:
    # A factor of null (but not one left out) is what the two lengths say.
    factor = rope.number("factor", max_positions / original if has_factor else None)

    def attention(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        derived = attention(rope.number("mscale")) / attention(rope.number("mscale_all_dim"))
    else:
        derived = attention(1)
    scaling = YarnScaling(
        factor=factor,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor", derived),
        truncate=rope.flag("truncate", default=True),
        original_max_positions=original,
    )
    if scaling.beta_fast < scaling.beta_slow:
        raise UnsupportedModel(
            f"rope type yarn needs beta_fast ({scaling.beta_fast}) not below beta_slow ({scaling.beta_slow})"
        )
    return scaling
