"""RMSNorm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.kernel.base import Norm
from minisgl.layers.weight_slice import WeightSlice, whole


class RMSNorm(nn.Module):
    """Root mean square layer normalization (Zhang and Sennrich, 2019).

    `unit_offset`: the checkpoint holds w - 1 (Gemma); w is kept in float32, since 16 bits would round away most of a
    small w - 1. `checkpoint_name`: name in the checkpoint, beside this module, where it is not the module's.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        dtype: torch.dtype,
        unit_offset: bool = False,
        checkpoint_name: str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.unit_offset = unit_offset
        self.checkpoint_name = checkpoint_name
        weight = torch.ones(size, dtype=torch.float32 if unit_offset else dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)

    @property
    def params(self) -> Norm:
        """For the operations that begin with this norm."""
        return Norm(self.weight, self.eps)

    def forward(self, x: Tensor, ctx: ForwardContext, residual: Tensor | None = None) -> Tensor:
        """[T, size] -> [T, size], plus `residual` [T, size]."""
        y = ctx.ops.rms_norm(x, self.params)
        return y if residual is None else y.add_(residual)

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        if self.checkpoint_name is not None:
            name = f"{name.rpartition('.')[0]}.{self.checkpoint_name}"
        yield whole(f"{name}.weight", self.weight, offset=1.0 if self.unit_offset else 0.0)
