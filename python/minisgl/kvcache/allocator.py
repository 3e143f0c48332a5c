"""The free list: pages that nobody owns, on a stack in an array."""

from __future__ import annotations

import numpy as np

from minisgl.core import Int32Array
from minisgl.kvcache.base import require

_ALLOCATED = -1


class OutOfPages(Exception):
    """More pages were asked for than there are."""

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(f"{wanted} pages were asked for, {available} are available")
        self.wanted = wanted
        self.available = available


class PageAllocator:
    """Hands out the pages 0 .. num_pages - 1. Whoever is given a page owns it until it is freed.

    Each free page knows its place on the stack, so that freeing a page twice, or one that does not exist, is
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
        if num_pages < 0:
            raise ValueError(f"{num_pages} pages were asked for")
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
        """All free pages, the next to be allocated last; for checks."""
        return self._stack[: self._num_free].copy()

    def check(self) -> None:
        places = np.arange(self._num_free)
        require(bool((self._place[self.free_pages()] == places).all()), "a free page is not in its place")
        free = int((self._place != _ALLOCATED).sum())
        require(free == self._num_free, f"{self._num_free} free pages are counted, {free} are marked")
