"""The KV cache: ownership of pages, and the cache of prefixes.

A page has one of three owners: the free list (in `pages`), the cache of prefixes (`radix`, or `naive`, which keeps
none; `base` is their contract), or a request. `PagePool` in `pages` joins the first two. `window` has the pages of
layers that attend to a window, `snapshots` the states of recurrent layers after cached pages, `page_trust` which pages
may hold NaN, and `events` tells routers what is cached. All this is policy on page numbers, in NumPy. The tensors are
in `kv_pool`, as `layout` describes them: only these two import torch.
"""

from __future__ import annotations

from minisgl.config.scheduler import CacheType
from minisgl.kvcache.base import CacheManager, CacheObserver
from minisgl.kvcache.naive import NaiveCache
from minisgl.kvcache.radix import RadixCache


def make_cache(kind: CacheType, page_size: int, *observers: CacheObserver) -> CacheManager:
    """Return the cache that --cache names. The naive one never calls observers."""
    return RadixCache(page_size, *observers) if kind == "radix" else NaiveCache(page_size)
