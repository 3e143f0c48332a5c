"""RMSNorm, alone or with the residual addition before it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.layers.pieces import Piece, whole


class RMSNorm(nn.Module):
    """Root mean square layer normalization (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor | None, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), both [T, size]; no residual stands for zero."""
        if residual is None:
            return ctx.ops.rms_norm(x, self.weight, self.eps), x
        return ctx.ops.add_rms_norm(x, residual, self.weight, self.eps)

    def pieces(self, name: str) -> Iterator[Piece]:
        yield whole(f"{name}.weight", self.weight)
