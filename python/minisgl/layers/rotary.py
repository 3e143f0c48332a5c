"""Rotary position embeddings (Su et al., 2021), with the frequency scaling of Llama 3.1.

The table is made on the CPU in float32, in the same order of operations as transformers, to be equal to it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from minisgl.models.config import Llama3Scaling, RopeConfig


class Rotary(nn.Module):
    """The table of rotations, one for all layers: `cos_sin` [max_positions, head_dim] float32."""

    cos_sin: Tensor

    def __init__(self, head_dim: int, max_positions: int, rope: RopeConfig) -> None:
        super().__init__()
        table = cos_sin_table(head_dim, max_positions, rope).to(torch.get_default_device())
        self.register_buffer("cos_sin", table, persistent=False)


def cos_sin_table(head_dim: int, max_positions: int, rope: RopeConfig) -> Tensor:
    """[max_positions, head_dim] float32 on the CPU: cosines in the first half of a row, sines in the second."""
    positions = torch.arange(max_positions, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, frequencies(head_dim, rope))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def frequencies(head_dim: int, rope: RopeConfig) -> Tensor:
    """[head_dim / 2] float32 on the CPU: radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    plain = 1.0 / (rope.theta**exponents)
    return plain if rope.scaling is None else _llama3(plain, rope.scaling)


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
