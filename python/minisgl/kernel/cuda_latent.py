"""Latent attention's store (csrc/latent.cu): norm, rotation and the write to the paged cache in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernel.base import Norm
from minisgl.kernel.compile import Compiler
from minisgl.kernel.signature import SCALAR_NAMES, KernelSpec, Macros
from minisgl.kernel.small_batch_gemm import MAX_ROWS

_THREADS = 256


class CudaLatent:
    """Implements kernel.base.Ops.norm_rope_store_latent."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler

    def begin_compiling(self, dtype: torch.dtype, cache: torch.dtype, norm: torch.dtype, rank: int, rope: int) -> None:
        """Begin to compile the kernel for latents of `rank` beside `rope` rotated dimensions."""
        self._compiler.begin([_spec(dtype, cache, norm, rank, rope)])

    def __call__(
        self,
        q_rope: Tensor,
        row: Tensor,
        norm: Norm,
        cos_sin: Tensor,
        positions: Tensor,
        out_cache_loc: Tensor,
        cache: Tensor,
        rotated: Tensor,
    ) -> None:
        """Compute Ops.norm_rope_store_latent. Rows and heads may stand in larger tensors, token by token."""
        tokens, heads, rope = q_rope.shape
        if not tokens:
            return
        kernel = self._compiler.kernel(_spec, row.dtype, cache.dtype, norm.weight.dtype, len(norm.weight), rope)
        kernel(
            (tokens,),
            _THREADS,
            q_rope=q_rope,
            q_stride=q_rope.stride(0),
            row=row,
            row_stride=row.stride(0),
            norm=norm.weight,
            cos_sin=cos_sin,
            positions=positions,
            out_cache_loc=out_cache_loc,
            cache=cache,
            rotated=rotated,
            token_stride=rotated.stride(0),
            head_stride=rotated.stride(1),
            num_heads=heads,
            eps=norm.eps,
            early=tokens <= MAX_ROWS,
        )


def _spec(dtype: torch.dtype, cache: torch.dtype, norm: torch.dtype, rank: int, rope: int) -> KernelSpec:
    macros: Macros = {
        "SCALAR": SCALAR_NAMES[dtype],
        "CACHE": SCALAR_NAMES[cache],
        "NORM_SCALAR": SCALAR_NAMES[norm],
        "RANK": rank,
        "ROPE": rope,
    }
    return KernelSpec("latent.cu", "norm_rope_store_latent", macros)
