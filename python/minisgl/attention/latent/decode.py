"""Absorbed latent attention, query by query, over the latents themselves: csrc/latent_decode.cu, for Hopper and later.

It is used for decodes and for tokens of short chunks; each such token attends like a row of one query. The number of
splits depends only on the number of queries and heads, so that a CUDA graph can capture any step: every row is cut into
this number of equal splits. Each block of 16 heads reads a row's latents once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.attention.base import AttentionSpec
from minisgl.kernel.base import LatentDims
from minisgl.kernel.launch.compile import Compiler
from minisgl.kernel.launch.signature import SCALAR_NAMES, KernelSpec, Macros
from minisgl.kvcache.kv_pool import KVPool

_THREADS = 256
_BLOCK_HEADS = 16  # query heads of a block of latent_decode.cu
_TILE = 32  # tokens, as in latent_decode.cu
_STAGES = 5  # stages of the ring in latent_decode.cu
_MAX_SPLITS = 64  # per row; with more, the merge takes longer than the splits save
_MERGERS = 4  # groups of threads that divide the splits in latent_merge


@dataclass(frozen=True, slots=True)
class LatentQueries:
    """Implements attention.base.AttentionPlan for Q queries."""

    spec: AttentionSpec
    dims: LatentDims
    lengths: Tensor  # [Q] int32: positions that each query sees
    page_table: Tensor  # [rows, pages] int32
    table_rows: Tensor | None  # [Q] int32: each query's row of the page table; None: query i has row i
    compiler: Compiler

    def forward(self, layer: int, q: Tensor, kv: KVPool, sinks: Tensor | None = None) -> Tensor:  # noqa: ARG002
        (queries, heads, _), rank = q.shape, self.dims.rank
        kind = self.dims, self.spec.dtype, self.spec.page_size
        blocks = -(-heads // _BLOCK_HEADS)
        splits = max(min(self.compiler.num_sms // (queries * blocks), _MAX_SPLITS), 1)
        out = q.new_empty((queries, heads, rank))
        partial: Tensor | None = None
        weights: Tensor | None = None
        if splits > 1:
            partial = torch.empty((queries, heads, splits, rank), dtype=torch.float32, device=q.device)
            weights = torch.empty((queries, heads, splits), dtype=torch.float32, device=q.device)
        decode = self.compiler.kernel(_spec, "latent_decode", *kind)
        decode(
            (queries * splits, blocks),
            _THREADS,
            query=q.contiguous(),
            cache=kv.keys(layer),
            lengths=self.lengths,
            table_rows=self.table_rows,
            page_table=self.page_table,
            table_stride=self.page_table.stride(0),
            splits=splits,
            num_heads=heads,
            softmax_scale=self.spec.softmax_scale,
            partial=partial,
            weights=weights,
            out=out,
        )
        if splits > 1:
            merge = self.compiler.kernel(_spec, "latent_merge", *kind)
            merge(
                (queries * heads,),
                rank // 4 * (_MERGERS if splits > _MERGERS else 1),
                partial=partial,
                weights=weights,
                lengths=self.lengths,
                out=out,
                splits=splits,
                num_heads=heads,
            )
        return out


def _spec(kernel: str, dims: LatentDims, dtype: torch.dtype, page_size: int) -> KernelSpec:
    rank, rope, _, _ = dims
    macros: Macros = {"SCALAR": SCALAR_NAMES[dtype], "RANK": rank, "ROPE": rope, "PAGE_SIZE": page_size}
    shared = 0
    if kernel == "latent_decode":  # struct Shared of latent_decode.cu
        rows, shares = _STAGES * _TILE * (rank + rope + 8), _BLOCK_HEADS * (_TILE + 8)
        floats = _BLOCK_HEADS * (2 * (_TILE + 1) + 2)
        shared = 2 * (rows + shares) + 4 * floats
    return KernelSpec("latent_decode.cu", kernel, macros, shared_bytes=shared)
