"""A decode's attention in one launch from the q, k, v product on: csrc/decode_attention.cu, for Hopper and later.

It takes the place of `Ops.norm_rope_store` and an attention backend in steps that only decode, and reads slots, lengths
and the page table where they are: nothing is planned, gathered or sent for it. What a row gets depends on its own
tokens and the number of rows of the step (of its graph), not on the other rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import AttentionShape
from minisgl.attention.division import Division, divide
from minisgl.kernel.base import Heads
from minisgl.kernel.compile import SCALAR_NAMES, Compiler, Kernel
from minisgl.kernel.many_rows import MAX_ROWS

_MAX_CLUSTER = 8  # blocks, on every GPU that has clusters
_TILE = 16  # tokens
_FAST_MEMORY = 30e9  # bytes a second, for each multiprocessor
_MAX_CHUNKS = 64  # of a row: one cluster merges them
_RECORDS = 1 << 14  # of chunks, of all rows and KV heads


class FusedDecode:
    """Compiles the kernels for one model; `rows` binds them to the rows of a step. For one stream."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._compiler = Compiler(device)
        self._shape = shape
        self._kernels: dict[tuple[int, int, int], Kernel] = {}
        about = torch.cuda.get_device_properties(device)
        self._num_sms = about.multi_processor_count
        # Two transfers a cycle; in kHz and bits. 25 GB/s for each multiprocessor of an H100, 37 of an H200.
        bytes_per_second = 2 * about.memory_clock_rate * 1000 * about.memory_bus_width / 8
        self._slow_memory = bytes_per_second / self._num_sms < _FAST_MEMORY
        floats = shape.group * (shape.head_dim + 2 * _MAX_CLUSTER)
        self._records = torch.empty(_RECORDS, floats, dtype=torch.float32, device=device)
        self._counters = torch.zeros(2 * _RECORDS, dtype=torch.int32, device=device)

    def begin_compiling(self, max_rows: int) -> None:
        """In threads, the kernels of steps of up to so many rows; otherwise each is compiled when it is needed."""
        expected = {self._divide(rows).compiled_for for rows in range(1, max_rows + 1)}
        self._compiler.begin("decode_attention.cu", map(self._macros, expected))

    def rows(self, slots: Tensor, kv_lens: Tensor, page_table: Tensor) -> FusedRows:
        """slots [B] int64 and kv_lens [B] int32 of the rows; page_table [slots, pages] int32 of the slots."""
        division = self._divide(len(slots))
        kernel = self._kernel(division.compiled_for)
        scale = self._shape.softmax_scale
        return FusedRows(kernel, division, scale, self._records, self._counters, slots, kv_lens, page_table)

    def _divide(self, rows: int) -> Division:
        shape = self._shape
        spills = not shape.fp8_kv and (shape.page_size < _TILE or shape.group == 1)
        return divide(
            rows * shape.num_kv_heads,
            self._num_sms,
            shape.head_dim,
            spills=spills,
            fp8=shape.fp8_kv,
            slow_memory=self._slow_memory,
        )

    def _kernel(self, key: tuple[int, int, int]) -> Kernel:
        if key not in self._kernels:
            (self._kernels[key],) = self._compiler.compile(
                "decode_attention.cu", ("decode_attention",), begins_early=True, **self._macros(key)
            )
        return self._kernels[key]

    def _macros(self, key: tuple[int, int, int]) -> dict[str, Any]:
        shape, (cluster, warps, blocks_of_sm) = self._shape, key
        return {
            "SCALAR": SCALAR_NAMES[shape.dtype],
            "CACHE": SCALAR_NAMES[shape.kv_dtype],
            "NORM_SCALAR": SCALAR_NAMES[shape.norm_dtype or shape.dtype],
            "HEAD_DIM": shape.head_dim,
            "GROUP": shape.group,
            "PAGE_SIZE": shape.page_size,
            "CLUSTER": cluster,
            "WARPS": warps,
            "BLOCKS_OF_SM": blocks_of_sm,
        }


class FusedRows:
    """The fused attention of one step's rows."""

    def __init__(
        self,
        kernel: Kernel,
        division: Division,
        scale: float,
        records: Tensor,
        counters: Tensor,
        slots: Tensor,
        kv_lens: Tensor,
        page_table: Tensor,
    ) -> None:
        self._kernel = kernel
        self._division = division
        self._scale = scale
        self._records = records
        self._counters = counters
        self._slots = slots
        self._kv_lens = kv_lens
        self._page_table = page_table

    def forward(self, qkv: Tensor, heads: Heads, k_cache: Tensor, v_cache: Tensor, window: int | None) -> Tensor:
        """qkv [B, (heads + 2 * kv_heads) * head_dim] -> [B, heads, head_dim]; the new k and v are in the caches."""
        division, rows = self._division, len(qkv)
        out = qkv.new_empty((rows, heads.num_heads, k_cache.shape[-1]))
        units = rows * heads.num_kv_heads
        max_chunks = max(1, min(_RECORDS // units, _MAX_CHUNKS))
        cuts = max_chunks > 1
        helpers = max(division.helpers // heads.num_kv_heads, 1) if cuts else 0  # of each KV head
        self._kernel(
            (1, heads.num_kv_heads, rows + helpers),
            division.warps * 32,
            qkv.data_ptr(),
            self._slots.data_ptr(),
            self._kv_lens.data_ptr(),
            self._page_table.data_ptr(),
            np.int64(self._page_table.stride(0)),
            np.int32(rows),
            heads.cos_sin.data_ptr(),
            0 if heads.q_norm is None else heads.q_norm.weight.data_ptr(),
            0 if heads.k_norm is None else heads.k_norm.weight.data_ptr(),
            np.float32(0.0 if heads.q_norm is None else heads.q_norm.eps),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            out.data_ptr(),
            np.float32(self._scale),
            np.int32(window or 0),
            np.int32(division.shares),
            np.int32(division.least if cuts else np.iinfo(np.int32).max // 2),
            np.int32(division.most),
            np.int32(max_chunks),
            self._records.data_ptr(),
            self._counters.data_ptr(),
            cluster=division.cluster,
            early=rows <= MAX_ROWS,
        )
        return out
