"""Pages for requests: from the free list, and when that is short, from the cache."""

from __future__ import annotations

import numpy as np

from minisgl.core import Int32Array
from minisgl.kvcache.allocator import OutOfPages, PageAllocator
from minisgl.kvcache.base import CacheManager, require


class PagePool:
    """All pages of an engine. Each is free, cached, or owned by one request."""

    def __init__(self, num_pages: int, cache: CacheManager) -> None:
        self.allocator = PageAllocator(num_pages)
        self.cache = cache

    @property
    def num_pages(self) -> int:
        return self.allocator.num_pages

    @property
    def available(self) -> int:
        """Pages that `allocate` can give."""
        return self.allocator.num_free + self.cache.evictable_pages

    def allocate(self, num_pages: int) -> Int32Array:
        """Pages for the caller to own, evicting what is missing; OutOfPages, with nothing evicted, if too many."""
        if num_pages > self.available:
            raise OutOfPages(num_pages, self.available)
        missing = num_pages - self.allocator.num_free
        if missing > 0:
            self.allocator.free(self.cache.evict(missing))
        return self.allocator.allocate(num_pages)

    def free(self, pages: Int32Array) -> None:
        self.allocator.free(pages)

    def flush_cache(self) -> int:
        """Forget every prefix that is not locked; how many pages that freed."""
        pages = self.cache.reset()
        self.allocator.free(pages)
        return len(pages)

    def check_idle(self) -> None:
        """BrokenInvariant unless every page is either free or cached, and no prefix is locked: no request is left."""
        self.allocator.check()
        self.cache.check()
        require(self.cache.locked_pages == 0, f"{self.cache.locked_pages} pages are locked by nobody")
        owned = np.concatenate([self.allocator.free_pages(), self.cache.owned_pages()])
        owners = np.bincount(owned, minlength=self.num_pages)
        require(
            len(owners) == self.num_pages and bool((owners == 1).all()),
            f"lost pages: {np.flatnonzero(owners == 0)}; pages with two owners: {np.flatnonzero(owners > 1)}",
        )
