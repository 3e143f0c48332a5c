"""K and V of 8 bits for a backend that reads 16: in every layer the pages that a step sees are copied to `KVPool.wide`.

bfloat16 and float16 have every e4m3 value, so nothing is lost. A prefill multiplies far longer than this takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import AttentionInputs, AttentionShape
from minisgl.attention.flatten import make_flattener
from minisgl.kernel.compile import SCALAR_NAMES, Compiler
from minisgl.kvcache.pool import KVPool

_THREADS = 256
_BLOCKS_OF_SM = 8
_VECTOR = 16  # values of 8 bits


@dataclass(frozen=True, slots=True)
class SeenPages:
    """Those of a step's rows, on the device."""

    pages: Tensor  # int32: the first `count` of them
    count: Tensor  # [1] int32


class Widener:
    """For one stream. Asks the host nothing, so that a CUDA graph may hold it."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._page_size = shape.page_size
        self._flatten = make_flattener(device)
        (self._kernel,) = Compiler(device).compile(
            "widen.cu",
            ("widen_pages",),
            begins_early=True,
            SCALAR=SCALAR_NAMES[shape.dtype],
            CACHE=SCALAR_NAMES[shape.kv_dtype],
        )
        self._blocks = _BLOCKS_OF_SM * torch.cuda.get_device_properties(device).multi_processor_count

    def find_pages(self, inputs: AttentionInputs) -> SeenPages:
        """Once a step."""
        table = inputs.page_table
        rows, width = table.shape
        starts, last_page_lens = table.new_empty(rows + 1), table.new_empty(rows)
        pages = table.new_empty(rows * width + 1)
        self._flatten(table, inputs.kv_lens_device, self._page_size, starts, last_page_lens, pages)
        return SeenPages(pages, starts[rows:])

    def widen(self, layer: int, kv: KVPool, seen: SeenPages) -> tuple[Tensor, Tensor]:
        """The layer's K and V as the pool has them, [pages, page_size, kv_heads, head_dim]; right are those seen."""
        keys, values = kv.keys(layer), kv.values(layer)
        assert kv.wide is not None
        wide_keys, wide_values = kv.wide
        self._kernel(
            (self._blocks,),
            _THREADS,
            keys.data_ptr(),
            values.data_ptr(),
            wide_keys.data_ptr(),
            wide_values.data_ptr(),
            seen.pages.data_ptr(),
            seen.count.data_ptr(),
            np.int32(keys[0].numel() // _VECTOR),
        )
        return wide_keys, wide_values
