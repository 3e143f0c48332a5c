"""Architecture name -> where its model class is. No torch: build.py imports the class when a model is built.

A new family is one file in this folder and one line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Family:
    """`defaults` are the values that transformers takes for keys a config.json leaves out.

    `windows`: the layers that a sliding_window is for; "by layer" are those that layer_types names or, without it,
    those from max_window_layers on. `experts`: some layers have experts in place of the dense block.
    """

    module: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    windows: Literal["none", "all", "by layer"] = "none"
    experts: bool = False


_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
_QWEN_WINDOWS = {**_QWEN_WINDOW, "max_window_layers": 28}


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("minisgl.models.llama"),
    "MistralForCausalLM": Family(
        "minisgl.models.mistral", {"num_key_value_heads": 8, "sliding_window": 4096}, windows="all"
    ),
    "Qwen2ForCausalLM": Family("minisgl.models.qwen2", _QWEN_WINDOWS, windows="by layer"),
    "Qwen3ForCausalLM": Family("minisgl.models.qwen3", {"head_dim": 128, **_QWEN_WINDOWS}, windows="by layer"),
    "Qwen3MoeForCausalLM": Family("minisgl.models.qwen3_moe", _QWEN_WINDOW, windows="all", experts=True),
}
