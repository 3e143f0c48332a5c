"""Schedule of FP8 GEMMs of more than 128 rows of x: csrc/fp8_persistent_gemm.cu, or torch where it is faster.

Both multiply equally fast while all multiprocessors are busy. Therefore the one whose tiles fill its waves better is
faster.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

LINE = 128  # columns of K that are multiplied at a time
BLOCK_M = 192  # most rows of x of a tile
BLOCK_N = 128  # rows of the weight of a tile
CLUSTER = 2  # blocks per cluster, which have tiles of the same rows of x
STAGES = 5
STAGE_BYTES = 41 << 10  # a line of a tile and the scales of x, aligned
_X_ROWS = 16  # unit of x_rows: eight rows for each block of a cluster are aligned in shared memory
_QUARTERS = 4  # parts of a divided tile, which its clusters share among them
_TORCH_BLOCK = 128  # rows of x, and of the weight, of a tile of torch._scaled_mm
# Lines that are multiplied while clusters exchange their sums, or while one more launch adds a residual or applies a
# gate (H200, docs/log.md).
_EXCHANGE_LINES = 8
_LAUNCH_LINES = 8


class TileSchedule(NamedTuple):
    """Assignment of a product's pairs of tiles to clusters."""

    x_rows: int  # rows of x per tile: x is divided evenly, so that no tile reaches far beyond it
    clusters: int
    pairs: int
    whole: int  # pairs that one cluster each computes alone; the others are divided along K
    splits: int  # clusters that divide each of these

    @property
    def partial_floats(self) -> int:
        """Sums in memory that the clusters of divided pairs exchange."""
        return (self.pairs - self.whole) * self.splits * CLUSTER * BLOCK_M * BLOCK_N


@lru_cache(1 << 14)
def schedule_tiles(rows: int, width: int, size: int, num_sms: int) -> TileSchedule:
    """Schedule x [rows, size] @ weight [width, size]^T; a last wave of at most half the clusters uses split-K."""
    places = num_sms // CLUSTER
    x_tiles = -(-rows // BLOCK_M)
    x_rows = -(-rows // (x_tiles * _X_ROWS)) * _X_ROWS
    pairs = x_tiles * -(-width // (BLOCK_N * CLUSTER))
    last = pairs % places
    splits = min(places // last, _QUARTERS, size // LINE) if last else 1
    if splits == 1:
        return TileSchedule(x_rows, min(pairs, places), pairs, pairs, 1)
    return TileSchedule(x_rows, places if pairs > places else pairs * splits, pairs, pairs - last, splits)


@lru_cache(1 << 14)
def beats_torch(rows: int, width: int, size: int, num_sms: int, *, launches: int) -> bool:
    """Return True if csrc/fp8_persistent_gemm.cu is estimated to be faster than torch._scaled_mm.

    `launches`: number of additional launches that torch needs after its product, for a residual or a gate.
    """
    x_tiles, torch_x_tiles = -(-rows // BLOCK_M), -(-rows // _TORCH_BLOCK)
    if x_tiles >= torch_x_tiles:
        return False  # the weight would be read as often, for tiles that are emptier
    lines = size // LINE
    schedule = schedule_tiles(rows, width, size, num_sms)
    time = -(-schedule.whole // schedule.clusters) * lines
    if schedule.splits > 1:
        time += -(-lines // schedule.splits) + _EXCHANGE_LINES
    torch_waves = -(-torch_x_tiles * -(-width // _TORCH_BLOCK) // num_sms)
    return time * BLOCK_M < (torch_waves * lines + launches * _LAUNCH_LINES) * _TORCH_BLOCK
