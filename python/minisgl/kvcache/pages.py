"""Allocation of pages: the free list, and the pool that also evicts pages from the cache."""

from __future__ import annotations

import numpy as np

from minisgl.core import Int32Array
from minisgl.kvcache.base import CacheManager, require

_ALLOCATED = -1


class OutOfPages(Exception):
    """More pages are requested than are available."""

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(f"{wanted} pages are requested, {available} are available")
        self.wanted = wanted
        self.available = available


class PageAllocator:
    """Free list of the pages 0 .. num_pages - 1, a stack in an array. The caller owns a page until it frees it.

    The place of each free page on the stack is recorded, so that freeing a page twice, or one that does not exist, is
    noticed at once and changes nothing.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"there must be at least 1 page, not {num_pages}")
        self.num_pages = num_pages
        self._stack = np.arange(num_pages, dtype=np.int32)[::-1].copy()  # page 0 is on top
        self._place = self._stack.copy()  # by page: its index on the stack, or _ALLOCATED
        self._num_free = num_pages

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate(self, num_pages: int) -> Int32Array:
        """Give pages to the caller; OutOfPages if there are too few, ValueError for a negative number."""
        if num_pages < 0:
            raise ValueError(f"{num_pages} pages are requested")
        if num_pages > self._num_free:
            raise OutOfPages(num_pages, self._num_free)
        self._num_free -= num_pages
        pages = self._stack[self._num_free : self._num_free + num_pages][::-1].copy()
        self._place[pages] = _ALLOCATED
        return pages

    def free(self, pages: Int32Array) -> None:
        """Take pages back from their owner; ValueError if one of them is free, foreign or given twice."""
        if len(pages) == 0:
            return
        if pages.min() < 0 or pages.max() >= self.num_pages:
            raise ValueError(f"pages to free must be between 0 and {self.num_pages - 1}: {pages}")
        if (self._place[pages] != _ALLOCATED).any():
            raise ValueError(f"some of these pages are free already: {pages}")
        places = np.arange(self._num_free, self._num_free + len(pages), dtype=np.int32)
        self._place[pages] = places
        if (self._place[pages] != places).any():  # a page has one place only: the second overwrote the first
            self._place[pages] = _ALLOCATED
            raise ValueError(f"a page is freed twice: {pages}")
        self._stack[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def free_pages(self) -> Int32Array:
        """Return all free pages; the last one is allocated next. For checks."""
        return self._stack[: self._num_free].copy()

    def check(self) -> None:
        """Raise BrokenInvariant if the stack and the recorded places disagree."""
        places = np.arange(self._num_free)
        require(bool((self._place[self.free_pages()] == places).all()), "a free page is not in its place")
        free = int((self._place != _ALLOCATED).sum())
        require(free == self._num_free, f"{self._num_free} free pages are counted, {free} are marked")


class PagePool:
    """All pages of an engine. Each is free, cached, or owned by one request.

    A cached page is available as soon as it is not locked: available = free + evictable. Say a request holds 4 of 12
    pages; 3 of them are full, and the first 2 are in the cache and locked. So 8 are free, none is evictable, 8 are
    available. When the request ends, its third page goes into the cache, the last is freed, and the lock is removed:
    now 9 are free, 3 evictable, 12 available.
    """

    def __init__(self, num_pages: int, cache: CacheManager) -> None:
        self.allocator = PageAllocator(num_pages)
        self.cache = cache
        self.evicted = 0  # pages that the cache gave up for requests, since the start

    @property
    def num_pages(self) -> int:
        return self.allocator.num_pages

    @property
    def available(self) -> int:
        """Pages that `allocate` can give."""
        return self.allocator.num_free + self.cache.evictable_pages

    def allocate(self, num_pages: int) -> Int32Array:
        """Give pages to the caller, evicting what the free list lacks.

        OutOfPages, with nothing evicted, if there are too few.
        """
        if num_pages > self.available:
            raise OutOfPages(num_pages, self.available)
        missing = num_pages - self.allocator.num_free
        if missing > 0:
            self.allocator.free(self.cache.evict(missing))
            self.evicted += missing
        return self.allocator.allocate(num_pages)

    def free(self, pages: Int32Array) -> None:
        """Take pages back from their owner, as `PageAllocator.free`."""
        self.allocator.free(pages)

    def flush_cache(self) -> int:
        """Remove every cached prefix that is not locked; return the number of freed pages."""
        pages = self.cache.reset()
        self.allocator.free(pages)
        return len(pages)

    def check_idle(self) -> None:
        """Raise BrokenInvariant unless every page is free or cached and none is locked, as when no request runs."""
        self.allocator.check()
        self.cache.check()
        require(self.cache.locked_pages == 0, f"{self.cache.locked_pages} pages are locked without an owner")
        owned = np.concatenate([self.allocator.free_pages(), self.cache.owned_pages()])
        owners = np.bincount(owned, minlength=self.num_pages)
        require(
            len(owners) == self.num_pages and bool((owners == 1).all()),
            f"lost pages: {np.flatnonzero(owners == 0)}; pages with two owners: {np.flatnonzero(owners > 1)}",
        )
