"""Decodes of latent attention for a few heads: csrc/latent_decode.cu, for Hopper and later.

Splits are counted by rows and heads alone, so that a CUDA graph may hold any decode: each row is cut into as many equal
ones. Blocks of 16 heads read a row's latents once each, which is too often for many heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.attention.base import AttentionInputs, AttentionSpec
from minisgl.attention.decode_splits import LATENT_HEADS
from minisgl.kernel.compile import Compiler
from minisgl.kernel.signature import SCALAR_NAMES, KernelSpec, Macros
from minisgl.kvcache.pool import KVPool

_THREADS = 256
_TILE = 64
_MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class LatentDecodePlan:
    """Implements attention.base.AttentionPlan."""

    spec: AttentionSpec
    inputs: AttentionInputs
    splits: int
    compiler: Compiler

    def forward(self, layer: int, q: Tensor, kv: KVPool, sinks: Tensor | None = None) -> Tensor:  # noqa: ARG002
        rows, heads, _ = q.shape
        rank, splits = self.spec.latent_dim or 0, self.splits
        out = q.new_empty((rows, heads, rank))
        partial: Tensor | None = None
        weights: Tensor | None = None
        if splits > 1:
            partial = torch.empty((rows, heads, splits, rank), dtype=torch.float32, device=q.device)
            weights = torch.empty((rows, heads, splits), dtype=torch.float32, device=q.device)
        table = self.inputs.page_table
        decode = self.compiler.kernel(_spec, "latent_decode", self.spec)
        decode(
            (splits, -(-heads // LATENT_HEADS), rows),
            _THREADS,
            query=q,
            cache=kv.keys(layer),
            lengths=self.inputs.kv_lens_device,
            page_table=table,
            table_stride=table.stride(0),
            num_heads=heads,
            softmax_scale=self.spec.softmax_scale,
            partial=partial,
            weights=weights,
            out=out,
        )
        if partial is not None and weights is not None:
            merge = self.compiler.kernel(_spec, "latent_merge", self.spec)
            merge((rows * heads,), rank // 4, partial=partial, weights=weights, out=out, splits=splits)
        return out


class LatentDecode:
    """Implements attention.base.AttentionBackend for steps that only decode."""

    graph_safe = True
    prefill_graph_safe = False
    upcasts = False

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self._spec = spec
        self._compiler = Compiler(device)

    def plan(self, inputs: AttentionInputs) -> LatentDecodePlan:
        blocks = len(inputs.query_lens) * -(-self._spec.num_heads // LATENT_HEADS)
        splits = max(min(self._compiler.num_sms // blocks, _MAX_SPLITS), 1)
        return LatentDecodePlan(self._spec, inputs, splits, self._compiler)

    def graphed_decode(self, rows: int) -> None:  # noqa: ARG002
        return None


def _spec(kernel: str, spec: AttentionSpec) -> KernelSpec:
    rank, rope = spec.latent_dim or 0, spec.head_dim - (spec.latent_dim or 0)
    macros: Macros = {"SCALAR": SCALAR_NAMES[spec.dtype], "RANK": rank, "ROPE": rope, "PAGE_SIZE": spec.page_size}
    shared = 0
    if kernel == "latent_decode":  # struct Shared of latent_decode.cu
        shared = (
            2 * ((LATENT_HEADS + 2 * _TILE) * (rank + rope + 8) + LATENT_HEADS * (_TILE + 8))
            + 2 * 4 * LATENT_HEADS * _TILE // 8
        )
    return KernelSpec("latent_decode.cu", kernel, macros, shared_bytes=shared)
