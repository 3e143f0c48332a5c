"""Windowed pages of running requests: the pages that each row holds, and gives back as its window moves on.

The next query of a row sees at most the last `behind` + 1 of its pages, so earlier pages are given back when a step is
planned. That step may still read them: the device runs steps in order, and only a later step can overwrite them.
Entries of pages that were given back keep their numbers, which are not attended to.

Admission promises a prompt the pages that it will hold once it is computed. The pages of a step's chunks come from a
reserve, which is full again after the step is planned.
"""

from __future__ import annotations

import sys

import numpy as np

from minisgl.core import BoolArray, IndexArray, Int32Array, pages_for
from minisgl.kvcache.window import ABSENT, WindowPool, pages_behind
from minisgl.scheduler.requests.table import SlotTable


class WindowRows:
    """Owner of the windowed group's rows, whose entries correspond to those of the slot table's rows of full pages.

    Entries `start` .. `lent` of a row are locked pages of the cache; from max(start, lent) on they are the request's
    own.
    """

    def __init__(self, pool: WindowPool, table: SlotTable, num_full_pages: int, max_prefill_tokens: int) -> None:
        self.pool = pool
        self.given_back = 0  # pages, while their requests ran
        self._table = table
        self._behind = pages_behind(pool.window, table.page_size)
        # A request holds no more windowed pages than full ones, so equally many windowed pages never run out first.
        self._is_limit = pool.num_pages < num_full_pages
        self._chunks = pages_for(max_prefill_tokens, table.page_size)
        self._pages = np.zeros_like(table.pages)
        self._cached = np.zeros_like(table.pages)  # cached page of the full group to which a lent entry belongs
        self._start = np.zeros(table.num_slots, dtype=np.int32)
        self._lent = np.zeros(table.num_slots, dtype=np.int32)
        self._promised = np.zeros(table.num_slots, dtype=np.int32)  # pages, while the prompt is computed; then 0

    @property
    def unpromised(self) -> int:
        """Number of pages that are available and not promised."""
        if not self._is_limit:
            return sys.maxsize
        owed = np.maximum(self._promised - (self._table.num_pages - self._start), 0)
        return self.pool.available - self._chunks - int(owed.sum())

    def usable(self, cached: Int32Array) -> int:
        """Return how many of a cached prefix's pages a request can use: the window before their end must be cached.

        Say windows reach 2 pages back, and all cached pages 0 to 5 except 3 have a windowed page: a query after page 5
        would see 4 and 5, so all 6 are usable. Without 4, only the first 3 are, after which a query sees 1 and 2.
        """
        present = self.pool.window_pages(cached) != ABSENT
        if present[max(len(cached) - self._behind, 0) :].all():
            return len(cached)
        ends = np.arange(1, len(cached) + 1)
        last_absent = np.maximum.accumulate(np.where(present, 0, ends))
        found = ends[last_absent <= np.maximum(ends - self._behind, 0)]
        return int(found[-1]) if len(found) else 0

    def seen_after(self, prefix: Int32Array) -> Int32Array:
        """Return the pages of a prefix in the window of the query after it."""
        return prefix[self._first(prefix) :]

    def lock(self, prefix: Int32Array) -> None:
        """Lock the window before the end of a usable prefix."""
        self.pool.lock(self.seen_after(prefix))

    def unlock(self, prefix: Int32Array) -> None:
        """Undo `lock`, because the request does not enter."""
        self.pool.unlock(self.seen_after(prefix))

    def needed(self, num_tokens: int, prefix: Int32Array) -> int:
        """Return the number of pages to promise to a request with `num_tokens` known tokens and a locked prefix."""
        return self._held(num_tokens) - (len(prefix) - self._first(prefix))

    def enter(self, slot: int, num_tokens: int, prefix: Int32Array) -> Int32Array:
        """Begin the row of a request with a locked prefix; return the row's entries."""
        first, length = self._first(prefix), len(prefix)
        self._pages[slot, :first] = 0  # any page: these entries are not attended to
        self._pages[slot, first:length] = self.pool.window_pages(prefix[first:])
        self._cached[slot, :length] = prefix
        self._start[slot], self._lent[slot] = first, length
        self._promised[slot] = self._held(num_tokens)
        return self._pages[slot, :length].copy()

    def extend(self, entries: Int32Array) -> Int32Array:
        """Give each new entry [k, 3] (slot, index, full page) a windowed page; return [k, 4] with that page."""
        pages = self.pool.allocate(len(entries))
        self._pages[entries[:, 0], entries[:, 1]] = pages
        return np.column_stack([entries, pages])

    def can_share(self, slot: int, cached: Int32Array) -> bool:
        """Return True if the windowed pages that `share` would replace are not locked."""
        return not self.pool.is_locked(cached[self._first_own(slot) :])

    def share(self, slot: int, cached: Int32Array) -> None:
        """Give a row's own windowed pages to the cached pages of its tokens, and lock them there."""
        first, length = self._first_own(slot), len(cached)
        if first < length:
            self.pool.put(cached[first:], self._pages[slot, first:length])
            self.pool.lock(cached[first:])
            self._cached[slot, first:length] = cached[first:]
            self._lent[slot] = length

    def give_back_behind(self, slots: IndexArray, prefilled: BoolArray) -> None:
        """Give back the pages that no step after the one just planned can see.

        `prefilled`: slots whose prompts this step completes.
        """
        self._promised[slots[prefilled]] = 0
        start = self._start[slots]
        first = np.maximum(self._table.num_pages[slots] - self._behind - 1, start)
        counts = first - start
        if not counts.any():
            return
        self._start[slots] = first
        owners = np.repeat(slots, counts)
        index = np.repeat(first - np.cumsum(counts), counts) + np.arange(len(owners))
        is_lent = index < self._lent[owners]
        self.pool.unlock(self._cached[owners[is_lent], index[is_lent]])
        self.pool.free(self._pages[owners[~is_lent], index[~is_lent]])
        self.given_back += len(owners)

    def leave(self, slot: int, cached: Int32Array) -> None:
        """Give all pages of a row back; `cached`: cached pages of its tokens, which keep its own if they have none."""
        start, lent, length = int(self._start[slot]), int(self._lent[slot]), int(self._table.num_pages[slot])
        own = np.full(length, ABSENT, dtype=np.int32)
        own[max(start, lent) :] = self._pages[slot, max(start, lent) : length]
        self.pool.free(self.pool.adopt(cached, own))
        self.pool.unlock(self._cached[slot, start:lent])
        self._promised[slot] = self._start[slot] = self._lent[slot] = 0

    def counts(self) -> dict[str, int]:
        """Return the number of windowed pages by state, for /server_info."""
        return {
            "window_pages": self.pool.num_pages,
            "window_pages_free": self.pool.allocator.num_free,
            "window_pages_cached": self.pool.cached_pages,
            "window_pages_locked": self.pool.locked_pages,
            "window_pages_evicted": self.pool.evicted,
            "window_pages_given_back": self.given_back,
        }

    def _first(self, prefix: Int32Array) -> int:
        return max(len(prefix) - self._behind, 0)

    def _held(self, num_tokens: int) -> int:
        """Return the number of pages that a computed prompt holds, and one more that its chunk may begin."""
        return min(pages_for(num_tokens, self._table.page_size), self._behind + 1) + 1

    def _first_own(self, slot: int) -> int:
        return max(int(self._start[slot]), int(self._lent[slot]))
