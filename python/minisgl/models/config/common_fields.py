"""Keys of a config.json that families read alike."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.layers.layer_config import AttentionConfig, LayerConfig, NormConfig, RopeConfig
from minisgl.models.config.config_reader import ConfigReader, brief
from minisgl.models.config.model_config import ModelConfig, UnsupportedModel


def read_attention(reader: ConfigReader, rope: RopeConfig) -> AttentionConfig:
    """Heads and their sizes, scaled by head_dim ** -0.5."""
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
    return AttentionConfig(num_heads, num_kv_heads, head_dim, rope, scale=head_dim**-0.5)


def read_layer_types(reader: ConfigReader, num_layers: int) -> list[bool] | None:
    """True for each layer with a sliding window, as layer_types says; None without that key."""
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


def read_model(architecture: str, reader: ConfigReader, layers: Sequence[LayerConfig], context_len: int) -> ModelConfig:
    """A decoder of these layers. UnsupportedModel for a key that changes the result and has not been read."""
    model = ModelConfig(
        architecture=architecture,
        vocab_size=reader.count("vocab_size"),
        hidden_size=reader.count("hidden_size"),
        layers=tuple(layers),
        norm=NormConfig(reader.number("rms_norm_eps", 1e-6)),
        max_position_embeddings=context_len,
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        dtype=reader.dtype(),
        initializer_range=reader.number("initializer_range", 0.02),
    )
    reader.refuse_unread()
    return model
