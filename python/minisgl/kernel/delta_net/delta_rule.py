"""Gated DeltaNet in torch: Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.

A value head has a memory S [key_dim, value_dim], which each token decays, corrects and reads:

    S = exp(g) S;  S = S + k (beta (v - k' S))';  o = q' S

with unit vectors q and k, a step size beta in (0, 1) and the logarithm g < 0 of the decay. q, k and v come from a
causal convolution over the last few inputs. Everything is computed in float32. A row of one token is computed by these
equations. Rows of several tokens are computed in chunks, by the WY form of the paper's section 3.3: within a chunk the
corrections solve a triangular system, and one chunk passes only S to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernel.base import DeltaHeads
from minisgl.kernel.delta_net.recurrent_rows import ChunkedRows, PaddedChunks, SingleRows

_EPS = 1e-6  # added to the square of a vector's length


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Parts of a projection, whose leading axes `...` are kept; each of the h key heads has g value heads."""

    qkv: Tensor  # [..., channels]
    z: Tensor  # [..., value_heads, value_dim]
    beta: Tensor  # [..., h, g] float32
    decay: Tensor  # [..., h, g] float32: logarithm


def _split(projected: Tensor, heads: DeltaHeads) -> _Inputs:
    values = heads.num_value_heads
    group = (heads.num_key_heads, values // heads.num_key_heads)
    qkv, z, b, a = torch.split(projected, [heads.channels, values * heads.value_dim, values, values], dim=-1)
    decay = -heads.a_log.exp() * F.softplus(a.float() + heads.dt_bias)
    return _Inputs(
        qkv,
        z.view(*z.shape[:-1], values, heads.value_dim),
        b.float().sigmoid().view(*b.shape[:-1], *group),
        decay.view(*a.shape[:-1], *group),
    )


def _split_heads(mixed: Tensor, heads: DeltaHeads) -> tuple[Tensor, Tensor, Tensor]:
    """[..., channels] float32 -> unit vectors q, scaled, and k [..., h, key_dim], and v [..., h, g, value_dim]."""
    h, size = heads.num_key_heads, heads.key_dim
    q, k, v = torch.split(mixed, [h * size, h * size, heads.num_value_heads * heads.value_dim], dim=-1)
    q, k = (_unit(x.view(*x.shape[:-1], h, size)) for x in (q, k))
    return q * size**-0.5, k, v.view(*v.shape[:-1], h, heads.num_value_heads // h, heads.value_dim)


def _states(memory: Tensor, slots: Tensor, fresh: Tensor, heads: DeltaHeads) -> Tensor:
    """Copies [R, h, g, key_dim, value_dim] of the rows' memories; zeros where `fresh` [R, 1, 1]."""
    group = heads.num_value_heads // heads.num_key_heads
    states = memory[slots].masked_fill_(fresh.unsqueeze(-1), 0)
    return states.view(len(slots), heads.num_key_heads, group, *memory.shape[2:])


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def _finish(attended: Tensor, z: Tensor, heads: DeltaHeads) -> Tensor:
    """norm(attended) * silu(z), [T, value_heads, value_dim] float32 -> [T, value_heads * value_dim] in z's dtype."""
    scale = torch.rsqrt(attended.square().mean(-1, keepdim=True) + heads.norm.eps)
    return (attended * scale * heads.norm.weight.float() * F.silu(z.float())).to(z.dtype).flatten(-2)


def step(projected: Tensor, heads: DeltaHeads, inputs: Tensor, memory: Tensor, rows: SingleRows) -> Tensor:
    """Compute rows of one token: projected [R, width] -> [R, value_heads * value_dim].

    Updates `inputs` [slots, conv_size - 1, channels] and `memory` [slots, value_heads, key_dim, value_dim] float32.
    The work does not depend on data, so a CUDA graph can capture it.
    """
    parts = _split(projected, heads)
    fresh = (rows.positions == 0).view(-1, 1, 1)
    window = torch.cat((inputs[rows.slots].masked_fill(fresh, 0), parts.qkv.unsqueeze(1)), dim=1)
    inputs.index_copy_(0, rows.slots, window[:, 1:])
    q, k, v = _split_heads(F.silu((window.float() * heads.conv).sum(1)), heads)
    # q' S and k' S are computed together, before S becomes decay S + k correction'. This reads the memories once less.
    state = _states(memory, rows.slots, fresh, heads)
    group, flat = state.shape[2], state.flatten(0, 2)  # [R * value_heads, key_dim, value_dim]
    both = torch.stack((k, q), dim=-2).repeat_interleave(group, dim=1).flatten(0, 1)
    decay = parts.decay.exp().view(-1, 1, 1)
    read = torch.bmm(both, flat).mul_(decay)  # [R * value_heads, 2, value_dim]
    correction = (v.flatten(0, 2) - read[:, 0]).mul_(parts.beta.reshape(-1, 1)).unsqueeze(1)
    attended = torch.baddbmm(read[:, 1:], (k * q).sum(-1).repeat_interleave(group, dim=1).view(-1, 1, 1), correction)
    flat.mul_(decay).baddbmm_(both[:, :1].transpose(1, 2), correction)
    memory.index_copy_(0, rows.slots, state.flatten(1, 2))
    return _finish(attended.view(parts.z.shape), parts.z, heads)


def chunks(projected: Tensor, heads: DeltaHeads, inputs: Tensor, memory: Tensor, rows: ChunkedRows) -> Tensor:
    """Compute rows of several tokens: projected [n, width] -> [n, value_heads * value_dim]; updates as in `step`.

    Raises ValueError for rows without padded chunks.
    """
    padded = rows.padded
    if padded is None:
        raise ValueError("these rows are laid out for kernels alone")
    parts = _split(projected, heads)
    fresh = (rows.positions == 0).view(-1, 1, 1)
    mixed, kept = _convolve(parts.qkv, heads, inputs[rows.slots].masked_fill(fresh, 0), padded)
    inputs.index_copy_(0, rows.slots, kept)
    num_chunks = sum(padded.active)

    def laid_out(x: Tensor) -> Tensor:
        """[n, ...] -> [chunks, ..., size] with zeros where a chunk is padded; the axes between are kept."""
        chunked = x.new_zeros(num_chunks * padded.size, *x.shape[1:]).index_copy_(0, padded.indices, x)
        return chunked.view(num_chunks, padded.size, *x.shape[1:])

    q, k, v = (laid_out(x) for x in _split_heads(mixed, heads))
    q, k = (x.transpose(1, 2) for x in (q, k))  # [chunks, h, size, key_dim]
    beta, decay = (laid_out(x).permute(0, 2, 3, 1) for x in (parts.beta, parts.decay))  # [chunks, h, g, size]
    state = _states(memory, rows.slots, fresh, heads)
    attended = delta_rule(q, k, v.permute(0, 2, 3, 1, 4), beta, decay, state, padded.active)
    memory.index_copy_(0, rows.slots, state.flatten(1, 2))
    attended = attended.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)[padded.indices]
    return _finish(attended, parts.z, heads)


def _convolve(qkv: Tensor, heads: DeltaHeads, history: Tensor, rows: PaddedChunks) -> tuple[Tensor, Tensor]:
    """Return silu(convolution) of [n, channels], float32, where each row follows its `history` [R, taps - 1, channels];
    and the history for the next step, in the same shape.
    """
    taps = len(heads.conv)
    extended = qkv.new_empty(len(qkv) + history.shape[0] * history.shape[1], qkv.shape[1])
    extended.index_copy_(0, rows.extended, qkv)
    extended.index_copy_(0, rows.before.flatten(), history.flatten(0, 1))
    wide, count = extended.float(), len(extended) - taps + 1
    mixed = wide[:count] * heads.conv[0]
    for tap in range(1, taps):
        mixed.addcmul_(wide[tap : tap + count], heads.conv[tap])
    return F.silu(mixed[rows.extended - (taps - 1)]), extended[rows.last]


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, state: Tensor, active: tuple[int, ...]
) -> Tensor:
    """Compute the chunks of all rows: return o [chunks, h, g, size, value_dim].

    Updates `state` [rows, h, g, key_dim, value_dim] to the state after each row's last chunk.

    q and k are [chunks, h, size, key_dim], v is [chunks, h, g, size, value_dim]; beta and the decay's logarithm are
    [chunks, h, g, size]; all are float32. The first active[0] chunks belong to the rows in order, the next active[1]
    chunks to the first active[1] rows, and so on. A token with beta and decay 0 changes nothing.
    """
    size, value_dim = v.shape[-2:]
    total = decay.cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill_(later, -torch.inf).exp_()  # decay from j to i
    system = (k @ k.transpose(-1, -2)).unsqueeze(2) * between * beta.unsqueeze(-1)
    reads = (q @ k.transpose(-1, -2)).unsqueeze(2) * between
    right = torch.cat((v, k.unsqueeze(2) * total.exp().unsqueeze(-1)), dim=-1) * beta.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    corrections, from_state = solved[..., :value_dim].contiguous(), solved[..., value_dim:]
    # Corrections and outputs both read the state after the previous chunk: one product with twice the rows.
    reading = torch.cat((from_state, q.unsqueeze(2) * total.exp().unsqueeze(-1)), dim=-2).flatten(0, 2)
    keys = (k.unsqueeze(2) * (total[..., -1:] - total).exp().unsqueeze(-1)).flatten(0, 2).transpose(-1, -2)
    passed = total[..., -1].exp().view(-1, 1, 1)
    out = torch.empty_like(corrections)
    heads, states = state.shape[1] * state.shape[2], state.flatten(0, 2)
    flat_out, flat_corrections, reads = (x.flatten(0, 2) for x in (out, corrections, reads))
    for rows, end in zip(active, accumulate(active), strict=True):
        chunk, before = slice((end - rows) * heads, end * heads), states[: rows * heads]
        read = torch.bmm(reading[chunk], before)
        new = flat_corrections[chunk].sub_(read[:, :size])
        torch.baddbmm(read[:, size:], reads[chunk], new, out=flat_out[chunk])
        before.mul_(passed[chunk]).baddbmm_(keys[chunk], new)
    return out
