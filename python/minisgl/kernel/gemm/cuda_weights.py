"""Quantized weights on a GPU, kept in their format and multiplied in the model's dtype (W8A16, W4A16) or FP8 (W8A8)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minisgl.kernel.base import Activation, Norm, Ops
from minisgl.kernel.gemm import quantized_gemm
from minisgl.kernel.gemm.fp8_gemm import Fp8Gemm, Fp8Matrix
from minisgl.kernel.gemm.fp8_rows import MOST_ROWS, Fp8Rows
from minisgl.kernel.gemm.quantized_gemm import QuantizedGemm
from minisgl.quantization.gpu_layout import PackedLevels

Activate = Callable[[Tensor, Activation], Tensor]
"""activation(first half) * second half of each row."""


class QuantizedWeight:
    """Implements kernel.base.Weight.

    For few rows the kernels decode the weight in registers (csrc/quantized_gemm.cu); a gated weight is packed for
    `norm_gated_linear` only. For many rows the weight is dequantized to temporary memory, cuBLAS multiplies it, and the
    memory is freed after the product.
    """

    def __init__(
        self, ops: Ops, gemm: QuantizedGemm, packed: PackedLevels, dtype: torch.dtype, order: Tensor | None
    ) -> None:
        """`order`: int64 [in], the matrix's column of each packed column, if their order differs (`desc_act`)."""
        self._ops, self._gemm, self._packed, self._dtype, self._order = ops, gemm, packed, dtype, order
        group = f" with groups of {packed.group}" if packed.group else ""
        ordered = " in their order" if order is not None else ""
        values = str(dtype).removeprefix("torch.")
        self.label = (
            f"{packed.kind}{group}{ordered} up to {quantized_gemm.MOST_ROWS} rows (csrc/quantized_gemm.cu), "
            f"above in {values} (cuBLAS)"
        )

    @property
    def tensor(self) -> Tensor:
        """Dequantize the matrix [out, in] to the model's dtype, with its columns in packed order, at every call."""
        return self._gemm.dequantize(self._packed, self._dtype)

    def linear(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        x = self._ordered(x)
        if not self._packed.gated and self._gemm.supports_rows(x, self._packed):
            return self._gemm.product(x, self._packed, bias, residual)
        return self._ops.linear(x, self.tensor, bias, residual)

    def norm_linear(
        self, x: Tensor, norm: Norm | None, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        x, late = self._normed(x, norm, gated=False)
        if not self._packed.gated and self._gemm.supports_rows(x, self._packed):
            return self._gemm.product(x, self._packed, bias, norm=late, before_attention=True, out=out)
        return self._ops.norm_linear(x, None, self.tensor, bias, out)

    def norm_gated_linear(
        self, x: Tensor, norm: Norm | None, bias: Tensor | None = None, *, activation: Activation
    ) -> Tensor:
        x, late = self._normed(x, norm, gated=True)
        if self._packed.gated and self._gemm.supports_rows(x, self._packed):
            return self._gemm.product(x, self._packed, bias, norm=late, gate=activation)
        return self._ops.norm_gated_linear(x, None, self.tensor, bias, activation=activation)

    def _normed(self, x: Tensor, norm: Norm | None, *, gated: bool) -> tuple[Tensor, Norm | None]:
        """Return x normed and None; or x as it is and the norm, if the product applies it."""
        if norm is None:
            return self._ordered(x), None
        in_kernel = self._order is None and self._packed.gated == gated and self._gemm.supports_rows(x, self._packed)
        if in_kernel and self._gemm.norms(x, self._packed, norm):
            return x, norm
        return self._ordered(self._ops.rms_norm(x, norm)), None

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self._order is None else x.index_select(1, self._order)


class Fp8Weight:
    """Implements kernel.base.Weight for formats whose products round x to FP8 (W8A8), for any number of rows."""

    def __init__(self, gemm: Fp8Gemm, matrix: Fp8Matrix, dtype: torch.dtype, activate: Activate) -> None:
        self._gemm, self._matrix, self._dtype, self._activate = gemm, matrix, dtype, activate
        scales = f"blocks of {matrix.group}" if matrix.group else "rows, static" if matrix.x_scale else "rows"
        self.label = (
            f"fp8 with fp8 activations, scales of {scales}, up to {MOST_ROWS[matrix.group]} rows "
            f"(csrc/fp8_gemm.cu), above by {gemm.library(matrix)}"
        )

    @property
    def tensor(self) -> Tensor:
        """The stored numbers, float8_e4m3fn [out, in], without their scales."""
        return self._matrix.codes

    def linear(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        return self._gemm.linear(x, None, self._matrix, bias, residual)

    def norm_linear(
        self, x: Tensor, norm: Norm | None, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        return self._gemm.linear(x, norm, self._matrix, bias, before_attention=True, out=out)

    def norm_gated_linear(
        self, x: Tensor, norm: Norm | None, bias: Tensor | None = None, *, activation: Activation
    ) -> Tensor:
        if self._gemm.applies_gate(len(x), self._matrix):
            return self._gemm.linear(x, norm, self._matrix, bias, gate=activation)
        return self._activate(self._gemm.linear(x, norm, self._matrix, bias), activation)


class Fp8BlockWeight(Fp8Weight):
    """Implements also kernel.gemm.fp8_rows.Fp8Products: the weight has block scales, x has group scales."""

    def linear_of_rounded(self, x: Fp8Rows, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        return self._gemm.product(x, self._matrix, bias, residual, self._dtype)
