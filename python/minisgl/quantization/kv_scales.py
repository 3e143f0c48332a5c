"""Scales of an FP8 KV cache from a checkpoint, applied to the weights of the layers before and after the cache.

With a scale s, K is stored as K / s, and q is multiplied by s, so that scores stay the same: the weights of q and k, or
of their norms, are multiplied by s and 1 / s. V is stored as V / s, and o_proj's weight is multiplied by s. Scales are
rounded up to powers of two, so that multiplying a weight by them does not round it. e4m3 has the same precision for a
value times a power of two, so no value overflows, and none is rounded more than with the exact scale. Attention
backends do not see the scales.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from minisgl.quantization.matrix import StoredTensor

_PARTS = (".k_proj", ".v_proj", ".qkv_proj", ".attn")  # under which the scales of an attention may stand
_SCALED: dict[str, tuple[str, ...]] = {
    "k_scale": ("keys",),
    "v_scale": ("values",),
    "kv_scale": ("keys", "values"),
    "k_proj.output_scale": ("keys",),  # the older form
    "v_proj.output_scale": ("values",),
}


@dataclass(frozen=True, slots=True)
class KVScales:
    """Scales of one layer, powers of two."""

    keys: float = 1.0
    values: float = 1.0


def read_kv_scales(stored: Mapping[str, StoredTensor]) -> dict[str, KVScales]:
    """Return the scales by attention module, such as model.layers.0.self_attn. Raises ValueError for a bad scale."""
    found: dict[str, dict[str, float]] = {}
    for name, tensor in stored.items():
        leaf = next((leaf for leaf in _SCALED if name.endswith(f".{leaf}")), None)
        if leaf is None:
            continue  # a scale of queries or probabilities, which attention does not round here
        module = name.removesuffix(f".{leaf}")
        module = next((module.removesuffix(part) for part in _PARTS if module.endswith(part)), module)
        scales, scale = found.setdefault(module, {}), _power_of_two(name, tensor)
        for part in _SCALED[leaf]:
            if scales.setdefault(part, scale) != scale:
                raise ValueError(f"{name} differs from another scale of the {part} in {module}")
    return {module: KVScales(**scales) for module, scales in found.items()}


def _power_of_two(name: str, tensor: StoredTensor) -> float:
    if math.prod(tensor.shape) != 1:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, but one scale for all heads of a layer is supported")
    scale = float(tensor.read().float())
    if not 2.0**-60 <= scale <= 2.0**60:
        raise ValueError(f"{name} is {scale:g}, which is no scale")
    return 2.0 ** math.ceil(math.log2(scale))


def weight_factors(scales: Mapping[str, KVScales], names: Collection[str]) -> dict[str, float]:
    """Return the factor of each weight of a checkpoint with tensors `names`. ValueError if a weight is missing."""
    factors: dict[str, float] = {}
    for module, each in scales.items():
        normed = f"{module}.k_norm.weight" in names
        q, k = ("q_norm", "k_norm") if normed else ("q_proj", "k_proj")
        parts = ((q, each.keys), (k, 1 / each.keys), ("v_proj", 1 / each.values), ("o_proj", each.values))
        for part, factor in parts:
            weight, bias = f"{module}.{part}.weight", f"{module}.{part}.bias"
            if weight not in names:
                raise ValueError(f"{module} has scales of a KV cache, but no {part}.weight that could be scaled")
            factors[weight] = factor
            if part != "o_proj" and bias in names:
                factors[bias] = factor
    return factors
