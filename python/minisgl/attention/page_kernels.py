"""Kernels over page tables for backends that do not read them as they are, asking the host nothing.

FlashInfer takes all rows' pages as one list (CSR). FlashAttention 3 reads 16 bits, so in every layer the FP8 pages that
a step sees are copied to `KVPool.upcast_buffer`: bfloat16 and float16 have every e4m3 value, so nothing is lost, and a
prefill multiplies far longer than the copy takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minisgl.attention.base import AttentionInputs, AttentionSpec
from minisgl.kernel.select import has_kernels
from minisgl.kernel.signature import SCALAR_NAMES, KernelSpec, Macros
from minisgl.kvcache.pool import KVPool

_THREADS = 256
_BLOCKS_OF_SM = 8
_VECTOR = 16  # values of 8 bits


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
    """Return the kernel where csrc/ can be compiled, else its torch twin."""
    return _KernelFlattener(device) if has_kernels(device) else flatten_pages


def flatten_pages(
    table: Tensor, kv_lens: Tensor, page_size: int, starts: Tensor, last_page_lens: Tensor, pages: Tensor
) -> None:
    """Do a PageFlattener's work in torch, in a way that a CUDA graph can hold: nothing is read back."""
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

        self._kernel = Compiler(device).kernel(_flatten_spec)

    def __call__(
        self, table: Tensor, kv_lens: Tensor, page_size: int, starts: Tensor, last_page_lens: Tensor, pages: Tensor
    ) -> None:
        rows, width = table.shape
        if not table.is_contiguous() or len(pages) <= rows * width:
            raise ValueError("the page table must be contiguous, and the list as large as it")
        self._kernel(
            (rows,),
            _THREADS,
            table=table,
            kv_lens=kv_lens,
            starts=starts,
            last_page_lens=last_page_lens,
            pages=pages,
            rows=rows,
            width=width,
            page_size=page_size,
        )


@dataclass(frozen=True, slots=True)
class SeenPages:
    """Pages of a step's rows, on the device."""

    pages: Tensor  # int32: the first `count` of them
    count: Tensor  # [1] int32


class PageUpcaster:
    """Copies FP8 pages to the dtype that a backend reads. For one stream; a CUDA graph may hold its work."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        from minisgl.kernel.compile import Compiler

        self._page_size = spec.page_size
        self._flatten = make_flattener(device)
        self._kernel = Compiler(device).kernel(_upcast_spec, spec)
        self._blocks = _BLOCKS_OF_SM * torch.cuda.get_device_properties(device).multi_processor_count

    def find_pages(self, inputs: AttentionInputs) -> SeenPages:
        """List the pages that a step sees, once for all layers."""
        table = inputs.page_table
        rows, width = table.shape
        starts, last_page_lens = table.new_empty(rows + 1), table.new_empty(rows)
        pages = table.new_empty(rows * width + 1)
        self._flatten(table, inputs.kv_lens_device, self._page_size, starts, last_page_lens, pages)
        return SeenPages(pages, starts[rows:])

    def upcast(self, layer: int, kv: KVPool, seen: SeenPages) -> tuple[Tensor, Tensor]:
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
            wide_k=upcast_keys,
            wide_v=upcast_values,
            pages=seen.pages,
            count=seen.count,
            vectors=keys[0].numel() // _VECTOR,
        )
        return upcast_keys, upcast_values


def _flatten_spec() -> KernelSpec:
    return KernelSpec("pages.cu", "flatten_pages", {"THREADS": _THREADS})


def _upcast_spec(spec: AttentionSpec) -> KernelSpec:
    macros: Macros = {"SCALAR": SCALAR_NAMES[spec.dtype], "CACHE": SCALAR_NAMES[spec.kv_dtype]}
    return KernelSpec("widen.cu", "widen_pages", macros)
