"""Tilings of GEMMs with quantized weights: csrc/quantized_gemm.cu, skinny_int4_gemm.cu, fp8_gemm.cu.

The block sizes and costs below come from the fastest tilings measured on an H200 (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple, TypeAlias

from minisgl.kernel.launch.signature import MAX_EARLY_ROWS, SHARED_BEFORE_ATTENTION
from minisgl.quantization.gpu_layout import BITS, TILE
from minisgl.quantization.levels import Kind

_SKINNY_COLUMNS = 128  # columns of a stage of skinny_int4_gemm.cu
_FEW_ROWS = 32
_SOME_ROWS = 64
_LARGE_BLOCK = 128
_LINE = 128  # columns that warpgroups of fp8_gemm.cu multiply at a time
_MIN_STAGES = 3  # of quantized_gemm.cu: one is given back while the next one is multiplied
_MAX_STAGES = 16
_RING_BEFORE_ATTENTION = 110 << 10
_SHARED_BEFORE_ATTENTION_OF_SOME = 164 << 10  # more than _FEW_ROWS
BANDWIDTH = 4.2e6  # bytes a microsecond
_EMPTY = 0.4  # share of the memory's time that is lost if the last wave is not full
# Share of the multiprocessors that clusters of four can fill, because each must lie within one GPC of the GPU.
FILLED_BY_FOUR = 0.9


class _Block(NamedTuple):
    """Kind of block."""

    max_rows: int  # most rows of x; _FEW_ROWS: the fewest that suffice
    row_groups: int  # warpgroups that have different rows of the weight
    k_parts: int  # warpgroups that divide the columns of a stage
    blocks: int  # blocks per multiprocessor


# Microseconds per 1,024 columns, for all formats: the constants with which the estimates choose the best tilings.
_QUANTIZED_COSTS = {
    _Block(_FEW_ROWS, 1, 1, 3): 1.45,
    _Block(_FEW_ROWS, 1, 1, 2): 1.4,
    _Block(_FEW_ROWS, 1, 2, 1): 1.89,
    _Block(_FEW_ROWS, 3, 1, 1): 4.7,
    _Block(_SOME_ROWS, 1, 1, 3): 2.2,
    _Block(_SOME_ROWS, 1, 1, 2): 2.16,
    _Block(_SOME_ROWS, 1, 2, 1): 2.2,
    _Block(_SOME_ROWS, 2, 1, 1): 4.1,
    _Block(_SOME_ROWS, 2, 1, 2): 4.0,
    _Block(_SOME_ROWS, 3, 1, 1): 5.8,
    _Block(_LARGE_BLOCK, 1, 2, 1): 3.6,
    _Block(_LARGE_BLOCK, 2, 1, 1): 6.32,
    _Block(_LARGE_BLOCK, 3, 1, 1): 9.4,
}
_SKINNY_COSTS = {
    _Block(_FEW_ROWS, 1, 1, 3): 0.95,
    _Block(_FEW_ROWS, 1, 1, 2): 1.05,
}
_FP8_COSTS = {
    _Block(_FEW_ROWS, 1, 1, 3): 1.0,
    _Block(_FEW_ROWS, 1, 1, 2): 1.02,
    _Block(_FEW_ROWS, 1, 2, 1): 1.85,
    _Block(_FEW_ROWS, 3, 1, 1): 3.05,
    _Block(_SOME_ROWS, 1, 1, 3): 1.42,
    _Block(_SOME_ROWS, 1, 1, 2): 1.28,
    _Block(_SOME_ROWS, 1, 2, 1): 1.58,
    _Block(_SOME_ROWS, 2, 1, 1): 2.72,
    _Block(_SOME_ROWS, 3, 1, 1): 4.24,
    _Block(_LARGE_BLOCK, 1, 2, 1): 2.46,
    _Block(_LARGE_BLOCK, 3, 1, 1): 7.79,
}
# Costs for scales of blocks and more than _FEW_ROWS, fitted to an estimate that also counts the last wave.
_FP8_BLOCK_COSTS = _FP8_COSTS | {
    _Block(_SOME_ROWS, 1, 2, 1): 1.54,
    _Block(_SOME_ROWS, 3, 1, 1): 3.82,
    _Block(_LARGE_BLOCK, 3, 1, 1): 7.3,
}
_BEGIN = {1: 2.0, 2: 3.4, 4: 3.9}  # microseconds by split: to begin, to exchange sums and to end


class GemmTiling(NamedTuple):
    """Tile of a thread block, and the division of its work among warpgroups and stages: macros of the kernels."""

    max_rows: int  # most rows of x of a block
    warpgroups: int  # warpgroups that multiply
    split: int  # blocks that divide K
    block_k: int  # columns of a stage
    stages: int
    blocks: int  # blocks per multiprocessor
    # Producer threads, in addition to the warpgroups. With two warps, one loads weights at a limited rate (ring.cuh)
    # and the other x; four warps also give their registers to the consumers.
    producers: int = 32
    k_parts: int = 1  # warpgroups that divide the columns of a stage
    # True for skinny_int4_gemm.cu, whose warps have their own stages: a multiple of `warps`, or one per step.
    skinny: bool = False
    sm_shared_bytes: int = 0  # shared memory of a multiprocessor (signature.py); 0: all

    @property
    def threads(self) -> int:
        return self.warpgroups * 128 + self.producers

    @property
    def warps(self) -> int:
        """Warps that multiply."""
        return self.warpgroups * 4

    @property
    def block_n(self) -> int:
        """Rows of the weight of a block."""
        return self.warpgroups // self.k_parts * TILE

    @property
    def macros(self) -> dict[str, int]:
        """Macros of a kernel that is compiled for it (csrc/sums.cuh, ring.cuh)."""
        return {
            "M_MAX": self.max_rows,
            "WARPGROUPS": self.warpgroups,
            "SPLIT": self.split,
            "BLOCK_K": self.block_k,
            "STAGES": self.stages,
            "BLOCKS": self.blocks,
            "PRODUCERS": self.producers,
            "K_PARTS": self.k_parts,
        }

    def x_rows(self, rows: int) -> int:
        """Return the rows of x per block, which TMA loads as a box. x is divided evenly, so that no box has many rows
        after the end of x: TMA takes longer to fill such rows with zeros than to load real ones.
        """
        blocks = -(-rows // self.max_rows)
        return rows if blocks == 1 else -(-rows // (blocks * 8)) * 8

    def tiles(self, rows: int, width: int) -> int:
        """Number of tiles of y, each over all of K."""
        return -(-rows // self.max_rows) * -(-width // self.block_n)


_Staged: TypeAlias = Callable[[_Block, int, int], GemmTiling | None]
"""Tiling with a kind of block, of so many rows of x, with stages of so many columns; None: they do not suit."""


def ring_bytes(blocks: int, sm_shared_bytes: int = 0) -> int:
    """Return the shared memory for the ring of a block if this many blocks are resident on a multiprocessor."""
    return (_RING_BEFORE_ATTENTION if sm_shared_bytes else 216 << 10) // blocks // 1024 * 1024


def sums_bytes(tiling: GemmTiling) -> int:
    """Memory of a block's own sums, and of those that others send it (csrc/sums.cuh)."""
    own = tiling.block_n * (tiling.max_rows + 2) * 4
    parts = tiling.warps if tiling.skinny else tiling.k_parts - 1
    return own * max(parts, 1 if tiling.split == 1 else 2)


def quantized_stage_bytes(kind: Kind, group: int, tiling: GemmTiling) -> int:
    """Size of a stage of quantized_gemm.cu: columns of x, of the weight's rows, and their scales.

    A stage of skinny_int4_gemm.cu also has these columns of the norm's weight.
    """
    weight = TILE * tiling.block_k * BITS[kind] // 8
    scales = tiling.block_k // group * TILE * 4 if group else 0
    x_rows = tiling.max_rows + (1 if tiling.skinny else 0)
    size = x_rows * tiling.block_k * 2 + tiling.block_n // TILE * (weight + scales)
    return -(-size // 1024) * 1024


def fp8_stage_bytes(group: int, tiling: GemmTiling) -> int:
    """Size of a stage of fp8_gemm.cu: columns of x and of the weight's rows, and x's scales."""
    scales = tiling.block_k // group * tiling.max_rows * 4 if group else 0
    size = (tiling.max_rows + tiling.block_n) * tiling.block_k + scales
    return -(-size // 1024) * 1024


def skinny_rows(group: int) -> int:
    """Return the most rows of x that skinny_int4_gemm.cu multiplies faster: a group's sums are scaled for each row."""
    return 16 if group >= _SKINNY_COLUMNS else 8


@lru_cache(1 << 14)
def choose_quantized_tiling(
    kind: Kind,
    rows: int,
    width: int,
    size: int,
    group: int,
    num_sms: int,
    *,
    before_attention: bool = False,
) -> GemmTiling:
    """Tile x [rows, size] @ weight [width, size]^T for quantized_gemm.cu, or for skinny_int4_gemm.cu.

    `before_attention`: attention follows. If it begins early, it needs L1, so the ring is made smaller. This is not
    done for skinny_int4_gemm.cu, which would lose more than attention gains, nor if fewer than three stages would fit.
    """

    def staged(shared: int, block: _Block, max_rows: int, block_k: int) -> GemmTiling | None:
        part = block_k // block.k_parts
        whole = TILE if kind == "int4" or block.k_parts > 1 else 32
        if part % whole or (group and block_k % group) or (part > 128 and max_rows == _LARGE_BLOCK):
            return None
        tiling = _tiling(block, max_rows, block_k, shared, producers=_producers(block, rows))
        stages = ring_bytes(block.blocks, shared) // quantized_stage_bytes(kind, group, tiling)
        return tiling._replace(stages=stages) if stages >= _MIN_STAGES else None

    def skinny(block: _Block, max_rows: int, block_k: int) -> GemmTiling | None:
        if block_k != _SKINNY_COLUMNS:
            return None
        tiling = _tiling(block, max_rows, block_k, 0, producers=32)._replace(skinny=True)
        stages = min(ring_bytes(block.blocks) // quantized_stage_bytes(kind, group, tiling), _MAX_STAGES)
        return tiling._replace(stages=stages // tiling.warps * tiling.warps)

    weight_bytes = width * size * BITS[kind] // 8
    if kind == "int4" and rows <= skinny_rows(group) and size % _SKINNY_COLUMNS == 0:
        return _cheapest(_SKINNY_COSTS, (skinny,), rows, width, size, weight_bytes, num_sms)
    rings = (_sm_shared_bytes(rows), 0) if before_attention else (0,)
    stagings = [partial(staged, shared) for shared in rings]
    return _cheapest(_QUANTIZED_COSTS, stagings, rows, width, size, weight_bytes, num_sms)


@lru_cache(1 << 14)
def choose_fp8_tiling(
    rows: int, width: int, size: int, group: int, num_sms: int, *, before_attention: bool = False
) -> GemmTiling:
    """Tile x [rows, size] @ weight [width, size]^T for fp8_gemm.cu.

    `before_attention` as in `choose_quantized_tiling`.
    """
    shared = _sm_shared_bytes(rows) if before_attention else 0

    def staged(block: _Block, max_rows: int, block_k: int) -> GemmTiling | None:
        part = block_k // block.k_parts
        large, producers = max_rows == _LARGE_BLOCK, _producers(block, rows)
        crowded = max_rows == _SOME_ROWS and block.blocks == 3 and producers > 32
        if part % _LINE or (part > _LINE and (large or crowded)):  # there are not registers for the sums of two lines
            return None
        if group and part > _LINE and max_rows == _SOME_ROWS and block.row_groups == 3:  # only three stages would fit
            return None
        if large and block.row_groups == 3:
            producers = 128
        tiling = _tiling(block, max_rows, block_k, shared, producers=producers)
        stages = ring_bytes(block.blocks, shared) // fp8_stage_bytes(group, tiling)
        return tiling._replace(stages=stages) if stages >= (_MIN_STAGES if max_rows <= _FEW_ROWS else 2) else None

    counts_last = group > 0 and rows > _FEW_ROWS
    costs = _FP8_BLOCK_COSTS if counts_last else _FP8_COSTS
    return _cheapest(costs, (staged,), rows, width, size, width * size, num_sms, counts_last_wave=counts_last)


def _sm_shared_bytes(rows: int) -> int:
    """Return the SM's shared memory with which attention of this many rows is fastest; 0: it does not begin early."""
    if rows > MAX_EARLY_ROWS:
        return 0
    return SHARED_BEFORE_ATTENTION if rows <= _FEW_ROWS else _SHARED_BEFORE_ATTENTION_OF_SOME


def _producers(block: _Block, rows: int) -> int:
    """Return the threads that fill a ring: with many rows a second warp pays if an SM has only one block."""
    return 64 if rows <= _SOME_ROWS or block.blocks == 1 else 32


def _tiling(block: _Block, max_rows: int, block_k: int, shared: int, *, producers: int) -> GemmTiling:
    """Return a tiling without split-K whose stages are still to be counted."""
    warpgroups = block.row_groups * block.k_parts
    return GemmTiling(
        max_rows, warpgroups, 1, block_k, 0, block.blocks, producers, block.k_parts, sm_shared_bytes=shared
    )


def _candidates(
    costs: Mapping[_Block, float],
    staged: _Staged,
    rows: int,
    size: int,
) -> Iterator[tuple[_Block, GemmTiling]]:
    """Yield blocks for so many rows with the widest stages that fit, for each split of K."""
    few = rows <= _FEW_ROWS
    for block in costs:
        if few != (block.max_rows == _FEW_ROWS) or (block.max_rows == _LARGE_BLOCK and rows <= _SOME_ROWS):
            continue
        max_rows = next(each for each in (8, 16, block.max_rows) if rows <= each or each == block.max_rows)
        sizes = [staged(block, max_rows, each) for each in (256, 128, 64) if size % each == 0]
        tiling = next((each for each in sizes if each is not None), None)
        for split in (1, 2, 4):
            if tiling is not None and (split == 1 or size // tiling.block_k >= 2 * split):
                steps = -(-size // tiling.block_k // split)
                yield block, tiling._replace(split=split, stages=max(2, min(tiling.stages, steps, _MAX_STAGES)))


def _cheapest(
    costs: Mapping[_Block, float],
    stagings: Sequence[_Staged],
    rows: int,
    width: int,
    size: int,
    weight_bytes: int,
    num_sms: int,
    *,
    counts_last_wave: bool = False,
) -> GemmTiling:
    """Return the tiling with the least estimated time, staged in the first way that suits any block.

    `counts_last_wave`: True: the prologues of later waves count only in part, since other blocks of the same
    multiprocessor hide them, and a last wave that is not full counts as idle memory. False: prologues count in full,
    the last wave not at all.
    """

    def cost(candidate: tuple[_Block, GemmTiling]) -> float:
        """Estimate microseconds: the larger of the memory's time and the time of the busiest multiprocessor."""
        block, tiling = candidate
        count = tiling.tiles(rows, width) * tiling.split
        at_a_time = int(num_sms * block.blocks * (FILLED_BY_FOUR if tiling.split == 4 else 1))
        waves = -(-count // at_a_time)
        # In later waves a block begins when another one has ended: count the mean, and half of the SM's other blocks.
        load = max(-(-count // num_sms), block.blocks if waves == 1 else count / num_sms + (block.blocks - 1) / 2)
        alone = size / tiling.split / 1024 * costs[block]
        memory, later = weight_bytes / BANDWIDTH, float(waves - 1)
        if counts_last_wave and waves > 1:
            memory += _EMPTY * (waves - count / at_a_time) * alone * block.blocks
            later /= block.blocks
        return max(load * alone, memory) + _BEGIN[tiling.split] * (1 + later)

    found = (list(_candidates(costs, staged, rows, size)) for staged in stagings)
    return min(next(filter(None, found)), key=cost)[1]
