"""Gemma 4, its text model (Gemma team, 2026): Gemma 3 with wider heads and fewer KV heads without a window.

26B-A4B has experts beside the MLP of each layer; E2B and E4B have embeddings for each layer, and their last layers
attend to K and V of earlier ones. Towers for images and sound are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from minisgl.kernel.base import Routing
from minisgl.layers.layer_config import (
    AttentionConfig,
    Gemma4Parts,
    LayerConfig,
    LayerInputConfig,
    MLPConfig,
    MoEConfig,
)
from minisgl.models.config.common_fields import (
    MULTIMODAL_NAMES,
    read_attention,
    read_expert_counts,
    read_layer_types,
    read_model,
    read_ropes_by_type,
    read_window,
)
from minisgl.models.config.config_reader import ConfigReader, brief
from minisgl.models.config.model_config import CheckpointNames, ModelConfig, UnsupportedModel
from minisgl.models.families.gemma3 import SANDWICH_NORMS, check_activation

_TEXT, _WITH_TOWERS = "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"
ARCHITECTURES = (_TEXT, _WITH_TOWERS)
_DEFAULTS: Mapping[str, Any] = {  # defaults of transformers' Gemma4TextConfig
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}
_TOWERS = ("model.embed_vision.", "model.audio_tower.", "model.embed_audio.")
_CHECKPOINT = dataclasses.replace(MULTIMODAL_NAMES, ignored=(*MULTIMODAL_NAMES.ignored, *_TOWERS))


def read_gemma4(architecture: str, reader: ConfigReader) -> ModelConfig:
    """Read a config.json of an architecture in ARCHITECTURES. Raises UnsupportedModel."""
    if architecture == _WITH_TOWERS:
        reader = reader.text_config()
    reader = reader.with_defaults(_DEFAULTS)
    check_activation(reader)
    both_ways = reader.get("use_bidirectional_attention")
    if both_ways not in (None, False, "vision"):  # images are not served
        raise UnsupportedModel(f"use_bidirectional_attention {brief(both_ways)} is not supported")
    num_layers, context_len = reader.count("num_hidden_layers"), reader.count("max_position_embeddings")
    windowed = read_layer_types(reader, num_layers) or [(layer + 1) % 6 != 0 for layer in range(num_layers)]
    windowed[-1] = False  # transformers ignores the file here
    sliding, full = _read_attentions(reader, read_window(reader, context_len))
    _check_sizes(reader, sliding, full, windowed)
    mlp = MLPConfig(reader.count("intermediate_size"), activation="gelu_tanh")
    parts = Gemma4Parts(experts=_read_experts(reader) if reader.flag("enable_moe_block") else None)
    sources = _kv_sources(reader, windowed)
    shared_mlp = MLPConfig(2 * mlp.intermediate_size, mlp.activation) if reader.flag("use_double_wide_mlp") else mlp
    layers = [
        LayerConfig(
            dataclasses.replace(sliding if slides else full, kv_of=source),
            mlp if source is None else shared_mlp,
            SANDWICH_NORMS,
            gemma4=parts,
        )
        for slides, source in zip(windowed, sources, strict=True)
    ]
    inputs = _read_layer_inputs(reader)
    cap = None if reader.get("final_logit_softcapping") is None else reader.number("final_logit_softcapping")
    names = _checkpoint(_CHECKPOINT if architecture == _WITH_TOWERS else CheckpointNames(), sources)
    model = read_model(architecture, reader, layers, context_len, float32_norms=True, checkpoint=names)
    return dataclasses.replace(
        model,
        layer_inputs=inputs,
        embedding_scale=reader.count("hidden_size") ** 0.5,
        logits_softcap=cap,
    )


def _read_attentions(reader: ConfigReader, window: int | None) -> tuple[AttentionConfig, AttentionConfig]:
    """Read attention of layers with a window and of those without, whose heads have another size."""
    theta = reader.number("rope_theta", 10_000.0)
    full_rope, window_rope = read_ropes_by_type(reader, theta=theta, window_theta=theta)
    attention = read_attention(reader, window_rope, bias=reader.flag("attention_bias"))
    sliding = dataclasses.replace(attention, scale=1.0, window=window, qk_norm="head", v_norm=True)
    k_is_v, head_dim, num_kv_heads = reader.flag("attention_k_eq_v"), sliding.head_dim, sliding.num_kv_heads
    if (saved := _saved_sizes(reader)) is not None:
        head_dim = saved.count("head_dim", head_dim)
        num_kv_heads = saved.count("num_key_value_heads", num_kv_heads)
    else:
        head_dim = reader.count("global_head_dim")
        if k_is_v:
            num_kv_heads = reader.count("num_global_key_value_heads", num_kv_heads)
    full = dataclasses.replace(
        sliding, rope=full_rope, window=None, head_dim=head_dim, num_kv_heads=num_kv_heads, k_is_v=k_is_v
    )
    if full.head_dim % 2 or full.num_heads % full.num_kv_heads:
        raise UnsupportedModel(
            f"global_head_dim {full.head_dim} is odd, or num_attention_heads {full.num_heads} is not a multiple of "
            f"num_global_key_value_heads {full.num_kv_heads}"
        )
    return sliding, full


def _kv_sources(reader: ConfigReader, windowed: list[bool]) -> list[int | None]:
    """Return by layer the earlier layer whose K and V it reads, the last one of its kind; None: it has its own."""
    shared = reader.count("num_kv_shared_layers", 0, least=0)
    own = windowed[: max(len(windowed) - shared, 0)]
    if set(windowed) != set(own):
        raise UnsupportedModel(
            f"num_kv_shared_layers {shared} leaves no layer of each type that has K and V for the others"
        )
    last = {kind: max(layer for layer, slides in enumerate(own) if slides == kind) for kind in set(own)}
    return [None] * len(own) + [last[slides] for slides in windowed[len(own) :]]


def _checkpoint(names: CheckpointNames, sources: list[int | None]) -> CheckpointNames:
    """Return names without K and V of layers that share them; published files contain these tensors."""
    prefixes = [theirs for theirs, ours in names.renamed if ours == "model."] or ["model."]
    unused = tuple(
        f"{prefix}layers.{layer}.self_attn.{name}."
        for prefix in prefixes
        for layer, source in enumerate(sources)
        if source is not None
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    )
    return dataclasses.replace(names, ignored=names.ignored + unused)


def _read_layer_inputs(reader: ConfigReader) -> LayerInputConfig | None:
    """Read the embeddings of the tokens for each layer; None if the model has none."""
    size, ids = reader.count("hidden_size_per_layer_input", 0, least=0), reader.count("vocab_size_per_layer_input")
    if size and ids < (vocab_size := reader.count("vocab_size")):
        raise UnsupportedModel(f"vocab_size_per_layer_input {ids} is less than vocab_size {vocab_size}")
    return LayerInputConfig(size, ids) if size else None


def _read_experts(reader: ConfigReader) -> MoEConfig:
    """Read the experts beside the MLP of every layer."""
    num_experts, chosen = read_expert_counts(reader, "num_experts", "top_k_experts")
    size = reader.count("moe_intermediate_size")
    return MoEConfig(num_experts, size, Routing(chosen, renormalize=True), activation="gelu_tanh")


def _saved_sizes(reader: ConfigReader) -> ConfigReader | None:
    """Return the sizes of layers without a window as transformers saves them, layer by layer, or None.

    Sizes that all layers share are not repeated there.
    """
    layers = reader.get("per_layer_config")
    if layers is None:
        return None
    first: Any = next(iter(layers.values()), {}) if isinstance(layers, dict) else {}
    return ConfigReader(first if isinstance(first, dict) else {})


def _check_sizes(reader: ConfigReader, sliding: AttentionConfig, full: AttentionConfig, windowed: list[bool]) -> None:
    """Refuse a per_layer_config with other contents than these sizes. Its keys are layers, such as "5" or "05"."""
    written = reader.get("per_layer_config")
    if written is None:
        return
    common, own = _sizes(sliding), _sizes(full)
    wanted = {layer: common if slides else own for layer, slides in enumerate(windowed)}
    known = isinstance(written, dict) and all(
        layer.isdecimal() and isinstance(sizes, dict) for layer, sizes in written.items()
    )
    if (
        not known
        or dict.fromkeys(wanted, common) | {int(key): common | sizes for key, sizes in written.items()} != wanted
    ):
        ours = {layer: own for layer, slides in enumerate(windowed) if not slides}
        raise UnsupportedModel(f"per_layer_config {brief(written)} is not supported; known is {brief(ours)}")


def _sizes(attention: AttentionConfig) -> dict[str, int]:
    return {"head_dim": attention.head_dim, "num_key_value_heads": attention.num_kv_heads}
