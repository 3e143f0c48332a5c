"""The KV cache: who owns which page, and which prefixes are worth keeping.

Three owners share the pages: the free list (`allocator`), the cache of finished prefixes (`radix`, or `naive` that
keeps none), and the requests themselves; `pages` joins the first two. This is policy on page numbers: NumPy only. The
tensors that the numbers stand for live in `pool`, the one module here that imports torch.
"""

from __future__ import annotations

from typing import Literal

from minisgl.kvcache.base import CacheManager
from minisgl.kvcache.naive import NaiveCache
from minisgl.kvcache.radix import RadixCache


def make_cache(kind: Literal["radix", "naive"], page_size: int) -> CacheManager:
    if kind == "radix":
        return RadixCache(page_size)
    if kind == "naive":
        return NaiveCache(page_size)
    raise ValueError(f"the cache is 'radix' or 'naive', not {kind!r}")
