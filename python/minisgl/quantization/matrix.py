"""Quantized matrices as a checkpoint stores them; any part can be read as floating-point values."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from minisgl.quantization.levels import LevelFormat, Levels


class StoredTensor(Protocol):
    """A tensor of a checkpoint, read in parts."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str:
        """The name of its type in safetensors, such as F8_E4M3."""

    def read(self, *index: slice) -> Tensor:
        """Return the part at these slices of the first axes, and all of the other axes."""


class QuantizedMatrix(Protocol):
    """Matrix stored in several tensors. Its last axes are (output, input), unless the module's weight has others."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, *index: slice) -> Tensor:
        """Return the float32 values of a part, given by a slice with start and stop for each axis.

        The part may begin and end inside a block, a group or a packed word.
        """

    def level_format(self, columns: slice) -> LevelFormat | None:
        """Return the format of `levels` for these columns; None if the matrix cannot stay quantized (its format has no
        `Levels`, or these columns cut a group), so that it must be dequantized.
        """

    def levels(self, rows: slice, columns: slice) -> Levels:
        """Return a part without dequantizing it; the columns have a `level_format`."""


def check_shape(name: str, tensor: StoredTensor, *shape: int) -> None:
    """Raise ValueError if a stored tensor has another shape than its format asks for."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, but the format asks for {list(shape)}")


def matrix_shape(name: str, tensor: StoredTensor) -> tuple[int, int]:
    """Return the two sizes of a stored matrix. Raises ValueError if the tensor is none."""
    if len(tensor.shape) != 2:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, but the format asks for a matrix")
    rows, columns = tensor.shape
    return rows, columns


def read_scales(name: str, stored: StoredTensor, *index: slice) -> Tensor:
    """Return a part of stored scales as float32. Raises ValueError if one is infinite or not a number."""
    scales = stored.read(*index).float()
    if not scales.isfinite().all():
        raise ValueError(f"{name} has a value that is infinite or not a number")
    return scales


def units(part: slice, unit: int) -> tuple[slice, Tensor]:
    """Return the units of `unit` positions that hold a part: their slice, and the unit of each position, from 0.

    Positions 3 to 5 in units of 4 are slice(0, 2) and [0, 1, 1].
    """
    index = torch.arange(part.start, part.stop) // unit
    first = part.start // unit
    return slice(first, -(-part.stop // unit)), index - first


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [..., n] into unsigned integers of `bits` bits, the lowest first: float32 [..., n * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts).bitwise_and_(2**bits - 1).flatten(-2).float()


def within(part: slice, unit: int) -> slice:
    """Return where a part lies in the positions of the units that hold it."""
    start = part.start % unit
    return slice(start, start + part.stop - part.start)


def cuts(columns: slice, group: int) -> bool:
    """Return True if a part of the columns begins or ends inside a group."""
    return bool(columns.start % group or columns.stop % group)
