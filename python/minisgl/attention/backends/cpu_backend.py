"""Attention on a CPU: decodes read K and V directly from the pool, without gathering them.

A decode takes as long as reading K and V does, so gathering them first, as the reference does, costs more than the
attention itself. Here each page of each row is attended to separately, all pages in one call. A row's result is the
mean of its pages' results, weighted by their shares of the softmax's sum (LSE merge as in Flash-Decoding, Dao et al.,
2023). The order of pages is therefore free. Once sorted, most pages are contiguous in the pool, and a view of the pool
is enough. Small pages are gathered into blocks, because each block costs some microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.attention.backends.torch_backend import DecodeRows, TorchAttention, attend_in_float32, gather_pages
from minisgl.attention.base import AttentionInputs, AttentionSpec
from minisgl.core import Int32Array

Int64Array = np.ndarray[tuple[int], np.dtype[np.int64]]

# Contiguous pages of the pool are read in place if they have at least this many tokens: a separate call costs as much
# as gathering some hundred tokens of a small model.
_LONG_RUN = 256
# Pages with fewer tokens than this are gathered into blocks of this many tokens.
_SMALL_PAGE, _BLOCK = 16, 64


@dataclass(frozen=True, slots=True)
class SingleDecode:
    """Only decode row of a step, with contiguous pages in the pool. Implements DecodeRows."""

    tokens: Tensor | None
    kv_range: slice  # indices in the pool of the tokens that it sees
    as_vectors: bool  # see `attends_as_vectors`

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
        k, v = self._seen(keys), self._seen(values)
        if k.dtype != q.dtype:
            k, v = k.to(q.dtype), v.to(q.dtype)
        if sinks is not None:
            grouped = q.view(1, k.shape[1], -1, q.shape[2])
            mask = torch.ones(1, k.shape[2], dtype=torch.bool)
            return attend_in_float32(grouped, k, v, mask, scale, sinks.view(1, k.shape[1], -1)).view(q.shape)
        queries = _queries(q, k.shape[1], self.as_vectors)
        return F.scaled_dot_product_attention(queries, k, v, scale=scale, enable_gqa=True).reshape(q.shape)

    def _seen(self, pool: Tensor) -> Tensor:
        """Return the row's part of a pool [pages, page_size, kv_heads, d] as a view [1, kv_heads, L, d]."""
        _, _, kv_heads, dim = pool.shape
        token, begin, length = pool.stride(1), self.kv_range.start, self.kv_range.stop - self.kv_range.start
        return pool.as_strided((1, kv_heads, length, dim), (0, dim, token, 1), pool.storage_offset() + begin * token)


@dataclass(frozen=True, slots=True)
class PageRun:
    """Blocks that one call attends to: their indices among all blocks, and their pages in the pool."""

    blocks: slice
    pages: slice | Tensor  # [n, pages of a block] int64 where they have to be gathered


@dataclass(frozen=True, slots=True)
class PagedDecode:
    """R decode rows that see B blocks in total; a block that two rows see counts twice. Implements DecodeRows.

    A block is one page, or several small pages.
    """

    tokens: Tensor | None  # [R] int64: indices of their queries in the step; None if they are the whole step
    owners: Tensor  # [B] int64: the row of each block
    mask: Tensor  # [B, 1, 1, tokens of a block], 0 where the row sees a position and -inf elsewhere
    runs: list[PageRun]  # all blocks, in order
    blocks_of: Tensor  # [R, most blocks of a row] int64
    absent: Tensor  # [R, most blocks of a row, 1, 1] bool: true where a row has fewer
    as_vectors: bool  # see `attends_as_vectors`

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
        queries = _queries(q, keys.shape[2], self.as_vectors)[self.owners]
        parts = [self._attend_run(run, queries, keys, values, scale) for run in self.runs]
        outs, sums = parts[0] if len(parts) == 1 else (torch.cat(part) for part in zip(*parts, strict=True))
        sums = sums[self.blocks_of].masked_fill_(self.absent, -torch.inf)
        mean = (outs[self.blocks_of] * sums.softmax(dim=1).unsqueeze(-1)).sum(dim=1)
        if sinks is not None:  # a sink counts as one more block with the result 0
            of_positions = sums.logsumexp(dim=1) - sinks.float().view(mean.shape[1:3])
            mean *= of_positions.sigmoid().unsqueeze(-1)
        return mean.to(q.dtype).view(q.shape)

    def _attend_run(
        self, run: PageRun, queries: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return results of n blocks, shaped as _queries gives queries, and log(sum(exp(scores))) of each, float32."""
        if isinstance(run.pages, slice):
            k, v = keys[run.pages], values[run.pages]
        else:
            k, v = gather_pages(keys, run.pages), gather_pages(values, run.pages)
        # scaled_dot_product_attention runs this on a CPU, but does not return the sums.
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries[run.blocks],
            k.to(queries.dtype).transpose(1, 2),
            v.to(queries.dtype).transpose(1, 2),
            attn_mask=self.mask[run.blocks],
            scale=scale,
        )
        return out, sums


class CpuAttention(TorchAttention):
    """Implements attention.base.AttentionBackend on a CPU, for any page size; larger pages need fewer calls."""

    def __init__(self, spec: AttentionSpec, *, as_vectors: bool | None = None) -> None:
        """`as_vectors`: None means what `attends_as_vectors` decides for this CPU."""
        super().__init__(spec)
        self._as_vectors = attends_as_vectors(spec.dtype) if as_vectors is None else as_vectors

    def _decodes(
        self, inputs: AttentionInputs, first: Int32Array, rows: Int32Array, window: int | None
    ) -> list[DecodeRows]:
        if len(rows) == 0:
            return []
        size, table = self.spec.page_size, inputs.page_table.numpy()
        lengths = inputs.kv_lens[rows]
        starts = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)
        firsts, lasts = starts // size, (lengths - 1) // size  # pages of a row
        tokens = None if len(rows) == len(inputs.query_lens) else torch.from_numpy(first[rows])
        if len(rows) == 1:
            pages = table[rows[0], firsts[0] : lasts[0] + 1]
            if (np.diff(pages) == 1).all():
                begin = int(pages[0]) * size + int(starts[0]) % size
                return [SingleDecode(tokens, slice(begin, begin + int(lengths[0] - starts[0])), self._as_vectors)]
        per_block = 1 if size >= _SMALL_PAGE else _BLOCK // size
        counts = (lasts - firsts) // per_block + 1
        owners = np.repeat(np.arange(len(rows)), counts)
        columns = firsts[owners] + (np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)) * per_block
        if per_block == 1:
            order, runs = _runs(table[rows[owners], columns], _LONG_RUN // size)
        else:
            of_block = np.minimum(columns[:, None] + np.arange(per_block), lasts[owners, None])
            gathered = torch.from_numpy(table[rows[owners, None], of_block].astype(np.int64))
            order, runs = np.arange(len(owners)), [PageRun(slice(0, len(owners)), gathered)]
        owners, columns = owners[order], columns[order]
        positions = columns[:, None] * size + np.arange(per_block * size)
        seen = (positions < lengths[owners, None]) & (positions >= starts[owners, None])
        mask = torch.zeros(seen.shape, dtype=self.spec.dtype).masked_fill_(torch.from_numpy(~seen), -torch.inf)
        absent = np.arange(counts.max()) >= counts[:, None]
        places = np.argsort(order)
        # Absent blocks count with the weight 0. They are the row's own, because another row's may be NaN.
        blocks_of = np.repeat(places[np.cumsum(counts) - counts, None], absent.shape[1], axis=1)
        blocks_of[~absent] = places
        return [
            PagedDecode(
                tokens=tokens,
                owners=torch.from_numpy(owners),
                mask=mask[:, None, None],
                runs=runs,
                blocks_of=torch.from_numpy(blocks_of),
                absent=torch.from_numpy(absent)[:, :, None, None],
                as_vectors=self._as_vectors,
            )
        ]


def attends_as_vectors(dtype: torch.dtype) -> bool:
    """Return True if two queries of a KV head attend faster separately, as vector products, than together.

    Products of matrices copy K and V into blocks first, which MKL does not do for a vector. In 16 bits its vectors are
    fast on CPUs with AMX; without it they take 4 to 7 times as long as the copies.
    """
    return dtype == torch.float32 or bool(torch.cpu.get_capabilities().get("amx_bf16"))


def _queries(q: Tensor, kv_heads: int, as_vectors: bool) -> Tensor:
    """Return q [R, heads, d] as [R, kv_heads, group, d]: heads that share a KV head become several queries of it.

    A group of one, and of two `as_vectors`, is [R, heads, 1, d] instead.
    """
    group = q.shape[1] // kv_heads
    return q.unsqueeze(2) if group <= 1 + as_vectors else q.reshape(len(q), kv_heads, group, -1)


def _runs(pages: Int32Array, shortest: int) -> tuple[Int64Array, list[PageRun]]:
    """Return an order for pages [B], and its runs of at least `shortest` contiguous pages; all other pages form one
    last run, which is gathered.

    If a page occurs several times, its second and later occurrences come after the first occurrences of all pages,
    because they would otherwise interrupt the runs.
    """
    by_page = np.argsort(pages, kind="stable")
    times = np.empty_like(by_page)
    times[by_page] = np.arange(len(pages)) - np.searchsorted(pages[by_page], pages[by_page])
    order = np.lexsort((pages, times))
    parts = np.split(order, np.flatnonzero(np.diff(pages[order]) != 1) + 1)
    long = [part for part in parts if len(part) >= shortest]
    short = [part for part in parts if len(part) < shortest]
    runs, at = [], 0
    for part in long:
        page = int(pages[part[0]])
        runs.append(PageRun(slice(at, at + len(part)), slice(page, page + len(part))))
        at += len(part)
    if short:
        gathered = torch.from_numpy(pages[np.concatenate(short), None].astype(np.int64))
        runs.append(PageRun(slice(at, len(pages)), gathered))
    return np.concatenate(long + short), runs
