"""MXFP4 of gpt-oss: e2m1 values in pairs, and a power of two for every 32 (OCP Microscaling Formats, 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.quantization.levels import Levels
from minisgl.quantization.matrix import StoredTensor, check_shape, units, within

_GROUP = 32  # values of a scale, in 16 bytes
_BIAS = 127  # of a scale's exponent
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], device="cpu")  # by their four bits


class Mxfp4Experts:
    """Implements QuantizedMatrix: blocks uint8 [experts, out, groups, 16], scales uint8 [experts, out, groups].

    The values are [experts, in, out], as gpt-oss's checkpoints in bfloat16 have them.
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
        exponents = self._scales.read(experts, rows, groups).int() - _BIAS
        values = torch.stack((_VALUES[(pairs & 15).int()], _VALUES[(pairs >> 4).int()]), dim=-1).flatten(-2)
        scaled = torch.ldexp(values, exponents.unsqueeze(-1)).flatten(-2)
        return scaled[..., within(columns, _GROUP)].transpose(1, 2)

    def level_format(self, columns: slice) -> None:
        """Return None: experts are no matrix."""

    def levels(self, rows: slice, columns: slice) -> Levels:
        raise NotImplementedError
