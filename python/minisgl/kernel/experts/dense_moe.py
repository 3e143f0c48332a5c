"""Grouped products of 16-bit experts (csrc/moe_gemm.cu): their tilings and launches."""

from __future__ import annotations

from typing import Literal, NamedTuple

from minisgl.kernel.launch.signature import KernelSpec, Macros

ExpertProduct = Literal["gated", "weighted"]
"""The first product of a layer, with the activation, or the second, with the weights of a token's experts."""

# Up to this many (token, expert) pairs, each pair is a tile, because they seldom share an expert, and small blocks
# fill the GPU.
FEW_PAIRS = 8
_BLOCK_K = 64  # the value of moe_gemm.cu


class DenseMoeTiling(NamedTuple):
    """Macros of moe_gemm.cu that divide the work."""

    pairs: int  # pairs of tiles of 16 rows of the weight per warp
    warps_n: int  # warps that divide the rows of the weight
    warps_m: int  # warps that divide the (token, expert) pairs
    tiles: int  # tiles of eight (token, expert) pairs, of a warp
    stages: int
    warpgroup: bool = False  # multiply by wgmma, else by mma
    route: bool = False  # each (token, expert) pair is a tile

    @property
    def block_n(self) -> int:
        return 32 * self.pairs * self.warps_n

    @property
    def block_m(self) -> int:
        return 8 * self.tiles * self.warps_m

    @property
    def threads(self) -> int:
        return 32 * self.warps_n * self.warps_m

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.block_n + self.block_m) * _BLOCK_K * 2


_FEW = DenseMoeTiling(pairs=1, warps_n=2, warps_m=1, tiles=2, stages=6, route=True)
# Tilings by the mean number of tokens per expert: the first one whose limit is not exceeded is used, else the one for
# many tokens. Narrow tiles waste less work on padding; wide tiles read the weights less often.
_BY_MEAN = (
    (12.0, DenseMoeTiling(pairs=1, warps_n=4, warps_m=1, tiles=2, stages=4)),
    (24.0, DenseMoeTiling(pairs=1, warps_n=4, warps_m=1, tiles=4, stages=4)),
    (64.0, DenseMoeTiling(pairs=1, warps_n=4, warps_m=1, tiles=8, stages=3)),
)
_MANY = DenseMoeTiling(pairs=2, warps_n=2, warps_m=2, tiles=8, stages=3)
_MANY_ON_HOPPER = DenseMoeTiling(pairs=1, warps_n=8, warps_m=1, tiles=16, stages=4, warpgroup=True)


def _many(arch: int) -> DenseMoeTiling:
    return _MANY_ON_HOPPER if arch == 90 else _MANY


def tilings(arch: int) -> list[DenseMoeTiling]:
    """Return all tilings of a GPU of this compute capability, the one for few pairs first."""
    return [_FEW, *(tiling for _, tiling in _BY_MEAN), _many(arch)]


def choose_tiling(arch: int, pairs: int, experts: int) -> DenseMoeTiling:
    """Return the tiling of both products for this number of (token, expert) pairs."""
    if pairs <= FEW_PAIRS:
        return _FEW
    return next((tiling for most, tiling in _BY_MEAN if pairs / experts <= most), _many(arch))


def product_spec(kernel: ExpertProduct, tiling: DenseMoeTiling, mixture: Macros) -> KernelSpec:
    """Describe a product of experts; `mixture`: macros that do not depend on the tiling."""
    macros: Macros = {
        **mixture,
        "PAIRS": tiling.pairs,
        "WARPS_N": tiling.warps_n,
        "WARPS_M": tiling.warps_m,
        "TILES": tiling.tiles,
        "STAGES": tiling.stages,
        "WARPGROUP": int(tiling.warpgroup),
    }
    return KernelSpec("moe_gemm.cu", f"moe_{kernel}", macros, shared_bytes=tiling.shared_bytes)
