"""Tilings of GEMVs: each block has a multiprocessor to itself, and all blocks have about the same work."""

from __future__ import annotations

import pytest

from minisgl.kernel.gemm.gemv_tiling import choose_gemv_tiling, gemv_tilings
from minisgl.quantization.levels import Kind

SM_BYTES, BLOCK_BYTES = 228 << 10, 227 << 10  # shared memory of an SM and of a block, whose own 1 KiB is not counted
ATTENTION_BYTES = 34 << 10  # shared memory of a block of decode_attention.cu for eight query heads per KV head
SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (768, 256), (48, 128), (151936, 4096))
FORMATS: tuple[tuple[Kind, int], ...] = (("int4", 32), ("int4", 64), ("int4", 128), ("fp8", 0), ("fp8", 128))


@pytest.mark.parametrize(("kind", "group"), FORMATS)
def test_blocks_have_a_multiprocessor_each(kind: Kind, group: int) -> None:
    for width, size in SHAPES:
        tilings = list(gemv_tilings(kind, width, size, group, 132))
        assert choose_gemv_tiling(kind, width, size, group, 132) in tilings
        for tiling in tilings:
            sums = -(-(16 * tiling.row_blocks + 1) // 4) * 16
            static = (tiling.stages * tiling.warps + 1) * 8 + (sums * tiling.split if tiling.split > 1 else 4)
            whole = tiling.shared_bytes + static + 1024
            assert SM_BYTES // 2 < whole <= BLOCK_BYTES - ATTENTION_BYTES
            assert tiling.clusters * tiling.split <= 132
            assert tiling.clusters <= -(-width // (16 * tiling.row_blocks)), "each has a tile"
            assert tiling.slices * tiling.warps * tiling.split * 128 >= size
            assert 256 <= tiling.threads <= 512, "a thread has 128 registers"


def test_whole_slices() -> None:
    assert choose_gemv_tiling("int4", 768, 1088, 64, 132) is None
    assert choose_gemv_tiling("int8", 768, 1024, 0, 132) is None


@pytest.mark.parametrize(("kind", "group"), [("int4", 128), ("fp8", 0)])
def test_all_multiprocessors_are_busy(kind: Kind, group: int) -> None:
    """No multiprocessor reads more than 25% above the mean, for wide weights 10%."""
    for width, size in (*SHAPES[:4], (10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)):
        tiling = choose_gemv_tiling(kind, width, size, group, 132)
        assert tiling is not None
        tiles = -(-width // (16 * tiling.row_blocks * tiling.clusters))
        share = width / 16 / 132
        assert tiles * tiling.row_blocks / tiling.split < (1.1 if width > 8192 else 1.25) * share
