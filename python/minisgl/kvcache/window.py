"""Pool of pages for the layers that attend to a window, which give back pages behind the window.

These layers form a group with page numbers and a page table of its own, whose rows have an entry for each entry of the
full group's. A running request holds the pages that its next query can see, and gives back earlier ones. In the prefix
cache, a cached page of the full group may have a windowed page, which is evicted separately, least recently used first.
So a cached prefix may lack windowed pages, and can be used up to a position only if the window before that position is
cached. This is policy on page numbers, as in `kvcache.pages`: NumPy only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minisgl.core import Int32Array, pages_for
from minisgl.kvcache.base import empty_pages, require
from minisgl.kvcache.pages import OutOfPages, PageAllocator

ABSENT = -1  # in place of a windowed page
_LOOKED_AT = 64  # pages of the eviction queue that are examined at a time
# Length of the usual sequence, from which the sizes of the two pools follow: this share of the context, but at most
# USUAL_LEN tokens and at least USUAL_WINDOWS windows.
USUAL_SHARE, USUAL_LEN, USUAL_WINDOWS = 1 / 8, 4096, 4


@dataclass(frozen=True, slots=True)
class WindowGroup:
    """The group of layers with a window."""

    window: int  # longest window: number of positions that a query attends to, its own included
    num_pages: int


def pages_behind(window: int, page_size: int) -> int:
    """Return how many pages before its own a query may see: a window of 8 tokens reaches back 2 pages of 4."""
    return pages_for(window - 1, page_size)


def leaves_pages_behind(windows: Sequence[int], page_size: int, context_len: int) -> bool:
    """Return True if a sequence can become so long that layers with these windows no longer see its first page."""
    return bool(windows) and pages_behind(max(windows), page_size) + 1 < pages_for(context_len, page_size)


def usual_ratio(window: int, page_size: int, context_len: int) -> float:
    """Return the ratio of windowed to full pages with which both pools run out at the same time.

    It is for sequences of the usual length: an eighth of the context, but at most 4096 tokens and at least 4 windows.
    Such a sequence holds a full page for each page_size tokens, and the windowed pages of one window. With a window of
    1024, a context of 32k and pages of 16, sequences of 4096 tokens hold 65 windowed and 256 full pages: 0.254.
    """
    usual = min(context_len, max(min(USUAL_LEN, int(USUAL_SHARE * context_len)), USUAL_WINDOWS * window))
    return min((pages_behind(window, page_size) + 1) / pages_for(usual, page_size), 1.0)


def windowed_pages(num_pages: int, ratio: float, window: int, page_size: int, max_prefill_tokens: int) -> int:
    """Return the number of windowed pages for `num_pages` full ones: the ratio's share, and room for chunks.

    All prefill tokens of a step need windowed pages, because a chunk is written before it is behind any window. There
    are at least as many pages as one sequence needs, and never more than in the full group.
    """
    shared = max(math.ceil(num_pages * ratio), pages_behind(window, page_size) + 2)
    return min(num_pages, shared + pages_for(max_prefill_tokens, page_size))


class WindowPool:
    """All windowed pages. Each is free, owned by one request, or belongs to a cached page of the full group.

    Implements kvcache.base.CacheObserver: when a full page leaves the cache, its windowed page is freed. "Cached" pages
    in arguments are page numbers of the full group.
    """

    def __init__(self, group: WindowGroup, num_full_pages: int) -> None:
        self.window = group.window
        self.allocator = PageAllocator(group.num_pages)
        self.evicted = 0  # pages that the cache gave up for requests, since the start
        # By page of the full group:
        self._window_page: Int32Array = np.full(num_full_pages, ABSENT, dtype=np.int32)
        self._locks = np.zeros(num_full_pages, dtype=np.int32)
        self._used_at = np.zeros(num_full_pages, dtype=np.int64)
        self._clock = 0
        self._cached = 0
        self._locked = 0
        # Full pages in the order of eviction, as last sorted, and their times of use then. Pages that have been used,
        # locked or dropped since are skipped; all others are older than any page that was used since.
        self._queue = np.empty(0, dtype=np.intp)
        self._queued_at = np.empty(0, dtype=np.int64)

    @property
    def num_pages(self) -> int:
        return self.allocator.num_pages

    @property
    def cached_pages(self) -> int:
        return self._cached

    @property
    def locked_pages(self) -> int:
        """Cached pages that requests have locked."""
        return self._locked

    @property
    def available(self) -> int:
        """Pages that `allocate` can give: free ones, and cached ones that are not locked."""
        return self.allocator.num_free + self._cached - self._locked

    # ---- pages of requests ----

    def allocate(self, num_pages: int) -> Int32Array:
        """Give pages to the caller, evicting what the free list lacks; OutOfPages if there are too few."""
        if num_pages > self.available:
            raise OutOfPages(num_pages, self.available)
        missing = num_pages - self.allocator.num_free
        if missing > 0:
            self._evict(missing)
        return self.allocator.allocate(num_pages)

    def free(self, pages: Int32Array) -> None:
        """Take pages back from their owner, as `PageAllocator.free`."""
        self.allocator.free(pages)

    # ---- pages of the cache ----

    def window_pages(self, cached: Int32Array) -> Int32Array:
        """Return the windowed page of each cached page, or ABSENT."""
        found: Int32Array = self._window_page[cached]
        return found

    def adopt(self, cached: Int32Array, pages: Int32Array) -> Int32Array:
        """Give windowed pages to the cached pages that have none; return the others, which stay the caller's.

        `pages` are the windowed pages of a sequence from its start, ABSENT where the caller owns none; `cached` are the
        cached pages of its first tokens. The pages taken become the most recently used.
        """
        given = pages[: len(cached)]
        taken = (given != ABSENT) & (self._window_page[cached] == ABSENT)
        self._window_page[cached[taken]] = given[taken]
        self._cached += int(taken.sum())
        self.use(cached[taken])
        left: Int32Array = np.concatenate([given[~taken], pages[len(cached) :]])
        kept: Int32Array = left[left != ABSENT]
        return kept

    def put(self, cached: Int32Array, pages: Int32Array) -> None:
        """Give windowed pages to cached ones, whose former windowed pages must not be locked and are freed."""
        self.drop(cached)
        self._window_page[cached] = pages
        self._cached += len(cached)
        self.use(cached)

    def is_locked(self, cached: Int32Array) -> bool:
        """Return True if the windowed page of one of these is locked."""
        return bool(self._locks[cached].any())

    def use(self, cached: Int32Array) -> None:
        """Make the windowed pages of these the most recently used, the last one most."""
        self._used_at[cached] = self._clock + np.arange(len(cached))
        self._clock += len(cached)

    def lock(self, cached: Int32Array) -> None:
        """Lock the windowed pages of these against eviction; none may be absent or named twice."""
        require(bool((self._window_page[cached] != ABSENT).all()), "a windowed page that is absent is locked")
        self._locked += int((self._locks[cached] == 0).sum())
        self._locks[cached] += 1

    def unlock(self, cached: Int32Array) -> None:
        """Undo one lock for each time that a page is named, which counts as a use."""
        np.subtract.at(self._locks, cached, 1)
        require(bool((self._locks[cached] >= 0).all()), "a windowed page is unlocked that was not locked")
        self._locked -= len(np.unique(cached[self._locks[cached] == 0]))
        self.use(cached)

    def drop(self, cached: Int32Array) -> None:
        """Free the windowed pages of these, which must not be locked."""
        require(not self.is_locked(cached), "a windowed page that is locked is to be freed")
        pages = self.window_pages(cached)
        pages = pages[pages != ABSENT]
        self._window_page[cached] = ABSENT
        self._cached -= len(pages)
        self.allocator.free(pages)

    def stored(self, parent: int | None, tokens: Int32Array, pages: Int32Array, salt: bytes) -> None:
        pass  # requests give their windowed pages with `put` and `adopt`

    def removed(self, pages: Int32Array) -> None:
        self.drop(pages)

    def cleared(self) -> None:
        self.drop(np.flatnonzero(self._window_page != ABSENT).astype(np.int32))

    def drop_unlocked(self, cached: Int32Array) -> None:
        """Free the windowed pages of these that are not locked."""
        self.drop(cached[self._locks[cached] == 0])

    def _evict(self, num_pages: int) -> None:
        """Free the `num_pages` least recently used windowed pages that are not locked; there are enough."""
        self.evicted += num_pages
        while num_pages > 0:
            if len(self._queue) == 0:
                unlocked = np.flatnonzero((self._window_page != ABSENT) & (self._locks == 0))
                self._queue = unlocked[np.argsort(self._used_at[unlocked], kind="stable")]
                self._queued_at = self._used_at[self._queue]
            first = self._queue[: max(num_pages, _LOOKED_AT)]
            unused = (self._window_page[first] != ABSENT) & (self._locks[first] == 0)
            unused &= self._used_at[first] == self._queued_at[: len(first)]
            chosen = np.flatnonzero(unused)[:num_pages]
            self.drop(first[chosen].astype(np.int32))
            num_pages -= len(chosen)
            looked_at = len(first) if num_pages > 0 else int(chosen[-1]) + 1
            self._queue, self._queued_at = self._queue[looked_at:], self._queued_at[looked_at:]

    # ---- checking ----

    def check(self, cached: Int32Array, held: Int32Array | None = None) -> None:
        """Raise BrokenInvariant if a page has no owner or two; for tests, slow.

        `cached`: all cached pages of the full group; `held`: all windowed pages that requests own.
        """
        self.allocator.check()
        beside = self._window_page[cached]
        beside = beside[beside != ABSENT]
        require(len(beside) == int((self._window_page != ABSENT).sum()), "a windowed page stands beside one not cached")
        require(len(beside) == self._cached, f"{self._cached} windowed pages are counted, {len(beside)} are cached")
        locked = (self._locks > 0) & (self._window_page != ABSENT)
        require(int(locked.sum()) == self._locked, f"{self._locked} locked windowed pages are counted")
        require(int((self._locks > 0).sum()) == self._locked, "a windowed page is locked that is absent")
        owned = np.concatenate([self.allocator.free_pages(), beside, empty_pages() if held is None else held])
        owners = np.bincount(owned, minlength=self.num_pages)
        require(
            bool((owners == 1).all()),
            f"lost windowed pages: {np.flatnonzero(owners == 0)}; with two owners: {np.flatnonzero(owners > 1)}",
        )

    def check_idle(self, cached: Int32Array) -> None:
        """Raise BrokenInvariant unless every windowed page is free or cached, and none is locked."""
        self.check(cached)
        require(self._locked == 0, f"{self._locked} windowed pages are locked without an owner")
