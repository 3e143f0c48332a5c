"""Page tables as one list of pages, which is how FlashInfer takes them: CSR, made on the device from what is there."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from minisgl.kernel.select import has_kernels

_THREADS = 256


class PageFlattener(Protocol):
    def __call__(
        self, table: Tensor, kv_lens: Tensor, page_size: int, starts: Tensor, last_page_lens: Tensor, pages: Tensor
    ) -> None:
        """Write where each row's pages begin in `pages`, and how many tokens its last page holds. All are int32.

        table [rows, width], kv_lens [rows] (each at least 1) -> starts [rows + 1], last_page_lens [rows],
        pages [rows * width + 1], of which the places from starts[rows] on may be written too.
        """
        ...


def make_flattener(device: torch.device) -> PageFlattener:
    return _KernelFlattener(device) if has_kernels(device) else flatten_pages


def flatten_pages(
    table: Tensor, kv_lens: Tensor, page_size: int, starts: Tensor, last_page_lens: Tensor, pages: Tensor
) -> None:
    """A PageFlattener in torch, that a CUDA graph can hold: nothing is read back."""
    rows, width = table.shape
    own = (kv_lens + page_size - 1) // page_size
    starts[:1].zero_()
    starts[1:] = own.cumsum(0)
    last_page_lens.copy_(kv_lens - (own - 1) * page_size)
    columns = torch.arange(width, device=table.device)
    places = torch.where(columns < own.unsqueeze(1), starts[:-1, None] + columns, rows * width)
    pages.scatter_(0, places.flatten(), table.flatten())


class _KernelFlattener:
    def __init__(self, device: torch.device) -> None:
        from minisgl.kernel.compile import Compiler

        (self._kernel,) = Compiler(device).compile("pages.cu", ("flatten_pages",), THREADS=_THREADS)

    def __call__(
        self, table: Tensor, kv_lens: Tensor, page_size: int, starts: Tensor, last_page_lens: Tensor, pages: Tensor
    ) -> None:
        rows, width = table.shape
        assert table.is_contiguous()
        assert len(pages) > rows * width
        self._kernel(
            (rows,),
            _THREADS,
            table.data_ptr(),
            kv_lens.data_ptr(),
            starts.data_ptr(),
            last_page_lens.data_ptr(),
            pages.data_ptr(),
            np.int32(rows),
            np.int32(width),
            np.int32(page_size),
        )
