"""Products of few rows on csrc/linear.cu: a decode of a small batch is bound by reading every weight once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minisgl.kernel.base import Norm
from minisgl.kernel.compile import SCALAR_NAMES, Compiler, Kernel

MAX_ROWS = 16  # of x
_ROWS_OF_BLOCK = 16  # of the weight, as in linear.cu
_NARROW = 2048  # rows of a weight up to which more warps share a row, because there are few blocks


class FewRows:
    """Compiles the kernel once for each kind of product that is asked for."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._kernels: dict[tuple[torch.dtype, int, int, bool, bool], Kernel] = {}

    def takes(self, x: Tensor, weight: Tensor) -> bool:
        """Whether x [M, K] @ weight [N, K]^T is one that the kernel is for."""
        rows, size = x.shape
        return (
            0 < rows <= MAX_ROWS
            and x.dtype in (torch.bfloat16, torch.float16)
            and size % 32 == 0
            and len(weight) % 8 == 0
            and x.is_contiguous()
            and weight.is_contiguous()
        )

    def product(
        self,
        x: Tensor,
        norm: Norm | None,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        gated: bool = False,
    ) -> Tensor:
        """[M, N], or [M, N / 2] if `gated`; see Ops.linear, norm_linear and norm_gated_linear."""
        (rows, size), width = x.shape, len(weight)
        out = x.new_empty((rows, width // 2 if gated else width))
        warps = 8 if width <= _NARROW else 4
        kernel = self._kernel(x.dtype, 8 if rows <= 8 else 16, warps, norm is not None, gated)
        kernel(
            (-(-width // _ROWS_OF_BLOCK),),
            warps * 32,
            x.data_ptr(),
            0 if norm is None else norm.weight.data_ptr(),
            np.float32(0.0 if norm is None else norm.eps),
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            out.data_ptr(),
            np.int32(rows),
            np.int32(width),
            np.int32(size),
        )
        return out

    def _kernel(self, dtype: torch.dtype, max_rows: int, warps: int, norm: bool, gated: bool) -> Kernel:
        key = dtype, max_rows, warps, norm, gated
        if key not in self._kernels:
            (self._kernels[key],) = self._compiler.compile(
                "linear.cu",
                ("few_rows_linear",),
                begins_early=True,
                SCALAR=SCALAR_NAMES[dtype],
                M_MAX=max_rows,
                WARPS=warps,
                NORM=int(norm),
                GATED=int(gated),
            )
        return self._kernels[key]
