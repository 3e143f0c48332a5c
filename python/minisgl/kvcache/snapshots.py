"""Snapshots of recurrent states behind cached prefixes: which place of a bounded store has the state behind which page.

K and V of a prefix are of no use to a recurrent layer, which needs its state at the end of it. The pages of the radix
tree stay the index: a page is in the tree once at most, and stands there for the whole prefix that it ends. So a
snapshot is found by the number of its prefix's last page, and neither locks nor splits of the tree concern it. When
the page leaves the tree, its snapshot goes; when the store is full, the least recently used snapshot goes alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from minisgl.core import Int32Array
from minisgl.kvcache.base import require


class SnapshotStore:
    """Implements kvcache.base.CacheObserver. Places 0 .. num_places - 1, each free or holding one snapshot.

    An example with 2 places: snapshots behind pages 4 and 7 fill them. `find([3, 4, 5, 7, 9])` is 4, because the first
    4 of these pages end with page 7; `use(7)` says from which place to restore. A snapshot behind page 8 takes the
    place of page 4's, which was used before. When page 7 is evicted from the tree, its place is free.
    """

    def __init__(self, num_places: int, num_pages: int) -> None:
        self.num_places = num_places
        self.hits = 0  # restored
        self.saved = 0
        self.evicted = 0  # gave way to another, or went with their page
        self._has = np.zeros(num_pages, dtype=np.bool_)  # by page
        self._places: OrderedDict[int, int] = OrderedDict()  # by page, least recently used first
        self._free = list(range(num_places))[::-1]

    @property
    def num_taken(self) -> int:
        """Places that hold a snapshot."""
        return len(self._places)

    def __contains__(self, page: int) -> bool:
        return page in self._places

    def find(self, pages: Int32Array) -> int:
        """Return how many of a prefix's pages, from its first, end with a snapshot; 0: none does."""
        held = np.flatnonzero(self._has[pages])
        return int(held[-1]) + 1 if len(held) else 0

    def use(self, page: int) -> int:
        """Return the place of the snapshot behind this page, which becomes the most recently used."""
        self._places.move_to_end(page)
        self.hits += 1
        return self._places[page]

    def add(self, page: int) -> int:
        """Return a place for the state behind this page: a free one, or that of the least recently used snapshot.

        BrokenInvariant if the page has a snapshot.
        """
        require(page not in self._places, f"page {page} has a snapshot already")
        if not self._free:
            self.discard(next(iter(self._places)))
            self.evicted += 1
        self._places[page] = place = self._free.pop()
        self._has[page] = True
        self.saved += 1
        return place

    def discard(self, page: int) -> None:
        """Forget the snapshot behind this page, if there is one."""
        place = self._places.pop(page, None)
        if place is not None:
            self._free.append(place)
            self._has[page] = False

    def discard_places(self, places: Iterable[int]) -> None:
        """Forget what is in these places: it was never written."""
        unwritten = set(places)
        for page in [page for page, place in self._places.items() if place in unwritten]:
            self.discard(page)

    def pages(self) -> list[int]:
        """Return the pages that have a snapshot, the least recently used first; for checks."""
        return list(self._places)

    # ---- what the tree tells ----

    def stored(self, parent: int | None, tokens: Int32Array, pages: Int32Array, salt: bytes) -> None:
        """A page comes without a snapshot."""

    def removed(self, pages: Int32Array) -> None:
        for page in pages[self._has[pages]].tolist():
            self.discard(page)
            self.evicted += 1

    def cleared(self) -> None:
        for page in list(self._places):
            self.discard(page)
            self.evicted += 1

    def check(self) -> None:
        """Raise BrokenInvariant if a place is lost or has two owners; for tests, slow."""
        places = sorted([*self._free, *self._places.values()])
        require(places == list(range(self.num_places)), f"places are lost or owned twice: {places}")
        require(np.flatnonzero(self._has).tolist() == sorted(self._places), "a page's mark and its snapshot disagree")
