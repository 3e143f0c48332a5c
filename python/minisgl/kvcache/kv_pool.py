"""The KV pool: the tensors that hold all pages, and the states of recurrent layers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minisgl.kvcache.layout import KVLayout, Store


class KVPool:
    """K and V of every layer as [pages, page_size, kv_heads, head_dim], and the states of recurrent layers by slot.

    If V is the beginning of K, as in latent attention, only K is stored.

    One page more than `num_pages` is allocated: the last is a scratch page, to which padding rows of a captured graph
    write. Likewise row `num_slots` of the states belongs to a scratch slot. The rows after it are snapshots, which no
    layer reads; `copy_states` saves and restores them. Layers of the windowed group have `num_window_pages` and a
    scratch page.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        device: torch.device,
        *,
        num_slots: int = 0,
        num_snapshots: int = 0,
        num_window_pages: int = 0,
    ) -> None:
        self.num_pages = num_pages
        self._state_rows = num_slots + 1 + num_snapshots
        self.page_size = layout.page_size
        self.scratch_page = num_pages
        self.scratch_window_page = num_window_pages
        self.windowed = layout.windowed  # layers whose pages are the windowed group's
        pages = [num_window_pages if index in layout.windowed else num_pages for index in range(len(layout.layers))]
        # One allocation for all equal stores, because torch rounds up the size of each allocation.
        layers = [[(store, count) for store in layer] for layer, count in zip(layout.layers, pages, strict=True)]
        counts = Counter(one for layer in layers for one in layer)
        stacked = {one: self._allocate(*one, count, device) for one, count in counts.items()}
        self._states = [stack for (store, _), stack in stacked.items() if store.per == "slot"]  # [layers, rows, *shape]
        tensors: dict[tuple[Store, int], list[Tensor]] = {one: list(stack) for one, stack in stacked.items()}
        self._layers = [tuple(tensors[one].pop(0) for one in layer) for layer in layers]
        # Paged tensors of both groups, as elements that every device can move by index.
        self._paged: dict[bool, list[Tensor]] = {False: [], True: []}
        for index, (stores, layer) in enumerate(zip(layout.layers, self._layers, strict=True)):
            self._paged[index in layout.windowed] += [
                tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
                for store, tensor in zip(stores, layer, strict=True)
                if store.per == "token"
            ]
        self.upcast_buffer: tuple[Tensor, Tensor] | None = None  # K and V of one layer at a time
        if layout.upcast:
            upcast_pages = layout.upcast_pages(num_pages, num_window_pages)
            keys, values = (self._allocate(store, upcast_pages, 1, device)[0] for store in layout.upcast)
            self.upcast_buffer = keys, values

    def keys(self, layer: int) -> Tensor:
        return self._layers[layer][0]

    def values(self, layer: int) -> Tensor:
        """Return V, or K if the layer's V is the beginning of K."""
        return self._layers[layer][-1]

    def states(self, layer: int) -> tuple[Tensor, ...]:
        """Return the states of a recurrent layer, one tensor [slots + 1 + snapshots, *shape] for each of its stores."""
        return self._layers[layer]

    def clear(self, pages: Tensor, *, windowed: bool) -> None:
        """Write zeros to pages [n] int64 of a group, in which an earlier request may have left NaN."""
        for tensor in self._paged[windowed]:
            tensor.index_fill_(0, pages, 0)

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the states of all layers from row to row, one pair (from, to) after another."""
        for source, target in pairs:
            for states in self._states:
                states[:, target].copy_(states[:, source])

    def _allocate(self, store: Store, num_pages: int, count: int, device: torch.device) -> Tensor:
        entries = (num_pages + 1, self.page_size) if store.per == "token" else (self._state_rows,)
        return _zeros((count, *entries, *store.shape), store.dtype, device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy asks the system for zeroed memory, which costs nothing until a page is used; torch would write it all.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
