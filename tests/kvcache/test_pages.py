"""The free list, the pool that joins it with a cache, and what all of them promise."""

from __future__ import annotations

import subprocess
import sys
from typing import Literal

import numpy as np
import pytest

from minisgl.core import Int32Array
from minisgl.kvcache import make_cache
from minisgl.kvcache.base import BrokenInvariant
from minisgl.kvcache.naive import NaiveCache
from minisgl.kvcache.pages import OutOfPages, PageAllocator, PagePool
from minisgl.kvcache.radix import RadixCache


def ids(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


def test_policy_imports_no_torch() -> None:
    modules = ["base", "naive", "radix", "pages"]
    program = "import sys, minisgl.kvcache\n"
    program += "".join(f"import minisgl.kvcache.{module}\n" for module in modules)
    program += "assert 'numpy' in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_make_cache() -> None:
    assert isinstance(make_cache("radix", 16), RadixCache)
    assert isinstance(make_cache("naive", 16), NaiveCache)
    assert make_cache("radix", 16).page_size == 16


@pytest.mark.parametrize("kind", ["radix", "naive"])
def test_locks_of_one_handle_are_counted(kind: Literal["radix", "naive"]) -> None:
    cache = make_cache(kind, 2)
    handle = cache.insert(ids(1, 2, 3, 4), ids(10, 11)).handle
    held = len(handle.pages)
    for _ in range(2):
        cache.lock(handle)
    for locked in (held, 0):
        assert cache.locked_pages == held
        cache.unlock(handle)
        assert cache.locked_pages == locked
    with pytest.raises(ValueError, match="not locked"):
        cache.unlock(handle)


@pytest.mark.parametrize("kind", ["radix", "naive"])
def test_page_size_must_be_positive(kind: Literal["radix", "naive"]) -> None:
    with pytest.raises(ValueError, match="page size must be at least 1, not 0"):
        make_cache(kind, 0)


# ---- the free list ----


def test_allocator_hands_out_each_page_once() -> None:
    allocator = PageAllocator(5)
    pages = [allocator.allocate(n) for n in (2, 0, 3)]
    assert [p.tolist() for p in pages] == [[0, 1], [], [2, 3, 4]]
    assert all(p.dtype == np.int32 for p in pages)
    assert allocator.num_free == 0
    allocator.check()
    allocator.free(ids(3, 0))
    assert allocator.num_free == 2
    assert sorted(allocator.free_pages().tolist()) == [0, 3]
    assert sorted(allocator.allocate(2).tolist()) == [0, 3]
    allocator.check()


def test_one_page_is_enough() -> None:
    allocator = PageAllocator(1)
    assert allocator.allocate(1).tolist() == [0]
    allocator.free(ids(0))
    assert allocator.num_free == 1


def test_allocated_pages_are_the_callers_array() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(4)
    kept = pages.copy()
    allocator.free(pages)
    pages[:] = 0
    allocator.check()
    assert sorted(allocator.allocate(4).tolist()) == kept.tolist()


def test_out_of_pages_says_how_many() -> None:
    allocator = PageAllocator(3)
    allocator.allocate(1)
    with pytest.raises(OutOfPages, match="3 pages are requested, 2 are available") as error:
        allocator.allocate(3)
    assert (error.value.wanted, error.value.available) == (3, 2)
    assert allocator.num_free == 2
    with pytest.raises(ValueError):
        allocator.allocate(-1)
    with pytest.raises(ValueError):
        PageAllocator(0)


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        (ids(1, 3), "free already"),
        (ids(1, 1), "freed twice"),
        (ids(0, 1, 2, 2, 1, 0), "freed twice"),
        (ids(0, 4), "between 0 and 3"),
        (ids(0, -1), "between 0 and 3"),
    ],
)
def test_a_wrong_free_raises_and_changes_nothing(pages: Int32Array, message: str) -> None:
    allocator = PageAllocator(4)
    allocator.allocate(3)
    with pytest.raises(ValueError, match=message):
        allocator.free(pages)
    assert allocator.free_pages().tolist() == [3]
    allocator.check()
    allocator.free(ids(2, 0, 1))
    allocator.free(ids())
    assert allocator.num_free == 4
    allocator.check()


def test_allocator_check_notices() -> None:
    allocator = PageAllocator(4)
    allocator._stack[0] = allocator._stack[1]
    with pytest.raises(BrokenInvariant):
        allocator.check()
    allocator = PageAllocator(4)
    allocator.allocate(1)
    allocator._place[0] = 3
    with pytest.raises(BrokenInvariant):
        allocator.check()


# ---- the pool ----


def test_pool_evicts_only_what_is_missing() -> None:
    pool = PagePool(6, cache := RadixCache(page_size=1))
    cache.insert(ids(1, 2, 3, 4), pool.allocate(4))
    assert (pool.available, pool.allocator.num_free, cache.evictable_pages) == (6, 2, 4)
    pages = pool.allocate(3)
    assert len(set(pages.tolist())) == 3
    assert (cache.cached_pages, pool.evicted) == (3, 1)
    with pytest.raises(OutOfPages, match="4 pages are requested, 3 are available"):
        pool.allocate(4)
    assert cache.cached_pages == 3
    pool.free(pages)
    pool.check_idle()
    assert pool.flush_cache() == 3
    assert pool.allocator.num_free == pool.num_pages == 6
    pool.check_idle()


def test_pool_does_not_count_on_locked_pages() -> None:
    pool = PagePool(6, cache := RadixCache(page_size=1))
    handle = cache.insert(ids(1, 2, 3, 4), pool.allocate(4)).handle
    cache.lock(handle)
    assert pool.available == 2
    with pytest.raises(OutOfPages):
        pool.allocate(3)
    with pytest.raises(BrokenInvariant, match="4 pages are locked without an owner"):
        pool.check_idle()
    cache.unlock(handle)
    assert len(pool.allocate(6)) == 6


def test_check_idle_notices_lost_and_shared_pages() -> None:
    pool = PagePool(4, cache := RadixCache(page_size=1))
    pages = pool.allocate(2)
    with pytest.raises(BrokenInvariant, match=r"lost pages: \[0 1\]; pages with two owners: \[\]"):
        pool.check_idle()
    cache.insert(ids(1), pages[:1])
    pool.free(pages[:1])  # the tree's page: the counts are right, the owners are not
    with pytest.raises(BrokenInvariant, match=r"lost pages: \[1\]; pages with two owners: \[0\]"):
        pool.check_idle()


def test_check_idle_notices_a_page_that_is_not_the_pools() -> None:
    pool = PagePool(4, cache := RadixCache(page_size=1))
    cache.insert(ids(1), ids(4))
    with pytest.raises(BrokenInvariant):
        pool.check_idle()


def test_check_idle_notices_wrong_books_of_free_and_of_cached_pages() -> None:
    pool = PagePool(4, RadixCache(page_size=1))
    pool.allocator._place[[0, 1]] = pool.allocator._place[[1, 0]]
    with pytest.raises(BrokenInvariant, match="a free page is not in its place"):
        pool.check_idle()
    pool = PagePool(4, cache := RadixCache(page_size=1))
    cache.insert(ids(1, 2), pool.allocate(2))
    cache._cached += 1
    with pytest.raises(BrokenInvariant, match="3 pages are counted, 2 are in the tree"):
        pool.check_idle()


# ---- the cache that keeps nothing ----


def test_naive_keeps_nothing() -> None:
    cache = NaiveCache(page_size=2)
    result = cache.insert(ids(1, 2, 3, 4, 5), ids(7, 8))
    assert result.handle.cached_len == 0
    assert result.duplicates.tolist() == [7, 8]
    assert cache.match(ids(1, 2)).cached_len == 0
    assert cache.evict(5).tolist() == cache.reset().tolist() == cache.owned_pages().tolist() == []
    assert (cache.cached_pages, cache.locked_pages, cache.evictable_pages) == (0, 0, 0)
    cache.check()
    with pytest.raises(ValueError, match="whole pages"):
        cache.insert(ids(1, 2, 3), ids(7, 8))


def test_naive_notices_a_second_unlock() -> None:
    cache = NaiveCache(page_size=2)
    handle = cache.match(ids(1, 2))
    cache.lock(handle)
    cache.unlock(handle)
    with pytest.raises(ValueError, match="not locked"):
        cache.unlock(handle)
