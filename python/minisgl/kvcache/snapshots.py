"""Index of snapshots: maps the last page of a cached prefix to the entry of a bounded store that has its state.

A recurrent layer cannot use K and V of a prefix: it needs its state at the prefix's end. A page is in the radix tree at
most once, and there it stands for the whole prefix that it ends. So a snapshot is found by the number of its prefix's
last page, independently of the tree's locks and splits. When a page leaves the tree, its snapshot is dropped too; when
the store is full, the least recently used snapshot is evicted without its page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from minisgl.core import Int32Array
from minisgl.kvcache.base import require


class SnapshotStore:
    """Entries 0 .. num_entries - 1, each free or with one snapshot. Implements kvcache.base.CacheObserver.

    An example with 2 entries: snapshots after pages 4 and 7 fill them. `find([3, 4, 5, 7, 9])` is 4, because the first
    4 of these pages end with page 7; `use(7)` returns the entry to restore. A snapshot after page 8 gets the entry of
    page 4, which is the least recently used. When page 7 is evicted from the tree, its entry becomes free.
    """

    def __init__(self, num_entries: int, num_pages: int) -> None:
        self.num_entries = num_entries
        self.hits = 0  # snapshots that were restored
        self.saved = 0
        self.evicted = 0  # snapshots that were replaced by others, or dropped with their page
        self._has = np.zeros(num_pages, dtype=np.bool_)  # by page: True if it has a snapshot
        self._entries: OrderedDict[int, int] = OrderedDict()  # by page, least recently used first
        self._free = list(range(num_entries))[::-1]

    @property
    def num_used(self) -> int:
        """Number of entries that hold a snapshot."""
        return len(self._entries)

    def __contains__(self, page: int) -> bool:
        return page in self._entries

    def find(self, pages: Int32Array) -> int:
        """Return the number of pages up to the last one with a snapshot; 0 if none has one."""
        held = np.flatnonzero(self._has[pages])
        return int(held[-1]) + 1 if len(held) else 0

    def use(self, page: int) -> int:
        """Return the entry of the snapshot after this page, which becomes the most recently used."""
        self._entries.move_to_end(page)
        self.hits += 1
        return self._entries[page]

    def add(self, page: int) -> int:
        """Return an entry for the state after this page: a free one, or that of the least recently used snapshot.

        BrokenInvariant if the page already has a snapshot.
        """
        require(page not in self._entries, f"page {page} has a snapshot already")
        if not self._free:
            self.discard(next(iter(self._entries)))
            self.evicted += 1
        self._entries[page] = entry = self._free.pop()
        self._has[page] = True
        self.saved += 1
        return entry

    def discard(self, page: int) -> None:
        """Drop the snapshot after this page, if there is one."""
        entry = self._entries.pop(page, None)
        if entry is not None:
            self._free.append(entry)
            self._has[page] = False

    def discard_entries(self, entries: Iterable[int]) -> None:
        """Drop the snapshots in these entries, which were never written."""
        unwritten = set(entries)
        for page in [page for page, entry in self._entries.items() if entry in unwritten]:
            self.discard(page)

    def pages(self) -> list[int]:
        """Return the pages with a snapshot, least recently used first; for checks."""
        return list(self._entries)

    # ---- as observer of the tree ----

    def stored(self, parent: int | None, tokens: Int32Array, pages: Int32Array, salt: bytes) -> None:
        pass  # a new page has no snapshot yet

    def removed(self, pages: Int32Array) -> None:
        for page in pages[self._has[pages]].tolist():
            self.discard(page)
            self.evicted += 1

    def cleared(self) -> None:
        for page in list(self._entries):
            self.discard(page)
            self.evicted += 1

    def check(self) -> None:
        """Raise BrokenInvariant if an entry is lost or has two owners; for tests, slow."""
        entries = sorted([*self._free, *self._entries.values()])
        require(entries == list(range(self.num_entries)), f"entries are lost or owned twice: {entries}")
        require(np.flatnonzero(self._has).tolist() == sorted(self._entries), "a page's mark and its snapshot disagree")
