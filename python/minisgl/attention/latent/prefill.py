"""Latent attention of long chunks with expanded keys and values, on Hopper (csrc/latent_prefill.cu).

The heads' keys and values are computed from the latents, a bounded number at a time. A pair of query and key then costs
nope_dim + rope_dim + value_dim multiplications per head, a third of the cost over the latents themselves. This pays for
the expansion if enough queries share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import AttentionInputs, AttentionSpec
from minisgl.attention.latent.key_blocks import TILE_QUERIES, key_blocks
from minisgl.core import Int32Array
from minisgl.kernel.base import LatentDims
from minisgl.kernel.launch.compile import Compiler, tensor_map
from minisgl.kernel.launch.signature import SCALAR_NAMES, KernelSpec, Launcher, Macros
from minisgl.uploads import upload

_STAGES = 2  # stages of the ring in latent_prefill.cu
_THREADS = 384  # per block, as in latent_prefill.cu
_COLUMNS = 64  # columns of a box that TMA copies
_BUFFER_BYTES = 1 << 27  # for expanded keys and values
_SHARED_BYTES = 220 << 10  # most shared memory of a block


@dataclass(frozen=True, slots=True)
class ExpandedKeys:
    """One block of keys, in buffers that all blocks and layers of a step share."""

    kv_indices: Tensor  # [K] int32: index of each key's latent in the pool, page * page_size + offset
    items: Tensor  # [tiles, 6] int32: struct Item of latent_prefill.cu
    latents: Tensor  # [K, rank + rope_dim]
    expanded: Tensor  # [K, heads * (nope_dim + value_dim)]
    maps: tuple[object, object]  # tensor maps of `expanded` and of `latents`


@dataclass(frozen=True, slots=True)
class ExpandedChunks:
    """Long chunks of one step."""

    blocks: Sequence[ExpandedKeys]
    sums: Tensor | None  # [T, heads] float32, where a row's keys are in several blocks
    kernel: Launcher
    scale: float

    def attend(self, q_nope: Tensor, q_rope: Tensor, weight: Tensor, latents: Tensor, out: Tensor) -> None:
        """Write the chunks' tokens of out [T, heads, value_dim].

        q_nope [T, heads, nope_dim] and q_rope [T, heads, rope_dim] may stand in larger tensors, token by token;
        weight [heads, nope_dim + value_dim, rank]; latents: a layer's pages.
        """
        heads, _, rank = weight.shape
        for block in self.blocks:
            torch.index_select(latents.flatten(0, 2), 0, block.kv_indices, out=block.latents)
            torch.mm(block.latents[:, :rank], weight.flatten(0, 1).t(), out=block.expanded)
            expanded_map, rows_map = block.maps
            self.kernel(
                (heads, len(block.items)),
                _THREADS,
                expanded_map=expanded_map,
                rows_map=rows_map,
                q_nope=q_nope,
                q_rope=q_rope,
                q_stride=q_nope.stride(0),
                items=block.items,
                out=out,
                lse=self.sums,
                num_heads=heads,
                softmax_scale=self.scale,
                early=False,
            )


def expands(dims: LatentDims, dtype: torch.dtype, compiler: Compiler) -> bool:
    """Return True if the kernel supports these heads and this GPU."""
    whole = dims.nope > 0 and dims.nope % 64 == 0 and dims.value > 0 and dims.value % 128 == 0
    return compiler.arch == 90 and whole and _tile(dims, dtype) > 0


def plan_chunks(
    spec: AttentionSpec, dims: LatentDims, compiler: Compiler, inputs: AttentionInputs, rows: Int32Array
) -> ExpandedChunks:
    """Plan the chunks of these rows of a step."""
    device, size, tile = inputs.page_table.device, spec.page_size, _tile(dims, spec.dtype)
    width = spec.num_heads * (dims.nope + dims.value)
    max_keys = max(_BUFFER_BYTES // (width * spec.dtype.itemsize), 8 * TILE_QUERIES)
    divided = list(key_blocks(rows, inputs.query_lens, inputs.kv_lens, max_keys))
    most = max(len(block.rows) for block in divided)
    latents = torch.empty((most, spec.head_dim), dtype=spec.dtype, device=device)
    expanded = torch.empty((most, width), dtype=spec.dtype, device=device)
    blocks = []
    for block in divided:
        keys = len(block.rows)
        row, position = upload(np.stack([block.rows, block.positions]), device)
        kv_indices = inputs.page_table[row.long(), (position // size).long()] * size + position % size
        parts = latents[:keys], expanded[:keys]  # keys after them are zeros for the kernel
        maps = tensor_map(parts[1], tile, _COLUMNS), tensor_map(parts[0], tile, _COLUMNS)
        blocks.append(ExpandedKeys(kv_indices, upload(block.items, device), *parts, maps))
    tokens, merges = int(inputs.query_lens.sum()), any(block.merges for block in divided)
    sums = torch.empty((tokens, spec.num_heads), dtype=torch.float32, device=device) if merges else None
    return ExpandedChunks(blocks, sums, compiler.kernel(_spec, dims, spec.dtype), spec.softmax_scale)


def _shared_bytes(dims: LatentDims, dtype: torch.dtype, tile: int) -> int:
    """Return the kernel's shared memory: queries, and stages of keys and values."""
    key = dims.nope + dims.rope
    return (TILE_QUERIES * key + _STAGES * tile * (key + dims.value)) * dtype.itemsize


def _tile(dims: LatentDims, dtype: torch.dtype) -> int:
    """Return the keys of a tile; 0 if none fits."""
    return next((tile for tile in (128, 64) if _shared_bytes(dims, dtype, tile) <= _SHARED_BYTES), 0)


def _spec(dims: LatentDims, dtype: torch.dtype) -> KernelSpec:
    tile = _tile(dims, dtype)
    macros: Macros = {
        "SCALAR": SCALAR_NAMES[dtype],
        "RANK": dims.rank,
        "ROPE": dims.rope,
        "NOPE": dims.nope,
        "VALUE": dims.value,
        "TILE": tile,
    }
    return KernelSpec("latent_prefill.cu", "latent_prefill", macros, shared_bytes=_shared_bytes(dims, dtype, tile))
