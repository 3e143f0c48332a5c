"""Contract between a cache of prefixes and the scheduler.

A cache maps token prefixes to the pages that hold their keys and values, a whole page at a time. Every page it
holds is its own: nobody frees such a page, and it comes back only from `evict` or `reset`. A request uses it so:

    handle = cache.match(prompt[:-1])           # at least one token is left to compute
    cache.lock(handle)                          # at once: any eviction may make an unlocked handle stale
    ...                                         # allocate the other pages, prefill
    result = cache.insert(tokens, pages)        # all computed tokens; others may share them from here on
    cache.lock(result.handle)
    cache.unlock(handle)                        # in this order, so that nothing is evicted in between
    ...                                         # decode on the same pages, also those in result.duplicates
    last = cache.insert(tokens, pages)          # the request has ended
    cache.unlock(result.handle)                 # last.duplicates and a partly filled last page: free them
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from minisgl.core import CacheNode, Int32Array


class BrokenInvariant(AssertionError):
    """The cache's books do not add up: a bug in the cache or in its caller."""


def require(condition: bool, message: str) -> None:
    """Raise BrokenInvariant unless the condition holds: an `assert` that `python -O` keeps."""
    if not condition:
        raise BrokenInvariant(message)


@dataclass(slots=True, eq=False)
class CacheHandle:
    """A cached prefix. It stays valid while it is locked, whatever happens to the cache."""

    cached_len: int  # tokens, a whole number of pages
    pages: Int32Array  # the pages of the prefix, in order; the cache's, lent while locked
    node: Any = field(default=None, repr=False)  # where in the cache the prefix ends: the cache's own
    locks: int = 0  # how often this very handle is locked


class InsertResult(NamedTuple):
    handle: CacheHandle  # all whole pages given, as the cache now holds them; not locked
    duplicates: Int32Array  # given pages that the cache did not take: they still belong to the caller


class CacheObserver(Protocol):
    """Learns which pages a cache holds. It is told of a change when the cache is done with it."""

    def stored(self, parent: int | None, tokens: Int32Array, pages: Int32Array, salt: bytes) -> None:
        """Take note of new pages, one for each page_size tokens; `parent` is the cached page before, None: none is."""

    def removed(self, pages: Int32Array) -> None:
        """Take note of pages that are not cached any more."""

    def cleared(self) -> None:
        """Take note that no page is."""


class CacheManager(Protocol):
    """The counts are kept, not computed: reading them is free."""

    page_size: int

    @property
    def cached_pages(self) -> int:
        """Pages that the cache owns."""

    @property
    def locked_pages(self) -> int:
        """Cached pages of prefixes that somebody has locked."""

    @property
    def evictable_pages(self) -> int:
        """Cached pages that are not locked."""

    def match(self, tokens: Int32Array, salt: bytes = b"") -> CacheHandle:
        """Return the longest cached prefix of these tokens; it becomes the most recently used.

        What was inserted with another salt is never found.
        """

    def lock(self, handle: CacheHandle) -> None:
        """Keep a prefix from being evicted. Locks are counted; ValueError if the handle is stale."""

    def unlock(self, handle: CacheHandle) -> None:
        """Take back one lock of this handle, which is a use; ValueError if it has none left."""

    def insert(self, tokens: Int32Array, pages: Int32Array, salt: bytes = b"") -> InsertResult:
        """Offer the pages of these tokens, one for each whole page of them; ValueError for any other number.

        Tokens after the last whole page are ignored. Where the cache holds another page for the same tokens, the
        given one is a duplicate and stays the caller's; all others are the cache's from now on. The prefix becomes
        the most recently used.
        """

    def evict(self, num_pages: int) -> Int32Array:
        """Forget the least recently used unlocked pages, min(num_pages, evictable_pages) of them.

        A prefix loses its last pages first. The pages returned belong to the caller.
        """

    def forget(self, tokens: Int32Array, length: int, salt: bytes = b"") -> Int32Array:
        """Forget what is cached of these tokens beyond the whole pages of the first `length`, and what follows them.

        For pages that were inserted but never written. The pages returned belong to the caller. ValueError if any is
        locked.
        """

    def reset(self) -> Int32Array:
        """Forget all that is not locked; the pages returned belong to the caller."""

    def tree(self, max_nodes: int) -> list[CacheNode]:
        """Return some of the tree's nodes, parents first and the largest of what was found; bounded in time, too."""

    def owned_pages(self) -> Int32Array:
        """Return all cached pages, in no particular order; for checks, slow."""

    def check(self) -> None:
        """Raise BrokenInvariant if the books do not add up; for tests, slow."""


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
