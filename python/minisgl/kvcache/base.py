"""Contract between a cache of prefixes and the scheduler.

A cache maps token prefixes to the pages that hold their keys and values, in whole pages. It owns its pages: only
`evict`, `forget` and `reset` return them. A request uses it like this:

    handle = cache.match(prompt[:-1])           # at least one token is left to compute
    cache.lock(handle)                          # at once: any eviction or unlock may make an unlocked handle stale
    ...                                         # allocate the other pages, prefill
    result = cache.insert(tokens, pages)        # all computed tokens; others may share them from here on
    cache.lock(result.handle)
    cache.unlock(handle)                        # in this order, so that nothing is evicted in between
    ...                                         # decode on the same pages, also those in result.duplicates
    last = cache.insert(tokens, pages)          # the request has ended
    cache.unlock(result.handle)                 # then free last.duplicates and a partly filled last page
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from minisgl.core import CacheNode, Int32Array


class BrokenInvariant(AssertionError):
    """The records of a cache contradict each other: a bug in the cache or in its caller."""


def require(condition: bool, message: str) -> None:
    """Raise BrokenInvariant unless the condition holds: an `assert` that `python -O` keeps."""
    if not condition:
        raise BrokenInvariant(message)


@dataclass(slots=True, eq=False)
class CacheHandle:
    """A cached prefix. It is valid while it is locked, whatever happens to the cache."""

    cached_len: int  # tokens, a whole number of pages
    pages: Int32Array  # pages of the prefix, in order; the cache owns them
    node: Any = field(default=None, repr=False)  # end of the prefix in the cache, for the cache alone
    locks: int = 0  # number of locks through this handle


class InsertResult(NamedTuple):
    handle: CacheHandle  # prefix of all whole pages as the cache now holds it; not locked
    duplicates: Int32Array  # given pages that the cache did not take, which the caller still owns


class CacheObserver(Protocol):
    """Learns which pages a cache holds. The cache calls it after each change."""

    def stored(self, parent: int | None, tokens: Int32Array, pages: Int32Array, salt: bytes) -> None:
        """New pages are cached, one for each page_size tokens, after the cached page `parent` (None: at the start)."""

    def removed(self, pages: Int32Array) -> None:
        """These pages are no longer cached."""

    def cleared(self) -> None:
        """No page is cached any more."""


class CacheManager(Protocol):
    """Cache of prefixes. Its counts are kept up to date, so reading them costs nothing."""

    page_size: int
    keeps_prefixes: bool  # False: what is inserted is never found

    @property
    def cached_pages(self) -> int:
        """Pages that the cache owns."""

    @property
    def locked_pages(self) -> int:
        """Cached pages that are locked."""

    @property
    def evictable_pages(self) -> int:
        """Cached pages that are not locked."""

    def match(self, tokens: Int32Array, salt: bytes = b"") -> CacheHandle:
        """Return the longest cached prefix of these tokens; it becomes the most recently used.

        Prefixes that were inserted with another salt are never found.
        """

    def lock(self, handle: CacheHandle) -> None:
        """Keep a prefix from being evicted. Locks are counted; ValueError if the handle is stale."""

    def unlock(self, handle: CacheHandle) -> None:
        """Undo one lock of this handle, and count a use of the prefix; ValueError if the handle has no lock."""

    def locked_len(self, handle: CacheHandle) -> int:
        """Return how many tokens of this prefix are locked by any handle; the handle must not be stale."""

    def insert(self, tokens: Int32Array, pages: Int32Array, salt: bytes = b"") -> InsertResult:
        """Offer the pages of these tokens, one for each whole page of them; ValueError for any other number.

        Tokens after the last whole page are ignored. If the cache holds another page for the same tokens, the given one
        is a duplicate and stays the caller's; the cache owns all others from now on. The prefix becomes the most
        recently used.
        """

    def evict(self, num_pages: int) -> Int32Array:
        """Remove the least recently used unlocked pages, min(num_pages, evictable_pages) of them, and return them.

        A prefix loses its last pages first. The caller owns the returned pages.
        """

    def forget(self, tokens: Int32Array, length: int, salt: bytes = b"") -> Int32Array:
        """Remove the cached pages of these tokens after the whole pages of the first `length`, and all below them.

        This is for pages that were inserted but never written, or whose content cannot be trusted. The caller owns the
        returned pages. ValueError if any is locked.
        """

    def reset(self) -> Int32Array:
        """Remove all pages that are not locked; the caller owns the returned pages."""

    def tree(self, max_nodes: int) -> list[CacheNode]:
        """Return up to `max_nodes` of the largest nodes, parents first; the search is bounded, so it may miss some."""

    def owned_pages(self) -> Int32Array:
        """Return all cached pages, in no particular order; for checks, slow."""

    def check(self) -> None:
        """Raise BrokenInvariant if the cache's records contradict each other; for tests, slow."""


def empty_pages() -> Int32Array:
    return np.empty(0, dtype=np.int32)


def require_one_page_each(tokens: Int32Array, pages: Int32Array, page_size: int) -> None:
    if len(pages) != len(tokens) // page_size:
        raise ValueError(
            f"{len(tokens)} tokens have {len(tokens) // page_size} whole pages of {page_size}, not {len(pages)}"
        )


def require_page_size(page_size: int) -> None:
    if page_size < 1:
        raise ValueError(f"the page size must be at least 1, not {page_size}")


def require_locked(handle: CacheHandle) -> None:
    if handle.locks < 1:
        raise ValueError(f"this handle of {handle.cached_len} tokens is not locked")
