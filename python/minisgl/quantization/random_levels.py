"""Random matrices in a quantized format, as "dummy" weights instead of a quantized checkpoint's."""

from __future__ import annotations

import math

import torch

from minisgl.quantization.levels import MIDDLE, LevelFormat, Levels
from minisgl.quantization.schemes import AwqWeights, GptqWeights, Mxfp4Weights, PackedWeights, ScaledWeights, Scheme

_LARGEST_GROUP = 128  # columns that share a scale
_SPREAD = {"fp8": 64.0, "int8": 73.9, "int4": 4.6, "mxfp4": 2.9}  # standard deviation of random levels


def format_of(scheme: Scheme | None) -> LevelFormat | None:
    """Return the format in which a checkpoint of this scheme is read, if the scheme alone decides it."""
    match scheme:
        case ScaledWeights(zeros=True) | ScaledWeights("int8", (_, _)):
            return None
        case ScaledWeights(dtype, block, activations):
            rounds_x = dtype == "fp8" and activations == "dynamic 8 bits"
            return LevelFormat(dtype, block[1] if block else 0, rounds_x=rounds_x)
        case AwqWeights(size) | GptqWeights(4, size):
            return LevelFormat("int4", _group(size), zeros=True)
        case PackedWeights(4, size, zeros):
            return LevelFormat("int4", _group(size), zeros=zeros)
        case Mxfp4Weights():
            return LevelFormat("mxfp4", 32)
    return None


def _group(size: int) -> int:
    """Return the group of the levels for a checkpoint's group of `size` columns, -1 for all."""
    return _LARGEST_GROUP if size == -1 or size % _LARGEST_GROUP == 0 else size


def random_levels(form: LevelFormat, shape: torch.Size, std: float, generator: torch.Generator) -> Levels:
    """Return a matrix [out, in] of values of this standard deviation on the generator's device."""
    levels = Levels.empty(form, shape, generator.device)
    if form.kind == "fp8":
        numbers = torch.empty(shape, device=generator.device).normal_(std=_SPREAD["fp8"], generator=generator)
        levels.codes.copy_(numbers.to(torch.float8_e4m3fn).view(torch.uint8))
    else:
        levels.codes.random_(0, 256 if form.kind == "int8" else 16, generator=generator)
    scale = std / _SPREAD[form.kind]
    levels.scales.fill_(2.0 ** round(math.log2(scale)) if form.kind == "mxfp4" else scale)
    if levels.zeros is not None:
        levels.zeros.fill_(MIDDLE[form.kind])
    return levels
