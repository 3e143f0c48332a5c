"""Schedules of FP8 GEMMs: every line of a tile belongs to one cluster, and torch is used where it is faster."""

from __future__ import annotations

from collections import Counter

import pytest

from minisgl.kernel.gemm.fp8_schedule import (
    BLOCK_M,
    BLOCK_N,
    CLUSTER,
    LINE,
    STAGE_BYTES,
    STAGES,
    beats_torch,
    schedule_tiles,
)

QWEN3_8B = (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)  # q, k, v; o; gate and up; down
QWEN3_14B = (7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408)
SHAPES = (*QWEN3_8B, *QWEN3_14B, (384, 128))
ROWS = (129, 160, 256, 300, 512, 2048, 8192)
PLACES = 132 // CLUSTER
BLOCK_BYTES, DECLARED_BYTES = 227 << 10, 22 << 10  # shared memory of a block on Hopper; its part outside the ring


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_clusters_share_out_all_tiles(rows: int, shape: tuple[int, int]) -> None:
    schedule = schedule_tiles(rows, *shape, 132)
    assert schedule.x_rows <= BLOCK_M
    assert schedule.pairs == -(-rows // schedule.x_rows) * -(-shape[0] // (BLOCK_N * CLUSTER))
    taken = Counter(pair % schedule.clusters for pair in range(schedule.whole))
    divided = schedule.pairs - schedule.whole
    assert schedule.clusters <= PLACES
    assert schedule.partial_floats == divided * schedule.splits * CLUSTER * BLOCK_M * BLOCK_N
    if divided:
        assert 1 < schedule.splits <= shape[1] // LINE
        assert len(set(taken.values())) <= 1, "all clusters begin with the last wave together"
        assert divided * schedule.splits <= schedule.clusters, "those of a pair wait for one another"
        assert divided * CLUSTER * 3 <= 3 * 132, "each warpgroup has a counter"
    else:
        assert schedule.splits == 1
        assert len(taken) == schedule.clusters


def test_a_block_fits_a_multiprocessor() -> None:
    assert (BLOCK_M + BLOCK_N) * LINE + BLOCK_M * 4 <= STAGE_BYTES
    assert STAGES * STAGE_BYTES + DECLARED_BYTES <= BLOCK_BYTES


def test_the_last_wave_is_divided_among_idle_clusters() -> None:
    assert schedule_tiles(192, 5120, 17408, 132) == (192, 60, 20, 0, 3)  # 20 pairs by three clusters each
    assert schedule_tiles(192, 34816, 5120, 132) == (
        192,
        66,
        136,
        132,
        4,
    )  # two waves, then 4 pairs by four clusters each
    assert schedule_tiles(384, 5120, 17408, 132) == (192, 40, 40, 40, 1)  # more than half of the clusters have a pair


@pytest.mark.parametrize(
    ("rows", "taken_8b", "taken_14b"),
    [
        (160, "o gate down", "o gate down"),
        (192, "o gate down", "o gate down"),
        (224, "", ""),
        (256, "", ""),
        (320, "qkv o gate down", "qkv gate"),
        (384, "qkv o gate down", "qkv gate"),
        (512, "", "o down"),
        (768, "qkv o gate down", "o gate down"),
    ],
)
def test_the_faster_of_the_kernel_and_torch_multiplies(rows: int, taken_8b: str, taken_14b: str) -> None:
    """The expected choices are those measured on an H200 with the shapes of Qwen3-8B and 14B (docs/log.md)."""
    for shapes, taken in ((QWEN3_8B, taken_8b), (QWEN3_14B, taken_14b)):
        named = zip(("qkv", "o", "gate", "down"), shapes, strict=True)
        chosen = [name for name, shape in named if beats_torch(rows, *shape, 132, launches=int(name != "qkv"))]
        assert " ".join(chosen) == taken
