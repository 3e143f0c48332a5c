"""The fused operations on a CPU: the reference's results in fewer, larger operations, and faster products.

With one token per step the cost of an operation is its dispatch, with many tokens its memory traffic. Therefore
operations are few, and work in place.
Where the CPU multiplies bfloat16, weights are packed once into the layout that oneDNN reads fastest.
"""

from __future__ import annotations

import logging
import math
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernel.base import Heads, Norm, Weight
from minisgl.kernel.cpu.compile import CompilationError
from minisgl.kernel.cpu.int4 import Int4Linear, TiledInt4Weight, load_int4_linear
from minisgl.kernel.cpu.weights import Int4Weight, PackedWeight
from minisgl.kernel.torch_ops import DenseWeight, TorchOps, store, unweighted_norm
from minisgl.quantization.rounding import Int4Grid

logger = logging.getLogger(__name__)

# On CPUs without 16-bit products: from so many rows on, converting the weight to float32 costs less than it saves.
_MANY_ROWS = 4
_DTYPES = torch.bfloat16, torch.float16, torch.float32
_BLOCK = 1 << 20  # values of a weight that are converted to float32 at a time, so that they stay in the cache
_TOKENS = 64  # tokens normed and rotated at a time, so that they stay in the cache


def multiplies_bfloat16() -> bool:
    """Return True if this CPU has instructions for products of bfloat16 and torch has the kernels that use them."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


class CpuOps(TorchOps):
    """Implements kernel.base.Ops on a CPU. `bfloat16_products`: it has these, see `multiplies_bfloat16`."""

    def __init__(self, *, bfloat16_products: bool) -> None:
        self._bfloat16_products = bfloat16_products
        self._rotations: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self._zeros = {dtype: torch.zeros((), dtype=dtype) for dtype in _DTYPES}

    def bind(self, weight: Tensor, grid: Int4Grid | None = None) -> Weight:
        packs = self._bfloat16_products and weight.dtype == torch.bfloat16
        dense = PackedWeight(self, weight) if packs else DenseWeight(self, weight)
        if grid is None or not Int4Weight.supports(weight):
            return dense
        if packs and self._int4_linear is not None:
            return TiledInt4Weight(self, self._int4_linear, weight, grid, dense)
        return Int4Weight(self, weight, grid, dense)

    @cached_property
    def _int4_linear(self) -> Int4Linear | None:
        try:
            return load_int4_linear()
        except CompilationError as error:
            logger.warning("%s, so a lone stream with int4 weights takes some twice as long a token", error)
            return None

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dtype == torch.float32 or (x.dtype == torch.bfloat16 and self._bfloat16_products):
            return F.linear(x, weight, bias)
        if len(x) >= _MANY_ROWS:
            return _linear_in_float32(x, weight, bias)
        if len(x) == 1:  # reads the weight faster than a product of matrices does
            row = weight.mv(x[0]) if bias is None else torch.addmv(bias, weight, x[0])
            return row.unsqueeze(0)
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        if x.numel() == x.shape[-1]:
            return _lone_rms_norm(x, norm, self._zeros[norm.weight.dtype])
        wide = x.to(torch.float32, copy=True)
        return wide.mul_(_scale(wide, norm.eps)).to(norm.weight.dtype).mul_(norm.weight).to(x.dtype)

    def norm_rope_store(
        self, qkv: Tensor, heads: Heads, positions: Tensor, out_cache_loc: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        q_norm, k_norm = heads.q_norm, heads.k_norm
        alike = (q_norm is None) == (k_norm is None) and not (q_norm and k_norm and q_norm.eps != k_norm.eps)
        if not heads.num_kv_heads or not alike:
            return super().norm_rope_store(qkv, heads, positions, out_cache_loc, k_cache, v_cache)
        caches = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        tensors = qkv, *self._rotation(heads.cos_sin, positions), out_cache_loc
        if len(qkv) <= _TOKENS:
            return _norm_rope_store(heads, *caches, *tensors)
        parts = zip(*(torch.split(tensor, _TOKENS) for tensor in tensors), strict=True)
        return torch.cat([_norm_rope_store(heads, *caches, *part) for part in parts])

    def _rotation(self, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors [T, 1, head_dim] of x and of x with its halves swapped, kept for all layers of a step."""
        if self._rotations is None or self._rotations[0] is not cos_sin or self._rotations[1] is not positions:
            cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
            self._rotations = cos_sin, positions, torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return self._rotations[2], self._rotations[3]


def _norm_rope_store(
    heads: Heads, keys: Tensor, values: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, out_cache_loc: Tensor
) -> Tensor:
    """Do Ops.norm_rope_store on caches of [slots, kv_heads, head_dim], with the factors of CpuOps._rotation."""
    num_q, num_rotated = heads.num_heads, heads.num_heads + heads.num_kv_heads
    rows = qkv.view(len(qkv), num_rotated + heads.num_kv_heads, -1)
    wide = rows[:, :num_rotated].to(torch.float32, copy=True)
    if heads.q_norm and heads.k_norm:
        wide.mul_(_scale(wide, heads.q_norm.eps))
        wide[:, :num_q].mul_(heads.q_norm.weight)
        wide[:, num_q:].mul_(heads.k_norm.weight)
    swapped = wide.roll(wide.shape[-1] // 2, -1)
    rotated = wide.mul_(cos).addcmul_(swapped, sin).to(qkv.dtype)
    store(keys, out_cache_loc, rotated[:, num_q:])
    store(values, out_cache_loc, unweighted_norm(rows[:, num_rotated:], heads.v_eps))
    return rotated[:, :num_q]


def _lone_rms_norm(x: Tensor, norm: Norm, zero: Tensor) -> Tensor:
    """Return the RMSNorm of x, which has one row, with the scale as a Python number: fewer operations to dispatch.

    It is computed in float32 and rounded once, to the dtype of the weight and of `zero` []. torch has no operation for
    a number times a product of two tensors, so the product is added to zero.
    """
    length = torch.linalg.vector_norm(x, dtype=torch.float32).item()
    scale = 1 / math.sqrt(length * length / x.shape[-1] + norm.eps)
    if x.dtype == zero.dtype:
        return torch.addcmul(zero, x, norm.weight, value=scale)
    return torch.addcmul(zero, x.to(zero.dtype), norm.weight, value=scale).to(x.dtype)


def _scale(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis of float32 x, which is kept."""
    squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
    scale: Tensor = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
    return scale


def _linear_in_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.new_empty((len(x), len(weight)))
    rows, wide = max(_BLOCK // weight.shape[1], 1), x.float()
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        out[:, part] = F.linear(wide, weight[part].float(), None if bias is None else bias[part].float())
    return out
