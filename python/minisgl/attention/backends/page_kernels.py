"""Kernels over page tables, for backends that cannot read the tables directly; the host reads nothing back.

FlashInfer takes all rows' pages as one list (CSR). FlashAttention 3 reads only 16-bit K and V, so in every layer the
FP8 pages that a step sees are copied to `KVPool.upcast_buffer`. bfloat16 and float16 can represent every e4m3 value, so
nothing is lost, and the copy takes little time compared with a prefill's products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from minisgl.attention.base import AttentionInputs, AttentionSpec
from minisgl.kernel.availability import has_kernels
from minisgl.kernel.launch.signature import SCALAR_NAMES, KernelSpec, Macros
from minisgl.kvcache.kv_pool import KVPool

_THREADS = 256
_BLOCKS_OF_SM = 8
_VECTOR = 16  # values of 8 bits


@dataclass(frozen=True, slots=True)
class PageList:
    """Pages of all rows of a step in one list, on the device; all int32."""

    starts: Tensor  # [rows + 1]: begin of each row's pages in `pages`, and end of the last row's
    last_page_lens: Tensor  # [rows]: tokens in each row's last page
    pages: Tensor  # [rows * width + 1 or more]: undefined from starts[rows] on

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device) -> PageList:
        """Allocate a list for the pages of a page table [rows, width]."""
        sizes = rows + 1, rows, rows * width + 1
        return cls(*(torch.empty(size, dtype=torch.int32, device=device) for size in sizes))


class PageFlattener(Protocol):
    def __call__(self, table: Tensor, kv_lens: Tensor, page_size: int, out: PageList) -> None:
        """Write the pages of a table [rows, width] for rows of kv_lens [rows] tokens, at least 1 each; int32."""


def make_flattener(device: torch.device) -> PageFlattener:
    """Return the kernel where csrc/ can be compiled, else its torch twin."""
    if not has_kernels(device):
        return flatten_pages
    from minisgl.kernel.launch.compile import Compiler

    kernel = Compiler(device).kernel(_flatten_spec)

    def flatten(table: Tensor, kv_lens: Tensor, page_size: int, out: PageList) -> None:
        rows, width = table.shape
        if not table.is_contiguous() or len(out.pages) <= rows * width:
            raise ValueError("the page table must be contiguous, and the list as large as it")
        kernel(
            (rows,),
            _THREADS,
            table=table,
            kv_lens=kv_lens,
            starts=out.starts,
            last_page_lens=out.last_page_lens,
            pages=out.pages,
            rows=rows,
            width=width,
            page_size=page_size,
        )

    return flatten


def flatten_pages(table: Tensor, kv_lens: Tensor, page_size: int, out: PageList) -> None:
    """Implement PageFlattener in torch. The host reads nothing back, so a CUDA graph can capture it."""
    rows, width = table.shape
    own = (kv_lens + page_size - 1) // page_size
    out.starts[:1].zero_()
    out.starts[1:] = own.cumsum(0)
    out.last_page_lens.copy_(kv_lens - (own - 1) * page_size)
    columns = torch.arange(width, device=table.device)
    places = torch.where(columns < own.unsqueeze(1), out.starts[:-1, None] + columns, rows * width)
    out.pages.scatter_(0, places.flatten(), table.flatten())


class PageUpcaster:
    """Copies FP8 pages to the dtype that a backend reads. For one stream; a CUDA graph may hold its work."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        from minisgl.kernel.launch.compile import Compiler

        self._page_size = spec.page_size
        self._flatten = make_flattener(device)
        self._kernel = Compiler(device).kernel(_upcast_spec, spec)
        self._blocks = _BLOCKS_OF_SM * torch.cuda.get_device_properties(device).multi_processor_count

    def for_step(self, inputs: AttentionInputs) -> Callable[[int, KVPool], tuple[Tensor, Tensor]]:
        """List the pages that a step sees, once for all layers; return `upcast` for these pages."""
        rows, width = inputs.page_table.shape
        pages = PageList.empty(rows, width, inputs.page_table.device)
        self._flatten(inputs.page_table, inputs.kv_lens_device, self._page_size, pages)
        return partial(self.upcast, seen=pages)

    def upcast(self, layer: int, kv: KVPool, seen: PageList) -> tuple[Tensor, Tensor]:
        """Return K and V of a layer in 16 bits, [pages, page_size, kv_heads, head_dim]; other pages hold anything."""
        keys, values = kv.keys(layer), kv.values(layer)
        if kv.upcast_buffer is None:
            raise ValueError("this pool has no room to upcast pages")
        upcast_keys, upcast_values = kv.upcast_buffer
        self._kernel(
            (self._blocks,),
            _THREADS,
            k=keys,
            v=values,
            upcast_k=upcast_keys,
            upcast_v=upcast_values,
            pages=seen.pages,
            count=seen.starts[-1:],
            vectors=keys[0].numel() // _VECTOR,
        )
        return upcast_keys, upcast_values


def _flatten_spec() -> KernelSpec:
    return KernelSpec("pages.cu", "flatten_pages", {"THREADS": _THREADS})


def _upcast_spec(spec: AttentionSpec) -> KernelSpec:
    macros: Macros = {"SCALAR": SCALAR_NAMES[spec.dtype], "CACHE": SCALAR_NAMES[spec.kv_dtype]}
    return KernelSpec("upcast.cu", "upcast_pages", macros)
