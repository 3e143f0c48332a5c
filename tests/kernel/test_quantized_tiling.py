"""Tilings of GEMMs with quantized weights: blocks fit on a multiprocessor, and all divisions leave no remainder."""

from __future__ import annotations

import pytest

from minisgl.kernel.gemm.quantized_tiling import (
    GemmTiling,
    choose_fp8_tiling,
    choose_quantized_tiling,
    fp8_stage_bytes,
    quantized_stage_bytes,
    skinny_rows,
    sums_bytes,
)
from minisgl.quantization.levels import Kind

SM_BYTES, BLOCK_BYTES = 228 << 10, 227 << 10  # shared memory of an SM and of a block, whose own 1 KiB is not counted
SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (768, 256), (48, 128), (151936, 4096))
ROWS = (1, 8, 16, 17, 33, 64, 65, 128, 200, 256, 500)


def check(tiling: GemmTiling, stage: int, rows: int, size: int) -> None:
    shared = max(tiling.stages * stage, sums_bytes(tiling)) + 2048  # barriers
    assert shared <= BLOCK_BYTES
    assert shared * tiling.blocks <= (tiling.sm_shared_bytes or SM_BYTES)
    assert tiling.stages >= 2
    assert rows <= tiling.max_rows or tiling.max_rows >= 64
    assert tiling.block_n // tiling.split % 16 == 0, "a gated weight's gates and what they are for stay together"
    assert size % tiling.block_k == 0
    assert tiling.split <= 8


def registers(tiling: GemmTiling) -> int:
    """Return the registers that a consumer thread may have; they are allocated for four warps at a time."""
    if tiling.producers == 128:
        return 160
    warps = -(-tiling.threads // 32 * tiling.blocks // 4) * 4
    return 65536 // (warps * 32) // 8 * 8


@pytest.mark.parametrize(("kind", "group"), [("fp8", 0), ("fp8", 128), ("int8", 0), ("int4", 32), ("int4", 128)])
def test_blocks_of_quantized_weights(kind: Kind, group: int) -> None:
    for width, size in SHAPES:
        for rows in ROWS:
            tiling = choose_quantized_tiling(kind, rows, width, size, group, 132)
            check(tiling, quantized_stage_bytes(kind, group, tiling), rows, size)
            assert tiling.skinny == (kind == "int4" and rows <= skinny_rows(group))
            assert group == 0 or tiling.block_k % group == 0
            if tiling.skinny:
                steps = -(-(size // tiling.block_k) // tiling.split)
                assert tiling.stages >= steps or tiling.stages % tiling.warps == 0, "stages are a warp's own"
                sums = tiling.block_n // 16 * tiling.max_rows // 8 * 4
                assert 2 * sums + 60 <= registers(tiling), "registers hold a group's sums, all sums, and operands"
                continue
            operands = 32 if kind == "int4" else 16  # for two phases
            assert tiling.max_rows // 2 + operands + 28 <= registers(tiling), "registers hold sums and operands"
            part = tiling.block_k // tiling.k_parts  # columns of a stage that a warpgroup multiplies
            assert part % (64 if kind == "int4" or tiling.k_parts > 1 else 32) == 0


@pytest.mark.parametrize("group", [0, 128])
def test_blocks_of_fp8_with_fp8(group: int) -> None:
    for width, size in SHAPES:
        for rows in ROWS:
            tiling = choose_fp8_tiling(rows, width, size, group, 132)
            check(tiling, fp8_stage_bytes(group, tiling), rows, size)
            lines = tiling.block_k // tiling.k_parts // 128  # that a warpgroup multiplies at a time
            assert (1 + lines) * tiling.max_rows // 2 + 30 <= registers(tiling), "all sums and one line's sums"


def test_a_ring_before_attention_leaves_it_an_L1_cache() -> None:
    for rows in ROWS:
        for group in (0, 128):
            tiling = choose_fp8_tiling(rows, 6144, 4096, group, 132, before_attention=True)
            check(tiling, fp8_stage_bytes(group, tiling), rows, 4096)
            tiling = choose_quantized_tiling("fp8", rows, 6144, 4096, group, 132, before_attention=True)
            check(tiling, quantized_stage_bytes("fp8", group, tiling), rows, 4096)


def test_weights_of_few_rows_are_asked_for_little_by_little() -> None:
    """A separate producer does so. With many rows it exists only if an SM has a single block."""
    for width, size in SHAPES:
        for count in ROWS:
            for tiling in (
                choose_fp8_tiling(count, width, size, 128, 132),
                choose_quantized_tiling("fp8", count, width, size, 0, 132),
            ):
                assert (tiling.producers > 32) == (count <= 64 or tiling.blocks == 1)


@pytest.mark.parametrize(("rows", "max_rows"), [(64, 64), (128, 128), (256, 128)])
def test_many_rows_use_all_multiprocessors(rows: int, max_rows: int) -> None:
    """A block has enough rows of a wide weight to keep its tensor cores busy, and the blocks fill whole waves."""
    tiling = choose_quantized_tiling("fp8", rows, 24576, 4096, 0, 132)
    assert (tiling.max_rows, tiling.warpgroups, tiling.split) == (max_rows, 3, 1)
    assert 0.9 < tiling.tiles(rows, 24576) / 132 / -(-rows // max_rows) <= 1


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 4096), (4096, 12288)])
def test_warpgroups_divide_the_columns_of_a_narrow_weight(shape: tuple[int, int]) -> None:
    tiling = choose_quantized_tiling("fp8", 64, *shape, 0, 132)
    assert (tiling.block_n, tiling.k_parts, tiling.block_k) == (64, 2, 256)
    assert 0.7 < tiling.tiles(64, shape[0]) * tiling.split / 132 <= 1


def test_a_last_wave_is_not_nearly_empty() -> None:
    """Gate-up products of 64 rows: for 14B 1.4 waves without split-K and 2.7 with two splits; for 8B one wave."""
    assert choose_fp8_tiling(64, 34816, 5120, 128, 132).split == 2
    assert choose_fp8_tiling(64, 24576, 4096, 128, 132).split == 1


def test_few_rows_read_the_weight_evenly() -> None:
    """K of a narrow weight is split until every SM has a block; with a wide weight, three blocks fit on an SM."""
    for divide in (
        lambda *shape: choose_fp8_tiling(1, *shape, 0, 132),
        lambda *shape: choose_quantized_tiling("fp8", 1, *shape, 0, 132),
    ):
        narrow, wide = divide(4096, 12288), divide(24576, 4096)
        assert (narrow.blocks, narrow.k_parts, narrow.split) == (1, 2, 2)
        assert (wide.blocks, wide.k_parts, wide.split) == (3, 1, 1)


@pytest.mark.parametrize(("rows", "group"), [(1, 32), (8, 128), (16, 128)])
def test_few_rows_read_int4_by_the_fastest_blocks(rows: int, group: int) -> None:
    """There are three blocks per SM, for a narrow weight in clusters of four, or two where clusters do not fit."""
    shapes = {(24576, 4096): (1, 3), (4096, 4096): (4, 3), (4096, 12288): (4, 3), (6144, 4096): (2, 2)}
    for (width, size), (split, blocks) in shapes.items():
        tiling = choose_quantized_tiling("int4", rows, width, size, group, 132)
        assert (tiling.skinny, tiling.split, tiling.blocks) == (True, split, blocks)


@pytest.mark.parametrize("rows", [1, 9, 33, 64, 65, 100, 129, 200, 257, 300, 384])
def test_blocks_have_even_parts_of_x(rows: int) -> None:
    for tiling in (
        choose_fp8_tiling(rows, 24576, 4096, 128, 132),
        choose_quantized_tiling("fp8", rows, 24576, 4096, 0, 132),
    ):
        blocks, part = -(-rows // tiling.max_rows), tiling.x_rows(rows)
        assert part <= tiling.max_rows
        assert (blocks - 1) * part < rows <= blocks * part < rows + 8 * blocks
        assert blocks == 1 or part % 8 == 0, "scales of x are fetched from multiples of 16 bytes on"
