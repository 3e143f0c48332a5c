"""Self-test of attention backends: a small step with known answers, run before a backend is used, and by `doctor`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.backends.torch_backend import TorchAttention
from minisgl.attention.base import AttentionBackend, AttentionInputs, AttentionSpec, ExpandingPlan
from minisgl.error_text import summary
from minisgl.kernel.base import LatentDims
from minisgl.kvcache.kv_pool import KVPool
from minisgl.kvcache.layout import KVLayout

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")

TOLERANCE = 2e-2  # relative to the norm of a result in 16 bits
_PAGES_OF_ROW = 4
_WINDOW = 24


class AttentionTest:
    """Three rows over random pages in shuffled order; in a prefill, each row's queries follow cached tokens.

    `pool` has K and V of one layer, `exact` the same values in float32. With latents, a head's key and value are the
    first dimensions of the latent, so a plan that expands them must give the first dimensions of the answer. One chunk
    is long enough to be expanded.
    """

    def __init__(self, spec: AttentionSpec, device: torch.device, role: Role = "decode") -> None:
        generator = torch.Generator(device).manual_seed(0)
        longest = _PAGES_OF_ROW * max(spec.page_size, 16 if spec.latent is None else 32)
        width = -(-longest // spec.page_size)
        self.spec = spec
        self.kv_lens = np.array([longest - 3, 1, 17], dtype=np.int32)
        chunk = 20 if spec.latent is None else 70
        self.query_lens = np.array([1, 1, 1] if role == "decode" else [chunk, 1, 17], dtype=np.int32)
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
        if spec.latent is not None:
            self.q[..., spec.latent.nope : spec.latent.rank] = 0

    @property
    def q(self) -> Tensor:
        """Queries, [T, heads, head_dim]."""
        heads = self.qkv[:, : self.spec.num_heads * self.spec.head_dim]
        return heads.view(len(heads), self.spec.num_heads, self.spec.head_dim)

    def run(self, backend: AttentionBackend) -> Tensor:
        """Return the backend's answer, [T, heads, head_dim or fewer]."""
        plan = backend.plan(self.inputs)
        if self.spec.latent is not None and isinstance(plan, ExpandingPlan):
            return self._run_expanded(plan, self.spec.latent)
        return plan.forward(0, self.q, self.pool, self.sinks)

    def _run_expanded(self, plan: ExpandingPlan, dims: LatentDims) -> Tensor:
        rank, _, nope, value = dims
        q, device = self.q, self.qkv.device
        tokens, heads, _ = q.shape
        both = torch.cat((q[..., :nope].flatten(1), q[..., rank:].flatten(1)), dim=1)
        q_nope, q_rope = (part.view(tokens, heads, -1) for part in both.tensor_split([heads * nope], dim=1))
        kept = torch.cat((torch.arange(nope, device=device), torch.arange(value, device=device)))
        weight = torch.eye(rank, dtype=q.dtype, device=device)[kept].expand(heads, -1, -1).contiguous()
        out = q.new_empty(tokens, heads, value)
        plan.forward_expanded(0, q_nope, q_rope, weight, self.pool, out)
        if (few := plan.absorbed) is not None:
            out[few.tokens] = few.plan.forward(0, q[few.tokens], self.pool)[..., :value]
        return out

    def right(self, q: Tensor) -> Tensor:
        """Return the answer for these queries in float32."""
        return TorchAttention(self.spec).plan(self.inputs).forward(0, q.float(), self.exact, self.sinks)


def self_test_error(
    make: Callable[[AttentionSpec], AttentionBackend], spec: AttentionSpec, device: torch.device, role: Role
) -> str | None:
    """Return in one line why a backend must not be used for these layers, or None.

    A window is replaced by a short one, because no row of the test would be longer than the real one.
    """
    if spec.window is not None:
        spec = replace(spec, window=_WINDOW)
    try:
        with torch.inference_mode():
            test = AttentionTest(spec, device, role)
            have = test.run(make(spec)).float()
            want = test.right(test.q)[..., : have.shape[-1]]
            error = float((have - want).norm() / want.norm())
    except Exception as raised:  # whatever a package raises that has no kernel for this spec or GPU
        return f"it does not run here: {summary(raised)}"
    if not error < TOLERANCE:  # NaN is refused, too
        seen = "" if spec.window is None else " with a sliding window"
        return f"it computes something else here{seen} (relative error {error:.1e})"
    return None
