"""Fused operations (`Ops`) in plain torch: for any device, and the reference for all kernels.

In float32 each operation does the same arithmetic as transformers' modules, in the same order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernel.base import (
    NO_BIASES,
    Activation,
    ClampedSwiGLU,
    DecodeInputs,
    DeltaHeads,
    ExpertActivation,
    ExpertBiases,
    GateActivation,
    Heads,
    LatentRows,
    Mixture,
    Norm,
    Ops,
    Routing,
    Weight,
)
from minisgl.kernel.delta_net import delta_rule
from minisgl.kernel.delta_net.recurrent_rows import ChunkedRows, SingleRows
from minisgl.quantization.levels import LevelFormat, Levels
from minisgl.quantization.rounding import Int4Grid


class DenseWeight:
    """Implements kernel.base.Weight in the model's dtype, by the products of `ops`."""

    def __init__(self, ops: Ops, tensor: Tensor) -> None:
        self._ops = ops
        self.tensor = tensor
        self.label = str(tensor.dtype).removeprefix("torch.")

    def linear(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        return self._ops.linear(x, self.tensor, bias, residual)

    def norm_linear(
        self, x: Tensor, norm: Norm | None, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        return self._ops.norm_linear(x, norm, self.tensor, bias, out)

    def norm_gated_linear(
        self, x: Tensor, norm: Norm | None, bias: Tensor | None = None, *, activation: Activation
    ) -> Tensor:
        return self._ops.norm_gated_linear(x, norm, self.tensor, bias, activation=activation)


class TorchOps:
    """Implements kernel.base.Ops."""

    def bind(self, weight: Tensor, grid: Int4Grid | None = None) -> Weight:  # noqa: ARG002
        return DenseWeight(self, weight)

    def keeps(self, form: LevelFormat, width: int, size: int, dtype: torch.dtype) -> bool:  # noqa: ARG002
        return False

    def keeps_experts(self, form: LevelFormat, width: int, size: int, dtype: torch.dtype) -> bool:  # noqa: ARG002
        return False

    def bind_levels(self, levels: Levels, dtype: torch.dtype, *, gated: bool) -> Weight:  # noqa: ARG002
        return self.bind(levels.dequantize().to(dtype))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        y = self._product(x, weight, bias)
        return y if residual is None else y.add_(residual)

    def norm_linear(
        self, x: Tensor, norm: Norm | None, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        y = self._product(x if norm is None else self.rms_norm(x, norm), weight, bias)
        return y if out is None else out.copy_(y)

    def norm_gated_linear(
        self, x: Tensor, norm: Norm | None, weight: Tensor, bias: Tensor | None = None, *, activation: Activation
    ) -> Tensor:
        return activate_and_mul(self.norm_linear(x, norm, weight, bias), activation)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def decode_inputs(
        self, slots: Tensor, tokens: Tensor, lengths: Tensor, page_table: Tensor, page_size: int, *, pages: bool
    ) -> DecodeInputs:
        kv_lens = lengths[slots]
        positions = kv_lens.long() - 1
        out_cache_loc = page_table[slots, positions // page_size].long() * page_size + positions % page_size
        table = page_table[slots] if pages else page_table[:0]
        return DecodeInputs(tokens[slots, positions].long(), positions, out_cache_loc, kv_lens, table)

    def embed(self, ids: Tensor, weight: Tensor, first: int | None = None) -> Tensor:
        if first is None:
            return F.embedding(ids, weight)
        is_here = (ids >= first) & (ids < first + len(weight))
        return F.embedding((ids - first) * is_here, weight).mul_(is_here.unsqueeze(-1))

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + norm.eps)
        return (x32 * scale).to(norm.weight.dtype).mul_(norm.weight).to(x.dtype)

    def norm_add(
        self, x: Tensor, norm: Norm, residual: Tensor, *next_norms: Norm, factor: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        y = self.rms_norm(x, norm).add_(residual)
        if factor is not None:
            y.mul_(factor)
        return y, *(self.rms_norm(y, each) for each in next_norms)

    def activate(self, gate: Tensor, up: Tensor, activation: GateActivation) -> Tensor:
        return (torch.sigmoid(gate) if activation == "sigmoid" else _activate(gate, activation)).mul_(up)

    def norm_rope_store(
        self, qkv: Tensor, heads: Heads, positions: Tensor, out_cache_loc: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        parts = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
        q, k, v = torch.split(qkv.view(len(qkv), sum(parts), -1), parts, dim=1)
        if heads.q_norm is not None:
            q = self.rms_norm(q, heads.q_norm)
        if heads.k_norm is not None:
            k = self.rms_norm(k, heads.k_norm)
        cos, sin = heads.cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        if heads.num_kv_heads:
            store(k_cache.flatten(0, 1), out_cache_loc, rotate(k, cos, sin))
            store(v_cache.flatten(0, 1), out_cache_loc, unweighted_norm(v, heads.v_eps))
        return rotate(q, cos, sin)

    def delta_step(
        self, projected: Tensor, heads: DeltaHeads, inputs: Tensor, memory: Tensor, rows: SingleRows, out: Tensor
    ) -> None:
        if rows.tokens is None:
            out.copy_(delta_rule.step(projected, heads, inputs, memory, rows))
        else:
            out[rows.tokens] = delta_rule.step(projected[rows.tokens], heads, inputs, memory, rows)

    def delta_chunks(
        self, projected: Tensor, heads: DeltaHeads, inputs: Tensor, memory: Tensor, rows: ChunkedRows, out: Tensor
    ) -> None:
        out[rows.tokens] = delta_rule.chunks(projected[rows.tokens], heads, inputs, memory, rows)

    def delta_graph_safe(self, *_: object) -> bool:
        return False  # chunks are laid out on the host

    def norm_rope_store_latent(self, rows: LatentRows, q_rope: Tensor, rotated: Tensor) -> None:
        latent, key = rows.projected.unsqueeze(1).tensor_split([len(rows.norm.weight)], dim=-1)
        cos, sin = rows.cos_sin[rows.positions].unsqueeze(1).chunk(2, dim=-1)
        stored = torch.cat((self.rms_norm(latent, rows.norm), rotate(key, cos, sin)), dim=-1)
        store(rows.cache.flatten(0, 1), rows.out_cache_loc, stored)
        rotated.copy_(rotate(q_rope, cos, sin))

    def latent_query(self, rows: LatentRows, q_nope: Tensor, q_rope: Tensor, keys: Tensor) -> Tensor:
        return latent_query(self, rows, q_nope, q_rope, keys)

    def latent_values(self, latents: Tensor, weight: Tensor) -> Tensor:
        return latent_values(latents, weight)

    def norm_router(
        self, x: Tensor, norm: Norm | None, weight: Tensor, bias: Tensor | None, gate: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return rms_norm(x) and its logits, the first part of `norm_moe`."""
        if gate is not None:
            raise ValueError("no shared expert is merged")
        normed = x if norm is None else self.rms_norm(x, norm)
        return normed, self.linear(normed.to(weight.dtype), weight, bias)

    def norm_moe(
        self,
        x: Tensor,
        norm: Norm | None,
        weight: Tensor,
        bias: Tensor | None,
        gate: Tensor | None,
        mixture: Mixture,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        normed, router_logits = self.norm_router(x, norm, weight, bias, gate)
        return normed, self.moe(normed, router_logits, mixture, residual)

    def moe(self, x: Tensor, router_logits: Tensor, mixture: Mixture, residual: Tensor | None = None) -> Tensor:
        if mixture.shared is not None:
            raise ValueError("no shared expert is merged")
        if not isinstance(mixture.w13, Tensor) or not isinstance(mixture.w2, Tensor):
            raise TypeError("packed experts are for the kernels of csrc/")
        weights, experts = route(router_logits, mixture.routing, mixture.biases.choice)
        if mixture.expert_scale is not None:
            weights = weights * mixture.expert_scale[experts]
        matrices, biases = (mixture.w13, mixture.w2), mixture.biases
        y = self._mix(x, weights, experts - mixture.first, *matrices, biases, mixture.activation)
        return y if residual is None else y.add_(residual)

    def moe_chosen(self, x: Tensor, weights: Tensor, experts: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return self._mix(x, weights, experts, w13, w2, NO_BIASES, "silu")

    def _mix(
        self,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        w13: Tensor,
        w2: Tensor,
        biases: ExpertBiases,
        activation: ExpertActivation,
    ) -> Tensor:
        top_k, held = experts.shape[1], len(w13)
        pairs = experts.where((experts >= 0) & (experts < held), held).flatten()  # others' experts last
        order = pairs.argsort(stable=True)
        tokens, weights = order // top_k, weights.flatten()[order].unsqueeze(1)
        counts = pairs.bincount(minlength=held).tolist()[:held]
        out = torch.zeros_like(x, dtype=torch.float32)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                mine = slice(start, start + count)
                w13_bias, w2_bias = (None if bias is None else bias[expert] for bias in (biases.w13, biases.w2))
                gate_up = self._product(x[tokens[mine]], w13[expert], w13_bias)
                hidden = _activate_expert(gate_up, activation)
                y = self._product(hidden, w2[expert], w2_bias)
                out.index_add_(0, tokens[mine], (y * weights[mine]).float())
                start += count
        return out.to(x.dtype)

    def begin_compiling(self, *_: object) -> None:
        pass

    def merges_shared(self, *_: object) -> bool:
        return False

    def moe_graph_safe(self, *_: object) -> bool:
        return False  # the host reads how many tokens each expert has


def latent_query(ops: Ops, rows: LatentRows, q_nope: Tensor, q_rope: Tensor, keys: Tensor) -> Tensor:
    """Compute Ops.latent_query by a product and `norm_rope_store_latent`."""
    rank = len(rows.norm.weight)
    query = q_nope.new_empty(*q_nope.shape[:2], rank + q_rope.shape[2])
    torch.bmm(q_nope.transpose(0, 1), keys, out=query[..., :rank].transpose(0, 1))
    ops.norm_rope_store_latent(rows, q_rope, query[..., rank:])
    return query


def latent_values(latents: Tensor, weight: Tensor) -> Tensor:
    """Compute Ops.latent_values."""
    out = latents.new_empty(*latents.shape[:2], weight.shape[1])
    torch.bmm(latents.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
    return out


def activate_and_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """[T, 2 * I] with the gate first -> activation(gate) * up, [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return _activate(gate, activation).mul_(up)


def _activate(gate: Tensor, activation: Activation) -> Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


def unweighted_norm(x: Tensor, eps: float | None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis; without an eps x."""
    if eps is None:
        return x
    x32 = x.float()
    return x32.mul(torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _activate_expert(gate_up: Tensor, activation: ExpertActivation) -> Tensor:
    if not isinstance(activation, ClampedSwiGLU):
        return activate_and_mul(gate_up, activation)
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * activation.alpha))


def route(router_logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[T, experts] -> the weights, in the logits' dtype, and the ids of each token's experts, both [T, top_k]."""
    softmax = routing.score == "softmax"
    scores = router_logits.softmax(-1, dtype=torch.float32) if softmax else router_logits.float().sigmoid()
    choice = scores if bias is None else scores + bias
    if routing.groups > 1:
        grouped = choice.view(len(choice), routing.groups, -1)
        best = grouped.topk(routing.group_scores).values.sum(-1).topk(routing.top_groups).indices
        competes = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, value=True)
        choice = grouped.masked_fill(~competes.unsqueeze(-1), -torch.inf).flatten(-2)
    experts = choice.topk(routing.top_k).indices
    weights = scores.gather(-1, experts)
    if routing.renormalize:
        weights /= weights.sum(-1, keepdim=True) + (0.0 if softmax else 1e-20)  # sigmoids may all be 0
    return weights.mul_(routing.scale).to(router_logits.dtype), experts


def store(cache: Tensor, out_cache_loc: Tensor, x: Tensor) -> None:
    """Write x [T, kv_heads, head_dim] to rows of the cache [slots, kv_heads, head_dim], rounded to its dtype.

    Values that are too large for 8 bits saturate at the largest value of the dtype.
    """
    if cache.dtype == x.dtype:
        cache.index_copy_(0, out_cache_loc, x)
        return
    largest = torch.finfo(cache.dtype).max
    rounded = x.clamp(-largest, largest).to(cache.dtype)
    cache.view(torch.uint8).index_copy_(0, out_cache_loc, rounded.view(torch.uint8))  # torch moves no float8 by index


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [T, heads, head_dim] with cos and sin float32 [T, 1, head_dim / 2], rotated in float32, in x's dtype."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
