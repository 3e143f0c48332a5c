"""Division of a lone row's products with quantized weights among blocks of csrc/quantized_gemv.cu."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from minisgl.quantization.gpu_layout import BITS
from minisgl.quantization.levels import Kind

_SLICE = 128  # columns of K that a warp multiplies at a time
_KINDS: tuple[Kind, ...] = ("int4", "fp8")
# Of a block: attention's blocks have room beside it, another one of the same kernel has not.
_MAX_SHARED_BYTES = 190 << 10
_MIN_SHARED_BYTES = 116 << 10
_MAX_STAGES = 8
_MIN_STAGES = 2
_BANDWIDTH = 4.2e6  # bytes a microsecond
_PLACES_OF_FOUR = 0.9  # share of the multiprocessors that clusters of four fill: each lies in one part of the device


class GemvDivision(NamedTuple):
    """Division of a product by quantized_gemv.cu: its macros, and the clusters that take turns at its tiles."""

    row_blocks: int  # of a tile, 16 rows of the weight each
    split: int  # blocks of a cluster, which divide K
    warps: int
    slices: int  # of a warp, at most
    stages: int  # of the weight, of a warp
    clusters: int
    shared_bytes: int  # dynamic, of a block

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def macros(self) -> dict[str, int]:
        """Macros of a kernel that is compiled for it."""
        names = {"ROW_BLOCKS": self.row_blocks, "SPLIT": self.split, "WARPS": self.warps}
        return names | {"SLICES": self.slices, "STAGES": self.stages}


def gemv_divisions(kind: Kind, width: int, size: int, group: int, num_sms: int) -> Iterator[GemvDivision]:
    """Yield the divisions whose blocks have a multiprocessor each; see `divide_gemv`."""
    for row_blocks, split, warps in product(range(1, 9), (1, 2, 4), range(8, 17)):
        division = gemv_division(kind, width, size, group, num_sms, row_blocks, split, warps)
        if division is not None:
            yield division


def gemv_division(
    kind: Kind, width: int, size: int, group: int, num_sms: int, row_blocks: int, split: int, warps: int
) -> GemvDivision | None:
    """Return the division into such blocks with as many stages as there is room for; None: not even for two."""
    tiles = -(-width // (16 * row_blocks))
    places = int(num_sms * (_PLACES_OF_FOUR if split == 4 else 1)) // split
    clusters = -(-tiles // -(-tiles // places))
    slices = -(-size // (_SLICE * split * warps))
    sums_bytes = -(-(16 * row_blocks + 1) // 4) * 16
    fixed = warps * (sums_bytes + slices * (_SLICE * 2 + 4))
    stage = warps * row_blocks * _row_block_bytes(kind, group)
    stages = min((_MAX_SHARED_BYTES - fixed) // stage, _MAX_STAGES)
    if stages < _MIN_STAGES:
        return None
    shared_bytes = max(fixed + stages * stage, _MIN_SHARED_BYTES)
    return GemvDivision(row_blocks, split, warps, slices, stages, clusters, shared_bytes)


def _row_block_bytes(kind: Kind, group: int) -> int:
    """Return the bytes of 16 rows of a slice of a weight: levels and scales."""
    return 16 * (_SLICE * BITS[kind] // 8 + (_SLICE // group * 4 if group else 0))


@lru_cache(1 << 14)
def divide_gemv(kind: Kind, width: int, size: int, group: int, num_sms: int) -> GemvDivision | None:
    """Divide x [size] @ weight [width, size]^T of quantized_gemv.cu; None: it does not take such a weight."""
    if kind not in _KINDS or size % _SLICE:
        return None

    def cost(division: GemvDivision) -> float:
        """Estimate microseconds: of a multiprocessor's share of the memory, or of its instructions."""
        tiles = -(-width // (16 * division.row_blocks * division.clusters))
        slices = -(-size // (_SLICE * division.split))
        memory = division.row_blocks * _row_block_bytes(kind, group) * slices * tiles * num_sms / _BANDWIDTH
        turns = division.slices * -(-division.warps // 4) * tiles  # of a quarter of a multiprocessor
        instructions = turns * (120 + 55 * division.row_blocks) / 1000
        ends = tiles * (1.3 if division.split > 1 else 0.3)
        return max(memory, instructions) + 0.2 * instructions + ends

    return min(gemv_divisions(kind, width, size, group, num_sms), key=cost, default=None)
