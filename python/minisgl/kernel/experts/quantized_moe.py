"""Grouped products of quantized experts (csrc/quantized_moe.cu, Hopper): their tilings and launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from minisgl.kernel.experts.dense_moe import FEW_PAIRS, ExpertProduct
from minisgl.kernel.launch.signature import KernelSpec, Macros
from minisgl.quantization.expert_layout import PackedExperts
from minisgl.quantization.gpu_layout import BITS, GROUPS, TILE, WEIGHT_NAMES
from minisgl.quantization.levels import Kind, LevelFormat


class QuantizedMoeTiling(NamedTuple):
    """Macros of quantized_moe.cu that divide the work."""

    max_pairs: int  # (token, expert) pairs of a block
    warpgroups: int  # each has `height` times 64 rows of the weight
    block_k: int  # columns of a stage
    stages: int
    blocks: int  # on a multiprocessor
    height: int = 1
    wgmma: bool = False  # multiply by wgmma, else by mma
    route: bool = False  # each pair is a tile, and the second product adds up a token's experts

    @property
    def block_n(self) -> int:
        return TILE * self.warpgroups * self.height

    @property
    def block_m(self) -> int:
        return self.max_pairs

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups

    def shared_bytes(self, form: LevelFormat) -> int:
        """Return the dynamic shared memory of a block: the ring."""
        weight = TILE * self.block_k * BITS[form.kind] // 8
        if form.kind == "mxfp4":
            weight += TILE * self.block_k // form.group
        elif form.group:
            weight += TILE * self.block_k // form.group * 4
        rows = 1 if self.route else self.max_pairs  # rows of x
        stage = rows * self.block_k * 2 + self.warpgroups * self.height * weight
        return self.stages * (-(-stage // 1024) * 1024)


class ProductTilings(NamedTuple):
    """Tilings of a layer's two products, for one number of pairs."""

    gated: QuantizedMoeTiling
    weighted: QuantizedMoeTiling


class _Tilings(NamedTuple):
    """Tilings by the number of pairs: the fastest of those measured on an H200 (docs/log.md)."""

    few: ProductTilings  # up to FEW_PAIRS: each pair is a tile
    by_mean: tuple[tuple[float, QuantizedMoeTiling], ...]  # up to a mean number of tokens of an expert
    many: QuantizedMoeTiling


_8_BITS_FEW = QuantizedMoeTiling(8, 1, 256, 3, 4, route=True)
_8_BITS = _Tilings(
    ProductTilings(_8_BITS_FEW, _8_BITS_FEW),
    (
        (4.5, QuantizedMoeTiling(8, 1, 256, 2, 5)),
        (12.0, QuantizedMoeTiling(16, 1, 128, 3, 5)),
        (24.0, QuantizedMoeTiling(32, 1, 128, 2, 5)),
    ),
    QuantizedMoeTiling(64, 2, 128, 3, 2, wgmma=True),
)
_FP8_OF_128 = _8_BITS._replace(
    by_mean=(
        (4.5, QuantizedMoeTiling(8, 1, 256, 2, 5)),
        (12.0, QuantizedMoeTiling(16, 1, 128, 3, 3, height=2)),
        (24.0, QuantizedMoeTiling(32, 1, 128, 2, 3, height=2)),
    )
)
_INT4_FEW = QuantizedMoeTiling(8, 1, 256, 3, 5, route=True)
_INT4 = _Tilings(
    ProductTilings(_INT4_FEW, _INT4_FEW),
    (
        (4.5, QuantizedMoeTiling(8, 1, 256, 3, 5)),
        (12.0, QuantizedMoeTiling(16, 1, 128, 3, 6)),
        (24.0, QuantizedMoeTiling(32, 1, 128, 3, 5)),
    ),
    QuantizedMoeTiling(64, 2, 128, 3, 2, wgmma=True),
)
_INT4_OF_128 = _INT4._replace(
    by_mean=(
        (4.5, QuantizedMoeTiling(8, 1, 256, 2, 5, height=2)),
        (12.0, QuantizedMoeTiling(16, 1, 256, 2, 4, height=2)),
        (24.0, QuantizedMoeTiling(32, 1, 128, 2, 4, height=2)),
    )
)
# Stages of 192, 320 and 576 columns divide 2,880, the hidden size of gpt-oss. MXFP4 needs no sums per group, so
# registers suffice for more pairs. With one token, each of the 180 blocks of the second product loads its whole weight
# at once: with a shorter ring it would wait for memory nine times.
_MXFP4 = _Tilings(
    ProductTilings(QuantizedMoeTiling(8, 1, 320, 2, 6, route=True), QuantizedMoeTiling(8, 1, 576, 3, 2, route=True)),
    (
        (4.5, QuantizedMoeTiling(8, 1, 320, 2, 6)),
        (12.0, QuantizedMoeTiling(16, 1, 192, 2, 4, height=3)),
        (20.0, QuantizedMoeTiling(32, 1, 192, 2, 4, height=2, wgmma=True)),
        (64.0, QuantizedMoeTiling(64, 1, 192, 2, 3, height=2, wgmma=True)),
    ),
    QuantizedMoeTiling(128, 2, 128, 2, 2, wgmma=True),
)
_TILINGS: dict[Kind, _Tilings] = {"fp8": _8_BITS, "int8": _8_BITS, "int4": _INT4, "mxfp4": _MXFP4}
_OF_128: dict[Kind, _Tilings] = {"fp8": _FP8_OF_128, "int4": _INT4_OF_128}  # formats with groups of 128 columns


def _tilings_of(form: LevelFormat) -> _Tilings:
    return _OF_128[form.kind] if form.group == 128 else _TILINGS[form.kind]


def tilings(form: LevelFormat) -> list[QuantizedMoeTiling]:
    """Return all tilings of a format, those for few pairs first."""
    few, by_mean, many = _tilings_of(form)
    return list(dict.fromkeys([*few, *(tiling for _, tiling in by_mean), many]))


def choose_tilings(form: LevelFormat, pairs: int, experts: int) -> ProductTilings:
    """Return the tilings for this number of (token, expert) pairs."""
    few, by_mean, many = _tilings_of(form)
    if pairs <= FEW_PAIRS:
        return few
    tiling = next((tiling for most, tiling in by_mean if pairs / experts <= most), many)
    return ProductTilings(tiling, tiling)


def supports(form: LevelFormat, width: int, size: int, dtype: torch.dtype) -> bool:
    """Return True if the kernels read matrices [width, size] of this format in products of this dtype."""
    dtypes = (torch.bfloat16,) if form.kind == "mxfp4" else (torch.bfloat16, torch.float16)
    columns = form.group or 32
    if form.offsets or form.order is not None:
        return False
    return dtype in dtypes and form.group in GROUPS[form.kind] and size % columns == 0 and width % 16 == 0


def product_spec(kernel: ExpertProduct, form: LevelFormat, tiling: QuantizedMoeTiling, mixture: Macros) -> KernelSpec:
    """Describe a product of experts of this format; `mixture`: macros that depend neither on it nor on the tiling."""
    macros: Macros = {
        **mixture,
        "WEIGHT": WEIGHT_NAMES[form.kind],
        "GROUP": 0 if form.kind == "mxfp4" else form.group,
        "M_MAX": tiling.max_pairs,
        "WARPGROUPS": tiling.warpgroups,
        "HEIGHT": tiling.height,
        "WGMMA": int(tiling.wgmma),
        "BLOCK_K": tiling.block_k,
        "STAGES": tiling.stages,
        "BLOCKS": tiling.blocks,
    }
    return KernelSpec("quantized_moe.cu", f"quantized_moe_{kernel}", macros, shared_bytes=tiling.shared_bytes(form))


def weight_arguments(weight: PackedExperts) -> dict[str, Any]:
    """Return the kernels' arguments for a packed weight."""
    scales = weight.scales.view(torch.int32)
    return {"weight": weight.words, "scales": scales, "row_scales": weight.row_scales, "chunks": weight.words.shape[2]}
