"""Blocks of keys for csrc/latent_prefill.cu: keys of long chunks that are expanded together, and the queries over them.

A row's keys are its cached tokens followed by its new tokens. For example, with a buffer for 16,384 keys, rows of 9,000
and 12,000 tokens give two blocks. The first block has all 9,000 keys of the first row and 7,384 keys of the second row.
The second block has the other 4,616 keys; the kernel merges its result with that of the second row's first part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from minisgl.core import Int32Array

MIN_EXPANDED = 64  # queries of a row whose keys are expanded: fewer do not pay for it (docs/log.md)
TILE_QUERIES = 128  # queries per block of threads in latent_prefill.cu


class KeyBlock(NamedTuple):
    """K keys, and tiles of the queries that see them."""

    rows: Int32Array  # [K]: the step's row of each key
    positions: Int32Array  # [K]: its position in the row's sequence
    items: Int32Array  # [tiles, 6]: struct Item of latent_prefill.cu, the longest first
    merges: bool  # with earlier blocks


def key_blocks(rows: Int32Array, query_lens: Int32Array, kv_lens: Int32Array, max_keys: int) -> Iterator[KeyBlock]:
    """Divide the keys of the step's `rows` into blocks of at most `max_keys`, in order; the lengths are of all rows."""
    segments: list[tuple[int, range]] = []
    left = max_keys
    for row in rows.tolist():
        start, length = 0, int(kv_lens[row])
        while start < length:
            keys = range(start, min(length, start + left))
            segments.append((row, keys))
            start, left = keys.stop, left - len(keys)
            if left == 0:
                yield _block(segments, query_lens, kv_lens)
                segments, left = [], max_keys
    if segments:
        yield _block(segments, query_lens, kv_lens)


def _block(segments: list[tuple[int, range]], query_lens: Int32Array, kv_lens: Int32Array) -> KeyBlock:
    first_queries = np.cumsum(query_lens) - query_lens
    items: list[tuple[int, ...]] = []
    first_key = 0
    for row, keys in segments:
        count, cached = int(query_lens[row]), int(kv_lens[row] - query_lens[row])
        for begin in range(0, count, TILE_QUERIES):
            queries, offset = min(TILE_QUERIES, count - begin), cached + begin - keys.start
            seen = min(len(keys), offset + queries)
            if seen > 0:
                items.append((int(first_queries[row]) + begin, queries, first_key, seen, offset, int(keys.start > 0)))
        first_key += len(keys)
    items.sort(key=lambda item: -item[3])
    return KeyBlock(
        rows=np.concatenate([np.full(len(keys), row, dtype=np.int32) for row, keys in segments]),
        positions=np.concatenate([np.arange(keys.start, keys.stop, dtype=np.int32) for _, keys in segments]),
        items=np.array(items, dtype=np.int32).reshape(-1, 6),
        merges=any(keys.start > 0 for _, keys in segments),
    )
