"""The KV cache: who owns which page, and which prefixes are worth keeping.

Three owners share the pages: the free list (in `pages`), the cache of finished prefixes (`radix`, or `naive` that keeps
none), and the requests themselves; `pages` joins the first two, and `snapshots` says behind which pages the state of
recurrent layers is kept. This is policy on page numbers: NumPy only. The tensors that the numbers stand for live in
`pool`, as `layout` says: these two alone import torch.
"""

from __future__ import annotations

from minisgl.config.scheduler import CacheType
from minisgl.kvcache.base import CacheManager, CacheObserver
from minisgl.kvcache.naive import NaiveCache
from minisgl.kvcache.radix import RadixCache


def make_cache(kind: CacheType, page_size: int, *observers: CacheObserver) -> CacheManager:
    """Return the cache that --cache names. The naive one has nothing to tell observers."""
    return RadixCache(page_size, *observers) if kind == "radix" else NaiveCache(page_size)
