"""Weights in the layouts that CPUs read fastest: oneDNN's layout of bfloat16, and 4-bit weights for few rows."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from minisgl.kernel.base import Activation, Norm, Ops, Weight
from minisgl.kernel.torch_ops import activate_and_mul
from minisgl.quantization.rounding import INT4_GROUP, Int4Grid

_FEW_ROWS = 4  # above, the dense product is faster
_OUTPUTS = 16  # torch packs so many together


class _CpuWeight(ABC):
    """Weight whose layout has its own product; norms and activations are separate operations."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    @abstractmethod
    def linear(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Compute `Ops.linear` with this weight."""

    def norm_linear(
        self, x: Tensor, norm: Norm | None, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        y = self.linear(x if norm is None else self._ops.rms_norm(x, norm), bias)
        return y if out is None else out.copy_(y)

    def norm_gated_linear(
        self, x: Tensor, norm: Norm | None, bias: Tensor | None = None, *, activation: Activation
    ) -> Tensor:
        return activate_and_mul(self.norm_linear(x, norm, bias), activation)


class PackedWeight(_CpuWeight):
    """Implements kernel.base.Weight: bfloat16 in oneDNN's layout."""

    def __init__(self, ops: Ops, weight: Tensor) -> None:
        super().__init__(ops)
        self.tensor: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.label = "bfloat16 in oneDNN's layout"

    def linear(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        y: Tensor
        if residual is None:
            y = torch.ops.mkldnn._linear_pointwise(x, self.tensor, bias, "none", [], "")
        else:
            y = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.tensor, bias, "add")
        return y


class Int4Weight(_CpuWeight):
    """Implements kernel.base.Weight: 4-bit levels in torch's layout, and a dense weight of the same values.

    Values of the dense weight are rounded to its dtype; values of the 4-bit weight are not rounded.
    """

    def __init__(self, ops: Ops, weight: Tensor, grid: Int4Grid, dense: Weight) -> None:
        super().__init__(ops)
        self._dense = dense
        self.tensor = dense.tensor
        self._packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(grid.levels(weight), 1)
        self._scales_and_offsets = torch.stack((grid.scales.T, grid.offsets.T), -1).to(weight.dtype)

    @staticmethod
    def supports(weight: Tensor) -> bool:
        """Return True for a weight whose shape torch can pack."""
        return len(weight) % _OUTPUTS == 0

    @property
    def label(self) -> str:
        return f"int4 up to {_FEW_ROWS} rows (torch's kernel), above {self._dense.label}"

    def linear(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        if x.shape[0] > _FEW_ROWS:
            return self._dense.linear(x, bias, residual)
        y = torch._weight_int4pack_mm_for_cpu(x.contiguous(), self._packed, INT4_GROUP, self._scales_and_offsets)
        if bias is not None:
            y.add_(bias)
        return y if residual is None else y.add_(residual)
