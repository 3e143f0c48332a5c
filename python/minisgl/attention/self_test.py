"""A small step of known answers, which a backend must get right before it is used (by an engine, by `doctor`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import AttentionBackend, AttentionInputs, AttentionSpec
from minisgl.attention.torch_backend import TorchAttention
from minisgl.kernel.availability import one_line
from minisgl.kvcache.layout import KVLayout
from minisgl.kvcache.pool import KVPool

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")

TOLERANCE = 2e-2  # of the norm of a result in 16 bits
_PAGES_OF_ROW = 4
_WINDOW = 24


class AttentionTest:
    """Three rows over random pages that lie in another order; a prefill's rows begin behind what is cached.

    `pool` holds K and V of one layer, `exact` the same values in float32.
    """

    def __init__(self, spec: AttentionSpec, device: torch.device, role: Role = "decode") -> None:
        generator = torch.Generator(device).manual_seed(0)
        longest = _PAGES_OF_ROW * max(spec.page_size, 16)
        width = -(-longest // spec.page_size)
        self.spec = spec
        self.kv_lens = np.array([longest - 3, 1, 17], dtype=np.int32)
        self.query_lens = np.ones(3, dtype=np.int32) if role == "decode" else np.array([20, 1, 17], dtype=np.int32)
        layout = KVLayout(spec.page_size, (spec.kv_stores(),), spec.kv_stores(spec.dtype) if spec.fp8_kv else ())
        self.pool = KVPool(layout, 3 * width, device)
        self.exact = KVPool(KVLayout(spec.page_size, (spec.kv_stores(torch.float32),)), 3 * width, device)
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
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        self.sinks = torch.linspace(-2, 4, spec.num_heads, device=device).to(spec.dtype) if spec.has_sinks else None
        self.qkv = torch.randn(int(starts[-1]), width, device=device, generator=generator).to(spec.dtype)

    @property
    def q(self) -> Tensor:
        """Queries, [T, heads, head_dim]."""
        heads = self.qkv[:, : self.spec.num_heads * self.spec.head_dim]
        return heads.reshape(len(heads), self.spec.num_heads, self.spec.head_dim)

    def run(self, backend: AttentionBackend) -> Tensor:
        """Return the backend's answer, [T, heads, head_dim]."""
        return backend.plan(self.inputs).forward(0, self.q, self.pool, self.sinks)

    def right(self, q: Tensor) -> Tensor:
        """Return the answer for these queries in float32."""
        return TorchAttention(self.spec).plan(self.inputs).forward(0, q.float(), self.exact, self.sinks)


def self_test_error(
    make: Callable[[AttentionSpec], AttentionBackend], spec: AttentionSpec, device: torch.device, role: Role
) -> str | None:
    """Return in one line why a backend must not be used for these layers, or None.

    A window is tried as a short one, or no row of the test would be longer than it.
    """
    if spec.window is not None:
        spec = replace(spec, window=_WINDOW)
    try:
        with torch.inference_mode():
            test = AttentionTest(spec, device, role)
            have, want = test.run(make(spec)).float(), test.right(test.q)
            error = float((have - want).norm() / want.norm())
    except Exception as raised:  # whatever a package raises that has no kernel for this spec or GPU
        return f"it does not run here: {one_line(raised)}"
    if not error < TOLERANCE:  # also refuses NaN
        seen = "" if spec.window is None else " with a sliding window"
        return f"it computes something else here{seen} (relative error {error:.1e})"
    return None
