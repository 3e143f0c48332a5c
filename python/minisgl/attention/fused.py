"""A decode's attention in one launch from the q, k, v product on: csrc/decode_attention.cu, for Hopper and later.

It takes the place of `Ops.norm_rope_store` and an attention backend in steps that only decode, and reads slots, lengths
and the page table where they are: nothing is planned, gathered or sent for it. What a row gets depends on its own
tokens and the number of rows of the step (of its graph), not on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import AttentionShape
from minisgl.kernel.base import Heads
from minisgl.kernel.compile import SCALAR_NAMES, Compiler, Kernel
from minisgl.kernel.many_rows import MAX_ROWS

_MAX_GROUP = 8  # query heads of a KV head: rows of a tensor-core instruction
_MAX_CLUSTER = 8  # blocks, on every GPU that has clusters
_TILE = 16  # tokens
_MAX_CHUNKS = 64  # of a row: one cluster merges them
_RECORDS = 1 << 14  # of chunks, of all rows and KV heads


def fused_decode_missing(shape: AttentionShape, capability: tuple[int, int]) -> str | None:
    """Why attention cannot be fused for this model and GPU, or None."""
    if capability < (9, 0):
        return "it needs thread block clusters (compute capability 9.0)"
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return "it is for bfloat16 and float16"
    if shape.head_dim not in (64, 128):
        return f"it is for heads of 64 or 128 dimensions, not {shape.head_dim}"
    if shape.num_heads % shape.num_kv_heads or shape.group > _MAX_GROUP:
        return f"it is for up to {_MAX_GROUP} query heads a KV head, not {shape.group}"
    if shape.page_size & (shape.page_size - 1):
        return f"it is for pages of a power of two, not {shape.page_size}"
    return None


@dataclass(frozen=True, slots=True)
class Division:
    """How a step of so many rows is divided among blocks: the kernel's launch, and how it cuts long rows."""

    cluster: int  # blocks that share a KV head of a row
    warps: int  # of a block
    blocks_of_sm: int
    helpers: int  # clusters besides the rows' own, which take what is cut off
    shares: int = 1  # a row of more than twice `least` is cut into so many chunks, or as `least` and `most` demand
    least: int = 256  # tiles of a chunk
    most: int = 256

    @property
    def compiled_for(self) -> tuple[int, int, int]:
        """What of this the kernel's code depends on."""
        return self.cluster, self.warps, self.blocks_of_sm


def divide(units: int, num_sms: int, *, spills: bool, fp8: bool) -> Division:
    """For `units` rows times KV heads: what was fastest on 132 multiprocessors (docs/log.md).

    Few rows share the multiprocessors by clusters. Otherwise rows of up to 8,192 tokens stay whole, for equal rows
    are best left alone; and there are enough helpers to keep the memory busy with what the others leave. `spills`: the
    kernel does not fit into 128 registers. `fp8`: K and V have 8 bits, of which a block has half the bytes under way.
    """
    at_once = num_sms // 5  # clusters of eight large blocks: some groups of multiprocessors have room for three
    if 16 * units <= num_sms:
        return Division(8, 6, 2, helpers=at_once - units, shares=at_once // units, least=80, most=1 << 20)
    if units <= at_once:
        return Division(8, 6, 2, helpers=16, least=512, most=512)
    if 4 * units <= num_sms:
        return Division(8, 4, 3, helpers=32)
    if 2 * units <= num_sms:
        return Division(4, 4, 3, helpers=128)
    if units <= num_sms:
        return Division(2, 6, 2, helpers=64, most=512)
    if fp8:
        if 2 * units <= 5 * num_sms:
            return Division(2, 4, 4, helpers=128)
        return Division(1, 2, 8, helpers=256) if units > 10 * num_sms else Division(1, 4, 4, helpers=256)
    if 2 * units <= 3 * num_sms:
        return Division(2, 4, 3, helpers=128)
    if spills:
        return Division(1, 4, 3, helpers=256)
    if units <= 2 * num_sms or 3 * num_sms < units <= 4 * num_sms:  # all at once, or in two waves
        return Division(1, 8, 2, helpers=256)
    if units > 10 * num_sms:  # so many waves that the last counts for little
        return Division(1, 4, 4, helpers=256)
    # So many that the last of the waves in which they work leaves the fewest places empty.
    blocks = min((3, 4), key=lambda blocks: -(-units // (blocks * num_sms)) * blocks)
    return Division(1, 4, blocks, helpers=256)


class FusedDecode:
    """Compiles the kernels for one model; `rows` binds them to the rows of a step. For one stream."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._compiler = Compiler(device)
        self._shape = shape
        self._kernels: dict[tuple[int, int, int], Kernel] = {}
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        floats = shape.group * (shape.head_dim + 2 * _MAX_CLUSTER)
        self._records = torch.empty(_RECORDS, floats, dtype=torch.float32, device=device)
        self._counters = torch.zeros(2 * _RECORDS, dtype=torch.int32, device=device)

    def begin_compiling(self, max_rows: int) -> None:
        """In threads, the kernels of steps of up to so many rows; otherwise each is compiled when it is needed."""
        expected = {self._divide(rows).compiled_for for rows in range(1, max_rows + 1)}
        self._compiler.begin("decode_attention.cu", map(self._macros, expected))

    def rows(self, slots: Tensor, lengths: Tensor, page_table: Tensor) -> FusedRows:
        """slots [B] int64; lengths [slots] and page_table [slots, pages] int32, of the slots."""
        division = self._divide(len(slots))
        kernel = self._kernel(division.compiled_for)
        return FusedRows(kernel, division, self._records, self._counters, slots, lengths, page_table)

    def _divide(self, rows: int) -> Division:
        shape = self._shape
        spills = not shape.fp8_kv and (shape.page_size < _TILE or shape.group == 1)
        return divide(rows * shape.num_kv_heads, self._num_sms, spills=spills, fp8=shape.fp8_kv)

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
        records: Tensor,
        counters: Tensor,
        slots: Tensor,
        lengths: Tensor,
        page_table: Tensor,
    ) -> None:
        self._kernel = kernel
        self._division = division
        self._records = records
        self._counters = counters
        self._slots = slots
        self._lengths = lengths
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
            self._lengths.data_ptr(),
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
