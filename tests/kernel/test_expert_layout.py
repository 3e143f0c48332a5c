"""Experts packed for csrc/quantized_moe.cu: every lane reads and decodes the values that csrc/quantized.cuh says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minisgl.kernel.experts import quantized_moe
from minisgl.quantization.expert_layout import PackedExperts
from minisgl.quantization.levels import LevelFormat, Levels
from support.expert_values import expert_values

CPU = torch.device("cpu")
FORMATS = (
    LevelFormat("fp8", 128),
    LevelFormat("fp8"),
    LevelFormat("int8"),
    LevelFormat("int4", 32, zeros=True),
    LevelFormat("int4", 128),
    LevelFormat("mxfp4", 32),
)


def random_levels(form: LevelFormat, width: int, size: int, generator: torch.Generator) -> Levels:
    codes = torch.randint(0, 256 if form.kind in ("fp8", "int8") else 16, (width, size), generator=generator).byte()
    if form.kind == "fp8":
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    shape = (width, form.groups(size))
    scales = (torch.rand(shape, generator=generator) + 0.5).bfloat16().float()
    if form.kind == "mxfp4":
        scales = torch.exp2(torch.randint(-120, 2, shape, generator=generator).float())
    zeros = torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator) if form.zeros else None
    return Levels(form, codes, scales, zeros)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_lanes_find_their_values(form: LevelFormat, gated: bool) -> None:
    """Rows end inside a tile; with groups of 32 columns, the columns end inside a chunk."""
    generator = torch.Generator().manual_seed(0)
    width, size = 144, 96 if form.group == 32 else 128
    packed = PackedExperts.empty(form, (2, width, size), torch.bfloat16, CPU, gated=gated)
    values = torch.empty(2, width, size)
    halves = [slice(72, 144), slice(0, 72)] if gated else [slice(0, 144)]
    for expert in (1, 0):
        for rows in halves:
            levels = random_levels(form, rows.stop - rows.start, size, generator)
            packed.fill(expert, rows, levels)
            values[expert, rows] = levels.dequantize()
    assert torch.equal(expert_values(packed), values)


def test_a_stored_value_takes_its_bits() -> None:
    packed = PackedExperts.empty(LevelFormat("mxfp4", 32), (4, 640, 1280), torch.bfloat16, CPU, gated=True)
    assert packed.nbytes == 4 * 640 * 1280 * 17 // 32


def test_scales_without_room_are_refused() -> None:
    form = LevelFormat("mxfp4", 32)
    packed = PackedExperts.empty(form, (1, 64, 64), torch.bfloat16, CPU, gated=False)
    scales: Tensor = torch.full((64, 2), 2.0)
    levels = Levels(form, torch.zeros((64, 64), dtype=torch.uint8), scales)
    packed.fill(0, slice(0, 64), levels)
    scales[7, 1] = 4.0
    with pytest.raises(ValueError, match="a scale is 4, but experts"):
        packed.fill(0, slice(0, 64), levels)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_blocks_find_room_on_a_multiprocessor(form: LevelFormat) -> None:
    """Hopper has 228 KiB of shared memory per SM, and a block takes 1 KiB more than it requests."""
    for tiling in quantized_moe.tilings(form):
        assert tiling.blocks * (tiling.shared_bytes(form) + 2048) <= 228 << 10
        assert tiling.blocks * tiling.threads <= 2048
    few, many = (quantized_moe.choose_tilings(form, pairs, 32) for pairs in (8, 9))
    assert few.gated.max_pairs == few.weighted.max_pairs
    assert few.gated.route is few.weighted.route is True
    assert many.gated == many.weighted
