"""Rotary position embeddings (Su et al., 2021), with the frequency scalings for longer contexts.

The table is made on the CPU in float32, in the same order of operations as transformers, to be equal to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.layers.layer_config import (
    LinearScaling,
    Llama3Scaling,
    LongropeScaling,
    ProportionalScaling,
    QueryScaling,
    RopeConfig,
    YarnScaling,
)


class Rotary(nn.Module):
    """Tables shared by the layers of one rope: `cos_sin` [max_positions, head_dim] and, for ropes that scale queries,
    `query_scale` [max_positions], both float32.
    """

    cos_sin: Tensor
    query_scale: Tensor | None

    def __init__(self, head_dim: int, max_positions: int, rope: RopeConfig) -> None:
        super().__init__()
        device = torch.get_default_device()
        self.register_buffer("cos_sin", cos_sin_table(head_dim, max_positions, rope).to(device), persistent=False)
        scale = None if rope.query_scaling is None else query_scales(max_positions, rope.query_scaling).to(device)
        self.register_buffer("query_scale", scale, persistent=False)


def cos_sin_table(head_dim: int, max_positions: int, rope: RopeConfig) -> Tensor:
    """[max_positions, head_dim] float32 on the CPU: cosines in the first half of a row, sines in the second."""
    positions = torch.arange(max_positions, dtype=torch.float32, device="cpu")
    rotary_dim = rope.rotary_dim(head_dim)
    angles = torch.outer(positions, frequencies(rotary_dim, rope))
    factor = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling | LongropeScaling) else 1.0
    still = (0, (head_dim - rotary_dim) // 2)  # number of pairs per head that are not rotated, see `paired_rows`
    return torch.cat((F.pad(angles.cos() * factor, still, value=1.0), F.pad(angles.sin() * factor, still)), dim=-1)


def query_scales(max_positions: int, scaling: QueryScaling) -> Tensor:
    """[max_positions] float32 on the CPU: the factor of the query at each position."""
    positions = torch.arange(max_positions, device="cpu")
    return 1 + scaling.beta * torch.log(1 + torch.floor(positions / scaling.original_max_positions))


def paired_rows(kept: Sequence[range], head_dim: int, rope: RopeConfig) -> Sequence[range]:
    """Reorder the rows of whole heads of q or k so that the rotation's pairs are i and i + head_dim / 2.

    A partly rotated head (Phi) changes: with head_dim 8, of which 4 are rotated as pairs (0, 2) and (1, 3), the rows
    0 1 2 3 4 5 6 7 come as 0 1 4 5 2 3 6 7, and the pairs (4, 6) and (5, 7) are turned by 0. An interleaved one (GLM)
    has the pairs (0, 1) and (2, 3), and its rows come as 0 2 4 5 1 3 6 7. A product q @ k does not depend on the order.
    """
    rotary_dim = rope.rotary_dim(head_dim)
    if rotary_dim == 0 or (rotary_dim == head_dim and not rope.interleaved):
        return kept
    half, middle = rotary_dim // 2, (rotary_dim + head_dim) // 2
    first, second = range(half), range(half, rotary_dim)
    if rope.interleaved:
        first, second = range(0, rotary_dim, 2), range(1, rotary_dim, 2)
    cuts = first, range(rotary_dim, middle), second, range(middle, head_dim)
    heads = [start for rows in kept for start in range(rows.start, rows.stop, head_dim)]
    return [range(head + cut.start, head + cut.stop, cut.step) for head in heads for cut in cuts if cut]


def frequencies(rotary_dim: int, rope: RopeConfig) -> Tensor:
    """[rotary_dim / 2] float32 on the CPU: radians per position."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    waves = rope.theta**exponents
    plain = 1.0 / waves
    match rope.scaling:
        case LinearScaling(factor):
            return plain / factor
        case Llama3Scaling():
            return _llama3(plain, rope.scaling)
        case ProportionalScaling(share, factor):
            rotated = torch.arange(len(plain), device="cpu") < int(share * rotary_dim // 2)
            return plain / factor * rotated
        case LongropeScaling(short_factors):
            return 1.0 / (torch.tensor(short_factors, device="cpu") * waves)
        case YarnScaling():
            return _yarn(waves, rope.theta, rope.scaling)
    return plain


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Keep short waves, stretch waves longer than the original context, and interpolate between (Llama 3.1)."""
    wavelengths = 2 * math.pi / plain
    longest = scaling.original_max_positions / scaling.low_freq_factor
    shortest = scaling.original_max_positions / scaling.high_freq_factor
    turns = scaling.original_max_positions / wavelengths
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ramp = (1 - keep) * plain / scaling.factor + keep * plain
    scaled = torch.where(wavelengths > longest, plain / scaling.factor, ramp)
    return torch.where(wavelengths < shortest, plain, scaled)


def _yarn(waves: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """Return YaRN's frequencies: low ones are divided, high ones kept. `waves` are the inverses of the plain ones."""
    rotary_dim = 2 * len(waves)

    def dimension(turns: float) -> float:
        """Return the dimension whose frequency turns this often in the original context."""
        length = scaling.original_max_positions / (turns * 2 * math.pi)
        return rotary_dim * math.log(length) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    steps = torch.arange(len(waves), dtype=torch.float32, device="cpu") - first
    ramp = (steps / (last - first if last != first else 0.001)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (scaling.factor * waves) * (1 - keep) + 1.0 / waves * keep
