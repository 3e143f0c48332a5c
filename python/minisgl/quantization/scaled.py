"""Weights of 8 bits, FP8 or integers, with one scale per tensor, row or block, such as a group of a row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minisgl.quantization.levels import Kind, LevelFormat, Levels
from minisgl.quantization.matrix import StoredTensor, check_shape, cuts, matrix_shape, read_scales, units
from minisgl.quantization.schemes import ScaledWeights


class ScaledMatrix:
    """Implements QuantizedMatrix: (weight - zero_point) * scale.

    `scale` is [], [1], [out] or [out, 1], or with a block (rows, columns) one for each block, where the last blocks of
    an axis may be cut short. `zero_point` has the scale's shape. `input_scale`, of static activations, is a single
    number; if it is not positive and finite, activations are not rounded.
    """

    def __init__(
        self,
        weight: StoredTensor,
        scale: StoredTensor,
        zero_point: StoredTensor | None,
        input_scale: StoredTensor | None,
        scheme: ScaledWeights,
    ) -> None:
        block = scheme.block
        static = scheme.activations == "static 8 bits"
        self._x_scale = 0.0
        if static and input_scale is not None:
            check_shape("the input scale", input_scale, *[1] * len(input_scale.shape))
            x_scale = float(input_scale.read().float())
            if 0 < x_scale < math.inf:  # experts that no token of a calibration chose may have no scale
                self._x_scale = x_scale
        self._rounds_x = scheme.dtype == "fp8" and (self._x_scale > 0 if static else scheme.activations != "16 bits")
        self.shape = rows, columns = matrix_shape("the weight", weight)
        found = tuple(scale.shape)
        if all(size == 1 for size in found):
            self._unit = rows, columns
        elif block is not None:
            check_shape("the scale", scale, -(-rows // block[0]), -(-columns // block[1]))
            self._unit = block
        else:
            if found != (rows,):
                check_shape("the scale", scale, rows, 1)
            self._unit = 1, columns
        if zero_point is not None:
            check_shape("the zero point", zero_point, *found)
        self._weight, self._scale, self._zero_point = weight, scale, zero_point

    def read(self, *index: slice) -> Tensor:
        values = self._weight.read(*index).float()
        if self._zero_point is not None:
            values.sub_(self._by_element("the zero point", self._zero_point, *index))
        return values.mul_(self._by_element("the scale", self._scale, *index))

    def level_format(self, columns: slice) -> LevelFormat | None:
        kind: Kind = "fp8" if self._weight.dtype == "F8_E4M3" else "int8"
        unit = self._unit[1]
        group = 0 if unit >= self.shape[1] else unit
        if self._zero_point is not None or (group and (kind == "int8" or cuts(columns, group))):
            return None
        return LevelFormat(kind, group, rounds_x=self._rounds_x, x_scale=self._x_scale)

    def levels(self, rows: slice, columns: slice) -> Levels:
        form = self.level_format(columns)
        if form is None:
            raise ValueError("these columns have no format")
        codes = self._weight.read(rows, columns).view(torch.uint8)
        scales = self._by_element("the scale", self._scale, rows, columns)
        scales = scales[:, :: form.group or len(scales[0])].expand(len(codes), form.groups(codes.shape[1]))
        return Levels(form, codes if form.kind == "fp8" else codes ^ 128, scales)

    def _by_element(self, name: str, stored: StoredTensor, rows: slice, columns: slice) -> Tensor:
        """Return the values stored for each unit, as float32 that broadcasts to [rows, columns]."""
        axes = [units(part, unit) for part, unit in zip((rows, columns), self._unit, strict=True)]
        found = read_scales(name, stored, *[part for part, _ in axes[: len(stored.shape)]])
        found = found.reshape(-1, 1) if found.ndim < 2 else found
        for axis, (_, each) in enumerate(axes):
            if found.shape[axis] > 1:
                found = found.index_select(axis, each)
        return found
