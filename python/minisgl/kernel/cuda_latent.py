"""Operations of latent attention (MLA) before and after the attention itself (csrc/latent.cu, latent_values.cu).

Norm, rotation and the write to the paged cache are one launch, which for few tokens also computes the absorbed queries.
With more tokens cuBLAS computes the products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernel.base import LatentDims, LatentRows
from minisgl.kernel.launch.compile import Compiler
from minisgl.kernel.launch.signature import MAX_EARLY_ROWS, SCALAR_NAMES, KernelSpec, Macros

_THREADS = 256
_TOKENS = 8  # most tokens of latent_query and latent_values, as in latent.cu
_COLUMNS = 64  # columns of the latent in a block of latent_query
_SHARERS = 32  # threads that divide nope_dim, which must be a multiple of it
_RANKS = 128  # rank must be a multiple of it
_VALUES = 16  # values of a head in a block of latent_values; value_dim must be a multiple of it


class CudaLatent:
    """Implements kernel.base.Ops.norm_rope_store_latent, and latent_query and latent_values for few tokens."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler

    def begin_compiling(self, dtype: torch.dtype, cache: torch.dtype, norm: torch.dtype, dims: LatentDims) -> None:
        """Begin to compile the kernels for these sizes."""
        of_step = dtype, cache, norm, dims.rank, dims.rope
        self._compiler.begin([_spec("norm_rope_store_latent", *of_step)])
        if dims.rank % _RANKS == 0 and dims.nope % _SHARERS == 0:
            self._compiler.begin([_spec("latent_query", *of_step, dims.nope)])
        if dims.rank % _RANKS == 0 and dims.value % _VALUES == 0:
            self._compiler.begin([_values_spec(dtype, dims.rank, dims.value)])

    @staticmethod
    def makes_query(q_nope: Tensor, rank: int) -> bool:
        """Return True if `query` supports these queries [T, heads, nope_dim]."""
        return _few(q_nope) and q_nope.shape[2] % _SHARERS == 0 and rank % _RANKS == 0

    @staticmethod
    def makes_values(latents: Tensor, weight: Tensor) -> bool:
        """Return True if `values` supports these latents [T, heads, rank] and weights [heads, value_dim, rank]."""
        fits = weight.shape[1] % _VALUES == 0 and weight.shape[2] % _RANKS == 0
        return fits and _few(latents) and latents.is_contiguous()

    def store(self, rows: LatentRows, q_rope: Tensor, rotated: Tensor) -> None:
        """Compute Ops.norm_rope_store_latent. Rows and heads may be views of larger tensors, strided by token."""
        tokens, heads, rope = q_rope.shape
        if not tokens:
            return
        kernel = self._compiler.kernel(_spec, "norm_rope_store_latent", *_dtypes(rows), len(rows.norm.weight), rope)
        kernel(
            (tokens,),
            _THREADS,
            q_rope=q_rope,
            q_stride=q_rope.stride(0),
            **_row_arguments(rows),
            rotated=rotated,
            token_stride=rotated.stride(0),
            head_stride=rotated.stride(1),
            num_heads=heads,
            early=tokens <= MAX_EARLY_ROWS,
        )

    def query(self, rows: LatentRows, q_nope: Tensor, q_rope: Tensor, keys: Tensor) -> Tensor:
        """Compute Ops.latent_query."""
        (tokens, heads, nope), (_, _, rope), rank = q_nope.shape, q_rope.shape, len(rows.norm.weight)
        query = q_nope.new_empty((tokens, heads, rank + rope))
        kernel = self._compiler.kernel(_spec, "latent_query", *_dtypes(rows), rank, rope, nope)
        kernel(
            (heads * (rank // _COLUMNS) + tokens,),
            _THREADS,
            q_nope=q_nope,
            q_rope=q_rope,
            q_stride=q_nope.stride(0),
            keys=keys,
            keys_stride=keys.stride(0),
            **_row_arguments(rows),
            query=query,
            tokens=tokens,
            num_heads=heads,
        )
        return query

    def values(self, latents: Tensor, weight: Tensor) -> Tensor:
        """Compute Ops.latent_values."""
        (tokens, heads, rank), value = latents.shape, weight.shape[1]
        out = latents.new_empty((tokens, heads, value))
        kernel = self._compiler.kernel(_values_spec, latents.dtype, rank, value)
        kernel(
            (heads * (value // _VALUES),),
            _THREADS,
            latents=latents,
            values=weight,
            values_stride=weight.stride(0),
            out=out,
            tokens=tokens,
            num_heads=heads,
        )
        return out


def _dtypes(rows: LatentRows) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    return rows.projected.dtype, rows.cache.dtype, rows.norm.weight.dtype


def _row_arguments(rows: LatentRows) -> dict[str, Tensor | float]:
    """Return the kernels' arguments for these rows."""
    return {
        "row": rows.projected,
        "row_stride": rows.projected.stride(0),
        "norm": rows.norm.weight,
        "cos_sin": rows.cos_sin,
        "positions": rows.positions,
        "out_cache_loc": rows.out_cache_loc,
        "cache": rows.cache,
        "eps": rows.norm.eps,
    }


def _few(x: Tensor) -> bool:
    return 0 < len(x) <= _TOKENS and x.dtype in (torch.bfloat16, torch.float16)


def _spec(
    kernel: str,
    dtype: torch.dtype,
    cache: torch.dtype,
    norm: torch.dtype,
    rank: int,
    rope: int,
    nope: int | None = None,
) -> KernelSpec:
    macros: dict[str, str | int] = {
        "SCALAR": SCALAR_NAMES[dtype],
        "CACHE": SCALAR_NAMES[cache],
        "NORM_SCALAR": SCALAR_NAMES[norm],
        "RANK": rank,
        "ROPE": rope,
    }
    if nope is not None:
        macros["NOPE"] = nope
    return KernelSpec("latent.cu", kernel, macros)


def _values_spec(dtype: torch.dtype, rank: int, value: int) -> KernelSpec:
    macros: Macros = {"SCALAR": SCALAR_NAMES[dtype], "RANK": rank, "VALUE": value}
    return KernelSpec("latent_values.cu", "latent_values", macros)
