"""Rounding of floating-point weights to 8 or 4 bits when they are loaded, in place: the weight keeps its dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from minisgl.quantization.levels import MIDDLE, LevelFormat, Levels

Method = Literal["fp8", "int8", "int4"]

INT4_GROUP = 32  # input columns that share a scale
INT4_FORMAT = LevelFormat("int4", INT4_GROUP, offsets=True)
_LARGEST = {"fp8": 448.0, "int8": 127.0}
_INT4_STEPS, _INT4_MIDDLE = 15, 8
_BLOCK = 1 << 20  # values processed at a time, which fit in the CPU's cache


@dataclass(frozen=True, slots=True)
class Int4Grid:
    """Grid of a weight [out, in] in 4 bits: (q - 8) * scale + offset of the group of input columns, q in 0 to 15.

    `scales` and `offsets` are bfloat16 [out, groups], so that models of any dtype have the same grid. In a weight of 16
    bits the values are rounded once more.
    """

    scales: Tensor
    offsets: Tensor

    def levels(self, weight: Tensor) -> Tensor:
        """Return q, int32 [out, in], of a weight on this grid."""
        q = torch.empty(weight.shape, dtype=torch.int32, device=weight.device)
        for rows in _chunks(weight):
            q[rows] = _levels(_groups(weight[rows]), self.scales[rows], self.offsets[rows]).flatten(1).int()
        return q


def largest_of_rows(weight: Tensor) -> Tensor:
    """[out, in] -> the largest magnitude of each row, float32 [out, 1]."""
    return torch.cat([weight[rows].abs().amax(1, keepdim=True) for rows in _chunks(weight)]).float()


def round_to_8_bits(weight: Tensor, method: Literal["fp8", "int8"], largest: Tensor) -> None:
    """Round [out, in] in place to `method`'s values times a scale that keeps each row's `largest` [out, 1] exact."""
    scales = _divided(largest, _LARGEST[method]).clamp_min_(torch.finfo(torch.float32).tiny)
    for rows in _chunks(weight):
        steps = weight[rows].float().div_(scales[rows])
        steps = steps.to(torch.float8_e4m3fn).float() if method == "fp8" else steps.round_()
        weight[rows] = steps.mul_(scales[rows]).to(weight.dtype)


def levels_of_8_bits(weight: Tensor, method: Literal["fp8", "int8"], largest: Tensor) -> Levels:
    """Return the levels that `round_to_8_bits` would round [out, in] to; the weight does not change."""
    levels = Levels.empty(LevelFormat(method), weight.shape, weight.device)
    levels.scales.copy_(_divided(largest, _LARGEST[method])).clamp_min_(torch.finfo(torch.float32).tiny)
    for rows in _chunks(weight):
        steps = weight[rows].float().div_(levels.scales[rows])
        if method == "fp8":
            levels.codes[rows] = steps.to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            levels.codes[rows] = steps.round_().add_(MIDDLE[method]).to(torch.uint8)
    return levels


def round_to_int4(weight: Tensor) -> Int4Grid:
    """Round [out, in] to the grid between each group's extremes and return that grid. INT4_GROUP divides the columns.

    llama.cpp's Q4_1 has such a grid, too: a scale and an offset.
    """
    scales = weight.new_empty((len(weight), weight.shape[1] // INT4_GROUP), dtype=torch.bfloat16)
    offsets = torch.empty_like(scales)
    for rows in _chunks(weight):
        groups = _groups(weight[rows])
        scales[rows], offsets[rows] = _grid(groups)
        steps = _levels(groups, scales[rows], offsets[rows]).sub_(_INT4_MIDDLE)
        values = steps.mul_(scales[rows].float().unsqueeze(2)).add_(offsets[rows].float().unsqueeze(2))
        weight[rows] = values.flatten(1).to(weight.dtype)
    return Int4Grid(scales, offsets)


def levels_of_int4(weight: Tensor) -> Levels:
    """Return the levels that `round_to_int4` would round [out, in] to; the weight does not change."""
    levels = Levels.empty(INT4_FORMAT, weight.shape, weight.device)
    assert levels.offsets is not None
    for rows in _chunks(weight):
        groups = _groups(weight[rows])
        scales, offsets = _grid(groups)
        levels.scales[rows], levels.offsets[rows] = scales, offsets
        levels.codes[rows] = _levels(groups, scales, offsets).flatten(1).to(torch.uint8)
    return levels


def _grid(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and offsets, bfloat16 [out, groups], of values [out, groups, INT4_GROUP]."""
    low, high = torch.aminmax(groups, dim=2)
    scales = _divided(high - low, _INT4_STEPS).clamp_min_(torch.finfo(torch.float16).tiny).bfloat16()
    return scales, (low + _INT4_MIDDLE * scales.float()).bfloat16()


def _divided(x: Tensor, by: float) -> Tensor:
    """Return x / by as IEEE 754 rounds it, so that all devices round weights alike.

    On a GPU torch divides by a number by multiplying with its reciprocal, which can differ in the last bit. Values
    halfway between two levels, which are frequent in bfloat16 weights, are then rounded to the other level, and logits
    change as much as by rounding to bfloat16.
    """
    return x / x.new_full((), by)


def _groups(rows: Tensor) -> Tensor:
    """[out, in] -> float32 [out, groups, INT4_GROUP]."""
    return rows.float().view(len(rows), -1, INT4_GROUP)


def _levels(groups: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    """Return the nearest q, as float32, of values [out, groups, INT4_GROUP]."""
    steps = (groups - offsets.float().unsqueeze(2)).div_(scales.float().unsqueeze(2))
    return steps.round_().add_(_INT4_MIDDLE).clamp_(0, _INT4_STEPS)


def _chunks(weight: Tensor) -> Iterator[slice]:
    """Yield slices of rows, about _BLOCK values each."""
    count = max(_BLOCK // weight.shape[1], 1)
    for start in range(0, len(weight), count):
        yield slice(start, start + count)
