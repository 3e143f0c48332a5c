"""Weights packed for csrc/: every lane reads the values that csrc/quantized.cuh says, and decodes them."""

from __future__ import annotations

import pytest
import torch

from minisgl.quantization.gpu_layout import BITS, CHUNK, TILE, pack_levels
from minisgl.quantization.levels import Kind, LevelFormat, Levels
from minisgl.quantization.rounding import INT4_GROUP, levels_of_int4

HALVES = [torch.bfloat16, torch.float16]


def packed_bytes(kind: Kind, width: int, size: int, group: int) -> int:
    """Return the memory that a packed matrix should take."""
    rows = -(-width // TILE) * TILE
    return rows * size * BITS[kind] // 8 + (rows * size // group * 4 if group else width * 4)


def random_levels(kind: Kind, width: int, size: int, group: int) -> Levels:
    """Return random codes of all finite values; group 0: one scale per row."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16 if kind == "int4" else 256, (width, size), dtype=torch.uint8, generator=generator)
    if kind == "fp8":
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    groups = size // group if group else 1
    scales = (torch.rand(width, groups, generator=generator) + 0.5).bfloat16().float()
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, generator=generator)
    has_zeros = kind == "int4" and group > 0
    return Levels(LevelFormat(kind, group, has_zeros), codes, scales, zeros if has_zeros else None)


def decoded(word: int, kind: Kind, at: int, dtype: torch.dtype) -> list[float]:
    """Return the two values that `decode` makes of a word for index `at`; integers still include the zero point."""
    if kind == "int4":
        return [float(word >> (4 * at + 16 * half) & 15) for half in (0, 1)]
    if kind == "int8":
        return [float((word >> (8 * at + 16 * half)) & 255) for half in (0, 1)]
    if dtype == torch.bfloat16:
        bits = word & 0x87F087F0 if at == 0 else (word << 4 & 0x80F080F0) | (word >> 4 & 0x07000700)
    else:
        bits = word & 0xBF80BF80 if at == 0 else (word << 7 & 0x3F803F80) | (word << 1 & 0x80008000)
    pair = torch.tensor([bits & 0xFFFF, bits >> 16], dtype=torch.int32).to(torch.uint16).view(dtype)
    return (pair.double() * (2.0**120 if dtype == torch.bfloat16 else 2.0**8)).tolist()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_lanes_find_their_values(kind: Kind, gated: bool, dtype: torch.dtype) -> None:
    width, size = 80, 128
    levels = random_levels(kind, width, size, 0)
    packed = pack_levels(levels, dtype, gated=gated)
    numbers = levels.codes.view(torch.float8_e4m3fn).double() if kind == "fp8" else levels.codes.double()
    rng = torch.Generator().manual_seed(1)
    steps_of_word = CHUNK[kind] // 32
    for _ in range(60):
        tile, chunk = (int(torch.randint(count, (), generator=rng)) for count in packed.words.shape[:2])
        thread, index, at = (int(torch.randint(count, (), generator=rng)) for count in (128, 4, 2 * steps_of_word))
        word = int(packed.words[tile, chunk, thread * 4 + index]) & 0xFFFFFFFF
        warp, g, p = thread // 32, thread % 32 // 4, thread % 4
        row = tile * TILE + warp * 16 + g + index % 2 * 8
        if gated:
            row = row // 16 * 8 + row % 8 + row // 8 % 2 * (width // 2)
        if row >= width:
            continue
        column = chunk * CHUNK[kind] + (index // 2 * steps_of_word + at // 2) * 16 + at % 2 * 8 + 2 * p
        assert decoded(word, kind, at, dtype) == numbers[row, column : column + 2].tolist()


@pytest.mark.parametrize(("kind", "group"), [("fp8", 128), ("int4", 32), ("int4", 128), ("fp8", 0)])
def test_scales_and_zero_points(kind: Kind, group: int) -> None:
    levels = random_levels(kind, 96, 256, group)
    packed = pack_levels(levels, torch.bfloat16)
    assert packed.nbytes == packed_bytes(kind, 96, 256, group)
    if not group:
        assert packed.row_scales is not None
        assert torch.equal(packed.row_scales, levels.scales.flatten())
        return
    words = packed.group_scales.transpose(1, 2).flatten(0, 1)[:96].contiguous()
    if kind == "int4":
        assert levels.zeros is not None
        assert torch.equal(words & 0xFF, levels.zeros.int())
        words &= ~0xFF
    assert torch.equal(words.view(torch.float32), levels.scales)


@pytest.mark.parametrize("dtype", HALVES)
def test_scales_and_offsets(dtype: torch.dtype) -> None:
    levels = levels_of_int4(torch.randn(96, 256, generator=torch.Generator().manual_seed(0)))
    packed = pack_levels(levels, dtype)
    assert packed.nbytes == packed_bytes("int4", 96, 256, INT4_GROUP)
    pairs = packed.group_scales.transpose(1, 2).flatten(0, 1)[:96].contiguous().view(dtype).float()
    assert levels.offsets is not None
    assert torch.equal(pairs[:, 0::2], levels.scales)
    assert torch.equal(pairs[:, 1::2], levels.offsets)


def test_a_copy_on_a_device_has_the_offsets() -> None:
    levels = levels_of_int4(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(levels.to(torch.device("cpu")).dequantize(), levels.dequantize())
