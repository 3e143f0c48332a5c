"""The KV pool: the tensors that pages are places in. The only module of this folder that imports torch."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


class KVPool:
    """K and V of every layer as [pages, page_size, kv_heads, head_dim].

    One page more than `num_pages` is allocated: the last is a scratch page that nobody owns. Padding rows of a
    captured graph write there. `widened` is a dtype in which there is also room for one layer, `wide`, page for page,
    for a backend that cannot read `dtype`.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        widened: torch.dtype | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.scratch_page = num_pages
        layer = (num_pages + 1, page_size, num_kv_heads, head_dim)
        self._data = _zeros((2, num_layers, *layer), dtype, device)
        self.wide = None if widened is None else _zeros((2, *layer), widened, device)  # K and V

    @staticmethod
    def page_bytes(
        *,
        num_layers: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        widened: torch.dtype | None = None,
    ) -> int:
        of_token = num_layers * dtype.itemsize + (0 if widened is None else widened.itemsize)
        return 2 * page_size * num_kv_heads * head_dim * of_token

    def keys(self, layer: int) -> Tensor:
        return self._data[0, layer]

    def values(self, layer: int) -> Tensor:
        return self._data[1, layer]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy asks the system for zeroed memory, which costs nothing until a page is used; torch would write it all.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
