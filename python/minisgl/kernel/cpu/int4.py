"""4-bit weights in the layout of csrc/int4_cpu.cpp, whose products of few rows include norm, gate and residual."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minisgl.kernel.base import Activation, Norm, Ops, Weight
from minisgl.kernel.cpu.compile import CompilationError, load_library
from minisgl.kernel.torch_ops import activate_and_mul
from minisgl.quantization.rounding import INT4_GROUP, Int4Grid

_FEW_ROWS = 4  # value that the kernel is compiled with
_OUTPUTS = 16  # outputs per tile
_FLAGS = "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mfma"

Int4Linear = Callable[..., None]  # int4_linear of csrc/int4_cpu.cpp


def load_int4_linear() -> Int4Linear:
    """Return the kernel, compiled at its first use on this machine. Raises CompilationError if that fails."""
    if not torch.cpu.get_capabilities().get("avx512_bf16"):
        raise CompilationError("this CPU has no AVX512-BF16")
    kernel = load_library("int4_cpu.cpp", *_FLAGS).int4_linear
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    weight: list[Any] = [pointer] * 3 + [integer] * 2
    kernel.argtypes = [*weight, pointer, integer, pointer, ctypes.c_float, pointer, pointer, pointer, integer]
    kernel.restype = None
    return kernel


class TiledInt4Weight:
    """Implements kernel.base.Weight: 4-bit levels in tiles, and a dense weight of the same values, for bfloat16.

    Values of the dense weight are rounded to its dtype; values of the 4-bit weight are not rounded.
    """

    def __init__(self, ops: Ops, kernel: Int4Linear, weight: Tensor, grid: Int4Grid, dense: Weight) -> None:
        """`weight` is a multiple of 16 outputs."""
        self._ops, self._kernel, self._dense = ops, kernel, dense
        self.tensor = dense.tensor
        self._codes = tile_codes(grid.levels(weight))
        self._scales, self._offsets = tile_groups(grid.scales), tile_groups(grid.offsets)
        self._outputs, self._width = weight.shape
        pointers = (tensor.data_ptr() for tensor in (self._codes, self._scales, self._offsets))
        self._arguments = *pointers, self._outputs, self._width

    @property
    def label(self) -> str:
        return f"int4 up to {_FEW_ROWS} rows (csrc/int4_cpu.cpp), above {self._dense.label}"

    def linear(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        if not 0 < x.shape[0] <= _FEW_ROWS:
            return self._dense.linear(x, bias, residual)
        return self._multiply(x, None, bias, residual)

    def norm_linear(
        self, x: Tensor, norm: Norm | None, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        if not 0 < x.shape[0] <= _FEW_ROWS:
            return self._dense.norm_linear(x, norm, bias, out)
        y = self._multiply(x, norm, bias, None)
        return y if out is None else out.copy_(y)

    def norm_gated_linear(
        self, x: Tensor, norm: Norm | None, bias: Tensor | None = None, *, activation: Activation
    ) -> Tensor:
        if not 0 < x.shape[0] <= _FEW_ROWS:
            return self._dense.norm_gated_linear(x, norm, bias, activation=activation)
        if activation != "silu" or self._outputs % (2 * _OUTPUTS):
            return activate_and_mul(self._multiply(x, norm, bias, None), activation)
        return self._multiply(x, norm, bias, None, gated=True)

    def _multiply(
        self, x: Tensor, norm: Norm | None, bias: Tensor | None, residual: Tensor | None, *, gated: bool = False
    ) -> Tensor:
        if norm is not None and norm.weight.dtype != torch.bfloat16:
            x, norm = self._ops.rms_norm(x, norm), None
        x, rows = x.contiguous(), x.shape[0]
        y = x.new_empty((rows, self._outputs // 2 if gated else self._outputs))
        weight, eps = (None, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)
        bias_at = None if bias is None else bias.data_ptr()
        residual_at = None if residual is None else residual.data_ptr()
        self._kernel(*self._arguments, x.data_ptr(), rows, weight, eps, bias_at, residual_at, y.data_ptr(), gated)
        return y


def tile_codes(codes: Tensor) -> Tensor:
    """Pack codes [out, in] of 0 to 15 as csrc/int4_cpu.cpp reads them: uint8 [tiles, groups, 4, 64].

    The four nibbles of a word, the lowest first, are pairs of columns that follow one another.
    """
    out, width = codes.shape
    words = codes.to(torch.uint8).view(out // _OUTPUTS, _OUTPUTS, width // INT4_GROUP, 4, 2, 2, 2)
    low_first = words.permute(0, 2, 3, 1, 6, 4, 5)  # tile, group, vector, output, column of a pair, byte, nibble
    return (low_first[..., 0] | low_first[..., 1] << 4).reshape(out // _OUTPUTS, width // INT4_GROUP, 4, 64)


def tile_groups(table: Tensor) -> Tensor:
    """[out, groups] -> [tiles, groups, 16]."""
    return table.view(-1, _OUTPUTS, table.shape[1]).transpose(1, 2).contiguous()
