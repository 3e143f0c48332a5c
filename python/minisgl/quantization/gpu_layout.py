"""Layout of quantized weights on a GPU: bits are permuted so that each thread of a GEMM reads 16 bytes at a time.

csrc/quantized.cuh explains the layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.quantization.levels import MIDDLE, Kind, Levels

TILE = 64  # rows of a chunk
BITS: dict[Kind, int] = {"fp8": 8, "int8": 8, "int4": 4, "mxfp4": 4}
CHUNK: dict[Kind, int] = {kind: 256 // bits for kind, bits in BITS.items()}  # columns of a chunk
# Numbers of columns that may share a scale for the kernels to read them; 0: all columns.
GROUPS: dict[Kind, tuple[int, ...]] = {"fp8": (0, 128), "int8": (0,), "int4": (32, 64, 128), "mxfp4": (32,)}
WEIGHT_NAMES: dict[Kind, str] = {"fp8": "E4M3", "int8": "INT8", "int4": "INT4", "mxfp4": "E2M1"}  # in quantized.cuh
_BLOCK = 1 << 24  # number of values packed at a time


@dataclass(frozen=True, slots=True)
class PackedLevels:
    """`Levels` on a GPU in the layout of csrc/quantized.cuh.

    `words` int32 [tiles, chunks, 512]. `row_scales` float32 [out] if a row has one scale. Otherwise `group_scales`
    int32 [tiles, groups, TILE]: the bits of a float32, whose lowest eight are the zero point in integer formats; with
    `offsets`, a scale and an offset of 16 bits each. `gated`: the first half of the rows are gates; when packed, eight
    gates are followed by the eight ups that belong to them.
    """

    kind: Kind
    width: int
    size: int
    group: int  # columns of a scale; 0: all
    gated: bool
    offsets: bool
    words: Tensor
    group_scales: Tensor
    row_scales: Tensor | None

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.words, self.group_scales, self.row_scales) if each is not None)


def pack_levels(levels: Levels, dtype: torch.dtype, *, gated: bool = False) -> PackedLevels:
    """Pack a matrix for products in `dtype`, bfloat16 or float16, on which the permutation of FP8 bits depends.

    The columns must be a multiple of CHUNK, and half of the rows of a gated matrix a multiple of eight.
    """
    (width, size), form, device = levels.shape, levels.format, levels.codes.device
    order = torch.arange(-(-width // TILE) * TILE, device=device)
    if gated:  # eight of 16 rows are gates
        order = order // 16 * 8 + order % 8 + order // 8 % 2 * (width // 2)
    order = order.clamp_(max=width - 1)  # rows beyond the last are never used
    words = torch.empty((len(order) // TILE, size // CHUNK[form.kind], 512), dtype=torch.int32, device=device)
    count = max(_BLOCK // (size * TILE), 1)
    for start in range(0, len(words), count):
        rows = order[start * TILE : (start + count) * TILE]
        words[start : start + count] = pack_codes(levels.codes[rows], form.kind, dtype)
    if form.group:
        group_scales, row_scales = pack_scales(levels[order], dtype), None
    else:
        group_scales, row_scales = torch.empty(0, dtype=torch.int32, device=device), levels.scales.flatten()
    return PackedLevels(
        kind=form.kind,
        width=width,
        size=size,
        group=form.group,
        gated=gated,
        offsets=form.offsets,
        words=words,
        group_scales=group_scales,
        row_scales=row_scales,
    )


def pack_scales(levels: Levels, dtype: torch.dtype) -> Tensor:
    """Return the scales of groups of whole tiles, offsets in `dtype`: int32 [tiles, groups, TILE]."""
    kind, scales = levels.format.kind, levels.scales.view(torch.int32)
    if levels.offsets is not None:
        both = levels.scales.to(dtype), levels.offsets.to(dtype)
        scales = torch.stack(both, -1).view(torch.int32).squeeze(-1)
    elif kind != "fp8":
        zeros = MIDDLE[kind] if levels.zeros is None else levels.zeros.int()
        scales = (scales + 0x80 & ~0xFF) | zeros
    return scales.view(-1, TILE, scales.shape[1]).transpose(1, 2).contiguous()


def pack_codes(codes: Tensor, kind: Kind, dtype: torch.dtype) -> Tensor:
    """uint8 [rows, in] of whole tiles and chunks -> int32 [tiles, chunks, 512]."""
    return _pack_8_bits(codes, kind, dtype) if BITS[kind] == 8 else _pack_4_bits(codes, kind)


def _pack_8_bits(codes: Tensor, kind: Kind, dtype: torch.dtype) -> Tensor:
    """uint8 [rows, in] -> int32 [tiles, chunks, 512]."""
    # tile, warp, high half of its 16 rows, row g, chunk, step, second half of its 16 columns, p, second of a pair
    parts = codes.int().view(-1, 4, 2, 8, codes.shape[1] // 32, 2, 2, 4, 2)
    parts = parts.permute(0, 4, 1, 3, 7, 5, 2, 6, 8)
    first, second = parts[..., 0, :], parts[..., 1, :]
    if kind == "int8":
        halves = first | second << 8
    elif dtype == torch.bfloat16:
        low = (second & 0x80) << 4 | (second & 0x70) << 8 | second & 0x0F
        halves = (first & 0x80) << 8 | (first & 0x7F) << 4 | low
    else:
        halves = (first & 0x80) << 8 | (first & 0x7F) << 7 | (second & 0x80) << 7 | second & 0x7F
    return (halves[..., 0] | halves[..., 1] << 16).reshape(-1, codes.shape[1] // 32, 512)


def _pack_4_bits(codes: Tensor, kind: Kind) -> Tensor:
    """uint8 [rows, in] -> int32 [tiles, chunks, 512]."""
    # The axes are those of 8 bits, but a word has two steps.
    parts = codes.int().view(-1, 4, 2, 8, codes.shape[1] // 64, 2, 2, 2, 4, 2)
    parts = parts.permute(0, 4, 1, 3, 8, 5, 2, 6, 7, 9).flatten(-3)  # .., step and half and pair
    words = sum(_place(parts[..., at], kind, at // 2, at % 2 * 16) for at in range(8))
    assert isinstance(words, Tensor)
    return words.to(torch.int32).reshape(-1, codes.shape[1] // 64, 512)


def _place(code: Tensor, kind: Kind, index: int, half: int) -> Tensor:
    """Shift the bits of 4-bit codes to value `index` (0 to 3) of the half of a word that begins at bit `half`."""
    if kind == "int4":
        return code << 4 * index + half
    sign, magnitude = code >> 3, code & 7
    match index:
        case 0:
            return (sign << 15 | magnitude << 6) << half
        case 1:
            return (sign << 11 | magnitude << 2) << half
        case 2:
            return magnitude << 12 + half | sign << (5 if half else 21)
        case _:
            return (sign << 9 | magnitude >> 2 << 10 | magnitude & 3) << half
