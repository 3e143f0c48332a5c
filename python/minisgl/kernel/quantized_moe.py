"""Grouped products of quantized experts (csrc/quantized_moe.cu, Hopper): their tilings and launches."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from minisgl.kernel.signature import KernelSpec, Macros
from minisgl.quantization.expert_layout import PackedExperts
from minisgl.quantization.gpu_layout import BITS, TILE
from minisgl.quantization.levels import Kind, LevelFormat

ExpertProduct = Literal["gated", "weighted"]
"""The first product of a layer, with the activation, or the second, with the weights of a token's experts."""

_WEIGHTS: dict[Kind, str] = {"fp8": "E4M3", "int8": "INT8", "int4": "INT4", "mxfp4": "E2M1"}
_GROUPS: dict[Kind, tuple[int, ...]] = {"fp8": (0, 128), "int8": (0,), "int4": (32, 64, 128), "mxfp4": (32,)}


class QuantizedTiling(NamedTuple):
    """The macros of quantized_moe.cu that divide the work."""

    max_pairs: int  # of a block
    warpgroups: int  # of 64 rows of the weight each
    block_k: int  # columns of a stage
    stages: int
    blocks: int  # on a multiprocessor
    route: bool = False

    @property
    def block_n(self) -> int:
        return TILE * self.warpgroups

    @property
    def block_m(self) -> int:
        return self.max_pairs

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups

    def shared_bytes(self, form: LevelFormat) -> int:
        """Return the memory of the ring."""
        weight = TILE * self.block_k * BITS[form.kind] // 8
        if form.kind == "mxfp4":
            weight += TILE * self.block_k // form.group
        elif form.group:
            weight += TILE * self.block_k // form.group * 4
        stage = self.max_pairs * self.block_k * 2 + self.warpgroups * weight
        return self.stages * (-(-stage // 1024) * 1024)


# So few pairs seldom share an expert: each is a tile.
_FEW_PAIRS = 8
# By the mean number of tokens that an expert gets, the first that is not exceeded, or else one for many.
_TILINGS_8_BITS = (
    (4.5, QuantizedTiling(8, 1, 256, 2, 4)),
    (12.0, QuantizedTiling(16, 1, 128, 3, 5)),
    (24.0, QuantizedTiling(32, 1, 128, 3, 4)),
)
_TILINGS_4_BITS = (
    (4.5, QuantizedTiling(8, 1, 128, 4, 6)),
    (12.0, QuantizedTiling(16, 1, 320, 2, 4)),
    (24.0, QuantizedTiling(32, 1, 128, 5, 4)),
    (64.0, QuantizedTiling(64, 2, 128, 4, 1)),
)
_MANY = QuantizedTiling(64, 2, 128, 3, 2)
_MANY_OF_MXFP4 = QuantizedTiling(128, 2, 64, 4, 2)  # without sums of groups, registers suffice for more rows


def tilings(form: LevelFormat) -> list[QuantizedTiling]:
    """Return the tilings of any number of pairs, those of few first."""
    by_mean = [tiling for _, tiling in (_TILINGS_8_BITS if BITS[form.kind] == 8 else _TILINGS_4_BITS)]
    return [_few(form), *by_mean, _many(form)]


def choose_tiling(form: LevelFormat, pairs: int, experts: int) -> QuantizedTiling:
    """Return the tiling for so many (token, expert) pairs."""
    if pairs <= _FEW_PAIRS:
        return _few(form)
    by_mean = _TILINGS_8_BITS if BITS[form.kind] == 8 else _TILINGS_4_BITS
    return next((tiling for most, tiling in by_mean if pairs / experts <= most), _many(form))


def _few(form: LevelFormat) -> QuantizedTiling:
    by_mean = _TILINGS_8_BITS if BITS[form.kind] == 8 else _TILINGS_4_BITS
    return by_mean[0][1]._replace(route=True)


def _many(form: LevelFormat) -> QuantizedTiling:
    return _MANY_OF_MXFP4 if form.kind == "mxfp4" else _MANY


def supports(form: LevelFormat, width: int, size: int, dtype: torch.dtype) -> bool:
    """Return True if the kernels read matrices [width, size] of this format in products of this dtype."""
    dtypes = (torch.bfloat16,) if form.kind == "mxfp4" else (torch.bfloat16, torch.float16)
    columns = form.group or 32
    return dtype in dtypes and form.group in _GROUPS[form.kind] and size % columns == 0 and width % 16 == 0


def product_spec(kernel: ExpertProduct, form: LevelFormat, tiling: QuantizedTiling, mixture: Macros) -> KernelSpec:
    """Describe a product of experts of this format; `mixture`: the macros that do not depend on it."""
    macros: Macros = {
        **mixture,
        "WEIGHT": _WEIGHTS[form.kind],
        "GROUP": 0 if form.kind == "mxfp4" else form.group,
        "M_MAX": tiling.max_pairs,
        "WARPGROUPS": tiling.warpgroups,
        "BLOCK_K": tiling.block_k,
        "STAGES": tiling.stages,
        "BLOCKS": tiling.blocks,
    }
    return KernelSpec("quantized_moe.cu", f"quantized_moe_{kernel}", macros, shared_bytes=tiling.shared_bytes(form))


def weight_arguments(weight: PackedExperts) -> dict[str, Any]:
    """Return the kernels' arguments that are the weight."""
    scales = weight.scales.view(torch.int32)
    return {"weight": weight.words, "scales": scales, "row_scales": weight.row_scales, "chunks": weight.words.shape[2]}
