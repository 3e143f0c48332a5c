"""MXFP4 of gpt-oss: e2m1 values in pairs, and a power of two for every 32 (OCP Microscaling Formats, 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.quantization.levels import E2M1, LevelFormat, Levels
from minisgl.quantization.matrix import StoredTensor, check_shape, cuts, units, within

_GROUP = 32  # values that share a scale, in 16 bytes
_BIAS = 127  # bias of a scale's exponent
_SMALLEST = 1 << 22  # bits of the float32 2^-127
_NOT_A_NUMBER = 255  # the exponent that means no scale


class Mxfp4Experts:
    """Matrices of all experts: blocks uint8 [experts, out, groups, 16], scales uint8 [experts, out, groups].

    Parts are read as from a QuantizedMatrix, but levels for one expert at a time. The values are [experts, in, out], as
    gpt-oss's checkpoints in bfloat16 have them.
    """

    def __init__(self, blocks: StoredTensor, scales: StoredTensor) -> None:
        if len(blocks.shape) != 4 or blocks.shape[3] != _GROUP // 2:
            raise ValueError(f"the blocks have shape {list(blocks.shape)}, but the format asks for [.., .., .., 16]")
        experts, rows, groups, _ = blocks.shape
        check_shape("the scales", scales, experts, rows, groups)
        self.shape = experts, groups * _GROUP, rows
        self._blocks, self._scales = blocks, scales

    def read(self, *index: slice) -> Tensor:
        experts, columns, rows = index
        groups, _ = units(columns, _GROUP)
        pairs = self._blocks.read(experts, rows, groups)
        exponents = self._exponents(experts, rows, groups) - _BIAS
        values = torch.stack((E2M1[(pairs & 15).int()], E2M1[(pairs >> 4).int()]), dim=-1).flatten(-2)
        scaled = torch.ldexp(values, exponents.unsqueeze(-1)).flatten(-2)
        return scaled[..., within(columns, _GROUP)].transpose(1, 2)

    def level_format(self, columns: slice) -> LevelFormat | None:
        return None if cuts(columns, _GROUP) else LevelFormat("mxfp4", _GROUP)

    def expert_levels(self, expert: int, rows: slice, columns: slice) -> Levels:
        """Return a part of one expert, [out, in]."""
        form = self.level_format(columns)
        if form is None:
            raise ValueError("these columns have no format")
        groups, _ = units(columns, _GROUP)
        pairs = self._blocks.read(slice(expert, expert + 1), rows, groups)[0]
        exponents = self._exponents(slice(expert, expert + 1), rows, groups)[0]
        scales = torch.where(exponents == 0, _SMALLEST, exponents << 23).view(torch.float32)
        return Levels(form, torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1), scales)

    def _exponents(self, *index: slice) -> Tensor:
        """Return the biased exponents of some scales, int32."""
        exponents = self._scales.read(*index).int()
        if (exponents == _NOT_A_NUMBER).any():
            raise ValueError("the scales have one that is not a number (255)")
        return exponents
