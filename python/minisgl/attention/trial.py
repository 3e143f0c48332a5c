"""A small step of known answers, which a backend must get right before it is used (`select`, `minisgl doctor`)."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import AttentionBackend, AttentionInputs, AttentionShape
from minisgl.attention.torch_backend import TorchAttention
from minisgl.kernel.select import one_line
from minisgl.kvcache.pool import KVPool

Role = Literal["prefill", "decode"]

TOLERANCE = 2e-2  # of the norm of a result in 16 bits
_PAGES_OF_ROW = 4
_WINDOW = 24


class AttentionTrial:
    """Three rows over random pages that lie in another order; a prefill's rows begin behind what is cached.

    `pool` holds K and V of one layer, `exact` the same values in float32.
    """

    def __init__(self, shape: AttentionShape, device: torch.device, role: Role = "decode") -> None:
        generator = torch.Generator(device).manual_seed(0)
        longest = _PAGES_OF_ROW * max(shape.page_size, 16)
        width = -(-longest // shape.page_size)
        self.shape = shape
        self.kv_lens = np.array([longest - 3, 1, 17], dtype=np.int32)
        self.query_lens = np.ones(3, dtype=np.int32) if role == "decode" else np.array([20, 1, 17], dtype=np.int32)
        layout = dataclasses.replace(shape.kv_layout(num_layers=1), widened=shape.dtype if shape.fp8_kv else None)
        self.pool = KVPool(layout, 3 * width, device)
        self.exact = KVPool(dataclasses.replace(layout, dtype=torch.float32, widened=None), 3 * width, device)
        for stored, exact in ((self.pool.keys(0), self.exact.keys(0)), (self.pool.values(0), self.exact.values(0))):
            stored.copy_(torch.randn(stored.shape, device=device, generator=generator))
            exact.copy_(stored)
        starts = np.cumsum([0, *self.query_lens])
        self.inputs = AttentionInputs(
            query_lens=self.query_lens,
            kv_lens=self.kv_lens,
            query_starts=torch.from_numpy(starts.astype(np.int32)).to(device),
            kv_lens_device=torch.from_numpy(self.kv_lens).to(device),
            page_table=torch.arange(3 * width, dtype=torch.int32, device=device).flip(0).view(3, width).contiguous(),
        )
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        self.qkv = torch.randn(int(starts[-1]), width, device=device, generator=generator).to(shape.dtype)

    @property
    def q(self) -> Tensor:
        """[T, heads, head_dim]"""
        heads = self.qkv[:, : self.shape.num_heads * self.shape.head_dim]
        return heads.reshape(len(heads), self.shape.num_heads, self.shape.head_dim)

    def run(self, backend: AttentionBackend, window: int | None = None) -> Tensor:
        """The backend's answer, [T, heads, head_dim]."""
        return backend.forward(0, self.q, self.pool, backend.plan(self.inputs), window)

    def right(self, q: Tensor, window: int | None = None) -> Tensor:
        """The answer for these queries in float32."""
        oracle = TorchAttention(self.shape.page_size, scale=self.shape.scale)
        return oracle.forward(0, q.float(), self.exact, oracle.plan(self.inputs), window)


def trial_error(backend: AttentionBackend, shape: AttentionShape, device: torch.device, role: Role) -> str | None:
    """Why a backend must not be used here, in one line, or None. It is run, also with a window if the model has one."""
    try:
        with torch.inference_mode():
            trial = AttentionTrial(shape, device, role)
            for window in (None, _WINDOW) if shape.windowed else (None,):
                have, want = trial.run(backend, window).float(), trial.right(trial.q, window)
                error = float((have - want).norm() / want.norm())
                if not error < TOLERANCE:  # also refuses NaN
                    seen = "" if window is None else " with a sliding window"
                    return f"it computes something else here{seen} (relative error {error:.1e})"
    except Exception as error:  # whatever a package raises that has no kernel for this shape or GPU
        return f"it does not run here: {one_line(error)}"
    return None
