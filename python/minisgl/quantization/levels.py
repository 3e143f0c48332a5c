"""Quantized matrices as 4 or 8-bit numbers (levels) with scales, kept on a GPU in place of a dense matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["fp8", "int8", "int4", "mxfp4"]

MIDDLE: dict[Kind, int] = {"fp8": 0, "int8": 128, "int4": 8}  # the zero point of formats without zero points
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], device="cpu")  # the value of each code


@dataclass(frozen=True, slots=True)
class LevelFormat:
    """Format of a matrix of levels.

    `rounds_x`: products also round activations to `kind`, in groups of `group` columns of a row. They use the static
    scale `x_scale`; if it is 0, they use dynamic scales, from the largest value of each group.
    """

    kind: Kind
    group: int = 0  # input columns that share a scale; 0: all of a row
    zeros: bool = False  # groups have zero points
    rounds_x: bool = False
    x_scale: float = 0.0
    offsets: bool = False  # groups have offsets, in 16 bits like their scales
    # The matrix's column of each column of the levels, if their order differs (act-order).
    order: tuple[int, ...] | None = field(default=None, repr=False)

    def groups(self, size: int) -> int:
        """Return the number of scales of a row of `size` columns."""
        return size // self.group if self.group else 1


@dataclass(frozen=True, slots=True)
class Levels:
    """Matrix [out, in] of values (level - zero) * scale + offset.

    `codes` uint8 [out, in] are the levels: bits of float8_e4m3fn, an int8 plus 128, an integer from 0 to 15, or bits of
    e2m1 (mxfp4, whose scales are powers of two).
    `scales` float32, `zeros` uint8 and `offsets` float32 are [out, groups].
    """

    format: LevelFormat
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    offsets: Tensor | None = None

    @classmethod
    def empty(cls, form: LevelFormat, shape: torch.Size, device: torch.device) -> Levels:
        """Return an uninitialized matrix of this shape."""
        width, size = shape
        table = width, form.groups(size)
        return cls(
            form,
            torch.empty((width, size), dtype=torch.uint8, device=device),
            torch.empty(table, dtype=torch.float32, device=device),
            torch.empty(table, dtype=torch.uint8, device=device) if form.zeros else None,
            torch.empty(table, dtype=torch.float32, device=device) if form.offsets else None,
        )

    @property
    def shape(self) -> tuple[int, int]:
        width, size = self.codes.shape
        return width, size

    def __getitem__(self, rows: slice | Tensor) -> Levels:
        """Return some rows; a slice shares memory with this matrix."""
        return self._each(lambda part: part[rows])

    def to(self, device: torch.device) -> Levels:
        """Return the matrix on a device."""
        return self._each(lambda part: part.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Levels:
        zeros = None if self.zeros is None else change(self.zeros)
        offsets = None if self.offsets is None else change(self.offsets)
        return Levels(self.format, change(self.codes), change(self.scales), zeros, offsets)

    def copy_(self, other: Levels) -> None:
        """Take the values of another matrix of this format and shape."""
        self.codes.copy_(other.codes)
        self.scales.copy_(other.scales)
        if self.zeros is not None and other.zeros is not None:
            self.zeros.copy_(other.zeros)
        if self.offsets is not None and other.offsets is not None:
            self.offsets.copy_(other.offsets)

    def dequantize(self) -> Tensor:
        """Return the matrix, float32 [out, in], with columns in the matrix's own order."""
        codes, groups = self.codes, self.scales.shape[1]
        if self.format.kind == "fp8":
            numbers = codes.view(torch.float8_e4m3fn).float().view(len(codes), groups, -1)
        elif self.format.kind == "mxfp4":
            numbers = E2M1.to(codes.device)[codes.int()].view(len(codes), groups, -1)
        else:
            zeros = MIDDLE[self.format.kind] if self.zeros is None else self.zeros.float().unsqueeze(2)
            numbers = codes.float().view(len(codes), groups, -1) - zeros
        values = numbers * self.scales.unsqueeze(2)
        values = (values if self.offsets is None else values + self.offsets.unsqueeze(2)).flatten(1)
        if self.format.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, torch.tensor(self.format.order, device=values.device), values)
