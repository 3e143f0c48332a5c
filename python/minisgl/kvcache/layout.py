"""Layout of the KV cache: what each layer stores, and what a page of it costs.

All layers share one page table: a page holds `page_size` tokens of every layer. Layers with the same window form a
group, and a group may get a page table of its own, so that pages behind its window can be given back although other
layers need theirs; the radix tree then keeps holes. That comes with the first model that gains by it.
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

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers."""
        return self.page_size * self._bytes("token")

    @property
    def slot_bytes(self) -> int:
        """Bytes of the state of one slot, or of one snapshot, in all layers."""
        return self._bytes("slot")

    def state_bytes(self, num_slots: int, num_snapshots: int = 0) -> int:
        """Return the bytes of what is stored by slot, that of the scratch slot too; pages get what is left.

        A layer with a float32 state of 2 MB costs `state_bytes(256)` = 514 MB, however many pages there are.
        """
        return (num_slots + 1 + num_snapshots) * self.slot_bytes

    @property
    def has_states(self) -> bool:
        """True if some layer keeps a state by slot."""
        return self.slot_bytes > 0

    def _bytes(self, per: Literal["token", "slot"]) -> int:
        stores = [*self.upcast, *(store for layer in self.layers for store in layer)]
        return sum(store.entry_bytes for store in stores if store.per == per)
