"""The KV pool: the tensors that pages are places in. The only module of this folder that imports torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What a page holds, of one rank's KV heads."""

    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    # In which there is also room for one layer, page for page, for a backend that cannot read `dtype`.
    widened: torch.dtype | None = None

    @property
    def page_bytes(self) -> int:
        of_value = self.num_layers * self.dtype.itemsize + (0 if self.widened is None else self.widened.itemsize)
        return 2 * self.page_size * self.num_kv_heads * self.head_dim * of_value


class KVPool:
    """K and V of every layer as [pages, page_size, kv_heads, head_dim]; of one layer at a time in `wide`, if asked for.

    One page more than `num_pages` is allocated: the last is a scratch page that nobody owns. Padding rows of a
    captured graph write there.
    """

    def __init__(self, layout: KVLayout, num_pages: int, device: torch.device) -> None:
        self.num_pages = num_pages
        self.page_size = layout.page_size
        self.scratch_page = num_pages
        layer = (num_pages + 1, layout.page_size, layout.num_kv_heads, layout.head_dim)
        self._data = _zeros((2, layout.num_layers, *layer), layout.dtype, device)
        self.wide = None if layout.widened is None else _zeros((2, *layer), layout.widened, device)

    def keys(self, layer: int) -> Tensor:
        return self._data[0, layer]

    def values(self, layer: int) -> Tensor:
        return self._data[1, layer]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy asks the system for zeroed memory, which costs nothing until a page is used; torch would write it all.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
