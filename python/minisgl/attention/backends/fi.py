"""FlashInfer (Ye et al., 2025) on the paged pool: planned decode and prefill, on Ampere and later, bf16 and fp16.

If few query heads share a KV head, decode runs on CUDA cores, because reading K and V once bounds it; otherwise it runs
on tensor cores. Prefill and mixed batches run on FlashInfer's FA3 kernels on Hopper, on its FA2 kernels elsewhere.

FlashInfer plans on the host how a step is split over the GPU, which takes 70 to 300 us for a decode. A plan contains
rows and chunks of pages but no lengths, so it stays valid as long as every row has the same number of chunks. A
captured decode is planned again only when this changes, while the device works on the previous step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from flashinfer.jit import env as jit_env
from flashinfer.jit import get_batch_decode_uri, get_batch_prefill_uri
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from minisgl.attention.backends.page_kernels import PageList, make_flattener
from minisgl.attention.base import AttentionInputs, AttentionSpec, add_sinks, window_left
from minisgl.core import Int32Array
from minisgl.kvcache.kv_pool import KVPool

PLAIN_DECODE_GROUPS = (1, 2, 3)  # beyond, tensor cores are faster
_STAGING_BYTES = 8 << 20  # size in FlashInfer's own wrappers
_GRAPH_INT_BYTES = 256 << 10  # a decode's plan is a few words a row and a multiprocessor


class FlashInfer:
    """Implements attention.base.AttentionBackend. Its wrappers, of decodes and of prefills, keep a step's plan."""

    graph_safe = True
    prefill_graph_safe = False  # it plans prefills on the host
    upcasts = False
    reads_whole_pages = False

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self.plain_decode = spec.group in PLAIN_DECODE_GROUPS
        self.flatten = make_flattener(device)
        self.staging = Staging()
        self.arguments = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.page_size
        self.options = {
            "window_left": window_left(spec.window),
            "sm_scale": spec.softmax_scale,
            "q_data_type": spec.dtype,
            "kv_data_type": spec.dtype,
        }
        self._prefill_kernels = prefill_kernels(torch.cuda.get_device_capability(device))
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._workspace = torch.zeros(0, dtype=torch.uint8, device=device)
        self._prefill: Any = None
        self._decode: Any = None
        self._tables: PageList | None = None

    def plan(self, inputs: AttentionInputs) -> FlashInferPlan:
        """Plan a step that is launched operation by operation."""
        page_size = self.spec.page_size
        pages = -(-inputs.kv_lens // page_size)
        rows, width = inputs.page_table.shape
        table = PageList.empty(rows, width, self.device)
        self.flatten(inputs.page_table, inputs.kv_lens_device, page_size, table)
        page_lists = (
            _starts(pages),
            table.pages[: int(pages.sum())],
            torch.from_numpy(inputs.kv_lens - (pages - 1) * page_size),
        )
        if int(inputs.query_lens.max()) == 1:
            if self._decode is None:
                self._decode = BatchDecodeWithPagedKVCacheWrapper(
                    self.workspace(rows=1), "NHD", use_tensor_cores=not self.plain_decode, backend="fa2"
                )
            with self.staging.lent_to(self._decode):
                self._decode.plan(*page_lists, *self.arguments, **self.options)
            return FlashInferPlan(self._decode)
        if self._prefill is None:
            self._prefill = BatchPrefillWithPagedKVCacheWrapper(
                self.workspace(rows=1), "NHD", backend=self._prefill_kernels
            )
        with self.staging.lent_to(self._prefill):
            self._prefill.plan(_starts(inputs.query_lens), *page_lists, *self.arguments, causal=True, **self.options)
        return FlashInferPlan(self._prefill)

    def graphed_decode(self, rows: int) -> GraphedFlashInfer:
        return GraphedFlashInfer(self, rows)

    def workspace(self, rows: int) -> Tensor:
        """Return memory for partial results of any prefill and of graphed decodes of so many rows, shared by all."""
        spec, tiles = self.spec, 2 * self._multiprocessors // self.spec.num_kv_heads
        tile = 16 if spec.group <= 16 else 128  # query rows of a decode's tiles; of a prefill's at most 128
        graphed_tiles = max(tiles, -(-rows * spec.group // tile) + rows)
        floats = spec.num_heads * max(tiles * 128, graphed_tiles * tile) * (spec.head_dim + 1)
        if self._workspace.numel() < 4 * floats + (1 << 20):
            self._workspace = torch.zeros(4 * floats + (1 << 20), dtype=torch.uint8, device=self.device)
        return self._workspace

    def tables(self, rows: int, width: int) -> PageList:
        """Return the page list that graphed decodes of up to this many rows share: steps run one after another."""
        if self._tables is None or self._tables.pages.numel() <= rows * width:
            self._tables = PageList.empty(rows, width, self.device)
        return self._tables


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """Implements attention.base.AttentionPlan: FlashInfer's wrapper, planned for the step."""

    wrapper: Any

    def forward(self, layer: int, q: Tensor, kv: KVPool, sinks: Tensor | None = None) -> Tensor:
        out: Tensor
        if sinks is None:
            out = self.wrapper.run(q, (kv.keys(layer), kv.values(layer)))
            return out
        out, log2_sums = self.wrapper.run(q, (kv.keys(layer), kv.values(layer)), return_lse=True)
        return add_sinks(out, log2_sums * math.log(2), sinks)


class GraphedFlashInfer:
    """Implements attention.base.GraphedDecode: fixed buffers that the graph reads, and plans that are copied to them.

    The wrapper is in FlashInfer's CUDA graph mode, and is planned again when its plan no longer fits.
    """

    def __init__(self, backend: FlashInfer, rows: int) -> None:
        self._backend = backend
        self._pages: Int32Array = np.ones(rows, dtype=np.int32)
        self._ones = torch.ones(rows, dtype=torch.int32)
        self._list: PageList | None = None
        self._wrapper: Any = None

    def plan(self, inputs: AttentionInputs) -> FlashInferPlan:
        rows, width = inputs.page_table.shape
        if self._list is None:
            tables = self._backend.tables(rows, width)
            self._list = PageList(tables.starts[: rows + 1], tables.last_page_lens[:rows], tables.pages)
        self._backend.flatten(inputs.page_table, inputs.kv_lens_device, self._backend.spec.page_size, self._list)
        if self._wrapper is None:  # in the run before the capture: planning cannot be captured
            self._wrapper = self._planned_wrapper(self._list)
        return FlashInferPlan(self._wrapper)

    def prepare(self, positions: Int32Array) -> None:
        self._pages = np.ones(len(self._ones), dtype=np.int32)
        self._pages[: len(positions)] += positions // self._backend.spec.page_size
        if self._wrapper is not None:
            self._replan()

    def _planned_wrapper(self, table: PageList) -> Any:
        backend = self._backend
        workspace = backend.workspace(len(self._ones))
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=not backend.plain_decode,
            paged_kv_indptr_buffer=table.starts,
            paged_kv_indices_buffer=table.pages,
            paged_kv_last_page_len_buffer=table.last_page_lens,
            backend="fa2",
        )
        wrapper.reset_workspace_buffer(
            workspace, torch.zeros(_GRAPH_INT_BYTES, dtype=torch.uint8, device=backend.device)
        )
        with backend.staging.lent_to(wrapper):
            wrapper.plan(_starts(self._pages), table.pages[:0], self._ones, *backend.arguments, **backend.options)
            self._remember(wrapper)
        return wrapper

    def _replan(self) -> None:
        """Make the plan fit rows of `_pages` pages."""
        backend, wrapper = self._backend, self._wrapper
        unwindowed = backend.spec.window is None
        if not self._split or (unwindowed and np.array_equal(-(-self._pages // self._chunk), self._chunks)):
            return
        starts = _starts(self._pages)
        with backend.staging.lent_to(wrapper):
            # It reads host arrays only, and touches no buffer but the plan's.
            fast_decode_plan(
                wrapper,
                starts,
                wrapper._paged_kv_indices_buf,
                self._ones,
                *backend.arguments,
                **backend.options,
                global_override_indptr_cpu=starts,
            )
            self._remember(wrapper)

    def _remember(self, wrapper: Any) -> None:
        """Store what the plan depends on: if rows are split, the pages of a chunk and the chunks of each row."""
        backend, plan = self._backend, [int(value) for value in wrapper._plan_info]
        at, self._split = (plan[7], bool(plan[9])) if backend.plain_decode else (plan[9], bool(plan[14]))
        tokens = int(backend.staging.current[at : at + 4].view(torch.int32).item())
        self._chunk = max(tokens // backend.spec.page_size, 1)
        self._chunks = -(-self._pages // self._chunk)


class Staging:
    """Pinned memory for plans on their way to the device. A planner writes it and queues its copy, so it must not be
    written again before that copy is done: with the host a step ahead, one buffer would be too few.
    """

    def __init__(self) -> None:
        self._buffers = [torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(3)]
        self._copied = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._turn = 0

    @property
    def current(self) -> Tensor:
        return self._buffers[self._turn]

    @contextmanager
    def lent_to(self, wrapper: Any) -> Iterator[None]:
        """Lend a buffer to the wrapper, which may plan in this context."""
        self._turn = (self._turn + 1) % len(self._buffers)
        self._copied[self._turn].synchronize()
        wrapper._pin_memory_int_workspace_buffer = self.current
        yield
        self._copied[self._turn].record()


def prefill_kernels(capability: tuple[int, int]) -> str:
    """Return the name of FlashInfer's prefill kernels for this GPU."""
    return "fa3" if capability[0] == 9 else "fa2"


def module_path(spec: AttentionSpec, capability: tuple[int, int], *, decode: bool) -> Path:
    """Return the path of the compiled module for decodes or other steps; if absent, it must be compiled first."""
    windowed = spec.window is not None
    types = spec.dtype, spec.dtype, spec.dtype, torch.int32, spec.head_dim, spec.head_dim, 0
    if decode and spec.group in PLAIN_DECODE_GROUPS:
        name = get_batch_decode_uri(*types, windowed, False)
    else:
        name = get_batch_prefill_uri("fa2" if decode else prefill_kernels(capability), *types, windowed, False, False)
    shipped, compiled = (
        Path(folder, name, f"{name}.so") for folder in (jit_env.FLASHINFER_AOT_DIR, jit_env.FLASHINFER_JIT_DIR)
    )
    return shipped if shipped.exists() else compiled


def _starts(lengths: Int32Array) -> Tensor:
    """Return the prefix sums of [rows] lengths, [rows + 1] int32 on the host."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    return torch.from_numpy(starts)
