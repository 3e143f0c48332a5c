"""A decode's attention in one launch from the q, k, v product on: csrc/decode_attention.cu, for Hopper and later.

It takes the place of `Ops.norm_rope_store` and an attention backend in steps that only decode, and reads slots, lengths
and the page table where they are: nothing is planned, gathered or sent for it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import AttentionShape
from minisgl.kernel.base import Heads
from minisgl.kernel.compile import SCALAR_NAMES, Compiler, Kernel

_MAX_GROUP = 8  # query heads of a KV head: rows of a tensor-core instruction
_MAX_CLUSTER = 8  # blocks, on every GPU that has clusters


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


class FusedDecode:
    """Compiles the kernels for one model; `rows` binds them to the rows of a step."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._compiler = Compiler(device)
        self._shape = shape
        self._kernels: dict[tuple[int, int, int], Kernel] = {}
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count

    def rows(self, slots: Tensor, lengths: Tensor, page_table: Tensor) -> FusedRows:
        """slots [B] int64; lengths [slots] and page_table [slots, pages] int32, of the slots."""
        units = len(slots) * self._shape.num_kv_heads
        cluster = 1
        while cluster < _MAX_CLUSTER and cluster * units <= self._num_sms:
            cluster *= 2
        warps, blocks_of_sm = 4, 3
        if 2 * cluster * units <= self._num_sms:
            warps, blocks_of_sm = 8, 1  # a lone row leaves multiprocessors idle
        elif 3 * self._num_sms < cluster * units <= 4 * self._num_sms:
            blocks_of_sm = 4  # some registers are spilled, but no block has to wait for another's end
        return FusedRows(self._kernel(warps, cluster, blocks_of_sm), warps, cluster, slots, lengths, page_table)

    def _kernel(self, warps: int, cluster: int, blocks_of_sm: int) -> Kernel:
        shape, key = self._shape, (warps, cluster, blocks_of_sm)
        if key not in self._kernels:
            (self._kernels[key],) = self._compiler.compile(
                "decode_attention.cu",
                ("decode_attention",),
                begins_early=True,
                SCALAR=SCALAR_NAMES[shape.dtype],
                HEAD_DIM=shape.head_dim,
                GROUP=shape.group,
                PAGE_SIZE=shape.page_size,
                CLUSTER=cluster,
                WARPS=warps,
                BLOCKS_OF_SM=blocks_of_sm,
            )
        return self._kernels[key]


class FusedRows:
    """The fused attention of one step's rows."""

    def __init__(
        self, kernel: Kernel, warps: int, cluster: int, slots: Tensor, lengths: Tensor, page_table: Tensor
    ) -> None:
        self._kernel = kernel
        self._warps = warps
        self._cluster = cluster
        self._slots = slots
        self._lengths = lengths
        self._page_table = page_table

    def forward(self, qkv: Tensor, heads: Heads, k_cache: Tensor, v_cache: Tensor, window: int | None) -> Tensor:
        """qkv [B, (heads + 2 * kv_heads) * head_dim] -> [B, heads, head_dim]; the new k and v are in the caches."""
        out = qkv.new_empty((len(qkv), heads.num_heads, k_cache.shape[-1]))
        self._kernel(
            (1, heads.num_kv_heads, len(qkv)),
            self._warps * 32,
            qkv.data_ptr(),
            self._slots.data_ptr(),
            self._lengths.data_ptr(),
            self._page_table.data_ptr(),
            np.int64(self._page_table.stride(0)),
            heads.cos_sin.data_ptr(),
            0 if heads.q_norm is None else heads.q_norm.weight.data_ptr(),
            0 if heads.k_norm is None else heads.k_norm.weight.data_ptr(),
            np.float32(0.0 if heads.q_norm is None else heads.q_norm.eps),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            out.data_ptr(),
            np.int32(window or 0),
            cluster=self._cluster,
        )
        return out
