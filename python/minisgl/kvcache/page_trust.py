"""Trust in the content of pages: K and V that are NaN must not spoil all requests that find them in the cache.

K and V are not examined, which would cost a launch in every step. NaN in a page makes the logits of all later tokens
NaN, so a request's logits tell about all pages that it reads. A new page is unproven. It becomes proven when a request
that reads it gets finite logits, and suspect when a request that reads it fails before that. So a request may fail
because of a page that another one has computed, but the next request does not find that page any more.
"""

from __future__ import annotations

import numpy as np

from minisgl.core import Int32Array

_UNPROVEN, _PROVEN, _SUSPECT = range(3)


class PageTrust:
    """State of each page; it is kept until the page is allocated anew."""

    def __init__(self, num_pages: int) -> None:
        self._states = np.full(num_pages, _UNPROVEN, dtype=np.int8)

    def allocated(self, pages: Int32Array) -> None:
        """Make pages unproven that will be written anew."""
        self._states[pages] = _UNPROVEN

    def prove(self, pages: Int32Array) -> None:
        """Record that finite logits were computed from these pages. Suspect ones stay so."""
        self._states[self._unproven(pages)] = _PROVEN

    def suspect_unproven(self, pages: Int32Array) -> None:
        """Suspect those of the pages that are unproven."""
        self._states[self._unproven(pages)] = _SUSPECT

    def suspect(self, pages: Int32Array) -> None:
        """Suspect pages, whatever they were."""
        self._states[pages] = _SUSPECT

    def usable(self, pages: Int32Array) -> int:
        """Return how many pages of a prefix come before the first suspect one."""
        suspects = np.flatnonzero(self._states[pages] == _SUSPECT)
        return int(suspects[0]) if len(suspects) else len(pages)

    def _unproven(self, pages: Int32Array) -> Int32Array:
        found: Int32Array = pages[self._states[pages] == _UNPROVEN]
        return found
