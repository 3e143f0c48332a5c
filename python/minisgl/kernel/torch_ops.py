"""The operations between the matrix products in plain torch: any device, and the reference of all kernels.

In float32 each is the same arithmetic as transformers' modules, in the same order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Few CPUs multiply 16-bit floats. From so many rows on, turning the weight into float32 costs less than it saves.
_MANY_ROWS = 4
_BLOCK = 1 << 20  # values of a weight in float32 at a time: they stay in the cache


class TorchOps:
    """Implements kernel.base.Ops."""

    moe_graph_safe = False  # the host reads how many tokens each expert has

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.device.type == "cpu" and x.dtype != torch.float32:
            if len(x) >= _MANY_ROWS:
                return _linear_in_float32(x, weight, bias)
            if len(x) == 1:  # reads the weight faster than a product of matrices does
                row = weight.mv(x[0]) if bias is None else torch.addmv(bias, weight, x[0])
                return row.unsqueeze(0)
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        return (x32 * scale).to(x.dtype).mul_(weight)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps), residual

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

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
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
        q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        if q_weight is not None:
            q = self.rms_norm(q, q_weight, eps)
        if k_weight is not None:
            k = self.rms_norm(k, k_weight, eps)
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        k_cache.flatten(0, 1).index_copy_(0, kv_slots, _rotate(k, cos, sin))
        v_cache.flatten(0, 1).index_copy_(0, kv_slots, v)
        return _rotate(q, cos, sin)

    def moe(
        self, x: Tensor, router_logits: Tensor, w13: Tensor, w2: Tensor, *, top_k: int, renormalize: bool
    ) -> Tensor:
        weights, experts = route(router_logits, top_k, renormalize)
        order = experts.flatten().argsort(stable=True)
        tokens, weights = order // top_k, weights.flatten()[order].unsqueeze(1)
        counts = experts.flatten().bincount(minlength=len(w13)).tolist()
        out = torch.zeros_like(x, dtype=torch.float32)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                mine = slice(start, start + count)
                hidden = self.silu_and_mul(self.linear(x[tokens[mine]], w13[expert], None))
                out.index_add_(0, tokens[mine], (self.linear(hidden, w2[expert], None) * weights[mine]).float())
                start += count
        return out.to(x.dtype)


def _linear_in_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.new_empty((len(x), len(weight)))
    rows, wide = max(_BLOCK // weight.shape[1], 1), x.float()
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        out[:, part] = F.linear(wide, weight[part].float(), None if bias is None else bias[part].float())
    return out


def route(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """[T, experts] -> the weights, in the logits' dtype, and the ids of each token's experts, both [T, top_k]."""
    weights, experts = router_logits.softmax(-1, dtype=torch.float32).topk(top_k)
    if renormalize:
        weights /= weights.sum(-1, keepdim=True)
    return weights.to(router_logits.dtype), experts


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim] with cos and sin float32 [T, 1, head_dim / 2]: rotated in float32, in x's dtype."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
