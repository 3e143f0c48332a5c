"""FlashAttention 3 (Shah et al., 2024) on the paged pool, as packaged in sgl_kernel: Ampere to Hopper, bf16 and fp16.

One call serves prefill, decode and mixed batches: queries of variable length against page tables. The device computes
how the work is split over the GPU, once per step instead of in every layer.

FP8 pages are upcast first, because FlashAttention's own FP8 products would also round q and the softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from sgl_kernel.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata
from torch import Tensor

from minisgl.attention.backends.page_kernels import PageUpcaster
from minisgl.attention.base import AttentionInputs, AttentionSpec, window_left
from minisgl.kvcache.kv_pool import KVPool

# Largest product of rows and longest query for which a row's keys may be divided among multiprocessors (split-KV): the
# merge launches this many blocks, even if few of them have work.
_MAX_MERGED = 2048
_TILE_QUERIES = 128  # queries of all heads of a KV head that a multiprocessor has at a time
_MIN_KEYS = 256  # keys per split
# Keys of the smallest tile for heads of up to 128 dimensions. A tile that divides a page is loaded with all of the page
# that it spans (by TMA); of other tiles only the row's own keys. Larger heads have tiles of 64 keys and more.
_TILE_KEYS = 128


@dataclass(frozen=True, slots=True)
class Fa3Plan:
    """Implements attention.base.AttentionPlan."""

    spec: AttentionSpec
    inputs: AttentionInputs
    max_query_len: int
    num_splits: int  # most splits of a row's keys
    schedule: Tensor  # int32
    upcast: Callable[[int, KVPool], tuple[Tensor, Tensor]] | None  # copies a layer's FP8 K and V to 16 bits

    def forward(self, layer: int, q: Tensor, kv: KVPool, sinks: Tensor | None = None) -> Tensor:
        keys, values = (kv.keys(layer), kv.values(layer)) if self.upcast is None else self.upcast(layer, kv)
        out: Tensor = flash_attn_with_kvcache(
            q,
            keys,
            values,
            cache_seqlens=self.inputs.kv_lens_device,
            page_table=self.inputs.page_table,
            cu_seqlens_q=self.inputs.query_starts,
            max_seqlen_q=self.max_query_len,
            softmax_scale=self.spec.softmax_scale,
            causal=True,
            window_size=(window_left(self.spec.window), 0),
            num_splits=self.num_splits,
            scheduler_metadata=self.schedule,
            sinks=sinks,
        )
        return out


class FlashAttention3:
    """Implements attention.base.AttentionBackend. Planning costs the host nothing."""

    graph_safe = True
    prefill_graph_safe = True

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self._spec = spec
        self.reads_whole_pages = spec.page_size >= (_TILE_KEYS if spec.head_dim <= 128 else _TILE_KEYS // 2)
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._upcaster = PageUpcaster(spec, device) if spec.fp8_kv else None

    @property
    def upcasts(self) -> bool:
        return self._upcaster is not None

    def plan(self, inputs: AttentionInputs) -> Fa3Plan:
        longest, num_splits = int(inputs.query_lens.max()), self._num_splits(inputs)
        return Fa3Plan(
            spec=self._spec,
            inputs=inputs,
            max_query_len=longest,
            num_splits=num_splits,
            schedule=self._schedule(inputs, longest, num_splits),
            upcast=self._upcaster.for_step(inputs) if self._upcaster else None,
        )

    def _num_splits(self, inputs: AttentionInputs) -> int:
        """Return how many parts a row's keys may have, so that all multiprocessors have work.

        It never returns 0, with which FlashAttention would choose itself: its schedule then assumes that every row has
        as many queries as the longest one, but its forward uses the real numbers, so the schedule may have more parts
        than the forward has memory for.
        """
        spec, rows, longest = self._spec, len(inputs.query_lens), int(inputs.query_lens.max())
        if longest > 1 and rows * longest > _MAX_MERGED:
            return 1
        queries = int(inputs.query_lens.sum()) if inputs.graph_tokens is None else inputs.graph_tokens
        keys = inputs.kv_lens if spec.window is None else np.minimum(inputs.kv_lens, spec.window + _TILE_QUERIES)
        most = int(keys.max())
        tiles: float = -(-queries * spec.group // _TILE_QUERIES)  # bounds the memory for the parts, too
        if inputs.graph_tokens is None:  # tiles as long as those of the longest row
            tiles = max(tiles, float(keys / most @ -(-inputs.query_lens * spec.group // _TILE_QUERIES)))
        fitting = int(self._multiprocessors / (tiles * spec.num_kv_heads) + 0.1)  # a few tiles may be too many
        return max(1, min(fitting, most // _MIN_KEYS))

    def _schedule(self, inputs: AttentionInputs, max_query_len: int, num_splits: int) -> Tensor:
        """Split the work on the device. The arguments must be the same as in the plan's `forward`."""
        spec = self._spec
        schedule: Tensor = get_scheduler_metadata(
            batch_size=len(inputs.query_lens),
            max_seqlen_q=max_query_len,
            max_seqlen_k=inputs.page_table.shape[1] * spec.page_size,
            num_heads=spec.num_heads,
            num_heads_k=spec.num_kv_heads,
            headdim=spec.head_dim,
            cache_seqlens=inputs.kv_lens_device,
            qkv_dtype=spec.dtype,
            cu_seqlens_q=inputs.query_starts,
            page_size=spec.page_size,
            causal=True,
            window_size=(window_left(spec.window), 0),
            num_splits=num_splits,
        )
        return schedule
