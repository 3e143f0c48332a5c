"""JSON files of a model's folder, and typed look-ups in a config.json; every error names file or key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from minisgl.models.config.model_config import DTypeName, UnsupportedModel

_T = TypeVar("_T")

# Keys that change the result, each with the only value that has no effect. A family may read such a key; where it does
# not, other values are refused. Null never has an effect.
_NEUTRAL: Mapping[str, Any] = {
    "hidden_act": "silu",
    "partial_rotary_factor": 1,
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
    "no_rope_layer_interval": None,
    "attention_out_bias": False,
    "use_bias": False,
    "use_qk_norm": False,
    "qk_layernorm": False,
    "alibi": False,
    "is_causal": True,
    "use_bidirectional_attention": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "num_experts": None,
    "num_local_experts": None,
    "n_routed_experts": None,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": False,
    "q_lora_rank": None,
    "kv_lora_rank": None,
    "moe_layer_freq": 1,
    "index_topk": None,
}

# Keys of a multimodal config that hold for its text_config too, if that lacks them.
_OUTER_KEYS = "dtype", "torch_dtype", "tie_word_embeddings", "quantization_config"

# Far above any model, and little enough for what is made by layer, expert or head before a weight is looked for.
MAX_COUNT = 2**30
MOST = {"num_hidden_layers": 1024, "num_attention_heads": 65_536, "num_key_value_heads": 65_536, "head_dim": 65_536}
_EXPERTS = "num_experts", "num_local_experts", "num_experts_per_tok", "n_routed_experts", "n_shared_experts"
MOST |= dict.fromkeys((*_EXPERTS, "top_k_experts", "n_group", "topk_group"), 65_536)
MOST |= dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 65_536)
MOST |= dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size"), 2**24)
MOST |= dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), 2**24)


class ConfigReader:
    """One object of a config.json. It records which keys were read, so that none which matters is overlooked."""

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self._raw = {**(defaults or {}), **raw}
        self._read: set[str] = set()

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigReader:
        """Return a reader of this file with the values that transformers takes for keys it leaves out.

        A null is a value of most keys, but rope_parameters of null are the family's.
        """
        given = {key: value for key, value in self._raw.items() if key != "rope_parameters" or value is not None}
        return ConfigReader(given, defaults)

    def text_config(self) -> ConfigReader:
        """Return a reader of the text model in the config of a multimodal one."""
        inner = self.get("text_config")
        if not isinstance(inner, dict):
            raise UnsupportedModel("config.json lacks text_config")
        return ConfigReader(inner, {key: self._raw[key] for key in _OUTER_KEYS if key in self._raw})

    def get(self, key: str) -> Any:
        """Return the value as it is written; None where there is none."""
        self._read.add(key)
        return self._raw.get(key)

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Return an integer from `least` to MAX_COUNT, or to what MOST has for this key."""
        value = self.get(key)
        if value is None:
            return _required(key, default)
        if type(value) is not int or value < least:
            raise UnsupportedModel(f"{key} must be an integer of at least {least}, not {brief(value)}")
        if value > (most := MOST.get(key, MAX_COUNT)):
            raise UnsupportedModel(f"{key} is {brief(value)}, but the limit is {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive, finite number."""
        value = self.get(key)
        if value is None:
            return _required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UnsupportedModel(f"{key} must be a positive number, not {brief(value)}")
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UnsupportedModel(f"{key} must be true or false, not {brief(value)}")
        return value

    def dtype(self) -> DTypeName:
        """Return the checkpoint's dtype; transformers 4 wrote it as torch_dtype."""
        name = self.get("dtype") or self.get("torch_dtype") or "float32"
        if name not in ("float32", "bfloat16", "float16"):
            raise UnsupportedModel(f"dtype {brief(name)} is not supported; known are float32, bfloat16, float16")
        return cast(DTypeName, name)

    def refuse_unread(self) -> None:
        """Raise UnsupportedModel for the first key that changes the result and that the family has not read."""
        for key, neutral in _NEUTRAL.items():
            value = self._raw.get(key)
            if key not in self._read and value is not None and value != neutral:
                raise UnsupportedModel(f"{key} {brief(value)} is not supported")


def _required(key: str, default: _T | None) -> _T:
    if default is None:
        raise UnsupportedModel(f"config.json lacks {key}")
    return default


def brief(value: Any) -> str:
    """Return JSON of at most 80 characters, for an error."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def read_json(path: Path) -> Any:
    """Return the content of a file. UnsupportedModel if it is no JSON."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise UnsupportedModel(f"{path} cannot be read as JSON: {error}") from error


def read_object(path: Path) -> Mapping[str, Any]:
    """Return the object of a file; an empty one if there is no file. UnsupportedModel if it holds something else."""
    content = read_json(path) if path.is_file() else {}
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path} does not hold a JSON object")
    return content
