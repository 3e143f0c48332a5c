"""The cache that keeps nothing, so that the same scheduler runs with and without prefix caching."""

from __future__ import annotations

import numpy as np

from minisgl.core import CacheNode, Int32Array
from minisgl.kvcache.base import (
    CacheHandle,
    InsertResult,
    empty_pages,
    require_locked,
    require_one_page_each,
    require_page_size,
)


class NaiveCache:
    """Cache in which nothing matches and every offered page stays the caller's."""

    keeps_prefixes = False
    cached_pages = 0
    locked_pages = 0
    evictable_pages = 0

    def __init__(self, page_size: int) -> None:
        require_page_size(page_size)
        self.page_size = page_size

    def match(self, tokens: Int32Array, salt: bytes = b"") -> CacheHandle:  # noqa: ARG002
        return CacheHandle(0, empty_pages())

    def lock(self, handle: CacheHandle) -> None:
        handle.locks += 1

    def unlock(self, handle: CacheHandle) -> None:
        require_locked(handle)
        handle.locks -= 1

    def locked_len(self, handle: CacheHandle) -> int:  # noqa: ARG002
        return 0

    def insert(self, tokens: Int32Array, pages: Int32Array, salt: bytes = b"") -> InsertResult:  # noqa: ARG002
        require_one_page_each(tokens, pages, self.page_size)
        return InsertResult(CacheHandle(0, empty_pages()), np.array(pages, dtype=np.int32))

    def evict(self, num_pages: int) -> Int32Array:  # noqa: ARG002
        return empty_pages()

    def forget(self, tokens: Int32Array, length: int, salt: bytes = b"") -> Int32Array:  # noqa: ARG002
        return empty_pages()

    def reset(self) -> Int32Array:
        return empty_pages()

    def tree(self, max_nodes: int) -> list[CacheNode]:  # noqa: ARG002
        return []

    def owned_pages(self) -> Int32Array:
        return empty_pages()

    def check(self) -> None:
        return None
