"""Rotary position embeddings (Su et al., 2021), with the frequency scalings for longer contexts.

The table is made on the CPU in float32, in the same order of operations as transformers, to be equal to it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from minisgl.layers.layer_config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling


class Rotary(nn.Module):
    """Table of rotations, shared by the layers of one rope: `cos_sin` [max_positions, head_dim] float32."""

    cos_sin: Tensor

    def __init__(self, head_dim: int, max_positions: int, rope: RopeConfig) -> None:
        super().__init__()
        table = cos_sin_table(head_dim, max_positions, rope).to(torch.get_default_device())
        self.register_buffer("cos_sin", table, persistent=False)


def cos_sin_table(head_dim: int, max_positions: int, rope: RopeConfig) -> Tensor:
    """[max_positions, head_dim] float32 on the CPU: cosines in the first half of a row, sines in the second."""
    positions = torch.arange(max_positions, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, frequencies(head_dim, rope))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return table * rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else table


def frequencies(head_dim: int, rope: RopeConfig) -> Tensor:
    """[head_dim / 2] float32 on the CPU: radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    waves = rope.theta**exponents
    plain = 1.0 / waves
    match rope.scaling:
        case LinearScaling(factor):
            return plain / factor
        case Llama3Scaling():
            return _llama3(plain, rope.scaling)
        case YarnScaling():
            return _yarn(waves, rope.theta, rope.scaling)
    return plain


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Waves that fit the original context often stay, those that hardly fit are stretched, between is a ramp."""
    wavelengths = 2 * math.pi / plain
    longest = scaling.original_max_positions / scaling.low_freq_factor
    shortest = scaling.original_max_positions / scaling.high_freq_factor
    turns = scaling.original_max_positions / wavelengths
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ramp = (1 - keep) * plain / scaling.factor + keep * plain
    scaled = torch.where(wavelengths > longest, plain / scaling.factor, ramp)
    return torch.where(wavelengths < shortest, plain, scaled)


def _yarn(waves: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """From `waves`, the inverses of the plain frequencies; a ramp leads from those kept to those divided."""
    head_dim = 2 * len(waves)

    def dimension(turns: float) -> float:
        """Where a frequency turns this often in the original context."""
        length = scaling.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    steps = torch.arange(len(waves), dtype=torch.float32, device="cpu") - first
    ramp = (steps / (last - first if last != first else 0.001)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (scaling.factor * waves) * (1 - keep) + 1.0 / waves * keep
