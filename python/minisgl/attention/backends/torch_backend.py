"""Attention in plain torch on any device: the reference for the other backends.

K and V of decode rows are gathered from their pages, and rows of similar length attend in one call. Rows of several
queries (prefill chunks) attend one by one. FP8 K and V are upcast to the queries' dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.attention.base import AttentionInputs, AttentionSpec, shorter_window
from minisgl.core import Int32Array
from minisgl.kvcache.kv_pool import KVPool

_MAX_SCORES = 1 << 20  # scores of a head that are stored at a time where torch's fused attention is not used
# torch 2.11's memory-efficient attention is correct for heads up to this size. With the 576 dimensions of latent
# attention, an H200 gave wrong results if a chunk's number of queries was one more than a multiple of 32.
_LARGEST_HEAD = 256


class DecodeRows(Protocol):
    """R rows of one query each."""

    @property
    def tokens(self) -> Tensor | None:
        """Indices of their queries among the step's tokens, [R] int64; None if they are the whole step."""

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
        """Attend with q [R, heads, d] to keys and values [pages, page_size, kv_heads, d], and return [R, heads, d]."""


@dataclass(frozen=True, slots=True)
class PaddedDecode:
    """Rows padded at the end to the longest of them, L = pages x page_size positions. Implements DecodeRows."""

    tokens: Tensor | None
    pages: Tensor  # [R, pages] int32, those that a query sees
    mask: Tensor  # [R, 1, 1, L] bool: true where it sees a position

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
        k = gather_pages(keys, self.pages).to(q.dtype).transpose(1, 2)
        v = k if values is keys else gather_pages(values, self.pages).to(q.dtype).transpose(1, 2)
        # Query heads that share a KV head become several queries of that head, so that K and V are not repeated.
        grouped = q.reshape(q.shape[0], keys.shape[2], -1, q.shape[2])
        if sinks is not None:
            return attend_in_float32(grouped, k, v, self.mask, scale, sinks.view(*grouped.shape[1:3])).reshape(q.shape)
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=self.mask, scale=scale).reshape(q.shape)


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Consecutive queries of one row, and the L positions up to the last of them that they attend to."""

    tokens: slice  # its queries
    pages: Tensor  # [pages] int32
    positions: slice  # positions of the pages that it sees
    mask: Tensor | None  # [queries, L] bool; None where they start at position 0 and plain causal holds


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """Implements attention.base.AttentionPlan. Latent attention uses whole keys as values and cuts the result."""

    decodes: Sequence[DecodeRows]
    prefills: Sequence[PrefillRow]
    spec: AttentionSpec
    stores_scores: bool  # True: prefills store their scores

    def forward(self, layer: int, q: Tensor, kv: KVPool, sinks: Tensor | None = None) -> Tensor:
        y = self._attend(q, kv.keys(layer), kv.values(layer), sinks)
        return y if self.spec.latent is None else y[..., : self.spec.latent.rank]

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        scale = self.spec.softmax_scale
        if len(self.decodes) == 1 and self.decodes[0].tokens is None:
            return self.decodes[0].attend(q, keys, values, scale, sinks)
        out = torch.empty_like(q)
        for decode in self.decodes:
            assert decode.tokens is not None
            out[decode.tokens] = decode.attend(q[decode.tokens], keys, values, scale, sinks)
        for row in self.prefills:
            attend = _attend_by_scores if self.stores_scores else _attend
            out[row.tokens] = attend(q[row.tokens], keys, values, row, scale, sinks)
        return out


class TorchAttention:
    """Implements attention.base.AttentionBackend for any page size, head size and mix of rows."""

    graph_safe = False  # it pads rows to the longest one; a graph would have to pad them to the longest possible
    prefill_graph_safe = False
    upcasts = False
    reads_whole_pages = True

    def __init__(self, spec: AttentionSpec, max_scores: int | None = None) -> None:
        """`max_scores`: the most scores (queries x keys) of a head that may be stored at a time; None: no limit.

        With sinks, latents and large heads they are always stored.
        """
        self.spec = spec
        self._stores_scores = spec.has_sinks or spec.latent is not None or spec.head_dim > _LARGEST_HEAD
        self._max_scores = min(max_scores or _MAX_SCORES, _MAX_SCORES) if self._stores_scores else max_scores

    def plan(self, inputs: AttentionInputs) -> TorchPlan:
        window = shorter_window(self.spec.window, inputs)
        first = np.cumsum(inputs.query_lens) - inputs.query_lens
        decode = np.flatnonzero(inputs.query_lens == 1).astype(np.int32)
        prefill = np.flatnonzero(inputs.query_lens > 1)
        return TorchPlan(
            decodes=self._decodes(inputs, first, decode, window),
            prefills=[part for row in prefill for part in self._prefill(inputs, int(first[row]), int(row), window)],
            spec=self.spec,
            stores_scores=self._stores_scores,
        )

    def _decodes(
        self, inputs: AttentionInputs, first: Int32Array, rows: Int32Array, window: int | None
    ) -> Sequence[DecodeRows]:
        """Group the step's `rows` of one query; `first` is where the queries of each row of the step begin."""
        seen = inputs.kv_lens[rows] if window is None else np.minimum(inputs.kv_lens[rows], window)
        return [self._padded(inputs, first, similar, window) for similar in _similar_lengths(rows, seen)]

    def _padded(self, inputs: AttentionInputs, first: Int32Array, rows: Int32Array, window: int | None) -> PaddedDecode:
        device = inputs.page_table.device
        table, lengths, tokens = inputs.page_table, inputs.kv_lens_device, None
        if len(rows) < len(inputs.query_lens):
            picked = torch.from_numpy(rows).to(device)
            table, lengths = table[picked], lengths[picked]
            tokens = torch.from_numpy(first[rows]).to(device)
        size, host_lens = self.spec.page_size, inputs.kv_lens[rows]
        host_starts = np.zeros_like(host_lens) if window is None else np.maximum(host_lens - window, 0)
        count = int((-(-host_lens // size) - host_starts // size).max())
        starts = torch.zeros_like(lengths) if window is None else (lengths - window).clamp_(min=0)
        blocks = (starts // size).unsqueeze(1) + torch.arange(count, dtype=torch.int32, device=device)
        positions = (blocks.unsqueeze(2) * size + torch.arange(size, dtype=torch.int32, device=device)).flatten(1)
        mask = (positions < lengths.unsqueeze(1)) & (positions >= starts.unsqueeze(1))
        # After a row's length its page table is undefined: its first page is read there, and masked.
        pages = table.gather(1, blocks.long() * (blocks * size < lengths.unsqueeze(1)))
        return PaddedDecode(tokens, pages, mask[:, None, None, :])

    def _prefill(self, inputs: AttentionInputs, first: int, row: int, window: int | None) -> Iterator[PrefillRow]:
        device, size = inputs.page_table.device, self.spec.page_size
        queries, length = int(inputs.query_lens[row]), int(inputs.kv_lens[row])
        piece = queries if self._max_scores is None else max(self._max_scores // length, 1)
        for begin in range(0, queries, piece):
            own = range(length - queries + begin, min(length - queries + begin + piece, length))  # positions
            start = 0 if window is None else max(0, own.start - window + 1)
            positions = torch.arange(start, own.stop, device=device)
            ends = positions[own.start - start :].unsqueeze(1)
            mask = None if own.start == 0 else positions <= ends
            if window is not None and window < own.stop:
                mask = (positions <= ends) & (positions > ends - window)
            pages = inputs.page_table[row, start // size : -(-own.stop // size)]
            seen = slice(start % size, start % size + own.stop - start)
            yield PrefillRow(slice(first + begin, first + begin + len(own)), pages, seen, mask)


def _similar_lengths(rows: Int32Array, lengths: Int32Array) -> Iterator[Int32Array]:
    """Split rows so that none is padded to more than about twice its length. A few short rows are not split."""
    if len(rows) == 0:
        return
    longest = int(lengths.max())
    if longest * len(rows) <= 2 * int(lengths.sum()):
        yield rows
        return
    short = lengths * 2 <= longest
    yield rows[~short]
    yield from _similar_lengths(rows[short], lengths[short])


def read_pages(pool: Tensor, pages: Tensor) -> Tensor:
    """Copy pages [n] of a pool [pages, ...]."""
    moved = torch.uint8 if pool.itemsize == 1 else pool.dtype  # on a GPU torch moves no float8 by index
    return pool.view(moved).index_select(0, pages).view(pool.dtype)


def gather_pages(pool: Tensor, pages: Tensor) -> Tensor:
    """Copy pages [..., n] of a pool [pages, page_size, kv_heads, d] to [..., n * page_size, kv_heads, d].

    Whole pages are copied, because a CPU copies few long pieces many times faster than many short ones.
    """
    found = read_pages(pool.flatten(1), pages.flatten())
    return found.view(*pages.shape[:-1], pages.shape[-1] * pool.shape[1], *pool.shape[2:])


def attend_in_float32(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """Attend in float32 with q [..., Q, d] to k and v [..., L, d], and to a sink, whose value is 0.

    `mask` [..., Q, L] bool, true where a query sees a position; `sinks` [..., Q], a score of each query, if there are.
    """
    scores = (q.float() @ k.float().transpose(-1, -2)).mul_(scale).masked_fill_(~mask, -torch.inf)
    if sinks is None:
        return (scores.softmax(-1) @ v.float()).to(q.dtype)
    sink = sinks.float().unsqueeze(-1)
    largest = torch.maximum(scores.amax(-1, keepdim=True), sink)
    shares = scores.sub_(largest).exp_()
    total = shares.sum(-1, keepdim=True) + (sink - largest).exp()
    return (shares @ v.float()).div_(total).to(q.dtype)


def _attend_in_16_bits(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend as `attend_in_float32` does, with q [kv_heads, group, Q, d], k and v [kv_heads, 1, L, d], mask [Q, L].

    Scores are float32. The softmax weights are rounded to 16 bits, so that a GPU multiplies them on tensor cores.
    """
    rows = q.flatten(1, 2)
    scores = torch.bmm(rows, k.squeeze(1).transpose(1, 2), out_dtype=torch.float32).view(*q.shape[:3], -1)
    shares = scores.mul_(scale).masked_fill_(~mask, -torch.inf).softmax(-1).to(q.dtype)
    return torch.bmm(shares.flatten(1, 2), v.squeeze(1)).view(q.shape)


def _attend(q: Tensor, keys: Tensor, values: Tensor, row: PrefillRow, scale: float, _: Tensor | None) -> Tensor:
    """Attend with the queries [queries, heads, d] of one row."""
    k = gather_pages(keys, row.pages)[row.positions].to(q.dtype).transpose(0, 1).unsqueeze(0)
    v = k if values is keys else gather_pages(values, row.pages)[row.positions].to(q.dtype).transpose(0, 1).unsqueeze(0)
    if k.shape[1] == 1:  # a view, where enable_gqa makes copies
        k, v = (one.expand(-1, q.shape[1], -1, -1) for one in (k, v))
    y = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k,
        v,
        attn_mask=row.mask,
        is_causal=row.mask is None,
        scale=scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )
    return y.squeeze(0).transpose(0, 1)


def _attend_by_scores(
    q: Tensor, keys: Tensor, values: Tensor, row: PrefillRow, scale: float, sinks: Tensor | None
) -> Tensor:
    """Attend as `_attend` does, with stored scores, and to sinks."""
    k, v = (gather_pages(pool, row.pages)[row.positions].transpose(0, 1).unsqueeze(1) for pool in (keys, values))
    mask = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril() if row.mask is None else row.mask
    grouped = q.view(len(q), len(k), -1, q.shape[2]).permute(1, 2, 0, 3)  # [kv_heads, group, queries, d]
    if q.is_cuda and q.dtype == k.dtype != torch.float32 and sinks is None and values is not keys:
        y = _attend_in_16_bits(grouped, k, v, mask, scale)
    else:
        y = attend_in_float32(grouped, k, v, mask, scale, None if sinks is None else sinks.view(len(k), -1, 1))
    return y.permute(2, 0, 1, 3).reshape(q.shape)
