"""Tilings of GEMVs (one row of x) with quantized weights: csrc/quantized_gemv.cu."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from minisgl.kernel.gemm.quantized_tiling import BANDWIDTH, FILLED_BY_FOUR
from minisgl.quantization.gpu_layout import BITS
from minisgl.quantization.levels import Kind

_SLICE = 128  # columns of K that a warp multiplies at a time
_KINDS: tuple[Kind, ...] = ("int4", "fp8")
_MAX_SHARED_BYTES = 190 << 10  # per block, so that a block of attention can be resident on the same SM
_MIN_SHARED_BYTES = 116 << 10  # per block, so that an SM has only one block of this kernel
_MAX_STAGES = 8
_MIN_STAGES = 2


class GemvTiling(NamedTuple):
    """Tile of a block of quantized_gemv.cu, as macros of the kernel, and the size of its persistent grid."""

    row_blocks: int  # blocks of 16 rows of the weight in a tile
    split: int  # blocks of a cluster, which divide K
    warps: int  # warps per block
    slices: int  # most slices of K that a warp has
    stages: int  # stages of a warp's ring
    clusters: int  # clusters of the grid, which take tiles in turn
    shared_bytes: int  # dynamic shared memory of a block

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def macros(self) -> dict[str, int]:
        """Macros that the kernel is compiled with."""
        names = {"ROW_BLOCKS": self.row_blocks, "SPLIT": self.split, "WARPS": self.warps}
        return names | {"SLICES": self.slices, "STAGES": self.stages}


def gemv_tilings(kind: Kind, width: int, size: int, group: int, num_sms: int) -> Iterator[GemvTiling]:
    """Yield the tilings that fit with one block per multiprocessor; see `choose_gemv_tiling`."""
    for row_blocks, split, warps in product(range(1, 9), (1, 2, 4), range(8, 17)):
        tiling = gemv_tiling(kind, width, size, group, num_sms, row_blocks, split, warps)
        if tiling is not None:
            yield tiling


def gemv_tiling(
    kind: Kind, width: int, size: int, group: int, num_sms: int, row_blocks: int, split: int, warps: int
) -> GemvTiling | None:
    """Return the tiling with as many stages as fit into shared memory; None if fewer than two do."""
    tiles = -(-width // (16 * row_blocks))
    at_a_time = int(num_sms * (FILLED_BY_FOUR if split == 4 else 1)) // split
    clusters = -(-tiles // -(-tiles // at_a_time))
    slices = -(-size // (_SLICE * split * warps))
    sums_bytes = -(-(16 * row_blocks + 1) // 4) * 16
    fixed = warps * (sums_bytes + slices * (_SLICE * 2 + 4))
    stage = warps * row_blocks * _row_block_bytes(kind, group)
    stages = min((_MAX_SHARED_BYTES - fixed) // stage, _MAX_STAGES)
    if stages < _MIN_STAGES:
        return None
    shared_bytes = max(fixed + stages * stage, _MIN_SHARED_BYTES)
    return GemvTiling(row_blocks, split, warps, slices, stages, clusters, shared_bytes)


def _row_block_bytes(kind: Kind, group: int) -> int:
    """Return the bytes of 16 rows and one slice of a weight: levels and scales."""
    return 16 * (_SLICE * BITS[kind] // 8 + (_SLICE // group * 4 if group else 0))


@lru_cache(1 << 14)
def choose_gemv_tiling(kind: Kind, width: int, size: int, group: int, num_sms: int) -> GemvTiling | None:
    """Return the fastest tiling of x [size] @ weight [width, size]^T; None if the kernel does not support it."""
    if kind not in _KINDS or size % _SLICE:
        return None

    def cost(tiling: GemvTiling) -> float:
        """Estimate the microseconds of a multiprocessor, bound by memory or by instruction issue. Fitted to an H200."""
        tiles = -(-width // (16 * tiling.row_blocks * tiling.clusters))
        slices = -(-size // (_SLICE * tiling.split))
        memory = tiling.row_blocks * _row_block_bytes(kind, group) * slices * tiles * num_sms / BANDWIDTH
        # A multiprocessor has four schedulers.
        slices_of_scheduler = tiling.slices * -(-tiling.warps // 4) * tiles
        instructions = slices_of_scheduler * (120 + 55 * tiling.row_blocks) / 1000
        epilogues = tiles * (1.3 if tiling.split > 1 else 0.3)
        return max(memory, instructions) + 0.2 * instructions + epilogues

    return min(gemv_tilings(kind, width, size, group, num_sms), key=cost, default=None)
