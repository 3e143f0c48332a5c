"""Gated DeltaNet by the book: token by token, head by head, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernel.base import DeltaHeads, Norm


@dataclass
class Layer:
    """Heads with random weights, and states of `slots` slots that hold something."""

    heads: DeltaHeads
    inputs: Tensor
    memory: Tensor

    def copy(self) -> Layer:
        return replace(self, inputs=self.inputs.clone(), memory=self.memory.clone())


def make_layer(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, *, slots: int, dtype: torch.dtype, device: str
) -> Layer:
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    heads = DeltaHeads(
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        conv=torch.randn(4, channels, device=device) / 2,
        a_log=torch.empty(value_heads, device=device).uniform_(-5, 1),
        dt_bias=torch.randn(value_heads, device=device),
        norm=Norm(torch.rand(value_dim, device=device).add(0.5).to(dtype), 1e-6),
    )
    inputs = torch.randn(slots, 3, channels, device=device).to(dtype)
    return Layer(heads, inputs, torch.randn(slots, value_heads, key_dim, value_dim, device=device) / 4)


def projection(heads: DeltaHeads, tokens: int, dtype: torch.dtype, device: str) -> Tensor:
    width = heads.channels + heads.num_value_heads * (heads.value_dim + 2)
    return torch.randn(tokens, width, device=device).to(dtype)


def by_the_book(projected: Tensor, layer: Layer, slot: int, *, fresh: bool) -> Tensor:
    """Outputs [n, value_heads * value_dim] float64 of n tokens of one row; the slot's states move on."""
    heads = layer.heads
    keys, values, dim, size = heads.num_key_heads, heads.num_value_heads, heads.key_dim, heads.value_dim
    inputs, memory = layer.inputs[slot].double(), layer.memory[slot].double()
    if fresh:
        inputs, memory = torch.zeros_like(inputs), torch.zeros_like(memory)
    out = []
    for token in projected.double():
        qkv, z, b, a = token.split([heads.channels, values * size, values, values])
        window = torch.cat((inputs, qkv[None]))
        inputs = window[1:]
        q, k, v = F.silu((window * heads.conv.double()).sum(0)).split([keys * dim, keys * dim, values * size])
        reads = []
        for head in range(values):
            mine = slice(head // (values // keys) * dim, (head // (values // keys) + 1) * dim)
            query, key = (x[mine] / (x[mine].square().sum() + 1e-6).sqrt() for x in (q, k))
            decay = (-heads.a_log[head].double().exp() * F.softplus(a[head] + heads.dt_bias[head].double())).exp()
            state = memory[head] * decay
            state = state + torch.outer(key, b[head].sigmoid() * (v.view(values, size)[head] - key @ state))
            memory[head] = state
            reads.append(query @ state * dim**-0.5)
        read = torch.stack(reads)
        read = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + heads.norm.eps) * heads.norm.weight.double()
        out.append((read * F.silu(z.view(values, size))).flatten())
    layer.inputs[slot], layer.memory[slot] = inputs.to(layer.inputs.dtype), memory.float()
    return torch.stack(out)
