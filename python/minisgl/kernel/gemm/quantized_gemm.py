"""GEMMs with packed quantized weights on Hopper, and dequantization for GEMMs of many rows.

csrc/quantized_gemm.cu is the general kernel. skinny_int4_gemm.cu is for few rows of x with int4 weights,
quantized_gemv.cu for one row with int4 or FP8 weights. dequantize.cu writes the dense weight for cuBLAS.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from minisgl.kernel.base import Activation, Norm
from minisgl.kernel.gemm.gemv_tiling import GemvTiling, choose_gemv_tiling
from minisgl.kernel.gemm.quantized_tiling import GemmTiling, choose_quantized_tiling, quantized_stage_bytes, sums_bytes
from minisgl.kernel.launch.compile import Compiler, tensor_map
from minisgl.kernel.launch.signature import SCALAR_NAMES, KernelSpec, Macros
from minisgl.quantization.gpu_layout import CHUNK, GROUPS, WEIGHT_NAMES, PackedLevels
from minisgl.quantization.levels import Kind, LevelFormat

MOST_ROWS = 384  # rows of x; with more, the weight is dequantized to x's dtype and cuBLAS multiplies
_MIN_BLOCK_K = 64  # columns of a stage
_MAX_DEQUANTIZED_WIDTH = 1 << 16  # most rows of a weight that is dequantized: a vocabulary's would take too much memory
_DEQUANTIZED_CHUNKS = 4  # chunks of a block, as in dequantize.cu
_ALL_SHARED = 228 << 10  # of a multiprocessor, so that blocks of attention fit beside those of quantized_gemv.cu


class _Kernel(NamedTuple):
    dtype: torch.dtype
    kind: Kind
    group: int
    gate: Activation | None
    gated: bool
    offsets: bool
    tiling: GemmTiling | GemvTiling | None = None
    norm: bool = False


class QuantizedGemm:
    """Compiles the kernel once for each kind of product that is asked for."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler

    def begin_compiling(self, weight: PackedLevels, dtype: torch.dtype) -> None:
        """Begin to compile the products with a weight; for a gated weight, its products with silu."""
        gate: Activation | None = "silu" if weight.gated else None
        tilings = {
            self.tiling(weight, rows, before_attention=before_attention)
            for rows in (1, 8, 16, 32, 64, 128, 256, MOST_ROWS)
            for before_attention in {False, not weight.gated}
        }
        specs = [
            _product_spec(_kernel_of(weight, dtype, gate, tiling, norm=norm))
            for tiling in tilings
            for norm in {False, _norms(dtype, dtype, tiling)}
        ]
        self._compiler.begin([_dequantize_spec(_kernel_of(weight, dtype)), *specs])

    def supports(self, form: LevelFormat, width: int, size: int, dtype: torch.dtype) -> bool:
        """Return True if the kernels read a weight [width, size] of this format in products of this dtype."""
        columns = max(CHUNK[form.kind], form.group, _MIN_BLOCK_K)
        return (
            self._compiler.arch == 90
            and dtype in (torch.bfloat16, torch.float16)
            and form.kind != "mxfp4"  # only kernels of experts read it
            and form.group in GROUPS[form.kind]
            and (form.kind == "int4" or not form.offsets)
            and size % columns == 0
            and width % 16 == 0
        )

    def supports_rows(self, x: Tensor, weight: PackedLevels) -> bool:
        """Return True if `product` is for x [M, K]: M is at most MOST_ROWS, or the weight a vocabulary's."""
        few = len(x) <= MOST_ROWS or weight.width > _MAX_DEQUANTIZED_WIDTH
        return len(x) > 0 and few and x.is_contiguous()

    def product(
        self,
        x: Tensor,
        weight: PackedLevels,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        norm: Norm | None = None,
        gate: Activation | None = None,
        before_attention: bool = False,
        out: Tensor | None = None,
        tiling: GemmTiling | GemvTiling | None = None,
    ) -> Tensor:
        """[M, N], or [M, N / 2] with the activation of a `gate`; see Ops.linear and norm_gated_linear.

        `norm`: RMSNorm of x, only where `norms` returns True. `tiling`: instead of the estimated best.
        """
        rows, width = len(x), weight.width
        if out is None:
            out = x.new_empty((rows, width if gate is None else width // 2))
        if tiling is None:
            tiling = self.tiling(weight, rows, before_attention=before_attention)
        kind = _kernel_of(weight, x.dtype, gate, tiling, norm=norm is not None)
        kernel = self._compiler.kernel(_product_spec, kind)
        common: dict[str, Any] = {
            "weight": weight.words,
            "scales": weight.group_scales,
            "bias": bias,
            "residual": residual,
            "out": out,
            "N": width,
            "K": weight.size,
        }
        of_norm: dict[str, Any] = {"norm": norm and norm.weight, "eps": norm.eps if norm else 0.0}
        of_rows: dict[str, Any] = {"row_scales": weight.row_scales}
        if isinstance(tiling, GemvTiling):
            kernel((1, tiling.clusters), tiling.threads, cluster=tiling.split, x=x, **of_norm, **of_rows, **common)
            return out
        x_rows = tiling.x_rows(rows)
        kernel(
            (1, -(-rows // tiling.max_rows), -(-width // tiling.block_n)),
            tiling.threads,
            cluster=tiling.split,
            x_map=tensor_map(x, x_rows, 64),
            M=rows,
            x_rows=x_rows,
            **(of_norm if tiling.skinny else of_rows),  # skinny_int4_gemm.cu norms x; int4 has no scales of rows
            **common,
        )
        return out

    def norms(self, x: Tensor, weight: PackedLevels, norm: Norm) -> bool:
        """Return True if the product applies the RMSNorm of x itself."""
        return _norms(x.dtype, norm.weight.dtype, self.tiling(weight, len(x)))

    def tiling(self, weight: PackedLevels, rows: int, *, before_attention: bool = False) -> GemmTiling | GemvTiling:
        """Return the tiling of a product of `rows` rows; see `choose_gemv_tiling` and `choose_quantized_tiling`."""
        if rows == 1:
            gemv = choose_gemv_tiling(weight.kind, weight.width, weight.size, weight.group, self._compiler.num_sms)
            if gemv is not None:
                return gemv
        return choose_quantized_tiling(
            weight.kind,
            rows,
            weight.width,
            weight.size,
            weight.group,
            self._compiler.num_sms,
            before_attention=before_attention,
        )

    def dequantize(self, weight: PackedLevels, dtype: torch.dtype) -> Tensor:
        """Return the matrix [out, in] in `dtype`."""
        out = torch.empty((weight.width, weight.size), dtype=dtype, device=weight.words.device)
        tiles, chunks, _ = weight.words.shape
        kernel = self._compiler.kernel(_dequantize_spec, _kernel_of(weight, dtype))
        kernel(
            (-(-chunks // _DEQUANTIZED_CHUNKS), tiles),
            128,
            weight=weight.words,
            scales=weight.group_scales,
            row_scales=weight.row_scales,
            out=out,
            N=weight.width,
            K=weight.size,
            early=False,
        )
        return out


def _norms(dtype: torch.dtype, norm_dtype: torch.dtype, tiling: GemmTiling | GemvTiling) -> bool:
    """Return True if a kernel applies the RMSNorm of x itself; see `_norms_late` of cuda_ops.py for float16."""
    late = isinstance(tiling, GemvTiling) or tiling.skinny
    return late and dtype == norm_dtype == torch.bfloat16


def _kernel_of(
    weight: PackedLevels,
    dtype: torch.dtype,
    gate: Activation | None = None,
    tiling: GemmTiling | GemvTiling | None = None,
    *,
    norm: bool = False,
) -> _Kernel:
    return _Kernel(dtype, weight.kind, weight.group, gate, weight.gated, weight.offsets, tiling, norm)


def _macros(kind: _Kernel) -> dict[str, str | int]:
    return {
        "SCALAR": SCALAR_NAMES[kind.dtype],
        "WEIGHT": WEIGHT_NAMES[kind.kind],
        "GROUP": kind.group,
        "GATED": int(kind.gated),
        "OFFSETS": int(kind.offsets),
        "GELU_TANH": int(kind.gate == "gelu_tanh"),
    }


def _dequantize_spec(kind: _Kernel) -> KernelSpec:
    return KernelSpec("dequantize.cu", "dequantize", _macros(kind))


def _product_spec(kind: _Kernel) -> KernelSpec:
    tiling = kind.tiling
    assert tiling is not None
    macros: Macros = {**_macros(kind), **tiling.macros, "NORM": int(kind.norm)}
    if isinstance(tiling, GemvTiling):
        return KernelSpec("quantized_gemv.cu", "quantized_gemv", macros, tiling.shared_bytes, _ALL_SHARED)
    ring = tiling.stages * quantized_stage_bytes(kind.kind, kind.group, tiling)
    shared_bytes = max(ring, sums_bytes(tiling))
    name = "skinny_int4_gemm" if tiling.skinny else "quantized_gemm"
    return KernelSpec(f"{name}.cu", name, macros, shared_bytes, tiling.sm_shared_bytes)
