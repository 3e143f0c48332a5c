"""Division of long chunks' keys for the kernel that expands them: every query sees each key before it once."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.attention.latent.key_blocks import TILE_QUERIES, key_blocks


@pytest.mark.parametrize("max_keys", [64, 100, 299, 1000, 5000])  # with 299 a block begins with a single key
def test_queries_see_all_keys_before_them_once(max_keys: int) -> None:
    query_lens = np.array([1, 300, 65, 1, 128, 129], dtype=np.int32)
    kv_lens = np.array([700, 300, 98, 1, 1000, 130], dtype=np.int32)
    rows, first = np.array([1, 2, 4, 5], dtype=np.int32), np.cumsum(query_lens) - query_lens
    seen: dict[tuple[int, int], list[int]] = {}  # keys by row and query
    for block in key_blocks(rows, query_lens, kv_lens, max_keys):
        assert 0 < len(block.rows) == len(block.positions) <= max_keys
        assert {each.dtype for each in (block.rows, block.positions, block.items)} == {np.dtype(np.int32)}
        assert block.merges == block.items[:, 5].any()
        lengths = block.items[:, 3].tolist()
        assert lengths == sorted(lengths, reverse=True)
        for first_query, queries, first_key, keys, offset, merges in block.items.tolist():
            assert queries <= TILE_QUERIES
            (row,) = {int(row) for row in block.rows[first_key : first_key + keys]}
            for query in range(queries):
                mine = seen.setdefault((row, first_query + query - int(first[row])), [])
                assert bool(merges) == (block.positions[first_key] > 0)
                assert mine or block.positions[first_key] == 0  # a merge needs an earlier part with a finite sum
                mine += block.positions[first_key : first_key + max(min(keys, offset + query + 1), 0)].tolist()
    assert seen == {
        (row, query): list(range(kv_lens[row] - query_lens[row] + query + 1))
        for row in rows.tolist()
        for query in range(query_lens[row])
    }
