"""Options of the fused operations that a model's config names. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]  # of a gated feed-forward block; gelu_tanh: gelu's tanh approximation


@dataclass(frozen=True, slots=True)
class Routing:
    """Choice of a token's experts: the `top_k` largest of the softmax of its router's logits."""

    top_k: int
    renormalize: bool  # the weights of a token's experts are made to sum to 1
