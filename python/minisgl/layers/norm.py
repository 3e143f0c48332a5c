"""RMSNorm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.kernel.base import Norm
from minisgl.layers.pieces import Piece, whole


class RMSNorm(nn.Module):
    """Root mean square layer normalization (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype), requires_grad=False)

    @property
    def params(self) -> Norm:
        """For the operations that begin with this norm."""
        return Norm(self.weight, self.eps)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """[T, size] -> [T, size]"""
        return ctx.ops.rms_norm(x, self.params)

    def pieces(self, name: str) -> Iterator[Piece]:
        yield whole(f"{name}.weight", self.weight)
