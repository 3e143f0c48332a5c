"""The radix tree by example; `test_kvcache_machine` searches for what these do not think of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minisgl.core import Int32Array
from minisgl.kvcache.base import BrokenInvariant
from minisgl.kvcache.pages import PagePool
from minisgl.kvcache.radix import RadixCache, _Node


def ids(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


def span(start: int, stop: int) -> Int32Array:
    return np.arange(start, stop, dtype=np.int32)


# ---- matching and inserting ----


def test_an_empty_tree_matches_nothing() -> None:
    cache = RadixCache(page_size=2)
    handle = cache.match(ids(1, 2, 3, 4))
    assert handle.cached_len == 0
    assert handle.pages.tolist() == []
    cache.lock(handle)
    cache.unlock(handle)
    assert (cache.cached_pages, cache.locked_pages, cache.evictable_pages) == (0, 0, 0)
    cache.check()


def test_salts_do_not_share() -> None:
    cache = RadixCache(page_size=2)
    for salt, first in ((b"", 10), (b"a" * 16, 20), (b"b" * 16, 30)):
        result = cache.insert(span(0, 6), ids(first, first + 1, first + 2), salt)
        assert result.duplicates.tolist() == []
        assert cache.match(span(0, 5), salt).pages.tolist() == [first, first + 1]  # the match splits the node here
        cache.check()
    assert cache.match(span(0, 6), b"c" * 16).cached_len == 0
    assert cache.cached_pages == 9
    again = cache.insert(span(0, 8), ids(1, 2, 3, 4), b"a" * 16)
    assert again.duplicates.tolist() == [1, 2, 3]
    cache.check()
    assert sorted(cache.reset().tolist()) == [4, 10, 11, 12, 20, 21, 22, 30, 31, 32]
    cache.check()


def test_whole_pages_only() -> None:
    cache = RadixCache(page_size=4)
    result = cache.insert(span(0, 11), ids(7, 8))  # the last 3 tokens fill no page
    assert result.handle.cached_len == 8
    assert result.handle.pages.tolist() == [7, 8]
    assert cache.match(ids(0, 1, 2, 3, 4, 5, 6, 9)).pages.tolist() == [7]  # differs in the middle of a page
    assert cache.match(span(0, 11)).pages.tolist() == [7, 8]
    assert cache.match(span(0, 7)).pages.tolist() == [7]
    assert cache.match(span(0, 3)).cached_len == 0
    cache.check()


def test_one_page_for_each_whole_page_of_tokens() -> None:
    cache = RadixCache(page_size=4)
    with pytest.raises(ValueError, match="11 tokens have 2 whole pages of 4, not 3"):
        cache.insert(span(0, 11), ids(1, 2, 3))
    with pytest.raises(ValueError, match="not 1"):
        cache.insert(span(0, 11), ids(1))
    assert cache.cached_pages == 0


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_prompts_that_part_share_their_prefix(page_size: int) -> None:
    cache = RadixCache(page_size)
    left = np.repeat(ids(1, 2, 3, 4), page_size)
    right = np.repeat(ids(1, 2, 5, 6), page_size)
    cache.insert(left, ids(10, 11, 12, 13))
    result = cache.insert(right, ids(20, 21, 22, 23))
    assert result.duplicates.tolist() == [20, 21]
    assert result.handle.pages.tolist() == [10, 11, 22, 23]
    assert cache.match(left).pages.tolist() == [10, 11, 12, 13]
    assert cache.match(right).pages.tolist() == [10, 11, 22, 23]
    assert cache.cached_pages == 6
    cache.check()


def test_a_page_that_the_tree_holds_already_is_no_duplicate() -> None:
    cache = RadixCache(page_size=1)
    cache.insert(ids(1, 2), ids(10, 11))
    result = cache.insert(ids(1, 2, 3), ids(10, 11, 12))
    assert result.duplicates.tolist() == []
    assert cache.cached_pages == 3


def test_the_tree_keeps_no_array_of_its_caller() -> None:
    cache = RadixCache(page_size=1)
    tokens, pages = ids(1, 2, 3), ids(10, 11, 12)
    result = cache.insert(tokens, pages)
    tokens[:], pages[:], result.handle.pages[:] = 0, 0, 0
    assert cache.match(ids(1, 2, 3)).pages.tolist() == [10, 11, 12]


def test_strided_tokens_match() -> None:
    cache = RadixCache(page_size=2)
    cache.insert(ids(1, 2, 3, 4), ids(10, 11))
    assert cache.match(ids(1, 0, 2, 0, 3, 0, 4, 0)[::2]).pages.tolist() == [10, 11]


def deep_tree() -> RadixCache:
    """Return a tree of 3000 nodes, one below the other, to which matches of ever shorter prefixes have cut a run."""
    cache = RadixCache(page_size=1)
    cache.insert(span(0, 3000), span(0, 3000))
    for length in range(2999, 0, -1):
        assert cache.match(span(0, length)).cached_len == length
    return cache


def test_a_deep_tree_needs_no_recursion() -> None:
    cache = deep_tree()
    assert cache.match(span(0, 3000)).pages.tolist() == list(range(3000))
    cache.check()
    assert cache.evict(2999).tolist() == list(range(2999, 0, -1))  # node by node
    cache.check()


def test_nodes_are_joined_when_no_branch_and_no_lock_parts_them() -> None:
    cache = deep_tree()
    whole, part = cache.match(span(0, 3000)), cache.match(span(0, 1000))
    branch = cache.insert(np.append(span(0, 2000), 9), span(3000, 5001)).handle
    for handle in (whole, part, branch):
        cache.lock(handle)
    assert cache.locked_pages == 3001
    for handle, runs in (
        (whole, [1000, 1000, 1000, 1]),
        (part, [1000, 1000, 1000, 1]),
        (branch, [2000, 1000, 1]),
    ):
        cache.unlock(handle)
        cache.check()
        assert [node.pages for node in cache.tree(10_000)] == runs
    assert cache.match(span(0, 3000)).pages.tolist() == list(range(3000))


# ---- locking ----


def test_locked_pages_are_not_evicted() -> None:
    cache = RadixCache(page_size=1)
    cache.insert(ids(1, 2, 3, 4), ids(10, 11, 12, 13))
    handle = cache.match(ids(1, 2))
    cache.lock(handle)
    assert (cache.cached_pages, cache.locked_pages, cache.evictable_pages) == (4, 2, 2)
    assert sorted(cache.evict(4).tolist()) == [12, 13]
    assert cache.match(ids(1, 2, 3, 4)).pages.tolist() == [10, 11]
    cache.unlock(handle)
    assert sorted(cache.evict(4).tolist()) == [10, 11]
    cache.check()


def test_a_locked_handle_outlives_splits() -> None:
    cache = RadixCache(page_size=1)
    handle = cache.insert(span(0, 8), span(100, 108)).handle
    cache.lock(handle)
    for cut in (5, 2, 6):  # below and above, and again within the parts
        cache.match(span(0, cut))
        cache.check()
        assert cache.locked_pages == 8
    assert cache.reset().tolist() == []
    cache.unlock(handle)
    assert (cache.locked_pages, cache.evictable_pages) == (0, 8)
    cache.check()


def test_a_lock_of_a_part_survives_the_unlock_of_the_whole() -> None:
    cache = RadixCache(page_size=1)
    whole = cache.insert(span(0, 8), span(100, 108)).handle
    cache.lock(whole)
    part = cache.match(span(0, 3))
    cache.lock(part)
    cache.unlock(whole)
    assert cache.locked_pages == 3
    assert sorted(cache.evict(99).tolist()) == list(range(103, 108))
    cache.unlock(part)
    assert cache.evictable_pages == 3
    cache.check()


@pytest.mark.parametrize("evicted", [1, 4])
def test_a_stale_handle_cannot_be_locked(evicted: int) -> None:
    cache = RadixCache(page_size=1)
    handle = cache.insert(span(0, 4), span(0, 4)).handle
    cache.evict(evicted)
    cache.insert(span(0, 4), span(10, 14))  # the same prefix in other pages does not revive it
    with pytest.raises(ValueError, match="stale"):
        cache.lock(handle)
    assert cache.locked_pages == 0
    cache.check()


# ---- evicting ----


def test_the_least_recently_used_go_first() -> None:
    cache = RadixCache(page_size=1)
    for first in (1, 2, 3, 4):
        cache.insert(ids(first, 9), ids(10 * first, 10 * first + 1))
    cache.match(ids(1, 9))
    locked = cache.match(ids(2, 9))
    cache.lock(locked)
    assert [cache.evict(1).tolist() for _ in range(6)] == [[31], [30], [41], [40], [11], [10]]
    assert cache.evict(1).tolist() == []
    cache.unlock(locked)
    assert [cache.evict(1).tolist() for _ in range(2)] == [[21], [20]]


def test_a_parent_goes_after_its_children() -> None:
    cache = RadixCache(page_size=1)
    cache.insert(ids(1, 2), ids(10, 11))
    cache.insert(ids(5, 6), ids(50, 51))
    cache.insert(ids(1, 3), ids(0, 12))
    assert [cache.evict(1).tolist() for _ in range(5)] == [[11], [51], [50], [12], [10]]


def test_an_unlock_is_a_use() -> None:
    """A prefix that was read until a moment ago is not the oldest, however long ago it was matched."""
    cache = RadixCache(page_size=1)
    running = cache.insert(ids(1), ids(10)).handle
    cache.lock(running)
    cache.insert(ids(2), ids(20))
    cache.unlock(running)
    assert [cache.evict(1).tolist() for _ in range(2)] == [[20], [10]]


def test_reset_drops_all_that_is_not_locked() -> None:
    cache = RadixCache(page_size=1)
    cache.insert(ids(1, 2, 3), ids(10, 11, 12))
    cache.insert(ids(4, 5), ids(13, 14))
    kept = cache.match(ids(1))
    cache.lock(kept)
    assert sorted(cache.reset().tolist()) == [11, 12, 13, 14]
    assert cache.owned_pages().tolist() == [10]
    cache.unlock(kept)
    assert cache.reset().tolist() == [10]
    assert cache.cached_pages == 0
    cache.check()


def test_evicting_more_than_there_is_or_nothing() -> None:
    cache = RadixCache(page_size=1)
    assert cache.evict(3).tolist() == []
    cache.insert(ids(1, 2), ids(10, 11))
    assert cache.evict(0).tolist() == []
    assert sorted(cache.evict(3).tolist()) == [10, 11]


# ---- mistakes of other engines ----


def test_loser_of_equal_prefill_keeps_its_pages() -> None:
    """Two equal prompts are prefilled at a time: the second one's pages stay its own until it ends."""
    pool = PagePool(8, cache := RadixCache(page_size=1))
    prompt = ids(1, 2, 3)
    handles = [cache.match(prompt[:-1]) for _ in range(2)]
    for handle in handles:
        cache.lock(handle)
    first, second = pool.allocate(3), pool.allocate(3)

    results = [cache.insert(prompt, first), cache.insert(prompt, second)]
    for handle, result in zip(handles, results, strict=True):
        cache.lock(result.handle)
        cache.unlock(handle)
    assert results[0].duplicates.tolist() == []
    assert results[1].duplicates.tolist() == second.tolist()
    assert results[1].handle.pages.tolist() == first.tolist()
    assert set(pool.allocate(2).tolist()).isdisjoint([*first, *second])  # only these were left
    assert pool.available == 0
    pool.free(ids(6, 7))

    tail = pool.allocate(1)
    last = cache.insert(ids(1, 2, 3, 4), np.concatenate([second, tail]))  # the loser ends
    assert last.duplicates.tolist() == second.tolist()
    cache.unlock(results[1].handle)
    pool.free(last.duplicates)
    cache.insert(prompt, first)  # the winner ends
    cache.unlock(results[0].handle)
    assert cache.match(ids(1, 2, 3, 4)).pages.tolist() == [*first, *tail]
    pool.check_idle()


def test_a_second_insert_takes_no_page_twice() -> None:
    """An abort may find the prefix inserted already: what is the tree's is not the caller's to free."""
    pool = PagePool(4, cache := RadixCache(page_size=2))
    pages = pool.allocate(2)
    for _ in range(2):
        assert cache.insert(ids(1, 2, 3, 4), pages).duplicates.tolist() == []
    assert cache.cached_pages == 2
    pool.check_idle()


def test_a_second_unlock_is_noticed() -> None:
    """Unlocking twice fails even when another request still locks the same prefix."""
    cache = RadixCache(page_size=1)
    cache.insert(ids(1, 2), ids(10, 11))
    ours, theirs = cache.match(ids(1, 2)), cache.match(ids(1, 2))
    cache.lock(ours)
    cache.lock(theirs)
    cache.unlock(ours)
    with pytest.raises(ValueError, match="not locked"):
        cache.unlock(ours)
    assert cache.locked_pages == 2
    cache.check()


def test_split_refreshes_age() -> None:
    cache = RadixCache(page_size=1)
    cache.insert(ids(1, 2, 3, 4), ids(10, 11, 12, 13))
    cache.insert(ids(5, 6), ids(50, 51))
    cache.match(ids(1, 2))  # splits the older prompt: its upper part is now the youngest
    assert sorted(cache.evict(2).tolist()) == [12, 13]
    assert sorted(cache.evict(2).tolist()) == [50, 51]
    assert sorted(cache.evict(2).tolist()) == [10, 11]


def test_eviction_takes_pages_not_leaves() -> None:
    cache = RadixCache(page_size=2)
    cache.insert(span(0, 100), span(0, 50))
    assert cache.evict(1).tolist() == [49]
    assert sorted(cache.evict(3).tolist()) == [46, 47, 48]
    assert cache.cached_pages == 46
    assert cache.match(span(0, 100)).cached_len == 92
    cache.check()
    result = cache.insert(span(0, 100), np.concatenate([span(0, 46), span(60, 64)]))  # the tree grows again
    assert result.duplicates.tolist() == []
    assert cache.match(span(0, 100)).cached_len == 100
    cache.check()


def test_eviction_does_not_walk_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among 20,000 leaves, also after all were hit in another order, a page costs one node and its parent."""
    leaves = 20_000
    cache = RadixCache(page_size=1)
    order = np.random.default_rng(0).permutation(leaves)
    for leaf in range(leaves):
        cache.insert(ids(leaf % 100, leaf), ids(0 if leaf >= 100 else leaf, 1000 + leaf))
    for leaf in order:
        cache.match(ids(leaf % 100, leaf))
    cache.check()

    visited: set[int] = set()

    def visit(node: _Node, name: str) -> Any:
        visited.add(id(node))
        return object.__getattribute__(node, name)

    monkeypatch.setattr(_Node, "__getattribute__", visit)
    for leaf in order[:200]:
        visited.clear()
        assert cache.evict(1).tolist() == [1000 + leaf]
        assert len(visited) <= 2


# ---- check() notices ----


def broken(what: str) -> RadixCache:
    """Two nodes, one below the other, and something wrong."""
    cache = RadixCache(page_size=1)
    node = cache.insert(ids(1, 2, 3), ids(10, 11, 12)).handle.node
    cache.match(ids(1))
    cache.check()
    if what == "the cached pages":
        cache._cached += 1
    elif what == "the locked pages":
        cache._locked += 1
    elif what == "a lock on the lower node only":
        node.locks += 1
    elif what == "the end":
        node.end -= 1
    elif what == "the parent":
        node.parent = None
    elif what == "a page fewer":
        node.pages = node.pages[:-1]
    elif what == "no page":
        node.pages = node.pages[:0]
    elif what == "a page twice":
        node.pages[0] = 12
    elif what == "another first page":
        node.tokens = ids(7, 3).tobytes()
    elif what == "a salt below another node":
        del node.parent.children[node.key]
        node.key = b"salt" + node.key
        node.parent.children[node.key] = node
    elif what == "not queued":
        del cache._queue[node]
    elif what == "queued behind its parent":
        cache._queue.move_to_end(node)
    elif what == "a stranger in the queue":
        cache._queue[_Node(None, b"", b"", ids(), end=0)] = None
    return cache


@pytest.mark.parametrize(
    "what",
    [
        "the cached pages",
        "the locked pages",
        "a lock on the lower node only",
        "the end",
        "the parent",
        "a page fewer",
        "no page",
        "a page twice",
        "another first page",
        "a salt below another node",
        "not queued",
        "queued behind its parent",
        "a stranger in the queue",
    ],
)
def test_check_notices(what: str) -> None:
    with pytest.raises(BrokenInvariant):
        broken(what).check()


# ---- showing ----


def test_a_picture_of_the_tree_has_its_largest_nodes_below_their_parents() -> None:
    cache = RadixCache(page_size=2)
    cache.insert(span(0, 20), span(0, 10))
    fork = cache.insert(np.concatenate([span(0, 8), span(50, 62)]), np.concatenate([span(0, 4), span(20, 26)])).handle
    for start in range(100, 600, 2):
        cache.insert(span(start, start + 2), ids(30 + start // 2))
    cache.lock(fork)
    nodes = cache.tree(4)
    assert [(node.first, node.last, node.parent, node.pages, node.end, node.locks) for node in nodes[:3]] == [
        (0, 3, None, 4, 8, 1),
        (20, 25, 3, 6, 20, 1),  # among equal children the newest comes first
        (4, 9, 3, 6, 20, 0),
    ]
    assert len(nodes) == 4
    assert len(cache.tree(1000)) == 3 + 250
    assert sum(node.pages for node in cache.tree(1000)) == cache.cached_pages
    for start in range(1000, 3000, 2):
        cache.insert(span(start, start + 2), ids(1000 + start))
    assert len(cache.tree(10_000)) <= 3 + 256, "only the newest children of a node are listed"
