"""A model's shape, read from a Hugging Face folder. No torch: the supervisor reads it to fail early.

What a config asks for and the layers lack is refused by name. Keys that do not change the result are ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from minisgl.config import ConfigError
from minisgl.models import beside
from minisgl.models.registry import FAMILIES, Family

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
class LinearScaling:
    """All frequencies divided by `factor` (position interpolation, Chen et al., 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al., 2023): frequencies that turn fewer than `beta_slow` times in the original context are
    divided by `factor`, those that turn more than `beta_fast` times stay, and the rotations are scaled.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    attention_factor: float  # what cosines and sines are multiplied by
    truncate: bool  # the ramp between the two begins and ends at whole dimensions
    original_max_positions: int


RopeScaling: TypeAlias = Llama3Scaling | LinearScaling | YarnScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The experts of the layers that have them."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool  # the weights of a token's experts are made to sum to 1
    layers: tuple[int, ...]


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
    max_position_embeddings: int  # the context length: with YaRN, config.json may have less
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: DTypeName
    initializer_range: float
    eos_token_ids: tuple[int, ...]
    windows: tuple[int | None, ...]  # by layer: how many positions a query attends to, its own included; None for all
    moe: MoeConfig | None = None

    def check_tp(self, size: int) -> None:
        """UnsupportedModel if the layers cannot be divided among `size` ranks.

        KV heads are replicated and the vocabulary is padded, so neither has to divide.
        """
        divided = {"attention heads": self.num_heads}
        if self.moe is None or len(self.moe.layers) < self.num_layers:
            divided["intermediate size"] = self.intermediate_size
        if self.moe is not None:
            divided["intermediate size of an expert"] = self.moe.intermediate_size
        for what, count in divided.items():
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
    "dual_chunk_attention_config": None,
    "no_rope_layers": None,
    "use_qk_norm": False,
    "qk_layernorm": False,
    "alibi": False,
    "is_causal": True,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
}
_EXPERTS = ("num_experts", "num_local_experts")  # one key under two names; transformers 5 writes the second


def load_model_config(folder: Path) -> ModelConfig:
    """Read config.json and, if they are there, what other files add to it. Raises UnsupportedModel."""
    if not folder.is_dir():
        raise UnsupportedModel(f"{folder} is not a folder")
    if not (folder / "config.json").is_file():
        raise UnsupportedModel(f"{folder} has no config.json")
    raw = _read_json(folder / "config.json")
    if not (raw.get("dtype") or raw.get("torch_dtype")):
        raw = {**raw, "dtype": beside.checkpoint_dtype(folder)}
    generation = folder / "generation_config.json"
    return parse_config(raw, _read_json(generation) if generation.is_file() else {}, beside.tokenizer_eos(folder))


def parse_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, tokenizer_eos: int | None = None
) -> ModelConfig:
    """The same from the two files' contents and the tokenizer's eos_token; takes keys of transformers 4 and of 5."""
    architecture = _architecture(raw)
    family = FAMILIES[architecture]
    raw = {**family.defaults, **raw}
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

    vocab_size = _count(raw, "vocab_size")
    num_layers = _count(raw, "num_hidden_layers")
    max_positions = _count(raw, "max_position_embeddings")
    rope = _rope(raw, max_positions)
    context_len = _context_len(raw, rope, max_positions)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_count(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope=rope,
        max_position_embeddings=context_len,
        tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
        attention_bias=_flag(raw, "attention_bias"),
        mlp_bias=_flag(raw, "mlp_bias"),
        dtype=_dtype(raw),
        initializer_range=_number(raw, "initializer_range", 0.02),
        # Ids beyond the vocabulary, which some tokenizers have, are never generated; -1 means that there is none.
        eos_token_ids=tuple(token for token in _eos(raw, generation or {}, tokenizer_eos) if 0 <= token < vocab_size),
        windows=_windows(raw, family, num_layers, context_len),
        moe=_moe(raw, family, num_layers),
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


def _rope_parameters(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    # transformers 5 has all in rope_parameters; before, rope_theta stood outside and rope_scaling could be null.
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise UnsupportedModel(f"rope_scaling must be an object, not {_brief(rope)}")
    return rope


def _rope(raw: Mapping[str, Any], max_positions: int) -> RopeConfig:
    rope = _rope_parameters(raw)
    if any(isinstance(value, dict) for value in rope.values()):
        raise UnsupportedModel(f"rope parameters by layer type ({', '.join(rope)}) are not supported")
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise UnsupportedModel(f"partial_rotary_factor {_brief(rope['partial_rotary_factor'])} is not supported")
    theta = _number(rope, "rope_theta", _number(raw, "rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    original = _count(rope, "original_max_position_embeddings", max_positions)
    original = _count(raw, "original_max_position_embeddings", original)
    match kind:
        case "default":
            return RopeConfig(theta)
        case "linear":
            return RopeConfig(theta, LinearScaling(_number(rope, "factor")))
        case "llama3":
            return RopeConfig(theta, _llama3(rope, original))
        case "yarn":
            return RopeConfig(theta, _yarn(rope, original, max_positions))
        case "dynamic" if original >= max_positions:
            return RopeConfig(theta)  # nothing changes up to the original length, and no more is served
        case "dynamic":
            raise UnsupportedModel(
                f'rope type "dynamic" is not supported beyond the original length: max_position_embeddings is '
                f"{max_positions}, original_max_position_embeddings {original}"
            )
    raise UnsupportedModel(
        f"rope type {_brief(kind)} is not supported; known are default, linear, llama3, yarn, dynamic"
    )


def _llama3(rope: Mapping[str, Any], original: int) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=_number(rope, "factor"),
        low_freq_factor=_number(rope, "low_freq_factor"),
        high_freq_factor=_number(rope, "high_freq_factor"),
        original_max_positions=original,
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise UnsupportedModel(
            f"rope type llama3 needs high_freq_factor ({scaling.high_freq_factor}) above "
            f"low_freq_factor ({scaling.low_freq_factor})"
        )
    return scaling


def _yarn(rope: Mapping[str, Any], original: int, max_positions: int) -> YarnScaling:
    # A factor of null (but not one left out) is what the two lengths say.
    factor = _number(rope, "factor", max_positions / original if "factor" in rope else None)

    def attention(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        derived = attention(_number(rope, "mscale")) / attention(_number(rope, "mscale_all_dim"))
    else:
        derived = attention(1)
    scaling = YarnScaling(
        factor=factor,
        beta_fast=_number(rope, "beta_fast", 32.0),
        beta_slow=_number(rope, "beta_slow", 1.0),
        attention_factor=_number(rope, "attention_factor", derived),
        truncate=_flag(rope, "truncate", default=True),
        original_max_positions=original,
    )
    if scaling.beta_fast < scaling.beta_slow:
        raise UnsupportedModel(
            f"rope type yarn needs beta_fast ({scaling.beta_fast}) not below beta_slow ({scaling.beta_slow})"
        )
    return scaling


def _context_len(raw: Mapping[str, Any], rope: RopeConfig, max_positions: int) -> int:
    """YaRN as Qwen's model cards have it added leaves max_position_embeddings what it was without."""
    named = any(keys.get("original_max_position_embeddings") for keys in (raw, _rope_parameters(raw)))
    if isinstance(rope.scaling, YarnScaling) and named:
        return max(max_positions, int(rope.scaling.factor * rope.scaling.original_max_positions))
    return max_positions


def _windows(raw: Mapping[str, Any], family: Family, num_layers: int, max_positions: int) -> tuple[int | None, ...]:
    types = raw.get("layer_types")
    if types is None:
        first = _count(raw, "max_window_layers", 0, least=0) if family.windows == "by layer" else 0
        sliding = [layer >= first for layer in range(num_layers)]
    else:
        sliding = _sliding_layers(types, num_layers)
    if raw.get("sliding_window") is None or not _flag(raw, "use_sliding_window", default=True):
        if types is not None and any(sliding):
            raise UnsupportedModel("layer_types has sliding_attention, but no sliding_window is set or used")
        return (None,) * num_layers
    window = _count(raw, "sliding_window")
    if window >= max_positions or not any(sliding):
        return (None,) * num_layers
    if family.windows == "none":
        raise UnsupportedModel(f"sliding_window {window} is not supported for this architecture")
    if family.windows == "all" and not all(sliding):
        raise UnsupportedModel("layer_types that differ are not supported for this architecture")
    return tuple(window if slides else None for slides in sliding)


def _sliding_layers(types: Any, num_layers: int) -> list[bool]:
    if not isinstance(types, list):
        raise UnsupportedModel(f"layer_types must be a list, not {_brief(types)}")
    others = sorted(set(map(str, types)) - {"full_attention", "sliding_attention"})
    if others:
        raise UnsupportedModel(f"layer type {', '.join(others)} is not supported")
    if len(types) != num_layers:
        raise UnsupportedModel(f"layer_types names {len(types)} layers, but num_hidden_layers is {num_layers}")
    return [kind == "sliding_attention" for kind in types]


def _moe(raw: Mapping[str, Any], family: Family, num_layers: int) -> MoeConfig | None:
    named = next((key for key in _EXPERTS if raw.get(key) is not None), _EXPERTS[0])
    if not family.experts:
        if raw.get(named) is not None:
            raise UnsupportedModel(f"{named} {_brief(raw[named])} is not supported for this architecture")
        return None
    num_experts, chosen = _count(raw, named), _count(raw, "num_experts_per_tok")
    if chosen > num_experts:
        raise UnsupportedModel(f"num_experts_per_tok {chosen} is more than {named} {num_experts}")
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise UnsupportedModel(f"mlp_only_layers must be a list of layers, not {_brief(dense)}")
    step = _count(raw, "decoder_sparse_step", 1)
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=chosen,
        intermediate_size=_count(raw, "moe_intermediate_size"),
        norm_topk_prob=_flag(raw, "norm_topk_prob"),
        layers=tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0),
    )


def _dtype(raw: Mapping[str, Any]) -> DTypeName:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in ("float32", "bfloat16", "float16"):
        raise UnsupportedModel(f"dtype {_brief(name)} is not supported; known are float32, bfloat16, float16")
    return cast(DTypeName, name)


def _eos(raw: Mapping[str, Any], generation: Mapping[str, Any], tokenizer_eos: int | None) -> tuple[int, ...]:
    """Whatever ends an answer in any of the files, as vLLM and SGLang have it."""
    ids: list[int] = []
    for source in (raw, generation, {"eos_token_id": tokenizer_eos}):
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
