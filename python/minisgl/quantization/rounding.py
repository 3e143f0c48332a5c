"""Rounding of floating-point weights to 8 or 4 bits when they are loaded, in place: the weight keeps its dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Method = Literal["fp8", "int8", "int4"]

INT4_GROUP = 32  # input columns of a scale
_LARGEST = {"fp8": 448.0, "int8": 127.0}
_INT4_LEVELS = 15
_SHARES = (1.0, 0.92)  # of a group's range that its levels cover; which one errs less is tried
_BLOCK = 1 << 20  # values at a time: they stay in the cache


@dataclass(frozen=True, slots=True)
class Int4Grid:
    """Values that a weight [out, in] has: (q - zero) * scale of its group of input columns, q in 0 to 15.

    `scales` and `zeros` are float32 [out, groups]. A scale has four significant bits and q - zero has as many, so every
    value is one of bfloat16, and a product may read q or the value.
    """

    scales: Tensor
    zeros: Tensor

    def levels(self, weight: Tensor) -> Tensor:
        """Return q, int32 [out, in], of a weight on this grid."""
        q = torch.empty(weight.shape, dtype=torch.int32, device=weight.device)
        scales = self.scales.clamp_min(torch.finfo(torch.float32).tiny)
        for rows in _chunks(weight):
            groups = weight[rows].float().unflatten(1, (-1, INT4_GROUP))  # type: ignore[no-untyped-call]
            steps = (groups / scales[rows].unsqueeze(2)).add_(self.zeros[rows].unsqueeze(2))
            q[rows] = steps.round_().flatten(1).int()
        return q


def largest_of_rows(weight: Tensor) -> Tensor:
    """[out, in] -> the largest magnitude of each row, float32 [out, 1]."""
    return torch.cat([weight[rows].abs().amax(1, keepdim=True) for rows in _chunks(weight)]).float()


def round_to_8_bits(weight: Tensor, method: Literal["fp8", "int8"], largest: Tensor) -> None:
    """Round each row of [out, in] to `method`'s values times a scale by which the row's `largest` [out, 1] is exact."""
    scales = largest.div(_LARGEST[method]).clamp_min_(torch.finfo(torch.float32).tiny)
    for rows in _chunks(weight):
        steps = weight[rows].float().div_(scales[rows])
        steps = steps.to(torch.float8_e4m3fn).float() if method == "fp8" else steps.round_()
        weight[rows] = steps.mul_(scales[rows]).to(weight.dtype)


def round_to_int4(weight: Tensor) -> Int4Grid:
    """Round [out, in], of which INT4_GROUP divides the columns, to a grid, which is returned."""
    scales = weight.new_empty((len(weight), weight.shape[1] // INT4_GROUP), dtype=torch.float32)
    zeros = torch.empty_like(scales)
    for rows in _chunks(weight):
        groups = weight[rows].float().unflatten(1, (-1, INT4_GROUP))  # type: ignore[no-untyped-call]
        low, high = torch.aminmax(groups, dim=2)
        low.clamp_(max=0)
        high.clamp_(min=0)
        best: tuple[Tensor, ...] | None = None
        for share in _SHARES:
            scale = _four_bits((high - low) * (share / _INT4_LEVELS))
            zero = (-low * share / scale).round_().clamp_(0, _INT4_LEVELS)
            steps = (groups / scale.unsqueeze(2)).round_().add_(zero.unsqueeze(2)).clamp_(0, _INT4_LEVELS)
            values = steps.sub_(zero.unsqueeze(2)).mul_(scale.unsqueeze(2))
            error = torch.linalg.vector_norm(values - groups, dim=2)
            found = scale, zero, values, error
            best = found if best is None else _better(best, found)
        assert best is not None
        scales[rows], zeros[rows] = best[:2]
        weight[rows] = best[2].flatten(1).to(weight.dtype)
    return Int4Grid(scales, zeros)


def _better(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Take of each group the scale, zero, values and error with the smaller error."""
    first = one[3] <= other[3]
    return tuple(
        torch.where(first.unsqueeze(2) if a.ndim == 3 else first, a, b) for a, b in zip(one, other, strict=True)
    )


def _four_bits(x: Tensor) -> Tensor:
    """Round positive values to four significant bits, away from zero."""
    mantissa, exponent = torch.frexp(x.clamp_min(torch.finfo(torch.float32).tiny))
    return torch.ldexp(mantissa.mul_(16).ceil_().div_(16), exponent)


def _chunks(weight: Tensor) -> Iterator[slice]:
    """Rows of which a block is made."""
    count = max(_BLOCK // weight.shape[1], 1)
    for start in range(0, len(weight), count):
        yield slice(start, start + count)
