"""Architecture name -> where its model class is. Pure: the class is imported only when a model is built.

A new family is one file in this folder and one line here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl.layers.decoder import CausalLM


@dataclass(frozen=True, slots=True)
class Family:
    """`defaults` are the values that transformers takes for keys a config.json leaves out."""

    module: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("minisgl.models.llama"),
    "Qwen3ForCausalLM": Family("minisgl.models.qwen3", {"head_dim": 128, "use_sliding_window": False}),
}


def model_class(architecture: str) -> type[CausalLM]:
    """The class of a known architecture; imports torch."""
    module = importlib.import_module(FAMILIES[architecture].module)
    found: type[CausalLM] = getattr(module, architecture)
    return found
