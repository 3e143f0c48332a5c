"""Pools of an engine's KV cache that its scheduler owns, by page number: pages, cached prefixes, snapshots of states.

The engine owns the tensors (`KVPool`).
"""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.config.scheduler import CacheType
from minisgl.kvcache import make_cache
from minisgl.kvcache.base import CacheObserver
from minisgl.kvcache.pages import PagePool
from minisgl.kvcache.snapshots import SnapshotStore
from minisgl.kvcache.window import WindowGroup, WindowPool


@dataclass(frozen=True, slots=True)
class CachePools:
    """Pools of one engine. The cache of prefixes in `pages` tells the others what leaves it."""

    pages: PagePool
    windows: WindowPool | None  # pages of layers that attend to a window, if these have pages of their own
    snapshots: SnapshotStore | None  # states of recurrent layers, if the model has such and there is room


def make_pools(
    kind: CacheType,
    page_size: int,
    num_pages: int,
    *,
    window: WindowGroup | None = None,
    num_snapshots: int = 0,
    observer: CacheObserver | None = None,
) -> CachePools:
    """Return the pools with the cache that --cache names. `observer` is told, too, which prefixes are cached."""
    windows = None if window is None else WindowPool(window, num_pages)
    snapshots = SnapshotStore(num_snapshots, num_pages) if num_snapshots else None
    observers = [told for told in (snapshots, windows, observer) if told is not None]
    return CachePools(PagePool(num_pages, make_cache(kind, page_size, *observers)), windows, snapshots)
