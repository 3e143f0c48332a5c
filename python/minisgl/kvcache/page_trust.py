"""Trust in the content of pages: K and V that are NaN must not spoil all requests that find them in the cache.

K and V are not examined, which would cost a launch in every step. NaN in a page makes the logits of all later tokens
NaN, so a request's logits tell about all pages that it reads. A new page is unproven. It becomes proven when a request
that reads it gets finite logits and does not fail itself, and suspect when a request that reads it fails before that.
So a request may fail because of a page that another one has computed, but the next request does not find that page any
more.

A request may add something to a cached page that another one has computed: a windowed page, or a snapshot of a
recurrent state. Most readers of the page do not read that, so only a request that began there proves it.

Where layers attend to a window, a NaN spreads to all later tokens only if a layer after it attends to all tokens.
Models whose last layers all have windows may therefore have a page proven by tokens that did not read its NaN.
"""

from __future__ import annotations

import numpy as np

from minisgl.core import Int32Array

_UNPROVEN, _ADDED_TO, _PROVEN, _SUSPECT = range(4)  # the first two are not proven


class PageTrust:
    """State of each page; it is kept until the page is allocated anew."""

    def __init__(self, num_pages: int) -> None:
        self._states = np.full(num_pages, _UNPROVEN, dtype=np.int8)

    def allocated(self, pages: Int32Array) -> None:
        """Make pages unproven that will be written anew."""
        self._states[pages] = _UNPROVEN

    def added_to(self, pages: Int32Array) -> None:
        """Record that a request has added to pages that another one has computed. Suspect ones stay so."""
        self._states[pages[self._states[pages] != _SUSPECT]] = _ADDED_TO

    def prove(self, pages: Int32Array, began: Int32Array) -> None:
        """Record that finite logits were computed from `pages`, and from what was added to the pages `began`."""
        self._states[pages[self._states[pages] == _UNPROVEN]] = _PROVEN
        self._states[began[self._states[began] == _ADDED_TO]] = _PROVEN

    def suspect_unproven(self, pages: Int32Array) -> None:
        """Suspect those of the pages that are not proven."""
        self._states[pages[self._states[pages] < _PROVEN]] = _SUSPECT

    def suspect(self, pages: Int32Array) -> None:
        """Suspect pages, whatever they were."""
        self._states[pages] = _SUSPECT

    def usable(self, pages: Int32Array) -> int:
        """Return how many pages of a prefix come before the first suspect one."""
        suspects = np.flatnonzero(self._states[pages] == _SUSPECT)
        return int(suspects[0]) if len(suspects) else len(pages)
