"""Layout of the KV cache: the tensors that each layer stores, and the bytes of a page.

A page holds `page_size` tokens of every layer of a group. Most models have one group of all layers. Layers with a
window may form a group with pages of its own, so that pages behind the window can be given back although other layers
still need theirs (`kvcache.window`); all other layers, if any, are the full group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class Store:
    """Tensor of a layer with an entry of `shape` for each token of the pages, or for each slot (a recurrent state)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    per: Literal["token", "slot"] = "token"

    @property
    def entry_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def paged_kv(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Store, Store]:
    """Return the stores of a layer of grouped-query attention: K, then V."""
    store = Store((num_kv_heads, head_dim), dtype)
    return store, store


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Stores of one rank's layers."""

    page_size: int  # tokens
    layers: tuple[tuple[Store, ...], ...]
    upcast: tuple[Store, ...] = ()  # K and V of one layer at a time, for a backend that cannot read FP8 pages
    windowed: frozenset[int] = frozenset()  # layers of the windowed group, if there is one
    window: int | None = None  # longest window of these layers

    def pool_bytes(self, num_pages: int, num_window_pages: int = 0) -> int:
        """Return the bytes of a pool with so many pages of each group; num_window_pages must not exceed num_pages."""
        full, windowed = self._page_bytes(windowed=False), self._page_bytes(windowed=True)
        upcast = self.page_size * sum(store.entry_bytes for store in self.upcast)
        return full * num_pages + windowed * num_window_pages + upcast * self.upcast_pages(num_pages, num_window_pages)

    def upcast_pages(self, num_pages: int, num_window_pages: int) -> int:
        """Return the number of pages that `upcast` has room for: those of the largest group that stores anything."""
        return num_pages if self._page_bytes(windowed=False) else num_window_pages

    @property
    def slot_bytes(self) -> int:
        """Bytes of the state of one slot, or of one snapshot, in all layers."""
        return sum(store.entry_bytes for layer in self.layers for store in layer if store.per == "slot")

    def state_bytes(self, num_slots: int, num_snapshots: int = 0) -> int:
        """Return the bytes of the states of all slots, the scratch slot and snapshots; pages get the remaining memory.

        A layer with a float32 state of 2 MB takes `state_bytes(256)` = 514 MB, however many pages there are.
        """
        return (num_slots + 1 + num_snapshots) * self.slot_bytes

    @property
    def has_states(self) -> bool:
        """True if some layer keeps a state by slot."""
        return self.slot_bytes > 0

    def _page_bytes(self, *, windowed: bool) -> int:
        layers = [layer for index, layer in enumerate(self.layers) if (index in self.windowed) == windowed]
        stores = [store for layer in layers for store in layer if store.per == "token"]
        return self.page_size * sum(store.entry_bytes for store in stores)
