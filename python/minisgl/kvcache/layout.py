"""Layout of the KV cache: what each layer stores, and what a page of it costs.

A page holds `page_size` tokens of every layer of a group. Mostly there is one group, of all layers. Those with a window
may form a group with pages of its own, so that what is behind the window can be given back although others need
theirs (`kvcache.window`); the full group has the others, or none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class Store:
    """One tensor of a layer: an entry of `shape` for each token in the pages, or for each slot (a recurrent state)."""

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
    window: int | None = None  # the longest of these

    def pool_bytes(self, num_pages: int, num_window_pages: int = 0) -> int:
        """Return the bytes of so many pages of each group; there are no more windowed pages than others."""
        full, windowed = self._page_bytes(windowed=False), self._page_bytes(windowed=True)
        upcast = self.page_size * sum(store.entry_bytes for store in self.upcast)
        return full * num_pages + windowed * num_window_pages + upcast * self.upcast_pages(num_pages, num_window_pages)

    def upcast_pages(self, num_pages: int, num_window_pages: int) -> int:
        """Return the pages of the largest group that stores anything, which `upcast` has room for."""
        return num_pages if self._page_bytes(windowed=False) else num_window_pages

    @property
    def slot_bytes(self) -> int:
        """Bytes of the state of one slot, or of one snapshot, in all layers."""
        return sum(store.entry_bytes for layer in self.layers for store in layer if store.per == "slot")

    def state_bytes(self, num_slots: int, num_snapshots: int = 0) -> int:
        """Return the bytes of what is stored by slot, that of the scratch slot too; pages get what is left.

        A layer with a float32 state of 2 MB costs `state_bytes(256)` = 514 MB, however many pages there are.
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
