"""The fused operations on the CUDA kernels of csrc/. What a kernel cannot do (odd sizes, no rows) runs in torch."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernel.compile import SCALAR_NAMES, Compiler, Kernel
from minisgl.kernel.torch_ops import TorchOps

_VECTOR_BYTES = 16
_WARPS = 4  # of a block that works warp by warp


class CudaOps:
    """Implements kernel.base.Ops. Kernels are compiled at the first use of a dtype and head size."""

    moe_graph_safe = False  # it runs in torch, which asks the device how many tokens each expert has

    def __init__(self, device: torch.device) -> None:
        self._compiler = Compiler(device)
        self._torch = TorchOps()
        self._norms: dict[torch.dtype, list[Kernel]] = {}
        self._silu: dict[torch.dtype, Kernel] = {}
        self._rope: dict[tuple[torch.dtype, int], Kernel] = {}

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        size = x.shape[-1]
        if not _vectorizes(x, size) or not len(x):
            return self._torch.rms_norm(x, weight, eps)
        out = torch.empty_like(x)
        kernel = self._norm_kernels(x.dtype)[0]
        kernel(
            (x.numel() // size,),
            _row_threads(x, size),
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            np.int32(size),
            np.float32(eps),
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        size = x.shape[-1]
        if not _vectorizes(x, size) or not residual.is_contiguous() or not len(x):
            return self._torch.add_rms_norm(x, residual, weight, eps)
        out = torch.empty_like(x)
        kernel = self._norm_kernels(x.dtype)[1]
        kernel(
            (x.numel() // size,),
            _row_threads(x, size),
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            np.int32(size),
            np.float32(eps),
        )
        return out, residual

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        tokens, width = gate_up.shape
        if not _vectorizes(gate_up, width // 2):
            return self._torch.silu_and_mul(gate_up)
        out = gate_up.new_empty((tokens, width // 2))
        vectors = out.numel() * out.itemsize // _VECTOR_BYTES
        kernel = self._silu_kernel(gate_up.dtype)
        kernel(
            (min(-(-vectors // 256), 1 << 16),),
            256,
            gate_up.data_ptr(),
            out.data_ptr(),
            np.int64(tokens),
            np.int32(width // 2),
        )
        return out

    def norm_rope_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv_slots: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
    ) -> Tensor:
        tokens = qkv.shape[0]
        head_dim = k_cache.shape[-1]
        if head_dim % 64 or head_dim > 256 or not qkv.is_contiguous():
            return self._torch.norm_rope_store(
                qkv,
                positions,
                cos_sin,
                kv_slots,
                k_cache,
                v_cache,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                q_weight=q_weight,
                k_weight=k_weight,
                eps=eps,
            )
        q = qkv.new_empty((tokens, num_heads, head_dim))
        units = tokens * (num_heads + 2 * num_kv_heads)
        kernel = self._rope_kernel(qkv.dtype, head_dim)
        kernel(
            (-(-units // _WARPS),),
            _WARPS * 32,
            qkv.data_ptr(),
            positions.data_ptr(),
            cos_sin.data_ptr(),
            kv_slots.data_ptr(),
            q.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            0 if q_weight is None else q_weight.data_ptr(),
            0 if k_weight is None else k_weight.data_ptr(),
            np.int64(tokens),
            np.int32(num_heads),
            np.int32(num_kv_heads),
            np.float32(eps),
        )
        return q

    def moe(
        self, x: Tensor, router_logits: Tensor, w13: Tensor, w2: Tensor, *, top_k: int, renormalize: bool
    ) -> Tensor:
        return self._torch.moe(x, router_logits, w13, w2, top_k=top_k, renormalize=renormalize)

    def _norm_kernels(self, dtype: torch.dtype) -> list[Kernel]:
        if dtype not in self._norms:
            self._norms[dtype] = self._compiler.compile(
                "norm.cu", ("rms_norm", "add_rms_norm"), SCALAR=SCALAR_NAMES[dtype]
            )
        return self._norms[dtype]

    def _silu_kernel(self, dtype: torch.dtype) -> Kernel:
        if dtype not in self._silu:
            (self._silu[dtype],) = self._compiler.compile("silu.cu", ("silu_and_mul",), SCALAR=SCALAR_NAMES[dtype])
        return self._silu[dtype]

    def _rope_kernel(self, dtype: torch.dtype, head_dim: int) -> Kernel:
        key = dtype, head_dim
        if key not in self._rope:
            (self._rope[key],) = self._compiler.compile(
                "rope.cu", ("norm_rope_store",), SCALAR=SCALAR_NAMES[dtype], HEAD_DIM=head_dim
            )
        return self._rope[key]


def _vectorizes(x: Tensor, size: int) -> bool:
    """Rows of this size can be read 16 bytes at a time."""
    return x.is_contiguous() and size * x.itemsize % _VECTOR_BYTES == 0


def _row_threads(x: Tensor, size: int) -> int:
    """Threads for one row: one for each 16 bytes, in whole warps, at most 1024."""
    vectors = size * x.itemsize // _VECTOR_BYTES
    return min(-(-vectors // 32) * 32, 1024)
