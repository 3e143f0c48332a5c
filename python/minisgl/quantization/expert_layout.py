"""Layout of quantized experts for csrc/quantized_moe.cu: each matrix is packed as csrc/quantized.cuh explains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.quantization.gpu_layout import CHUNK, TILE, pack_codes, pack_scales
from minisgl.quantization.levels import LevelFormat, Levels

_E8M0_SHIFT = 126  # added to the exponents of scales: the bits of e2m1, read as bfloat16, are too small by 2^126
_E8M0_LARGEST = 128  # largest biased exponent of a scale, 2, to which the shift can be added


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Matrices [experts, out, in] on a GPU in the layout of csrc/quantized.cuh, for products in `dtype`.

    `words` int32 [experts, tiles, chunks, 512]. `row_scales` float32 [experts, out] if a row has one scale. Otherwise
    `scales`: int32 [experts, tiles, groups, TILE] as in `PackedLevels`, or for mxfp4 uint8 [experts, tiles, chunks, 32,
    4], with one byte for each row g of a warp's 16 rows and each of a thread's words. `gated`: the first half of the
    rows are gates; when packed, eight gates are followed by the eight ups that belong to them.
    """

    format: LevelFormat
    dtype: torch.dtype
    shape: tuple[int, int, int]
    gated: bool
    words: Tensor
    scales: Tensor
    row_scales: Tensor | None

    @classmethod
    def empty(
        cls, form: LevelFormat, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, *, gated: bool
    ) -> PackedExperts:
        """Return uninitialized matrices."""
        experts, width, size = shape
        tiles, chunks = -(-width // TILE), -(-size // CHUNK[form.kind])
        words = torch.empty((experts, tiles, chunks, 512), dtype=torch.int32, device=device)
        row_scales: Tensor | None = None
        if form.group == 0:
            row_scales = torch.empty((experts, width), dtype=torch.float32, device=device)
            scales = torch.empty(0, dtype=torch.int32, device=device)
        elif form.kind == "mxfp4":
            scales = torch.empty((experts, tiles, chunks, 32, 4), dtype=torch.uint8, device=device)
        else:
            groups = chunks * CHUNK[form.kind] // form.group
            scales = torch.empty((experts, tiles, groups, TILE), dtype=torch.int32, device=device)
        return cls(form, dtype, shape, gated, words, scales, row_scales)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def label(self) -> str:
        """The format and its product, in a few words for a log line."""
        group, values = self.format.group, str(self.dtype).removeprefix("torch.")
        groups = f" with groups of {group}" if group else ""
        return f"{self.format.kind}{groups}, multiplied in {values} (csrc/quantized_moe.cu)"

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.words, self.scales, self.row_scales) if each is not None)

    def fill(self, expert: int, rows: slice, levels: Levels) -> None:
        """Pack rows of an expert: all of them, or the gates or the ups of a gated one.

        Raises ValueError for scales that the layout cannot represent.
        """
        width = self.shape[1]
        start, stop, _ = rows.indices(width)
        if self.row_scales is not None:
            self.row_scales[expert, start:stop] = levels.scales.flatten()
        half, order = slice(None), torch.arange(self.words.shape[1] * TILE, device=levels.codes.device)
        if self.gated:  # pack these rows as gates and as ups, then copy the half that they are
            half = slice(start * 2 // width, start * 2 // width + 1)
            order = order // 16 * 8 + order % 8
        packed = _padded(levels, self.words.shape[2] * CHUNK[self.format.kind])[order.clamp_(max=len(levels.codes) - 1)]
        words = pack_codes(packed.codes, self.format.kind, self.dtype)
        pairs = (*words.shape[:2], 256, 2)  # the last axis: rows of the two halves
        self.words[expert].view(pairs)[..., half] = words.view(pairs)[..., half]
        if self.format.kind == "mxfp4":
            groups = (*self.scales.shape[1:4], 2, 2)
            self.scales[expert].view(groups)[..., half] = _exponents(packed.scales).view(groups)[..., half]
        elif self.row_scales is None:
            warps = (*self.scales.shape[1:3], 4, 2, 8)  # warp, half and row g
            self.scales[expert].view(warps)[..., half, :] = pack_scales(packed, self.dtype).view(warps)[..., half, :]


def _padded(levels: Levels, size: int) -> Levels:
    """Pad the columns to `size`: x is zero there, so the values do not matter."""
    more = size - levels.shape[1]
    if more == 0:
        return levels
    form, groups = levels.format, 0
    if form.group:
        groups = size // form.group - levels.scales.shape[1]
    zeros = None if levels.zeros is None else F.pad(levels.zeros, (0, groups))
    return Levels(form, F.pad(levels.codes, (0, more)), F.pad(levels.scales, (0, groups)), zeros)


def _exponents(scales: Tensor) -> Tensor:
    """Powers of two, float32 [rows, groups], of whole tiles and chunks -> uint8 [tiles, chunks, 32, 4]."""
    exponents = scales.contiguous().view(torch.int32) >> 23
    if int(exponents.max()) > _E8M0_LARGEST:
        raise ValueError(f"a scale is {scales.max():g}, but experts are multiplied with scales up to 2")
    # tile, warp, half of its 16 rows, row g, chunk, group
    parts = (exponents + _E8M0_SHIFT).to(torch.uint8).view(-1, 4, 2, 8, scales.shape[1] // 2, 2)
    return parts.permute(0, 4, 1, 3, 5, 2).flatten(2, 3).flatten(3)
