"""Matrix products divided among ranks: by output rows (no exchange), or by input columns (partial sums are added)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn

from minisgl.distributed import TPGroup
from minisgl.distributed.group import Summed
from minisgl.kernel.base import Norm, Ops, Weight
from minisgl.kernel.gemm.fp8_rows import Fp8Products, Fp8Rows
from minisgl.kernel.torch_ops import DenseWeight
from minisgl.layers.norm import RMSNorm, params_of
from minisgl.layers.weight_slice import WeightSlice, beside, row_slices, whole
from minisgl.quantization.levels import Levels
from minisgl.quantization.rounding import Int4Grid


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint matrix inside a merged one: its name, its rows, and the ranges of rows kept here."""

    name: str
    rows: int
    kept: Sequence[range]

    @classmethod
    def even(cls, name: str, rows: int, tp: TPGroup) -> Part:
        """Rows divided evenly; the caller has checked that they divide."""
        share = rows // tp.size
        return cls(name, rows, [range(tp.rank * share, (tp.rank + 1) * share)])


def empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def zeros(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


def unallocated(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Return a parameter without memory."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


class HeadParameter(nn.Module):
    """A rank's share of a learned number per head: weight [heads], under its own name in the checkpoint."""

    def __init__(self, checkpoint_name: str, num_heads: int, kept: range, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.checkpoint_name, self.num_heads, self.kept = checkpoint_name, num_heads, kept
        self.weight = zeros(len(kept), dtype=dtype)

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        yield from row_slices(beside(name, self.checkpoint_name), self.num_heads, [self.kept], self.weight)


class Linear(nn.Module):
    """A module whose weight [out, in] is read only by products, which are bound to it once it is loaded.

    Until then `levels` may replace the weight, or `grid` describe its values. A weight that levels replace stays
    on the meta device: it has a shape and no memory.
    """

    weight: nn.Parameter
    levels: Levels | None = None
    grid: Int4Grid | None = None  # grid of a weight that was rounded to 4 bits when it was loaded
    gated = False  # the first half of the output gates the second
    product: Weight


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give the unallocated weights of a layer their memory."""
    for name, weight in list(module.named_parameters(recurse=False)):
        if weight.is_meta:
            setattr(module, name, nn.Parameter(torch.empty_like(weight, device=device), requires_grad=False))


def bind_weights(model: nn.Module, ops: Ops) -> None:
    """Bind loaded weights to the products of `ops`, before the first forward. A tied embedding keeps its own copy."""
    for module in model.modules():
        if not isinstance(module, Linear):
            continue
        if module.levels is not None:
            module.product = ops.bind_levels(module.levels, module.weight.dtype, gated=module.gated)
            module.levels = None
        else:
            module.product, module.grid = ops.bind(module.weight, module.grid), None
            if module.product.tensor is not module.weight:
                module.weight = nn.Parameter(module.product.tensor, requires_grad=False)


def product_labels(model: nn.Module) -> str:
    """Return how many bound weights have which layout."""
    labels = Counter(module.product.label for module in model.modules() if isinstance(module, Linear))
    return ", ".join(f"{count} matrices in {label}" for label, count in labels.items())


class ColumnParallelLinear(Linear):
    """Matrices that share their input, merged into one product; each rank has some output rows of each.

    norm(x) of [T, in_features] -> [T, rows kept], in the order of the parts. The parts stand in the checkpoint beside
    this module: `mlp.gate_up_proj` with a part `gate_proj` is filled from `mlp.gate_proj.weight`, or, where all parts
    are one matrix (Phi-3), from `mlp.gate_up_proj.weight`.
    """

    def __init__(
        self, in_features: int, parts: Sequence[Part], *, bias: bool, dtype: torch.dtype, gated: bool = False
    ) -> None:
        super().__init__()
        self.parts = parts
        self.gated = gated
        rows = sum(len(kept) for part in parts for kept in part.kept)
        self.weight = unallocated(rows, in_features, dtype=dtype)
        self.bias = zeros(rows, dtype=dtype) if bias else None

    def forward(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        return self.product.norm_linear(x, params_of(norm), self.bias)

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        return self._slices([(beside(name, part.name), 0, part.rows) for part in self.parts])

    def stacked_slices(self, name: str) -> Iterator[WeightSlice]:
        """Return all slices that this layer keeps of a checkpoint with one matrix of this layer's name."""
        *starts, total = accumulate((part.rows for part in self.parts), initial=0)
        return self._slices([(name, start, total) for start in starts])

    def _slices(self, sources: Iterable[tuple[str, int, int]]) -> Iterator[WeightSlice]:
        """Return the slices of each source: the matrix's name, the part's first row in it, and its number of rows."""
        for kind, tensor in (("weight", self.weight), ("bias", self.bias)):
            at = 0
            for part, (name, start, total) in zip(self.parts, sources, strict=True):
                kept = [range(start + rows.start, start + rows.stop, rows.step) for rows in part.kept]
                if tensor is not None:
                    yield from row_slices(f"{name}.{kind}", total, kept, tensor[at : at + sum(map(len, kept))])
                at += sum(map(len, kept))


class RowParallelLinear(Linear):
    """One matrix whose input columns are divided: [T, in_features / size] -> a partial sum of [T, out_features].

    The product is the sum of the ranks' parts; the first rank's has the bias.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, tp: TPGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.tp = tp
        self.in_features = in_features
        self.weight = unallocated(out_features, in_features // tp.size, dtype=dtype)
        self.bias = zeros(out_features, dtype=dtype) if bias else None

    @property
    def takes_rounded(self) -> bool:
        """True if x may already be rounded as the product would round it."""
        return isinstance(self.product, Fp8Products)

    def forward(self, x: Tensor | Fp8Rows, residual: Tensor | None = None) -> Tensor:
        """Return the rank's partial sum plus `residual` [T, out_features], which may be overwritten."""
        bias = self.bias if self.tp.rank == 0 else None
        if isinstance(x, Fp8Rows):
            return cast(Fp8Products, self.product).linear_of_rounded(x, bias, residual)
        return self.product.linear(x, bias, residual)

    def add(self, x: Tensor | Fp8Rows, residual: Tensor | None, norm: Norm | None) -> Summed:
        """Return the product plus `residual`, and the norm of this sum if one kernel computes both.

        Without a residual, return the rank's part of the product. The residual may be overwritten.
        """
        if self.tp.size == 1 or residual is None:
            return self(x, residual), None
        if isinstance(x, Tensor) and isinstance(self.product, DenseWeight) and self.bias is None:
            total = self.tp.product_sum(x, self.product.tensor, residual, norm)
            if total is not None:
                return total
            part = self.tp.part_like(residual)
            if part is not None:
                return self.tp.all_reduce_norm(self.product.norm_linear(x, None, out=part), residual, norm)
        return self.tp.all_reduce_norm(self(x), residual, norm)

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        rows, share = self.weight.shape
        columns = slice(self.tp.rank * share, (self.tp.rank + 1) * share)
        yield WeightSlice(f"{name}.weight", (rows, self.in_features), (slice(None), columns), self.weight)
        if self.bias is not None:
            yield whole(f"{name}.bias", self.bias)
