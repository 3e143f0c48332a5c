"""Division of products with quantized weights among blocks: csrc/quantized_gemm.cu and fp8_gemm.cu.

Sizes of blocks and the costs below are those of the fastest divisions measured on an H200 (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from minisgl.quantization.gpu_layout import BITS, TILE
from minisgl.quantization.levels import Kind

MAX_ROWS = 64  # of x, that a block takes; or _LARGE_BLOCK
_LARGE_BLOCK = 128
_MIN_STAGES = 3  # of more than a few rows: one is given back while the next one is multiplied
_MAX_STAGES = 16
_FEW_ROWS_SPLIT_COST = 0.03  # see `fewest_waves`
_SPLIT_COST = 0.15


class Division(NamedTuple):
    """Division of a product among blocks: macros of the kernels."""

    max_rows: int  # of x, of a block
    warpgroups: int  # of 64 rows of the weight each
    split: int  # blocks that divide K
    block_k: int  # columns of a stage
    stages: int
    blocks: int  # on a multiprocessor
    # Threads besides the warpgroups. Two warps ask for weights and for x; four also give registers to the others.
    producers: int = 32
    k_parts: int = 1  # warpgroups that divide the columns of a stage

    @property
    def threads(self) -> int:
        return self.warpgroups * 128 + self.producers

    @property
    def block_n(self) -> int:
        """Rows of the weight of a block."""
        return self.warpgroups // self.k_parts * TILE

    def tiles(self, rows: int, width: int) -> int:
        """Parts of the product that have all of K."""
        return -(-rows // self.max_rows) * -(-width // self.block_n)


def ring_bytes(blocks: int) -> int:
    """Return the shared memory of a block if so many are on a multiprocessor."""
    return (216 << 10) // blocks // 1024 * 1024


def sums_bytes(division: Division) -> int:
    """Memory of a block's own sums, and of those that others send it (csrc/sums.cuh)."""
    own = division.block_n * (division.max_rows + 2) * 4
    return max(own if division.split == 1 else 2 * own, (division.k_parts - 1) * own)


def quantized_stage_bytes(kind: Kind, group: int, division: Division) -> int:
    """Size of a stage of quantized_gemm.cu: columns of x, of the weight's rows, and their scales."""
    weight = TILE * division.block_k * BITS[kind] // 8
    scales = division.block_k // group * TILE * 4 if group else 0
    size = division.max_rows * division.block_k * 2 + division.block_n // TILE * (weight + scales)
    return -(-size // 1024) * 1024


def fp8_stage_bytes(group: int, division: Division) -> int:
    """Size of a stage of fp8_gemm.cu: columns of x and of the weight's rows, and x's scales."""
    size = (division.max_rows + division.block_n) * division.block_k + (division.max_rows * 4 if group else 0)
    return -(-size // 1024) * 1024


def divide_quantized(
    kind: Kind, rows: int, width: int, size: int, group: int, num_sms: int, *, sums_of_groups: bool
) -> Division:
    """Divide x [rows, size] @ weight [width, size]^T of quantized_gemm.cu.

    `sums_of_groups`: groups have sums of their own, for which twice the registers are needed.
    """

    def staged(division: Division) -> Division:
        stage = quantized_stage_bytes(kind, group, division)
        return _staged(division, stage, size)

    streamed = _streamed(width, size, num_sms) if rows <= 8 and kind != "int4" else None
    if streamed is not None:
        return staged(streamed)
    if rows <= 32:
        block_k = 256 if kind == "int4" and rows <= 16 and size % 256 == 0 else 128 if size % 128 == 0 else 64
        division = Division(_block_rows(rows), 1, 1, block_k, 0, 3)
        split = fewest_waves(division.tiles(rows, width), size // block_k, num_sms * 3, _FEW_ROWS_SPLIT_COST)
        return staged(division._replace(split=split))
    candidates = [_narrow(rows, width, size, group, num_sms, staged)]
    for max_rows, row_groups, k_parts in _COLUMN_COSTS:
        block_k = _block_k(max_rows, k_parts, size, group if sums_of_groups else 0)
        if block_k == 0:
            continue
        producers = 128 if sums_of_groups and (max_rows, row_groups) == (_LARGE_BLOCK, 3) else 64
        division = Division(max_rows, row_groups * k_parts, 1, block_k, 0, 1, producers, k_parts)
        candidates += [staged(division._replace(split=split)) for split in (1, 2) if size // block_k >= split]
    enough = [each for each in candidates if each.stages >= _MIN_STAGES or each is candidates[0]]
    return min(enough, key=lambda each: _cost(each, rows, width, size, num_sms))


def divide_fp8(rows: int, width: int, size: int, group: int, num_sms: int) -> Division:
    """Divide x [rows, size] @ weight [width, size]^T of fp8_gemm.cu, of at most MAX_ROWS rows."""

    def staged(division: Division) -> Division:
        return _staged(division, fp8_stage_bytes(group, division), size)

    if rows > 32:
        return _narrow(rows, width, size, group, num_sms, staged)
    division = Division(_block_rows(rows), 1, 1, 128, 0, 3)
    split = fewest_waves(division.tiles(rows, width), size // 128, num_sms * 3, _FEW_ROWS_SPLIT_COST)
    return staged(division._replace(split=split))


def fewest_waves(tiles: int, steps: int, slots: int, split_cost: float) -> int:
    """Return by how many blocks K, of so many steps, is divided, if `slots` blocks run at a time.

    They come in waves, each of which reads 1 / split of K; and more blocks have more sums to exchange, which for each
    costs `split_cost` of a wave.
    """
    splits = [split for split in (1, 2, 4, 8) if steps // split >= 2 or split == 1]
    return min(splits, key=lambda split: -(-tiles * split // slots) / split + split_cost * split)


def _streamed(width: int, size: int, num_sms: int) -> Division | None:
    """Divide a weight that a few rows read among blocks of 128 of its rows, if these fill two or three places on a
    multiprocessor with clusters of two or four. Larger clusters leave places empty: they lie in one part of the device.
    """
    division = Division(8, 2, 1, 128 if size % 128 == 0 else 64, 0, 2)
    tiles, steps = division.tiles(1, width), size // division.block_k
    for split, places in ((4, 2), (2, 3)):
        blocks = -(-tiles * split // num_sms)  # of a multiprocessor
        if steps // split >= 2 and 2 <= blocks <= places and tiles * split >= 1.4 * num_sms:
            return division._replace(split=split, blocks=blocks)
    return None


def _block_rows(rows: int) -> int:
    return next(each for each in (8, 16, 32, MAX_ROWS) if rows <= each)


def _block_k(max_rows: int, k_parts: int, size: int, group: int) -> int:
    """Return the columns of a stage of a large block, as many as leave room for three; 0: there is no such block.

    `group`: columns whose sums are scaled; each warpgroup has whole ones.
    """
    widest = 256 if max_rows == MAX_ROWS and k_parts > 1 else 128
    sizes = [each for each in (widest, 128, 64) if size % each == 0 and each <= widest]
    return next((each for each in sizes if each // k_parts % max(64, group) == 0), 0)


def _narrow(
    rows: int, width: int, size: int, group: int, num_sms: int, staged: Callable[[Division], Division]
) -> Division:
    """Divide among blocks of 64 rows of x and 64 of the weight, two or three on a multiprocessor."""
    division = Division(MAX_ROWS, 1, 1, 128, 0, 3)
    tiles = division.tiles(rows, width)
    split = fewest_waves(tiles, size // 128, num_sms * 3, _SPLIT_COST)
    division = division._replace(split=split, blocks=min(max(2, -(-tiles * split // num_sms)), 3))
    long = staged(division)
    return long if (long.stages > 2 or group == 128) and size % 128 == 0 else staged(division._replace(block_k=64))


def _staged(division: Division, stage: int, size: int) -> Division:
    steps = -(-size // division.block_k // division.split)
    return division._replace(stages=max(2, min(ring_bytes(division.blocks) // stage, steps, _MAX_STAGES)))


# Microseconds of 1,024 columns, by a block's rows of x, its warpgroups with other rows of the weight, and `k_parts`.
_COLUMN_COSTS = {
    (64, 1, 1): 2.7,
    (64, 1, 2): 2.5,
    (64, 3, 1): 7.0,
    (128, 1, 2): 3.8,
    (128, 2, 1): 5.9,
    (128, 3, 1): 8.7,
}
_BEGIN = {1: 1.5, 2: 5.0, 4: 6.0, 8: 6.0}  # microseconds by split: to begin, to exchange sums and to end


def _cost(division: Division, rows: int, width: int, size: int, num_sms: int) -> float:
    """Estimate microseconds of more than a few rows, as if an SM did one block after another."""
    waves = -(-division.tiles(rows, width) * division.split // num_sms)
    columns = _COLUMN_COSTS[division.max_rows, division.block_n // TILE, division.k_parts] * size / 1024
    return waves * (columns / division.split + _BEGIN[division.split])
