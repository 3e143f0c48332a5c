"""RMSNorm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.distributed import TPGroup
from minisgl.kernel.base import Norm
from minisgl.layers.layer_config import NormConfig
from minisgl.layers.weight_slice import WeightSlice, beside, row_slices


class RMSNorm(nn.Module):
    """Root mean square layer normalization (Zhang and Sennrich, 2019): [..., n] -> [..., n].

    `kept`: ranges of the checkpoint's `size` weights that are here, one after another; else all n = size.
    `checkpoint_name`: name in the checkpoint, beside this module, where it is not the module's.
    """

    def __init__(
        self,
        size: int,
        config: NormConfig,
        *,
        dtype: torch.dtype,
        kept: Sequence[range] | None = None,
        checkpoint_name: str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.size = size
        self.kept = kept or [range(size)]
        self.checkpoint_name = checkpoint_name
        self.weight = norm_weight(sum(map(len, self.kept)), config, dtype)
        self.params = Norm(self.weight, config.eps)  # for the operations that begin with this norm

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """[T, n] -> [T, n]."""
        return ctx.ops.rms_norm(x, self.params)

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        if self.checkpoint_name is not None:
            name = beside(name, self.checkpoint_name)
        offset = 1.0 if self.config.unit_offset else 0.0
        yield from row_slices(f"{name}.weight", self.size, self.kept, self.weight, offset=offset)


def norm_weight(size: int, config: NormConfig, dtype: torch.dtype, value: float = 1.0) -> nn.Parameter:
    """Return the weight of a norm, all of one value until it is loaded."""
    weight = torch.full((size,), value, dtype=torch.float32 if config.float32 else dtype)
    return nn.Parameter(weight, requires_grad=False)


def params_of(norm: RMSNorm | None) -> Norm | None:
    """Return the parameters of a norm, or None where the family has no such norm."""
    return None if norm is None else norm.params


def all_params(*norms: RMSNorm | None) -> tuple[Norm, ...]:
    """Return the parameters of the norms that are not None."""
    return tuple(norm.params for norm in norms if norm is not None)


class ProjectionNorm(RMSNorm):
    """RMSNorm over all heads of a projection, of which a rank holds some (OLMo 2).

    The mean square is that of all ranks: equal shares, in which a KV head that is replicated counts as often as others.
    """

    def __init__(
        self, size: int, config: NormConfig, *, dtype: torch.dtype, kept: Sequence[range], tp: TPGroup
    ) -> None:
        super().__init__(size, config, dtype=dtype, kept=kept)
        self.tp = tp

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        if self.tp.size == 1:
            return super().forward(x.contiguous(), ctx)
        x32 = x.float()
        mean_square = self.tp.all_reduce(x32.square().mean(-1, keepdim=True)).div_(self.tp.size)
        normed = (x32 * torch.rsqrt(mean_square + self.config.eps)).to(self.weight.dtype)
        return normed.mul_(self.weight).to(x.dtype)
