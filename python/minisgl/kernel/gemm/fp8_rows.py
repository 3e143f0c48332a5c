"""Activations in FP8, as the GEMMs of csrc/fp8_gemm.cu read them; the kernel before such a GEMM may write them."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

GROUP = 128  # columns of a scale, where a row has several, and rows and columns of one of a weight's blocks
MOST_ROWS = {0: 256, 128: 128}  # most rows that fp8_gemm.cu multiplies, by the columns of a scale
_BLOCK_ROWS = 64, 128  # most rows that a block of fp8_gemm.cu multiplies
_ALIGNED_ROWS = 16  # torch._scaled_mm and fp8_persistent_gemm.cu want scales of groups aligned


class Fp8Rows(NamedTuple):
    """Rows of x in e4m3, with room for more."""

    rows: int
    codes: Tensor  # float8_e4m3fn [room, K]
    scales: Tensor  # float32 [room], or [K / 128, room]

    @property
    def room(self) -> int:
        return len(self.codes)


@runtime_checkable
class Fp8Products(Protocol):
    """Weight whose products round x in groups of 128 columns, or take an x that another kernel has already rounded."""

    def linear_of_rounded(self, x: Fp8Rows, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """Compute `Ops.linear`."""


def empty_rows(rows: int, size: int, group: int, device: torch.device) -> Fp8Rows:
    """Return memory for rows of x with a scale for each row, or for each `group` of columns of a row.

    It has padding rows, which the products read without using their values.
    """
    multiple = _ALIGNED_ROWS if rows > MOST_ROWS[group] else _BLOCK_ROWS[rows > _BLOCK_ROWS[0]]
    room = -(-rows // multiple) * multiple
    codes = torch.empty((room, size), dtype=torch.float8_e4m3fn, device=device)
    shape = (size // group, room) if group else (room,)
    return Fp8Rows(rows, codes, torch.empty(shape, dtype=torch.float32, device=device))
