"""A model's shape, read from a Hugging Face folder. Pure: the supervisor reads it to fail early, without torch.

What a config asks for and the layers lack is refused by name. Keys that do not change the result are ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from minisgl.config import ConfigError
from minisgl.models.registry import FAMILIES

DTypeName = Literal["float32", "bfloat16", "float16"]


class ModelError(ConfigError):
    """A model that cannot be served; the text is one line for the person who named it."""


class UnsupportedModel(ModelError):
    """The model, or something that its config asks for, is not there or not implemented."""


class WeightError(ModelError):
    """The checkpoint does not hold the weights that the config describes."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Frequencies stretched by `factor` where a wave is longer than the original context (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    scaling: Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: DTypeName
    initializer_range: float
    eos_token_ids: tuple[int, ...]

    def check_tp(self, size: int) -> None:
        """UnsupportedModel if the layers cannot be divided among `size` ranks.

        KV heads are replicated and the vocabulary is padded, so neither has to divide.
        """
        for count, what in ((self.num_heads, "attention heads"), (self.intermediate_size, "intermediate size")):
            if count % size:
                raise UnsupportedModel(
                    f"tensor parallelism over {size} ranks does not divide the model's {what} ({count})"
                )

    def heads_per_rank(self, tp_size: int) -> int:
        return self.num_heads // tp_size

    def kv_heads_per_rank(self, tp_size: int) -> int:
        """KV heads that each rank stores, replicas included: the KV pool's `num_kv_heads`."""
        return len(self.kv_heads_of(0, tp_size))

    def kv_heads_of(self, rank: int, tp_size: int) -> list[int]:
        """The KV head behind each equal block of a rank's query heads; a head may stand there more than once."""
        heads, group = self.heads_per_rank(tp_size), self.num_heads // self.num_kv_heads
        block = math.gcd(heads, group)
        return [head // group for head in range(rank * heads, (rank + 1) * heads, block)]


# Keys that would change the result, with the value at which they do not. Null is always harmless.
_NEUTRAL: Mapping[str, Any] = {
    "hidden_act": "silu",
    "partial_rotary_factor": 1,
    "quantization_config": None,
    "compression_config": None,
    "per_layer_config": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "attention_multiplier": None,
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "logits_scaling": 1,
    "logit_scale": 1,
    "attention_chunk_size": None,
    "no_rope_layers": None,
    "num_experts": None,
    "num_local_experts": None,
    "use_qk_norm": False,
    "qk_layernorm": False,
    "alibi": False,
    "is_causal": True,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
}


def load_model_config(folder: Path) -> ModelConfig:
    """Read config.json and, if it is there, generation_config.json. Raises UnsupportedModel."""
    if not folder.is_dir():
        raise UnsupportedModel(f"{folder} is not a folder")
    if not (folder / "config.json").is_file():
        raise UnsupportedModel(f"{folder} has no config.json")
    generation = folder / "generation_config.json"
    return parse_config(_read_json(folder / "config.json"), _read_json(generation) if generation.is_file() else {})


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """The same from the two files' contents; takes the keys of transformers 4 and of 5."""
    architecture = _architecture(raw)
    raw = {**FAMILIES[architecture].defaults, **raw}
    for key, neutral in _NEUTRAL.items():
        if raw.get(key) is not None and raw[key] != neutral:
            raise UnsupportedModel(f"{key} {_brief(raw[key])} is not supported")

    num_heads = _count(raw, "num_attention_heads")
    hidden_size = _count(raw, "hidden_size")
    if raw.get("head_dim") is None and hidden_size % num_heads:
        raise UnsupportedModel(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    num_kv_heads = _count(raw, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModel(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    head_dim = _count(raw, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise UnsupportedModel(f"head_dim {head_dim} is odd; rotary embeddings need an even one")

    num_layers = _count(raw, "num_hidden_layers")
    max_positions = _count(raw, "max_position_embeddings")
    _refuse_window(raw, num_layers, max_positions)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_count(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope=_rope(raw, max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
        attention_bias=_flag(raw, "attention_bias"),
        mlp_bias=_flag(raw, "mlp_bias"),
        dtype=_dtype(raw),
        initializer_range=_number(raw, "initializer_range", 0.02),
        eos_token_ids=_eos(raw, generation or {}),
    )


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names:
        raise UnsupportedModel("config.json names no architecture (key architectures)")
    for name in names:
        if name in FAMILIES:
            return str(name)
    known = ", ".join(sorted(FAMILIES))
    raise UnsupportedModel(f"architecture {', '.join(map(str, names))} is not supported; known are {known}")


def _rope(raw: Mapping[str, Any], max_positions: int) -> RopeConfig:
    # transformers 5 has all in rope_parameters; before, rope_theta stood outside and rope_scaling could be null.
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise UnsupportedModel(f"rope_scaling must be an object, not {_brief(rope)}")
    if any(isinstance(value, dict) for value in rope.values()):
        raise UnsupportedModel(f"rope parameters by layer type ({', '.join(rope)}) are not supported")
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise UnsupportedModel(f"partial_rotary_factor {_brief(rope['partial_rotary_factor'])} is not supported")
    theta = _number(rope, "rope_theta", _number(raw, "rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind != "llama3":
        raise UnsupportedModel(f"rope type {_brief(kind)} is not supported; known are default, llama3")
    original = _count(rope, "original_max_position_embeddings", max_positions)
    scaling = Llama3Scaling(
        factor=_number(rope, "factor"),
        low_freq_factor=_number(rope, "low_freq_factor"),
        high_freq_factor=_number(rope, "high_freq_factor"),
        original_max_positions=_count(raw, "original_max_position_embeddings", original),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise UnsupportedModel(
            f"rope type llama3 needs high_freq_factor ({scaling.high_freq_factor}) above "
            f"low_freq_factor ({scaling.low_freq_factor})"
        )
    return RopeConfig(theta, scaling)


def _refuse_window(raw: Mapping[str, Any], num_layers: int, max_positions: int) -> None:
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        others = sorted(set(map(str, layer_types)) - {"full_attention", "sliding_attention"})
        if others:
            raise UnsupportedModel(f"layer type {', '.join(others)} is not supported")
        in_some_layer = "sliding_attention" in layer_types
    else:
        in_some_layer = _count(raw, "max_window_layers", 0, least=0) < num_layers
    window = raw.get("sliding_window")
    asked = _flag(raw, "use_sliding_window", default=True) and in_some_layer
    if window is not None and asked and window < max_positions:
        raise UnsupportedModel(f"sliding_window {window} is not supported")


def _dtype(raw: Mapping[str, Any]) -> DTypeName:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in ("float32", "bfloat16", "float16"):
        raise UnsupportedModel(f"dtype {_brief(name)} is not supported; known are float32, bfloat16, float16")
    return cast(DTypeName, name)


def _eos(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for source in (raw, generation):
        value = source.get("eos_token_id")
        for item in value if isinstance(value, list) else [value]:
            if item is None:
                continue
            if type(item) is not int:
                raise UnsupportedModel(f"eos_token_id must be a token id or a list of them, not {_brief(value)}")
            ids.append(item)
    return tuple(dict.fromkeys(ids))


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise UnsupportedModel(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path} does not hold a JSON object")
    return content


def _count(raw: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1) -> int:
    value = raw.get(key)
    if value is None:
        if default is None:
            raise UnsupportedModel(f"config.json lacks {key}")
        return default
    if type(value) is not int or value < least:
        raise UnsupportedModel(f"{key} must be an integer of at least {least}, not {_brief(value)}")
    return value


def _number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key)
    if value is None:
        if default is None:
            raise UnsupportedModel(f"config.json lacks {key}")
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UnsupportedModel(f"{key} must be a positive number, not {_brief(value)}")
    return float(value)


def _flag(raw: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UnsupportedModel(f"{key} must be true or false, not {_brief(value)}")
    return value


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
